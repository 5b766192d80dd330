//! What is left to be done when a ticket is made, or was not: one thread that takes things back, and tries until it is done.
//!
//! ```text
//! a ticket that came to nothing ──► its token, its reservation, its record        now, and once more
//! a worker is there, a control  ──► its token                                    now, or, where another replica made the
//! plane is Ready                                                                  ticket, some seconds later, in case that is gone
//! a disk without a record       ──► a record of it                               now
//! ```
//!
//! What this process did not come to do ends by itself: a token after 15 minutes, a reservation after 10.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::cluster::Node;
use super::{reservation, tokens};
use base::backoff::Backoff;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, CONFIG_MAPS, Client};
use kubernetes::machine_record::{self, Record};

/// For one try of one thing.
const TIME: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// After that the token is no good any more.
const GIVE_UP: Duration = Duration::from_secs(16 * 60);
/// How long the replica that made a ticket has for what is left of it.
const OTHERS: Duration = Duration::from_secs(20);
/// When what was taken back is looked at once more.
const AGAIN: Duration = Duration::from_secs(10);
/// More than ever wait; a rejoin of ten thousand nodes at once leaves a record each.
const MAX_TASKS: usize = 20_000;

/// Something to be done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Task {
    /// Deletes the token of this identifier.
    Token(String),
    /// Ends the reservation that this node got then: its name, the Lease's renewTime.
    Reservation(String, String),
    /// Deletes a JoiningNode of the old system's if it is this node's: its name, the node's.
    JoiningNode(String, String),
    /// Deletes a record if it is still that of the ticket with this token: its name, the token.
    Record(String, String),
    /// Writes the record of a disk.
    Write(Box<Record>),
}

/// The thread, and what it is to do.
pub struct Cleaner {
    client: Client,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order in which they are due.
    tasks: BTreeMap<(Instant, u64), Due>,
    /// Those in it.
    known: HashSet<Task>,
    last: u64,
    /// Tokens that wait for their node, by its name.
    waiting: HashMap<String, Waiting>,
    is_working: bool,
    ends: bool,
}

struct Due {
    task: Task,
    until: Instant,
    backoff: Backoff,
    /// Once more when it is done.
    again: bool,
}

struct Waiting {
    token: String,
    /// Of the Node object that was there before.
    node_uid: String,
    /// A control plane's: kubeadm may have to begin anew after the Node object came, since etcd takes its member only then.
    until_ready: bool,
    issued: SystemTime,
    /// How long after the node came.
    after: Duration,
}

/// Ends the thread when dropped.
pub struct Running(Arc<Cleaner>, Option<JoinHandle<()>>);

