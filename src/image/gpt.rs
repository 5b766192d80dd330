//! The GUID partition table of a raw disk image (UEFI specification §5.3), and the event that the
//! firmware measures for it into PCR 5 (TCG PC Client Platform Firmware Profile §3.3.4.6).

use std::io::{Read, Seek, SeekFrom};

use super::bytes::{u32_at, u64_at};
use super::digest::{Digest, Hasher};
use super::error::Error;

/// Sector sizes of disks. An image has no field for it: the header is in the second sector.
const SECTOR_SIZES: [u64; 2] = [512, 4096];
/// Size in bytes of the header's fields, and of a partition's entry.
const HEADER: usize = 92;
const ENTRY: usize = 128;
/// Maximum number of entries. Tools make 128.
const MAX_ENTRIES: u32 = 1024;
/// The partition type of an EFI system partition, c12a7328-f81f-11d2-ba4b-00a0c93ec93b, as it is on
/// the disk.
pub const ESP: [u8; 16] = [
    0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
];

/// A partition table.
pub struct Gpt {
    sector_size: u64,
    header: [u8; HEADER],
    /// The used entries.
    entries: Vec<[u8; ENTRY]>,
}

impl Gpt {
    /// Reads the primary table of a disk image.
    pub fn read(disk: &mut (impl Read + Seek)) -> Result<Gpt, Error> {
        for sector_size in SECTOR_SIZES {
            let mut header = [0; HEADER];
            if read_at(disk, sector_size, &mut header).is_ok() && header.starts_with(b"EFI PART") {
                return Gpt::with_header(disk, sector_size, header);
            }
        }
        let text = "not a raw disk image: there is no GUID partition table; `qemu-img convert -O raw` makes one of other formats";
        Err(Error::Foreign(text.into()))
    }

    fn with_header(
        disk: &mut (impl Read + Seek),
        sector_size: u64,
        header: [u8; HEADER],
    ) -> Result<Gpt, Error> {
        let field = |at| u32_at(&header, at).unwrap_or_default();
        let (start, count, size) = (u64_at(&header, 72), field(80), field(84));
        if size as usize != ENTRY || count > MAX_ENTRIES {
            return Err(Error::Malformed(format!(
                "partition table: {count} entries of {size} bytes; expected at most {MAX_ENTRIES} of {ENTRY}"
            )));
        }
        let start = start.unwrap_or_default().checked_mul(sector_size);
        let outside = "partition table: its entries lie outside the disk";
        let start = start.ok_or_else(|| Error::Malformed(outside.into()))?;
        let mut entries = Vec::new();
        for index in 0..u64::from(count) {
            let mut entry = [0; ENTRY];
            let at = start.saturating_add(index * ENTRY as u64);
            read_at(disk, at, &mut entry).map_err(|error| {
                Error::Read(format!("partition table: cannot read entry {index}"), error)
            })?;
            if entry[..16] != [0; 16] {
                entries.push(entry);
            }
        }
        Ok(Gpt {
            sector_size,
            header,
            entries,
        })
    }

    /// Returns the offset and the size in bytes of the EFI system partition.
    pub fn esp(&self) -> Result<(u64, u64), Error> {
        let mut found = self.entries.iter().filter(|entry| entry[..16] == ESP);
        let (first, another) = (found.next(), found.next());
        if another.is_some() {
            let text = "the disk has two EFI system partitions";
            return Err(Error::Ambiguous(text.into()));
        }
        let none = "the disk has no EFI system partition";
        let entry = first.ok_or_else(|| Error::NotFound(none.into()))?;
        let field = |at| u64_at(entry, at).unwrap_or_default();
        let (start, last) = (field(32), field(40));
        let size = last
            .checked_sub(start)
            .and_then(|sectors| sectors.checked_add(1));
        let bytes = |sectors: u64| sectors.checked_mul(self.sector_size);
        size.and_then(bytes)
            .zip(bytes(start))
            .map(|(size, start)| (start, size))
            .ok_or_else(|| {
                Error::Malformed(format!(
                    "the EFI system partition goes from sector {start} to {last}, outside any disk"
                ))
            })
    }

    /// Returns the digest of the event: the header's fields, the number of the used entries, the
    /// used entries. The header contains the disk's last sector, so the digest changes when the
    /// disk grows.
    pub fn event(&self) -> Digest {
        let mut hasher = Hasher::new();
        hasher.update(&self.header);
        hasher.update(&(self.entries.len() as u64).to_le_bytes());
        self.entries.iter().for_each(|entry| hasher.update(entry));
        hasher.finish()
    }
}

/// Reads bytes at an offset.
pub fn read_at(
    disk: &mut (impl Read + Seek),
    offset: u64,
    bytes: &mut [u8],
) -> std::io::Result<()> {
    disk.seek(SeekFrom::Start(offset))?;
    disk.read_exact(bytes)
}
