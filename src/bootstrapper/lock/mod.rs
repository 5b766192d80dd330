//! The one-way node lock in PCR 15, and who may take it.

pub mod node_lock;
pub mod race;
pub mod secret_guard;
pub mod turn;
