//! Schedules access to the TPM of the machine: uses by this node come before quotes for unknown
//! callers, who can request as many quotes as there are connections.

use base::sync::{lock, wait};
use std::sync::{Condvar, Mutex, MutexGuard};

static TPM: Queue = Queue {
    state: Mutex::new(State {
        is_taken: false,
        own: 0,
    }),
    changed: Condvar::new(),
};

/// The party for which the TPM is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// This node: its lock, its measurements, its attestation to the peers that it calls.
    Own,
    /// A peer that called this node.
    Stranger,
}

/// One use of the TPM. It ends on drop.
pub struct TpmUse(&'static Queue);

/// Waits until no other thread uses the TPM. For a stranger, also waits while the node itself waits
/// for it.
pub fn take(whom: For) -> TpmUse {
    TPM.take(whom)
}

struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    is_taken: bool,
    /// Number of uses by the node that wait.
    own: usize,
}

impl Queue {
    fn take(&'static self, whom: For) -> TpmUse {
        let mut state = self.lock();
        let own = usize::from(whom == For::Own);
        state.own += own;
        let may_go = |state: &State| !state.is_taken && (whom == For::Own || state.own == 0);
        while !may_go(&state) {
            state = wait(&self.changed, state);
        }
        state.own -= own;
        state.is_taken = true;
        TpmUse(self)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for TpmUse {
    fn drop(&mut self) {
        self.0.lock().is_taken = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn the_nodes_own_use_comes_before_strangers_that_waited_longer() {
        static QUEUE: Queue = Queue {
            state: Mutex::new(State {
                is_taken: false,
                own: 0,
            }),
            changed: Condvar::new(),
        };
        let (done, order) = mpsc::channel();
        let first = QUEUE.take(For::Stranger);
        thread::scope(|scope| {
            for _ in 0..8 {
                let done = done.clone();
                scope.spawn(move || {
                    let _turn = QUEUE.take(For::Stranger);
                    done.send(For::Stranger).unwrap();
                });
            }
            // the strangers wait already, or they will see that the node waits
            thread::sleep(Duration::from_millis(20));
            scope.spawn(|| {
                let _turn = QUEUE.take(For::Own);
                done.send(For::Own).unwrap();
            });
            while QUEUE.lock().own == 0 {
                thread::yield_now();
            }
            drop(first);
            let order: Vec<For> = (0..9).map(|_| order.recv().unwrap()).collect();
            assert_eq!(
                (
                    order[0],
                    order[1..].iter().all(|whom| *whom == For::Stranger)
                ),
                (For::Own, true)
            );
        });
    }
}
