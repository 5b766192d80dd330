//! The images on a node's EFI system partition, which an update replaces without a gap in which the machine does not boot.
//!
//! An update never allocates a cluster: `mkosi/` makes files whose clusters have room for an image, and an update writes into those of
//! a file that no boot needs. So the only change of the file system's structure is that of names and sizes, which are all in the first
//! sector of the folder `EFI/Linux`. That sector is written at once, and disks write a sector completely or not at all.
//!
//! A name is that of systemd-boot (UAPI group, "Boot Loader Specification"): `firstlight_VERSION.efi`, or with the tries that are left
//! and done, `firstlight_VERSION+2-1.efi`. systemd-boot itself counts. A file without `.efi` is not booted.

use std::io::{self, Read, Seek, SeekFrom, Write};

use super::error::Error;
use super::fat::{DirectoryEntry, Fat};

/// Where systemd-boot looks for images.
const FOLDER: &str = "EFI/Linux";
const PREFIX: &str = "firstlight_";
const SUFFIX: &str = ".efi";
/// The names of files that wait for an image: short ones, so that they need one entry.
const SPARES: [&str; 9] = [
    "SPARE1", "SPARE2", "SPARE3", "SPARE4", "SPARE5", "SPARE6", "SPARE7", "SPARE8", "SPARE9",
];
/// What a disk writes at once.
const SECTOR: usize = 512;
/// How many sectors behind the first one are cleared.
const MAX_CLEARED: usize = 256;
/// The size of an entry, and the number of them in the first sector, of which the last stays empty: it ends the folder.
const ENTRY: usize = 32;
const MAX_ENTRIES: usize = SECTOR / ENTRY - 1;
/// UTF-16 units of a long name in an entry, and where they are.
const UNITS: usize = 13;
const LONG_NAME_UNITS: [std::ops::Range<usize>; 3] = [1..11, 14..26, 28..32];
/// Where the dates of an entry are: of its creation, its last access, its last write. Firmware renames no file whose date is not one,
/// and then systemd-boot could not count. So each file is of 1980-01-01, the first day that there is.
const DATES: [usize; 3] = [16, 18, 24];
const FIRST_DAY: u16 = 0x21;
const LONG_NAME: u8 = 0x0f;
const LAST: u8 = 0x40;
const ARCHIVE: u8 = 0x20;
const DIRECTORY: u8 = 0x10;

/// A disk whose writes can be made durable.
pub trait Writable: Read + Write + Seek {
    /// Returns when everything that was written is on the disk.
    fn sync(&mut self) -> io::Result<()>;
}

impl Writable for std::fs::File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// An image on the partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// The version; `None`: the file is free for an image.
    pub version: Option<String>,
    /// The tries that are left, if systemd-boot counts them.
    pub tries: Option<u32>,
    /// How many bytes have room.
    pub room: u64,
    name: String,
    first_cluster: u64,
    size: u64,
}

/// The folder with the images.
pub struct Slots {
    /// Where the partition begins.
    start: u64,
    /// Where the folder's clusters are.
    folder: Vec<(u64, u64)>,
    /// `.` and `..`.
    dots: Vec<[u8; ENTRY]>,
    slots: Vec<Slot>,
}

