//! The Lease that holds the turn of control planes to join: which node has it, since when, and
//! which nodes wait for it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::cluster::constellation::VALIDITY;
use crate::cluster::node_status::NodeStatus;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, LEASES, Object};
use kubernetes::objects::Lease;

/// The name of the Lease.
pub use kubernetes::machine_record::TURN as NAME;
/// The annotation of the Lease with the queue, as JSON `[["NAME", SECONDS_SINCE_1970], ..]`.
const QUEUE_ANNOTATION: &str = "firstlight/waiting";
/// A node leaves the queue after this time without a request.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);
/// The accepted clock difference between replicas.
const SKEW: Duration = Duration::from_secs(60);
/// The maximum length of the queue.
const MAX_QUEUE: usize = 32;

/// The content of the Lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JoinTurn {
    holder: String,
    acquired: Option<SystemTime>,
    renewed: Option<SystemTime>,
    transitions: i64,
    queue: Vec<(String, u64)>,
}

/// The answer to a request for the turn.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    /// The node has the turn.
    Has {
        /// Whether it had the turn before.
        renewed: bool,
    },
    /// The node waits for this node.
    Waits(String),
}

/// Returns the Lease.
pub fn object() -> Object {
    LEASES.in_namespace(NAMESPACE).named(NAME)
}

/// Ends the reservation that this node got at time `at`, unless the node has renewed it since.
pub fn release(client: &Client, node: &str, at: &str) -> Result<(), client::Error> {
    let released = client.modify_as(&object(), |lease: Lease, _| {
        let turn = JoinTurn {
            holder: String::new(),
            ..JoinTurn::read(&lease)
        };
        let is_its = lease.spec.holder_identity == node && lease.spec.renew_time == at;
        is_its.then(|| turn.patch())
    });
    match released {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

impl JoinTurn {
    /// Reads the Lease. A field that is missing or not valid is empty.
    pub fn read(lease: &Lease) -> JoinTurn {
        let spec = &lease.spec;
        let queue = lease.metadata.annotation(QUEUE_ANNOTATION);
        JoinTurn {
            holder: spec.holder_identity.clone(),
            acquired: time::parse(&spec.acquire_time),
            renewed: time::parse(&spec.renew_time),
            transitions: spec.lease_transitions,
            queue: queue
                .and_then(|queue| serde_json::from_str(queue).ok())
                .unwrap_or_default(),
        }
    }

    /// Returns the fields of the Lease with this content.
    pub fn patch(&self) -> Value {
        json!({
            "metadata": {"annotations": {QUEUE_ANNOTATION: json!(self.queue).to_string()}},
            "spec": {
                "holderIdentity": self.holder,
                "leaseDurationSeconds": VALIDITY.as_secs(),
                "acquireTime": self.acquired.map(time::micros),
                "renewTime": self.renewed.map(time::micros),
                "leaseTransitions": self.transitions,
            },
        })
    }

    /// Decides on a request of `node` at time `now`, and changes the Lease accordingly. `node_of`
    /// finds Node objects.
    pub fn request_turn(
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
            || node_of(&self.holder).is_some_and(|node| node.is_ready_since(self.acquired));
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

fn secs(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
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
        let mut lease = JoinTurn::default();
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
                    ..NodeStatus::default()
                })
            }
        };
        let mut lease = JoinTurn::default();
        lease.request_turn("a", at(100), &nobody);
        assert_eq!(lease.request_turn("b", at(110), &ready(50)), waits_for("a"));
        assert_eq!(lease.request_turn("b", at(120), &ready(115)), HAS);
    }

    #[test]
    fn the_first_in_the_queue_is_next_unless_it_stopped_asking() {
        let mut lease = JoinTurn::default();
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
        let mut lease = JoinTurn::default();
        lease.request_turn("a", at(YEAR), &nobody);
        assert_eq!(lease.request_turn("b", at(0), &nobody), waits_for("a"));
        let ready = |_: &str| {
            Some(NodeStatus {
                uid: "u".into(),
                ready_since: Some(at(10)),
                ..NodeStatus::default()
            })
        };
        assert_eq!(lease.clone().request_turn("b", at(11), &ready), HAS);
        assert_eq!(lease.request_turn("b", at(600), &nobody), waits_for("a"));
        assert_eq!(lease.request_turn("b", at(601), &nobody), HAS);
        // A place in the queue ends as well.
        let mut lease = JoinTurn {
            queue: vec![("c".into(), secs(at(YEAR)))],
            ..JoinTurn::default()
        };
        assert_eq!(lease.request_turn("d", at(0), &nobody), waits_for("c"));
        assert_eq!(lease.request_turn("d", at(61), &nobody), HAS);
    }

    #[test]
    fn a_clock_that_is_a_little_ahead_changes_nothing() {
        let mut lease = JoinTurn::default();
        lease.request_turn("a", at(5), &nobody);
        assert_eq!(lease.request_turn("b", at(0), &nobody), waits_for("a"));
        assert_eq!((lease.acquired, lease.renewed), (Some(at(5)), Some(at(5))));
    }

    #[test]
    fn a_lease_comes_back_as_it_was_written_and_nonsense_is_an_empty_one() {
        let mut lease = JoinTurn::default();
        lease.request_turn("a", at(0) + Duration::from_micros(7), &nobody);
        lease.request_turn("b", at(1), &nobody);
        let read = |lease: Value| JoinTurn::read(&serde_json::from_value(lease).unwrap());
        assert_eq!(read(lease.patch()), lease);
        let nonsense = json!({"metadata": {"annotations": {QUEUE_ANNOTATION: "[[1]]"}}, "spec": {"renewTime": "now"}});
        assert_eq!(read(nonsense), JoinTurn::default());
    }
}
