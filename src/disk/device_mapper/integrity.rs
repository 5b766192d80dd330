//! The lower device: a table of type `integrity`, and the dm-integrity superblock at the data
//! offset (struct superblock in the kernel's drivers/md/dm-integrity.c; all numbers are
//! little-endian).

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use super::control::{Audience, Control, Device, kernel, refused, table_name};
use super::error::Error;
use super::mapping::{FirstUse, HMAC_SHA256_LEN, Mapping, SECTOR};
use crate::luks::SECTOR_SIZE;
use sys::block::{self, PageBuffer};

/// Length of the superblock in bytes (SB_SECTORS).
pub(super) const SUPERBLOCK_LEN: usize = 4096;
const MAGIC: &[u8; 8] = b"integrt\0";
/// Highest supported version of the superblock (SB_VERSION_5: fixed HMAC); version 6 stores tags in
/// the drive itself.
const VERSION_MAX: u8 = 5;
/// SB_FLAG_FIXED_PADDING and SB_FLAG_FIXED_HMAC.
const LAYOUT_FLAGS: u32 = 0x18;
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

/// The integrity device and its size.
pub(super) struct Lower<'c> {
    pub device: Device<'c>,
    /// Usable size in sectors of 512 bytes.
    pub sectors: u64,
}

/// Returns the name of the integrity device below the mapping `name`, as in cryptsetup.
pub(super) fn lower_name(name: &str) -> String {
    format!("{name}_dif")
}

/// Maps the integrity device. On first use it also makes the superblock and an empty journal.
pub(super) fn map<'c>(
    control: &'c Control,
    mapping: &Mapping,
    first_use: FirstUse,
) -> Result<Lower<'c>, Error> {
    let name = lower_name(mapping.name);
    let uuid = mapping.plain_uuid();
    let number = block::number(mapping.device)
        .map_err(|error| Error::of_disk(mapping.device, "find the block device", error))?;
    // creates the device before anything is erased: the superblock of an active mapping must not
    // change
    let device = control.create(&name, &format!("CRYPT-INTEGRITY-{uuid}-{name}"))?;
    let load = |sectors, doing| {
        device
            .load("integrity", sectors, table(mapping, number).as_bytes())
            .map_err(|error| kernel(&name, doing, refused("dm_integrity", error)))
    };

    if first_use == FirstUse::Create {
        erase_superblock(mapping)?;
        load(SECTORS_BEFORE_SUPERBLOCK, "make a dm-integrity superblock")?;
        device.clear()?;
    }
    let sectors = usable_sectors(mapping)?;
    load(sectors, "accept the dm-integrity table")?;
    device.resume(Audience::Nobody)?;
    Ok(Lower { device, sectors })
}

/// Returns the parameters of the table. In mode J sector and tag are written through the journal,
/// so they match after a power failure. `fix_padding` and `fix_hmac` apply when a superblock is
/// made; without `fix_padding`, tags take more space.
fn table(mapping: &Mapping, number: (u32, u32)) -> String {
    format!(
        "{} {} {HMAC_SHA256_LEN} J 3 block_size:{SECTOR_SIZE} fix_padding fix_hmac",
        table_name(number),
        mapping.start(),
    )
}

/// Erases the superblock: the kernel makes a new one only if it finds zeros.
fn erase_superblock(mapping: &Mapping) -> Result<(), Error> {
    let erase = || {
        // O_EXCL on a block device: fails with EBUSY while it is mounted or part of a mapping
        let flags = libc::O_DIRECT | libc::O_EXCL;
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(flags)
            .open(mapping.device)?;
        file.write_all_at(
            PageBuffer::new(SUPERBLOCK_LEN).bytes(),
            mapping.geometry.data_offset,
        )?;
        file.sync_all()
    };
    erase().map_err(|error| {
        Error::of_disk(
            mapping.device,
            "erase the earlier dm-integrity superblock",
            error,
        )
    })
}

/// Returns the usable size. The size in the superblock is not used: nobody vouches for it, and it
/// is that of the disk in the last boot, which the host may have enlarged since.
fn usable_sectors(mapping: &Mapping) -> Result<u64, Error> {
    let mut buffer = PageBuffer::new(SUPERBLOCK_LEN);
    let read = |buffer: &mut PageBuffer| {
        // direct I/O: dm-integrity bypasses the page cache, which may hold older bytes
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(mapping.device)?;
        file.read_exact_at(buffer.bytes_mut(), mapping.geometry.data_offset)?;
        block::size(&file)
    };
    let disk_len = read(&mut buffer).map_err(|error| {
        Error::of_disk(mapping.device, "read the dm-integrity superblock", error)
    })?;
    let available = disk_len.saturating_sub(mapping.geometry.data_offset) / SECTOR;
    let sectors = Superblock::parse(buffer.bytes()).and_then(|it| it.usable_sectors(available));
    sectors.map_err(|Unfit(reason)| {
        Error::Failed(format!(
            "{}: no usable dm-integrity superblock at the data offset: {reason}",
            mapping.device.display()
        ))
    })
}

/// The fields of the superblock that this program uses. The superblock is not authenticated (only
/// sectors are), so the host can write any value. The kernel checks the other fields.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    pub journal_sections: u32,
    /// How many sectors the device had when it was last used.
    pub recorded_sectors: u64,
    /// Whether the only options are those that change the layout of tags: no recalculation, and no
    /// bitmap instead of the journal.
    pub has_plain_journal: bool,
}

