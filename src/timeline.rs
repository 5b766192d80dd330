//! What a boot did when: one line an event on the console, in a form that a person and a test can read.
//!
//! ```text
//! firstlight[unlock]    3.214s mapped: /dev/mapper/state
//! ```

use std::fmt::Display;
use std::sync::Arc;

use crate::attestation::{IssueError, Issuer, Oid};
use crate::sys::clock;

/// Prints the events of one run of the bootstrapper.
#[derive(Clone, Copy)]
pub struct Timeline {
    stage: &'static str,
}

impl Timeline {
    /// A timeline whose lines are marked with `stage`: `unlock` or `run`.
    pub fn new(stage: &'static str) -> Timeline {
        Timeline { stage }
    }

    /// Prints an event, a word of letters and dashes, with what there is to say about it (no secrets: a console of a
    /// confidential VM is read by its host).
    pub fn event(&self, name: &str, text: impl Display) {
        // a node whose console is gone still boots: println! would panic
        use std::io::Write;
        let time = clock::since_boot().as_secs_f64();
        let _ = writeln!(std::io::stdout(), "firstlight[{}] {time:8.3}s {name}: {text}", self.stage);
    }

    /// Prints the most memory that this process has had resident so far (proc_pid_status(5), `VmHWM`).
    pub fn peak_memory(&self) {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if let Some(peak) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
            self.event("memory", format_args!("at most {} resident", peak.trim()));
        }
    }

    /// An issuer that notes the `quote` event each time it made a document.
    pub fn issuer(&self, inner: Arc<dyn Issuer>) -> Arc<dyn Issuer> {
        Arc::new(Noted { inner, timeline: *self })
    }
}

struct Noted {
    inner: Arc<dyn Issuer>,
    timeline: Timeline,
}

impl Issuer for Noted {
    fn oid(&self) -> Oid {
        self.inner.oid()
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let from = clock::since_boot();
        let document = self.inner.issue(user_data, nonce)?;
        let took = clock::since_boot() - from;
        self.timeline.event("quote", format_args!("{} bytes in {} ms", document.len(), took.as_millis()));
        Ok(document)
    }
}
