//! A state disk, written by real programs, of which Constellation's format was interrupted during the wipe.

use std::io::Read;

/// Offset in bytes of the dm-integrity superblock. The journal follows it.
pub const SUPERBLOCK: usize = 16 << 20;
const HEADERS: usize = 32 << 10;

/// Returns a disk of 64 MiB. The headers, the superblock and the journal are from cryptsetup 2.6.1 on Linux 6.1: `luksFormat` with
/// Constellation's parameters and `--integrity-no-wipe`, `open --integrity-no-journal`, zeros over its first 20 MiB. The keyslot's
/// area and the wiped part, which are random bytes, are omitted.
pub fn disk() -> Vec<u8> {
    let packed = include_bytes!("../data/cut-off-format.gz");
    let mut parts = Vec::new();
    flate2::read::GzDecoder::new(&packed[..])
        .read_to_end(&mut parts)
        .unwrap();
    let (headers, integrity) = parts.split_at(HEADERS);
    let mut disk = vec![0; 64 << 20];
    disk[..HEADERS].copy_from_slice(headers);
    disk[SUPERBLOCK..SUPERBLOCK + integrity.len()].copy_from_slice(integrity);
    disk
}
