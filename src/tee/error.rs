//! Why the hardware of this machine gives no evidence.

use std::fmt;

/// Why the hardware of this machine gives no evidence. Each has a clause for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The kernel is busy, or another program interfered: another attempt may succeed.
    Busy(String),
    /// The kernel does not make such evidence, or refuses it.
    Unavailable(String),
    /// What the kernel or the host returned is not evidence for this caller.
    Malformed(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Error::Busy(why) | Error::Unavailable(why) | Error::Malformed(why)) = self;
        f.write_str(why)
    }
}

impl std::error::Error for Error {}
