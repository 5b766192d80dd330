//! The threads of a server: started as there is work, kept for a while, joined at the end.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A thread without work ends after this long.
const LINGER: Duration = Duration::from_secs(10);
/// Stack of a thread; the system backs only what was touched. Handlers shake hands, hash, parse.
const STACK: usize = 1 << 20;

type Job = Box<dyn FnOnce() + Send>;

pub(super) struct Pool {
    name: &'static str,
    most: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    started: u64,
    stopping: bool,
}

impl Pool {
    /// At most `most` threads, named after `name`.
    pub(super) fn new(name: &'static str, most: usize) -> Pool {
        Pool { name, most, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `job` run by an idle thread, or a new one. Above the most threads, or when the system refuses one, the job
    /// waits for its turn.
    pub(super) fn submit(self: &Arc<Pool>, job: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() {
            return self.changed.notify_one();
        }
        // handles of threads that ended by themselves
        state.threads.retain(|thread| !thread.is_finished());
        if state.threads.len() >= self.most {
            return;
        }
        state.started += 1;
        let (pool, name) = (self.clone(), format!("{}-{}", self.name, state.started));
        match thread::Builder::new().name(name).stack_size(STACK).spawn(move || pool.work()) {
            Ok(thread) => state.threads.push(thread),
            Err(error) => log::warn!("{}: no further thread can be started: {error}", self.name),
        }
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
            } else if state.stopping {
                return;
            } else {
                state.idle += 1;
                let timed_out;
                (state, timed_out) = match self.changed.wait_timeout(state, LINGER) {
                    Ok((state, wait)) => (state, wait.timed_out()),
                    Err(poisoned) => (poisoned.into_inner().0, false),
                };
                state.idle -= 1;
                if timed_out && state.jobs.is_empty() {
                    return;
                }
            }
        }
    }

    /// Waits until all jobs are done and joins the threads. No job may be submitted after.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopping = true;
        self.changed.notify_all();
        while let Some(thread) = state.threads.pop() {
            drop(state);
            // jobs catch the panics of handlers
            let _ = thread.join();
            state = self.lock();
        }
    }
}
