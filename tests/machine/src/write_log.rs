//! The writes of a machine to a disk, and what the disk holds after a power cut. QEMU's driver blklogwrites records each write,
//! discard and flush in the format of Linux's dm-log-writes (Documentation/admin-guide/device-mapper/log-writes.rst, and
//! struct log_write_super and log_write_entry in drivers/md/dm-log-writes.c).

use std::env;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use support::random::Random;

use crate::{Context, Failure, Result};

/// Bytes of a sector of the log, as QEMU writes it by default. A sector of the disk is written as a whole or not at all.
pub const SECTOR: u64 = 512;
const MAGIC: u64 = 0x6a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;

/// One entry: what the machine asked of its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// Everything that was written before is durable.
    Flush,
    /// `len` bytes at `at` of the disk; the data are at `data` of the log.
    Write { at: u64, len: u64, data: u64 },
    /// The content of these bytes is no longer needed.
    Discard { at: u64, len: u64 },
}

/// A log whose machine is off.
pub struct WriteLog {
    file: File,
    entries: Vec<Entry>,
}

/// Returns the seed of a test's random numbers and the number of its cuts: those of FIRSTLIGHT_SEED and FIRSTLIGHT_POWER_CUTS, or any
/// seed and `sample` cuts.
pub fn chosen(name: &str, sample: usize) -> (u64, usize) {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse().ok());
    let any = || RandomState::new().hash_one(name) % 1_000_000;
    let cuts = number("FIRSTLIGHT_POWER_CUTS").map_or(sample, |cuts| cuts as usize);
    (number("FIRSTLIGHT_SEED").unwrap_or_else(any), cuts)
}

/// Returns the number of entries that the log has now. The machine may be running.
pub fn len(log: &Path) -> Result<usize> {
    let file = File::open(log).context("open the log of writes")?;
    Ok(count(&file).context("read the log of writes")? as usize)
}

fn count(file: &File) -> io::Result<u64> {
    let [magic, _version, entries] = numbers(file, 0)?;
    match magic {
        MAGIC => Ok(entries),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it has no superblock",
        )),
    }
}

fn numbers<const N: usize>(file: &File, at: u64) -> io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for (number, at) in numbers.iter_mut().zip((at..).step_by(8)) {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}

impl WriteLog {
    /// Reads the entries of a log.
    pub fn read(log: &Path) -> Result<WriteLog> {
        let file = File::open(log).context("open the log of writes")?;
        let entries = entries(&file).context("read the log of writes")?;
        Ok(WriteLog { file, entries })
    }

    /// The number of entries.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns where each entry writes: the first byte and the end. A flush has none.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<u64>> {
        self.entries.iter().map(|entry| match *entry {
            Entry::Flush => 0..0,
            Entry::Write { at, len, .. } | Entry::Discard { at, len } => at..at + len,
        })
    }

    /// Makes of `disk`, which holds what it held before the log, what it may hold if the power fails after `cut` entries: all
    /// that was flushed, and of what came later each write, a part of its sectors, or nothing of it. Returns how many of the
    /// later writes were lost.
    pub fn cut(&self, disk: &Path, cut: usize, random: &mut Random) -> Result<usize> {
        let disk = File::options()
            .write(true)
            .open(disk)
            .context("open the disk")?;
        let before = &self.entries[..cut];
        let flushed = before
            .iter()
            .rposition(|it| *it == Entry::Flush)
            .unwrap_or(0);
        // in one case of three nothing is lost: the writes reach the disk in their order
        let keeps_all = random.below(3) == 0;
        let mut lost = 0;
        for (number, entry) in before.iter().enumerate() {
            let kept = |len: u64, random: &mut Random| match random.below(4) {
                _ if number < flushed || keeps_all => len,
                0 | 1 => len,
                2 => random.below((len / SECTOR) as usize) as u64 * SECTOR,
                _ => 0,
            };
            let applied = match *entry {
                Entry::Flush => Ok(()),
                Entry::Write { at, len, data } => {
                    let kept = kept(len, random);
                    lost += usize::from(kept < len);
                    self.copy(&disk, at, data, kept)
                }
                Entry::Discard { at, len } => {
                    let zeros = vec![0; kept(len, random) as usize];
                    disk.write_all_at(&zeros, at)
                }
            };
            applied.context("write the disk")?;
        }
        Ok(lost)
    }

    fn copy(&self, disk: &File, at: u64, data: u64, len: u64) -> io::Result<()> {
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, data)?;
        disk.write_all_at(&bytes, at)
    }
}

