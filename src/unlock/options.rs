//! The options of `unlock`.

use std::path::PathBuf;
use std::time::Duration;

use base::options::{Opt, Table, put};
use base::program::{Failure, parsed, text};
use cloud::peers::parse_hosts;
use lexopt::Parser;
use node::options;

use crate::initrd::OnFailure;

/// The values of the options.
pub struct Settings {
    /// The options that the program shares with `bootstrapper`.
    pub shared: options::Options,
    /// The program that makes the file system.
    pub mke2fs: PathBuf,
    /// The hosts that are asked for the disk's key first.
    pub peers: Vec<String>,
    /// How long to wait for the key of the disk; `None`: without end.
    pub timeout: Option<Duration>,
    /// Whether the program runs in an initrd.
    pub initrd: bool,
    /// What happens after a failure in an initrd.
    pub onfail: OnFailure,
}

const MKE2FS: &str = "/sbin/mke2fs";

/// The options that only this program has.
pub const OPTIONS: &Table<Settings> = &[
    (Opt::value("mke2fs", "PATH", "the program that makes the ext4 file system").or(MKE2FS),
     |it, _, value| put(&mut it.mke2fs, Ok(value.into()))),
    (Opt::value("peers", "HOST[,HOST..]", "join services to ask first for the disk's key: control planes or their load balancer, by name or address; the hosts in the disk's header and in the machine's metadata follow").setting(),
     |it, _, value| put(&mut it.peers, parse_hosts(&text(value)?).map_err(|why| Failure::Usage(format!("--peers: {why}"))))),
    (Opt::value("timeout", "SECONDS", "how long to wait for the key of the disk; 0: without end").or("0").setting(),
     |it, name, value| put(&mut it.timeout, parsed(name, value).map(|seconds| (seconds > 0).then(|| Duration::from_secs(seconds))))),
    (Opt::flag("initrd", "also takes settings from /etc/firstlight/node.conf and the kernel command line (firstlight.NAME=VALUE), and obeys --onfail after a failure"),
     |it, _, _| put(&mut it.initrd, Ok(true))),
    (Opt::value("onfail", "ACTION", "wait, reboot, poweroff, or shell: leave it to the initrd").or("reboot").setting(),
     |it, name, value| put(&mut it.onfail, parsed(name, value))),
];

impl Default for Settings {
    fn default() -> Self {
        Settings {
            shared: options::Options::new(),
            mke2fs: MKE2FS.into(),
            peers: vec![],
            timeout: None,
            initrd: false,
            onfail: OnFailure::Reboot,
        }
    }
}

impl Settings {
    /// Parses the arguments that `source` gave.
    pub fn parse(&mut self, arguments: Parser, source: &'static str) -> Result<(), Failure> {
        options::parse(OPTIONS, arguments, source, self, |it| &mut it.shared)
    }
}
