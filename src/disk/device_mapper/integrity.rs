//! The lower device: a table of type `integrity`, and the dm-integrity superblock at the data
//! offset (struct superblock in the kernel's drivers/md/dm-integrity.c; all numbers are
//! little-endian).

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use super::control::{Audience, Control, Device, kernel, refused, table_name};
use super::error::Error;
use super::mapping::{FirstUse, HMAC_SHA256_LEN, Mapping, SECTOR};
use crate::luks::{DATA_OFFSET, SECTOR_SIZE};
use sys::block::{self, PageBuffer};

/// Length of the superblock in bytes (SB_SECTORS).
pub const SUPERBLOCK_LEN: usize = 4096;
/// The superblock that a format of ours or of Constellation makes (`fix_padding`, no key for the
/// journal), up to the last byte that is not zero: version 4, 2^15 sectors in a run of data, tags of
/// 32 bytes, only the flag SB_FLAG_FIXED_PADDING, 2^3 sectors in a block, 2^12 blocks for each bit of
/// a bitmap. The zeros at [`SIZES`] stand for the numbers there.
pub const FORMATTED: [u8; 30] =
    *b"integrt\0\x04\x0f\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\x08\0\0\0\x03\x0c";
/// The place of the sections of the journal (u32), and of the sectors that the device provided when it
/// was last used (u64).
const SIZES: Range<usize> = 12..24;
/// Size of the journal in sectors that the kernel makes: this part of the disk, at most 64 MiB
/// (DEFAULT_JOURNAL_SIZE_FACTOR, DEFAULT_MAX_JOURNAL_SECTORS).
const JOURNAL_PART: u64 = 128;
const JOURNAL_MAX: u64 = 131_072;
/// Sectors of the table that is loaded only to make the superblock: a size that fits every disk, as
/// in cryptsetup.
const SECTORS_BEFORE_SUPERBLOCK: u64 = 8;
/// Sectors of a block, which is a sector of the encryption.
const SECTORS_PER_BLOCK: u64 = SECTOR_SIZE as u64 / SECTOR;
/// Sectors of a section of the journal: 8 sectors of 4 entries each (JOURNAL_BLOCK_SECTORS), and
/// the blocks of these entries.
pub(super) const SECTION_SECTORS: u64 = 8 + 8 * 4 * SECTORS_PER_BLOCK;
/// Sectors of the data between two runs of tags (DEFAULT_INTERLEAVE_SECTORS), and of a run.
const DATA_RUN: u64 = 32_768;
const TAG_RUN: u64 = DATA_RUN / SECTORS_PER_BLOCK * HMAC_SHA256_LEN as u64 / SECTOR;

/// The integrity device and its size, and the device below it.
pub(super) struct Lower<'c> {
    /// Dropped, and so removed, before `disk`.
    pub device: Device<'c>,
    /// Usable size in sectors of 512 bytes.
    pub sectors: u64,
    pub disk: Device<'c>,
}

/// Returns the name of the integrity device below the mapping `name`, as in cryptsetup.
pub(super) fn lower_name(name: &str) -> String {
    format!("{name}_dif")
}

/// Returns the name of the device between the integrity device and the disk.
pub(super) fn disk_name(name: &str) -> String {
    format!("{name}_disk")
}

/// The prefix of the UUIDs of both lower devices. `close` of cryptsetup 2.6 and later removes such
/// devices below a mapping, too.
pub(super) const SUBDEVICE: &str = "CRYPT-SUBDEV-";

