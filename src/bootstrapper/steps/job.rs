//! The set-up of this node as a job. It runs once, on its own thread, and does not depend on the
//! caller who asked for it. Callers watch it. They may connect and disconnect at any time, and each
//! gets every event from the beginning.
//!
//! ```text
//!   idle ── begin ──► running: events … ──► ended (well, or with a reason): stays so
//!                        ▲ watch, from any event on: any number of watchers
//! ```

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::steps::error::Error;
use base::boot::timeline::Timeline;
use base::sync::{lock, wait_timeout};

/// Maximum number of lines that are kept. After that, only the starts of phases are kept for
/// callers that connect late.
const MAX_EVENTS: usize = 4096;

/// One event of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobEvent {
    /// Time since the job began.
    pub elapsed: Duration,
    /// The phase of the event, such as `components` or `kubeadm init`.
    pub phase: &'static str,
    /// What happened in the phase; empty when the phase starts.
    pub line: String,
}

/// The result of a job, or the step that failed.
pub type JobResult<T> = Result<T, Arc<Error>>;

/// One job; `T` is its result.
pub struct Job<T> {
    timeline: Timeline,
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    begun: Option<Instant>,
    phase: &'static str,
    events: Vec<JobEvent>,
    ending: Option<JobResult<T>>,
}

