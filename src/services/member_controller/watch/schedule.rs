//! Which node is asked when, and what is known about each. Without I/O; the caller passes the time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::decide::{
    self, AttestationState, Census, HEARTBEAT, Known, Mode, NodeAnswer, Rules, WatchReason,
};
use crate::cluster::node_status::{Attested, NodeStatus};
use base::crypto::random;
use kubernetes::machine_record::MachineRecord;

/// When all nodes are asked at once, the time for each: at most 50 of them in a second.
const EACH: Duration = Duration::from_millis(20);
/// A node that reboots or becomes Ready is asked within this time.
const SOON: Duration = Duration::from_secs(1);

/// The nodes of the cluster, while this replica leads.
pub struct Schedule {
    interval: Duration,
    rules: Rules,
    /// Until when this replica leads; `None` if it does not.
    until: Option<Instant>,
    /// When it began to lead.
    began: Instant,
    nodes: HashMap<String, Entry>,
    /// Times and nodes. An entry is outdated unless the node is due at this time.
    queue: BinaryHeap<Reverse<(Instant, String)>>,
    census: Census,
    /// Increases when all nodes must be asked again, for a new policy.
    round: u64,
    round_began: Instant,
    /// How many nodes were not asked in this round.
    pending: usize,
    masses: Masses,
    modes: Modes,
}

/// What is counted to find out whether too many nodes are bad. Only nodes with a record count, because Nodes can be made
/// by others than tickets.
#[derive(Default)]
struct Masses {
    /// Nodes whose own evidence was accepted last, also if they have been silent since.
    accepted: usize,
    /// The machines whose own evidence was refused last, and how many nodes each has. A machine may have several names.
    refused: HashMap<String, usize>,
    /// Nodes that are unproven now, and the others.
    unproven: usize,
    proven: usize,
}

/// What may follow from a refusal, and from a node that proves nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Modes {
    refused: Mode,
    unproven: Mode,
}

/// How a node counts in [`Masses`].
#[derive(Clone, PartialEq, Eq)]
struct Share {
    evidence: Evidence,
    is_unproven: bool,
}

#[derive(Clone, PartialEq, Eq)]
enum Evidence {
    None,
    Accepted,
    /// That of this machine was refused.
    Refused(String),
}

struct Entry {
    uid: String,
    boot: String,
    is_ready: bool,
    known: Known,
    standing: AttestationState,
    /// How it counts; `None` without a record.
    share: Option<Share>,
    due: Instant,
    is_asked: bool,
    /// Whether something happened while the node was asked.
    again: bool,
    /// The last round in which it answered.
    round: Option<u64>,
    /// When its condition was last written; until this replica writes it, a guess.
    written: Option<Instant>,
    /// The address of its Node that is not in its record.
    moved: Option<IpAddr>,
    /// The condition that this replica has written.
    shown: Option<[String; 3]>,
}

/// A node that is due.
#[derive(Debug)]
pub struct DueNode {
    /// Its name.
    pub node: String,
    round: u64,
}

/// What follows from an answer.
#[derive(Debug)]
pub struct Follow {
    /// Status and reason of the condition; `None`: as it is.
    pub condition: Option<(&'static str, WatchReason)>,
    /// Whether the condition's time is old.
    pub is_late: bool,
    /// Label, taint and cordon; its condition has no meaning.
    pub wanted: Attested,
    /// Whether the record should say that the machine is refused; `None`: as it is.
    pub closes: Option<bool>,
}

impl Schedule {
    /// Creates a schedule of a replica that does not lead.
    pub fn new(interval: Duration, rules: Rules) -> Schedule {
        let now = Instant::now();
        Schedule {
            interval,
            rules,
            until: None,
            began: now,
            nodes: HashMap::new(),
            queue: BinaryHeap::new(),
            census: Census::default(),
            round: 0,
            round_began: now,
            pending: 0,
            masses: Masses::default(),
            modes: Modes::WAITING,
        }
    }

    /// Returns whether this replica leads.
    pub fn leads(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until > now)
    }

    /// Leads until a later time.
    pub fn extend(&mut self, until: Instant) {
        self.until = Some(until);
    }

    /// Begins to lead: asks all these nodes.
    pub fn begin(&mut self, until: Instant, nodes: Vec<(String, NodeStatus)>) {
        let now = Instant::now();
        self.stop();
        (self.until, self.began) = (Some(until), now);
        for (name, node) in nodes {
            self.add(&name, &node, now);
        }
        self.ask_all();
    }

