//! Reads files of a FAT file system (Microsoft, "FAT: General Overview of On-Disk Format";
//! ECMA-107), as in an EFI system partition.
//!
//! The crate `fatfs` is not used: it panics on damaged boot sectors (its issue 56), follows a
//! directory whose clusters form a cycle for ever, and wants to write. [`super::slots`] replaces
//! files in place, and needs only their positions.

use std::io::{Read, Seek, SeekFrom};

use super::bytes::{u16_at, u32_at};
use super::error::Error;
use super::gpt::read_at;

/// Size in bytes of a directory entry.
const ENTRY: usize = 32;
/// Maximum size in bytes of a directory: 65,536 entries.
const MAX_DIRECTORY: u64 = 65_536 * ENTRY as u64;
/// Number of clusters below which the file system is FAT12, FAT16; else it is FAT32.
const FAT12_CLUSTERS: u64 = 4085;
const FAT16_CLUSTERS: u64 = 65_525;
/// Attributes of an entry. A long name has all of the last four.
const READ_ONLY: u8 = 0x01;
const VOLUME_ID: u8 = 0x08;
const DIRECTORY: u8 = 0x10;
const LONG_NAME: u8 = 0x0f;
/// Flags of a short name (Windows NT and later).
const LOWER_CASE_BASE: u8 = 0x08;
const LOWER_CASE_EXTENSION: u8 = 0x10;
/// Number of UTF-16 units of a long name in each entry, and where they are.
const LONG_NAME_UNITS: [std::ops::Range<usize>; 3] = [1..11, 14..26, 28..32];
/// Maximum number of entries of a long name, of 13 units each.
const MAX_LONG_NAME: usize = 20;
/// Bytes of the table that are read at once.
const BLOCK: u64 = 4096;

/// A file system in a part of a disk.
pub struct Fat<D> {
    disk: D,
    bits: Bits,
    /// Offset in bytes of the first file allocation table, and of cluster 2.
    table: u64,
    data: u64,
    /// Size in bytes of a cluster.
    cluster_size: u64,
    /// Number of clusters according to the boot sector; the first has the number 2. Limited to
    /// those that the disk really has.
    clusters: u64,
    clusters_on_disk: u64,
    root: Chain,
    /// The cached part of the table, with its offset.
    block: (u64, Vec<u8>),
}

#[derive(Clone, Copy, PartialEq)]
enum Bits {
    Fat12,
    Fat16,
    Fat32,
}

/// Where the bytes of a file or directory are.
#[derive(Clone, Copy)]
enum Chain {
    /// The root directory of FAT12 and FAT16: offset and size in bytes.
    Fixed(u64, u64),
    /// The first cluster.
    Clusters(u64),
}

/// A file or a directory.
pub struct DirectoryEntry {
    /// The name, the long one if there is one.
    pub name: String,
    /// Whether the entry is a directory.
    pub is_directory: bool,
    /// Whether the file has the attribute "read-only".
    pub is_read_only: bool,
    /// The short name.
    pub short_name: String,
    /// The number of the first cluster.
    pub first_cluster: u64,
    /// The size in bytes.
    pub size: u64,
}

impl<D: Read + Seek> Fat<D> {
    /// Reads the boot sector of the file system that starts at this offset in bytes.
    pub fn open(mut disk: D, start: u64) -> Result<Fat<D>, Error> {
        let mut sector = [0; 512];
        read_at(&mut disk, start, &mut sector)
            .map_err(|error| Error::Read("cannot read the boot sector".into(), error))?;
        let wrong = |what: &str| Err(Error::Malformed(format!("no FAT file system: {what}")));
        if sector[510..] != [0x55, 0xaa] {
            return wrong("the boot sector lacks its signature");
        }
        let half = |at| u64::from(u16_at(&sector, at).unwrap_or_default());
        let word = |at| u64::from(u32_at(&sector, at).unwrap_or_default());
        let either = |first: u64, second: u64| if first == 0 { second } else { first };
        let (sector_size, per_cluster) = (half(11), u64::from(sector[13]));
        if !sector_size.is_power_of_two() || !(512..=4096).contains(&sector_size) {
            return wrong("the sector size is wrong");
        }
        if !per_cluster.is_power_of_two() {
            return wrong("the cluster size is wrong");
        }
        let (reserved, tables, root_entries) = (half(14), u64::from(sector[16]), half(17));
        let (total, table_size) = (either(half(19), word(32)), either(half(22), word(36)));
        let root_size = root_entries * ENTRY as u64;
        let root_sector = reserved + tables * table_size;
        let data_sector = root_sector + root_size.div_ceil(sector_size);
        let clusters = total.saturating_sub(data_sector) / per_cluster;
        if clusters == 0 || reserved == 0 || tables == 0 {
            return wrong("it has no clusters");
        }
        // zero in this field means FAT32; firmware then refuses a number of clusters that is too
        // small for FAT32
        if half(22) == 0 && clusters < FAT16_CLUSTERS {
            return Err(Error::Unsupported(format!(
                "it is FAT32 with {clusters} clusters, but FAT32 has at least {FAT16_CLUSTERS}: firmware does not read it. Make the \
                 partition larger (systemd-repart: SizeMinBytes=), or its clusters smaller (mkfs.vfat -s 1)"
            )));
        }
        if half(22) != 0 && clusters >= FAT16_CLUSTERS {
            return Err(Error::Unsupported(format!(
                "it is FAT12 or FAT16 with {clusters} clusters, but FAT16 has fewer than {FAT16_CLUSTERS}: firmware does not read it. \
                 Make FAT32 of it (mkfs.vfat -F 32)"
            )));
        }
        let bits = match clusters {
            count if count < FAT12_CLUSTERS => Bits::Fat12,
            count if count < FAT16_CLUSTERS => Bits::Fat16,
            _ => Bits::Fat32,
        };
        let at = |sector: u64| start.saturating_add(sector * sector_size);
        let cluster_size = per_cluster * sector_size;
        let end = disk.seek(SeekFrom::End(0));
        let end =
            end.map_err(|error| Error::Read("cannot find the end of the disk".into(), error))?;
        Ok(Fat {
            disk,
            bits,
            table: at(reserved),
            data: at(data_sector),
            cluster_size,
            clusters,
            clusters_on_disk: end.saturating_sub(at(data_sector)) / cluster_size,
            root: match bits {
                Bits::Fat32 => Chain::Clusters(word(44)),
                _ => Chain::Fixed(at(root_sector), root_size),
            },
            block: (0, Vec::new()),
        })
    }

