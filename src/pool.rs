//! A bounded pool of threads: started as there is work, kept for a while, joined at the end.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A thread without work ends after this long.
const LINGER: Duration = Duration::from_secs(10);
/// Stack of a thread; the system backs only what was touched. Handlers shake hands, hash, parse.
const STACK: usize = 1 << 20;

/// So many threads start as soon as there is a job for them; further ones only with [`Pool::grow`], because most jobs are
/// short: a burst of them is sooner done by these than by a thread for each.
const AT_ONCE: usize = 64;
/// Threads that one [`Pool::grow`] starts.
const GROWTH: usize = 2;

type Job = Box<dyn FnOnce() + Send>;

/// The threads and the jobs that wait for one. Shared by an [`Arc`].
pub struct Pool {
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
    pub fn new(name: &'static str, most: usize) -> Pool {
        Pool { name, most, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `job` run by an idle thread, or a new one. Else, or when the system refuses one, the job waits for its turn, and
    /// the return value is `true`: somebody should call [`Pool::grow`] soon, and again while it returns `true`.
    pub fn submit(self: &Arc<Pool>, job: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() {
            self.changed.notify_one();
            return false;
        }
        if state.threads.len() < AT_ONCE {
            self.start(&mut state);
            return false;
        }
        true
    }

    /// Starts some more threads if jobs wait; returns whether they do.
    pub fn grow(self: &Arc<Pool>) -> bool {
        let mut state = self.lock();
        let wanted = state.jobs.len().saturating_sub(state.idle);
        (0..wanted.min(GROWTH)).for_each(|_| self.start(&mut state));
        wanted > 0
    }

    fn start(self: &Arc<Pool>, state: &mut State) {
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
    pub fn stop(&self) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn all_jobs_run_though_the_first_ones_block() {
        let pool = Arc::new(Pool::new("test", 200));
        let (go, (done, finished)) = (Arc::new((Mutex::new(false), Condvar::new())), mpsc::channel());
        let waiting: usize = (0..AT_ONCE)
            .map(|_| {
                let go = go.clone();
                pool.submit(move || drop(go.1.wait_while(go.0.lock().unwrap(), |go| !*go).unwrap()))
            })
            .map(usize::from)
            .sum();
        assert_eq!(waiting, 0);
        assert!(pool.submit(move || done.send(()).unwrap()), "it waits for a thread");
        assert!(finished.recv_timeout(Duration::from_millis(20)).is_err());
        assert!(pool.grow());
        finished.recv_timeout(Duration::from_secs(10)).unwrap();
        *go.0.lock().unwrap() = true;
        go.1.notify_all();
        pool.stop();
        assert!(pool.lock().jobs.is_empty() && !pool.grow());
    }

    #[test]
    fn there_are_never_more_threads_than_the_most() {
        let pool = Arc::new(Pool::new("test", 2));
        let (done, finished) = mpsc::channel();
        for _ in 0..20 {
            let done = done.clone();
            pool.submit(move || done.send(thread::current().id()).unwrap());
            pool.grow();
        }
        pool.stop();
        drop(done);
        let threads: Vec<_> = finished.iter().collect();
        let distinct: std::collections::HashSet<_> = threads.iter().collect();
        assert!(threads.len() == 20 && distinct.len() <= 2);
    }
}
