//! Position and length in bytes of each part of a disk that we format.

use std::ops::Range;

/// Start in bytes of the data segment of a disk that we format: behind the 16 MiB header of
/// Constellation.
pub const DATA_OFFSET: u64 = 16 << 20;
/// Length in bytes of the volume key of a disk with integrity: 64 for AES-256-XTS, 32 for
/// HMAC-SHA-256.
pub const VOLUME_KEY_LEN: usize = 96;
/// Length in bytes of the volume key of a disk without integrity.
pub const VOLUME_KEY_LEN_PLAIN: usize = 64;
/// Minimum size in bytes of a device that is formatted: the header area, and 1 MiB for integrity
/// tags and data.
pub const MIN_DEVICE_SIZE: u64 = DATA_OFFSET + (1 << 20);

/// Length in bytes of the binary header; the JSON area follows.
pub(super) const BINARY_LEN: usize = 4096;
/// Size in bytes of one copy on a disk that Constellation or Firstlight formats.
pub(super) const HDR_SIZE: u64 = 16 << 10;
/// Alignment in bytes of the start and end of keyslot areas, as in libcryptsetup.
pub(super) const AREA_ALIGN: u64 = 4096;
/// Stripes of the anti-forensic splitter; fixed by the specification.
pub(super) const STRIPES: usize = 4000;
/// Offset in bytes of the first keyslot area of a disk that we format.
pub(super) const FIRST_AREA: u64 = 2 * HDR_SIZE;
/// Size of that area in bytes: 96 × 4000, rounded up to 4096.
pub(super) const AREA_SIZE: u64 = ((VOLUME_KEY_LEN * STRIPES) as u64).next_multiple_of(AREA_ALIGN);
/// Offset in bytes of the sector that marks an unfinished format: the first sector of the last 4096
/// bytes of the header area. The 32 possible keyslot areas end before it.
pub(super) const MARKER_OFFSET: u64 = DATA_OFFSET - 4096;
/// The marker: one sector, which is written completely or not at all.
pub(super) const MARKER: [u8; 512] = marker();
/// The byte ranges that a format of a blank disk writes: both headers with the first keyslot area,
/// and the marker.
pub(super) const UNFINISHED_AREAS: [Range<u64>; 2] = [
    0..FIRST_AREA + AREA_SIZE,
    MARKER_OFFSET..MARKER_OFFSET + MARKER.len() as u64,
];

const fn marker() -> [u8; 512] {
    let text =
        b"Firstlight: a LUKS2 format of this blank disk is under way or was cut short. Nothing of value is here.\n";
    let mut sector = [0; 512];
    let mut i = 0;
    while i < text.len() {
        sector[i] = text[i];
        i += 1;
    }
    sector
}
