//! Maps an encrypted disk as a block device: dm-crypt, on top of dm-integrity if sectors are authenticated. The mapping is set up
//! with the kernel's ioctls (linux/dm-ioctl.h, the kernel's Documentation/admin-guide/device-mapper/{dm-crypt,dm-integrity}.rst).
//!
//! Tables, names and UUIDs are those that cryptsetup 2.6 gives a LUKS2 device (2.7 and 2.8 accept them). So `status` and `close`
//! of cryptsetup work on our mappings, and each program reads what the other wrote:
//!
//! ```text
//!   /dev/mapper/NAME       crypt      encrypts a sector and computes its 32-byte tag (authenc: AES-XTS, HMAC-SHA256)
//!          |
//!   /dev/mapper/NAME_dif   integrity  stores sector and tag together, through its journal
//!          |
//!   the disk               header up to the data offset | dm-integrity superblock | journal | tags and data, interleaved
//! ```
//!
//! Without integrity, the crypt device lies directly on the disk, from the data offset on.
//!
//! With integrity **a sector that was never written cannot be read**: its tag does not match, the read fails with `EIO`, and the
//! kernel logs `INTEGRITY AEAD ERROR`. The user of a mapping opened with [`FirstUse::Create`] must write a sector before it reads
//! the sector.
//!
//! The key is passed to the kernel as a `logon` key in the keyring of the calling thread. User space cannot read such a key back,
//! and it is revoked as soon as dm-crypt has its copy.
//!
//! Files: `control` has the ioctls, `integrity` the lower device and its superblock, `crypt` the upper device and its key,
//! `journal` determines whether the lower device was ever used.

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

/// Bytes of a sector in tables and in all sizes of device-mapper, independent of the sector size of the device.
const SECTOR: u64 = 512;

/// The parameters of a mapping: the first segment of a LUKS2 header, and the volume key.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// Name under `/dev/mapper`: letters, digits, `_`, `-` and `.`.
    pub name: &'a str,
    /// UUID of the LUKS2 header, with dashes.
    pub luks_uuid: &'a str,
    /// The disk; a block device.
    pub device: &'a Path,
    /// Start of the segment in bytes from the start of the disk (16 MiB with the defaults of cryptsetup).
    pub data_offset: u64,
    /// Sector size of encryption and integrity tags: 512, 1024, 2048 or 4096 bytes.
    pub sector_size: u32,
    /// Encryption of the segment in LUKS2 notation: `aes-xts-plain64`.
    pub cipher: &'a str,
    /// Integrity of the segment in LUKS2 notation: `hmac(sha256)`, or none.
    pub integrity: Option<&'a str>,
    /// The volume key: the key of the cipher followed by the key of the HMAC (64 + 32 bytes, or 64 without integrity).
    pub key: &'a Secret,
    /// Number of the digest that verified the volume key; part of the name of the key in the keyring.
    pub digest: u32,
}

/// Whether the segment was used before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstUse {
    /// The disk was just formatted: an old dm-integrity superblock is erased, and a new one with an empty journal is made. (Old
    /// sectors stay on the disk, but they cannot be read, because each format makes a new key.) No effect without integrity.
    Create,
    /// The disk was used before: a matching superblock must exist.
    Existing,
}

/// Maps the disk and returns the path of the block device, `/dev/mapper/NAME`, which exists on return. After a failure nothing
/// is mapped.
///
/// Does not read the data: a wrong key fails at the first read. Requires Linux 5.12 or later with the modules `dm_mod`,
/// `dm_crypt` and, with integrity, `dm_integrity` and `authenc`.
///
/// # Errors
/// [`Error::AlreadyActive`] if the name is in use, or if a killed process left the integrity device ([`close`] removes it); the
/// existing mapping and the disk are not changed.
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

/// Removes the mapping and its integrity device. Waits up to 5 s while another program (udev) has it open. All written data is
/// durable on return.
///
/// # Errors
/// [`Error::NotActive`] if the mapping does not exist; [`Error::InUse`] while it is mounted or open; [`Error::NotOurs`] if a
/// device of that name is not a LUKS2 mapping.
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

/// Returns whether a device of that name is mapped and usable, even if another program mapped it.
pub fn is_active(name: &str) -> Result<bool, Error> {
    Ok(Control::open()?
        .status(name)?
        .is_some_and(|status| status.active))
}

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
