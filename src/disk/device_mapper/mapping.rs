//! The parameters of a mapping.

use std::path::Path;

use base::crypto::Secret;

/// Bytes of a sector in tables and in all sizes of device-mapper, independent of the sector size of
/// the device.
pub(super) const SECTOR: u64 = 512;
/// Length of the key and of the tag of `hmac(sha256)` in bytes (RFC 2104: as long as the hash).
pub(super) const HMAC_SHA256_LEN: usize = 32;

/// The parameters of a mapping: the first segment of a LUKS2 header, and the volume key.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// Name under `/dev/mapper`: letters, digits, `_`, `-` and `.`.
    pub name: &'a str,
    /// UUID of the LUKS2 header, with dashes.
    pub luks_uuid: &'a str,
    /// The disk; a block device.
    pub device: &'a Path,
    /// Start of the segment in bytes from the start of the disk (16 MiB with the defaults of
    /// cryptsetup).
    pub data_offset: u64,
    /// Sector size of encryption and integrity tags: 512, 1024, 2048 or 4096 bytes.
    pub sector_size: u32,
    /// Encryption of the segment in LUKS2 notation: `aes-xts-plain64`.
    pub cipher: &'a str,
    /// Integrity of the segment in LUKS2 notation: `hmac(sha256)`, or none.
    pub integrity: Option<&'a str>,
    /// The volume key: the key of the cipher followed by the key of the HMAC (64 + 32 bytes, or 64
    /// without integrity).
    pub key: &'a Secret,
    /// Number of the digest that verified the volume key; part of the name of the key in the
    /// keyring.
    pub digest: u32,
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
    /// Returns the UUID without its dashes, as in the device-mapper UUID of a mapping; `None` if it
    /// is not a UUID.
    pub(super) fn plain_uuid(&self) -> Option<String> {
        let dashes = [8, 13, 18, 23];
        let sound =
            self.luks_uuid.len() == 36
                && self.luks_uuid.bytes().enumerate().all(|(at, byte)| {
                    match dashes.contains(&at) {
                        true => byte == b'-',
                        false => byte.is_ascii_hexdigit(),
                    }
                });
        sound.then(|| self.luks_uuid.replace('-', ""))
    }
}
