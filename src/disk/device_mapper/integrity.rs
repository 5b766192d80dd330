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
    let sectors = read_superblock(mapping)?.provided_data_sectors;
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

fn read_superblock(mapping: &Mapping) -> Result<Superblock, Error> {
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
    Superblock::parse(buffer.bytes(), available).map_err(|Unfit(reason)| {
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
    provided_data_sectors: u64,
    pub journal_sections: u32,
    /// Whether the only options are those that change the layout of tags: no recalculation, and no
    /// bitmap instead of the journal.
    pub has_plain_journal: bool,
}

/// Why a superblock does not fit the disk and its LUKS2 header, as a clause.
#[derive(Debug)]
pub(super) struct Unfit(pub String);

impl Superblock {
    /// Parses the superblock. `available` is the number of sectors from the superblock to the end
    /// of the disk.
    pub fn parse(bytes: &[u8], available: u64) -> Result<Superblock, Unfit> {
        let unfit = |why: String| Err(Unfit(why));
        let Some(field) = bytes.get(..64) else {
            return unfit("it is truncated".into());
        };
        if &field[..8] != MAGIC {
            return unfit(match field.iter().all(|byte| *byte == 0) {
                true => "it contains only zeros".into(),
                false => format!("it starts with {:02x?} instead of \"integrt\"", &field[..8]),
            });
        }
        let version = field[8];
        if !(1..=VERSION_MAX).contains(&version) {
            return unfit(format!(
                "its version is {version}, supported are 1 to {VERSION_MAX}"
            ));
        }
        let tag_len = u16::from_le_bytes([field[10], field[11]]);
        if usize::from(tag_len) != HMAC_SHA256_LEN {
            return unfit(format!(
                "its tags have {tag_len} bytes instead of {HMAC_SHA256_LEN}"
            ));
        }
        let log2_sectors_per_block = field[28];
        if 1_u64.checked_shl(log2_sectors_per_block.into()) != Some(SECTORS_PER_BLOCK) {
            return unfit(format!(
                "its blocks have 2^{log2_sectors_per_block} sectors of 512 bytes instead of {} (from the LUKS2 header)",
                SECTORS_PER_BLOCK
            ));
        }
        let provided_data_sectors = u64::from_le_bytes(field[16..24].try_into().expect("8 bytes"));
        if provided_data_sectors == 0 || provided_data_sectors > available {
            return unfit(format!(
                "it provides {provided_data_sectors} sectors, but the disk has {available}"
            ));
        }
        let number = |at: usize| u32::from_le_bytes(field[at..at + 4].try_into().expect("4 bytes"));
        let has_plain_journal = number(24) & !LAYOUT_FLAGS == 0;
        Ok(Superblock {
            provided_data_sectors,
            journal_sections: number(12),
            has_plain_journal,
        })
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
        let parsed = Superblock::parse(&superblock(), AVAILABLE).unwrap();
        assert_eq!(parsed.provided_data_sectors, 483_712);
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
            (with(23, 1), "the disk has 491520"),
            (with(28, 0), "instead of 8 (from"),
            (superblock()[..63].to_vec(), "truncated"),
        ];
        for (bytes, reason) in cases {
            let Unfit(refused) = Superblock::parse(&bytes, AVAILABLE).unwrap_err();
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
            if let Ok(parsed) = Superblock::parse(&bytes, AVAILABLE) {
                assert!((1..=AVAILABLE).contains(&parsed.provided_data_sectors));
            }
        }
    }
}