/// Maps the integrity device. On first use it also makes the superblock and an empty journal.
///
/// The kernel reads the superblock several times, since Linux 6.1.165 and 6.12.75 also when the device is
/// activated, and obeys flags with which it crashes or drops the journal. So it gets a copy in memory,
/// which the host cannot change after the check.
pub(super) fn map<'c>(
    control: &'c Control,
    mapping: &Mapping,
    first_use: FirstUse,
) -> Result<Lower<'c>, Error> {
    // creates the devices before anything is erased: the superblock of an active mapping must not
    // change
    let device = create(control, mapping, &lower_name(mapping.name))?;
    let disk = create(control, mapping, &disk_name(mapping.name))?;
    let mut lower = Lower {
        device,
        sectors: 0,
        disk,
    };
    if first_use == FirstUse::Create {
        erase_superblock(mapping)?;
    }
    let (mut superblock, disk_len) = read_superblock(mapping)?;
    let parse = |superblock: &PageBuffer| {
        Superblock::parse(superblock.bytes(), disk_len, DATA_OFFSET)
            .map_err(|why| unfit(mapping, why))
    };
    if first_use == FirstUse::Create {
        // the kernel gets zeros, also from a host that has not erased the superblock
        superblock = PageBuffer::new(SUPERBLOCK_LEN);
    } else {
        parse(&superblock)?;
    }
    let memory = block::memory_file(c"superblock").map_err(|error| in_memory(mapping, error))?;
    map_disk(&lower.disk, mapping, &memory, &superblock, disk_len)?;
    if first_use == FirstUse::Create {
        let doing = "make a dm-integrity superblock";
        lower.load(SECTORS_BEFORE_SUPERBLOCK, doing)?;
        lower.device.clear()?;
        memory
            .read_exact_at(superblock.bytes_mut(), 0)
            .map_err(|error| in_memory(mapping, error))?;
    }
    lower.sectors = parse(&superblock)?.usable_sectors;
    if first_use == FirstUse::Create {
        write_superblock(mapping, &superblock, 0).map_err(|error| {
            Error::of_disk(mapping.device, "write the dm-integrity superblock", error)
        })?;
    }
    lower.load(lower.sectors, "accept the dm-integrity table")?;
    lower.device.resume(Audience::Nobody)?;
    Ok(lower)
}

impl Lower<'_> {
    fn load(&self, sectors: u64, doing: &str) -> Result<(), Error> {
        let table = table(self.disk.number());
        self.device
            .load("integrity", sectors, table.as_bytes())
            .map_err(|error| kernel(self.device.name(), doing, refused("dm_integrity", error)))
    }
}

fn create<'c>(control: &'c Control, mapping: &Mapping, name: &str) -> Result<Device<'c>, Error> {
    control.create(name, &format!("{SUBDEVICE}{}-{name}", mapping.plain_uuid()))
}

/// Maps the disk, but with a file in memory in the place of the superblock. Writes `superblock` into that
/// file first.
fn map_disk(
    device: &Device,
    mapping: &Mapping,
    memory: &File,
    superblock: &PageBuffer,
    disk_len: u64,
) -> Result<(), Error> {
    let number = block::number(mapping.device)
        .map_err(|error| Error::of_disk(mapping.device, "find the block device", error))?;
    // open until the table holds it: the kernel detaches it at the last close
    let (_open, copy) = memory
        .write_all_at(superblock.bytes(), 0)
        .and_then(|()| block::attach(memory))
        .map_err(|error| in_memory(mapping, refused("loop", error)))?;
    let (start, len) = (DATA_OFFSET / SECTOR, SUPERBLOCK_LEN as u64 / SECTOR);
    let end = start + len;
    let disk = table_name(number);
    // the first row has the header, so that cryptsetup takes the disk for the device below. Before Linux 6.11
    // device-mapper sends a flush for each row: two to the disk
    let table = [
        (start, format!("{disk} 0")),
        (len, format!("{} 0", table_name(copy))),
        (
            (disk_len / SECTOR).saturating_sub(end),
            format!("{disk} {end}"),
        ),
    ];
    let table = table.each_ref().map(|(len, row)| (*len, row.as_bytes()));
    device
        .load_all("linear", &table)
        .map_err(|error| kernel(device.name(), "accept the table of the disk", error))?;
    device.resume(Audience::Nobody)
}

