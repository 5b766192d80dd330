//! Determines, without the key, whether anything except the wipe of a format was ever written to a
//! dm-integrity device.
//!
//! Constellation formats a disk, wipes all of it with zeros, and only then makes it a state disk or
//! gives it to a tenant. The wipe bypasses the journal of dm-integrity (mode D, "no journal"); all
//! later writes use the journal (mode J). Therefore:
//!
//! - If the journal is as the kernel made it, nothing was written since, except by a wipe.
//! - If the end of the disk contains zeros, the wipe did not reach it, and nobody made a file
//!   system: mke2fs, mkfs.xfs and mkfs.btrfs all clear the end of their device.
//!
//! Both conditions are necessary: the kernel resets a journal whose last write was incomplete, and
//! the end of a disk in use may stay empty.

use std::io::{self, Read, Seek, SeekFrom};

use super::integrity::{SECTION_SECTORS, SUPERBLOCK_LEN, Superblock, Unfit};
use super::mapping::SECTOR;

/// A journal section begins with 8 sectors of entries. An entry has a sector number, the last 8
/// bytes of each of the block's 8 sectors, and a tag of 32 bytes; 4 entries fit into a sector.
const ENTRY_SECTORS: u64 = 8;
const ENTRY_LEN: usize = 8 + 8 * 8 + 32;
const ENTRIES_PER_SECTOR: usize = 4;
/// The first commit ID. Each sector of the journal ends with 8 bytes: the commit ID of the round in
/// which it was written, combined with the numbers of section and sector.
const FIRST_COMMIT_ID: u64 = 0x1111_1111_1111_1111;
/// Bytes at the end of the disk that must be zeros. mke2fs clears the last 64 KiB, the other
/// programs more.
const TAIL: u64 = 1 << 20;

/// Returns why data may be on the dm-integrity device whose superblock is at byte `data_offset`, as
/// a clause; `None` if it holds no data. This assumes that the device was always used with its
/// journal, as in Constellation: the result is not valid for a disk that was opened with
/// `--integrity-no-journal`.
pub fn may_hold_data(
    disk: &mut (impl Read + Seek),
    data_offset: u64,
) -> io::Result<Option<String>> {
    let size = disk.seek(SeekFrom::End(0))?;
    let mut superblock = [0; SUPERBLOCK_LEN];
    let len = size.saturating_sub(data_offset).min(SUPERBLOCK_LEN as u64);
    read_at(disk, data_offset, &mut superblock[..len as usize])?;
    let sections = match Superblock::parse(&superblock, size, data_offset) {
        // nobody can judge what is behind the present end of a disk that was larger
        Ok(it) if !(1..=it.usable_sectors).contains(&it.recorded_sectors) => {
            return Ok(Some("its superblock is of a larger disk".into()));
        }
        Ok(it) => it.journal_sections,
        Err(Unfit(reason)) => {
            return Ok(Some(format!(
                "its dm-integrity superblock is not one that a format writes: {reason}"
            )));
        }
    };
    let journal = data_offset + SUPERBLOCK_LEN as u64;
    let mut section = vec![0; (SECTION_SECTORS * SECTOR) as usize];
    for number in 0..sections {
        let offset = journal + number * SECTION_SECTORS * SECTOR;
        read_at(disk, offset, &mut section)?;
        let fresh = (0..)
            .zip(section.chunks_exact(SECTOR as usize))
            .all(|(at, bytes)| bytes == fresh_sector(number, at));
        if !fresh {
            return Ok(Some("its dm-integrity journal was written to".into()));
        }
    }
    let mut tail = vec![0; TAIL as usize];
    read_at(disk, size.saturating_sub(TAIL), &mut tail)?;
    let is_written = tail.iter().any(|byte| *byte != 0);
    Ok(is_written.then(|| "the end of the disk was written to".into()))
}

/// Returns a sector of a new journal: entries without a sector number (its upper half is all ones),
/// and the commit ID.
fn fresh_sector(section: u64, sector: u64) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    if sector < ENTRY_SECTORS {
        for entry in 0..ENTRIES_PER_SECTOR {
            bytes[entry * ENTRY_LEN + 4..entry * ENTRY_LEN + 8].fill(0xff);
        }
    }
    let commit_id = FIRST_COMMIT_ID ^ (section << 32) ^ sector;
    bytes[SECTOR as usize - 8..].copy_from_slice(&commit_id.to_le_bytes());
    bytes
}

