//! A stop signal for several threads: a flag that stays set and wakes all threads that wait.

use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use crate::sync::{Arc, Condvar, Mutex, MutexGuard, lock, wait_timeout};

/// A stop signal that cannot be taken back. Clones share it.
#[derive(Clone, Default)]
pub struct Stop(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stopped: bool,
    next: u64,
    actions: Vec<(u64, Action)>,
}

type Action = Box<dyn FnOnce() + Send>;

/// Keeps an action registered by [`Stop::on_stop`] until it is dropped.
pub struct OnStop {
    stop: Stop,
    number: u64,
}

/// Sets the signal when dropped, see [`Stop::stop_on_drop`].
pub struct StopOnDrop<'a>(&'a Stop);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Stop {
    /// Creates a signal that is not set.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Sets the signal: wakes all waits and runs all registered actions, which shut sockets down, too.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        self.0.changed.notify_all();
        let actions = std::mem::take(&mut state.actions);
        // An action may take long, or use this signal.
        drop(state);
        for (_, action) in actions {
            action();
        }
    }

    /// Returns whether [`Stop::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Waits for `time` or until the stop. Returns whether it is stopped.
    pub fn wait(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut state = self.lock();
        while !state.stopped {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = wait_timeout(&self.0.changed, state, left);
        }
        true
    }

    /// Shuts `socket` down at the stop, or at once if it is stopped already, so that no thread
    /// stays blocked in it.
    pub fn hold(&self, socket: &TcpStream) -> std::io::Result<OnStop> {
        let socket = socket.try_clone()?;
        // This fails if the peer has closed the socket already, which is fine.
        Ok(self.on_stop(move || drop(socket.shutdown(Shutdown::Both))))
    }

    /// Runs `action` at the stop, in the thread that stops, or at once if it is stopped already.
    /// Dropping the returned value before the stop cancels the action.
    pub fn on_stop(&self, action: impl FnOnce() + Send + 'static) -> OnStop {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        if state.stopped {
            drop(state);
            action();
        } else {
            state.actions.push((number, Box::new(action)));
        }
        OnStop {
            stop: self.clone(),
            number,
        }
    }

    /// Sets the signal when the returned value is dropped, so also when the thread panics.
    pub fn stop_on_drop(&self) -> StopOnDrop<'_> {
        StopOnDrop(self)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

impl Drop for OnStop {
    fn drop(&mut self) {
        let mut state = self.stop.lock();
        let taken = state
            .actions
            .iter()
            .position(|(number, _)| *number == self.number);
        let action = taken.map(|at| state.actions.swap_remove(at));
        // The values that the action owns may use this signal when they are dropped.
        drop(state);
        drop(action);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_wait_ends_by_time_when_nothing_stops_it() {
        assert!(!Stop::new().wait(Duration::from_millis(5)));
    }

    #[test]
    fn a_stop_wakes_waits_in_other_threads_and_stays() {
        let stop = Stop::new();
        let waiting = thread::spawn({
            let stop = stop.clone();
            move || stop.wait(Duration::from_secs(3600))
        });
        stop.stop();
        assert!(waiting.join().unwrap());
        assert!(stop.wait(Duration::from_secs(3600)) && stop.is_stopped());
    }

    #[test]
    fn a_stop_wakes_a_read_of_a_held_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _peer = listener.accept().unwrap();
        let stop = Stop::new();
        let reading = thread::spawn({
            let stop = stop.clone();
            move || {
                let _held = stop.hold(&socket).unwrap();
                socket.read(&mut [0; 1]).unwrap_or(0)
            }
        });
        thread::sleep(Duration::from_millis(20));
        stop.stop();
        assert_eq!(reading.join().unwrap(), 0);
    }

    #[test]
    fn a_socket_held_after_the_stop_is_shut_down_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stop = Stop::new();
        stop.stop();
        let _held = stop.hold(&socket).unwrap();
        assert_eq!(socket.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn an_action_runs_once_and_not_after_it_was_dropped() {
        let (stop, done) = (Stop::new(), Arc::new(Mutex::new(Vec::new())));
        let on_stop = |number| {
            let done = done.clone();
            stop.on_stop(move || done.lock().unwrap().push(number))
        };
        let _wanted = on_stop(1);
        drop(on_stop(2));
        stop.stop();
        stop.stop();
        let _late = on_stop(3);
        assert_eq!(*done.lock().unwrap(), [1, 3]);
    }
}
