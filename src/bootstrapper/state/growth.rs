//! Grows the file system of the state disk after the cloud has enlarged the disk. `unlock` maps the
//! whole disk at each boot; the file system grows while it is mounted, as by `systemd-growfs`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use base::boot::timeline::Timeline;
use disk::state_disk::MAPPING;
use sys::block::{self, PageBuffer};
use sys::ext4;

/// Block size of the file system in bytes, and sector size of the encryption.
const BLOCK: u64 = 4096;
/// Bytes per write.
const CHUNK: u64 = 1 << 20;
/// Copies of descriptors in a group of a file system with `meta_bg`.
const META_BLOCKS: u64 = 2;

/// Grows the file system that is mounted at `root` to the size of the state disk's mapping. After a
/// failure it keeps its size, and the node works.
pub fn grow(root: &Path, timeline: &Timeline) {
    let mapped = Path::new("/dev/mapper").join(MAPPING);
    // the disk is not mapped by unlock, but by another program under another name
    if !mapped.exists() {
        return;
    }
    match grow_on(&mapped, root, timeline) {
        Ok(Some(blocks)) => timeline.event("grown", size_of(blocks)),
        Ok(None) => {}
        Err(error) => log::warn!(
            "cannot grow the file system at {} to the size of {}: {error}; the kernel log (dmesg) gives the reason",
            root.display(),
            mapped.display()
        ),
    }
}

/// Returns the number of blocks afterwards; `None` if the file system uses the whole device.
fn grow_on(mapped: &Path, root: &Path, timeline: &Timeline) -> io::Result<Option<u64>> {
    let device = block::open_direct(mapped)?;
    let size = block::size(&device)? / BLOCK;
    let mut buffer = PageBuffer::new(BLOCK as usize);
    device.read_exact_at(buffer.bytes_mut(), 0)?;
    let Some(superblock) = Superblock::read(buffer.bytes()) else {
        let why = "it is no ext4 file system with blocks of 4096 bytes";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    };
    if superblock.blocks >= size {
        return Ok(None);
    }
    let (before, now) = (size_of(superblock.blocks), size_of(size));
    timeline.event(
        "growing",
        format_args!("the file system, from {before} to {now}"),
    );
    // Linux reads the last block, and the bitmaps of each new group to compute their checksums. A
    // block that was never written cannot be read
    let zeros = PageBuffer::new(CHUNK as usize);
    for blocks in superblock.read_by_linux(size) {
        let (mut at, end) = (blocks.start * BLOCK, blocks.end.min(size) * BLOCK);
        while at < end {
            let len = CHUNK.min(end - at);
            device.write_all_at(zeros.bytes().get(..len as usize).unwrap_or_default(), at)?;
            at += len;
        }
    }
    device.sync_all()?;
    ext4::resize(&File::open(root)?, size)?;
    Ok(Some(size))
}

fn size_of(blocks: u64) -> String {
    format!("{} MiB", (blocks * BLOCK) >> 20)
}

/// What the superblock says of the size of the file system and of its parts (the kernel's
/// Documentation/filesystems/ext4, "Super Block").
#[derive(Clone, Copy, Debug, PartialEq)]
struct Superblock {
    blocks: u64,
    blocks_per_group: u64,
    /// The number of groups that have their bitmaps side by side (the feature `flex_bg`).
    groups_per_flex: u64,
    /// Blocks at the start of a group with a copy of the superblock: this copy, the group
    /// descriptors, and those that are reserved for growth.
    backup: u64,
}

impl Superblock {
    /// Returns `None` if this is not the first block of an ext4 file system with blocks of 4096
    /// bytes.
    fn read(first: &[u8]) -> Option<Superblock> {
        let bytes = first.get(1024..2048)?;
        let short = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let long = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let (magic, log_block_size) = (short(0x38)?, long(0x18)?);
        let blocks_per_group = u64::from(long(0x20)?);
        if (magic, log_block_size) != (0xef53, 2) || blocks_per_group == 0 {
            return None;
        }
        // the feature 64bit
        let (high, descriptor_size) = match long(0x60)? & 0x80 {
            0 => (0, 32),
            _ => (long(0x150)?, u64::from(short(0xfe)?)),
        };
        let blocks = (u64::from(high) << 32) | u64::from(long(0x4)?);
        let descriptors = blocks.div_ceil(blocks_per_group) * descriptor_size;
        Some(Superblock {
            blocks,
            blocks_per_group,
            groups_per_flex: 1 << bytes.get(0x174)?.min(&16),
            backup: 1 + descriptors.div_ceil(BLOCK) + u64::from(short(0xce)?),
        })
    }

