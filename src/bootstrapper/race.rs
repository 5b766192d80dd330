//! The race into a cluster: InitServer and JoinClient start together, one of them takes the node lock, the others are stopped.
//!
//! ```text
//!              ┌─ enter ─► InitServer ─ lock ─┐   the first: Taken, and every other entrant's Stop is stopped
//!   Race::new ─┤                              ├─► the others: Already
//!              └─ enter ─► JoinClient ─ lock ─┘   after Race::stop: nothing, and the node stays as fresh as it was
//! ```
//!
//! Whoever starts an entrant joins it: its Stop ends every wait of it. `tests/model.rs` runs the interleavings.

use super::node_lock::{Locking, NodeLock};
use base::crypto::CLUSTER_ID_LEN;
use base::stop::Stop;
use base::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One a process, with the node lock as its prize.
pub struct Race {
    lock: NodeLock,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entrants: Vec<Stop>,
    /// The entrant that has the lock, or broke it.
    winner: Option<usize>,
    /// The node was told to stop.
    is_stopped: bool,
}

/// Who may take the lock.
pub struct Entrant {
    race: Arc<Race>,
    number: usize,
    stop: Stop,
}

impl Race {
    /// For this lock, which nobody has taken.
    pub fn new(lock: NodeLock) -> Arc<Race> {
        Arc::new(Race {
            lock,
            state: Mutex::default(),
        })
    }

    /// One more entrant; who comes too late is stopped already.
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

    /// The node is told to stop: so are all entrants, the winner too, and nobody gets the lock after this returns.
    pub fn stop(&self) {
        let mut state = self.state();
        state.is_stopped = true;
        let entrants = state.entrants.clone();
        // what a stop sets off may look here
        drop(state);
        entrants.iter().for_each(Stop::stop);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entrant {
    /// Stopped when somebody else has won, or the node is told to stop.
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Whether this one has the lock, or broke it.
    pub fn has_won(&self) -> bool {
        self.race.state().winner == Some(self.number)
    }

    /// The cluster that the lock was taken for, once it was.
    pub fn cluster(&self) -> Option<[u8; CLUSTER_ID_LEN]> {
        self.race.lock.cluster()
    }

    /// Takes the lock for a cluster; when this took it, or broke it, the others are told to stop. `None` when the node was
    /// told to stop before.
    pub fn lock(&self, cluster_id: [u8; CLUSTER_ID_LEN]) -> Option<Locking> {
        // held while the TPM works: a stop comes before the lock or after it
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
