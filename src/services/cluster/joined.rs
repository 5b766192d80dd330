//! Threads that end before their owner.

use std::thread::JoinHandle;

/// A thread. Dropping this waits for the thread, so its end must be asked for before.
pub struct Joined(Option<JoinHandle<()>>);

impl From<JoinHandle<()>> for Joined {
    fn from(thread: JoinHandle<()>) -> Joined {
        Joined(Some(thread))
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic of the thread is already in the log.
            let _ = thread.join();
        }
    }
}
