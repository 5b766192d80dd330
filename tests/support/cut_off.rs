//! A state disk whose format the old system left cut off in its wipe, as real programs make it.

use std::io::Read;

/// Where the dm-integrity superblock is, and behind it the journal.
pub const SUPERBLOCK: usize = 16 << 20;
const HEADERS: usize = 32 << 10;

/// A disk of 64 MiB. The headers, and superblock and journal, are from cryptsetup 2.6.1 on Linux 6.1: `luksFormat` with the old
/// system's parameters and `--integrity-no-wipe`, `open --integrity-no-journal`, zeros over its first 20 MiB. The keyslot's area
/// and the wiped part, which are random bytes, are left out.
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
