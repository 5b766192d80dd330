//! `firstlight node remove`: lists the Node, record, tokens and etcd member of each named node, and deletes them. `firstlight node
//! readmit` lets removed ones join again. The other actions are those of the node itself: [`control`].
//!
//! `plan` reads what exists and refuses what would do harm, `remove` has the steps. `power` finds out by the `kubelet` whether a machine
//! is off.

mod kubelet;
mod plan;
mod power;
mod remove;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use base::options::Opt;
use base::program;
use kubernetes::client::Client;
use kubernetes::parameters::NodeName;
use kubernetes::{NAMESPACE, removed_nodes};
use serde_json::{Value, json};

use crate::nodes::{
    drain::{DELETE_EMPTYDIR_DATA, DELETE_UNMANAGED_PODS, DRAIN_TIMEOUT, Permitted},
    lock::Lock,
    operator::control,
    operator::session::{CERTIFICATE, KEY, POLICY},
};
use crate::shell::{
    consent,
    error::Error,
    interrupt,
    output::{OUTPUT, Output},
    progress::Progress,
    usage::{Command, Given, Operand, suggestion},
};
use crate::workspace::{
    connect::ATTESTATION_KEY,
    kubeconfig::{self, KUBECONFIG, kubeconfigs_of},
    master_secret::{MASTER_SECRET, SHARE_FILE},
    options::{TIMEOUT, VARIANT, time},
    sources::{KEPT, OFFLINE},
    state::{CLUSTER_ID, CLUSTER_STATE},
};
use plan::RemovalPlan;
use remove::Choices;

/// The actions: nodes leave; removed ones may join again; the others are those of [`control`].
const ACTIONS: [&str; 8] = [
    "remove", "readmit", "reboot", "shutdown", "restart", "clean", "reset", "update",
];
/// Options for some of the actions only, and these.
const ONLY: [(&str, &[&str]); 5] = [
    ("dry-run", &["remove", "readmit"]),
    ("may-return", &["remove"]),
    ("machines-off", &["remove"]),
    ("unit", &["restart"]),
    ("release", &["update"]),
];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "node",
    summary: "remove nodes, or let them join again; restart, clean, reset or update their machines",
    about: &[
        "remove shows what exists of the nodes, asks, and then: cordons and drains them; removes the members of etcd of control planes; \
         waits until you have powered the machines off; closes their disks, names and machines; and deletes their bootstrap tokens, records and Nodes. \
         Run again after an interruption, it goes on. It also removes what is left of a machine that no longer exists.",
        "It refuses to remove the last control plane, and one without which etcd has no majority, and says the numbers. Pods are \
         evicted as by kubectl drain: PodDisruptionBudgets are honoured, those of DaemonSets stay, and so does each pod that would lose \
         data or that nothing makes again, unless an option permits it.",
        "A removed machine gets no ticket, its kubelet no certificate, and no other machine its name, until `firstlight node readmit NAME`.",
        "reboot and shutdown restart the machine, or switch it off. If the API server answers, the pods are moved away before; after a \
         reboot the command waits until the node is back, and lets pods come to it. It asks before the cluster loses its API server.",
        "restart restarts one unit, as containerd. clean frees space on a disk that is full: it deletes journals of earlier boots, rotated \
         logs and images that no container uses, and shows what takes the rest. reset destroys the data of a worker: the machine restarts, \
         formats its state disk, and joins again under its name.",
        "update sends a release of the image, as `make mkosi` makes it: the node verifies its signature and its version, compares the \
         registers with those of --policy, and writes it to the slot that does not run. The next boot tries it, so reboot follows. A \
         version with which the node does not become healthy is tried three times, and then the node goes back.",
        "For these six the node is verified, and the operator proves to have the master secret, or a certificate by it, as in \
         `firstlight logs`. The API server need not run. A machine acts only if it is the node that the command names.",
    ],
    operand: Some(Operand {
        value: "remove|readmit|reboot|shutdown|restart|clean|reset|update NAME..",
        words: &ACTIONS,
        is_needed: true,
        help: "the names of the nodes, as in kubectl get nodes; for the last six, NAME=HOST[:PORT] names the address, too",
    }),
    options: &[
        Opt::flag("yes", "do not ask before a change"),
        Opt::flag("dry-run", "show the plan, and change nothing"),
        Opt::flag(
            "skip-drain",
            "evict no pods: they end with the machine; reboot and shutdown do not ask the API server",
        ),
        DELETE_EMPTYDIR_DATA,
        DELETE_UNMANAGED_PODS,
        DRAIN_TIMEOUT,
        Opt::flag(
            "may-return",
            "the machines may join again, and other machines under their names: their kubelets are trusted",
        ),
        Opt::flag(
            "machines-off",
            "you have made sure that the machines whose kubelets do not answer are powered off, or deleted",
        ),
        control::UNIT,
        control::RELEASE,
        KUBECONFIG,
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
        OUTPUT,
        TIMEOUT.or("1h"),
    ],
    examples: &[
        "firstlight node remove worker-2 --dry-run",
        "firstlight node remove worker-2",
        "firstlight node remove control-plane-1 worker-3 --yes --delete-emptydir-data",
        "firstlight node readmit worker-2",
        "firstlight node reboot worker-0 worker-1",
        "firstlight node restart worker-0 --unit containerd",
        "firstlight node reset worker-2=10.42.1.102",
        "firstlight node update worker-0 --release target/mkosi/release/update",
    ],
    run: |given| match action(given)? {
        action if control::ACTIONS.contains(&action) => control::run(action, given),
        action => run(&options(action, given)?),
    },
};