fn in_memory(mapping: &Mapping, error: io::Error) -> Error {
    let doing = "keep the dm-integrity superblock in memory";
    Error::of_disk(mapping.device, doing, error)
}

/// Returns the parameters of the table. In mode J sector and tag are written through the journal,
/// so they match after a power failure. `fix_padding` and `fix_hmac` apply when a superblock is
/// made; without `fix_padding`, tags take more space.
fn table(number: (u32, u32)) -> String {
    format!(
        "{} {} {HMAC_SHA256_LEN} J 3 block_size:{SECTOR_SIZE} fix_padding fix_hmac",
        table_name(number),
        DATA_OFFSET / SECTOR,
    )
}

/// Erases the superblock of a disk that no mapping uses: the kernel makes a new one only if it finds zeros.
fn erase_superblock(mapping: &Mapping) -> Result<(), Error> {
    // O_EXCL on a block device: fails with EBUSY while it is mounted or part of a mapping
    write_superblock(mapping, &PageBuffer::new(SUPERBLOCK_LEN), libc::O_EXCL).map_err(|error| {
        Error::of_disk(
            mapping.device,
            "erase the earlier dm-integrity superblock",
            error,
        )
    })
}

fn write_superblock(mapping: &Mapping, content: &PageBuffer, flags: i32) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT | flags)
        .open(mapping.device)?;
    file.write_all_at(content.bytes(), DATA_OFFSET)?;
    file.sync_all()
}

/// Returns the superblock and the size of the disk in bytes.
fn read_superblock(mapping: &Mapping) -> Result<(PageBuffer, u64), Error> {
    let mut buffer = PageBuffer::new(SUPERBLOCK_LEN);
    let mut read = || {
        // direct I/O: dm-integrity bypasses the page cache, which may hold older bytes
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(mapping.device)?;
        file.read_exact_at(buffer.bytes_mut(), DATA_OFFSET)?;
        block::size(&file)
    };
    let disk_len = read().map_err(|error| {
        Error::of_disk(mapping.device, "read the dm-integrity superblock", error)
    })?;
    Ok((buffer, disk_len))
}

fn unfit(mapping: &Mapping, Unfit(why): Unfit) -> Error {
    let device = mapping.device.display();
    Error::Failed(format!(
        "{device}: no usable dm-integrity superblock at the data offset: {why}"
    ))
}

/// The variable fields of the superblocks that a format writes. Superblocks are not authenticated (only
/// sectors are), and a flag that no format sets may make the kernel lose the journal, or crash. So each
/// other byte must have the value that a format writes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    pub journal_sections: u64,
    /// How many sectors the device provided when the superblock was made, or cryptsetup last opened it. The
    /// disk may have been enlarged since.
    pub recorded_sectors: u64,
    /// How many sectors the kernel provides on the disk as it is.
    pub usable_sectors: u64,
}

/// Why a superblock does not fit the disk and its LUKS2 header, as a clause.
#[derive(Debug)]
pub(super) struct Unfit(pub String);

impl Superblock {
    /// Parses the superblock at byte `offset` of a disk of `disk_len` bytes.
    pub fn parse(bytes: &[u8], disk_len: u64, offset: u64) -> Result<Superblock, Unfit> {
        let unfit = |why: String| Err(Unfit(why));
        match other_byte(bytes) {
            None => {}
            Some(_) if bytes.iter().all(|byte| *byte == 0) => {
                return unfit("it contains only zeros".into());
            }
            Some(at) => {
                let (got, expected) = (bytes[at], formatted(at));
                return unfit(format!(
                    "its byte {at} is {got:#04x}, expected {expected:#04x}: the host, a failing disk or another program has changed it"
                ));
            }
        }
        let number = |at: usize| {
            let bytes = bytes[at..at + 4].try_into().expect("4 bytes");
            u64::from(u32::from_le_bytes(bytes))
        };
        let journal_sections = number(SIZES.start);
        let most = (disk_len / SECTOR / JOURNAL_PART).min(JOURNAL_MAX) / SECTION_SECTORS;
        // a disk that has grown keeps the journal of its format
        if !(1..=most.max(1)).contains(&journal_sections) {
            return unfit(format!(
                "its journal has {journal_sections} sections, expected at most {most}"
            ));
        }
        let available = disk_len.saturating_sub(offset) / SECTOR;
        Ok(Superblock {
            journal_sections,
            recorded_sectors: number(20) << 32 | number(16),
            usable_sectors: usable_sectors(journal_sections, available)?,
        })
    }
}

