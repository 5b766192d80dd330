//! Control planes join one at a time, because etcd adds one member at a time.
//!
//! A Lease holds the name of the control plane that may join, and until when. A repeated request of
//! the same node keeps the reservation. It ends when the node is Ready, when its ticket failed, or
//! after ten minutes. Waiting nodes form a queue in the Lease. The first in the queue is next,
//! unless it has not asked for some time. If Constellation's resource JoiningNode exists, a
//! JoiningNode named `control-plane` is created too, for old join services and Constellation's
//! operator.

use std::time::{Duration, SystemTime};

use serde_json::json;

use super::cleaner::{Cleaner, CleanerTask};
use super::lease::{self, Decision, JoinTurn};
use crate::cluster::Cluster;
use crate::cluster::constellation as joining_node;
use crate::cluster::refusal::TicketRefusal;
use base::time;
use kubernetes::client::{Client, JOINING_NODES};
use kubernetes::objects::JoiningNode;

/// When a node that waits asks again. It leaves the queue after six times as long.
const RETRY: Duration = Duration::from_secs(10);
/// How often a write is tried again after a conflict with another replica.
const TRIES: usize = 8;

/// A reservation of a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    node: String,
    /// The Lease's renewTime in microseconds. It identifies the ticket of the node.
    at: String,
    /// Whether an earlier ticket of the node made the reservation. Then this ticket must not end
    /// it.
    pub renewed: bool,
}

impl Reserved {
    /// Returns the task that ends the reservation, unless an earlier ticket made it.
    pub fn undo(&self) -> Option<CleanerTask> {
        (!self.renewed).then(|| CleanerTask::Reservation(self.node.clone(), self.at.clone()))
    }
}

/// Reserves the turn to join for this node. Refuses if another node has it.
pub fn reserve(
    cluster: &Cluster,
    cleaner: &Cleaner,
    client: &Client,
    node: &str,
    components: &str,
) -> Result<Reserved, TicketRefusal> {
    let reserved = reserve_lease(cluster, cleaner, client, node)?;
    if cluster.has_joining_nodes() {
        reserve_joining_node(cluster, client, node, components).inspect_err(|_| {
            if let Some(undo) = reserved.undo() {
                cleaner.add(CleanerTask::JoiningNode(
                    joining_node::CONTROL_PLANE.into(),
                    node.into(),
                ));
                cleaner.undo(undo);
            }
        })?;
    }
    Ok(reserved)
}

fn reserve_lease(
    cluster: &Cluster,
    cleaner: &Cleaner,
    client: &Client,
    node: &str,
) -> Result<Reserved, TicketRefusal> {
    let at = lease::object();
    for _ in 0..TRIES {
        let (lease, whole) = client.find_whole(&at)?.unzip();
        let mut turn = lease.as_ref().map(JoinTurn::read).unwrap_or_default();
        let now = SystemTime::now();
        let decision = turn.request_turn(node, now, &|name| cluster.node(name));
        match client.write(&at, whole, turn.patch()) {
            Ok(_) => {}
            Err(error)
                if error.is_conflict() || error.is_already_exists() || error.is_not_found() =>
            {
                continue;
            }
            Err(error) => {
                // The API server may have executed the request.
                if decision == (Decision::Has { renewed: false }) {
                    cleaner.undo(CleanerTask::Reservation(node.into(), time::micros(now)));
                }
                return Err(error.into());
            }
        }
        return match decision {
            Decision::Has { renewed } => Ok(Reserved {
                node: node.into(),
                at: time::micros(now),
                renewed,
            }),
            Decision::Waits(holder) => Err(waits(&holder)),
        };
    }
    Err(waits("another node"))
}

fn waits(holder: &str) -> TicketRefusal {
    let message =
        format!("control planes join one at a time, and it is the turn of {holder}: try again");
    TicketRefusal::temporary("control-plane-joining", message, RETRY)
}

fn reserve_joining_node(
    cluster: &Cluster,
    client: &Client,
    node: &str,
    components: &str,
) -> Result<(), TicketRefusal> {
    let at = JOINING_NODES.named(joining_node::CONTROL_PLANE);
    let object = joining_node::object(joining_node::CONTROL_PLANE, node, components, true);
    for _ in 0..TRIES {
        match client.create(&JOINING_NODES.all(), &object) {
            Ok(_) => return Ok(()),
            Err(error) if error.is_already_exists() => {}
            Err(error) => return Err(error.into()),
        }
        let Some(found) = client.find_as::<JoiningNode>(&at)? else {
            continue;
        };
        let holder = found.spec.name.as_str();
        if holder == node {
            let renewed = client.merge(
                &at,
                &json!({"spec": {"deadline": object["spec"]["deadline"]}}),
            );
            return Ok(renewed.map(drop)?);
        }
        // A deadline far in the future was set by a wrong clock.
        let now = SystemTime::now();
        let deadline = found.spec.deadline.as_deref().and_then(time::parse);
        let is_over = deadline
            .is_none_or(|deadline| !(now..=now + 2 * joining_node::VALIDITY).contains(&deadline));
        let made = found.metadata.creation_timestamp.as_deref();
        let made = made.and_then(time::parse);
        if !is_over
            && !cluster
                .node(holder)
                .is_some_and(|node| node.is_ready_since(made))
        {
            return Err(waits(holder));
        }
        // Constellation's operator deletes it, but it may not be running.
        joining_node::delete(client, joining_node::CONTROL_PLANE, holder)?;
    }
    Err(waits("another node"))
}
