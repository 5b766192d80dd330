//! What a state disk is, and what a node keeps on it: [`device`] finds the disk, [`classify`] says what it is, [`filesystem`] makes
//! and mounts ext4, [`node_state`] is what the node keeps about itself, [`handover`] is what the initramfs leaves for the booted
//! system, with the commit. The crate `unlock` has the picture of a disk's life.

mod classify;
pub mod device;
pub mod filesystem;
pub mod handover;
pub mod node_state;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use classify::{Disk, classify};
pub use handover::{Handover, NewDisk, mark_for_reset};
pub use node_state::{NodeState, has_kubelet, is_complete, mark_begun, mark_complete};

use crate::{device_mapper, luks};

/// Name of the mapping: `/dev/mapper/state`.
pub const MAPPING: &str = "state";

/// Token 0 of a disk that any boot formats.
const UNINITIALISED_TOKEN: &str =
    r#"{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":false}"#;

/// Why there is no mounted state disk. `Display` is for the console of a machine that cannot boot.
#[derive(Debug)]
pub enum Error {
    /// The disk never appeared.
    NoDisk {
        /// What was looked for.
        wanted: String,
        /// The block devices that are there.
        seen: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Something on the disk that is not ours to format.
    Foreign(PathBuf, String),
    /// A LUKS2 disk of our shape without a token, and why data may be on it.
    Unmarked(PathBuf, String),
    /// The header.
    Luks(PathBuf, luks::Error),
    /// The kernel's mapping.
    DeviceMapper(device_mapper::Error),
    /// Making or mounting ext4.
    Filesystem(filesystem::Error),
    /// What the node keeps about itself.
    NodeState(node_state::Error),
    /// The booted system found another header than the initramfs left: an UUID and a hash each.
    Exchanged {
        /// The disk.
        device: PathBuf,
        /// As the initramfs left it.
        expected: String,
        /// As it is now.
        got: String,
    },
    /// An action, a path, the system's answer.
    Io(&'static str, PathBuf, io::Error),
    /// SIGTERM, in the middle of what.
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
            Error::Foreign(device, what) => write!(
                f,
                "{} holds {what}. Nothing was written to it: attach the right disk, or wipe this one if it is to become \
                 the state disk",
                device.display()
            ),
            Error::Unmarked(device, why) => write!(
                f,
                "{0} holds a LUKS2 device without the mark of a state disk, and {why}: somebody's data may be on it. Nothing was \
                 written to it: attach the right disk. If this is the state disk, and all that it holds may go, mark it as new: \
                 echo '{UNINITIALISED_TOKEN}' | cryptsetup token import --token-id 0 '{0}'",
                device.display()
            ),
            Error::Luks(device, error) => write!(f, "{}: {error}", device.display()),
            Error::DeviceMapper(error) => error.fmt(f),
            Error::Filesystem(error) => error.fmt(f),
            Error::NodeState(error) => error.fmt(f),
            Error::Exchanged {
                device,
                expected,
                got,
            } => write!(
                f,
                "{}: this is not the LUKS2 header that the initramfs wrote: expected {expected}, got {got}. Whoever \
                 controls the disk has exchanged it: start the machine afresh",
                device.display()
            ),
            Error::Io(action, path, error) => write!(f, "{action} {}: {error}", path.display()),
            Error::Stopped(what) => {
                write!(
                    f,
                    "stopped while {what}; nothing is mounted, and the next unlock starts over"
                )
            }
        }
    }
}

impl std::error::Error for Error {}
