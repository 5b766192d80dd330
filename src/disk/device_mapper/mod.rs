//! An encrypted disk as a block device: dm-crypt, over dm-integrity where sectors are authenticated, set up through the
//! kernel's ioctls (linux/dm-ioctl.h, the kernel's Documentation/admin-guide/device-mapper/{dm-crypt,dm-integrity}.rst).
//!
//! Tables, names and UUIDs are those that cryptsetup (2.6; 2.7 and 2.8 understand them) gives a LUKS2 device, so that its `status`
//! and `close` work on a mapping of ours, and either program reads what the other wrote:
//!
//! ```text
//!   /dev/mapper/NAME       crypt      encrypts a sector and computes its 32-byte tag (authenc: AES-XTS, HMAC-SHA256)
//!          |
//!   /dev/mapper/NAME_dif   integrity  stores sector and tag together, by its journal
//!          |
//!   the disk               header up to the data offset | dm-integrity superblock | journal | tags and data, interleaved
//! ```
//!
//! Without integrity, crypt lies on the disk itself, from the data offset on.
//!
//! With integrity **a sector that was never written cannot be read**: its tag does not match, the read fails with `EIO`, and the
//! kernel logs `INTEGRITY AEAD ERROR`. Whoever uses a mapping opened with [`FirstUse::Create`] writes before it reads.
//!
//! The key is handed to the kernel as a `logon` key of the calling thread's keyring, which user space cannot read back, and is
//! revoked as soon as dm-crypt has its copy. `control` has the ioctls, `integrity` the lower device and its superblock, `crypt`
//! the upper one and its key, `journal` tells whether the lower device was ever used.

mod control;
mod crypt;
mod integrity;
mod journal;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use base::crypto::Secret;
use control::Control;
pub use journal::may_hold_data;

/// Bytes of a sector in tables and in every size that the device-mapper speaks of, whatever the device's own sectors are.
const SECTOR: u64 = 512;

/// What is to be mapped: the first segment of a LUKS2 header, and the volume key.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// Name under `/dev/mapper`; letters, digits, `_`, `-` and `.`
    pub name: &'a str,
    /// UUID of the LUKS2 header, with dashes
    pub luks_uuid: &'a str,
    /// The disk; a block device
    pub device: &'a Path,
    /// Where the segment starts, in bytes from the start of the disk (16 MiB with cryptsetup's defaults)
    pub data_offset: u64,
    /// Sector size of encryption and of integrity tags: 512, 1024, 2048 or 4096 bytes
    pub sector_size: u32,
    /// The segment's encryption, as LUKS2 writes it: `aes-xts-plain64`
    pub cipher: &'a str,
    /// The segment's integrity, as LUKS2 writes it: `hmac(sha256)`, or none
    pub integrity: Option<&'a str>,
    /// The volume key: that of the cipher and behind it that of the HMAC (64 + 32 bytes, or 64 without integrity)
    pub key: &'a Secret,
    /// Number of the digest that verified the volume key; part of the key's name in the keyring
    pub digest: u32,
}

/// Whether a mapping's data was ever written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstUse {
    /// Just formatted: what an earlier life of the disk left of a dm-integrity superblock is destroyed, and a new one with an
    /// empty journal made. (Old sectors stay on the disk; they are unreadable because each format makes a new key.) Means nothing
    /// without integrity.
    Create,
    /// In use before: the superblock must be there and fit
    Existing,
}

