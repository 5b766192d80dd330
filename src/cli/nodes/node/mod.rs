//! `firstlight node remove`: lists the Node, record, tokens and etcd member of each named node, and deletes them. `firstlight node
//! readmit` lets removed ones join again. The other actions are those of the node itself: [`control`].
//!
//! `plan` reads what exists and refuses what would do harm, `remove` has the steps. `power` finds out by the `kubelet` whether a machine
//! is off.

mod kubelet;
mod plan;
mod power;
mod remove;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use kubernetes::client::Client;
use kubernetes::parameters::NodeName;
use kubernetes::{NAMESPACE, removed_nodes};
use proto::operator::Action;
use serde_json::{Value, json};

use crate::nodes::{
    drain::Permitted,
    lock::Lock,
    operator::control::{self, ControlOptions},
};
use crate::shell::{consent, error::Error, interrupt, output::Output, progress::Progress};
use crate::workspace::kubeconfig;
use plan::RemovalPlan;
use remove::Choices;

/// Remove nodes, or let them join again; restart, clean, reset or update their machines
///
/// remove shows what exists of the nodes, asks, and then: cordons and drains them; removes the members of etcd of
/// control planes; waits until you have powered the machines off; closes their disks, names and machines; and deletes
/// their bootstrap tokens, records and Nodes. Run again after an interruption, it goes on. It also removes what is
/// left of a machine that no longer exists.
///
/// It refuses to remove the last control plane, and one without which etcd has no majority, and says the numbers.
/// Pods are evicted as by kubectl drain: PodDisruptionBudgets are honoured, those of DaemonSets stay, and so does
/// each pod that would lose data or that nothing makes again, unless an option permits it.
///
/// A removed machine gets no ticket, its kubelet no certificate, and no other machine its name, until `firstlight
/// node readmit NAME`.
///
/// reboot and shutdown restart the machine, or switch it off. If the API server answers, the pods are moved away
/// before; after a reboot the command waits until the node is back, and lets pods come to it. It asks before the
/// cluster loses its API server.
///
/// restart restarts one unit, as containerd. clean frees space on a disk that is full: it deletes journals of earlier
/// boots, rotated logs and images that no container uses, and shows what takes the rest. reset destroys the data of a
/// worker: the machine restarts, formats its state disk, and joins again under its name.
///
/// update sends a release of the image, as `make mkosi` makes it: the node verifies its signature and its version,
/// compares the registers with those of --policy, and writes it to the slot that does not run. The next boot tries
/// it, so reboot follows. A version with which the node does not become healthy is tried three times, and then the
/// node goes back.
///
/// For these six the node is verified, and the operator proves to have the master secret, or a certificate by it, as
/// in `firstlight logs`. The API server need not run. A machine acts only if it is the node that the command names.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight node remove worker-2 --dry-run
  firstlight node remove worker-2
  firstlight node remove control-plane-1 worker-3 --yes --delete-emptydir-data
  firstlight node readmit worker-2
  firstlight node reboot worker-0 worker-1
  firstlight node restart worker-0 --unit containerd
  firstlight node reset worker-2=10.42.1.102
  firstlight node update worker-0 --release target/mkosi/release/update")]
pub(crate) struct CommandLine {
    /// What to do
    action: NodeAction,
    /// The names of the nodes, as in kubectl get nodes; for the last six actions, NAME=HOST[:PORT] names the address, too
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// With remove and readmit: show the plan, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// With remove: the machines may join again, and other machines under their names: their kubelets are trusted
    #[arg(long)]
    may_return: bool,
    /// With remove: you have made sure that the machines whose kubelets do not answer are powered off, or deleted
    #[arg(long)]
    machines_off: bool,
    #[command(flatten)]
    pub control: ControlOptions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NodeAction {
    Remove,
    Readmit,
    Reboot,
    Shutdown,
    Restart,
    Clean,
    Reset,
    Update,
}

impl CommandLine {
    /// Refuses options that are for other actions.
    fn check(&self) -> Result<(), Error> {
        use NodeAction::{Readmit, Remove, Restart, Update};
        let only: [(bool, &str, &[NodeAction]); 5] = [
            (
                self.dry_run,
                "dry-run is for remove and readmit",
                &[Remove, Readmit],
            ),
            (self.may_return, "may-return is for remove", &[Remove]),
            (self.machines_off, "machines-off is for remove", &[Remove]),
            (
                self.control.unit.is_some(),
                "unit is for restart",
                &[Restart],
            ),
            (
                self.control.release.is_some(),
                "release is for update",
                &[Update],
            ),
        ];
        match only
            .iter()
            .find(|(is_given, _, of)| *is_given && !of.contains(&self.action))
        {
            Some((_, text, _)) => Err(Error::Usage(format!("--{text}"))),
            None => Ok(()),
        }
    }

    fn options(self) -> Result<Options, Error> {
        let mut names = Vec::new();
        for name in self.names {
            NodeName::from_machine(&name)
                .ok()
                .filter(|it| it.as_str() == name)
                .ok_or_else(|| Error::Usage(format!("{name:?} is not the name of a node")))?;
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let control = self.control;
        Ok(Options {
            readmits: self.action == NodeAction::Readmit,
            names,
            is_agreed: control.yes,
            is_dry_run: self.dry_run,
            drains: !control.skip_drain,
            permitted: control.drain.permitted,
            drain_limit: control.drain.drain_timeout,
            may_return: self.may_return,
            machines_off: self.machines_off,
            kubeconfig: control.kubeconfig.paths(),
            output: control.output,
            timeout: control.timeout,
        })
    }
}

/// Runs the command.
pub(crate) fn run(given: CommandLine) -> Result<(), Error> {
    given.check()?;
    let (action, word) = match given.action {
        NodeAction::Remove | NodeAction::Readmit => return change(&given.options()?),
        NodeAction::Update => {
            let release = given.control.release.as_deref().unwrap_or(Path::new(""));
            return control::update(&given.names, release, &given.control);
        }
        NodeAction::Reboot => (Action::Reboot, "reboot"),
        NodeAction::Shutdown => (Action::PowerOff, "shutdown"),
        NodeAction::Restart => (Action::RestartUnit, "restart"),
        NodeAction::Clean => (Action::Clean, "clean"),
        NodeAction::Reset => (Action::Reset, "reset"),
    };
    control::run(action, word, &given.names, &given.control)
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

fn change(options: &Options) -> Result<(), Error> {
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
            "{name} is not among the removed nodes, which are in ConfigMap {NAMESPACE}/{}. Nothing was changed",
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
