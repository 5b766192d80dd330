//! The state disk and what a node stores on it: [`device`] finds the disk, [`classify`] determines
//! its kind, [`filesystem`] makes and mounts ext4, [`node_state`] is the node's record about
//! itself, [`handover`] leaves a new disk to the booted system.
//! The documentation of the crate `unlock` shows the states of a disk.

mod classify;
pub mod device;
pub mod filesystem;
pub mod handover;
mod mark;
pub mod node_state;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use classify::{DiskKind, classify};
pub use node_state::NodeState;

use crate::{device_mapper, luks};

/// Name of the mapping: `/dev/mapper/state`.
pub const MAPPING: &str = "state";

/// Token 0 of a disk that every boot formats.
const UNINITIALIZED_TOKEN: &str =
    r#"{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":false}"#;

/// Why a state disk cannot be used. `Display` is for the console of a machine that cannot boot.
#[derive(Debug)]
pub enum Error {
    /// The disk never appeared.
    NoDisk {
        /// The disk that was searched for.
        wanted: String,
        /// The existing block devices.
        seen: String,
        /// How long the program waited.
        waited: Duration,
    },
    /// Several disks have the mark of the state disk: the disks, and the mark.
    Ambiguous(String, String),
    /// The disk holds something else, which must not be formatted.
    Foreign(PathBuf, String),
    /// A LUKS2 disk with the layout of a state disk but without a token, and why it may hold data.
    Unmarked(PathBuf, String),
    /// An operation on the LUKS2 header failed.
    Luks(PathBuf, luks::Error),
    /// Mapping or unmapping the disk failed.
    DeviceMapper(device_mapper::Error),
    /// Making or mounting the file system failed.
    Filesystem(filesystem::Error),
    /// The node state is missing or not usable.
    NodeState(node_state::Error),
    /// An action failed: its name, the path, and the error of the system call.
    Io(&'static str, PathBuf, io::Error),
    /// A signal stopped the program during the named step.
    Stopped(&'static str),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::NoDisk {
                wanted,
                seen,
                waited,
            } => write!(
                f,
                "no state disk: waited {} s for {wanted}; the block devices are: {seen}. Attach the disk, or name it with \
                 --disk",
                waited.as_secs()
            ),
            Error::Ambiguous(disks, wanted) => write!(
                f,
                "several disks ({disks}) match: each is {wanted}. Detach all but one (a copy shows old data), or name it with --disk"
            ),
            Error::Foreign(device, what) => write!(
                f,
                "{} holds {what}. Nothing was written to it: attach the right disk. If nobody needs this content, wipe the disk to \
                 use it as the state disk",
                device.display()
            ),
            Error::Unmarked(device, why) => write!(
                f,
                "{0} holds a LUKS2 device without the token of a state disk, and {why}: it may hold data. Nothing was written to \
                 it: attach the right disk. If this is the state disk, and its content may be lost, mark it as new: \
                 echo '{UNINITIALIZED_TOKEN}' | cryptsetup token import --token-id 0 '{0}'",
                device.display()
            ),
            Error::Luks(device, error) => write!(f, "{}: {error}", device.display()),
            Error::DeviceMapper(error) => error.fmt(f),
            Error::Filesystem(error) => error.fmt(f),
            Error::NodeState(error) => error.fmt(f),
            Error::Io(action, path, error) => {
                write!(f, "cannot {action} {}: {error}", path.display())
            }
            Error::Stopped(what) => {
                write!(
                    f,
                    "stopped while {what}; nothing is mounted, and the next unlock starts again"
                )
            }
        }
    }
}

impl std::error::Error for Error {}