impl Slots {
    /// Reads the folder of the partition that begins at byte `start` of the disk.
    pub fn read(disk: &mut impl Writable, start: u64) -> Result<Slots, Error> {
        let place = |error: Error| error.within(FOLDER);
        let mut esp = Fat::open(&mut *disk, start)?;
        let folder = esp.find(FOLDER)?.filter(|it| it.is_directory);
        let folder = folder.ok_or_else(|| Error::NotFound(format!("there is no {FOLDER}")))?;
        let extents = esp.extents(folder.first_cluster).map_err(place)?;
        let mut slots = Vec::new();
        for entry in esp.list(FOLDER)?.unwrap_or_default() {
            if entry.is_directory || entry.size == 0 {
                return Err(place(Error::Unsupported(format!(
                    "{} is no image",
                    entry.name.escape_debug()
                ))));
            }
            let room = esp.extents(entry.first_cluster).map_err(place)?;
            slots.push(Slot::of(entry, room.iter().map(|(_, size)| size).sum()));
        }
        let mut dots = Vec::new();
        for index in 0..2 {
            let mut dot = [0; ENTRY];
            let first = extents.first().map_or(0, |(offset, _)| *offset);
            super::gpt::read_at(disk, first + index * ENTRY as u64, &mut dot)
                .map_err(|error| Error::Read(FOLDER.into(), error))?;
            if dot[0] != b'.' || dot[11] & DIRECTORY == 0 {
                return Err(place(Error::Malformed(
                    "it does not begin with . and ..".into(),
                )));
            }
            dots.push(dot);
        }
        Ok(Slots {
            start,
            folder: extents,
            dots,
            slots,
        })
    }

    /// Returns the image of a version.
    pub fn of(&self, version: &str) -> Option<&Slot> {
        let mut slots = self.slots.iter();
        slots.find(|it| it.version.as_deref() == Some(version))
    }

    /// Returns the path of the image of a version.
    pub fn path_of(&self, version: &str) -> Option<String> {
        Some(format!("{FOLDER}/{}", self.of(version)?.name))
    }

    /// Returns how large an image beside this version may be.
    pub fn room_beside(&self, version: &str) -> u64 {
        self.spare_beside(version)
            .map_or(0, |index| self.slots[index].room)
    }

    /// Returns the largest file that is not the image of this version.
    fn spare_beside(&self, version: &str) -> Option<usize> {
        let others = self.slots.iter().enumerate();
        let others = others.filter(|(_, it)| it.version.as_deref() != Some(version));
        others.max_by_key(|(_, it)| it.room).map(|(index, _)| index)
    }

    /// Makes the image of `version` the only one that boots.
    pub fn keep_only(&mut self, disk: &mut impl Writable, version: &str) -> Result<(), Error> {
        if self.of(version).is_none() {
            return Err(Error::NotFound(format!(
                "{FOLDER} has no image of the running version {version}"
            )));
        }
        let mut spares = SPARES.iter();
        for slot in &mut self.slots {
            if slot.version.as_deref() != Some(version) {
                // a folder of one sector has fewer entries than there are names
                slot.name = spares.next().copied().unwrap_or("SPARE").into();
                slot.version = None;
                slot.tries = None;
            }
        }
        self.write(disk)
    }

    /// Writes an image into a file that does not boot, and then makes it boot, with a number of tries.
    pub fn add(
        &mut self,
        disk: &mut impl Writable,
        version: &str,
        running: &str,
        image: &[u8],
        tries: u32,
    ) -> Result<(), Error> {
        let index = self
            .spare_beside(running)
            .filter(|index| self.slots[*index].version.is_none());
        let index =
            index.ok_or_else(|| Error::NotFound(format!("{FOLDER} has no file to replace")))?;
        if self.slots[index].room < image.len() as u64 {
            return Err(Error::Unsupported(format!(
                "the image has {} bytes, but {FOLDER} has room for {}",
                image.len(),
                self.slots[index].room
            )));
        }
        let wrong = |error| Error::Read(format!("cannot write to {FOLDER}"), error);
        let mut left = image;
        // the chain is read again: nothing else has written to the disk
        let extents = self.extents(disk, index)?;
        for (offset, size) in extents {
            let (part, rest) = left.split_at(left.len().min(size as usize));
            write_at(disk, offset, part).map_err(wrong)?;
            left = rest;
        }
        disk.sync().map_err(wrong)?;
        let slot = &mut self.slots[index];
        slot.name = format!("{PREFIX}{version}+{tries}{SUFFIX}");
        slot.version = Some(version.into());
        slot.tries = Some(tries);
        slot.size = image.len() as u64;
        self.write(disk)
    }

