//! `firstlight status`: shows the state of a node, or of all nodes of the cluster.
//!
//! A node has a server for each state. Each server except the last proves what the node runs, and
//! by PCR 15 to which cluster it belongs:
//!
//! | port | server | the node's state |
//! |---|---|---|
//! | 9999 | recovery server | a node in its initramfs that waits for the key of its disk |
//! | 9000 | InitServer | a booted node that waits for the operator's init |
//! | 9000 | member | a booted node that belongs to a cluster |
//! | 30090 | join service | a control plane that admits other nodes if they prove what they run |

mod answer;
pub mod cluster;
mod inquiry;
pub mod report;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::connect::read_policy_with;
use super::output::{Output, say, say_all};
use super::progress::printable;
use super::state::State;
use super::timeline;
use answer::Answer;
use base::crypto::CLUSTER_ID_LEN;
use base::program::Failure;
use inquiry::Inquiry;
use report::Report;
use rpc::grpc::{Code, Status};
use verifier::{KeyName, Variant};

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// Which nodes are asked.
    pub nodes: Nodes,
    /// The attestation policy that the node must meet.
    pub policy: PathBuf,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// Additional attestation keys that are accepted.
    pub keys: Vec<KeyName>,
    /// The state file, which has the cluster's ID and its nodes' attestation keys; it may be
    /// missing.
    pub state: PathBuf,
    /// The cluster's ID; replaces the one in the state file.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// Whether to ask for the boot record of the node and draw it.
    pub timeline: bool,
    /// The file for the drawing as a picture.
    pub svg: Option<PathBuf>,
    /// The form of the output; with JSON, the record of the boot is a part of it.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// The nodes that are asked.
#[derive(Debug)]
pub enum Nodes {
    /// One node: its host, or the address of one of its servers.
    One(String),
    /// All nodes that the API server in this kubeconfig lists.
    Cluster(Vec<PathBuf>),
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let state = State::find(&options.state).map_err(Failure::failed)?;
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let inquiry = Inquiry {
        variant: options.variant,
        policy: &read_policy_with(&options.policy, &options.keys, known)?,
        cluster: options
            .cluster_id
            .or(state.as_ref().and_then(|state| state.cluster_id)),
        deadline: Instant::now() + options.timeout,
    };
    match &options.nodes {
        Nodes::One(address) => {
            let report = inquiry.ask(address)?;
            show(&report, options)?;
            report.result()
        }
        Nodes::Cluster(kubeconfigs) => cluster::run(&inquiry, kubeconfigs, options.output),
    }
}

/// Prints the state of one node.
fn show(report: &Report, options: &Options) -> Result<(), Failure> {
    match options.output {
        Output::Text => {
            say_all(&report.text())?;
            if options.timeline || options.svg.is_some() {
                show_timeline(report, options.svg.as_deref())?;
            }
            Ok(())
        }
        Output::Json => {
            let record = record_of(report).and_then(Result::ok);
            let shown = record.filter(|_| options.timeline).map(timeline::json);
            options.output.json(&report.json(shown))?;
            if let (Some(record), Some(picture)) = (record, &options.svg) {
                timeline::draw(&timeline::steps(&timeline::events(record)), picture)?;
            }
            Ok(())
        }
    }
}

/// Draws the first boot record that a server sent. The verdict, not this function, reports a node
/// that cannot be asked.
fn show_timeline(report: &Report, svg: Option<&Path>) -> Result<(), Failure> {
    match record_of(report) {
        None => Ok(()),
        Some(Ok(record)) => {
            timeline::show(&format!("the record of {}", report.address), record, svg)
        }
        Some(Err(status)) if status.code() == Code::Unimplemented => {
            say("Timeline: this node does not keep a record of its boot, or does not give it")
        }
        Some(Err(status)) => say(format_args!("Timeline: {}", printable(&status.to_string()))),
    }
}

/// Returns the first boot record that a server sent, or else why it sent none; `None` if no server
/// is attested.
fn record_of(report: &Report) -> Option<Result<&str, &Status>> {
    let records = report
        .answers
        .iter()
        .filter_map(|(_, answer)| match answer {
            Answer::Verified { record, .. } => Some(record.as_deref()),
            _ => None,
        });
    records.max_by_key(Result::is_ok)
}
