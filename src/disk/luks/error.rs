//! Why a header cannot be used or a disk cannot be changed.

use std::fmt;
use std::io;

/// Why a header cannot be used or a disk cannot be changed. The caller adds the name of the device.
#[derive(Debug)]
pub enum Error {
    /// The device failed.
    Io {
        /// The operation, e.g. "write the primary header".
        doing: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// A LUKS2 header that violates a rule for state disks.
    NotOurs(HeaderFault),
    /// No keyslot opened with this passphrase.
    WrongPassphrase {
        /// How many keyslots were tried.
        keyslots: usize,
    },
    /// A key, the device or the memory does not allow it: a sentence.
    Refused(String),
    /// Formatting would overwrite the content of another owner, or a disk in use.
    WouldOverwrite(String),
    /// The new metadata or the new keyslot area does not fit into the header.
    NoRoom(&'static str),
    /// An earlier write of this header failed: the content of the disk is unknown until it is
    /// probed again.
    ProbeAgain,
}

/// Which kind of rule a header violates. The text names the object, its value and the expected
/// value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeaderFault {
    /// It is not valid LUKS2, or a token is not what its type demands.
    Malformed(String),
    /// It is valid, but no state disk has this value.
    Foreign(String),
    /// A key would cost more time or memory than a node gives to a header.
    Costly(String),
}

impl fmt::Display for HeaderFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (HeaderFault::Malformed(why) | HeaderFault::Foreign(why) | HeaderFault::Costly(why)) =
            self;
        f.write_str(why)
    }
}

impl From<String> for HeaderFault {
    /// Parsers find what is malformed.
    fn from(why: String) -> HeaderFault {
        HeaderFault::Malformed(why)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { doing, source } => write!(f, "cannot {doing}: {source}"),
            Error::NotOurs(why) => write!(f, "the LUKS2 header is not that of a state disk: {why}"),
            Error::WrongPassphrase { keyslots } => {
                write!(
                    f,
                    "the key opens none of the {keyslots} keyslots of the LUKS2 header"
                )
            }
            Error::Refused(why) => f.write_str(why),
            Error::WouldOverwrite(what) => write!(
                f,
                "refusing to format: the disk holds {what}; to discard it, fill the first 17 MiB and the last MiB of the disk \
                 with zeros"
            ),
            Error::NoRoom(what) => write!(f, "the LUKS2 header has no room for {what}"),
            Error::ProbeAgain => {
                write!(
                    f,
                    "an earlier write of the LUKS2 header failed: probe the disk again first"
                )
            }
        }
    }
}

impl std::error::Error for Error {}

/// Converts an I/O error; `doing` names the operation.
pub(super) fn io_error(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { doing, source }
}

/// Returns the fault `otherwise`, of this kind, unless `holds`.
pub(super) fn ensure(
    holds: bool,
    kind: fn(String) -> HeaderFault,
    otherwise: impl FnOnce() -> String,
) -> Result<(), HeaderFault> {
    if holds {
        Ok(())
    } else {
        Err(kind(otherwise()))
    }
}