    /// Ends the counting of the tries of the image of this version. Returns whether they were counted.
    pub fn bless(&mut self, disk: &mut impl Writable, version: &str) -> Result<bool, Error> {
        let of_version = |it: &&mut Slot| it.version.as_deref() == Some(version);
        match self.slots.iter_mut().find(of_version) {
            Some(slot) if slot.tries.is_some() => {
                slot.name = format!("{PREFIX}{version}{SUFFIX}");
                slot.tries = None;
                self.write(disk).map(|()| true)
            }
            _ => Ok(false),
        }
    }

    /// Returns where the clusters of a file are.
    fn extents(&self, disk: &mut impl Writable, index: usize) -> Result<Vec<(u64, u64)>, Error> {
        let mut esp = Fat::open(&mut *disk, self.start)?;
        esp.extents(self.slots[index].first_cluster)
    }

    /// Replaces the folder by one write of its first sector. What is behind it is cleared later: readers stop before.
    fn write(&self, disk: &mut impl Writable) -> Result<(), Error> {
        let mut entries = self.dots.clone();
        for (index, slot) in self.slots.iter().enumerate() {
            entries.extend(slot.entries(index + 1));
        }
        if entries.len() > MAX_ENTRIES {
            return Err(Error::Unsupported(format!(
                "{FOLDER} has too many files: {} entries, at most {MAX_ENTRIES} fit into a sector",
                entries.len()
            )));
        }
        let mut sector = entries.concat();
        sector.resize(SECTOR, 0);
        let wrong = |error| Error::Read(format!("cannot write to {FOLDER}"), error);
        let first = self.folder.first().map_or(0, |(offset, _)| *offset);
        write_at(disk, first, &sector)
            .and_then(|()| disk.sync())
            .map_err(wrong)?;
        let zeros = [0; SECTOR];
        let sectors = self.folder.iter().flat_map(|(offset, size)| {
            (0..*size / SECTOR as u64).map(move |it| offset + it * SECTOR as u64)
        });
        for offset in sectors.skip(1).take(MAX_CLEARED) {
            write_at(disk, offset, &zeros).map_err(wrong)?;
        }
        disk.sync().map_err(wrong)
    }
}

impl Slot {
    fn of(entry: DirectoryEntry, room: u64) -> Slot {
        let (version, tries) = match parsed(&entry.name) {
            Some((version, tries)) => (Some(version), tries),
            None => (None, None),
        };
        Slot {
            version,
            tries,
            room,
            name: entry.name,
            first_cluster: entry.first_cluster,
            size: entry.size,
        }
    }

    /// Returns the entries of the file: those of its long name, the last part first, and that of its short name.
    fn entries(&self, number: usize) -> Vec<[u8; ENTRY]> {
        let mut short = [b' '; 11];
        let is_spare = SPARES.contains(&self.name.as_str());
        let text = if is_spare {
            self.name.clone()
        } else {
            format!("FIRST~{number:02}EFI")
        };
        for (to, from) in short.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        let mut entries = if is_spare {
            vec![]
        } else {
            long_name(&self.name, checksum(&short))
        };
        let mut entry = [0; ENTRY];
        entry[..11].copy_from_slice(&short);
        entry[11] = ARCHIVE;
        for date in DATES {
            entry[date..date + 2].copy_from_slice(&FIRST_DAY.to_le_bytes());
        }
        let cluster = (self.first_cluster as u32).to_le_bytes();
        entry[20..22].copy_from_slice(&cluster[2..]);
        entry[26..28].copy_from_slice(&cluster[..2]);
        entry[28..].copy_from_slice(&(self.size as u32).to_le_bytes());
        entries.push(entry);
        entries
    }
}

/// Returns the version in the name of an image, and the tries that are left.
fn parsed(name: &str) -> Option<(String, Option<u32>)> {
    let name = name.to_ascii_lowercase();
    let stem = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    let Some((version, counters)) = stem.split_once('+') else {
        return Some((stem.into(), None));
    };
    let left = counters
        .split_once('-')
        .map_or(counters, |(left, _done)| left);
    Some((version.into(), Some(left.parse().ok()?)))
}

