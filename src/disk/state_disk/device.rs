//! Finds the state disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Error;
use super::mark::{Mark, mark, serial};
use base::boot::timeline::Timeline;
use base::file::sorted_names;
use base::machines::Cloud;
use base::stop::Stop;

/// The serial number that marks the state disk among a VM's virtio disks.
const SERIAL: &str = "state";
/// The directory in which the kernel lists block devices.
const BLOCK_DEVICES: &str = "/sys/block";
/// Maximum time to wait for the disk: disks appear some time after their driver is loaded.
const MAX_WAIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Waits for the state disk and returns its path: `wanted` if given, else the disk with serial
/// number `state`, else the disk that the cloud marks.
///
/// # Errors
/// [`Error::NoDisk`] after 60 s, [`Error::Stopped`] when `stop` is set.
pub fn find(
    wanted: Option<&Path>,
    cloud: Cloud,
    stop: &Stop,
    timeline: &Timeline,
) -> Result<PathBuf, Error> {
    let usual = mark(cloud);
    let start = Instant::now();
    let mut next_report = REPORT_INTERVAL;
    loop {
        let disk = match wanted {
            Some(path) => Some(path.into()),
            None => state_disk_in(Path::new(BLOCK_DEVICES), usual)?
                .map(|name| Path::new("/dev").join(name)),
        };
        if let Some(disk) = disk.filter(|disk| disk.exists()) {
            return Ok(disk);
        }
        let waited = start.elapsed();
        if waited >= MAX_WAIT {
            return Err(Error::NoDisk {
                wanted: describe(wanted, usual),
                seen: seen_in(Path::new(BLOCK_DEVICES), usual),
                waited,
            });
        }
        if waited >= next_report {
            next_report += REPORT_INTERVAL;
            timeline.event(
                "waiting",
                format_args!(
                    "for {}, {} s so far",
                    describe(wanted, usual),
                    waited.as_secs()
                ),
            );
        }
        if stop.wait(POLL_INTERVAL) {
            return Err(Error::Stopped("looking for the state disk"));
        }
    }
}

fn describe(wanted: Option<&Path>, usual: &Mark) -> String {
    match wanted {
        Some(path) => format!("the disk {}", path.display()),
        None => {
            format!(
                "a disk with serial number {SERIAL:?}, or {}",
                usual.description
            )
        }
    }
}

/// Returns the name of the state disk in the directory `block_devices`. A disk without the mark is
/// never the state disk, even if it is the only one: the state disk may not have appeared yet.
///
/// # Errors
/// [`Error::Ambiguous`] if several disks have the mark: one may be a copy.
fn state_disk_in(block_devices: &Path, usual: &Mark) -> Result<Option<String>, Error> {
    let is_usual = |name: &String| {
        (usual.label_of)(block_devices, name).is_some_and(|label| label == usual.label)
    };
    // one of several paths to a disk of NVMe
    let is_hidden = |name: &String| {
        let hidden = fs::read_to_string(block_devices.join(name).join("hidden"));
        hidden.is_ok_and(|hidden| hidden.trim() == "1")
    };
    let mut names = sorted_names(block_devices);
    names.retain(|name| !is_hidden(name));
    let is_marked = |name: &String| serial(block_devices, name) == SERIAL;
    if names.iter().any(is_marked) {
        names.retain(is_marked)
    } else {
        names.retain(is_usual)
    }
    match &names[..] {
        [] | [_] => Ok(names.pop()),
        several => Err(Error::Ambiguous(several.join(", "), describe(None, usual))),
    }
}

