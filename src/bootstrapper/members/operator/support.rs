//! Facts that help to find a fault. None of them is a secret: they come from programs and files that have none, and from the journal.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use proto::operator::{SupportRequest, SupportResponse};
use rpc::grpc::{Call, Sender, Status};

use super::OperatorService;
use super::callers::Right;
use super::program;

/// Time limit of one program.
const LIMIT: Duration = Duration::from_secs(60);
/// Maximum bytes of one file.
const MAX_FILE: u64 = 1 << 20;

/// The names of facts, and the programs that print them.
const PROGRAMS: [(&str, &[&str]); 14] = [
    (
        "units-failed",
        &["systemctl", "--failed", "--no-pager", "--plain"],
    ),
    (
        "units",
        &["systemctl", "list-units", "--all", "--no-pager", "--plain"],
    ),
    ("jobs", &["systemctl", "list-jobs", "--no-pager"]),
    ("disks", &["df", "--human-readable", "--print-type"]),
    ("inodes", &["df", "--inodes"]),
    (
        "disk-usage",
        &[
            "du",
            "--one-file-system",
            "--block-size=1M",
            "--threshold=16M",
            "--max-depth=8",
            "/run/state",
        ],
    ),
    ("pods", &["ls", "/var/log/pods"]),
    ("memory", &["free", "--mebi"]),
    ("processes", &["ps", "-eo", "pid,ppid,stat,rss,etime,comm"]),
    ("clock", &["chronyc", "-n", "tracking"]),
    ("time-servers", &["chronyc", "-n", "sources"]),
    ("addresses", &["ip", "address"]),
    ("routes", &["ip", "route", "show", "table", "all"]),
    (
        "journal",
        &[
            "journalctl",
            "--no-pager",
            "--quiet",
            "--boot",
            "--lines=20000",
            "--output=short-iso-precise",
        ],
    ),
];
/// The names of facts, and the files that have them.
const FILES: [(&str, &str); 6] = [
    ("os-release", "/etc/os-release"),
    ("kernel", "/proc/version"),
    ("command-line", "/proc/cmdline"),
    ("uptime", "/proc/uptime"),
    ("pressure-memory", "/proc/pressure/memory"),
    ("settings", "/etc/firstlight/node.conf"),
];

impl OperatorService {
    pub(super) fn support(
        &self,
        call: &Call,
        request: &SupportRequest,
        sender: &mut Sender<SupportResponse>,
    ) -> Result<(), Status> {
        let caller = self
            .callers
            .of_call(call, request.caller.as_ref(), Right::Read)?;
        self.record.add(call, &caller, "support")?;
        let mut send = |name: &str, content: &[u8]| {
            sender.send(&SupportResponse {
                name: name.into(),
                content: content.to_vec(),
            })
        };
        let versions = format!(
            "node {}\nbootstrapper {}\n",
            self.own_name()
                .unwrap_or_else(|why| why.message().to_owned()),
            env!("CARGO_PKG_VERSION")
        );
        send("versions", versions.as_bytes())?;
        for (name, path) in FILES {
            send(name, &of_file(&self.machine.file(path)))?;
        }
        for (name, words) in PROGRAMS {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            let result = program::stream(&mut command, LIMIT, call, &self.machine.stop, |part| {
                send(name, part)
            });
            // a fact that is missing is one, too: a program that this image does not have
            if let Err(status) = result {
                send(name, format!("{}\n", status.message()).as_bytes())?;
            }
        }
        Ok(())
    }
}

fn of_file(path: &Path) -> Vec<u8> {
    let mut content = vec![];
    match File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut content)) {
        Ok(_) => content,
        Err(error) => format!("{}: {error}\n", path.display()).into_bytes(),
    }
}
