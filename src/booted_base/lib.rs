//! What several programs share, but not with `unlock`: so the program of the initramfs does not link
//! it.

pub mod child_output;
pub mod dial;
pub mod file;
pub mod phases;
pub mod plain;
pub mod stage;
pub mod time;
pub mod timed;
pub mod uuid;
pub mod x509;