    /// Returns the entries of a directory; the path has slashes between the names; `None` if there
    /// is no such directory. Case is ignored.
    pub fn list(&mut self, path: &str) -> Result<Option<Vec<DirectoryEntry>>, Error> {
        let mut entries = self.directory(self.root)?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let found = entries.into_iter().find(|entry| entry.is_called(name));
            match found.filter(|entry| entry.is_directory) {
                Some(directory) => {
                    entries = self.directory(Chain::Clusters(directory.first_cluster))?
                }
                None => return Ok(None),
            }
        }
        Ok(Some(entries))
    }

    /// Returns the file or directory with this path; `None` if there is none.
    pub fn find(&mut self, path: &str) -> Result<Option<DirectoryEntry>, Error> {
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        let entries = self.list(directory)?.unwrap_or_default();
        Ok(entries.into_iter().find(|entry| entry.is_called(name)))
    }

    /// Returns the bytes of a file; `None` if there is none with this path.
    pub fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>, Error> {
        match self.find(path)?.filter(|entry| !entry.is_directory) {
            Some(file) if file.size == 0 => Ok(Some(Vec::new())),
            Some(file) => {
                let bytes = self.bytes(Chain::Clusters(file.first_cluster), file.size)?;
                if (bytes.len() as u64) < file.size {
                    return Err(Error::Malformed(format!(
                        "{path} has {} bytes, but its clusters have {}",
                        file.size,
                        bytes.len()
                    )));
                }
                Ok(Some(bytes))
            }
            None => Ok(None),
        }
    }

    /// Returns where the clusters from this one lie: offsets on the disk and sizes in bytes, with
    /// neighbours joined.
    pub fn extents(&mut self, first: u64) -> Result<Vec<(u64, u64)>, Error> {
        let mut extents: Vec<(u64, u64)> = Vec::new();
        let mut cluster = first;
        for _ in 0..self.clusters_on_disk.min(self.clusters) {
            if !(2..self.clusters_on_disk + 2).contains(&cluster) {
                return Err(Error::Malformed(format!(
                    "a file has the cluster {cluster}, which does not exist"
                )));
            }
            let offset = self.data.saturating_add((cluster - 2) * self.cluster_size);
            match extents.last_mut() {
                Some((start, size)) if *start + *size == offset => *size += self.cluster_size,
                _ => extents.push((offset, self.cluster_size)),
            }
            match self.next(cluster)? {
                Some(next) => cluster = next,
                None => return Ok(extents),
            }
        }
        let text = "the clusters of a file form a cycle";
        Err(Error::Malformed(text.into()))
    }

    fn directory(&mut self, chain: Chain) -> Result<Vec<DirectoryEntry>, Error> {
        let bytes = self.bytes(chain, MAX_DIRECTORY)?;
        let mut entries = Vec::new();
        // the parts of a long name precede the entry, the last part first
        let mut long_name: Vec<&[u8]> = Vec::new();
        for entry in bytes.chunks_exact(ENTRY) {
            match (entry[0], entry[11]) {
                (0, _) => break,
                (0xe5, _) => long_name.clear(),
                (_, attributes) if attributes & 0x3f == LONG_NAME => {
                    if long_name.len() == MAX_LONG_NAME {
                        long_name.clear();
                    }
                    long_name.push(entry);
                }
                (_, attributes) if attributes & VOLUME_ID != 0 => long_name.clear(),
                _ => entries.push(DirectoryEntry::parse(
                    entry,
                    &std::mem::take(&mut long_name),
                    self.bits,
                )),
            }
        }
        entries.retain(|entry| entry.name != "." && entry.name != "..");
        Ok(entries)
    }

    /// Returns the bytes of a chain, at most `limit`.
    fn bytes(&mut self, chain: Chain, limit: u64) -> Result<Vec<u8>, Error> {
        let mut cluster = match chain {
            Chain::Fixed(offset, size) => return self.part(offset, size.min(limit)),
            Chain::Clusters(first) => first,
        };
        let mut bytes = Vec::new();
        // if the chain is longer than the disk, it contains a cycle
        for _ in 0..self.clusters_on_disk.min(self.clusters) {
            if !(2..self.clusters + 2).contains(&cluster) {
                return Err(Error::Malformed(format!(
                    "a file has the cluster {cluster}, which does not exist"
                )));
            }
            let offset = self.data.saturating_add((cluster - 2) * self.cluster_size);
            let wanted = self.cluster_size.min(limit - bytes.len() as u64);
            let mut part = self.part(offset, wanted)?;
            if (part.len() as u64) < wanted {
                return Err(Error::Malformed(format!(
                    "the cluster {cluster} lies behind the end of the disk"
                )));
            }
            bytes.append(&mut part);
            match self.next(cluster)? {
                Some(next) if (bytes.len() as u64) < limit => cluster = next,
                _ => return Ok(bytes),
            }
        }
        let text = "the clusters of a file form a cycle";
        Err(Error::Malformed(text.into()))
    }

    /// Returns the cluster after this one; `None` after the last.
    fn next(&mut self, cluster: u64) -> Result<Option<u64>, Error> {
        let (value, end) = match self.bits {
            Bits::Fat12 => {
                let low = u64::from(self.table_byte(cluster + cluster / 2)?);
                let high = u64::from(self.table_byte(cluster + cluster / 2 + 1)?);
                let both = low | high << 8;
                let value = if cluster.is_multiple_of(2) {
                    both & 0xfff
                } else {
                    both >> 4
                };
                (value, 0xff8)
            }
            Bits::Fat16 => (self.table_number(cluster * 2, 2)?, 0xfff8),
            Bits::Fat32 => (
                self.table_number(cluster * 4, 4)? & 0x0fff_ffff,
                0x0fff_fff8,
            ),
        };
        Ok((value < end).then_some(value))
    }

    fn table_number(&mut self, offset: u64, size: u64) -> Result<u64, Error> {
        (0..size).try_fold(0, |number, at| {
            Ok(number | u64::from(self.table_byte(offset + at)?) << (8 * at))
        })
    }

    fn table_byte(&mut self, offset: u64) -> Result<u8, Error> {
        let within = offset % BLOCK;
        if self.block.1.is_empty() || self.block.0 != offset - within {
            let start = self.table.saturating_add(offset - within);
            self.block = (offset - within, self.part(start, BLOCK)?);
        }
        let byte = self.block.1.get(within as usize);
        byte.copied()
            .ok_or_else(|| Error::Malformed("the file allocation table is cut off".into()))
    }

    /// Returns the bytes of the disk from this offset; fewer at its end.
    fn part(&mut self, offset: u64, size: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.disk
            .seek(SeekFrom::Start(offset))
            .and_then(|_| (&mut self.disk).take(size).read_to_end(&mut bytes))
            .map_err(|error| Error::Read("cannot read the disk".into(), error))?;
        Ok(bytes)
    }
}