/// The byte at this place in each superblock that a format makes.
fn formatted(at: usize) -> u8 {
    FORMATTED.get(at).copied().unwrap_or_default()
}

/// Returns the position of the first byte that no format writes.
pub fn other_byte(bytes: &[u8]) -> Option<usize> {
    let is_other = |at: &usize| !SIZES.contains(at) && bytes[*at] != formatted(*at);
    (0..bytes.len()).find(is_other)
}

/// Returns how many sectors the kernel provides if `available` sectors are from the superblock
/// to the end of the disk (get_provided_data_sectors): behind superblock and journal, each run
/// of data follows a run of tags.
fn usable_sectors(journal_sections: u64, available: u64) -> Result<u64, Unfit> {
    let before = SUPERBLOCK_LEN as u64 / SECTOR + SECTION_SECTORS * journal_sections;
    let room = available.saturating_sub(before);
    let last = (room % (TAG_RUN + DATA_RUN)).saturating_sub(TAG_RUN);
    let sectors =
        room / (TAG_RUN + DATA_RUN) * DATA_RUN + last / SECTORS_PER_BLOCK * SECTORS_PER_BLOCK;
    match sectors {
        0 => Err(Unfit(format!(
            "the disk has only {available} sectors there, but superblock and journal need {before}"
        ))),
        sectors => Ok(sectors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a 256 MiB disk that cryptsetup 2.6.1 formatted with `--integrity hmac-sha256
    /// --sector-size 4096` (kernel 6.1).
    const FROM_CRYPTSETUP: [u8; 32] = [
        0x69, 0x6e, 0x74, 0x65, 0x67, 0x72, 0x74, 0x00, 0x04, 0x0f, 0x20, 0x00, 0x0f, 0x00, 0x00,
        0x00, //
        0x80, 0x61, 0x07, 0x00, 0x00, 0x00, 0x00, 0x00, 0x08, 0x00, 0x00, 0x00, 0x03, 0x0c, 0x00,
        0x00,
    ];
    const DISK: u64 = 256 << 20;

    fn superblock() -> Vec<u8> {
        let mut bytes = FROM_CRYPTSETUP.to_vec();
        bytes.resize(SUPERBLOCK_LEN, 0);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Superblock, Unfit> {
        Superblock::parse(bytes, DISK, DATA_OFFSET)
    }

    #[test]
    fn a_superblock_made_by_cryptsetup_is_understood() {
        let parsed = parse(&superblock()).unwrap();
        assert_eq!(
            (parsed.journal_sections, parsed.recorded_sectors),
            (15, 483_712)
        );
        // as the kernel wrote it at byte 16
        let usable = |len| {
            Superblock::parse(&superblock(), len, DATA_OFFSET)
                .unwrap()
                .usable_sectors
        };
        assert_eq!(usable(DISK), 483_712);
        // a sector more or less than a block, and what a larger disk adds
        assert_eq!(usable(DISK + 7 * SECTOR), 483_712);
        assert_eq!(usable(DISK + 8 * SECTOR), 483_720);
        assert_eq!(usable(DISK + (TAG_RUN + DATA_RUN) * SECTOR), 516_480);
        // what Constellation's format left on a disk of 64 MiB
        let disk = support::cut_off::disk();
        let start = support::cut_off::SUPERBLOCK;
        let parsed = Superblock::parse(
            &disk[start..start + SUPERBLOCK_LEN],
            disk.len() as u64,
            DATA_OFFSET,
        );
        let parsed = parsed.unwrap();
        assert_eq!(
            (parsed.journal_sections, parsed.recorded_sectors),
            (3, parsed.usable_sectors)
        );
    }

    /// As the kernel makes the journal.
    fn usable_when_new(disk_len: u64) -> u64 {
        let sections =
            ((disk_len / SECTOR / JOURNAL_PART).min(JOURNAL_MAX) / SECTION_SECTORS).max(1);
        usable_sectors(sections, (disk_len - DATA_OFFSET) / SECTOR).unwrap() * SECTOR
    }

    #[test]
    fn the_smallest_state_disk_has_room_for_a_file_system() {
        assert!(usable_when_new(49 << 20) >= 32 << 20);
        assert!(usable_when_new(48 << 20) < 32 << 20);
    }

    #[test]
    fn a_superblock_that_no_format_makes_is_refused_with_the_reason() {
        let with = |at: usize, value: u8| {
            let mut bytes = superblock();
            bytes[at] = value;
            bytes
        };
        let cases = [
            (vec![0; SUPERBLOCK_LEN], "only zeros"),
            (with(0, b'x'), "byte 0 is 0x78, expected 0x69"),
            (with(8, 5), "byte 8 is 0x05, expected 0x04"),
            (with(9, 14), "byte 9 is 0x0e"),
            (with(10, 16), "byte 10 is 0x10"),
            // SB_FLAG_DIRTY_BITMAP: the kernel throws the journal away, or crashes
            (with(24, 0x0c), "byte 24 is 0x0c, expected 0x08"),
            // SB_FLAG_RECALCULATING, SB_FLAG_FIXED_HMAC, SB_FLAG_INLINE
            (with(24, 0x0a), "byte 24 is 0x0a"),
            (with(24, 0x18), "byte 24 is 0x18"),
            (with(24, 0x28), "byte 24 is 0x28"),
            (with(28, 0), "byte 28 is 0x00"),
            (with(29, 13), "byte 29 is 0x0d"),
            // where recalculation goes on, and the salt
            (with(32, 1), "byte 32 is 0x01"),
            (with(63, 1), "byte 63 is 0x01"),
            (with(4095, 1), "byte 4095 is 0x01"),
            (with(12, 0), "journal has 0 sections"),
            (with(12, 16), "journal has 16 sections, expected at most 15"),
            (with(15, 1), "journal has 16777231 sections"),
        ];
        for (bytes, reason) in cases {
            let Unfit(refused) = parse(&bytes).unwrap_err();
            assert!(
                refused.contains(reason),
                "{refused:?} does not contain {reason:?}"
            );
        }
    }

    /// The recorded size has no effect. Fewer sections than the present disk would get are those of
    /// a disk that has grown.
    #[test]
    fn each_change_outside_of_the_two_sizes_is_refused() {
        let mut random = support::random::Random::new(1);
        let mut refused = 0;
        while refused < 1000 {
            let mut bytes = superblock();
            for _ in 0..=random.below(4) {
                let end = [64, SUPERBLOCK_LEN][random.below(2)];
                bytes[random.below(end)] = random.next() as u8;
            }
            let is_same = |at: usize| SIZES.contains(&at) || bytes[at] == superblock()[at];
            let sections = u32::from_le_bytes(bytes[12..16].try_into().unwrap());
            if (0..SUPERBLOCK_LEN).all(is_same) && (1..=15).contains(&sections) {
                assert!(parse(&bytes).unwrap().usable_sectors < DISK / SECTOR)
            } else {
                assert!(parse(&bytes).is_err(), "{:02x?}", &bytes[..64]);
                refused += 1;
            }
            for disk in [0, 17 << 20, 18 << 20, 64 << 20, 1 << 40] {
                if let Ok(parsed) = Superblock::parse(&bytes, disk, DATA_OFFSET) {
                    assert!((1..disk / SECTOR).contains(&parsed.usable_sectors));
                }
            }
        }
    }
}
