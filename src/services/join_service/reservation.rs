//! Control planes join one at a time, because etcd adds one member at a time.
//!
//! A Lease holds the name of the control plane that may join, and until when. A repeated request of
//! the same node keeps the reservation. It ends when the node is Ready, when its ticket failed, or
//! after ten minutes. Waiting nodes form a queue in the Lease. The first in the queue is next,
//! unless it has not asked for some time. If the old system's resource JoiningNode exists, a
//! JoiningNode named `control-plane` is created too, for old join services and the old operator.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::cleaner::{Cleaner, Task};
use super::cluster::{Cluster, NodeStatus};
use super::refusal::Refusal;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, JOINING_NODES, LEASES, Object};

/// The name of the Lease.
const NAME: &str = "join-control-plane";
/// The name of the JoiningNode of every control plane.
const CONTROL_PLANE_JOINING_NODE: &str = "control-plane";
/// How long a reservation or a JoiningNode is valid, as in the old system.
const VALIDITY: Duration = Duration::from_secs(10 * 60);
const WORKER_VALIDITY: Duration = Duration::from_secs(48 * 60 * 60);
/// The field manager of the old join service.
const OLD_MANAGER: &str = "join-service";
/// The annotation of the Lease with the queue, as JSON `[["NAME", SECONDS_SINCE_1970], ..]`.
const QUEUE_ANNOTATION: &str = "firstlight/waiting";
/// A node leaves the queue after this time without a request. Clients try again after [`RETRY`].
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_secs(10);
/// The accepted clock difference between replicas.
const SKEW: Duration = Duration::from_secs(60);
/// The maximum length of the queue.
const MAX_QUEUE: usize = 32;
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
    pub fn undo(&self) -> Option<Task> {
        (!self.renewed).then(|| Task::Reservation(self.node.clone(), self.at.clone()))
    }
}

/// The contents of the Lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Lease {
    holder: String,
    acquired: Option<SystemTime>,
    renewed: Option<SystemTime>,
    transitions: u64,
    queue: Vec<(String, u64)>,
}

#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Has {
        renewed: bool,
    },
    /// The node waits for this node.
    Waits(String),
}

