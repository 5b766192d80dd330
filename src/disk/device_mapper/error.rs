//! Why a disk could not be mapped or unmapped.

use std::fmt;
use std::io;
use std::path::Path;

/// Why a disk could not be mapped or unmapped.
#[derive(Debug)]
pub enum Error {
    /// `/dev/mapper/control` cannot be opened.
    Control(io::Error),
    /// The name of the mapping is in use.
    AlreadyActive(String),
    /// No device of that name is mapped.
    NotActive(String),
    /// A device of that name exists, but it is not a LUKS2 mapping: its device-mapper UUID.
    NotOurs(String, String),
    /// The device of that name is mounted, open or part of another mapping.
    InUse(String),
    /// The disk below, a value of the [`Mapping`](super::Mapping) or the kernel does not allow it: a
    /// sentence for the console.
    Failed(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Control(error) => {
                write!(
                    f,
                    "cannot open /dev/mapper/control: {error}; check that the kernel module dm_mod is loaded and that this program runs as root"
                )
            }
            Error::AlreadyActive(name) => {
                write!(
                    f,
                    "/dev/mapper/{name} is already active; close it first (cryptsetup close {name})"
                )
            }
            Error::NotActive(name) => write!(f, "/dev/mapper/{name} is not active"),
            Error::NotOurs(name, uuid) => {
                write!(
                    f,
                    "/dev/mapper/{name} is not a LUKS2 mapping (its device-mapper UUID is {uuid:?}); it was not changed"
                )
            }
            Error::InUse(name) => {
                write!(
                    f,
                    "/dev/mapper/{name} is still in use: unmount it, and stop the programs that have it open"
                )
            }
            Error::Failed(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Makes the error of a disk or its node.
    pub(super) fn of_disk(device: &Path, doing: &str, error: io::Error) -> Error {
        Error::Failed(format!("{}: cannot {doing}: {error}", device.display()))
    }
}
