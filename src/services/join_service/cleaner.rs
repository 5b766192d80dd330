//! The work that remains after a ticket. Some threads remove what a ticket left behind, and try until
//! it is done. Each task checks an owner, a version or a token before it changes something, so their
//! order does not matter.
//!
//! ```text
//! a failed ticket                ──► delete its token, reservation and record    now, and once more later
//! a worker's Node exists, or a   ──► delete its token                            now; if another replica made the ticket,
//! control plane is Ready                                                          some seconds later, in case it is gone
//! a disk without a record        ──► write its record                            now
//! ```
//!
//! The cleaner is in the process that issues tickets, and not in the [member controller](crate::member_controller): only this process
//! knows which tickets failed and which writes are open, and the account that makes bootstrap tokens is then the only one that deletes them.
//!
//! If this process ends first, a token expires after 15 minutes and a reservation after 10.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::{lease, tokens};
use crate::cluster::node_status::NodeStatus;
use crate::cluster::{Change, TOKEN_VALIDITY, constellation as joining_node};
use base::backoff::Backoff;
use base::sync::{lock, wait_timeout};
use kubernetes::NAMESPACE;
use kubernetes::client::{self, CONFIG_MAPS, Client};
use kubernetes::machine_record::{self, MachineRecord};

/// The number of threads. One alone is slower than the tickets, and tens of thousands of tokens would
/// wait for it.
const THREADS: usize = 4;
/// The timeout of one attempt of one task.
const TIMEOUT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The time after which a task is given up: by then its token has expired.
const GIVE_UP: Duration = Duration::from_secs(16 * 60);
/// How long the replica that issued a ticket has to delete its token first.
const OTHER_REPLICA_DELAY: Duration = Duration::from_secs(20);
/// When a deletion is checked once more.
const RECHECK_DELAY: Duration = Duration::from_secs(10);
/// The maximum number of tasks. If ten thousand nodes rejoin at once, each leaves one record to
/// write.
const MAX_TASKS: usize = 20_000;

/// A task of the cleaner.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CleanerTask {
    /// Deletes the token of this identifier.
    Token(String),
    /// Ends a reservation: the node's name, and the Lease's renewTime at the reservation.
    Reservation(String, String),
    /// Deletes a JoiningNode of Constellation if it belongs to this node: its name, the node's
    /// name.
    JoiningNode(String, String),
    /// Deletes a record if it still belongs to the ticket with this token: its name, the token.
    MachineRecord(String, String),
    /// Writes the record of a disk.
    Write(Box<MachineRecord>),
}

/// The tasks, and what the threads share that run them.
pub struct Cleaner {
    client: Client,
    state: Mutex<DueTasks>,
    changed: Condvar,
}

/// The tasks that are due, and the tokens that become tasks.
#[derive(Default)]
struct DueTasks {
    /// In the order of their due times.
    tasks: BTreeMap<(Instant, u64), Due>,
    /// The tasks in `tasks`.
    known: HashSet<CleanerTask>,
    last: u64,
    /// Tokens whose node has not come yet, by the node's name.
    waiting: HashMap<String, PendingToken>,
    /// The number of threads that run a task.
    working: usize,
    /// When [`DueTasks::forget`] is due.
    forget_at: Option<Instant>,
    is_stopped: bool,
}

struct Due {
    task: CleanerTask,
    until: Instant,
    backoff: Backoff,
    /// Whether the task runs once more after it succeeded.
    again: bool,
}

struct PendingToken {
    token: String,
    /// The UID of the Node object that existed before the ticket.
    node_uid: String,
    /// Whether the token is kept until the node is Ready. This is so for a control plane: etcd adds
    /// its member only after the Node object exists, and until then kubeadm may start again.
    until_ready: bool,
    issued: SystemTime,
    /// How long to wait between the node's arrival and the deletion of its token.
    after: Duration,
}

/// Ends the threads when dropped.
pub struct CleanerThreads(Arc<Cleaner>, Vec<JoinHandle<()>>);