impl Cleaner {
    /// Starts the thread.
    pub fn start(client: &Client) -> io::Result<(Arc<Cleaner>, Running)> {
        let cleaner = Arc::new(Cleaner {
            client: client.within(TIME),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let working = cleaner.clone();
        let thread = thread::Builder::new()
            .name("cleaner".into())
            .spawn(move || working.work())?;
        Ok((cleaner.clone(), Running(cleaner, Some(thread))))
    }

    /// To be done now.
    pub fn add(&self, task: Task) {
        self.lock().add(task, Duration::ZERO, false);
        self.changed.notify_all();
    }

    /// To be taken back now. What the API server did not answer it may carry out later than this, so where that can only be the
    /// same ticket's it is looked at once more.
    pub fn undo(&self, task: Task) {
        let again = matches!(
            task,
            Task::Token(_) | Task::Reservation(..) | Task::Record(..)
        );
        self.lock().add(task, Duration::ZERO, again);
        self.changed.notify_all();
    }

    /// A token was made, by this process: it goes when its node comes. What is there now may be that already.
    pub fn token_is_ours(&self, record: &Record, node: Option<&Node>) {
        self.lock().expect(record, node, Duration::ZERO);
        self.changed.notify_all();
    }

    /// The same, by whoever.
    pub fn token_was_issued(&self, record: &Record, node: Option<&Node>) {
        let mut state = self.lock();
        let is_known = state
            .waiting
            .get(&record.node)
            .is_some_and(|waiting| waiting.token == record.token);
        let age = record
            .issued
            .and_then(|issued| SystemTime::now().duration_since(issued).ok());
        if !is_known && !record.token.is_empty() && age.unwrap_or_default() < tokens::VALIDITY {
            state.expect(record, node, OTHERS);
            self.changed.notify_all();
        }
    }

    /// A node is there, in this state.
    pub fn node_is(&self, name: &str, node: &Node) {
        self.lock().look_for(name, node);
        self.changed.notify_all();
    }

    /// How many tokens of this process's tickets wait for their nodes.
    pub fn tokens(&self) -> usize {
        self.lock()
            .waiting
            .values()
            .filter(|waiting| waiting.after.is_zero())
            .count()
    }

    /// Waits until nothing that is due is left, for at most `time`.
    pub fn finish(&self, time: Duration) {
        let end = Instant::now() + time;
        let mut state = self.lock();
        while state.is_working || state.next().is_some_and(|at| at <= Instant::now()) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return log::warn!(
                    "{} things are left to be undone: they end by themselves",
                    state.tasks.len()
                );
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn work(&self) {
        let mut state = self.lock();
        while !state.ends {
            let now = Instant::now();
            let next = state.next();
            if next.is_some_and(|at| at <= now)
                && let Some((_, due)) = state.tasks.pop_first()
            {
                state.known.remove(&due.task);
                state.is_working = true;
                drop(state);
                let again = self.try_to(due);
                state = self.lock();
                state.is_working = false;
                if let Some((due, at)) = again {
                    state.put(due, at);
                }
                self.changed.notify_all();
            } else {
                state.forget(SystemTime::now());
                let pause = next.map_or(LONGEST_PAUSE, |at| at - now);
                state = self
                    .changed
                    .wait_timeout(state, pause)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }

    /// Does it, or returns when to do it again.
    fn try_to(&self, mut due: Due) -> Option<(Due, Instant)> {
        let error = match self.carry_out(&due.task) {
            Ok(()) if due.again => {
                due.again = false;
                return Some((due, Instant::now() + AGAIN));
            }
            Ok(()) => return None,
            Err(client::Error::Stopped) => return None,
            Err(error) => error,
        };
        let at = Instant::now() + due.backoff.pause();
        // an API server that starts refuses, for a moment, what it will allow
        let is_lasting = matches!(error.code(), Some(400 | 413 | 422));
        if !is_lasting && at < due.until {
            log::debug!("{error}: again");
            return Some((due, at));
        }
        log::error!("{error}: given up");
        None
    }

    fn carry_out(&self, task: &Task) -> Result<(), client::Error> {
        match task {
            Task::Token(id) => self.client.delete_if_there(&tokens::object(id)).map(drop),
            Task::Reservation(node, at) => reservation::release(&self.client, node, at),
            Task::JoiningNode(name, node) => {
                reservation::delete_joining_node(&self.client, name, node)
            }
            Task::Record(name, token) => {
                let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(name);
                match self.client.find(&at)? {
                    Some(map)
                        if Record::read(&map).is_some_and(|record| record.token == *token) =>
                    {
                        self.client.delete_as(&at, &map).map(drop)
                    }
                    _ => Ok(()),
                }
            }
            Task::Write(record) => machine_record::write_of_rejoin(&self.client, record),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, task: Task, after: Duration, again: bool) {
        if self.known.contains(&task) {
            return;
        }
        // records of disks, which any caller may ask for, leave room for what is to be undone
        let most = if matches!(task, Task::Write(_)) {
            MAX_TASKS / 2
        } else {
            MAX_TASKS
        };
        if self.tasks.len() >= most {
            return log::error!("too much is left to be done: {task:?} is not");
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

    fn expect(&mut self, record: &Record, node: Option<&Node>, after: Duration) {
        let waiting = Waiting {
            token: record.token.clone(),
            node_uid: record.node_uid.clone(),
            until_ready: record.control_plane,
            // another replica's clock may be ahead, and the node comes by its own
            issued: record.issued.map_or(SystemTime::UNIX_EPOCH, |issued| {
                issued.min(SystemTime::now())
            }),
            after,
        };
        self.waiting.insert(record.node.clone(), waiting);
        if let Some(node) = node {
            self.look_for(&record.node, node);
        }
    }

    /// Whether a token's node came.
    fn look_for(&mut self, name: &str, node: &Node) {
        if self
            .waiting
            .get(name)
            .is_some_and(|waiting| waiting.is_served_by(node))
            && let Some(Waiting { token, after, .. }) = self.waiting.remove(name)
        {
            self.add(Task::Token(token), after, false);
        }
    }

    fn forget(&mut self, now: SystemTime) {
        self.waiting.retain(|_, waiting| {
            now.duration_since(waiting.issued).unwrap_or_default() < tokens::VALIDITY
        });
    }
}

impl Waiting {
    /// Whether the node came, or came back, since.
    fn is_served_by(&self, node: &Node) -> bool {
        let is_new = node.uid != self.node_uid;
        match node.ready_since {
            None => is_new && !self.until_ready,
            Some(since) => is_new || since >= self.issued,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.lock().ends = true;
        self.0.changed.notify_all();
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(uid: &str) -> Record {
        let token = "abcdef".to_owned();
        Record {
            node: "n".into(),
            token,
            node_uid: uid.into(),
            issued: Some(SystemTime::now()),
            ..Record::default()
        }
    }

    fn node(uid: &str, ready_since: Option<SystemTime>) -> Node {
        Node {
            uid: uid.into(),
            ready_since,
        }
    }

    fn is_due(state: &State) -> bool {
        state.known.contains(&Task::Token("abcdef".into()))
    }

    #[test]
    fn a_token_goes_when_its_node_comes_whichever_is_known_first() {
        for node_first in [false, true] {
            let (mut state, node) = (State::default(), node("u", None));
            state.expect(
                &record(""),
                Some(&node).filter(|_| node_first),
                Duration::ZERO,
            );
            if !node_first {
                state.look_for("other", &node);
                assert!(!is_due(&state));
                state.look_for("n", &node);
            }
            assert!(is_due(&state) && state.waiting.is_empty());
        }
    }

    #[test]
    fn a_token_of_a_node_that_was_there_before_goes_when_that_is_ready_again() {
        let mut state = State::default();
        let before = SystemTime::now() - Duration::from_secs(60);
        for (node, gone) in [
            (node("u", None), false),
            (node("u", Some(before)), false),
            (
                node("u", Some(SystemTime::now() + Duration::from_secs(1))),
                true,
            ),
        ] {
            state.expect(&record("u"), Some(&node), Duration::ZERO);
            assert_eq!(is_due(&state), gone);
        }
    }

    #[test]
    fn a_token_of_a_control_plane_goes_when_that_is_ready() {
        let mut state = State::default();
        state.expect(
            &Record {
                control_plane: true,
                ..record("")
            },
            Some(&node("u", None)),
            Duration::ZERO,
        );
        assert!(!is_due(&state));
        state.look_for("n", &node("u", Some(SystemTime::now())));
        assert!(is_due(&state));
    }

    #[test]
    fn what_is_due_already_is_not_due_twice() {
        let mut state = State::default();
        state.add(Task::Token("a".into()), Duration::ZERO, false);
        state.add(Task::Token("a".into()), Duration::ZERO, false);
        assert_eq!(state.tasks.len(), 1);
    }
}
