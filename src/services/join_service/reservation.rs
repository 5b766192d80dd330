//! One control plane joins at a time: etcd takes one new member after the other.
//!
//! A Lease says who, and for how long; whoever asks again for the same node has it still. It is over when the node is Ready,
//! when its ticket came to nothing, or after ten minutes. Who has to wait is put into a line, and the first in it is the next,
//! unless it has not asked for some time. Where the old system's resource JoiningNode is there, one named `control-plane` is
//! made too: old join services and the old operator go by it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::cleaner::{Cleaner, Task};
use super::cluster::{Cluster, Node};
use super::refusal::Refusal;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, JOINING_NODES, LEASES, Object};

/// The Lease.
const NAME: &str = "join-control-plane";
/// The JoiningNode of whichever control plane joins.
const OLD_NAME: &str = "control-plane";
/// As the old system has them.
const VALIDITY: Duration = Duration::from_secs(10 * 60);
const WORKER_VALIDITY: Duration = Duration::from_secs(48 * 60 * 60);
/// The old join service's name among field managers.
const OLD_MANAGER: &str = "join-service";
/// Who waits: an annotation of the Lease, JSON `[["NAME", SECONDS_SINCE_1970], ..]`.
const LINE: &str = "firstlight/waiting";
/// Who has not asked for this long waits no more. Clients ask again after [`RETRY`].
const PATIENCE: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_secs(10);
/// How far another replica's clock may be ahead.
const SKEW: Duration = Duration::from_secs(60);
/// More control planes never wait.
const MAX_LINE: usize = 32;
const TRIES: usize = 8;

/// What a ticket got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    node: String,
    /// The Lease's renewTime, to the microsecond: no other ticket of the node has the same.
    at: String,
    /// Whether the node had it before: then it is not this ticket's to end.
    pub renewed: bool,
}

impl Reserved {
    /// What takes it back.
    pub fn undo(&self) -> Option<Task> {
        (!self.renewed).then(|| Task::Reservation(self.node.clone(), self.at.clone()))
    }
}

/// The Lease, read.
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
    /// Behind this node.
    Waits(String),
}

/// Gives this node the turn to join, or says who has it.
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
                // it may have been carried out
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
    Err(waits("another one"))
}

fn waits(holder: &str) -> Refusal {
    let message =
        format!("control planes join one at a time, and it is the turn of {holder}: try again");
    Refusal::passing("control-plane-joining", message, RETRY)
}

/// Ends the reservation that this node got then, unless it has asked again since.
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

/// Tells the old operator of a worker: it will note on the node with which components it came.
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
        // one further ahead was set by a clock that is wrong
        let now = SystemTime::now();
        let deadline = time::parse(text(&found, "/spec/deadline"));
        let is_over =
            deadline.is_none_or(|deadline| !(now..=now + 2 * VALIDITY).contains(&deadline));
        let made = time::parse(text(&found, "/metadata/creationTimestamp"));
        if !is_over && !is_ready_since(cluster.node(holder).as_ref(), made) {
            return Err(waits(holder));
        }
        // where an operator runs it would have done so
        delete_joining_node(client, OLD_NAME, holder).map_err(|error| Refusal::of_api(&error))?;
    }
    Err(waits("another one"))
}

/// Deletes the JoiningNode of this name if it is this node's.
pub fn delete_joining_node(client: &Client, name: &str, node: &str) -> Result<(), client::Error> {
    let at = JOINING_NODES.named(name);
    match client.find(&at) {
        // another replica may make one anew meanwhile
        Ok(Some(found)) if text(&found, "/spec/name") == node => {
            client.delete_as(&at, &found).map(drop)
        }
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The name of the JoiningNode of a node.
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

/// Whether the node became Ready after it got its turn.
fn is_ready_since(node: Option<&Node>, turn: Option<SystemTime>) -> bool {
    // a node's condition has whole seconds
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

    /// What happens when `node` asks at `now`; `node_of` finds Node objects.
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

    /// What a replica wrote whose clock is ahead counts from now on: nobody is to wait until the others' clocks are there.
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
        // c asked last at 10, d at 3
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
        // nor is a place in the line for ever
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