fn action(given: &Given) -> Result<&'static str, Error> {
    let action = given.operand()?;
    let Some(action) = ACTIONS.into_iter().find(|it| *it == action) else {
        let suggestion = suggestion("", &action, ACTIONS);
        return Err(Error::Usage(format!(
            "there is no action {action:?}{suggestion}"
        )));
    };
    let is_wrong = |(name, of): &&(&str, &[&str])| given.has(name) && !of.contains(&action);
    match ONLY.iter().find(is_wrong) {
        Some((name, of)) => Err(Error::Usage(format!(
            "--{name} is for {}, not for {action}",
            of.join(" and ")
        ))),
        None => Ok(action),
    }
}

fn options(action: &'static str, given: &Given) -> Result<Options, Error> {
    let mut names = Vec::new();
    for name in given.further().iter().cloned().map(program::text) {
        let name: String = name?;
        NodeName::from_machine(&name)
            .ok()
            .filter(|it| it.as_str() == name)
            .ok_or_else(|| Error::Usage(format!("{name:?} is not the name of a node")))?;
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() {
        return Err(Error::Usage(format!(
            "expected firstlight node {action} NAME.."
        )));
    }
    Ok(Options {
        readmits: action == "readmit",
        names,
        is_agreed: given.has("yes"),
        is_dry_run: given.has("dry-run"),
        drains: !given.has("skip-drain"),
        permitted: Permitted::of(given),
        drain_limit: given.parsed("drain-timeout", time)?,
        may_return: given.has("may-return"),
        machines_off: given.has("machines-off"),
        kubeconfig: kubeconfigs_of(given),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

/// The options of the command line.
#[derive(Debug)]
struct Options {
    /// Whether removed nodes are let back, and none is removed.
    readmits: bool,
    /// The names of the nodes.
    names: Vec<String>,
    /// Whether the operator need not be asked.
    is_agreed: bool,
    /// Whether nothing is changed.
    is_dry_run: bool,
    /// Whether the nodes are drained.
    drains: bool,
    /// Which pods may be evicted.
    permitted: Permitted,
    /// The limit for the pods of a node.
    drain_limit: Duration,
    /// Whether the machines may join again, and others under their names.
    may_return: bool,
    /// Whether the operator knows that machines are off whose kubelets do not answer.
    machines_off: bool,
    /// The administrator's kubeconfigs.
    kubeconfig: Vec<PathBuf>,
    /// The form of the output.
    output: Output,
    /// The limit for the whole command.
    timeout: Duration,
}

fn run(options: &Options) -> Result<(), Error> {
    let deadline = Instant::now() + options.timeout;
    let client = kubeconfig::client(&options.kubeconfig)?;
    let mut progress = Progress::on_stderr();
    progress.phase(format!("waiting for the API server {}", client.server()));
    client
        .within(options.timeout)
        .wait_ready(&mut |why| progress.line(why))?;
    if options.readmits {
        return readmit(&client, options);
    }
    let lock = if options.is_dry_run {
        None
    } else {
        Some(Lock::take(&client, "node remove", &progress)?)
    };
    let plan = RemovalPlan::read(&client, &progress, &options.names, options.permitted)?;
    options.output.say(plan.text(options.drains).trim_end())?;
    let afterwards = if options.may_return {
        "afterwards the machines may join again, and others under their names"
    } else {
        "afterwards neither the machines nor others under their names may join, until firstlight node readmit NAME"
    };
    options.output.say(afterwards)?;
    if options.is_dry_run {
        options.output.json(&json(&plan, false))?;
    }
    plan.check(client.server(), options.drains, options.machines_off)?;
    let Some(lock) = lock else {
        return options.output.say("nothing was changed");
    };
    if !options.is_agreed {
        // its line on the terminal would overwrite the question
        drop(progress);
        let question = format!("Remove {}?", options.names.join(", "));
        consent::ask(&question, "--dry-run")?;
        progress = Progress::on_stderr();
    }
    interrupt::means(
        "what was removed stays removed, and a node that is not removed yet stays cordoned (kubectl uncordon); run the same command \
         again, which goes on",
    );
    let how = Choices {
        drains: options.drains,
        permitted: options.permitted,
        drain_limit: options.drain_limit,
        may_return: options.may_return,
        deadline,
    };
    remove::run(&client, &progress, &lock, &plan, &how)?;
    drop(progress);
    options.output.json(&json(&plan, true))?;
    options
        .output
        .say(format!("removed: {}", options.names.join(", ")))?;
    // the plan said so, too, perhaps an hour ago
    for node in &plan.nodes {
        for what in plan.by_hand(node) {
            options
                .output
                .say(format!("left to you: {}: {what}", node.name))?;
        }
    }
    Ok(())
}

/// Lets removed nodes join again.
fn readmit(client: &Client, options: &Options) -> Result<(), Error> {
    let removed = removed_nodes::find(client)?;
    if let Some(name) = (options.names.iter()).find(|name| removed.of_name(name).is_none()) {
        return Err(Error::Refused(format!(
            "{name} is no node that was removed: the names are in ConfigMap {NAMESPACE}/{}. Nothing was changed",
            removed_nodes::CONFIG_MAP
        )));
    }
    for name in &options.names {
        if !options.is_dry_run {
            removed_nodes::readmit(client, name)?;
        }
    }
    let names = options.names.join(", ");
    options
        .output
        .json(&json!({"readmitted": !options.is_dry_run, "nodes": options.names}))?;
    if options.is_dry_run {
        return options.output.say("nothing was changed");
    }
    options.output.say(format!(
        "readmitted: {names}. The certificates of their old kubelets, valid for a year at most, are good for these names again"
    ))
}

fn json(plan: &RemovalPlan, is_removed: bool) -> Value {
    let mut json = plan.json();
    json["removed"] = is_removed.into();
    json
}
