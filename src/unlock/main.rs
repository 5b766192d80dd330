//! The program that opens the state disk in the initramfs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use base::program;
use base::stop::Stop;
use base::timeline::Timeline;
use node::options::{self, Options};
use node::quotes;
use proto::recoverproto;
use sys::wiping::Wiping;
use unlock::Unlock;

/// Wipes freed memory, because libraries copy secrets into their buffers.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

const HELP: &str = "\
unlock: opens or formats the state disk of a confidential VM in its initramfs and mounts it

Usage: unlock [OPTIONS]

Options
  --mke2fs PATH        the program that makes the ext4 file system [/sbin/mke2fs]
";
const MORE_HELP: &str = "
Example
  unlock --csp qemu --variant qemu-vtpm

Exit codes: 0 the disk is mounted, 1 failure (the last line gives the reason), 2 invalid usage, 143 stopped by SIGTERM.
";

fn main() -> ExitCode {
    program::main(
        "unlock",
        &[HELP, &options::help(), MORE_HELP].concat(),
        |arguments| {
            let (mut options, mut mke2fs) = (Options::new(), PathBuf::from("/sbin/mke2fs"));
            options.parse(arguments, |name, arguments| {
                let is_known = name == "mke2fs";
                if is_known {
                    mke2fs = arguments.value()?.into();
                }
                Ok(is_known)
            })?;
            let (timeline, stop) = options.start("unlock")?;
            let result = unlock(options, mke2fs, timeline, &stop);
            timeline.peak_memory();
            result.map_err(|error| options::failed(&timeline, &stop, error))
        },
    )
}

fn unlock(
    options: Options,
    mke2fs: PathBuf,
    timeline: Timeline,
    stop: &Stop,
) -> Result<(), String> {
    let (tpm, issuer) = options.attestation()?;
    let (cloud, metadata) = options.cloud()?;
    let unlock = Unlock {
        cloud,
        metadata,
        disk: options.disk,
        root: options.root,
        key_file: options.key_file,
        mke2fs,
        recovery: SocketAddr::new(options.listen, recoverproto::PORT),
        issuer: quotes::reported(timeline, issuer),
        tpm,
        stop: stop.clone(),
        timeline,
    };
    unlock.run().map_err(|error| error.to_string())
}