impl Cleaner {
    /// Starts the threads that run the tasks. Fails if one cannot be started.
    pub fn start(client: &Client) -> io::Result<(Arc<Cleaner>, CleanerThreads)> {
        let cleaner = Arc::new(Cleaner {
            client: client.within(TIMEOUT),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut running = CleanerThreads(cleaner.clone(), Vec::new());
        for _ in 0..THREADS {
            let working = cleaner.clone();
            let thread = thread::Builder::new().name("cleaner".into());
            running.1.push(thread.spawn(move || working.work())?);
        }
        Ok((cleaner, running))
    }

    /// Adds a task that is due now.
    pub fn add(&self, task: CleanerTask) {
        self.lock().add(task, Duration::ZERO, false);
        self.changed.notify_all();
    }

    /// Adds a task that undoes a step of a ticket and is due now. The API server may still execute
    /// a request that timed out, so the task runs once more later if it can only affect the same
    /// ticket.
    pub fn undo(&self, task: CleanerTask) {
        let again = matches!(
            task,
            CleanerTask::Token(_) | CleanerTask::Reservation(..) | CleanerTask::MachineRecord(..)
        );
        self.lock().add(task, Duration::ZERO, again);
        self.changed.notify_all();
    }

    /// Watches for the node of a token that this process issued, to delete the token then. `node`
    /// is the present Node object, which may already be the new one.
    pub fn own_token_issued(&self, record: &MachineRecord, node: Option<&NodeStatus>) {
        self.lock().wait_for_node(record, node, Duration::ZERO);
        self.changed.notify_all();
    }

    /// Processes a change of the cluster.
    pub fn on(&self, change: Change<'_>) {
        match change {
            Change::Node(name, node) => self.node_changed(name, node),
            Change::Record(record, node) => self.token_issued(record, node),
        }
    }

    /// Watches for the node of a token that any replica issued.
    fn token_issued(&self, record: &MachineRecord, node: Option<&NodeStatus>) {
        let mut state = self.lock();
        let is_known = state
            .waiting
            .get(&record.node)
            .is_some_and(|waiting| waiting.token == record.token);
        let age = record
            .issued
            .and_then(|issued| SystemTime::now().duration_since(issued).ok());
        if !is_known && !record.token.is_empty() && age.unwrap_or_default() < TOKEN_VALIDITY {
            state.wait_for_node(record, node, OTHER_REPLICA_DELAY);
            self.changed.notify_all();
        }
    }

    /// Processes a new or changed node.
    fn node_changed(&self, name: &str, node: &NodeStatus) {
        // Most changes concern no token, and thousands of nodes change at once.
        if self.lock().node_came(name, node) {
            self.changed.notify_all();
        }
    }

    /// Returns the number of this process's tokens whose node has not come yet.
    pub fn count_own_tokens(&self) -> usize {
        self.lock()
            .waiting
            .values()
            .filter(|waiting| waiting.after.is_zero())
            .count()
    }

    /// Waits until no due task is left, at most for `time`.
    pub fn finish(&self, time: Duration) {
        let end = Instant::now() + time;
        let mut state = self.lock();
        while state.working > 0 || state.next().is_some_and(|at| at <= Instant::now()) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return log::warn!(
                    "stopping with {} unfinished clean-ups of join tickets: their bootstrap tokens and reservations expire by themselves",
                    state.tasks.len() + state.working
                );
            }
            state = wait_timeout(&self.changed, state, left);
        }
    }

    fn work(&self) {
        let mut state = self.lock();
        while !state.is_stopped {
            let now = Instant::now();
            let next = state.next();
            if next.is_some_and(|at| at <= now)
                && let Some((_, due)) = state.tasks.pop_first()
            {
                state.known.remove(&due.task);
                state.working += 1;
                drop(state);
                let again = self.run_task(due);
                state = self.lock();
                state.working -= 1;
                if let Some((due, at)) = again {
                    state.put(due, at);
                }
                self.changed.notify_all();
            } else {
                // not at each change: this looks at all tokens
                if state.forget_at.is_none_or(|at| at <= now) {
                    state.forget(SystemTime::now());
                    state.forget_at = Some(now + LONGEST_PAUSE);
                }
                let pause = next.map_or(LONGEST_PAUSE, |at| at - now);
                state = wait_timeout(&self.changed, state, pause.min(LONGEST_PAUSE));
            }
        }
    }

    /// Runs a task. If it has to run again, returns it with the time.
    fn run_task(&self, mut due: Due) -> Option<(Due, Instant)> {
        let error = match self.execute(&due.task) {
            Ok(()) if due.again => {
                due.again = false;
                return Some((due, Instant::now() + RECHECK_DELAY));
            }
            Ok(()) => return None,
            Err(client::Error::Stopped) => return None,
            Err(error) => error,
        };
        let at = Instant::now() + due.backoff.pause();
        // A starting API server may refuse requests for a moment that it permits later.
        let is_lasting = matches!(error.code(), Some(400 | 413 | 422));
        if !is_lasting && at < due.until {
            log::debug!("retrying the clean-up of a join ticket: {error}");
            return Some((due, at));
        }
        log::error!("cannot clean up after a join ticket: {error}");
        None
    }

    fn execute(&self, task: &CleanerTask) -> Result<(), client::Error> {
        match task {
            CleanerTask::Token(id) => self.client.delete_if_there(&tokens::object(id)).map(drop),
            CleanerTask::Reservation(node, at) => lease::release(&self.client, node, at),
            CleanerTask::JoiningNode(name, node) => joining_node::delete(&self.client, name, node),
            CleanerTask::MachineRecord(name, token) => {
                let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(name);
                match self.client.find_as(&at)? {
                    Some(map)
                        if MachineRecord::read(&map)
                            .is_some_and(|record| record.token == *token) =>
                    {
                        self.client.delete_as(&at, &map.metadata).map(drop)
                    }
                    _ => Ok(()),
                }
            }
            CleanerTask::Write(record) => machine_record::write_rejoin(&self.client, record),
        }
    }

    fn lock(&self) -> MutexGuard<'_, DueTasks> {
        lock(&self.state)
    }
}