    /// Returns the blocks that Linux may read before it writes them, when the file system grows to
    /// this size: the places where the bitmaps of a new group may lie, and the last block.
    fn read_by_linux(self, size: u64) -> impl Iterator<Item = Range<u64>> {
        let groups =
            self.blocks.div_ceil(self.blocks_per_group)..size.div_ceil(self.blocks_per_group);
        let places = groups.map(move |group| {
            let backup = if has_backup(group) { self.backup } else { 0 };
            let start = group * self.blocks_per_group;
            let len = META_BLOCKS + backup + 2 * self.groups_per_flex;
            start..start + len.min(self.blocks_per_group)
        });
        places.chain(std::iter::once(size - 1..size))
    }
}

/// Returns whether a group has a copy of the superblock (feature `sparse_super`).
fn has_backup(group: u64) -> bool {
    let is_power_of = |base: u64| {
        let powers = std::iter::successors(Some(1), |it: &u64| it.checked_mul(base));
        powers.take_while(|it| *it <= group).last() == Some(group)
    };
    group == 0 || [3, 5, 7].into_iter().any(is_power_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What mke2fs 1.47 writes for 1 GiB.
    fn first_block() -> Vec<u8> {
        let mut first = vec![0; BLOCK as usize];
        let fields: [(usize, &[u8]); 8] = [
            (0x4, &262_144_u32.to_le_bytes()),
            (0x18, &2_u32.to_le_bytes()),
            (0x20, &32_768_u32.to_le_bytes()),
            (0x38, &0xef53_u16.to_le_bytes()),
            (0x60, &0x2c2_u32.to_le_bytes()),
            (0xce, &127_u16.to_le_bytes()),
            (0xfe, &64_u16.to_le_bytes()),
            (0x174, &[4]),
        ];
        for (at, bytes) in fields {
            first[1024 + at..1024 + at + bytes.len()].copy_from_slice(bytes);
        }
        first
    }

    #[test]
    fn the_superblock_gives_the_size_and_the_places_of_bitmaps() {
        let mut first = first_block();
        let expected = Superblock {
            blocks: 262_144,
            blocks_per_group: 32_768,
            groups_per_flex: 16,
            backup: 129,
        };
        assert_eq!(Superblock::read(&first), Some(expected));
        // 8 groups, and 2 1/2 new ones
        let places: Vec<_> = expected.read_by_linux(344_064).collect();
        assert_eq!(
            places,
            [
                262_144..262_178,
                294_912..295_075,
                327_680..327_714,
                344_063..344_064
            ]
        );

        first[1024 + 0x150] = 1;
        let wide = Superblock::read(&first).unwrap();
        assert_eq!(wide.blocks, (1 << 32) + 262_144);
        first[1024 + 0x60] = 0x42;
        assert_eq!(Superblock::read(&first).unwrap().blocks, 262_144);
        for (at, value) in [(0x38, 0), (0x18, 0), (0x21, 0)] {
            let mut other = first_block();
            other[1024 + at] = value;
            assert_eq!(Superblock::read(&other), None, "{at:#x}");
        }
        assert_eq!(Superblock::read(&first[..2047]), None);
    }

    #[test]
    fn a_mutated_superblock_is_refused_or_gives_places() {
        for first in support::mutation::mutations(&first_block(), 10_000) {
            if let Some(superblock) = Superblock::read(&first) {
                let size = superblock.blocks.saturating_add(1 << 20);
                let mut places = superblock.read_by_linux(size).take(100);
                assert!(places.all(|it| it.start < it.end), "{superblock:?}");
            }
        }
    }

    #[test]
    fn groups_with_a_copy_of_the_superblock_are_powers() {
        let groups: Vec<_> = (0..100).filter(|group| has_backup(*group)).collect();
        assert_eq!(groups, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81]);
    }
}