/// Reserves the turn to join for this node. Refuses if another node has it.
pub fn reserve(
    cluster: &Cluster,
    cleaner: &Cleaner,
    client: &Client,
    node: &str,
    components: &str,
) -> Result<Reserved, Refusal> {
    let reserved = reserve_lease(cluster, cleaner, client, node)?;
    if cluster.has_joining_nodes() {
        reserve_joining_node(cluster, client, node, components).inspect_err(|_| {
            if let Some(undo) = reserved.undo() {
                cleaner.add(Task::JoiningNode(
                    CONTROL_PLANE_JOINING_NODE.into(),
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
) -> Result<Reserved, Refusal> {
    let at = lease();
    for _ in 0..TRIES {
        let found = client
            .find(&at)
            .map_err(|error| Refusal::from_api(&error))?;
        let mut lease = found.as_ref().map(Lease::read).unwrap_or_default();
        let now = SystemTime::now();
        let decision = lease.request_turn(node, now, &|name| cluster.node(name));
        let mut value = found
            .clone()
            .unwrap_or_else(|| json!({"metadata": {"name": NAME}}));
        lease.write(&mut value);
        let written = match found {
            None => client.create(&at.collection(), &value),
            Some(_) => client.update(&at, &value),
        };
        match written {
            Ok(_) => {}
            Err(error)
                if error.is_conflict() || error.is_already_exists() || error.is_not_found() =>
            {
                continue;
            }
            Err(error) => {
                // The API server may have executed the request.
                if decision == (Decision::Has { renewed: false }) {
                    cleaner.undo(Task::Reservation(node.into(), time::micros(now)));
                }
                return Err(Refusal::from_api(&error));
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

fn waits(holder: &str) -> Refusal {
    let message =
        format!("control planes join one at a time, and it is the turn of {holder}: try again");
    Refusal::temporary("control-plane-joining", message, RETRY)
}

/// Ends the reservation that this node got at time `at`, unless the node has renewed it since.
pub fn release(client: &Client, node: &str, at: &str) -> Result<(), client::Error> {
    let released = client.modify(&lease(), |value| {
        let mut lease = Lease::read(value);
        let is_its = lease.holder == node && text(value, "/spec/renewTime") == at;
        if is_its {
            lease.holder.clear();
            lease.write(value);
        }
        is_its
    });
    match released {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// Creates the JoiningNode of a worker. The old operator then annotates the node with its
/// components.
pub fn announce_worker(client: &Client, node: &str, components: &str) -> Result<(), Refusal> {
    let object = joining_node(node, node, components, false);
    let applied = client.apply_as(OLD_MANAGER, &JOINING_NODES.named(node), &object);
    applied.map(drop).map_err(|error| Refusal::from_api(&error))
}

fn reserve_joining_node(
    cluster: &Cluster,
    client: &Client,
    node: &str,
    components: &str,
) -> Result<(), Refusal> {
    let at = JOINING_NODES.named(CONTROL_PLANE_JOINING_NODE);
    let object = joining_node(CONTROL_PLANE_JOINING_NODE, node, components, true);
    for _ in 0..TRIES {
        match client.create(&JOINING_NODES.all(), &object) {
            Ok(_) => return Ok(()),
            Err(error) if error.is_already_exists() => {}
            Err(error) => return Err(Refusal::from_api(&error)),
        }
        let Some(found) = client
            .find(&at)
            .map_err(|error| Refusal::from_api(&error))?
        else {
            continue;
        };
        let holder = text(&found, "/spec/name");
        if holder == node {
            let renewed = client.merge(
                &at,
                &json!({"spec": {"deadline": object["spec"]["deadline"]}}),
            );
            return renewed.map(drop).map_err(|error| Refusal::from_api(&error));
        }
        // A deadline far in the future was set by a wrong clock.
        let now = SystemTime::now();
        let deadline = time::parse(text(&found, "/spec/deadline"));
        let is_over =
            deadline.is_none_or(|deadline| !(now..=now + 2 * VALIDITY).contains(&deadline));
        let made = time::parse(text(&found, "/metadata/creationTimestamp"));
        if !is_over && !is_ready_since(cluster.node(holder).as_ref(), made) {
            return Err(waits(holder));
        }
        // The old operator deletes it, but it may not be running.
        delete_joining_node(client, CONTROL_PLANE_JOINING_NODE, holder)
            .map_err(|error| Refusal::from_api(&error))?;
    }
    Err(waits("another node"))
}

/// Deletes the JoiningNode `name` if it belongs to this node.
pub fn delete_joining_node(client: &Client, name: &str, node: &str) -> Result<(), client::Error> {
    let at = JOINING_NODES.named(name);
    match client.find(&at) {
        // The precondition of the delete protects an object that another replica creates meanwhile.
        Ok(Some(found)) if text(&found, "/spec/name") == node => {
            client.delete_as(&at, &found).map(drop)
        }
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns the name of a node's JoiningNode.
pub fn joining_node_name(node: &str, control_plane: bool) -> &str {
    if control_plane {
        CONTROL_PLANE_JOINING_NODE
    } else {
        node
    }
}

fn joining_node(name: &str, node: &str, components: &str, control_plane: bool) -> Value {
    let validity = if control_plane {
        VALIDITY
    } else {
        WORKER_VALIDITY
    };
    json!({
        "apiVersion": JOINING_NODES.api_version(),
        "kind": "JoiningNode",
        "metadata": {"name": name},
        "spec": {
            "name": node, "componentsreference": components, "iscontrolplane": control_plane,
            "deadline": time::seconds(SystemTime::now() + validity),
        },
    })
}

fn lease() -> Object {
    LEASES.in_namespace(NAMESPACE).named(NAME)
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn secs(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Returns whether the node became Ready after it got its turn.
fn is_ready_since(node: Option<&NodeStatus>, turn: Option<SystemTime>) -> bool {
    // The time of a node's condition has whole seconds.
    let turn = turn.unwrap_or(UNIX_EPOCH);
    node.and_then(|node| node.ready_since)
        .is_some_and(|since| since + Duration::from_secs(1) > turn)
}

impl Lease {
    fn read(value: &Value) -> Lease {
        let queue = value
            .pointer("/metadata/annotations")
            .and_then(|annotations| annotations.get(QUEUE_ANNOTATION)?.as_str());
        Lease {
            holder: text(value, "/spec/holderIdentity").to_owned(),
            acquired: time::parse(text(value, "/spec/acquireTime")),
            renewed: time::parse(text(value, "/spec/renewTime")),
            transitions: value
                .pointer("/spec/leaseTransitions")
                .and_then(Value::as_u64)
                .unwrap_or_default(),
            queue: queue
                .and_then(|queue| serde_json::from_str(queue).ok())
                .unwrap_or_default(),
        }
    }

    fn write(&self, value: &mut Value) {
        if !value["metadata"]["annotations"].is_object() {
            value["metadata"]["annotations"] = json!({});
        }
        value["metadata"]["annotations"][QUEUE_ANNOTATION] = json!(self.queue).to_string().into();
        value["spec"] = json!({
            "holderIdentity": self.holder,
            "leaseDurationSeconds": VALIDITY.as_secs(),
            "acquireTime": self.acquired.map(time::micros),
            "renewTime": self.renewed.map(time::micros),
            "leaseTransitions": self.transitions,
        });
    }

    /// Decides on a request of `node` at time `now`, and changes the Lease accordingly. `node_of`
    /// finds Node objects.
    fn request_turn(
        &mut self,
        node: &str,
        now: SystemTime,
        node_of: &dyn Fn(&str) -> Option<NodeStatus>,
    ) -> Decision {
        let seconds = secs(now);
        self.clamp_future_times(now);
        self.queue
            .retain(|(_, asked)| seconds.saturating_sub(*asked) <= QUEUE_TIMEOUT.as_secs());
        let is_over = self.renewed.is_none_or(|renewed| renewed + VALIDITY < now)
            || is_ready_since(node_of(&self.holder).as_ref(), self.acquired);
        let is_held = !self.holder.is_empty() && !is_over;
        if is_held && self.holder == node {
            self.renewed = Some(now);
            self.leave_queue(node);
            return Decision::Has { renewed: true };
        }
        let first = self
            .queue
            .first()
            .map(|(first, _)| first.clone())
            .filter(|first| first != node);
        let before = if is_held {
            Some(self.holder.clone())
        } else {
            first
        };
        let Some(before) = before else {
            self.leave_queue(node);
            self.holder = node.into();
            self.transitions += 1;
            (self.acquired, self.renewed) = (Some(now), Some(now));
            return Decision::Has { renewed: false };
        };
        if let Some((_, asked)) = self.queue.iter_mut().find(|(name, _)| name == node) {
            *asked = seconds;
        } else if self.queue.len() < MAX_QUEUE {
            self.queue.push((node.into(), seconds));
        }
        Decision::Waits(before)
    }

    /// Replaces times in the future, written by a replica with a wrong clock, by the present: no
    /// node should wait until they pass.
    fn clamp_future_times(&mut self, now: SystemTime) {
        for time in [&mut self.acquired, &mut self.renewed]
            .into_iter()
            .flatten()
        {
            *time = if *time > now + SKEW { now } else { *time };
        }
        for (_, asked) in &mut self.queue {
            *asked = secs(now).min(*asked);
        }
    }

    fn leave_queue(&mut self, node: &str) {
        self.queue.retain(|(name, _)| name != node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
    }

    fn nobody(_: &str) -> Option<NodeStatus> {
        None
    }

    const HAS: Decision = Decision::Has { renewed: false };
    const STILL_HAS: Decision = Decision::Has { renewed: true };

    fn waits_for(name: &str) -> Decision {
        Decision::Waits(name.into())
    }

    #[test]
    fn one_has_the_turn_and_keeps_it_for_as_long_as_it_asks() {
        let mut lease = Lease::default();
        assert_eq!(lease.request_turn("a", at(0), &nobody), HAS);
        assert_eq!(lease.request_turn("b", at(1), &nobody), waits_for("a"));
        assert_eq!(lease.request_turn("a", at(500), &nobody), STILL_HAS);
        assert_eq!(lease.request_turn("b", at(1099), &nobody), waits_for("a"));
        assert_eq!(lease.request_turn("b", at(1101), &nobody), HAS);
        assert_eq!(lease.transitions, 2);
    }

    #[test]
    fn a_turn_ends_when_its_node_becomes_ready_after_it_began() {
        let ready = |since: u64| {
            move |_: &str| {
                Some(NodeStatus {
                    uid: "u".into(),
                    ready_since: Some(at(since)),
                })
            }
        };
        let mut lease = Lease::default();
        lease.request_turn("a", at(100), &nobody);
        assert_eq!(lease.request_turn("b", at(110), &ready(50)), waits_for("a"));
        assert_eq!(lease.request_turn("b", at(120), &ready(115)), HAS);
    }

    #[test]
    fn the_first_in_the_queue_is_next_unless_it_stopped_asking() {
        let mut lease = Lease::default();
        lease.request_turn("a", at(0), &nobody);
        for (name, when) in [("b", 1), ("c", 2), ("d", 3)] {
            assert_eq!(lease.request_turn(name, at(when), &nobody), waits_for("a"));
        }
        lease.holder.clear();
        assert_eq!(lease.request_turn("c", at(10), &nobody), waits_for("b"));
        assert_eq!(lease.request_turn("b", at(11), &nobody), HAS);
        lease.holder.clear();
        // c asked last at 10, d at 3.
        assert_eq!(lease.request_turn("d", at(69), &nobody), waits_for("c"));
        assert_eq!(lease.request_turn("d", at(71), &nobody), HAS);
        assert!(lease.queue.is_empty());
    }

    #[test]
    fn times_in_the_future_count_from_when_they_are_seen() {
        const YEAR: u64 = 365 * 24 * 60 * 60;
        let mut lease = Lease::default();
        lease.request_turn("a", at(YEAR), &nobody);
        assert_eq!(lease.request_turn("b", at(0), &nobody), waits_for("a"));
        let ready = |_: &str| {
            Some(NodeStatus {
                uid: "u".into(),
                ready_since: Some(at(10)),
            })
        };
        assert_eq!(lease.clone().request_turn("b", at(11), &ready), HAS);
        assert_eq!(lease.request_turn("b", at(600), &nobody), waits_for("a"));
        assert_eq!(lease.request_turn("b", at(601), &nobody), HAS);
        // A place in the queue ends as well.
        let mut lease = Lease {
            queue: vec![("c".into(), secs(at(YEAR)))],
            ..Lease::default()
        };
        assert_eq!(lease.request_turn("d", at(0), &nobody), waits_for("c"));
        assert_eq!(lease.request_turn("d", at(61), &nobody), HAS);
    }

    #[test]
    fn a_clock_that_is_a_little_ahead_changes_nothing() {
        let mut lease = Lease::default();
        lease.request_turn("a", at(5), &nobody);
        assert_eq!(lease.request_turn("b", at(0), &nobody), waits_for("a"));
        assert_eq!((lease.acquired, lease.renewed), (Some(at(5)), Some(at(5))));
    }

    #[test]
    fn a_lease_comes_back_as_it_was_written_and_nonsense_is_an_empty_one() {
        let mut lease = Lease::default();
        lease.request_turn("a", at(0) + Duration::from_micros(7), &nobody);
        lease.request_turn("b", at(1), &nobody);
        let mut value = json!({"metadata": {"name": NAME, "resourceVersion": "1"}});
        lease.write(&mut value);
        assert_eq!(
            (Lease::read(&value), &value["metadata"]["resourceVersion"]),
            (lease, &json!("1"))
        );
        let nonsense = json!({"metadata": {"annotations": {QUEUE_ANNOTATION: "[[1]]"}}, "spec": {"renewTime": "now"}});
        assert_eq!(Lease::read(&nonsense), Lease::default());
    }
}
