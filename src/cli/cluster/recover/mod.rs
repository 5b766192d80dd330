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

use crate::shell::{
    error::Error,
    output::{OUTPUT, Output},
    usage::{Command, Given},
};
use crate::workspace::{
    connect::{ATTESTATION_KEY, NODE_OPERAND, TRUST_ANY_TPM, endpoint_of, trust_of},
    master_secret::{MASTER_SECRET, SHARE_FILE, master_secret_of},
    options::{POLICY, TIMEOUT, VARIANT, time, variant_of},
    sources::{KEPT, OFFLINE},
    state::KNOWN_NODES,
};
use base::options::Opt;
use proto::recoverproto;

/// The options that need `--all`.
const OF_ALL: [&str; 4] = ["nodes", "dry-run", "at-once", "rejoin-within"];
/// The options that name one node, or decide about one node.
const OF_ONE: [&str; 3] = ["endpoint", "status", "migrate"];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "recover",
    summary: "send the master secret to nodes that wait for the key of their disks",
    about: &[
        "A node waits in its initramfs if its cluster cannot give it the key of its disk, because no other control plane \
              runs. This command connects to the node over attested TLS, checks that it meets the policy, and sends it the \
              master secret. It succeeds when the node has opened its disk. If several nodes share an address, each run \
              recovers one of them.",
        "The policy, the state file or the command line must name the node's attestation key. The state file has the keys of \
              nodes that were initialized or recovered with it. Every node shows its key on its console, and a running \
              cluster has it in its records.",
        "When a whole cluster was off, recover control planes until more than half of them run. Then the cluster is back, and \
              opens the disks of its other nodes by itself.",
        "With --all the command does this for the whole cluster. It takes addresses, roles and attestation keys from the state file, \
              where `status` and `apply` save them, or from --nodes. Control planes get the key first. A worker gets it \
              only if it does not come back by itself. The command ends when each node is a member of the cluster again, or at \
              --timeout. Run it again to continue: it recognizes the nodes that are back.",
    ],
    operand: Some(NODE_OPERAND),
    options: &[
        Opt::value(
            "endpoint",
            "HOST[:PORT]",
            "the node; the default port is 9999",
        ),
        Opt::flag("all", "recover all nodes of the cluster"),
        Opt::value(
            "nodes",
            "LIST",
            "with --all: these nodes in place of those in the state file: a file with a list of machines (docs/metadata.md), or \
             addresses and networks separated by commas: 10.42.1.100,10.42.2.0/24; in a network, the nodes that wait are found by \
             their port 9999",
        ),
        Opt::flag(
            "dry-run",
            "with --all: verify each node that waits, and send nothing",
        ),
        Opt::value(
            "at-once",
            "COUNT",
            "with --all: how many nodes are asked at the same time, 1 to 64",
        )
        .or("8"),
        Opt::value(
            "rejoin-within",
            "TIME",
            "with --all: how long workers may take to come back by themselves, from when most control planes have their disks open; then they \
             get the key, too",
        )
        .or("5m"),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        MASTER_SECRET,
        SHARE_FILE,
        ATTESTATION_KEY,
        TRUST_ANY_TPM,
        KNOWN_NODES,
        Opt::flag(
            "migrate",
            "also open a disk whose header does not name its cluster, such as a disk of Constellation; use it only for a \
             disk that you know to be this node's; needs the measurement salt of the state file",
        ),
        Opt::flag(
            "status",
            "only show what the node waits for: the disk, since when, what it tried",
        ),
        OUTPUT,
        TIMEOUT.or("10m"),
    ],
    examples: &[
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --status",
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --master-secret /media/safe/mastersecret.json",
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --share alice.txt --share bob.txt --share -",
        "firstlight recover --all --policy policy.json --dry-run",
        "firstlight recover --all --policy policy.json --timeout 30m",
    ],
    run,
};

fn run(given: &Given) -> Result<(), Error> {
    if given.has("all") {
        fleet::run(&fleet_options(given)?)
    } else {
        one::run(&options(given)?)
    }
}

fn options(given: &Given) -> Result<one::Options, Error> {
    if let Some(name) = OF_ALL.into_iter().find(|name| given.has(name)) {
        return Err(Error::Usage(format!("--{name} needs --all")));
    }
    let secret = ["master-secret", "share"]
        .into_iter()
        .find(|name| given.has(name));
    let action = match (given.has("status"), secret) {
        (true, None) => one::Action::Status,
        (true, Some(name)) => return Err(Error::Usage(format!("--status needs no --{name}"))),
        (false, _) => one::Action::Push {
            master_secret: master_secret_of(given)?,
            is_migrating: given.has("migrate"),
        },
    };
    Ok(one::Options {
        endpoint: endpoint_of(given, recoverproto::PORT)?,
        variant: variant_of(given)?,
        policy: given.path("policy"),
        trust: trust_of(given)?,
        state: given.path("state"),
        action,
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

fn fleet_options(given: &Given) -> Result<fleet::Options, Error> {
    if given.has_operand() {
        return Err(Error::Usage(
            "--all takes no HOST: name nodes by --nodes".into(),
        ));
    }
    if let Some(name) = OF_ONE.into_iter().find(|name| given.has(name)) {
        return Err(Error::Usage(format!(
            "--{name} is for one node: give it without --all"
        )));
    }
    Ok(fleet::Options {
        nodes: if given.has("nodes") {
            Some(given.text("nodes")?)
        } else {
            None
        },
        policy: given.path("policy"),
        variant: variant_of(given)?,
        trust: trust_of(given)?,
        state: given.path("state"),
        master_secret: master_secret_of(given)?,
        is_dry_run: given.has("dry-run"),
        at_once: given.parsed("at-once", at_once)?,
        rejoin_within: given.parsed("rejoin-within", time)?,
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

/// Parses the number of nodes that are asked at the same time.
fn at_once(text: &str) -> Result<usize, &'static str> {
    match text.parse() {
        Ok(count @ 1..=64) => Ok(count),
        _ => Err("expected a number from 1 to 64"),
    }
}
