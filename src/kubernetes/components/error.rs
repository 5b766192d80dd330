//! The reasons why a component is not installed.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use super::digest::Digest;
use base::text::hex;

/// Why a component is not installed. None of its files is in place then.
#[derive(Debug)]
pub enum Error {
    /// The component asks for something that is not permitted; a clause.
    Refused {
        /// The component.
        what: String,
        /// The reason.
        why: String,
    },
    /// The list of components is not what it should be; a clause.
    List(String),
    /// The server refused the request.
    Status {
        /// The URL.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// The component could not be fetched, or not before its deadline.
    Unreachable {
        /// The URL.
        url: String,
        /// The last error, as a clause.
        why: String,
        /// How long it was tried.
        after: Duration,
    },
    /// The component has too many bytes.
    TooLong {
        /// The component.
        what: String,
        /// The maximum number of bytes.
        limit: u64,
    },
    /// The hash does not match.
    Hash {
        /// The component.
        what: String,
        /// The expected SHA-256 in the list.
        expected: Digest,
        /// The SHA-256 of the received bytes.
        got: Digest,
    },
    /// The archive is invalid or not permitted; a clause.
    Archive {
        /// The component.
        what: String,
        /// The reason.
        why: String,
    },
    /// None of these files contains a trusted certificate.
    NoRoots(Vec<PathBuf>),
    /// A system call failed.
    Io {
        /// The action, as a verb.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The caller stopped the installation.
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
            Error::List(why) => write!(f, "components: {why}"),
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
                    "component {url} was not fetched within {} s; the last error: {why}",
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
            Error::Archive { what, why } => {
                write!(f, "component {what} cannot be extracted: {why}")
            }
            Error::NoRoots(paths) => write!(
                f,
                "components: none of {paths:?} contains a trusted certificate; install ca-certificates in the image, or use \
                 http: or file: URLs (their hash is checked in any case)"
            ),
            Error::Io {
                action,
                path,
                error,
            } => {
                write!(f, "components: cannot {action} {}: {error}", path.display())?;
                match error.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                        f.write_str("; enlarge that file system")
                    }
                    _ => Ok(()),
                }
            }
            Error::Stopped => {
                f.write_str("components: stopped before all components were installed")
            }
        }
    }
}

impl std::error::Error for Error {}
