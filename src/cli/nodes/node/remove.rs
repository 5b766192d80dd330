//! The steps by which nodes leave. Each looks at what is left to do, so that the command goes on where it was cut off.
//!
//! ```text
//! cordon ─► drain ─► remove the members of etcd ─► wait until the machines are off ─► close name and machine
//!   ─► delete tokens, records, Node
//! ```
//!
//! etcd comes before the machine: two members have no majority when one is off, and then none can be removed. The Node comes
//! after the machine, because its pods start elsewhere when it is deleted. The record is deleted after the tokens, because a command that
//! was cut off reads in it what is left to do. It is deleted before the Node, so that a machine that boots in between gets no key.
//!
//! Name and machine are closed before all that ([`removed_nodes`]): a ticket that is under way, or the kubelet with its certificate, which
//! nobody can revoke, would make anew what is deleted.

use std::time::{Duration, Instant};

use base::uuid::Uuid;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, CONFIG_MAPS, Client, JOINING_NODES, LEASES, NODES, SECRETS};
use kubernetes::machine_record::{self, MachineRecord, NO_MACHINE};
use kubernetes::objects::{Lease, NodeObject};
use kubernetes::removed_nodes;
use serde_json::json;

use super::plan::{Leaving, RemovalPlan};
use super::power;
use crate::nodes::{
    drain::{self, Drained, Permitted},
    etcd_members::{self as etcd, shown},
    lock::Lock,
};
use crate::shell::{
    error::Error,
    progress::{Progress, printable},
};

/// How often a change is tried again of an object that changes meanwhile.
const TRIES: usize = 10;
/// The pause between two looks at a Node that is deleted.
const PAUSE: Duration = Duration::from_secs(1);

/// What the operator permits.
#[derive(Debug, Clone, Copy)]
pub struct Choices {
    /// Whether pods are evicted.
    pub drains: bool,
    /// Which pods may be evicted.
    pub permitted: Permitted,
    /// The limit for the pods of a node.
    pub drain_limit: Duration,
    /// Whether the machines may join again, and others under their names.
    pub may_return: bool,
    /// The end of the whole command.
    pub deadline: Instant,
}

/// Removes the nodes of a plan that was checked.
pub fn run(
    client: &Client,
    progress: &Progress,
    lock: &Lock,
    plan: &RemovalPlan,
    how: &Choices,
) -> Result<(), Error> {
    for node in plan.nodes.iter().filter(|it| it.node.is_some()) {
        drain::cordon(client, &node.name)?;
    }
    for node in plan.nodes.iter().filter(|it| how.drains && it.drains()) {
        progress.phase(format!("draining {}", node.name));
        let left = how.deadline.saturating_duration_since(Instant::now());
        let limit = how.drain_limit.min(left);
        let name = &node.name;
        progress.line(
            match drain::drain(client, name, how.permitted, limit, progress)? {
                Drained::Empty => format!("{name}: drained"),
                Drained::Silent => {
                    format!(
                        "{name}: its kubelet is silent; its pods start elsewhere when its Node is deleted"
                    )
                }
            },
        );
    }
    remove_members(client, progress, lock, plan)?;
    power::wait_until_off(client, progress, &plan.nodes, how.deadline)?;
    lock.check()?;
    for node in &plan.nodes {
        if !how.may_return {
            close(client, progress, node)?;
        }
        delete(client, progress, node)?;
    }
    Ok(())
}

/// Closes the name and the machine of a node: the join services give it no ticket, and its kubelet no certificate.
fn close(client: &Client, progress: &Progress, leaving: &Leaving) -> Result<(), Error> {
    let name = &leaving.name;
    removed_nodes::add(client, name, leaving.machine().unwrap_or_default())?;
    progress.line(format!(
        "{name}: from now on no ticket and no certificate; the present certificate of its kubelet is valid for a year at most"
    ));
    Ok(())
}

/// Removes the members of etcd. Looks at the whole cluster again before each of them: draining may have taken long, and after each
/// removal one less may fail.
fn remove_members(
    client: &Client,
    progress: &Progress,
    lock: &Lock,
    plan: &RemovalPlan,
) -> Result<(), Error> {
    plan.check_others(client)?;
    let members = plan.nodes.iter().flat_map(|it| &it.members);
    let gone: Vec<u64> = members.map(|it| it.id).collect();
    let Some(etcd) = &plan.etcd else {
        return Ok(());
    };
    for _ in &gone {
        let present = etcd.members(progress)?;
        let Some(first) = etcd::removal(&present, &gone)?.into_iter().next() else {
            break;
        };
        plan.check_others(client)?;
        lock.check()?;
        etcd.remove(progress, &first)?;
        progress.line(format!("{}: no member of etcd any more", shown(&first)));
    }
    Ok(())
}

