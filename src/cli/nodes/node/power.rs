//! Whether a machine is off. Kubernetes cannot know: `Ready=Unknown` and a Lease that ends also mean a machine without a network, a
//! kubelet that was stopped, or a control plane whose own API server has ended with its member of etcd. Its containers run then, and
//! start a second time elsewhere when its Node is deleted.
//!
//! So an API server of the others asks the kubelet itself. An answer proves that the machine runs. That there is none proves only
//! something if there was one before, in the same run of the command, and the operator was asked to power the machine off in between.
//! Otherwise the operator has to say that it is off.
//!
//! A Node that somebody deletes meanwhile is not waited for: a cloud controller does so when a machine is gone, and an administrator or an
//! agent may. Nothing can be asked any more, and what the wait prevents has happened: its pods start elsewhere. The machine may run with
//! its open disk; its member of etcd is gone, and its name is closed right after. The command says so.

use std::time::{Duration, Instant};

use kubernetes::KUBELET_LEASES;
use kubernetes::client::{self, Client, LEASES, NODES};
use kubernetes::objects::{Lease, NodeObject};

use super::kubelet::Kubelet;
use super::plan::Leaving;
use crate::shell::{error::Error, progress::Progress};

/// How long neither the kubelet may answer nor its Lease may change.
const SILENCE: Duration = Duration::from_secs(60);
/// The pause between two looks at the machines.
const PAUSE: Duration = Duration::from_secs(2);

/// A machine that was asked to be powered off.
struct Machine<'a> {
    leaving: &'a Leaving,
    /// What the kubelet wrote last into its Lease.
    renewed: String,
    /// Since when neither the kubelet nor its Lease has said anything.
    silent: Option<Instant>,
    /// What was heard last.
    last: Kubelet,
    /// Whether somebody has deleted its Node.
    is_deleted: bool,
}

impl Machine<'_> {
    /// Looks once whether the machine is off, or its Node is gone.
    fn is_off(&mut self, client: &Client) -> Result<bool, Error> {
        let name = &self.leaving.name;
        let Some(node) = client.find_as::<NodeObject>(&NODES.named(name))? else {
            self.is_deleted = true;
            return Ok(true);
        };
        let begun = Instant::now();
        self.last = Kubelet::ask(client, &node, self.leaving.record.as_ref())?;
        let renewed = renewal(client, name)?;
        let is_renewed = renewed != self.renewed;
        self.renewed = renewed;
        // the operator has said so
        let is_declared = !self.leaving.runs();
        match &self.last {
            Kubelet::Answers => self.silent = None,
            _ if is_renewed => self.silent = None,
            _ if is_declared && node.is_silent() => return Ok(true),
            Kubelet::Unknown(_) if !is_declared => self.silent = None,
            _ => {
                let since = *self.silent.get_or_insert(begun);
                return Ok(since.elapsed() >= SILENCE);
            }
        }
        Ok(false)
    }
}

/// Returns when the kubelet of a node has renewed its Lease.
fn renewal(client: &Client, name: &str) -> Result<String, Error> {
    let lease = LEASES.in_namespace(KUBELET_LEASES).named(name);
    let lease: Lease = client.find_as(&lease)?.unwrap_or_default();
    Ok(lease.spec.renew_time)
}

/// Waits until the machines are off whose Nodes exist.
pub fn wait_until_off(
    client: &Client,
    progress: &Progress,
    nodes: &[Leaving],
    deadline: Instant,
) -> Result<(), Error> {
    let mut machines = Vec::new();
    for leaving in nodes.iter().filter(|it| it.node.is_some()) {
        machines.push(Machine {
            leaving,
            renewed: renewal(client, &leaving.name)?,
            silent: None,
            last: Kubelet::Answers,
            is_deleted: false,
        });
    }
    let mut said = String::new();
    loop {
        let mut left = Vec::new();
        for mut machine in machines {
            if !machine.is_off(client)? {
                left.push(machine);
            } else if machine.is_deleted {
                progress.line(format!(
                    "{}: somebody has deleted its Node, so nobody can tell whether its machine runs: power it off",
                    machine.leaving.name
                ));
            }
        }
        machines = left;
        if machines.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let each = machines.iter().map(|it| state(&it.leaving.name, &it.last));
            let each: Vec<_> = each.collect();
            return Err(Error::Failed(format!(
                "{}. Nothing else of it was deleted. Power the machine off, and run the command again, which goes on; if the \
                 machine is off and the command cannot see it: --machines-off",
                each.join("; ")
            )));
        }
        let names: Vec<_> = machines.iter().map(|it| it.leaving.name.as_str()).collect();
        let names = names.join(", ");
        if names != said {
            progress.phase(format!(
                "power off {names} now: waiting until its kubelet does not answer for {} s",
                SILENCE.as_secs()
            ));
            said = names;
        }
        if client.stopped_within(PAUSE) {
            return Err(client::Error::Stopped.into());
        }
    }
}

fn state(name: &str, last: &Kubelet) -> String {
    match last {
        Kubelet::Answers => format!("the kubelet of {name} still answers, so its machine runs"),
        Kubelet::Silent(why) => format!(
            "the kubelet of {name} has not been silent for {} s ({why})",
            SILENCE.as_secs()
        ),
        Kubelet::Unknown(why) => format!("nobody can tell whether {name} runs ({why})"),
    }
}
