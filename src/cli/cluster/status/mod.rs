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

pub mod answer;
pub mod cluster;
pub mod ends;
pub mod inquiry;
pub mod listed;
pub mod objects;
pub mod report;
pub mod served;
#[cfg(test)]
mod testing;
pub mod view;
mod waiting;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cluster::timeline;
use crate::shell::{
    error::Error,
    output::{Output, say, say_all},
    progress::printable,
};
use crate::workspace::{
    connect::{KeyOptions, NodeOption},
    known_nodes,
    kubeconfig::{self, KubeconfigOption},
    options::{Expectation, PolicyOptions, time},
    state::ClusterOptions,
};
use answer::ServerAnswer;
use clap::Args;
use inquiry::Inquiry;
use report::StatusReport;
use rpc::grpc::{Code, Status};

/// Show the state of a node, or of all nodes of the cluster
///
/// Asks the three ports on which a node can have a server, all at once: the recovery server of a node that waits in
/// its initramfs (9999), the InitServer of a node that waits for its init, or the server of a member (9000), and the
/// join service of a control plane (30090). With a port, it asks only that one. For each server it shows whether the
/// server answers, whether the node meets the policy, to which cluster it belongs (by PCR 15), or what it waits for.
///
/// The exit code is 0 for a member of the cluster whose ID is given or in the state file, 3 if a register does not
/// meet the policy, 4 if no server answers, 5 for a node that waits for the key of its disk, 6 for a fresh node that
/// belongs to no cluster, 7 for a member of another cluster or if the ID is unknown, and 8 if only a join service
/// answers, which proves nothing about its node.
///
/// Without HOST it asks all nodes that the API server of the cluster lists, each at its internal address, and prints
/// a table: what Kubernetes knows of the node, and the state that the node proves. Below the table it explains each
/// node that is not a member, names those without a network plugin, shows image, ticket, disk and certificates of
/// each node, and lists what waits. The exit code is 0 if all nodes are members, and otherwise that of the worst
/// node: 3, 7, 8, 6, 5, 4, in this order.
#[derive(Debug, Args)]
#[command(mut_arg("host", |it| it.help("The node, or one of its servers; without it, all nodes of the cluster")), after_help = "Examples:
  firstlight status --policy policy.json
  firstlight status 10.42.1.100 --policy policy.json
  firstlight status [fd00::1]:9999 --policy policy.json --timeout 5s
  firstlight status 10.42.1.100 --policy policy.json --timeline --svg boot.svg")]
pub(crate) struct CommandLine {
    #[command(flatten)]
    node: NodeOption,
    #[command(flatten)]
    pub policy: PolicyOptions,
    #[command(flatten)]
    keys: KeyOptions,
    #[command(flatten)]
    cluster: ClusterOptions,
    /// Also draw how long each step of the node's last boot took, as `firstlight timeline` does
    #[arg(long)]
    timeline: bool,
    /// Also write the chart as an SVG picture to this file, which is replaced if it exists
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30s")]
    timeout: Duration,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let nodes = match self.node.host() {
            Some(host) => Nodes::One(host.into()),
            None if self.timeline || self.svg.is_some() => {
                let text = "--timeline and --svg need a node: firstlight status HOST --timeline";
                return Err(Error::Usage(text.into()));
            }
            None => Nodes::Cluster(self.kubeconfig.paths()),
        };
        Ok(Options {
            nodes,
            expected: Expectation::of(self.policy, self.keys, self.cluster)?,
            timeline: self.timeline,
            svg: self.svg,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// Which nodes are asked.
    pub nodes: Nodes,
    /// What each node must be.
    pub expected: Expectation,
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
pub fn run(options: &Options) -> Result<(), Error> {
    let variant = options.expected.variant;
    let (policy, cluster) = options.expected.read(variant)?;
    let inquiry = Inquiry {
        variant,
        policy: &policy,
        cluster,
        deadline: Instant::now() + options.timeout,
    };
    match &options.nodes {
        Nodes::One(address) => {
            let report = inquiry.ask(address)?;
            show(&report, options)?;
            report.result()
        }
        Nodes::Cluster(kubeconfigs) => {
            let result = cluster::run(&inquiry, kubeconfigs, options.output);
            // a node in another state does not matter; an API server that does not answer does
            if matches!(result, Ok(()) | Err(Error::State(..))) {
                keep_nodes(options, kubeconfigs);
            }
            result
        }
    }
}

/// Saves the nodes in the state file, for a recovery without the API server.
fn keep_nodes(options: &Options, kubeconfigs: &[PathBuf]) {
    if let Ok(client) = kubeconfig::client(kubeconfigs) {
        known_nodes::keep(&client.within(options.timeout), &options.expected.state);
    }
}

/// Prints the state of one node.
fn show(report: &StatusReport, options: &Options) -> Result<(), Error> {
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
fn show_timeline(report: &StatusReport, svg: Option<&Path>) -> Result<(), Error> {
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
fn record_of(report: &StatusReport) -> Option<Result<&str, &Status>> {
    let records = report
        .answers
        .iter()
        .filter_map(|(_, answer)| match answer {
            ServerAnswer::Verified { record, .. } => Some(record.as_deref()),
            _ => None,
        });
    records.max_by_key(Result::is_ok)
}