/// Deletes what exists of a node.
fn delete(client: &Client, progress: &Progress, leaving: &Leaving) -> Result<(), Error> {
    let name = &leaving.name;
    for token in &leaving.tokens {
        client.delete_if_there(&SECRETS.in_namespace(NAMESPACE).named(token))?;
    }
    if let Some(joining) = &leaving.joining {
        client.delete_as(&JOINING_NODES.named(name), &joining.metadata)?;
    }
    for record in &leaving.disks {
        for disk in record.disks() {
            close_disk(client, &disk, &record.machine)?;
        }
    }
    if leaving.record.is_some() {
        let what = if delete_record(client, name)? {
            "its disk closed"
        } else {
            "its disk stays open to another machine"
        };
        progress.line(format!("{name}: its record is deleted, and {what}"));
    }
    if leaving.is_control_plane() {
        end_turn(client, name)?;
    }
    if let Some(node) = &leaving.node {
        let uid = &node.metadata.uid;
        delete_node(client, name, uid)?;
        check_gone(client, name, uid)?;
        progress.line(format!("{name}: its Node is deleted"));
    }
    Ok(())
}

/// Deletes the record of a node, and records that no machine has its disk. Returns whether the disk is closed. The join service may
/// change the record meanwhile.
fn delete_record(client: &Client, name: &str) -> Result<bool, Error> {
    let at = CONFIG_MAPS
        .in_namespace(NAMESPACE)
        .named(&machine_record::name_of_node(name));
    let mut is_closed = true;
    for _ in 0..TRIES {
        let Some(map) = client.find_as(&at)? else {
            return Ok(is_closed);
        };
        let record = MachineRecord::read(&map).unwrap_or_default();
        // Without a record, the key service would take the disk, or a copy of it, for a volume.
        for disk in record.disks() {
            is_closed = close_disk(client, &disk, &record.machine)?;
        }
        if client.delete_as(&at, &map.metadata)? {
            return Ok(is_closed);
        }
    }
    Err(Error::Failed(format!(
        "{at} changes all the time: is the machine joining again?"
    )))
}

/// Ends the turn of a control plane to join, which it has for some minutes after its ticket: the next one would wait for it.
fn end_turn(client: &Client, name: &str) -> Result<(), Error> {
    let at = LEASES.in_namespace(NAMESPACE).named(machine_record::TURN);
    if let Some(lease) = client.find_as::<Lease>(&at)?
        && lease.spec.holder_identity == name
    {
        // one that has changed is that of the next one
        client.delete_as(&at, &lease.metadata)?;
    }
    Ok(())
}

/// Records that no machine has a disk, unless the operator has given it to a machine other than this one. Returns whether it is closed.
fn close_disk(client: &Client, disk: &Uuid, machine: &str) -> Result<bool, Error> {
    let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
    let closed = MachineRecord::of_disk(disk, NO_MACHINE);
    let at = maps.named(&closed.name);
    for _ in 0..TRIES {
        if client.create_if_absent(&maps, &closed.to_object())? {
            return Ok(true);
        }
        let Some((map, whole)) = client.find_whole(&at)? else {
            continue;
        };
        let record = MachineRecord::read(&map).unwrap_or_default();
        if record.machine == NO_MACHINE {
            return Ok(true);
        }
        if record.is_of_other(Some(machine)) {
            return Ok(false);
        }
        let fields = json!({"data": {"machine": NO_MACHINE}});
        match client.write(&at, Some(whole), fields) {
            Ok(_) => return Ok(true),
            Err(error) if error.is_conflict() || error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::Failed(format!(
        "{at} changes all the time: does a machine boot with this disk?"
    )))
}

/// Deletes the Node, unless it is that of another machine by now.
fn delete_node(client: &Client, name: &str, uid: &str) -> Result<(), Error> {
    let at = NODES.named(name);
    for _ in 0..TRIES {
        let Some(node) = client.find_as::<NodeObject>(&at)? else {
            return Ok(());
        };
        if node.metadata.uid != uid {
            return Err(Error::Refused(format!(
                "{name} has registered again meanwhile, or another machine of this name: its Node stays"
            )));
        }
        if client.delete_as(&at, &node.metadata)? {
            return Ok(());
        }
    }
    Err(Error::Failed(format!(
        "{at} changes all the time: its kubelet runs"
    )))
}

/// Fails while a finalizer keeps a deleted Node: its kubelet still gets pods, and the tokens of these. A kubelet or an agent may have
/// written the finalizer.
fn check_gone(client: &Client, name: &str, uid: &str) -> Result<(), Error> {
    let at = NODES.named(name);
    for _ in 0..TRIES {
        let node = client.find_as::<NodeObject>(&at)?;
        if node.is_none_or(|node| node.metadata.uid != uid) {
            return Ok(());
        }
        if client.stopped_within(PAUSE) {
            return Err(client::Error::Stopped.into());
        }
    }
    let node: NodeObject = client.find_as(&at)?.unwrap_or_default();
    let finalizers = json!(node.metadata.finalizers);
    Err(Error::Failed(format!(
        "{at} was deleted, but stays because of its finalizers {}: if no controller of yours removes them, \
         remove them with kubectl edit, find out who wrote them, and run the command again",
        printable(&finalizers.to_string())
    )))
}
