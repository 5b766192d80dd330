//! Lets the shell script `tests/boot/cases/dm.sh` in a test guest call `device_mapper` and
//! `state_disk::filesystem`. Each run makes one call and prints its duration.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use base::crypto::Secret;
use base::stop::Stop;
use disk::device_mapper::{self, FirstUse, Mapping};
use disk::luks::Geometry;
use disk::state_disk::filesystem;
use support::mutation::mutations;
use sys::block::{self, PageBuffer};

const USAGE: &str = "usage:
  dm_guest open NAME LUKS_UUID DEVICE VOLUME_KEY_FILE integrity|plain create|existing
  dm_guest close NAME
  dm_guest change-superblocks NAME LUKS_UUID DEVICE VOLUME_KEY_FILE COUNT
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
            let key = key(key_file)?;
            let geometry = geometry(uuid, *integrity == "integrity");
            let first_use = match *first_use {
                "create" => FirstUse::Create,
                _ => FirstUse::Existing,
            };
            let opened = device_mapper::open(&mapping(name, &geometry, device, &key), first_use);
            said(opened.map(|path| format!("{} ", path.display())))
        }
        ["change-superblocks", name, uuid, device, key_file, count] => {
            let (key, geometry) = (key(key_file)?, geometry(uuid, true));
            let count = count.parse().map_err(|error| format!("{count}: {error}"))?;
            change_superblocks(&mapping(name, &geometry, device, &key), count)
        }
        ["close", name] => said(device_mapper::close(name).map(|()| String::new())),
        ["is-active", name] => {
            if is_active(name) {
                Ok("active ".into())
            } else {
                Err(format!("{name} is not active"))
            }
        }
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

fn key(file: &str) -> Result<Secret, String> {
    let bytes = fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    Ok(Secret::new(bytes))
}

fn geometry(uuid: &str, has_integrity: bool) -> Geometry {
    Geometry {
        uuid: uuid.into(),
        has_integrity,
        key_size: if has_integrity { 96 } else { 64 },
        digest_id: 0,
    }
}

fn mapping<'a>(
    name: &'a str,
    geometry: &'a Geometry,
    device: &'a str,
    key: &'a Secret,
) -> Mapping<'a> {
    Mapping {
        name,
        geometry,
        device: Path::new(device),
        key,
    }
}

/// Writes changed superblocks, opens the disk with each, and reads the first block of what opens: it must be
/// the right one, or an error. The kernel's log shows whether the kernel stayed whole.
fn change_superblocks(mapping: &Mapping, count: usize) -> Result<String, String> {
    const AT: u64 = 16 << 20;
    const BLOCK: usize = 4096;
    let open = || said(device_mapper::open(mapping, FirstUse::Existing));
    let close = || said(device_mapper::close(mapping.name));
    let mut data = PageBuffer::new(BLOCK);
    data.bytes_mut().fill(0x5a);
    said(block::open_direct(&open()?).and_then(|it| it.write_all_at(data.bytes(), 0)))?;
    close()?;

    let disk = said(block::open_direct(mapping.device))?;
    let mut superblock = PageBuffer::new(BLOCK);
    said(disk.read_exact_at(superblock.bytes_mut(), AT))?;
    let right = superblock.bytes().to_vec();
    let [mut refused, mut unreadable, mut right_data] = [0; 3];
    // half of them change only the two sizes, which are not the same on each disk
    let anywhere = mutations(&right[..64], count.div_ceil(2)).map(|bytes| (0, bytes));
    let sizes = mutations(&right[12..24], count / 2).map(|bytes| (12, bytes));
    for (start, bytes) in anywhere.chain(sizes) {
        let changed = superblock.bytes_mut();
        changed.copy_from_slice(&right);
        changed[start..start + bytes.len()].copy_from_slice(&bytes);
        said(disk.write_all_at(changed, AT))?;
        let path = match open() {
            Ok(path) => path,
            Err(why) if why.contains("no usable dm-integrity superblock") => {
                refused += 1;
                continue;
            }
            Err(why) => return Err(why),
        };
        let mut read = PageBuffer::new(BLOCK);
        let got = block::open_direct(&path).and_then(|it| it.read_exact_at(read.bytes_mut(), 0));
        match got {
            Err(_) => unreadable += 1,
            Ok(()) if read.bytes() == data.bytes() => right_data += 1,
            Ok(()) => return Err(format!("other data with the bytes {bytes:x?} at {start}")),
        }
        close()?;
    }
    superblock.bytes_mut().copy_from_slice(&right);
    said(disk.write_all_at(superblock.bytes(), AT))?;
    if right_data == 0 {
        return Err("no changed superblock was accepted".into());
    }
    Ok(format!(
        "{refused} refused, {unreadable} unreadable, {right_data} with the right data "
    ))
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
