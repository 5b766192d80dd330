//! Finding the state disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Error;
use crate::stop::Stop;
use crate::timeline::Timeline;

/// The serial number that marks the state disk among a VM's virtio disks.
const SERIAL: &str = "state";
/// Where the old system's QEMU machines have it, which give their disks no serial number.
const OLD_QEMU_DISK: &str = "/dev/vdb";
/// Disks appear in their own time after the drivers are loaded.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);
const SAY_EVERY: Duration = Duration::from_secs(5);

/// The disk at `wanted`, else the one whose serial number is `state`, else the old system's; waits until it appears.
pub fn find(wanted: Option<&Path>, stop: &Stop, timeline: &Timeline) -> Result<PathBuf, Error> {
    let start = Instant::now();
    let mut next_word = SAY_EVERY;
    loop {
        if let Some(disk) = look(wanted) {
            return Ok(disk);
        }
        let waited = start.elapsed();
        if waited >= PATIENCE {
            return Err(Error::NoDisk { wanted: describe(wanted), seen: block_devices().join(" "), waited });
        }
        if waited >= next_word {
            next_word += SAY_EVERY;
            timeline.event("waiting", format_args!("for {} since {} s", describe(wanted), waited.as_secs()));
        }
        if stop.wait(LOOK_EVERY) {
            return Err(Error::Stopped("looking for the state disk"));
        }
    }
}

fn describe(wanted: Option<&Path>) -> String {
    match wanted {
        Some(path) => format!("the disk {}", path.display()),
        None => format!("a disk with serial number {SERIAL:?}, or {OLD_QEMU_DISK}"),
    }
}

fn look(wanted: Option<&Path>) -> Option<PathBuf> {
    if let Some(path) = wanted {
        return path.exists().then(|| path.into());
    }
    let by_serial = block_devices().into_iter().find(|name| {
        let serial = Path::new("/sys/block").join(name).join("serial");
        fs::read_to_string(serial).is_ok_and(|serial| serial.trim() == SERIAL)
    });
    let candidate = by_serial.map_or(PathBuf::from(OLD_QEMU_DISK), |name| Path::new("/dev").join(name));
    candidate.exists().then_some(candidate)
}

fn block_devices() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return vec![] };
    let mut names: Vec<_> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_disk_is_taken_when_it_is_there() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(look(Some(disk.path())).as_deref(), Some(disk.path()));
        assert_eq!(look(Some(Path::new("/nonexistent"))), None);
    }

    #[test]
    fn the_search_ends_when_stopped() {
        let stop = Stop::new();
        stop.stop();
        let result = find(Some(Path::new("/nonexistent")), &stop, &Timeline::new("test"));
        assert!(matches!(result, Err(Error::Stopped(_))));
    }
}
