//! Why a component is not installed, for whoever has to mend it.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use super::{Digest, hex};

/// Why a component is not installed. Nothing of it is in place then.
#[derive(Debug)]
pub enum Error {
    /// It asks for what it may not have; a clause.
    Refused {
        /// Which.
        what: String,
        /// Why.
        why: String,
    },
    /// The server's last word.
    Status {
        /// What was asked, and where.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// Not fetched in its time, or never to be.
    Unreachable {
        /// What was asked, and where.
        url: String,
        /// What happened last, a clause.
        why: String,
        /// For how long it was tried.
        after: Duration,
    },
    /// More bytes than any component has.
    TooLong {
        /// Which.
        what: String,
        /// How many are taken.
        limit: u64,
    },
    /// Other bytes than expected.
    Hash {
        /// Which.
        what: String,
        /// SHA-256 as the list has it.
        expected: Digest,
        /// SHA-256 of what came.
        got: Digest,
    },
    /// An archive that cannot be, or must not be unpacked; a clause.
    Archive {
        /// Which.
        what: String,
        /// Why.
        why: String,
    },
    /// None of these files has a certificate to trust.
    NoRoots(Vec<PathBuf>),
    /// The system's answer.
    Io {
        /// A verb.
        action: &'static str,
        /// What it was done to.
        path: PathBuf,
        /// The answer.
        error: io::Error,
    },
    /// Stopped from outside.
    Stopped,
}

impl Error {
    pub(super) fn io(action: &'static str, path: &Path, error: io::Error) -> Error {
        Error::Io {
            action,
            path: path.to_owned(),
            error,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Refused { what, why } => write!(f, "component {what} is refused: {why}"),
            Error::Status { url, status } => {
                write!(
                    f,
                    "component {url}: expected status 200, got {status}; check the URL in the list of components"
                )
            }
            Error::Unreachable { url, why, after } if after.is_zero() => {
                write!(f, "component {url}: {why}")
            }
            Error::Unreachable { url, why, after } => {
                write!(
                    f,
                    "component {url} was tried for {} s in vain, at last: {why}",
                    after.as_secs()
                )
            }
            Error::TooLong { what, limit } => {
                write!(f, "component {what} has more than {limit} bytes")
            }
            Error::Hash {
                what,
                expected,
                got,
            } => {
                write!(
                    f,
                    "component {what}: expected SHA-256 {}, got {}; not installed",
                    hex(expected),
                    hex(got)
                )
            }
            Error::Archive { what, why } => write!(f, "component {what} is not unpacked: {why}"),
            Error::NoRoots(paths) => write!(
                f,
                "components: no certificate to trust in any of {paths:?}; install ca-certificates in the image, or take \
                 the components from http: or file: URLs (their hash is checked all the same)"
            ),
            Error::Io {
                action,
                path,
                error,
            } => {
                write!(f, "components: cannot {action} {}: {error}", path.display())?;
                match error.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                        f.write_str("; give that file system more space")
                    }
                    _ => Ok(()),
                }
            }
            Error::Stopped => f.write_str("components: stopped before all were installed"),
        }
    }
}

impl std::error::Error for Error {}
