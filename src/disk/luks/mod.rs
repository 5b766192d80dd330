//! LUKS2, the header format of an encrypted disk: binary header, JSON metadata, keyslots, digest, tokens.
//!
//! Implements the part of the "LUKS2 On-Disk Format Specification" (version 1.1) that a state disk uses, in the exact
//! form that Constellation v2 writes and accepts: one `crypt` segment of AES-XTS with 4096-byte sectors over HMAC-SHA-256 of
//! dm-integrity, keyslots with argon2id and the `luks1` anti-forensic splitter, a PBKDF2 digest, and token 0, which records
//! whether the disk holds the state of a node. This module works on `Read + Write + Seek`, without device-mapper.
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
//! - [`probe`]: determines what is on a device; returns the [`Header`], a copy in memory that is never read again
//! - `header`: the 4096 binary bytes and their checksum
//! - `json`: the JSON area; decides whether it is valid LUKS2 (an invalid header copy is ignored)
//! - `metadata`: decides which valid metadata belongs to a state disk; limits for hostile headers; edits
//! - `cluster_token`: the token that names the cluster of the disk, with a MAC
//! - `keyslot`: argon2id, area encryption, splitter, digest
//! - `write`: the operations that change the disk ([`format()`], [`Header::replace_passphrase_and_mark`],
//!   [`Header::mark_for_reset`]), with a table of the states after a power failure at each step

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
pub use metadata::{DiskState, Geometry, Integrity};
pub use probe::{Probe, probe};
pub use write::{MIN_DEVICE_SIZE, format};

/// Start in bytes of the data segment of a disk that we format: behind the 16 MiB header of Constellation.
pub const DATA_OFFSET: u64 = 16 << 20;
/// Length in bytes of the volume key of a disk with integrity: 64 for AES-256-XTS, 32 for HMAC-SHA-256.
pub const VOLUME_KEY_LEN: usize = 96;
/// Length in bytes of the volume key of a disk without integrity.
pub const VOLUME_KEY_LEN_PLAIN: usize = 64;

/// A device that can be formatted. Writes are durable after [`Device::sync`] has returned.
pub trait Device: Read + Write + Seek {
    /// Makes every write before this call durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl Device for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}

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
    /// A LUKS2 header that violates a rule for state disks. The text names the object, its value and the expected value.
    NotOurs(String),
    /// No keyslot opened with this passphrase.
    WrongPassphrase {
        /// How many keyslots were tried.
        keyslots: usize,
    },
    /// The given volume key does not match the digest in the header.
    WrongVolumeKey,
    /// A key or passphrase has the wrong length.
    KeyLength {
        /// Which key.
        what: &'static str,
        /// Its length in bytes.
        got: usize,
        /// The expected length.
        expected: &'static str,
    },
    /// The system does not have the memory that argon2id of a keyslot needs.
    OutOfMemory {
        /// The memory in KiB, from the header.
        kib: u32,
    },
    /// Formatting would overwrite the content of another owner, or a disk in use.
    WouldOverwrite(String),
    /// The device is too small to hold a header and data.
    TooSmall {
        /// Size of the device in bytes.
        size: u64,
    },
    /// The new metadata or the new keyslot area does not fit into the header.
    NoRoom(&'static str),
    /// An earlier write of this header failed: the content of the disk is unknown until it is probed again.
    ProbeAgain,
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
            Error::WrongVolumeKey => {
                write!(f, "the volume key does not match this LUKS2 header")
            }
            Error::KeyLength {
                what,
                got,
                expected,
            } => write!(f, "the {what} has {got} bytes, expected {expected}"),
            Error::OutOfMemory { kib } => {
                write!(
                    f,
                    "the key derivation of the keyslot needs {kib} KiB of memory, which is not available"
                )
            }
            Error::WouldOverwrite(what) => write!(
                f,
                "refusing to format: the disk holds {what}; to discard it, fill the first 17 MiB and the last MiB of the disk \
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
                    "an earlier write of the LUKS2 header failed: probe the disk again first"
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

/// Converts an I/O error; `doing` names the operation.
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
