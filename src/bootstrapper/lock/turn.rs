//! Turns of the join services: the node asks one at a time, as long as each answers quickly.
//!
//! In the cluster, a new ticket replaces the node's earlier ticket and the token in it. So a node
//! that is connected to several join services asks the next one only when the current one has
//! answered or taken too long. A service that hangs delays the others only by `patience`.

use std::time::{Duration, Instant};

use base::stop::Stop;
use base::sync::{Condvar, Mutex, MutexGuard, lock, wait_timeout};

/// Interval of the checks for a stop.
const TICK: Duration = Duration::from_millis(50);

/// The turns of one node.
#[derive(Default)]
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of the latest turn, and its beginning; `None` when it is over.
    running: Option<(u64, Instant)>,
    next: u64,
}

/// A turn; dropping it ends it.
pub struct Turn<'a> {
    turns: &'a Turns,
    number: u64,
}

impl Turns {
    /// Waits for a turn: until the current turn has ended, or began more than `patience` ago.
    /// `None` when stopped.
    pub fn take(&self, patience: Duration, over: &Stop) -> Option<Turn<'_>> {
        let mut state = self.state();
        loop {
            if over.is_stopped() {
                return None;
            }
            let left = state.running.map_or(Duration::ZERO, |(_, since)| {
                patience.saturating_sub(since.elapsed())
            });
            if left.is_zero() {
                let number = state.next;
                state.next += 1;
                state.running = Some((number, Instant::now()));
                return Some(Turn {
                    turns: self,
                    number,
                });
            }
            state = wait_timeout(&self.changed, state, left.min(TICK));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        // the next service has already replaced a turn that took too long
        state.running.take_if(|(number, _)| *number == self.number);
        drop(state);
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn the_next_waits_until_the_first_is_over() {
        let (turns, over) = (Turns::default(), Stop::new());
        let first = turns.take(LONG, &over).unwrap();
        thread::scope(|scope| {
            let next = scope.spawn(|| turns.take(LONG, &over).is_some());
            thread::sleep(Duration::from_millis(100));
            assert!(!next.is_finished());
            drop(first);
            assert!(next.join().unwrap());
        });
    }

    #[test]
    fn one_that_takes_too_long_loses_it_and_its_late_end_takes_it_from_nobody() {
        let (turns, over) = (Turns::default(), Stop::new());
        let slow = turns.take(LONG, &over).unwrap();
        let next = turns.take(Duration::from_millis(20), &over).unwrap();
        drop(slow);
        assert!(turns.state().running.is_some());
        drop(next);
        assert!(turns.state().running.is_none());
    }

    #[test]
    fn a_stop_ends_the_wait() {
        let (turns, over) = (Turns::default(), Stop::new());
        let _first = turns.take(LONG, &over).unwrap();
        thread::scope(|scope| {
            let next = scope.spawn(|| turns.take(LONG, &over).is_none());
            over.stop();
            assert!(next.join().unwrap());
        });
    }
}