/// Returns the disks in the directory `block_devices` with their serial numbers and the labels of
/// the cloud.
fn seen_in(block_devices: &Path, usual: &Mark) -> String {
    let names = sorted_names(block_devices);
    let disks = names.iter().filter(|name| !name.starts_with("loop"));
    let seen = disks.map(|name| {
        let serial = serial(block_devices, name);
        let label = (usual.label_of)(block_devices, name).filter(|label| label != name);
        let mut marks = vec![];
        marks.extend((!serial.is_empty()).then(|| format!("serial number {serial:?}")));
        marks.extend(label.map(|label| format!("label {label:?}")));
        if marks.is_empty() {
            name.clone()
        } else {
            format!("{name} ({})", marks.join(", "))
        }
    });
    seen.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The state disk of machines whose disks have no labels.
    fn usual() -> &'static Mark {
        mark(Cloud::Qemu)
    }

    fn found(block_devices: &Path, usual: &Mark) -> Option<String> {
        state_disk_in(block_devices, usual).unwrap()
    }

    #[test]
    fn of_several_disks_with_the_mark_none_is_taken() {
        let sys = tempfile::tempdir().unwrap();
        let add = |name: &str, file: &str, content: &str| {
            fs::create_dir_all(sys.path().join(name)).unwrap();
            fs::write(sys.path().join(name).join(file), content).unwrap();
        };
        add("vdb", "serial", "state");
        add("vdc", "serial", "state");
        let why = state_disk_in(sys.path(), usual()).unwrap_err().to_string();
        assert!(
            why.contains(
                "several disks (vdb, vdc) match: each is a disk with serial number \"state\""
            ),
            "{why}"
        );
        // a disk of another serial number, and another path to the same disk
        add("vdc", "serial", "copy");
        add("vdd", "serial", "state");
        add("vdd", "hidden", "1\n");
        assert_eq!(found(sys.path(), usual()).as_deref(), Some("vdb"));
        // the labels of a cloud
        let labelled = Mark {
            description: "the disk with the label state-disk",
            label: "state-disk",
            label_of: |_, name| name.starts_with("nvme").then(|| "state-disk".into()),
        };
        add("nvme0n1", "size", "1");
        assert_eq!(found(sys.path(), &labelled).as_deref(), Some("vdb"));
        add("vdb", "serial", "");
        assert_eq!(found(sys.path(), &labelled).as_deref(), Some("nvme0n1"));
        add("nvme0n2", "size", "1");
        assert!(state_disk_in(sys.path(), &labelled).is_err());
    }

    #[test]
    fn the_disks_are_described_with_what_marks_them() {
        let sys = tempfile::tempdir().unwrap();
        for (name, serial) in [("sda", "vol01"), ("sdb", "")] {
            fs::create_dir(sys.path().join(name)).unwrap();
            fs::write(sys.path().join(name).join("serial"), serial).unwrap();
        }
        let labelled = Mark {
            description: "the disk with the label state-disk",
            label: "state-disk",
            label_of: |_, name| (name == "sdb").then(|| "state-disk".into()),
        };
        assert_eq!(
            seen_in(sys.path(), &labelled),
            "sda (serial number \"vol01\") sdb (label \"state-disk\")"
        );
        assert_eq!(found(sys.path(), &labelled).as_deref(), Some("sdb"));
        assert_eq!(
            seen_in(sys.path(), usual()),
            "sda (serial number \"vol01\") sdb"
        );
        assert_eq!(found(sys.path(), usual()), None);
    }

    #[test]
    fn a_named_disk_is_found_when_it_exists() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        let found = find(
            Some(disk.path()),
            Cloud::Qemu,
            &Stop::new(),
            &Timeline::new("test"),
        )
        .unwrap();
        assert_eq!(found, disk.path());
    }

    #[test]
    fn a_disk_with_another_serial_number_is_never_the_state_disk() {
        let sys = tempfile::tempdir().unwrap();
        let add = |name: &str, serial: &str| {
            fs::create_dir(sys.path().join(name)).unwrap();
            fs::write(sys.path().join(name).join("serial"), serial).unwrap();
        };
        add("vda", "");
        assert_eq!(found(sys.path(), usual()), None);
        add("vdb", "data");
        assert_eq!(found(sys.path(), usual()), None);
        add("vdc", "state\n");
        assert_eq!(found(sys.path(), usual()).as_deref(), Some("vdc"));
    }

    #[test]
    fn without_serial_numbers_the_disk_of_the_old_system_is_found() {
        let sys = tempfile::tempdir().unwrap();
        for name in ["vda", "vdb", "vdc"] {
            fs::create_dir(sys.path().join(name)).unwrap();
        }
        assert_eq!(found(sys.path(), usual()).as_deref(), Some("vdb"));
    }

    #[test]
    fn the_search_ends_when_stopped() {
        let stop = Stop::new();
        stop.stop();
        let result = find(
            Some(Path::new("/nonexistent")),
            Cloud::Qemu,
            &stop,
            &Timeline::new("test"),
        );
        assert!(matches!(result, Err(Error::Stopped(_))));
    }
}
