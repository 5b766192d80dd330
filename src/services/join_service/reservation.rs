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
use super::cluster::{Cluster, Node};
use super::refusal::Refusal;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, JOINING_NODES, LEASES, Object};

/// The name of the Lease.
const NAME: &str = "join-control-plane";
/// The name of the JoiningNode of every control plane.
const OLD_NAME: &str = "control-plane";
/// How long a reservation or a JoiningNode is valid, as in the old system.
const VALIDITY: Duration = Duration::from_secs(10 * 60);
const WORKER_VALIDITY: Duration = Duration::from_secs(48 * 60 * 60);
/// The field manager of the old join service.
const OLD_MANAGER: &str = "join-service";
/// The annotation of the Lease with the queue, as JSON `[["NAME", SECONDS_SINCE_1970], ..]`.
const LINE: &str = "firstlight/waiting";
/// A node leaves the queue after this time without a request. Clients try again after [`RETRY`].
const PATIENCE: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_secs(10);
/// The accepted clock difference between replicas.
const SKEW: Duration = Duration::from_secs(60);
/// The maximum length of the queue.
const MAX_LINE: usize = 32;
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
    line: Vec<(String, u64)>,
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
                cleaner.add(Task::JoiningNode(OLD_NAME.into(), node.into()));
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
        let found = client.find(&at).map_err(|error| Refusal::of_api(&error))?;
        let mut lease = found.as_ref().map(Lease::read).unwrap_or_default();
        let now = SystemTime::now();
        let decision = lease.ask(node, now, &|name| cluster.node(name));
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
                return Err(Refusal::of_api(&error));
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
    Refusal::passing("control-plane-joining", message, RETRY)
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
    applied.map(drop).map_err(|error| Refusal::of_api(&error))
}

