//! `firstlight etcd restore`: sends a snapshot to the control plane that is left, which restores etcd.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use kubernetes::etcd_signature;
use proto::operator::{Caller, RESTORE_ETCD, RestoreEtcdRequest, RestoreEtcdResponse};
use rpc::grpc::{CallOptions, Channel, Code, Requests, Status};

use crate::nodes::operator::session::Operator;
use crate::shell::{
    consent,
    error::Error,
    files::{self, FileError},
    output::say,
    progress::Progress,
};

/// Bytes of a part of the snapshot, which fits the size of a request.
const PART: usize = 16 << 10;

/// What the command line asks for.
pub struct Options {
    /// The snapshot, with its signature beside it; `None` to undo.
    pub file: Option<PathBuf>,
    /// The name of the node, and where it is.
    pub node: (String, String),
    /// Whether only the plan is wanted.
    pub is_dry_run: bool,
    /// Whether nobody is asked.
    pub is_agreed: bool,
    /// The SHA-256 of a snapshot without a signature; or empty.
    pub unsigned: String,
}

/// Runs the command.
pub fn run(options: &Options, operator: &Operator) -> Result<(), Error> {
    if let Some(file) = &options.file {
        File::open(file).map_err(|error| FileError::Io("open", file.clone(), error))?;
    }
    let progress = Progress::on_stderr();
    let (node, at) = &options.node;
    let session = operator.connect(at, &progress)?;
    progress.phase(match options.file {
        Some(_) => format!("sending the snapshot to {node}"),
        None => format!("asking {node}"),
    });
    let mut shown = Some(progress);
    session.call(|channel, caller, _| call(options, channel, caller, &mut shown))
}

fn call(
    options: &Options,
    channel: &Channel,
    caller: Caller,
    shown: &mut Option<Progress>,
) -> Result<(), Status> {
    let (mut requests, mut answers) = channel
        .streaming::<RestoreEtcdRequest, RestoreEtcdResponse>(
            RESTORE_ETCD,
            &CallOptions::default(),
        )?;
    requests.send(&RestoreEtcdRequest {
        caller: Some(caller),
        node: options.node.0.clone(),
        dry_run: options.is_dry_run,
        undo: options.file.is_none(),
        unsigned: options.unsigned.clone(),
        ..RestoreEtcdRequest::default()
    })?;
    if let Some(file) = &options.file {
        // a node that refuses the call says why in its answer
        if let Err(Sending::File(error)) = send(file, &mut requests) {
            return Err(own(&file.display().to_string(), &error));
        }
    }
    for answer in answers.by_ref() {
        let answer = answer?;
        // its line on the terminal would overwrite the text
        shown.take();
        if !answer.question {
            say(answer.text).map_err(|error| Status::new(Code::Internal, error.to_string()))?;
            continue;
        }
        if !options.is_agreed {
            let agreed = consent::ask(&answer.text, "--dry-run");
            agreed.map_err(|error| Status::new(Code::Cancelled, error.to_string()))?;
        }
        requests.send(&RestoreEtcdRequest {
            agreed: true,
            ..RestoreEtcdRequest::default()
        })?;
    }
    Ok(())
}

/// Why a snapshot is not sent.
enum Sending {
    File(io::Error),
    Call,
}

fn send(path: &Path, requests: &mut Requests<RestoreEtcdRequest>) -> Result<(), Sending> {
    let mut file = File::open(path).map_err(Sending::File)?;
    let mut part = vec![0; PART];
    loop {
        let len = file.read(&mut part).map_err(Sending::File)?;
        if len == 0 {
            break;
        }
        let request = RestoreEtcdRequest {
            snapshot: part[..len].to_vec(),
            ..RestoreEtcdRequest::default()
        };
        requests.send(&request).map_err(|_| Sending::Call)?;
    }
    let signature = etcd_signature::file_of(path);
    let signature = match files::read(&signature) {
        Ok(content) => content.to_vec(),
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => vec![],
        Err(error) => return Err(Sending::File(io::Error::other(error.to_string()))),
    };
    let last = RestoreEtcdRequest {
        signature,
        uploaded: true,
        ..RestoreEtcdRequest::default()
    };
    requests.send(&last).map_err(|_| Sending::Call)
}

fn own(what: &str, error: &io::Error) -> Status {
    Status::new(Code::Internal, format!("{what}: {error}"))
}
