//! Ends a thread that may be waiting for a server.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long to wait for the end of a thread. Name resolution and a request to a slow metadata
/// service (10 s) may take longer; such a thread ends by itself, and its result is not used.
const GRACE: Duration = Duration::from_secs(2);
/// Interval between two checks of the thread.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A thread that ends on a Stop. Dropping this value waits a short time for its end.
pub struct Ending(Option<JoinHandle<()>>);

impl Ending {
    /// Starts the thread.
    ///
    /// # Errors
    /// If no thread can be created.
    pub fn start(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<Ending> {
        let thread = thread::Builder::new().name(name.into()).spawn(work)?;
        Ok(Ending(Some(thread)))
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let Some(thread) = self.0.take() else { return };
        let end = Instant::now() + GRACE;
        while !thread.is_finished() && Instant::now() < end {
            thread::sleep(POLL_INTERVAL);
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            log::debug!("a request still runs; its result will be ignored");
        }
    }
}
