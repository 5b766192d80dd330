//! The standard library's locks, by a name of ours: `tests/model.rs` compiles what imports them from here with loom's instead,
//! which runs the interleavings of their threads.

pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