/// Maps the disk and returns the path of the block device, `/dev/mapper/NAME`, which exists then. On failure nothing stays
/// mapped.
///
/// Never reads the data: whether the key is the right one shows at the first read. Kernel 5.12 or later, with `dm_mod`, `dm_crypt` and,
/// with integrity, `dm_integrity` and `authenc` loaded or loadable.
///
/// # Errors
/// [`Error::AlreadyActive`] if the name is taken, or that of the integrity device by what a killed process left ([`close`] clears
/// it); then neither the mapping nor the disk is touched.
pub fn open(mapping: &Mapping, first_use: FirstUse) -> Result<PathBuf, Error> {
    let cipher = crypt::Cipher::of(mapping)?;
    let control = Control::open()?;
    if control.status(mapping.name)?.is_some() {
        return Err(Error::AlreadyActive {
            name: mapping.name.into(),
        });
    }
    if mapping.integrity.is_none() {
        return Ok(crypt::map_disk(&control, mapping, &cipher)?.keep());
    }
    let lower = integrity::map(&control, mapping, first_use)?;
    let upper = crypt::map_over(&control, mapping, &cipher, &lower)?;
    lower.device.keep();
    Ok(upper.keep())
}

/// Removes the mapping and, if it has one, the integrity device below, waiting a moment for others (udev) that look at it.
/// What was written before is on the disk afterwards.
///
/// # Errors
/// [`Error::NotActive`] if there is none; [`Error::InUse`] while it is mounted or open; [`Error::NotOurs`] for a device of that
/// name that is no LUKS2 mapping.
pub fn close(name: &str) -> Result<(), Error> {
    let control = Control::open()?;
    let lower_name = integrity::lower_name(name);
    let (upper, lower) = (control.status(name)?, control.status(&lower_name)?);
    if upper.is_none() && lower.is_none() {
        return Err(Error::NotActive { name: name.into() });
    }
    if let Some(upper) = upper {
        crypt::require_ours(name, &upper.uuid)?;
        control.remove(name)?;
    }
    if let Some(lower) = lower {
        integrity::require_ours(&lower_name, &lower.uuid)?;
        control.remove(&lower_name)?;
    }
    Ok(())
}

/// Whether a device of that name is mapped and usable, whoever mapped it.
pub fn is_active(name: &str) -> Result<bool, Error> {
    Ok(Control::open()?
        .status(name)?
        .is_some_and(|status| status.active))
}

/// Why a disk was not mapped or unmapped.
#[derive(Debug)]
pub enum Error {
    /// `/dev/mapper/control` does not open
    Control(io::Error),
    /// A value of the [`Mapping`] that no table can be made of
    InvalidMapping {
        /// the mapping
        name: String,
        /// which value and what it should be
        reason: String,
    },
    /// The name is taken
    AlreadyActive {
        /// the mapping
        name: String,
    },
    /// Nothing of that name is mapped
    NotActive {
        /// the mapping
        name: String,
    },
    /// A device of that name, but not one that LUKS2 opened
    NotOurs {
        /// the mapping
        name: String,
        /// the device-mapper's UUID that it carries
        uuid: String,
    },
    /// Still mounted, opened or mapped over
    InUse {
        /// the mapping
        name: String,
    },
    /// Reading or writing the disk below failed
    Disk {
        /// the disk
        device: PathBuf,
        /// what was attempted
        doing: &'static str,
        /// the system's answer
        error: io::Error,
    },
    /// The disk has no usable dm-integrity superblock at its data offset
    Superblock {
        /// the disk
        device: PathBuf,
        /// what is wrong with it
        reason: String,
    },
    /// The kernel refused a step
    Kernel {
        /// the mapping
        name: String,
        /// which step
        doing: &'static str,
        /// the kernel's answer; details are in its log
        error: io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Control(error) => {
                write!(
                    f,
                    "cannot open /dev/mapper/control: {error}; is the kernel module dm_mod loaded, and are we root?"
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
                    "/dev/mapper/{name} is not a LUKS2 mapping (its device-mapper UUID is {uuid:?}); left alone"
                )
            }
            Error::InUse { name } => {
                write!(
                    f,
                    "/dev/mapper/{name} is still in use: unmount it, and stop what has it open"
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
                    "/dev/mapper/{name}: the kernel does not {doing}: {error}; its log (dmesg) has the reason"
                )
            }
        }
    }
}

impl std::error::Error for Error {}