impl DueTasks {
    fn add(&mut self, task: CleanerTask, after: Duration, again: bool) {
        if self.known.contains(&task) {
            return;
        }
        // Any caller can cause a record of a disk, so half of the queue is reserved for tasks that
        // undo tickets.
        let most = if matches!(task, CleanerTask::Write(_)) {
            MAX_TASKS / 2
        } else {
            MAX_TASKS
        };
        if self.tasks.len() >= most {
            return log::error!("too many clean-up tasks are waiting; dropped: {task:?}");
        }
        let now = Instant::now();
        let backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        self.put(
            Due {
                task,
                until: now + GIVE_UP,
                backoff,
                again,
            },
            now + after,
        );
    }

    fn put(&mut self, due: Due, at: Instant) {
        if self.known.insert(due.task.clone()) {
            self.last += 1;
            self.tasks.insert((at, self.last), due);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.tasks.first_key_value().map(|((at, _), _)| *at)
    }

    fn wait_for_node(
        &mut self,
        record: &MachineRecord,
        node: Option<&NodeStatus>,
        after: Duration,
    ) {
        let waiting = PendingToken {
            token: record.token.clone(),
            node_uid: record.node_uid.clone(),
            until_ready: record.control_plane,
            // Another replica's clock may be ahead, but Ready times come from the node's cluster.
            issued: record.issued.map_or(SystemTime::UNIX_EPOCH, |issued| {
                issued.min(SystemTime::now())
            }),
            after,
        };
        self.waiting.insert(record.node.clone(), waiting);
        if let Some(node) = node {
            self.node_came(&record.node, node);
        }
    }

    /// Queues the deletion of the token of a node that came. Returns whether the node has a token.
    fn node_came(&mut self, name: &str, node: &NodeStatus) -> bool {
        let waiting = self.waiting.get(name);
        if !waiting.is_some_and(|waiting| waiting.is_used_by(node)) {
            return false;
        }
        if let Some(PendingToken { token, after, .. }) = self.waiting.remove(name) {
            self.add(CleanerTask::Token(token), after, false);
        }
        true
    }

    fn forget(&mut self, now: SystemTime) {
        self.waiting.retain(|_, waiting| {
            now.duration_since(waiting.issued).unwrap_or_default() < TOKEN_VALIDITY
        });
    }
}

impl PendingToken {
    /// Returns whether the node came, or came back, since the token was issued.
    fn is_used_by(&self, node: &NodeStatus) -> bool {
        let is_new = node.uid != self.node_uid;
        match node.ready_since {
            None => is_new && !self.until_ready,
            Some(since) => is_new || since >= self.issued,
        }
    }
}

impl Drop for CleanerThreads {
    fn drop(&mut self) {
        self.0.lock().is_stopped = true;
        self.0.changed.notify_all();
        for thread in self.1.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(uid: &str) -> MachineRecord {
        let token = "abcdef".to_owned();
        MachineRecord {
            node: "n".into(),
            token,
            node_uid: uid.into(),
            issued: Some(SystemTime::now()),
            ..MachineRecord::default()
        }
    }

    fn node(uid: &str, ready_since: Option<SystemTime>) -> NodeStatus {
        NodeStatus {
            uid: uid.into(),
            ready_since,
            ..NodeStatus::default()
        }
    }

    fn is_due(state: &DueTasks) -> bool {
        state.known.contains(&CleanerTask::Token("abcdef".into()))
    }

    #[test]
    fn a_token_goes_when_its_node_comes_whichever_is_known_first() {
        for node_first in [false, true] {
            let (mut state, node) = (DueTasks::default(), node("u", None));
            state.wait_for_node(
                &record(""),
                Some(&node).filter(|_| node_first),
                Duration::ZERO,
            );
            if !node_first {
                state.node_came("other", &node);
                assert!(!is_due(&state));
                state.node_came("n", &node);
            }
            assert!(is_due(&state) && state.waiting.is_empty());
        }
    }

    #[test]
    fn a_token_of_a_node_that_was_there_before_goes_when_that_is_ready_again() {
        let mut state = DueTasks::default();
        let before = SystemTime::now() - Duration::from_secs(60);
        for (node, gone) in [
            (node("u", None), false),
            (node("u", Some(before)), false),
            (
                node("u", Some(SystemTime::now() + Duration::from_secs(1))),
                true,
            ),
        ] {
            state.wait_for_node(&record("u"), Some(&node), Duration::ZERO);
            assert_eq!(is_due(&state), gone);
        }
    }

    #[test]
    fn a_token_of_a_control_plane_goes_when_that_is_ready() {
        let mut state = DueTasks::default();
        state.wait_for_node(
            &MachineRecord {
                control_plane: true,
                ..record("")
            },
            Some(&node("u", None)),
            Duration::ZERO,
        );
        assert!(!is_due(&state));
        state.node_came("n", &node("u", Some(SystemTime::now())));
        assert!(is_due(&state));
    }

    #[test]
    fn a_task_is_queued_once() {
        let mut state = DueTasks::default();
        state.add(CleanerTask::Token("a".into()), Duration::ZERO, false);
        state.add(CleanerTask::Token("a".into()), Duration::ZERO, false);
        assert_eq!(state.tasks.len(), 1);
    }
}
