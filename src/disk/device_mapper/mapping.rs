//! The parameters of a mapping.

use std::path::Path;

use crate::luks::Geometry;
use base::crypto::Secret;

/// Bytes of a sector in tables and in all sizes of device-mapper, independent of the sector size of
/// the device.
pub(super) const SECTOR: u64 = 512;
/// Length of the key and of the tag of `hmac(sha256)` in bytes (RFC 2104: as long as the hash).
pub(super) const HMAC_SHA256_LEN: usize = 32;

/// The parameters of a mapping.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// Name under `/dev/mapper`: a constant of the program, not checked: letters, digits, `_`, `-` and
    /// `.`.
    pub name: &'a str,
    /// The data segment of the disk's LUKS2 header.
    pub geometry: &'a Geometry,
    /// The disk; a block device.
    pub device: &'a Path,
    /// The volume key: the key of the cipher followed by the key of the HMAC (64 + 32 bytes, or 64
    /// without integrity).
    pub key: &'a Secret,
}

/// Whether the segment was used before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstUse {
    /// The disk was just formatted: an old dm-integrity superblock is erased, and a new one with an
    /// empty journal is made. (Old sectors stay on the disk, but nobody can read them, because each
    /// format makes a new key.) No effect without integrity.
    Create,
    /// The disk was used before: a matching superblock must exist.
    Existing,
}

impl Mapping<'_> {
    /// Returns the UUID of the LUKS2 header without dashes.
    pub(super) fn plain_uuid(&self) -> String {
        self.geometry.uuid.replace('-', "")
    }
}
