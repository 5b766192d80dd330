//! `firstlight recover`: sends the master secret to nodes that wait for the key of their disks.
//!
//! `one` recovers one node, and `fleet` all nodes of a cluster. `targets` has the sources of their
//! addresses, and `board` the table that shows them. `calls` are the calls of a node's recovery
//! server.

mod board;
mod calls;
mod fleet;
mod one;
mod targets;

pub use calls::{facts, json, status};

use std::path::PathBuf;
use std::time::Duration;

use crate::shell::{error::Error, output::Output};
use crate::workspace::{
    connect::{NodeOption, TrustOptions},
    master_secret::SecretOptions,
    options::{PolicyOptions, time},
    state::STATE_FILE,
};
use clap::Args;
use proto::recoverproto;

/// Send the master secret to nodes that wait for the key of their disks
///
/// A node waits in its initramfs if its cluster cannot give it the key of its disk, because no other control plane
/// runs. This command connects to the node over attested TLS, checks that it meets the policy, and sends it the
/// master secret. It succeeds when the node has opened its disk. If several nodes share an address, each run recovers
/// one of them.
///
/// The policy, the state file or the command line must name the node's attestation key. The state file has the keys
/// of nodes that were initialized or recovered with it. Every node shows its key on its console, and a running
/// cluster has it in its records.
///
/// When a whole cluster was off, recover control planes until more than half of them run. Then the cluster is back,
/// and opens the disks of its other nodes by itself.
///
/// With --all the command does this for the whole cluster. It takes addresses, roles and attestation keys from the
/// state file, where `status` and `apply` save them, or from --nodes. Control planes get the key first. A worker gets
/// it only if it does not come back by itself. The command ends when each node is a member of the cluster again, or
/// at --timeout. Run it again to continue: it recognizes the nodes that are back.
#[derive(Debug, Args)]
#[command(
    mut_arg("host", |it| it.conflicts_with("all")),
    mut_arg("endpoint", |it| it.conflicts_with("all").help("The node; the default port is 9999")),
    after_help = "Examples:
  firstlight recover --endpoint 10.42.1.100 --policy policy.json --status
  firstlight recover --endpoint 10.42.1.100 --policy policy.json --master-secret /media/safe/mastersecret.json
  firstlight recover --endpoint 10.42.1.100 --policy policy.json --share alice.txt --share bob.txt --share -
  firstlight recover --all --policy policy.json --dry-run
  firstlight recover --all --policy policy.json --timeout 30m",
)]
pub(crate) struct CommandLine {
    #[command(flatten)]
    node: NodeOption,
    /// Recover all nodes of the cluster
    #[arg(long)]
    all: bool,
    /// With --all: these nodes in place of those in the state file: a file with a list of machines
    /// (docs/metadata.md), or addresses and networks separated by commas: 10.42.1.100,10.42.2.0/24; in a network, the
    /// nodes that wait are found by their port 9999
    #[arg(long, requires = "all", value_name = "LIST")]
    nodes: Option<String>,
    /// With --all: verify each node that waits, and send nothing
    #[arg(long, requires = "all")]
    dry_run: bool,
    /// With --all: how many nodes are asked at the same time, 1 to 64
    #[arg(long, requires = "all", value_name = "COUNT", value_parser = at_once, default_value = "8")]
    at_once: usize,
    /// With --all: how long workers may take to come back by themselves, from when most control planes have their
    /// disks open; then they get the key, too
    #[arg(long, requires = "all", value_name = "TIME", value_parser = time, default_value = "5m")]
    rejoin_within: Duration,
    #[command(flatten)]
    pub policy: PolicyOptions,
    #[command(flatten)]
    secret: SecretOptions,
    #[command(flatten)]
    trust: TrustOptions,
    /// The state file, which has the attestation keys of known nodes; may be missing
    #[arg(long, value_name = "FILE", default_value = STATE_FILE)]
    state: PathBuf,
    /// Also open a disk whose header does not name its cluster, such as a disk of Constellation; use it only for a
    /// disk that you know to be this node's; needs the measurement salt of the state file
    #[arg(long, conflicts_with = "all")]
    migrate: bool,
    /// Only show what the node waits for: the disk, since when, what it tried
    #[arg(long, conflicts_with_all = ["all", "master_secret", "share"])]
    status: bool,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10m")]
    timeout: Duration,
}

impl CommandLine {
    fn of_one(self) -> Result<one::Options, Error> {
        Ok(one::Options {
            endpoint: self.node.endpoint(recoverproto::PORT)?,
            variant: self.policy.variant()?,
            policy: self.policy.policy,
            trust: self.trust.trust(),
            state: self.state,
            action: if self.status {
                one::RecoverAction::Status
            } else {
                one::RecoverAction::Push {
                    master_secret: self.secret.source(),
                    is_migrating: self.migrate,
                }
            },
            output: self.output,
            timeout: self.timeout,
        })
    }

    fn of_all(self) -> Result<fleet::Options, Error> {
        Ok(fleet::Options {
            nodes: self.nodes,
            variant: self.policy.variant()?,
            policy: self.policy.policy,
            trust: self.trust.trust(),
            state: self.state,
            master_secret: self.secret.source(),
            is_dry_run: self.dry_run,
            at_once: self.at_once,
            rejoin_within: self.rejoin_within,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

/// Runs the command.
pub fn run(given: CommandLine) -> Result<(), Error> {
    if given.all {
        fleet::run(&given.of_all()?)
    } else {
        one::run(&given.of_one()?)
    }
}

/// Parses the number of nodes that are asked at the same time.
fn at_once(text: &str) -> Result<usize, &'static str> {
    match text.parse() {
        Ok(count @ 1..=64) => Ok(count),
        _ => Err("expected a number from 1 to 64"),
    }
}
