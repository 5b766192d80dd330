//! Lets the shell script `tests/boot/cases/dm.sh` in a test guest call `device_mapper` and
//! `state_disk::filesystem`. Each run makes one call and prints its duration.

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use base::crypto::Secret;
use base::stop::Stop;
use disk::device_mapper::{self, FirstUse, Mapping};
use disk::luks::Geometry;
use disk::state_disk::filesystem;

const USAGE: &str = "usage:
  dm_guest open NAME LUKS_UUID DEVICE VOLUME_KEY_FILE integrity|plain create|existing
  dm_guest close NAME
  dm_guest is-active NAME          exit code 0 if it is, 1 if not
  dm_guest mkfs MAPPED MKE2FS
  dm_guest mount MAPPED DIRECTORY rw|ro
  dm_guest unmount DIRECTORY";

fn main() -> ExitCode {
    log::set_logger(&Stderr).expect("the first logger");
    log::set_max_level(log::LevelFilter::Info);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let start = Instant::now();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(text) => {
            println!("{text}[{:.3} s]", start.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<String, String> {
    match arguments {
        ["open", name, uuid, device, key_file, integrity, first_use] => {
            let key =
                Secret::new(fs::read(key_file).map_err(|error| format!("{key_file}: {error}"))?);
            let has_integrity = *integrity == "integrity";
            let geometry = Geometry {
                uuid: (*uuid).into(),
                has_integrity,
                key_size: if has_integrity { 96 } else { 64 },
                digest_id: 0,
            };
            let mapping = Mapping {
                name,
                geometry: &geometry,
                device: Path::new(device),
                key: &key,
            };
            let first_use = if *first_use == "create" {
                FirstUse::Create
            } else {
                FirstUse::Existing
            };
            said(
                device_mapper::open(&mapping, first_use).map(|path| format!("{} ", path.display())),
            )
        }
        ["close", name] => said(device_mapper::close(name).map(|()| String::new())),
        ["is-active", name] => match is_active(name) {
            true => Ok("active ".into()),
            false => Err(format!("{name} is not active")),
        },
        ["mkfs", mapped, mke2fs] => said(
            filesystem::create(Path::new(mapped), Path::new(mke2fs), &Stop::new())
                .map(|()| String::new()),
        ),
        ["mount", mapped, at, mode] => said(
            filesystem::mount(Path::new(mapped), Path::new(at), *mode == "ro")
                .map(|()| String::new()),
        ),
        ["unmount", at] => said(filesystem::unmount(Path::new(at)).map(|()| String::new())),
        _ => Err(USAGE.into()),
    }
}

/// Returns whether the kernel has a device of this name that has a table and is not suspended.
fn is_active(name: &str) -> bool {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let read = |device: &fs::DirEntry, file| fs::read_to_string(device.path().join(file));
    devices
        .filter(|device| read(device, "dm/name").is_ok_and(|found| found.trim() == name))
        .filter(|device| read(device, "dm/suspended").is_ok_and(|found| found.trim() == "0"))
        .any(|device| read(&device, "size").is_ok_and(|found| found.trim() != "0"))
}

fn said<T, E: std::fmt::Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

struct Stderr;

impl log::Log for Stderr {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        eprintln!("{}: {}", record.level(), record.args());
    }

    fn flush(&self) {}
}
