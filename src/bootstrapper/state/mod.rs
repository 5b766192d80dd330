//! The state disk of a running machine: its header, its key, its size, its generation.

pub mod generation;
pub mod growth;
pub mod header_lock;
pub mod peers;
pub mod peers_token;
pub mod state_disk;
