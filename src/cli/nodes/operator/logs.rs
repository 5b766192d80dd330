//! `firstlight logs`: prints the logs of a node.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use proto::operator::{LOGS, Log, LogsRequest, LogsResponse};
use rpc::grpc::{CallOptions, Code, Status};

use super::session::{Operator, OperatorOptions};
use crate::shell::{
    error::Error,
    progress::{Progress, lines},
};
use crate::workspace::options::time;

/// Print the logs of a node
///
/// Asks a member for its journal: of one unit or of all, of this boot or of an earlier one; for the kernel's
/// messages; for the audit log of its API server; or for the record of operators' calls. It works when Kubernetes
/// does not: the node is verified like in `firstlight verify`, and the operator proves to have the master secret, or
/// a certificate by it. The node writes each call down.
///
/// --audit and --calls print the file that is written now; with --since or --lines also the older ones beside it,
/// which an API server keeps for 30 days, and of which there are 10 at most, of 100 MB.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight logs worker-0 --unit kubelet --since 10m
  firstlight logs 10.42.1.100 --kernel
  firstlight logs control-plane-0 --audit --since 24h")]
pub(crate) struct CommandLine {
    /// The name of a node in the state file, or HOST[:PORT]
    node: String,
    /// Only this unit of systemd, as kubelet or containerd.service
    #[arg(long, value_name = "UNIT", conflicts_with_all = ["kernel", "audit", "calls"])]
    unit: Option<String>,
    /// An earlier boot: -1 is the one before the present one
    #[arg(
        long,
        value_name = "NUMBER",
        default_value = "0",
        allow_negative_numbers = true,
        conflicts_with_all = ["audit", "calls"]
    )]
    boot: i32,
    /// Only the kernel's messages
    #[arg(long, conflicts_with_all = ["audit", "calls"])]
    kernel: bool,
    /// The audit log of the API server on this control plane
    #[arg(long, conflicts_with = "calls")]
    audit: bool,
    /// The record of operators' calls to this node
    #[arg(long)]
    calls: bool,
    /// Go on with new lines until an interrupt
    #[arg(long)]
    follow: bool,
    /// Only lines of this time until now, as 10m or 2h
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<Duration>,
    /// Only this many lines at the end
    #[arg(long, value_name = "NUMBER")]
    lines: Option<u32>,
    #[command(flatten)]
    pub operator: OperatorOptions,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "5m")]
    timeout: Duration,
}

/// Runs the command.
pub fn run(given: &CommandLine) -> Result<(), Error> {
    let (node, mut request) = (&given.node, given.request());
    let operator = Operator::of(&given.operator, given.timeout)?;
    let progress = Progress::on_stderr();
    let session = operator.connect(node, &progress)?;
    drop(progress);
    let mut out = Lines::default();
    session.call(|channel, caller, options| {
        request.caller = Some(caller);
        let unlimited = CallOptions::default();
        let options = if request.follow { &unlimited } else { options };
        let answers = channel.server_streaming::<_, LogsResponse>(LOGS, &request, options)?;
        for answer in answers {
            out.write(&answer?.content).map_err(closed)?;
        }
        out.end().map_err(closed)
    })
}

fn closed(error: io::Error) -> Status {
    Status::new(Code::Internal, format!("standard output: {error}"))
}

impl CommandLine {
    fn request(&self) -> LogsRequest {
        let log = if self.kernel {
            Log::Kernel
        } else if self.audit {
            Log::Audit
        } else if self.calls {
            Log::Calls
        } else {
            Log::Journal
        };
        let since = self
            .since
            .and_then(|time| SystemTime::now().checked_sub(time));
        let since = since.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        LogsRequest {
            caller: None,
            log: log.into(),
            unit: self.unit.as_deref().map(unit).unwrap_or_default(),
            boot: self.boot,
            follow: self.follow,
            since: since.unwrap_or_default().as_secs(),
            lines: self.lines.unwrap_or_default(),
        }
    }
}

/// Returns the name of a unit; without an ending it is a service.
pub fn unit(text: &str) -> String {
    if text.contains('.') {
        text.into()
    } else {
        format!("{text}.service")
    }
}

/// Prints whole lines. What a terminal does not show as it is, is escaped: programs of tenants write into the journal, too.
#[derive(Default)]
struct Lines {
    begun: Vec<u8>,
}

impl Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.begun.extend_from_slice(bytes);
        let Some(end) = self.begun.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(());
        };
        let rest = self.begun.split_off(end + 1);
        let whole = std::mem::replace(&mut self.begun, rest);
        print(&whole)
    }

    fn end(&mut self) -> io::Result<()> {
        match std::mem::take(&mut self.begun) {
            rest if rest.is_empty() => Ok(()),
            rest => print(&[&rest[..], b"\n"].concat()),
        }
    }
}

fn print(whole: &[u8]) -> io::Result<()> {
    let text = lines(&String::from_utf8_lossy(whole));
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}
