//! The race for the node lock: InitServer and JoinClient start together. The first one that takes
//! the lock wins; the race stops the other.
//!
//! ```text
//!              ┌─ enter ─► InitServer ─ lock ─┐   the first: Taken, and every other entrant's Stop is stopped
//!   Race::new ─┤                              ├─► the others: Already
//!              └─ enter ─► JoinClient ─ lock ─┘   after Race::stop: nothing, and the node stays as fresh as it was
//! ```
//!
//! The code that starts an entrant's thread also joins it: the entrant's Stop ends every wait of
//! the thread. `tests/model.rs` runs all interleavings.

use super::node_lock::{Locking, NodeLock};
use base::crypto::CLUSTER_ID_LEN;
use base::stop::Stop;
use base::sync::{Arc, Mutex, MutexGuard, lock};

/// The race; a process has only one.
pub struct Race {
    lock: NodeLock,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entrants: Vec<Stop>,
    /// The entrant that has the lock, or whose attempt failed in the TPM and broke the lock.
    winner: Option<usize>,
    /// The node is stopping.
    is_stopped: bool,
}

/// A participant of the race: it may take the lock.
pub struct Entrant {
    race: Arc<Race>,
    number: usize,
    stop: Stop,
}

impl Race {
    /// Creates a race for this lock, which must not be taken yet.
    pub fn new(lock: NodeLock) -> Arc<Race> {
        Arc::new(Race {
            lock,
            state: Mutex::default(),
        })
    }

    /// Adds an entrant. If the race is over, the entrant is already stopped.
    pub fn enter(self: &Arc<Race>) -> Entrant {
        let mut state = self.state();
        let (number, stop) = (state.entrants.len(), Stop::new());
        state.entrants.push(stop.clone());
        if state.winner.is_some() || state.is_stopped {
            stop.stop();
        }
        Entrant {
            race: self.clone(),
            number,
            stop,
        }
    }

    /// Stops all entrants, including the winner. The lock cannot be taken after this returns.
    pub fn stop(&self) {
        let mut state = self.state();
        state.is_stopped = true;
        let entrants = state.entrants.clone();
        // callbacks of a Stop may lock the state themselves
        drop(state);
        entrants.iter().for_each(Stop::stop);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Entrant {
    /// Returns the entrant's Stop, which is triggered when another entrant wins or the node stops.
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Returns whether this entrant has the lock, or broke it.
    pub fn has_won(&self) -> bool {
        self.race.state().winner == Some(self.number)
    }

    /// Returns the ID of the cluster for which the lock was taken; `None` before that.
    pub fn cluster(&self) -> Option<[u8; CLUSTER_ID_LEN]> {
        self.race.lock.cluster()
    }

    /// Takes the lock for a cluster. If this entrant took the lock, or broke it, the others are
    /// stopped. Returns `None` if the node was stopped before.
    pub fn lock(&self, cluster_id: [u8; CLUSTER_ID_LEN]) -> Option<Locking> {
        // the mutex is held while the TPM works, so a stop comes either before the lock is taken or
        // after it
        let mut state = self.race.state();
        if state.is_stopped {
            return None;
        }
        let locking = self.race.lock.lock(cluster_id);
        if let Locking::Already(_) = locking {
            return Some(locking);
        }
        state.winner = Some(self.number);
        let entrants = state.entrants.clone();
        drop(state);
        let others = entrants
            .iter()
            .enumerate()
            .filter(|(number, _)| *number != self.number);
        others.for_each(|(_, stop)| stop.stop());
        Some(locking)
    }
}