impl<T: Clone> Job<T> {
    /// Creates a job that has not begun. Its phases are printed on the console too.
    pub fn new(timeline: Timeline) -> Job<T> {
        let state = State {
            begun: None,
            phase: "",
            events: vec![],
            ending: None,
        };
        Job {
            timeline,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Marks the beginning; returns false if the job had begun before.
    pub fn begin(&self) -> bool {
        let mut state = self.lock();
        let is_first = state.begun.is_none();
        state.begun.get_or_insert_with(Instant::now);
        is_first
    }

    /// Returns whether [`Job::begin`] was called.
    pub fn has_begun(&self) -> bool {
        self.lock().begun.is_some()
    }

    /// Begins the next phase.
    pub fn phase(&self, phase: &'static str) {
        self.lock().phase = phase;
        self.timeline.event("phase", phase);
        self.add(String::new());
    }

    /// Adds a line to the phase. The operator's screen and this node's log show it, so this
    /// function removes anything that looks like a bootstrap token.
    pub fn line(&self, line: &str) {
        let line = without_tokens(line);
        log::info!("{line}");
        self.add(line);
    }

    fn add(&self, line: String) {
        let mut state = self.lock();
        let elapsed = state.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        if state.events.len() < MAX_EVENTS || line.is_empty() {
            let phase = state.phase;
            state.events.push(JobEvent {
                elapsed,
                phase,
                line,
            });
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the job with its result, or with the reason for its failure. Only the first call has an effect.
    pub fn end(&self, ending: Result<T, Error>) {
        let mut state = self.lock();
        state.ending.get_or_insert(ending.map_err(Arc::new));
        drop(state);
        self.changed.notify_all();
    }

    /// Returns how the job ended; `None` while it runs.
    pub fn ending(&self) -> Option<JobResult<T>> {
        self.lock().ending.clone()
    }

    /// Returns the events from number `from` on, and the ending if the job has ended. Waits for
    /// either, but at most for `time`.
    pub fn watch(&self, from: usize, time: Duration) -> (Vec<JobEvent>, Option<JobResult<T>>) {
        let deadline = Instant::now() + time;
        let mut state = self.lock();
        loop {
            let events = state.events.get(from..).unwrap_or_default().to_vec();
            let left = deadline.saturating_duration_since(Instant::now());
            if !events.is_empty() || state.ending.is_some() || left.is_zero() {
                return (events, state.ending.clone());
            }
            state = wait_timeout(&self.changed, state, left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        lock(&self.state)
    }
}

/// Returns the line with each bootstrap token replaced by `[token]`. A token is 6 and 16 lower-case
/// letters or digits with a dot between them (k8s.io/cluster-bootstrap, BootstrapTokenPattern).
pub fn without_tokens(line: &str) -> String {
    const ID: usize = 6;
    const LEN: usize = ID + 1 + 16;
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '.';
    let is_token = |word: &str| {
        word.len() == LEN
            && word.bytes().enumerate().all(|(at, byte)| match at {
                ID => byte == b'.',
                _ => byte.is_ascii_lowercase() || byte.is_ascii_digit(),
            })
    };
    let mut out = String::with_capacity(line.len());
    for part in line.split_inclusive(|c| !is_word(c)) {
        let word = part.trim_end_matches(|c| !is_word(c));
        if is_token(word) {
            out.push_str(&part.replace(word, "[token]"))
        } else {
            out.push_str(part)
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_job_begins_once_and_its_first_ending_counts() {
        let job = Job::new(Timeline::new("test"));
        assert!(job.begin() && !job.begin());
        job.end(Ok(1));
        job.end(Err(Error::Stopped));
        assert!(matches!(job.ending(), Some(Ok(1))));
    }

    #[test]
    fn every_watcher_sees_all_of_it_whenever_it_comes() {
        let job = Arc::new(Job::new(Timeline::new("test")));
        job.begin();
        let follow = |job: Arc<Job<&'static str>>| {
            thread::spawn(move || {
                let mut seen = vec![];
                loop {
                    let (events, ending) = job.watch(seen.len(), LONG);
                    let is_all = events.is_empty();
                    seen.extend(events.into_iter().map(|event| (event.phase, event.line)));
                    if let Some(ending) = ending.filter(|_| is_all) {
                        return (seen, ending);
                    }
                }
            })
        };
        let early = follow(job.clone());
        job.phase("components");
        job.line("kubelet: installed");
        job.phase("kubeadm init");
        job.end(Ok("done"));
        let late = follow(job.clone());
        let (events, ending) = early.join().unwrap();
        let expected = [
            ("components", ""),
            ("components", "kubelet: installed"),
            ("kubeadm init", ""),
        ];
        assert_eq!(
            events,
            expected.map(|(phase, line)| (phase, line.to_owned()))
        );
        assert_eq!(ending.unwrap(), "done");
        let (same, ending) = late.join().unwrap();
        assert_eq!((same, ending.unwrap()), (events, "done"));
    }

    #[test]
    fn no_bootstrap_token_is_told() {
        let job = Job::<()>::new(Timeline::new("test"));
        job.line("kubeadm join 10.0.0.1:6443 --token abcdef.0123456789abcdef --discovery");
        job.line("abcdef.0123456789abcdef");
        job.line("registry.k8s.io/pause:3.10 Abcdef.0123456789abcdef x.abcdef.0123456789abcdef");
        let lines: Vec<_> = job
            .watch(0, LONG)
            .0
            .into_iter()
            .map(|event| event.line)
            .collect();
        assert_eq!(
            lines[0],
            "kubeadm join 10.0.0.1:6443 --token [token] --discovery"
        );
        assert_eq!(lines[1], "[token]");
        assert_eq!(
            lines[2],
            "registry.k8s.io/pause:3.10 Abcdef.0123456789abcdef x.abcdef.0123456789abcdef"
        );
    }

    #[test]
    fn a_program_that_never_stops_talking_fills_no_memory() {
        let job = Job::<()>::new(Timeline::new("test"));
        job.begin();
        for _ in 0..3 * MAX_EVENTS {
            job.line("talk");
        }
        job.phase("next");
        let events = job.watch(0, LONG).0;
        assert_eq!(events.len(), MAX_EVENTS + 1);
        assert_eq!(events[MAX_EVENTS].phase, "next");
    }

    #[test]
    fn a_watch_ends_by_time_when_nothing_happens() {
        let job = Job::<()>::new(Timeline::new("test"));
        let (events, ending) = job.watch(0, Duration::from_millis(5));
        assert!(events.is_empty() && ending.is_none());
    }
}
