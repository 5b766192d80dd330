//! Finding the state disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Error;
use base::stop::Stop;
use base::timeline::Timeline;

/// The serial number that marks the state disk among a VM's virtio disks.
const SERIAL: &str = "state";
/// What it is called in the old system's QEMU machines, which give their disks no serial number.
const OLD_QEMU_DISK: &str = "vdb";
/// Where the kernel lists its block devices.
const BLOCK_DEVICES: &str = "/sys/block";
/// Disks appear in their own time after the drivers are loaded.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);
const SAY_EVERY: Duration = Duration::from_secs(5);

/// The disk at `wanted`, else the one whose serial number is `state`, else the old system's; waits until it appears.
pub fn find(wanted: Option<&Path>, stop: &Stop, timeline: &Timeline) -> Result<PathBuf, Error> {
    let start = Instant::now();
    let mut next_word = SAY_EVERY;
    loop {
        let disk = wanted
            .map(PathBuf::from)
            .or_else(|| Some(Path::new("/dev").join(look(Path::new(BLOCK_DEVICES))?)));
        if let Some(disk) = disk.filter(|disk| disk.exists()) {
            return Ok(disk);
        }
        let waited = start.elapsed();
        if waited >= PATIENCE {
            return Err(Error::NoDisk {
                wanted: describe(wanted),
                seen: names(Path::new(BLOCK_DEVICES)).join(" "),
                waited,
            });
        }
        if waited >= next_word {
            next_word += SAY_EVERY;
            timeline.event(
                "waiting",
                format_args!("for {} since {} s", describe(wanted), waited.as_secs()),
            );
        }
        if stop.wait(LOOK_EVERY) {
            return Err(Error::Stopped("looking for the state disk"));
        }
    }
}

fn describe(wanted: Option<&Path>) -> String {
    match wanted {
        Some(path) => format!("the disk {}", path.display()),
        None => {
            format!("a disk with serial number {SERIAL:?}, or one without as /dev/{OLD_QEMU_DISK}")
        }
    }
}

/// The name of the state disk among the kernel's `block_devices`. A disk with another serial number is another disk, wherever it is:
/// ours may just not have appeared yet.
fn look(block_devices: &Path) -> Option<String> {
    let serial = |name: &str| {
        fs::read_to_string(block_devices.join(name).join("serial")).unwrap_or_default()
    };
    let is_old = |name: &String| name == OLD_QEMU_DISK && serial(name).trim().is_empty();
    let names = names(block_devices);
    names
        .iter()
        .find(|name| serial(name).trim() == SERIAL)
        .or_else(|| names.iter().find(|name| is_old(name)))
        .cloned()
}

fn names(block_devices: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(block_devices) else {
        return vec![];
    };
    let mut names: Vec<_> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_disk_is_taken_when_it_is_there() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        let found = find(Some(disk.path()), &Stop::new(), &Timeline::new("test")).unwrap();
        assert_eq!(found, disk.path());
    }

    #[test]
    fn the_serial_number_decides_and_a_disk_with_another_one_is_never_taken() {
        let sys = tempfile::tempdir().unwrap();
        let add = |name: &str, serial: &str| {
            fs::create_dir(sys.path().join(name)).unwrap();
            fs::write(sys.path().join(name).join("serial"), serial).unwrap();
        };
        add("vda", "");
        assert_eq!(look(sys.path()), None);
        add("vdb", "data");
        assert_eq!(look(sys.path()), None);
        add("vdc", "state\n");
        assert_eq!(look(sys.path()).as_deref(), Some("vdc"));
    }

    #[test]
    fn without_serial_numbers_it_is_the_old_systems() {
        let sys = tempfile::tempdir().unwrap();
        for name in ["vda", "vdb", "vdc"] {
            fs::create_dir(sys.path().join(name)).unwrap();
        }
        assert_eq!(look(sys.path()).as_deref(), Some("vdb"));
    }

    #[test]
    fn the_search_ends_when_stopped() {
        let stop = Stop::new();
        stop.stop();
        let result = find(
            Some(Path::new("/nonexistent")),
            &stop,
            &Timeline::new("test"),
        );
        assert!(matches!(result, Err(Error::Stopped(_))));
    }
}