    /// Ends to lead, and forgets everything.
    pub fn stop(&mut self) {
        self.until = None;
        self.nodes.clear();
        self.queue.clear();
        (self.census, self.pending) = (Census::default(), 0);
        self.masses = Masses::default();
    }

    /// Begins a round: asks all nodes, at most [`EACH`] apart, and all in a quarter of the interval.
    pub fn ask_all(&mut self) {
        self.round += 1;
        self.round_began = Instant::now();
        self.pending = self.nodes.len();
        self.modes = Modes::WAITING;
        self.spread(|_| true);
    }

    /// Asks all nodes again, without a new round.
    pub fn ask_again(&mut self) {
        self.spread(|_| true);
    }

    /// Asks these nodes soon.
    fn spread(&mut self, which: fn(&Entry) -> bool) {
        let names: Vec<String> = self
            .nodes
            .iter()
            .filter(|(_, it)| which(it))
            .map(|(name, _)| name.clone())
            .collect();
        let time = (EACH * names.len() as u32).min(self.interval / 4);
        for name in names {
            self.ask_within(&name, time);
        }
    }

    /// Asks a node at a random moment within this time, or after its present answer.
    pub fn ask_within(&mut self, name: &str, time: Duration) {
        let due = Instant::now() + time.mul_f64(fraction());
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.again = entry.is_asked;
            entry.due = due;
            self.queue.push(Reverse((due, name.to_owned())));
        }
    }

    fn add(&mut self, name: &str, node: &NodeStatus, now: Instant) {
        self.remove(name);
        let entry = Entry {
            uid: node.uid.clone(),
            boot: node.boot.clone(),
            is_ready: node.ready_since.is_some(),
            known: Known::default(),
            standing: AttestationState::Open,
            share: None,
            due: now,
            is_asked: false,
            again: false,
            round: None,
            written: now.checked_sub(HEARTBEAT.mul_f64(fraction())),
            moved: None,
            shown: None,
        };
        self.census.add(entry.standing);
        self.pending += 1;
        self.nodes.insert(name.to_owned(), entry);
    }

    fn remove(&mut self, name: &str) {
        if let Some(entry) = self.nodes.remove(name) {
            self.census.remove(entry.standing);
            if let Some(share) = &entry.share {
                self.masses.remove(share);
            }
            if entry.round != Some(self.round) {
                self.pending = self.pending.saturating_sub(1);
            }
        }
    }

    /// Asks a node at once that is new, has rebooted or has become Ready. `None`: it was deleted.
    pub fn node_changed(&mut self, name: &str, node: Option<&NodeStatus>) {
        let now = Instant::now();
        if self.until.is_none() {
            return;
        }
        let Some(node) = node else {
            return self.remove(name);
        };
        let is_ready = node.ready_since.is_some();
        let before = self.nodes.get_mut(name).filter(|it| it.uid == node.uid);
        let is_news = match before {
            None => {
                self.add(name, node, now);
                true
            }
            Some(entry) => {
                let is_news = entry.boot != node.boot || (is_ready && !entry.is_ready);
                (entry.boot, entry.is_ready) = (node.boot.clone(), is_ready);
                is_news
            }
        };
        if is_news {
            self.ask_within(name, SOON);
        }
    }

    /// Returns a node that is due, or when the next one is.
    pub fn next(&mut self, now: Instant) -> Result<DueNode, Option<Instant>> {
        if !self.leads(now) {
            return Err(None);
        }
        while let Some(Reverse((due, _))) = self.queue.peek() {
            if *due > now {
                return Err(Some(*due));
            }
            let Some(Reverse((due, node))) = self.queue.pop() else {
                break;
            };
            let entry = self.nodes.get_mut(&node);
            if let Some(entry) = entry.filter(|entry| entry.due == due && !entry.is_asked) {
                entry.is_asked = true;
                let round = self.round;
                return Ok(DueNode { node, round });
            }
        }
        Err(None)
    }

    /// Notes an answer, and returns what follows from it; nothing if the node has gone meanwhile, or this
    /// replica no longer leads.
    pub fn answered(
        &mut self,
        DueNode { node: name, round }: DueNode,
        (node, record): (&NodeStatus, Option<&MachineRecord>),
        answer: &NodeAnswer,
        now: Instant,
    ) -> Option<Follow> {
        if !self.leads(now) {
            return None;
        }
        let entry = self.nodes.get_mut(&name)?;
        entry.is_asked = false;
        let (is_other, again) = (entry.uid != node.uid, std::mem::take(&mut entry.again));
        if is_other {
            self.ask_within(&name, SOON);
            return None;
        }
        if entry.round != Some(self.round) && round == self.round {
            self.pending = self.pending.saturating_sub(1);
        }
        entry.round = Some(round);
        let mut known = std::mem::take(&mut entry.known);
        if record.is_some_and(|record| record.refused.is_some()) {
            // the Node, or this replica, may be new
            known = known.refused_before();
        }
        entry.known = known.after(answer, now);
        let standing = entry.known.standing(&self.rules, now);
        self.census
            .remove(std::mem::replace(&mut entry.standing, standing));
        self.census.add(standing);
        let share = record.map(|record| Share::of(&entry.known, standing, &name, record));
        if entry.share != share {
            if let Some(before) = std::mem::replace(&mut entry.share, share.clone()) {
                self.masses.remove(&before);
            }
            if let Some(share) = &share {
                self.masses.add(share);
            }
        }
        let known = entry.known.clone();
        let is_late = entry.known.good == Some(now)
            && entry
                .written
                .is_none_or(|at| now.duration_since(at) >= HEARTBEAT);
        if again {
            self.ask_within(&name, SOON)
        } else {
            self.schedule(&name, known.pause(self.interval), now)
        }
        let mode = self.update_modes(now).of(standing);
        Some(Follow {
            condition: known.condition(&self.rules, now),
            is_late,
            wanted: decide::desired(&known, &self.rules, mode, now, &node.attested),
            closes: decide::closes(&known, &self.rules, mode, now),
        })
    }

    /// Asks a node after this pause, give or take a tenth, so that the nodes stay spread.
    fn schedule(&mut self, name: &str, pause: Duration, now: Instant) {
        let due = now + pause.mul_f64(0.9 + 0.2 * fraction());
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.due = due;
            self.queue.push(Reverse((due, name.to_owned())));
        }
    }

    /// Returns what may follow now. If that has changed, bad nodes are asked again, so that they get or
    /// lose what follows.
    fn update_modes(&mut self, now: Instant) -> Modes {
        let is_complete =
            self.pending == 0 || now.duration_since(self.round_began) >= self.interval;
        let mode = |good: usize, bad: usize| match is_complete {
            false => Mode::Waiting,
            true if decide::is_mass(good, bad, self.rules.share) => Mode::Mass,
            true => Mode::Normal,
        };
        let masses = &self.masses;
        let modes = Modes {
            refused: mode(masses.accepted, masses.refused.len()),
            unproven: mode(masses.proven, masses.unproven),
        };
        if modes != self.modes {
            if modes.refused == Mode::Mass && self.modes.refused != Mode::Mass {
                log::warn!(
                    "{} of {} machines are refused at once: until fewer are, this service only reports it; check the attestation \
                     policy, and the verifier's collateral",
                    masses.refused.len(),
                    masses.refused.len() + masses.accepted
                );
            }
            if modes.unproven == Mode::Mass && self.modes.unproven != Mode::Mass {
                log::warn!(
                    "{} of {} nodes do not answer, or another machine answers: until fewer are affected, this service only reports it; \
                     check the network between the control planes and the nodes",
                    masses.unproven,
                    masses.unproven + masses.proven
                );
            }
            self.modes = modes;
            self.spread(|entry| {
                matches!(
                    entry.standing,
                    AttestationState::Refused | AttestationState::Unproven
                )
            });
        }
        modes
    }

    /// Notes the address of a Node that is not in its record. Returns whether that has changed.
    pub fn note_moved(&mut self, name: &str, moved: Option<IpAddr>) -> bool {
        let entry = self.nodes.get_mut(name);
        entry.is_some_and(|entry| std::mem::replace(&mut entry.moved, moved) != moved)
    }

    /// Notes that a node's condition was written. Returns the one that this replica wrote before.
    pub fn wrote(&mut self, name: &str, shown: [String; 3], now: Instant) -> Option<[String; 3]> {
        let entry = self.nodes.get_mut(name)?;
        entry.written = Some(now);
        entry.shown.replace(shown)
    }

    /// Returns how many nodes stand how, if this replica leads.
    pub fn census(&self) -> Option<Census> {
        self.until.map(|_| self.census)
    }

    /// Returns whether too many nodes are bad, if this replica leads.
    pub fn is_mass(&self) -> Option<bool> {
        let modes = [self.modes.refused, self.modes.unproven];
        self.until.map(|_| modes.contains(&Mode::Mass))
    }

    /// Returns the age of the oldest last good evidence, if this replica leads.
    pub fn oldest(&self, now: Instant) -> Option<Duration> {
        self.until?;
        let goods = self.nodes.values().map(|it| it.known.good);
        let oldest = goods.map(|good| good.unwrap_or(self.began)).min();
        Some(oldest.map_or(Duration::ZERO, |at| now.duration_since(at)))
    }
}

