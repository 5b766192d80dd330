//! The partitions of the running image, and those of the next one.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use super::error::Error;
use super::version::ImageVersion;

/// The words of the kernel command line, which is measured: the version, and how the root file system is found.
const VERSION: &str = "firstlight-image=";
const ROOT: &str = "systemd.verity_root_data=";
/// The name of the device with the verified root file system.
const DEVICE: &str = "root";
/// The names of the partitions (`mkosi/mkosi.repart`).
const ESP: &str = "esp";
const SLOTS: [[&str; 2]; 2] = [
    ["firstlight-a", "firstlight-a-verity"],
    ["firstlight-b", "firstlight-b-verity"],
];

/// The parameters of a kernel command line about its image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Words {
    /// The version.
    pub version: ImageVersion,
    /// The name by which the initrd finds the root file system: it must differ between the slots.
    pub root: String,
}

impl Words {
    /// Parses a kernel command line; `None` if this is not an image with slots.
    pub fn of(command_line: &str) -> Option<Words> {
        let value = |name: &str| {
            let mut words = command_line.split_whitespace();
            words.find_map(|word| word.strip_prefix(name))
        };
        Some(Words {
            version: ImageVersion::parse(value(VERSION)?)?,
            root: value(ROOT)?.to_owned(),
        })
    }
}

/// The disk of the running image.
#[derive(Debug, Clone)]
pub struct ImageDisk {
    /// The parameters of the running kernel.
    pub running: Words,
    /// The whole disk.
    pub disk: PathBuf,
    /// The EFI system partition: a file, and where the partition begins in it.
    pub esp: (PathBuf, u64),
    /// The partition for the root file system of the slot that does not run.
    pub root: PathBuf,
    /// The partition for its hashes.
    pub hashes: PathBuf,
}

impl ImageDisk {
    /// Finds the disk from which this machine runs. `files` is `/`.
    ///
    /// The kernel says from which partitions the verified root file system comes. Their neighbours are found by the names in the
    /// partition table. The host can change the table, and so where an update is written: on this disk, which is the host's anyway.
    pub fn find(files: &Path) -> Result<ImageDisk, Error> {
        let path = files.join("proc/cmdline");
        let line = fs::read_to_string(&path).map_err(|error| Error::io(&path, error))?;
        let running = Words::of(&line).ok_or(Error::NoSlots)?;
        let block = files.join("sys/class/block");
        let device = devices(&block)?
            .into_iter()
            .find(|it| read(&it.join("dm/name")) == DEVICE)
            .ok_or(Error::NoSlots)?;
        let running_parts: Vec<PathBuf> = devices(&device.join("slaves"))?;
        let names: Vec<String> = running_parts.iter().map(|it| name_of(it)).collect();
        let is_running = |slot: &[&str; 2]| names.iter().any(|name| *name == slot[0]);
        let other = SLOTS.iter().find(|slot| !is_running(slot));
        let ([root, hashes], true) = (other.ok_or(Error::NoSlots)?, SLOTS.iter().any(is_running))
        else {
            return Err(Error::NoSlots);
        };
        let part = running_parts.first().ok_or(Error::NoSlots)?;
        let part = fs::canonicalize(part).map_err(|error| Error::io(part, error))?;
        let disk = part.parent().ok_or(Error::NoSlots)?;
        let of_disk = devices(disk)?;
        let partition = |name: &str| {
            let found = of_disk.iter().find(|it| name_of(it) == name);
            let found = found.and_then(|it| it.file_name());
            found
                .map(|device| files.join("dev").join(device))
                .ok_or_else(|| Error::Partition(name.to_owned()))
        };
        Ok(ImageDisk {
            running,
            disk: files.join("dev").join(disk.file_name().unwrap_or_default()),
            esp: (partition(ESP)?, 0),
            root: partition(root)?,
            hashes: partition(hashes)?,
        })
    }
}

fn devices(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(folder).map_err(|error| Error::io(folder, error))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().into()
}

/// Returns the name of a partition in the partition table; empty for another device.
fn name_of(device: &Path) -> String {
    let text = read(&device.join("uevent"));
    let mut lines = text.lines();
    lines
        .find_map(|line| line.strip_prefix("PARTNAME="))
        .unwrap_or_default()
        .to_owned()
}

/// Opens a partition for changes.
pub(super) fn open(path: &Path) -> Result<File, Error> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|error| Error::io(path, error))
}
