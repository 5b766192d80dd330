//! Logs of the node: journals, by journalctl, and files.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use proto::operator::{Log, LogsRequest, LogsResponse};
use rpc::grpc::{Call, Code, Sender, Status};

use super::OperatorService;
use super::callers::Right;
use super::files::{self, LIMIT, LogFile, LogFilter};
use super::program;
use kubernetes::kubeadm::AUDIT_LOG;

/// The folders of journals, each named after the ID of a machine.
pub const JOURNALS: &str = "/var/log/journal";
/// Maximum length in bytes of the name of a unit (UNIT_NAME_MAX of systemd's sources).
const MAX_UNIT: usize = 255;

/// Where the lines come from.
enum Source {
    /// What this program prints.
    Journal(Command),
    Files(LogFile),
}

impl OperatorService {
    pub(super) fn logs(
        &self,
        call: &Call,
        request: &LogsRequest,
        sender: &mut Sender<LogsResponse>,
    ) -> Result<(), Status> {
        let caller = self
            .callers
            .of_call(call, request.caller.as_ref(), Right::Read)?;
        let log = Log::try_from(request.log)
            .map_err(|_| Status::new(Code::InvalidArgument, "this node does not know that log"))?;
        let source = match log {
            Log::Journal | Log::Kernel => Source::Journal(self.of_journal(log, request)?),
            _ if !request.unit.is_empty() || request.boot != 0 => {
                let text = "this log is a file: it has no units and no boots";
                return Err(Status::new(Code::InvalidArgument, text));
            }
            Log::Audit => Source::Files(LogFile::of_audit(self.machine.file(AUDIT_LOG))),
            Log::Calls => Source::Files(self.record.files()),
        };
        let name = log.as_str_name().to_lowercase();
        self.record.add(
            call,
            &caller,
            format!("logs {name} {}", request.unit).trim(),
        )?;
        let mut send = |part: &[u8]| {
            sender.send(&LogsResponse {
                content: part.to_vec(),
            })
        };
        let stop = &self.machine.stop;
        match source {
            Source::Journal(mut command) => program::stream(&mut command, LIMIT, call, stop, send),
            Source::Files(files) => {
                let wanted = LogFilter {
                    since: files::since(request.since),
                    lines: request.lines,
                    follow: request.follow,
                };
                files.stream(&wanted, call, stop, &mut send)
            }
        }
    }

    fn of_journal(&self, log: Log, request: &LogsRequest) -> Result<Command, Status> {
        let mut command = Command::new("journalctl");
        command.args(["--no-pager", "--quiet", "--output=short-iso-precise"]);
        match self.folder_of_boot(request.boot)? {
            Some(folder) => command.arg(format!("--directory={}", folder.display())),
            None => command.arg(format!("--boot={}", request.boot.min(0))),
        };
        if log == Log::Kernel {
            command.arg("--dmesg");
        }
        if !request.unit.is_empty() {
            check_unit(&request.unit)?;
            command.arg(format!("--unit={}", request.unit));
        }
        if request.since > 0 {
            command.arg(format!("--since=@{}", request.since));
        }
        match request.lines {
            0 if request.follow => command.arg("--lines=all"),
            0 => &mut command,
            lines => command.arg(format!("--lines={lines}")),
        };
        if request.follow {
            command.arg("--follow");
        }
        Ok(command)
    }

    /// Returns the folder with the journal of an earlier boot, if each boot has one of its own, as where the machine has a new ID in each
    /// boot. `boot` is -1 for the one before the present one.
    fn folder_of_boot(&self, boot: i32) -> Result<Option<PathBuf>, Status> {
        if boot >= 0 {
            return Ok(None);
        }
        let own = self.machine.id();
        let folders = fs::read_dir(self.machine.file(JOURNALS))
            .into_iter()
            .flatten();
        let others = folders.flatten().filter(|it| it.file_name() != *own);
        let written = |it: &fs::DirEntry| it.metadata().and_then(|it| it.modified()).ok();
        let mut others: Vec<_> = others.map(|it| (written(&it), it.path())).collect();
        if others.is_empty() {
            return Ok(None);
        }
        others.sort();
        let number = usize::try_from(boot.unsigned_abs()).unwrap_or(usize::MAX);
        let found = others
            .len()
            .checked_sub(number)
            .map(|at| others.swap_remove(at).1);
        found.map(Some).ok_or_else(|| {
            let text = format!(
                "the node has the journals of {} earlier boots",
                others.len()
            );
            Status::new(Code::NotFound, text)
        })
    }
}

/// Checks that the text is the name of a unit of systemd (systemd.unit(5)), and no option or pattern.
pub fn check_unit(name: &str) -> Result<(), Status> {
    let is_allowed = |it: u8| it.is_ascii_alphanumeric() || b":-_.\\@".contains(&it);
    let is_name = name.len() <= MAX_UNIT
        && !name.starts_with('-')
        && name.contains('.')
        && name.bytes().all(is_allowed);
    if is_name {
        Ok(())
    } else {
        Err(Status::new(
            Code::InvalidArgument,
            "expected the name of a unit of systemd, as kubelet.service",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_units_are_accepted() {
        for good in ["kubelet.service", "a-b\\x2d_c@d:e.mount"] {
            assert_eq!(check_unit(good).map_err(|it| it.code()), Ok(()), "{good}");
        }
        let long = "x".repeat(256) + ".service";
        for bad in [
            "",
            "kubelet",
            "--file=.x",
            "*.service",
            "a b.service",
            "a\n.service",
            &long,
        ] {
            assert!(check_unit(bad).is_err(), "{bad}");
        }
    }
}