impl Modes {
    const WAITING: Modes = Modes {
        refused: Mode::Waiting,
        unproven: Mode::Waiting,
    };

    fn of(self, standing: AttestationState) -> Mode {
        match standing {
            AttestationState::Refused => self.refused,
            _ => self.unproven,
        }
    }
}

impl Share {
    fn of(known: &Known, standing: AttestationState, name: &str, record: &MachineRecord) -> Share {
        // the evidence of some variants names no machine
        let machine = if record.machine.is_empty() {
            name
        } else {
            &record.machine
        };
        let evidence = match (known.is_refused(), known.was_accepted()) {
            (true, _) => Evidence::Refused(machine.to_owned()),
            (false, true) => Evidence::Accepted,
            (false, false) => Evidence::None,
        };
        Share {
            evidence,
            is_unproven: standing == AttestationState::Unproven,
        }
    }
}

impl Masses {
    fn add(&mut self, share: &Share) {
        match &share.evidence {
            Evidence::None => {}
            Evidence::Accepted => self.accepted += 1,
            Evidence::Refused(machine) => {
                *self.refused.entry(machine.clone()).or_default() += 1;
            }
        }
        if share.is_unproven {
            self.unproven += 1
        } else {
            self.proven += 1
        }
    }

    fn remove(&mut self, share: &Share) {
        match &share.evidence {
            Evidence::None => {}
            Evidence::Accepted => self.accepted = self.accepted.saturating_sub(1),
            Evidence::Refused(machine) => {
                let count = self.refused.get_mut(machine);
                let is_last = count.is_some_and(|count| {
                    *count = count.saturating_sub(1);
                    *count == 0
                });
                if is_last {
                    self.refused.remove(machine);
                }
            }
        }
        let count = if share.is_unproven {
            &mut self.unproven
        } else {
            &mut self.proven
        };
        *count = count.saturating_sub(1);
    }
}