fn entries(file: &File) -> io::Result<Vec<Entry>> {
    let mut at = SECTOR;
    let mut entries = vec![];
    for _ in 0..count(file)? {
        let [sector, sectors, flags, _] = numbers(file, at)?;
        at += SECTOR;
        let (start, len) = (sector * SECTOR, sectors * SECTOR);
        if flags & FLUSH != 0 {
            entries.push(Entry::Flush);
        }
        if flags & DISCARD != 0 {
            entries.push(Entry::Discard { at: start, len });
        } else if len > 0 {
            entries.push(Entry::Write {
                at: start,
                len,
                data: at,
            });
            at += len;
        }
        if flags & FUA != 0 {
            entries.push(Entry::Flush);
        }
    }
    Ok(entries)
}

/// Copies a disk, or the folder of a TPM.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        let copied = std::process::Command::new("cp")
            .arg("--sparse=always")
            .args([from, to])
            .status();
        return if copied.context("run cp")?.success() {
            Ok(())
        } else {
            Err(Failure(format!("{} cannot be copied", from.display())))
        };
    }
    let _ = fs::remove_dir_all(to);
    fs::create_dir(to).context("make a folder")?;
    for entry in fs::read_dir(from).context("read a folder")? {
        let entry = entry.context("read a folder")?;
        // not the sockets and locks of a program that runs no longer
        if entry.file_type().is_ok_and(|it| it.is_file()) {
            fs::copy(entry.path(), to.join(entry.file_name())).context("copy a file")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(sector: u64, sectors: u64, flags: u64, data: Option<u8>) -> Vec<u8> {
        let mut bytes: Vec<u8> = [sector, sectors, flags, 0]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        bytes.resize(SECTOR as usize, 0);
        bytes.extend(
            data.into_iter()
                .flat_map(|byte| vec![byte; (sectors * SECTOR) as usize]),
        );
        bytes
    }

    #[test]
    fn what_was_flushed_stays_and_each_later_write_may_be_lost_or_torn() {
        let folder = tempfile::tempdir().unwrap();
        let [log, disk] = ["log", "disk"].map(|name| folder.path().join(name));
        let mut bytes: Vec<u8> = [MAGIC, 1, 5]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        bytes.resize(SECTOR as usize, 0);
        for part in [
            entry(0, 1, 0, Some(1)),
            entry(0, 0, FLUSH, None),
            entry(1, 2, 0, Some(2)),
            entry(3, 1, 0, Some(3)),
            entry(0, 1, DISCARD, None),
        ] {
            bytes.extend(part);
        }
        fs::write(&log, bytes).unwrap();
        assert_eq!(len(&log).unwrap(), 5);
        let log = WriteLog::read(&log).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        let mut random = Random::new(1);
        for _ in 0..1000 {
            fs::write(&disk, vec![9; 4 * SECTOR as usize]).unwrap();
            log.cut(&disk, 4, &mut random).unwrap();
            let sectors: Vec<u8> = fs::read(&disk)
                .unwrap()
                .into_iter()
                .step_by(SECTOR as usize)
                .collect();
            assert_eq!(sectors[0], 1, "it was flushed");
            seen.insert(sectors);
        }
        let expected = [
            [1, 2, 2, 3],
            [1, 2, 2, 9],
            [1, 2, 9, 3],
            [1, 2, 9, 9],
            [1, 9, 9, 3],
            [1, 9, 9, 9],
        ];
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected);
        fs::write(&disk, vec![9; 4 * SECTOR as usize]).unwrap();
        log.cut(&disk, 0, &mut random).unwrap();
        assert_eq!(fs::read(&disk).unwrap(), vec![9; 4 * SECTOR as usize]);
    }
}
