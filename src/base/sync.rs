//! The locks of the standard library under a name of our own. `tests/model.rs` compiles the modules
//! that import them from here with loom's locks instead, which run the interleavings of their
//! threads.

pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