/// Returns a random number from 0 to 1.
fn fraction() -> f64 {
    f64::from(u16::from_le_bytes(random())) / f64::from(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::decide::WatchAction;
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn node(uid: &str, boot: &str) -> NodeStatus {
        NodeStatus {
            uid: uid.into(),
            boot: boot.into(),
            ..NodeStatus::default()
        }
    }

    /// A schedule that leads, with this number of nodes.
    fn leading(count: usize) -> Schedule {
        leading_of((0..count).map(|number| format!("n{number}")))
    }

    fn leading_of(names: impl Iterator<Item = String>) -> Schedule {
        let rules = Rules {
            action: WatchAction::Taint,
            silence: None,
            share: 20,
            close_disks: false,
        };
        let mut schedule = Schedule::new(HOUR, rules);
        let nodes = names.map(|name| (name, node("u", "b")));
        schedule.begin(Instant::now() + 100 * HOUR, nodes.collect());
        schedule
    }

    /// Answers for all nodes that are due at this time; returns their names and what follows.
    fn answer_all(
        schedule: &mut Schedule,
        now: Instant,
        answer: impl Fn(&str) -> NodeAnswer,
    ) -> Vec<(String, Option<String>)> {
        let mut all = Vec::new();
        while let Ok(job) = schedule.next(now) {
            let name = job.node.clone();
            let record = record_of(&name);
            let follow =
                schedule.answered(job, (&node("u", "b"), Some(&record)), &answer(&name), now);
            all.push((name, follow.unwrap().wanted.taint));
        }
        all
    }

    /// The record of a machine of the node's name, up to a hyphen: a machine may have several nodes.
    fn record_of(node: &str) -> MachineRecord {
        let machine = node.split('-').next().unwrap_or_default();
        MachineRecord {
            node: node.into(),
            machine: machine.into(),
            ..MachineRecord::default()
        }
    }

    fn refused() -> NodeAnswer {
        NodeAnswer::Refused(WatchReason::default())
    }

    #[test]
    fn each_node_is_asked_once_in_an_interval_and_the_nodes_are_spread() {
        let mut schedule = leading(1000);
        let begin = Instant::now();
        // all of them within 20 s, 20 ms for each
        let first = answer_all(&mut schedule, begin + Duration::from_secs(21), |_| {
            NodeAnswer::Accepted
        });
        assert_eq!(first.len(), 1000);
        let quarter = |schedule: &mut Schedule, minutes: u64| {
            let now = begin + Duration::from_secs(60 * minutes);
            answer_all(schedule, now, |_| NodeAnswer::Accepted).len()
        };
        assert_eq!(quarter(&mut schedule, 53), 0);
        let counts: Vec<usize> = (54..=67).map(|at| quarter(&mut schedule, at)).collect();
        assert_eq!(counts.iter().sum::<usize>(), 1000);
        assert!(counts.iter().all(|count| *count < 200), "{counts:?}");
    }

    #[test]
    fn a_node_is_asked_at_once_when_it_is_new_reboots_becomes_ready_or_is_made_again() {
        let mut schedule = leading(1);
        let now = Instant::now() + 2 * SOON;
        assert_eq!(
            answer_all(&mut schedule, now, |_| NodeAnswer::Accepted).len(),
            1
        );
        let ready = NodeStatus {
            ready_since: Some(std::time::SystemTime::now()),
            ..node("u", "c")
        };
        let mut change = |name: &str, node: Option<&NodeStatus>| {
            schedule.node_changed(name, node);
            let job = schedule.next(now).ok()?;
            // the answer is for the node that it was
            let other = NodeStatus::default();
            let node = node.unwrap_or(&other);
            let follow = schedule.answered(job, (node, None), &NodeAnswer::Accepted, now);
            follow.map(|follow| follow.condition.is_some())
        };
        assert_eq!(change("n0", Some(&node("u", "b"))), None);
        assert_eq!(change("n0", Some(&node("u", "c"))), Some(true));
        assert_eq!(change("n0", Some(&ready)), Some(true));
        assert_eq!(change("n0", Some(&ready)), None);
        assert_eq!(change("n0", Some(&node("v", "c"))), Some(true));
        assert_eq!(change("n1", Some(&node("w", "d"))), Some(true));
        assert_eq!(change("n1", None), None);
        assert_eq!(schedule.census().map(|it| it.good), Some(1));
    }

    #[test]
    fn one_refused_node_is_tainted_when_all_were_asked_and_many_are_not() {
        let mut schedule = leading(10);
        let now = Instant::now() + 2 * SOON;
        let is_bad = |names: &'static [&str]| {
            move |name: &str| {
                if names.contains(&name) {
                    refused()
                } else {
                    NodeAnswer::Accepted
                }
            }
        };
        let taints = |all: &[(String, Option<String>)]| -> Vec<String> {
            let tainted = all.iter().filter(|(_, taint)| taint.is_some());
            tainted.map(|(name, _)| name.clone()).collect()
        };
        // asked again when the last one has answered
        let all = answer_all(&mut schedule, now, is_bad(&["n3"]));
        assert_eq!(taints(&all).last().map(String::as_str), Some("n3"));
        schedule.ask_all();
        let all = answer_all(&mut schedule, now, is_bad(&["n3", "n4", "n5"]));
        assert_eq!(taints(&all), [""; 0]);
        assert_eq!(
            (schedule.is_mass(), schedule.census),
            (
                Some(true),
                Census {
                    good: 7,
                    refused: 3,
                    ..Census::default()
                }
            )
        );
        // nothing is asked again and again
        assert!(all.len() <= 20, "{all:?}");
    }

    /// The names of nodes that have a taint in the end, each answer of a node being the last that counts.
    fn tainted(all: &[(String, Option<String>)]) -> Vec<String> {
        let last: std::collections::BTreeMap<_, _> = all.iter().cloned().collect();
        let tainted = last.into_iter().filter(|(_, taint)| taint.is_some());
        tainted.map(|(name, _)| name).collect()
    }

    #[test]
    fn nodes_that_prove_nothing_do_not_hide_a_machine_that_is_refused() {
        let mut schedule = leading(10);
        let now = Instant::now() + 2 * SOON;
        answer_all(&mut schedule, now, |_| NodeAnswer::Accepted);
        // one worker answers for six others, or has cut them off; then it is refused itself
        schedule.ask_all();
        let all = answer_all(&mut schedule, now, |name| match name {
            "n0" => refused(),
            "n1" | "n2" | "n3" => NodeAnswer::Foreign(WatchReason::default()),
            "n4" | "n5" | "n6" => NodeAnswer::None(WatchReason::default()),
            _ => NodeAnswer::Accepted,
        });
        assert_eq!(schedule.is_mass(), Some(true));
        assert_eq!(tainted(&all), ["n0"]);
        let counts = (schedule.masses.accepted, schedule.masses.refused.len());
        assert_eq!(counts, (9, 1));
    }

    #[test]
    fn a_machine_with_several_names_is_refused_once() {
        let names = ["m-0", "m-1", "m-2", "m-3", "n0", "n1", "n2", "n3", "n4"];
        let mut schedule = leading_of(names.iter().map(|name| (*name).to_owned()));
        let now = Instant::now() + 2 * SOON;
        let mut refuse = |bad: &'static str| {
            schedule.ask_all();
            let all = answer_all(&mut schedule, now, |name| {
                if name.starts_with(bad) {
                    refused()
                } else {
                    NodeAnswer::Accepted
                }
            });
            (
                tainted(&all).len(),
                schedule.is_mass(),
                schedule.masses.refused.len(),
            )
        };
        assert_eq!(refuse("m"), (4, Some(false), 1));
        assert_eq!(refuse("n"), (0, Some(true), 5));
        assert_eq!(refuse("-"), (0, Some(false), 0));
        assert_eq!(schedule.masses.accepted, names.len());
        for name in names {
            schedule.node_changed(name, None);
        }
        let masses = &schedule.masses;
        assert!(masses.refused.is_empty());
        assert_eq!((masses.accepted, masses.proven, masses.unproven), (0, 0, 0));
    }

    #[test]
    fn nodes_without_a_record_count_for_no_mass() {
        let mut schedule = leading(3);
        let now = Instant::now() + 2 * SOON;
        while let Ok(job) = schedule.next(now) {
            let record = record_of(&job.node);
            let (answer, record) = match job.node.as_str() {
                "n0" => (NodeAnswer::Accepted, Some(&record)),
                _ => (NodeAnswer::Foreign(WatchReason::default()), None),
            };
            schedule.answered(job, (&node("u", "b"), record), &answer, now);
        }
        assert_eq!(schedule.is_mass(), Some(false));
        assert_eq!((schedule.masses.proven, schedule.masses.unproven), (1, 0));
    }

    #[test]
    fn a_new_node_object_of_a_refused_machine_is_refused_before_it_answers() {
        let mut schedule = leading(3);
        let now = Instant::now() + 2 * SOON;
        let mut last = None;
        while let Ok(job) = schedule.next(now) {
            let refused = (job.node == "n1").then_some(std::time::SystemTime::UNIX_EPOCH);
            let (is_one, record) = (
                refused.is_some(),
                MachineRecord {
                    refused,
                    ..record_of(&job.node)
                },
            );
            let answer = if is_one {
                NodeAnswer::None(WatchReason::default())
            } else {
                NodeAnswer::Accepted
            };
            let follow = schedule.answered(job, (&node("u", "b"), Some(&record)), &answer, now);
            if is_one {
                last = follow
                    .unwrap()
                    .condition
                    .map(|(status, reason)| (status, reason.word));
            }
        }
        assert_eq!(last, Some(("False", "RefusedBefore")));
        assert_eq!(schedule.census.refused, 1);
    }

    #[test]
    fn a_replica_that_does_not_lead_asks_nobody_and_takes_no_answer() {
        let mut schedule = leading(2);
        let now = Instant::now() + 2 * SOON;
        let job = schedule.next(now).unwrap();
        let late = now + 101 * HOUR;
        assert!(schedule.next(late).is_err());
        assert!(
            schedule
                .answered(job, (&node("u", "b"), None), &refused(), late)
                .is_none()
        );
        schedule.stop();
        schedule.node_changed("n9", Some(&node("u", "b")));
        assert!(schedule.next(now).is_err() && schedule.census().is_none());
        assert_eq!((schedule.oldest(now), schedule.is_mass()), (None, None));
    }

    #[test]
    fn something_that_happens_while_a_node_is_asked_is_not_lost() {
        let mut schedule = leading(1);
        let now = Instant::now() + 2 * SOON;
        let job = schedule.next(now).unwrap();
        schedule.ask_all();
        // it is not asked twice at a time
        assert!(schedule.next(now).is_err());
        schedule.answered(job, (&node("u", "b"), None), &NodeAnswer::Accepted, now);
        assert_eq!(schedule.pending, 1, "the answer is for the policy before");
        assert_eq!(
            answer_all(&mut schedule, now + SOON, |_| NodeAnswer::Accepted).len(),
            1
        );
        assert_eq!(schedule.pending, 0);
    }
}
