//! (to come)
pub mod filesystem;