fn long_name(name: &str, checksum: u8) -> Vec<[u8; ENTRY]> {
    let mut units: Vec<u16> = name.encode_utf16().collect();
    if !units.len().is_multiple_of(UNITS) {
        units.push(0);
    }
    let parts: Vec<&[u16]> = units.chunks(UNITS).collect();
    let count = parts.len();
    let entry = |(index, part): (usize, &&[u16])| {
        let mut entry = [0; ENTRY];
        let last = if index + 1 == count { LAST } else { 0 };
        entry[0] = (index as u8 + 1) | last;
        entry[11] = LONG_NAME;
        entry[13] = checksum;
        let places = LONG_NAME_UNITS.iter().flat_map(|it| it.clone().step_by(2));
        let units = part.iter().copied().chain(std::iter::repeat(0xffff));
        for (place, unit) in places.zip(units) {
            entry[place..place + 2].copy_from_slice(&unit.to_le_bytes());
        }
        entry
    };
    parts.iter().enumerate().map(entry).rev().collect()
}

/// Returns the checksum of a short name, which the entries of its long name have.
fn checksum(short: &[u8; 11]) -> u8 {
    short
        .iter()
        .fold(0u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte))
}

fn write_at(disk: &mut impl Writable, offset: u64, bytes: &[u8]) -> io::Result<()> {
    disk.seek(SeekFrom::Start(offset))?;
    disk.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Cursor;
    use std::path::PathBuf;
    use std::process::Command;

    use support::boot_image::run;
    use support::mutation::mutations;

    use super::*;

    const MIB: usize = 1 << 20;
    const RUNNING: &[u8] = &[0x11; 3000];
    const NEW: &[u8] = &[0x22; 9000];

    /// A disk in memory that keeps each sector that is written.
    struct Recorder {
        bytes: Cursor<Vec<u8>>,
        written: Vec<(usize, Vec<u8>)>,
    }

    impl Read for Recorder {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.bytes.read(buffer)
        }
    }

    impl Seek for Recorder {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.bytes.seek(to)
        }
    }

    impl Write for Recorder {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            let at = self.bytes.position() as usize;
            for (index, sector) in buffer.chunks(SECTOR).enumerate() {
                self.written.push((at + index * SECTOR, sector.to_vec()));
            }
            self.bytes.write(buffer)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Writable for Recorder {
        fn sync(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn recorder(bytes: Vec<u8>) -> Recorder {
        Recorder {
            bytes: Cursor::new(bytes),
            written: vec![],
        }
    }

    /// A partition as `make mkosi` makes it, by the programs that it uses.
    fn partition() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("esp"), vec![0; 36 * MIB]).unwrap();
        run(Command::new("/usr/sbin/mkfs.vfat")
            .args(["-F", "32", "-s", "1"])
            .arg(path("esp")));
        fs::write(path("spare"), vec![0; 16 << 10]).unwrap();
        fs::write(path("running"), RUNNING).unwrap();
        let mtool = |name: &str| {
            let mut command = Command::new(name);
            command.env("MTOOLS_SKIP_CHECK", "1");
            command.arg("-i").arg(path("esp"));
            command
        };
        run(mtool("mmd").args(["::EFI", "::EFI/Linux"]));
        for (from, to) in [
            ("spare", "SPARE1"),
            ("spare", "SPARE2"),
            ("running", "firstlight_0.1.0.efi"),
        ] {
            run(mtool("mcopy")
                .arg(path(from))
                .arg(format!("::EFI/Linux/{to}")));
        }
        fs::read(path("esp")).unwrap()
    }

    /// Returns the names and contents of the images that systemd-boot finds, as mtools reads them.
    fn read_by_mtools(esp: &[u8]) -> Vec<(String, Vec<u8>)> {
        let folder = tempfile::tempdir().unwrap();
        let file: PathBuf = folder.path().join("esp");
        fs::write(&file, esp).unwrap();
        // a file may have more clusters than bytes, and that is the only thing that is unusual
        let checked = Command::new("/usr/sbin/fsck.vfat")
            .arg("-n")
            .arg(&file)
            .output()
            .unwrap();
        let checked = String::from_utf8(checked.stdout).unwrap();
        for wrong in [
            "shares",
            "Bad",
            "nused",
            "rphan",
            "long file name",
            "Duplicate",
        ] {
            assert!(!checked.contains(wrong), "{checked}");
        }
        let listed = run(Command::new("mdir")
            .args(["-b", "-i"])
            .arg(&file)
            .arg("::EFI/Linux"));
        let dated = run(Command::new("mdir")
            .arg("-i")
            .arg(&file)
            .arg("::EFI/Linux/SPARE?"));
        let spares = dated.lines().filter(|line| line.starts_with("SPARE"));
        for line in spares {
            assert!(line.contains(" 1980-01-01 "), "{line}");
        }
        let images = listed.lines().filter(|line| line.ends_with(".efi"));
        let mut found: Vec<_> = images
            .map(|path| {
                let out = folder.path().join("out");
                run(Command::new("mcopy")
                    .args(["-n", "-o", "-i"])
                    .arg(&file)
                    .arg(path)
                    .arg(&out));
                let name = path.rsplit('/').next().unwrap();
                (name.to_owned(), fs::read(out).unwrap())
            })
            .collect();
        found.sort();
        found
    }

    fn read_by_us(esp: &[u8]) -> Vec<(String, Vec<u8>)> {
        let mut fat = Fat::open(Cursor::new(esp), 0).unwrap();
        let names: Vec<String> = fat
            .list(FOLDER)
            .unwrap()
            .unwrap()
            .into_iter()
            .map(|it| it.name)
            .collect();
        let images = names.into_iter().filter(|name| name.ends_with(SUFFIX));
        let mut found: Vec<_> = images
            .map(|name| {
                let content = fat.read(&format!("{FOLDER}/{name}")).unwrap().unwrap();
                (name, content)
            })
            .collect();
        found.sort();
        found
    }

    fn update(disk: &mut Recorder, running: &str, version: &str, image: &[u8]) {
        let mut slots = Slots::read(disk, 0).unwrap();
        slots.keep_only(disk, running).unwrap();
        slots.add(disk, version, running, image, 3).unwrap();
    }

    fn file(name: &str, content: &[u8]) -> (String, Vec<u8>) {
        (name.to_owned(), content.to_vec())
    }

    #[test]
    fn mtools_reads_the_images_after_many_updates() {
        let mut disk = recorder(partition());
        update(&mut disk, "0.1.0", "0.2.0", NEW);
        let first = file("firstlight_0.1.0.efi", RUNNING);
        assert_eq!(
            read_by_mtools(disk.bytes.get_ref()),
            [first, file("firstlight_0.2.0+3.efi", NEW)]
        );
        for number in 2..12 {
            let (running, next) = (format!("0.{number}.0"), format!("0.{}.0", number + 1));
            let mut slots = Slots::read(&mut disk, 0).unwrap();
            assert!(slots.bless(&mut disk, &running).unwrap());
            assert!(!slots.bless(&mut disk, &running).unwrap());
            let image = vec![number as u8; 1000 * number];
            update(&mut disk, &running, &next, &image);
            let kept = format!("firstlight_{running}.efi");
            let found = read_by_mtools(disk.bytes.get_ref());
            let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
            let mut expected = [kept, format!("firstlight_{next}+3.efi")];
            expected.sort();
            assert_eq!(names, expected);
            assert!(found.iter().any(|(_, content)| *content == image));
        }
    }

    /// Each sector may be the last one that is written.
    #[test]
    fn a_power_cut_at_any_sector_leaves_the_running_image_and_the_update_can_be_repeated() {
        let before = partition();
        let mut disk = recorder(before.clone());
        update(&mut disk, "0.1.0", "0.2.0", NEW);
        let mut slots = Slots::read(&mut disk, 0).unwrap();
        slots.bless(&mut disk, "0.2.0").unwrap();
        let running = file("firstlight_0.1.0.efi", RUNNING);
        let (trial, blessed) = (
            file("firstlight_0.2.0+3.efi", NEW),
            file("firstlight_0.2.0.efi", NEW),
        );
        let mut state = before;
        let mut seen = [0; 3];
        assert!(disk.written.len() > 18, "{}", disk.written.len());
        for (at, sector) in &disk.written {
            state[*at..*at + sector.len()].copy_from_slice(sector);
            let found = read_by_us(&state);
            let kind = match &found[..] {
                [only] if *only == running => 0,
                [old, new] if *old == running && *new == trial => 1,
                [old, new] if *old == running && *new == blessed => 2,
                other => panic!("{:?}", other.iter().map(|it| &it.0).collect::<Vec<_>>()),
            };
            seen[kind] += 1;
            if kind == 0 {
                let mut again = recorder(state.clone());
                update(&mut again, "0.1.0", "0.2.0", NEW);
                assert_eq!(
                    read_by_us(again.bytes.get_ref()),
                    [running.clone(), trial.clone()]
                );
            }
        }
        assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    }

    #[test]
    fn the_image_of_an_older_update_does_not_boot_while_its_slot_is_overwritten() {
        let mut disk = recorder(partition());
        update(&mut disk, "0.1.0", "0.2.0", NEW);
        let mut slots = Slots::read(&mut disk, 0).unwrap();
        slots.keep_only(&mut disk, "0.1.0").unwrap();
        let running = file("firstlight_0.1.0.efi", RUNNING);
        assert_eq!(read_by_mtools(disk.bytes.get_ref()), [running]);
        let error = slots.keep_only(&mut disk, "0.3.0").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("no image of the running version 0.3.0")
        );
    }

    #[test]
    fn an_image_that_has_no_room_changes_nothing() {
        let mut disk = recorder(partition());
        let mut slots = Slots::read(&mut disk, 0).unwrap();
        assert_eq!(slots.room_beside("0.1.0"), 16 << 10);
        slots.keep_only(&mut disk, "0.1.0").unwrap();
        let before = disk.bytes.get_ref().clone();
        let image = vec![1; (16 << 10) + 1];
        let error = slots
            .add(&mut disk, "0.2.0", "0.1.0", &image, 3)
            .unwrap_err();
        assert!(error.to_string().contains("16385 bytes"), "{error}");
        assert!(before == *disk.bytes.get_ref());
    }

    #[test]
    fn names_of_systemd_boot_are_read() {
        let of = |name: &str| parsed(name);
        assert_eq!(of("firstlight_0.2.0.efi"), Some(("0.2.0".into(), None)));
        assert_eq!(
            of("FIRSTLIGHT_0.2.0+3.EFI"),
            Some(("0.2.0".into(), Some(3)))
        );
        assert_eq!(
            of("firstlight_0.2.0+0-3.efi"),
            Some(("0.2.0".into(), Some(0)))
        );
        for other in [
            "firstlight_0.2.0",
            "SPARE1",
            "a.efi",
            "firstlight_0.2.0+x.efi",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    /// The host can write anything to the partition.
    #[test]
    fn a_mutated_partition_gives_an_error_or_is_changed_within_its_bounds() {
        let genuine = partition();
        let structure = 0..genuine.len() / 40;
        for mutated in mutations(&genuine[structure.clone()], 300) {
            let mut bytes = genuine.clone();
            let length = mutated.len().min(structure.end);
            bytes[..length].copy_from_slice(&mutated[..length]);
            let mut disk = recorder(bytes);
            if let Ok(mut slots) = Slots::read(&mut disk, 0) {
                let _ = slots.keep_only(&mut disk, "0.1.0");
                let _ = slots.add(&mut disk, "0.2.0", "0.1.0", NEW, 3);
            }
            assert_eq!(disk.bytes.get_ref().len(), genuine.len());
        }
    }
}