/// Why a superblock does not fit the disk and its LUKS2 header, as a clause.
#[derive(Debug)]
pub(super) struct Unfit(pub String);

impl Superblock {
    /// Parses the superblock.
    pub fn parse(bytes: &[u8]) -> Result<Superblock, Unfit> {
        let ensure = |fits: bool, why: String| fits.then_some(()).ok_or(Unfit(why));
        let field = bytes.get(..64);
        let field = field.ok_or_else(|| Unfit("it is truncated".into()))?;
        let why = match field.iter().all(|byte| *byte == 0) {
            true => "it contains only zeros".into(),
            false => format!("it starts with {:02x?} instead of \"integrt\"", &field[..8]),
        };
        ensure(&field[..8] == MAGIC, why)?;
        let version = field[8];
        let why = format!("its version is {version}, supported are 1 to {VERSION_MAX}");
        ensure((1..=VERSION_MAX).contains(&version), why)?;
        let tag_len = u16::from_le_bytes([field[10], field[11]]);
        let why = format!("its tags have {tag_len} bytes instead of {HMAC_SHA256_LEN}");
        ensure(usize::from(tag_len) == HMAC_SHA256_LEN, why)?;
        for (log2, expected, name) in [
            (field[28], SECTORS_PER_BLOCK, "blocks"),
            (field[9], DATA_RUN, "runs of data"),
        ] {
            let why =
                format!("its {name} have 2^{log2} sectors of 512 bytes instead of {expected}");
            ensure(1_u64.checked_shl(log2.into()) == Some(expected), why)?;
        }
        let number = |at: usize| u32::from_le_bytes(field[at..at + 4].try_into().expect("4 bytes"));
        let has_plain_journal = number(24) & !LAYOUT_FLAGS == 0;
        Ok(Superblock {
            journal_sections: number(12),
            recorded_sectors: u64::from(number(20)) << 32 | u64::from(number(16)),
            has_plain_journal,
        })
    }

    /// Returns how many sectors the kernel provides if `available` sectors are from the superblock
    /// to the end of the disk (get_provided_data_sectors): behind superblock and journal, each run
    /// of data follows a run of tags.
    fn usable_sectors(&self, available: u64) -> Result<u64, Unfit> {
        let before =
            SUPERBLOCK_LEN as u64 / SECTOR + SECTION_SECTORS * u64::from(self.journal_sections);
        let room = available.saturating_sub(before);
        let last = (room % (TAG_RUN + DATA_RUN)).saturating_sub(TAG_RUN);
        let sectors =
            room / (TAG_RUN + DATA_RUN) * DATA_RUN + last / SECTORS_PER_BLOCK * SECTORS_PER_BLOCK;
        match sectors {
            0 => Err(Unfit(format!(
                "the disk has {available} sectors there, superblock and journal {before}"
            ))),
            sectors => Ok(sectors),
        }
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
    const AVAILABLE: u64 = ((256 - 16) << 20) / 512;

    fn superblock() -> Vec<u8> {
        let mut bytes = FROM_CRYPTSETUP.to_vec();
        bytes.resize(SUPERBLOCK_LEN, 0);
        bytes
    }

    #[test]
    fn a_superblock_made_by_cryptsetup_is_understood() {
        let parsed = Superblock::parse(&superblock()).unwrap();
        // as the kernel wrote it at byte 16
        assert_eq!(parsed.usable_sectors(AVAILABLE).unwrap(), 483_712);
        // a sector more or less than a block, and what a larger disk adds
        assert_eq!(parsed.usable_sectors(AVAILABLE + 7).unwrap(), 483_712);
        assert_eq!(parsed.usable_sectors(AVAILABLE + 8).unwrap(), 483_720);
        let run = TAG_RUN + DATA_RUN;
        assert_eq!(parsed.usable_sectors(AVAILABLE + run).unwrap(), 516_480);
    }

    #[test]
    fn what_does_not_fit_the_header_or_the_disk_is_refused_with_the_reason() {
        let with = |at: usize, value: u8| {
            let mut bytes = superblock();
            bytes[at] = value;
            bytes
        };
        let cases = [
            (vec![0; SUPERBLOCK_LEN], "only zeros"),
            (with(0, b'x'), "instead of \"integrt\""),
            (with(8, 9), "version is 9"),
            (with(10, 16), "tags have 16 bytes"),
            (with(28, 200), "2^200 sectors"),
            (with(9, 14), "runs of data have 2^14 sectors"),
            (with(28, 0), "instead of 8"),
            (superblock()[..63].to_vec(), "truncated"),
        ];
        for (bytes, reason) in cases {
            let Unfit(refused) = Superblock::parse(&bytes).unwrap_err();
            assert!(
                refused.contains(reason),
                "{refused:?} does not contain {reason:?}"
            );
        }
    }

    #[test]
    fn no_mutated_superblock_panics_or_exceeds_the_disk() {
        let mut random = support::random::Random::new(1);
        for _ in 0..20_000 {
            let mut bytes = superblock();
            for _ in 0..=random.below(4) {
                bytes[random.below(64)] = random.next() as u8;
            }
            bytes.truncate(random.below(4097));
            let parsed = Superblock::parse(&bytes);
            if let Ok(sectors) = parsed.and_then(|it| it.usable_sectors(AVAILABLE)) {
                assert!((1..AVAILABLE).contains(&sectors));
            }
        }
    }
}
