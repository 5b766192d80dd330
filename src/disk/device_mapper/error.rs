//! Why a disk could not be mapped or unmapped.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a disk could not be mapped or unmapped.
#[derive(Debug)]
pub enum Error {
    /// `/dev/mapper/control` cannot be opened.
    Control(io::Error),
    /// A value of the [`Mapping`] is invalid.
    InvalidMapping {
        /// The name of the mapping.
        name: String,
        /// The value and what is expected.
        reason: String,
    },
    /// The name is in use.
    AlreadyActive {
        /// The name of the mapping.
        name: String,
    },
    /// No device of that name is mapped.
    NotActive {
        /// The name of the mapping.
        name: String,
    },
    /// A device of that name exists, but it is not a LUKS2 mapping.
    NotOurs {
        /// The name of the mapping.
        name: String,
        /// Its device-mapper UUID.
        uuid: String,
    },
    /// The device is mounted, open or part of another mapping.
    InUse {
        /// The name of the mapping.
        name: String,
    },
    /// Access to the disk below failed.
    Disk {
        /// The disk.
        device: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The error of the system call.
        error: io::Error,
    },
    /// The disk has no usable dm-integrity superblock at its data offset.
    Superblock {
        /// The disk.
        device: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The kernel refused an operation.
    Kernel {
        /// The name of the mapping.
        name: String,
        /// The operation.
        doing: &'static str,
        /// The error of the kernel; the kernel log has details.
        error: io::Error,
    },
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
            Error::InvalidMapping { name, reason } => write!(f, "cannot map {name:?}: {reason}"),
            Error::AlreadyActive { name } => {
                write!(
                    f,
                    "/dev/mapper/{name} is already active; close it first (cryptsetup close {name})"
                )
            }
            Error::NotActive { name } => write!(f, "/dev/mapper/{name} is not active"),
            Error::NotOurs { name, uuid } => {
                write!(
                    f,
                    "/dev/mapper/{name} is not a LUKS2 mapping (its device-mapper UUID is {uuid:?}); it was not changed"
                )
            }
            Error::InUse { name } => {
                write!(
                    f,
                    "/dev/mapper/{name} is still in use: unmount it, and stop the programs that have it open"
                )
            }
            Error::Disk {
                device,
                doing,
                error,
            } => write!(f, "{}: cannot {doing}: {error}", device.display()),
            Error::Superblock { device, reason } => {
                write!(
                    f,
                    "{}: no usable dm-integrity superblock at the data offset: {reason}",
                    device.display()
                )
            }
            Error::Kernel { name, doing, error } => {
                write!(
                    f,
                    "/dev/mapper/{name}: the kernel cannot {doing}: {error}; the kernel log (dmesg) gives the reason"
                )
            }
        }
    }
}

impl std::error::Error for Error {}
