//! The locks of the standard library under a name of our own. `tests/model.rs` compiles the modules
//! that import them from here with loom's locks instead, which run the interleavings of their
//! threads.
//!
//! A panic poisons no lock: each value under a lock is changed as a whole, so the next thread can
//! use it.

pub mod pool;

use std::sync::PoisonError;
use std::time::Duration;

pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Locks a mutex.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `changed` is notified.
pub fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `changed` is notified, but at most for `time`.
pub fn wait_timeout<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    time: Duration,
) -> MutexGuard<'a, T> {
    let waited = changed.wait_timeout(guard, time);
    waited.unwrap_or_else(PoisonError::into_inner).0
}
