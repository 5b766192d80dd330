//! The program that opens the state disk in the initramfs.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base::boot::timeline::Timeline;
use base::crypto::random;
use base::options::help;
use base::program::{self, Failure};
use base::stop::Stop;
use base::time;
use lexopt::Parser;
use node::options::{self, all};
use node::quotes;
use node::settings;
use proto::recoverproto;
use sys::wiping::Wiping;
use unlock::Unlock;
use unlock::options::{OPTIONS, Settings};
use unlock::peers::PeerSources;

/// Wipes freed memory, because libraries copy secrets into their buffers.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

const HELP: &str = "\
unlock: opens or formats the state disk of a confidential VM in its initramfs and mounts it

Usage: unlock [OPTIONS]

Options
";
const MORE_HELP: &str = "
Example
  unlock --cloud-provider qemu --attestation-variant qemu-vtpm

Exit codes: 0 the disk is mounted, 1 failure (the last line gives the reason), 2 invalid usage, 143 stopped by SIGTERM.
";

/// The earliest plausible time, 2026-01-01: this program is newer.
const MADE: Duration = Duration::from_secs(1_767_225_600);

fn main() -> ExitCode {
    let help = [HELP, &help(&all(OPTIONS)), MORE_HELP].concat();
    program::main("unlock", &help, |arguments| {
        let mut settings = Settings::default();
        settings.parse(arguments, settings::ARGUMENTS)?;
        if settings.initrd {
            in_initrd(settings)
        } else {
            start(settings)
        }
    })
}

/// Runs with the settings of the initrd. After a failure, does what the settings say.
fn in_initrd(mut settings: Settings) -> Result<(), Failure> {
    let mut read = Ok(());
    // one wrong setting must not hide the setting for failures
    for (source, option) in settings::read(&all(OPTIONS)) {
        let option = option.map_err(Failure::Usage);
        let parsed = option.and_then(|it| settings.parse(Parser::from_args([it]), source));
        read = read.and(parsed);
    }
    let (onfail, timeline) = (settings.onfail, Timeline::new("unlock"));
    let result = match read {
        Err(Failure::Usage(reason)) => {
            timeline.event("error", &reason);
            Err(Failure::Usage(reason))
        }
        read => read.and_then(|()| start(settings)),
    };
    match &result {
        Err(Failure::Failed(code, _)) if *code == options::STOPPED => {}
        Err(Failure::Usage(reason) | Failure::Failed(_, reason)) => onfail.act(&timeline, reason),
        _ => {}
    }
    result
}

fn start(settings: Settings) -> Result<(), Failure> {
    let (timeline, stop) = settings.shared.start("unlock")?;
    timeline.event("clock", clock(SystemTime::now()));
    if settings.initrd {
        if let Some(why) = settings::unverified_root() {
            timeline.event("unverified", why);
        }
        if let Some(why) = settings::trusted_acpi() {
            timeline.event("acpi", why);
        }
    }
    timeline.waiting_for(
        "the kernel's random numbers; give the machine a virtio-rng device or a processor with RDRAND",
        random::<1>,
    );
    let result = unlock(settings, timeline, &stop);
    timeline.peak_memory();
    result.map_err(|error| options::failed(&timeline, &stop, error))
}

/// Prints the time of the clock. It may be wrong, but attested TLS and everything else in this
/// program work without a right clock.
fn clock(now: SystemTime) -> String {
    let what = if now < UNIX_EPOCH + MADE {
        ", which is wrong; the disk opens anyway. Correct the machine's clock, or start a time service before the kubelet"
    } else {
        ""
    };
    format!("{}{what}", time::seconds(now))
}

fn unlock(settings: Settings, timeline: Timeline, stop: &Stop) -> Result<(), String> {
    let options = settings.shared;
    let (tpm, issuer) = options.attestation()?;
    let cloud = options.cloud()?;
    let sources = PeerSources::new(&settings.peers, cloud, options.metadata.as_deref());
    let unlock = Unlock {
        cloud,
        sources: sources.map_err(|error| error.to_string())?,
        disk: options.disk,
        root: options.root,
        key_file: options.key_file,
        mke2fs: settings.mke2fs,
        timeout: settings.timeout,
        recovery: SocketAddr::new(options.listen, recoverproto::PORT),
        issuer: quotes::reported(timeline, issuer, tpm.clone()),
        demands: options.services,
        tpm,
        stop: stop.clone(),
        timeline,
    };
    unlock.run().map_err(|error| error.to_string())
}
