//! `firstlight logs`: prints the logs of a node.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base::options::Opt;
use proto::operator::{LOGS, Log, LogsRequest, LogsResponse};
use rpc::grpc::{CallOptions, Code, Status};

use super::session::{CERTIFICATE, KEY, Operator, POLICY};
use crate::shell::{
    error::Error,
    progress::{Progress, lines},
    usage::{Command, Given},
};
use crate::workspace::{
    connect::ATTESTATION_KEY,
    master_secret::{MASTER_SECRET, SHARE_FILE},
    options::{TIMEOUT, VARIANT, time},
    sources::{KEPT, OFFLINE},
    state::{CLUSTER_ID, CLUSTER_STATE},
};

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "logs",
    summary: "print the logs of a node",
    about: &[
        "Asks a member for its journal: of one unit or of all, of this boot or of an earlier one; for the kernel's messages; for the \
         audit log of its API server; or for the record of operators' calls. It works when Kubernetes does not: the node is verified \
         like in `firstlight verify`, and the operator proves to have the master secret, or a certificate by it. The node writes each \
         call down.",
        "--audit and --calls print the file that is written now; with --since or --lines also the older ones beside it, which an API \
         server keeps for 30 days, and of which there are 10 at most, of 100 MB.",
    ],
    operand: Some(super::NODE),
    options: &[
        Opt::value(
            "unit",
            "UNIT",
            "only this unit of systemd, as kubelet or containerd.service",
        ),
        Opt::value(
            "boot",
            "NUMBER",
            "an earlier boot: -1 is the one before the present one",
        )
        .or("0"),
        Opt::flag("kernel", "only the kernel's messages"),
        Opt::flag(
            "audit",
            "the audit log of the API server on this control plane",
        ),
        Opt::flag("calls", "the record of operators' calls to this node"),
        Opt::flag("follow", "go on with new lines until an interrupt"),
        Opt::value(
            "since",
            "TIME",
            "only lines of this time until now, as 10m or 2h",
        ),
        Opt::value("lines", "NUMBER", "only this many lines at the end"),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        ATTESTATION_KEY,
        CLUSTER_STATE,
        CLUSTER_ID,
        MASTER_SECRET,
        SHARE_FILE,
        CERTIFICATE,
        KEY,
        TIMEOUT.or("5m"),
    ],
    examples: &[
        "firstlight logs worker-0 --unit kubelet --since 10m",
        "firstlight logs 10.42.1.100 --kernel",
        "firstlight logs control-plane-0 --audit --since 24h",
    ],
    run,
};

fn run(given: &Given) -> Result<(), Error> {
    let (node, mut request) = (given.operand()?, request(given)?);
    let operator = Operator::of(given)?;
    let progress = Progress::on_stderr();
    let session = operator.connect(&node, &progress)?;
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

fn request(given: &Given) -> Result<LogsRequest, Error> {
    let chosen = [
        ("kernel", Log::Kernel),
        ("audit", Log::Audit),
        ("calls", Log::Calls),
    ];
    let chosen: Vec<Log> = chosen
        .into_iter()
        .filter(|(name, _)| given.has(name))
        .map(|(_, log)| log)
        .collect();
    let log = match chosen[..] {
        [] => Log::Journal,
        [log] => log,
        _ => {
            return Err(Error::Usage(
                "--kernel, --audit, --calls: give one of them".into(),
            ));
        }
    };
    let is_file = matches!(log, Log::Audit | Log::Calls);
    if is_file && ["unit", "boot"].iter().any(|name| given.has(name)) {
        return Err(Error::Usage(
            "--unit and --boot are for the journal: --audit and --calls are files".into(),
        ));
    }
    if log == Log::Kernel && given.has("unit") {
        return Err(Error::Usage(
            "--kernel and --unit: give one of the two".into(),
        ));
    }
    let since = if given.has("since") {
        SystemTime::now()
            .checked_sub(given.parsed::<Duration, _>("since", time)?)
            .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
            .unwrap_or_default()
            .as_secs()
    } else {
        0
    };
    Ok(LogsRequest {
        caller: None,
        log: log.into(),
        unit: if given.has("unit") {
            unit(&given.text("unit")?)
        } else {
            String::new()
        },
        boot: given.parsed("boot", |text| text.parse::<i32>())?,
        follow: given.has("follow"),
        since,
        lines: if given.has("lines") {
            given.parsed("lines", |text| text.parse::<u32>())?
        } else {
            0
        },
    })
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
