//! A pool with a limited number of threads. Threads start when there is work, stay for a while, and
//! are joined at the end.

use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Time without work after which a thread ends.
const LINGER: Duration = Duration::from_secs(3);
/// Stack of a thread in bytes; the system provides only the touched pages. Threads run handshakes,
/// hashes and parsers.
const STACK: usize = 1 << 20;

/// Up to this number, a thread starts as soon as it has a job. Further threads start only in
/// [`Pool::grow`], because most jobs are short: these threads finish a burst sooner than one thread
/// per job would.
const AT_ONCE: usize = 64;
/// Number of threads that one call of [`Pool::grow`] starts.
const GROWTH: usize = 4;
/// Waiting jobs need further threads only if they are more than this many times the jobs begun
/// since the last [`Pool::grow`].
const PATIENCE: usize = 64;

type Job = Box<dyn FnOnce() + Send>;

/// The threads, and the jobs that wait for a thread. It is shared through an [`Arc`].
pub struct Pool {
    name: &'static str,
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Idle threads. The last to become idle is the first to be woken, so that threads that only a
    /// burst needed can end.
    idle: Vec<Thread>,
    threads: Vec<JoinHandle<()>>,
    started: u64,
    /// Number of jobs begun since the last [`Pool::grow`].
    begun: usize,
    stopping: bool,
}

impl Pool {
    /// Creates a pool of at most `most` threads with names that begin with `name`.
    pub fn new(name: &'static str, most: usize) -> Pool {
        Pool {
            name,
            most,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Runs `job` in an idle or a new thread. Returns `true` if the job must wait, because there
    /// are many threads already. The caller should then call [`Pool::grow`] soon, and again while
    /// that returns `true`.
    pub fn submit(self: &Arc<Pool>, job: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.lock();
        state.jobs.push_back(Box::new(job));
        if let Some(thread) = state.idle.pop() {
            drop(state);
            thread.unpark();
            return false;
        }
        if state.threads.len() < AT_ONCE {
            self.start(&mut state);
            return false;
        }
        true
    }

    /// Returns whether jobs wait. Starts some threads if the jobs would wait for long at the rate
    /// since the last call, because the existing threads are blocked.
    pub fn grow(self: &Arc<Pool>) -> bool {
        let mut state = self.lock();
        let begun = std::mem::take(&mut state.begun);
        let wanted = state
            .jobs
            .len()
            .saturating_sub(begun.saturating_mul(PATIENCE));
        (0..wanted.min(GROWTH)).for_each(|_| self.start(&mut state));
        !state.jobs.is_empty()
    }

    fn start(self: &Arc<Pool>, state: &mut State) {
        // Drops the handles of threads that have ended.
        state.threads.retain(|thread| !thread.is_finished());
        if state.threads.len() >= self.most {
            return;
        }
        state.started += 1;
        let (pool, name) = (self.clone(), format!("{}-{}", self.name, state.started));
        match thread::Builder::new()
            .name(name)
            .stack_size(STACK)
            .spawn(move || pool.work())
        {
            Ok(thread) => state.threads.push(thread),
            Err(error) => log::warn!("{}: cannot start a further thread: {error}", self.name),
        }
    }

    fn work(&self) {
        let me = thread::current();
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                state.begun += 1;
                drop(state);
                job();
                state = self.lock();
            } else if state.stopping {
                return;
            } else {
                state.idle.push(me.clone());
                let until = Instant::now() + LINGER;
                // A job may have left a wake-up behind that was not meant for this wait.
                while state.idle.iter().any(|idle| idle.id() == me.id()) {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        state.idle.retain(|idle| idle.id() != me.id());
                        return;
                    }
                    drop(state);
                    thread::park_timeout(left);
                    state = self.lock();
                }
            }
        }
    }

    /// Waits until all jobs are done and joins the threads. No job may be submitted afterwards.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.stopping = true;
        state.idle.drain(..).for_each(|thread| thread.unpark());
        while let Some(thread) = state.threads.pop() {
            drop(state);
            // The jobs themselves catch panics of handlers.
            let _ = thread.join();
            state = self.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, mpsc};

    #[test]
    fn all_jobs_run_although_the_first_ones_block() {
        let pool = Arc::new(Pool::new("test", 200));
        let (go, (done, finished)) = (
            Arc::new((Mutex::new(false), Condvar::new())),
            mpsc::channel(),
        );
        let waiting: usize = (0..AT_ONCE)
            .map(|_| {
                let go = go.clone();
                pool.submit(move || drop(go.1.wait_while(go.0.lock().unwrap(), |go| !*go).unwrap()))
            })
            .map(usize::from)
            .sum();
        assert_eq!(waiting, 0);
        assert!(
            pool.submit(move || done.send(()).unwrap()),
            "the job waits for a thread"
        );
        assert!(finished.recv_timeout(Duration::from_millis(20)).is_err());
        let deadline = Instant::now() + Duration::from_secs(10);
        while finished.try_recv().is_err() {
            assert!(Instant::now() < deadline, "the job never runs");
            pool.grow();
            thread::yield_now();
        }
        *go.0.lock().unwrap() = true;
        go.1.notify_all();
        pool.stop();
        assert!(pool.lock().jobs.is_empty() && !pool.grow());
    }

    #[test]
    fn the_number_of_threads_stays_within_the_limit() {
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

    #[test]
    fn a_burst_of_short_jobs_gets_no_further_threads() {
        let pool = Arc::new(Pool::new("test", 200));
        let (done, finished) = mpsc::channel();
        for _ in 0..1000 {
            let done = done.clone();
            pool.submit(move || done.send(()).unwrap());
        }
        (0..1000).for_each(|_| finished.recv_timeout(Duration::from_secs(10)).unwrap());
        assert!(!pool.grow());
        let busy = AT_ONCE + 10 * PATIENCE;
        let go = Arc::new(Mutex::new(()));
        let held = go.lock().unwrap();
        for _ in 0..busy {
            let go = go.clone();
            pool.submit(move || drop(go.lock().unwrap()));
        }
        while pool.lock().jobs.len() > 10 * PATIENCE {
            thread::yield_now();
        }
        pool.lock().begun = 10;
        assert!(pool.grow());
        assert!(
            pool.lock().threads.len() <= AT_ONCE,
            "the existing threads will run them"
        );
        assert!(pool.grow());
        assert!(pool.lock().threads.len() > AT_ONCE, "they block");
        drop(held);
        pool.stop();
    }

    #[test]
    fn the_last_idle_thread_is_the_first_to_work() {
        let pool = Arc::new(Pool::new("test", 200));
        let (done, finished) = mpsc::channel();
        let work = |count: usize| {
            let (started, all) = (Arc::new(std::sync::Barrier::new(count)), done.clone());
            for _ in 0..count {
                let (started, all) = (started.clone(), all.clone());
                pool.submit(move || {
                    started.wait();
                    all.send(thread::current().id()).unwrap();
                });
            }
            let ids: std::collections::HashSet<_> = (0..count)
                .map(|_| finished.recv_timeout(Duration::from_secs(10)).unwrap())
                .collect();
            let is_busy = |state: MutexGuard<State>| state.idle.len() < state.threads.len();
            while is_busy(pool.lock()) {
                thread::yield_now();
            }
            ids
        };
        assert_eq!(work(10).len(), 10);
        let first = work(1);
        assert!(
            (0..20).all(|_| work(1) == first),
            "the other nine rest until they end"
        );
        pool.stop();
    }
}
