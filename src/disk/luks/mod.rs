//! LUKS2, the encrypted disk's own description of itself: binary header, JSON metadata, keyslots, digest, tokens.
//!
//! Implements the part of the "LUKS2 On-Disk Format Specification" (version 1.1) that a state disk uses, in the exact
//! shape that Constellation v2 writes and accepts: one `crypt` segment of AES-XTS with 4096-byte sectors over
//! dm-integrity's HMAC-SHA-256, keyslots of argon2id and the `luks1` anti-forensic splitter, a PBKDF2 digest, and token
//! 0 that says whether the disk holds a node's state. No device mapper here: bytes, and `Read + Write + Seek`.
//!
//! ```text
//! 0        16 KiB     32 KiB                                        16 MiB
//! ├─────────┼──────────┼────────────┬────────────┬───── … ──┬────────┼──────────────────────────
//! │ primary │ secondary│ keyslot    │ keyslot    │  unused  │ marker │ integrity superblock, data
//! │ header  │ header   │ area       │ area       │          │        │
//! └─────────┴──────────┴────────────┴────────────┴───── … ──┴────────┴──────────────────────────
//!   4096 bytes binary      96-byte key × 4000 stripes,        "a format
//!   + 12 KiB JSON, each    encrypted by the passphrase's       is under way"
//!   with a checksum        argon2id key
//! ```
//!
//! - [`probe`]: what is on a device; gives the [`Header`], a private copy that is never read from the disk again
//! - `header`: the 4096 binary bytes and their checksum
//! - `json`: the JSON area: what is valid LUKS2, whoever made it; a copy that is not does not count
//! - `metadata`: valid metadata: which disks are ours, the bounds that a hostile header must keep, edits
//! - `cluster_token`: of which cluster the disk is, under a MAC
//! - `keyslot`: argon2id, area encryption, splitter, digest
//! - `write`: what changes the disk ([`format()`], [`Header::replace_passphrase_and_mark`], [`Header::mark_for_reset`]),
//!   with the table of what a power loss at each instant leaves behind

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

mod cluster_token;
mod header;
mod json;
mod keyslot;
mod metadata;
mod probe;
#[cfg(test)]
mod tests;
mod write;

pub use cluster_token::ClusterToken;
pub use header::Header;
pub use metadata::{Geometry, Integrity, State};
pub use probe::{Probe, probe};
pub use write::{MIN_DEVICE_SIZE, format};

/// Where the data segment of a disk that we format starts, in bytes: the 16 MiB header of Constellation.
pub const DATA_OFFSET: u64 = 16 << 20;
/// Length in bytes of the volume key of a disk with integrity: 64 for AES-256-XTS, 32 for HMAC-SHA-256.
pub const VOLUME_KEY_LEN: usize = 96;
/// Length in bytes of the volume key of a disk without integrity.
pub const VOLUME_KEY_LEN_PLAIN: usize = 64;

/// A device that can be formatted: what [`Write`] wrote is durable once [`Device::sync`] returned.
pub trait Device: Read + Write + Seek {
    /// Makes every write before this call durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl Device for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}

/// Why a header cannot be used or a disk cannot be changed. The caller adds which device it was.
#[derive(Debug)]
pub enum Error {
    /// The device failed.
    Io {
        /// What was being done, e.g. "write the primary header".
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A LUKS2 header that breaks a rule for state disks; says which object, what it has, what it must have.
    NotOurs(String),
    /// No keyslot opened with this passphrase.
    WrongPassphrase {
        /// How many keyslots were tried.
        keyslots: usize,
    },
    /// The volume key given is not the one that the header's digest is of.
    WrongVolumeKey,
    /// A key or passphrase of a length that cannot be.
    KeyLength {
        /// Which key.
        what: &'static str,
        /// Its length in bytes.
        got: usize,
        /// The length that it must have.
        expected: &'static str,
    },
    /// A keyslot's argon2id wants this much memory, and the system has not got it.
    OutOfMemory {
        /// In KiB, as the header has it.
        kib: u32,
    },
    /// Formatting would overwrite something that is not ours or is in use.
    WouldOverwrite(String),
    /// The device is too small to hold a header and data.
    TooSmall {
        /// Size of the device in bytes.
        size: u64,
    },
    /// The new metadata, or the new keyslot's area, has no room in the header.
    NoRoom(&'static str),
    /// An earlier write of this header failed half-way: what the disk holds is unknown until it is probed again.
    ProbeAgain,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { doing, source } => write!(f, "cannot {doing}: {source}"),
            Error::NotOurs(why) => write!(f, "the LUKS2 header is not one of a state disk: {why}"),
            Error::WrongPassphrase { keyslots } => {
                write!(
                    f,
                    "the key opens none of the {keyslots} keyslots of the LUKS2 header"
                )
            }
            Error::WrongVolumeKey => {
                write!(f, "the volume key is not the one of this LUKS2 header")
            }
            Error::KeyLength {
                what,
                got,
                expected,
            } => write!(f, "the {what} has {got} bytes, expected {expected}"),
            Error::OutOfMemory { kib } => {
                write!(
                    f,
                    "the keyslot's key derivation needs {kib} KiB of memory, and the system has not got that"
                )
            }
            Error::WouldOverwrite(what) => write!(
                f,
                "refusing to format: the disk holds {what}; if that is of no use, fill its first 17 MiB and its last MiB \
                 with zeros"
            ),
            Error::TooSmall { size } => {
                write!(
                    f,
                    "the device has {size} bytes, a state disk needs at least {}",
                    MIN_DEVICE_SIZE
                )
            }
            Error::NoRoom(what) => write!(f, "the LUKS2 header has no room for {what}"),
            Error::ProbeAgain => {
                write!(
                    f,
                    "an earlier write of the LUKS2 header failed half-way: probe the disk again first"
                )
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Turns an I/O error into ours, with what was being done.
fn io_error(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { doing, source }
}

fn read_at(dev: &mut (impl Read + Seek), offset: u64, buf: &mut [u8]) -> io::Result<()> {
    dev.seek(SeekFrom::Start(offset))?;
    dev.read_exact(buf)
}

fn write_at(dev: &mut (impl Write + Seek), offset: u64, bytes: &[u8]) -> io::Result<()> {
    dev.seek(SeekFrom::Start(offset))?;
    dev.write_all(bytes)
}