fn reserve_joining_node(
    cluster: &Cluster,
    client: &Client,
    node: &str,
    components: &str,
) -> Result<(), Refusal> {
    let at = JOINING_NODES.named(OLD_NAME);
    let object = joining_node(OLD_NAME, node, components, true);
    for _ in 0..TRIES {
        match client.create(&JOINING_NODES.all(), &object) {
            Ok(_) => return Ok(()),
            Err(error) if error.is_already_exists() => {}
            Err(error) => return Err(Refusal::of_api(&error)),
        }
        let Some(found) = client.find(&at).map_err(|error| Refusal::of_api(&error))? else {
            continue;
        };
        let holder = text(&found, "/spec/name");
        if holder == node {
            let renewed = client.merge(
                &at,
                &json!({"spec": {"deadline": object["spec"]["deadline"]}}),
            );
            return renewed.map(drop).map_err(|error| Refusal::of_api(&error));
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
        delete_joining_node(client, OLD_NAME, holder).map_err(|error| Refusal::of_api(&error))?;
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
    if control_plane { OLD_NAME } else { node }
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
fn is_ready_since(node: Option<&Node>, turn: Option<SystemTime>) -> bool {
    // The time of a node's condition has whole seconds.
    let turn = turn.unwrap_or(UNIX_EPOCH);
    node.and_then(|node| node.ready_since)
        .is_some_and(|since| since + Duration::from_secs(1) > turn)
}

impl Lease {
    fn read(value: &Value) -> Lease {
        let line = value
            .pointer("/metadata/annotations")
            .and_then(|annotations| annotations.get(LINE)?.as_str());
        Lease {
            holder: text(value, "/spec/holderIdentity").to_owned(),
            acquired: time::parse(text(value, "/spec/acquireTime")),
            renewed: time::parse(text(value, "/spec/renewTime")),
            transitions: value
                .pointer("/spec/leaseTransitions")
                .and_then(Value::as_u64)
                .unwrap_or_default(),
            line: line
                .and_then(|line| serde_json::from_str(line).ok())
                .unwrap_or_default(),
        }
    }

    fn write(&self, value: &mut Value) {
        if !value["metadata"]["annotations"].is_object() {
            value["metadata"]["annotations"] = json!({});
        }
        value["metadata"]["annotations"][LINE] = json!(self.line).to_string().into();
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
    fn ask(
        &mut self,
        node: &str,
        now: SystemTime,
        node_of: &dyn Fn(&str) -> Option<Node>,
    ) -> Decision {
        let seconds = secs(now);
        self.end_future(now);
        self.line
            .retain(|(_, asked)| seconds.saturating_sub(*asked) <= PATIENCE.as_secs());
        let is_over = self.renewed.is_none_or(|renewed| renewed + VALIDITY < now)
            || is_ready_since(node_of(&self.holder).as_ref(), self.acquired);
        let is_held = !self.holder.is_empty() && !is_over;
        if is_held && self.holder == node {
            self.renewed = Some(now);
            self.leave_line(node);
            return Decision::Has { renewed: true };
        }
        let first = self
            .line
            .first()
            .map(|(first, _)| first.clone())
            .filter(|first| first != node);
        let before = if is_held {
            Some(self.holder.clone())
        } else {
            first
        };
        let Some(before) = before else {
            self.leave_line(node);
            self.holder = node.into();
            self.transitions += 1;
            (self.acquired, self.renewed) = (Some(now), Some(now));
            return Decision::Has { renewed: false };
        };
        if let Some((_, asked)) = self.line.iter_mut().find(|(name, _)| name == node) {
            *asked = seconds;
        } else if self.line.len() < MAX_LINE {
            self.line.push((node.into(), seconds));
        }
        Decision::Waits(before)
    }

    /// Replaces times in the future, written by a replica with a wrong clock, by the present: no
    /// node should wait until they pass.
    fn end_future(&mut self, now: SystemTime) {
        for time in [&mut self.acquired, &mut self.renewed]
            .into_iter()
            .flatten()
        {
            *time = if *time > now + SKEW { now } else { *time };
        }
        for (_, asked) in &mut self.line {
            *asked = secs(now).min(*asked);
        }
    }

    fn leave_line(&mut self, node: &str) {
        self.line.retain(|(name, _)| name != node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
    }

    fn nobody(_: &str) -> Option<Node> {
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
        assert_eq!(lease.ask("a", at(0), &nobody), HAS);
        assert_eq!(lease.ask("b", at(1), &nobody), waits_for("a"));
        assert_eq!(lease.ask("a", at(500), &nobody), STILL_HAS);
        assert_eq!(lease.ask("b", at(1099), &nobody), waits_for("a"));
        assert_eq!(lease.ask("b", at(1101), &nobody), HAS);
        assert_eq!(lease.transitions, 2);
    }

    #[test]
    fn a_turn_is_over_when_its_node_is_ready_and_not_by_what_it_was_before() {
        let ready = |since: u64| {
            move |_: &str| {
                Some(Node {
                    uid: "u".into(),
                    ready_since: Some(at(since)),
                })
            }
        };
        let mut lease = Lease::default();
        lease.ask("a", at(100), &nobody);
        assert_eq!(lease.ask("b", at(110), &ready(50)), waits_for("a"));
        assert_eq!(lease.ask("b", at(120), &ready(115)), HAS);
    }

    #[test]
    fn who_waits_longest_is_next_unless_it_went_away() {
        let mut lease = Lease::default();
        lease.ask("a", at(0), &nobody);
        for (name, when) in [("b", 1), ("c", 2), ("d", 3)] {
            assert_eq!(lease.ask(name, at(when), &nobody), waits_for("a"));
        }
        lease.holder.clear();
        assert_eq!(lease.ask("c", at(10), &nobody), waits_for("b"));
        assert_eq!(lease.ask("b", at(11), &nobody), HAS);
        lease.holder.clear();
        // c asked last at 10, d at 3.
        assert_eq!(lease.ask("d", at(69), &nobody), waits_for("c"));
        assert_eq!(lease.ask("d", at(71), &nobody), HAS);
        assert!(lease.line.is_empty());
    }

    #[test]
    fn times_in_the_future_count_from_when_they_are_seen() {
        const YEAR: u64 = 365 * 24 * 60 * 60;
        let mut lease = Lease::default();
        lease.ask("a", at(YEAR), &nobody);
        assert_eq!(lease.ask("b", at(0), &nobody), waits_for("a"));
        let ready = |_: &str| {
            Some(Node {
                uid: "u".into(),
                ready_since: Some(at(10)),
            })
        };
        assert_eq!(lease.clone().ask("b", at(11), &ready), HAS);
        assert_eq!(lease.ask("b", at(600), &nobody), waits_for("a"));
        assert_eq!(lease.ask("b", at(601), &nobody), HAS);
        // A place in the queue ends as well.
        let mut lease = Lease {
            line: vec![("c".into(), secs(at(YEAR)))],
            ..Lease::default()
        };
        assert_eq!(lease.ask("d", at(0), &nobody), waits_for("c"));
        assert_eq!(lease.ask("d", at(61), &nobody), HAS);
    }

    #[test]
    fn a_clock_that_is_a_little_ahead_changes_nothing() {
        let mut lease = Lease::default();
        lease.ask("a", at(5), &nobody);
        assert_eq!(lease.ask("b", at(0), &nobody), waits_for("a"));
        assert_eq!((lease.acquired, lease.renewed), (Some(at(5)), Some(at(5))));
    }

    #[test]
    fn a_lease_comes_back_as_it_was_written_and_nonsense_is_an_empty_one() {
        let mut lease = Lease::default();
        lease.ask("a", at(0) + Duration::from_micros(7), &nobody);
        lease.ask("b", at(1), &nobody);
        let mut value = json!({"metadata": {"name": NAME, "resourceVersion": "1"}});
        lease.write(&mut value);
        assert_eq!(
            (Lease::read(&value), &value["metadata"]["resourceVersion"]),
            (lease, &json!("1"))
        );
        let nonsense =
            json!({"metadata": {"annotations": {LINE: "[[1]]"}}, "spec": {"renewTime": "now"}});
        assert_eq!(Lease::read(&nonsense), Lease::default());
    }
}