impl DirectoryEntry {
    fn parse(entry: &[u8], long_name: &[&[u8]], bits: Bits) -> DirectoryEntry {
        let part = |bytes: &[u8], lower_case: u8| {
            let text = String::from_utf8_lossy(bytes).trim_end().to_owned();
            match entry[12] & lower_case {
                0 => text,
                _ => text.to_lowercase(),
            }
        };
        let base = part(&entry[..8], LOWER_CASE_BASE);
        let extension = part(&entry[8..11], LOWER_CASE_EXTENSION);
        let short_name = match extension.as_str() {
            "" => base,
            _ => format!("{base}.{extension}"),
        };
        let units: Vec<u16> = long_name
            .iter()
            .rev()
            .flat_map(|entry| {
                LONG_NAME_UNITS
                    .iter()
                    .flat_map(|range| entry[range.clone()].chunks(2))
            })
            .map(|unit| u16_at(unit, 0).unwrap_or_default())
            .take_while(|unit| *unit != 0)
            .collect();
        let name = if units.is_empty() {
            short_name.clone()
        } else {
            String::from_utf16_lossy(&units)
        };
        let half = |at| u64::from(u16_at(entry, at).unwrap_or_default());
        let high = if bits == Bits::Fat32 { half(20) } else { 0 };
        DirectoryEntry {
            name,
            is_directory: entry[11] & DIRECTORY != 0,
            is_read_only: entry[11] & READ_ONLY != 0,
            short_name,
            first_cluster: high << 16 | half(26),
            size: u64::from(u32_at(entry, 28).unwrap_or_default()),
        }
    }

    fn is_called(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name) || self.short_name.eq_ignore_ascii_case(name)
    }
}