fn read_at(disk: &mut (impl Read + Seek), offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    disk.seek(SeekFrom::Start(offset))?;
    disk.read_exact(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use support::cut_off::{self, SUPERBLOCK};

    const JOURNAL: usize = SUPERBLOCK + SUPERBLOCK_LEN;
    /// The disk's journal has three sections.
    const JOURNAL_LEN: usize = 3 * (SECTION_SECTORS * SECTOR) as usize;

    fn judge(disk: &[u8]) -> Option<String> {
        may_hold_data(&mut Cursor::new(disk), SUPERBLOCK as u64).unwrap()
    }

    /// Returns the result for a disk with `bytes` written at `at`, and restores the disk.
    fn judge_with(disk: &mut [u8], at: usize, bytes: &[u8]) -> Option<String> {
        let before = disk[at..at + bytes.len()].to_vec();
        disk[at..at + bytes.len()].copy_from_slice(bytes);
        let judged = judge(disk);
        disk[at..at + bytes.len()].copy_from_slice(&before);
        judged
    }

    #[test]
    fn a_wipe_that_bypassed_the_journal_and_did_not_reach_the_end_is_no_data() {
        let mut disk = cut_off::disk();
        assert_eq!(judge(&disk), None);
        // the wipe wrote everything except the end of the disk
        assert_eq!(
            judge_with(&mut disk, JOURNAL + JOURNAL_LEN, &[0x5a; 20 << 20]),
            None
        );
    }

    #[test]
    fn one_changed_byte_in_the_journal_or_at_the_end_may_be_data() {
        let mut disk = cut_off::disk();
        let size = disk.len();
        for at in [
            0,
            3,
            8,
            104,
            416,
            503,
            504,
            511,
            4096,
            135_168,
            JOURNAL_LEN - 1,
        ] {
            let changed = [!disk[JOURNAL + at]];
            let why = judge_with(&mut disk, JOURNAL + at, &changed).unwrap();
            assert!(why.contains("journal was written to"), "{at}: {why}");
        }
        for at in [size - TAIL as usize, size - 1] {
            let why = judge_with(&mut disk, at, &[1]).unwrap();
            assert!(
                why.contains("the end of the disk was written to"),
                "{at}: {why}"
            );
        }
    }

    #[test]
    fn a_superblock_that_no_format_makes_may_be_over_data() {
        let mut disk = cut_off::disk();
        let cases: [(usize, &[u8], &str); 6] = [
            (0, b"x", "not one that a format writes"),
            (12, &0_u32.to_le_bytes(), "journal has 0 sections"),
            (12, &497_u32.to_le_bytes(), "journal has 497 sections"),
            (
                12,
                &u32::MAX.to_le_bytes(),
                "journal has 4294967295 sections",
            ),
            (24, &[0x0c], "its byte 24 is 0x0c"),
            (28, &[0], "not one that a format writes"),
        ];
        for (at, bytes, expected) in cases {
            let why = judge_with(&mut disk, SUPERBLOCK + at, bytes).unwrap();
            assert!(why.contains(expected), "{why}");
        }
        // within the limit, but larger than this disk
        let why = judge_with(&mut disk, SUPERBLOCK + 12, &496_u32.to_le_bytes()).unwrap();
        assert!(why.contains("journal has 496 sections"), "{why}");
    }

    #[test]
    fn no_mutated_superblock_and_no_short_disk_panics_or_passes() {
        let disk = cut_off::disk();
        let mut random = support::random::Random::new(1);
        let mut start = disk[..JOURNAL].to_vec();
        for _ in 0..3000 {
            let superblock = &mut start[SUPERBLOCK..SUPERBLOCK + 64];
            superblock.copy_from_slice(&disk[SUPERBLOCK..SUPERBLOCK + 64]);
            for _ in 0..=random.below(4) {
                superblock[random.below(64)] = random.next() as u8;
            }
            // the journal is missing
            assert!(judge(&start).is_some());
        }
        for size in [
            0,
            1,
            SUPERBLOCK - 1,
            SUPERBLOCK,
            SUPERBLOCK + 63,
            JOURNAL,
            JOURNAL + JOURNAL_LEN,
            18 << 20,
        ] {
            assert!(judge(&disk[..size]).is_some(), "{size}");
        }
    }
}
