//! Measures opening and creating the state disk: ours, and cryptsetup with mke2fs, on the same disks in the same machine.
//!
//! `cargo bench --bench unlock` boots one machine (tests/machine). In it, tests/boot/cases/bench.sh runs each side five times, a
//! first boot three times, as a process of its own, and prints the medians. This program also runs in the machine as our side; it
//! calls exactly what `unlock` calls. With emulation instead of KVM, compare the two columns and not the times.
//! FIRSTLIGHT_ACCEL=icount counts instructions, so that other work of the host changes nothing.

#[path = "unlock/throughput.rs"]
mod throughput;

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use base::crypto::Secret;
use base::stop::Stop;
use disk::device_mapper::{self, FirstUse, Mapping};
use disk::luks::{self, Header, Probe};
use disk::state_disk::filesystem;

use machine::case::Case;

const MIB: u64 = 1 << 20;
/// Name of the mapping.
const STATE: &str = "state";
const MKE2FS: &str = "/sbin/mke2fs";
/// The first word of a line with the times of the steps of an opening.
const PARTS: &str = "parts ";

const USAGE: &str = "usage:
  cargo bench --bench unlock                  opening and making
  cargo bench --bench unlock -- throughput    reading and writing
in the machine:
  unlock open DEVICE PASSPHRASE_FILE     probe, keyslot, map
  unlock new DEVICE PASSPHRASE_FILE      format, map, make ext4
  unlock close
  unlock mkfs DEVICE
  unlock raw DEVICE                      speed of a block device
  unlock log FILE DISK                   speed of fsync
  unlock time COMMAND...                 runs it, prints the milliseconds that it took";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let result = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] if std::env::args().len() > 1 => compare(),
        // `cargo test --all-targets` also calls benches, without --bench. That must not boot a machine.
        [] => Ok(()),
        ["open", device, passphrase] => open(Path::new(device), Path::new(passphrase)),
        ["new", device, passphrase] => new(Path::new(device), Path::new(passphrase)),
        ["close"] => device_mapper::close(STATE).map_err(text),
        // the start of a process
        ["nothing"] => Ok(()),
        ["throughput"] => throughput::compare(),
        ["mkfs", device] => make_file_system(Path::new(device)),
        ["raw", device] => throughput::raw(Path::new(device)),
        ["log", file, disk] => throughput::log(Path::new(file), disk),
        ["time", program, arguments @ ..] => time(program, arguments),
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn compare() -> Result<(), String> {
    let this = std::env::current_exe().and_then(fs::read).map_err(text)?;
    let case = Case {
        script: "bench.sh",
        host_programs: &["cryptsetup"],
        files: vec![("/usr/bin/unlock".into(), this)],
        disks: &[("ours", 64 * MIB), ("theirs", 64 * MIB), ("new", 64 * MIB)],
        memory: 1024,
        limit: Duration::from_secs(600),
        ..Case::default()
    };
    let accelerator = machine::script("tools/accel.sh", &[]).map_err(text)?;
    println!("guest: 1 processor, 1 GiB, SeaBIOS, {accelerator}\n");
    println!(
        "| what | firstlight | cryptsetup 2.6 | ratio | firstlight, peak RSS | cryptsetup, peak RSS |"
    );
    println!("|---|---:|---:|---:|---:|---:|");
    let rows = case.run().map_err(text)?;
    let (parts, rows): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.starts_with(PARTS));
    for row in rows {
        println!(
            "{}",
            table_row(row).ok_or_else(|| format!("the machine said {row:?}"))?
        );
    }
    println!();
    parts.iter().for_each(|row| println!("{row}"));
    Ok(())
}

/// Turns `WHAT: ours MS,MS,… KIB theirs MS,MS,… KIB` into a line of the table, with the medians.
fn table_row(row: &str) -> Option<String> {
    let (what, numbers) = row.split_once(": ")?;
    let ["ours", ours, our_memory, "theirs", theirs, their_memory] =
        numbers.split(' ').collect::<Vec<_>>()[..]
    else {
        return None;
    };
    let (ours, theirs) = (median(ours)?, median(theirs)?);
    let mib = |kib: &str| Some(kib.parse::<f64>().ok()? / 1024.0);
    Some(format!(
        "| {what} | {ours:.0} ms | {theirs:.0} ms | {:.1}x | {:.1} MiB | {:.1} MiB |",
        theirs / ours,
        mib(our_memory)?,
        mib(their_memory)?
    ))
}

fn median(list: &str) -> Option<f64> {
    let mut times: Vec<f64> = list
        .split(',')
        .map(|time| time.parse().ok())
        .collect::<Option<_>>()?;
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

fn time(program: &str, arguments: &[&str]) -> Result<(), String> {
    let start = Instant::now();
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(text)?;
    let took = start.elapsed();
    if !output.status.success() {
        return Err(format!(
            "{program}: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    println!("{:.1}", took.as_secs_f64() * 1000.0);
    Ok(())
}

fn open(device: &Path, passphrase: &Path) -> Result<(), String> {
    let start = Instant::now();
    let passphrase = Secret::new(fs::read(passphrase).map_err(text)?);
    let mut disk = fs::File::open(device).map_err(text)?;
    let Probe::Luks(header) = luks::probe(&mut disk).map_err(text)? else {
        return Err(format!("{} has no LUKS2 header", device.display()));
    };
    let probed = start.elapsed();
    let volume_key = header.unlock(&mut disk, &passphrase).map_err(text)?;
    let unlocked = start.elapsed();
    map(device, &header, &volume_key, FirstUse::Existing)?;
    let ms = |took: Duration| took.as_secs_f64() * 1000.0;
    println!(
        "read the header {:.1} ms, the key from the keyslot {:.1} ms, map {:.1} ms",
        ms(probed),
        ms(unlocked - probed),
        ms(start.elapsed() - unlocked)
    );
    Ok(())
}

fn new(device: &Path, passphrase: &Path) -> Result<(), String> {
    let passphrase = Secret::new(fs::read(passphrase).map_err(text)?);
    let volume_key = Secret::random(luks::VOLUME_KEY_LEN);
    let mut disk = OpenOptions::new()
        .read(true)
        .write(true)
        .open(device)
        .map_err(text)?;
    let header = luks::format(&mut disk, &volume_key, &passphrase).map_err(text)?;
    map(device, &header, &volume_key, FirstUse::Create)?;
    make_file_system(&Path::new("/dev/mapper").join(STATE))
}

fn make_file_system(device: &Path) -> Result<(), String> {
    filesystem::create(device, Path::new(MKE2FS), &Stop::new()).map_err(text)
}

fn map(
    device: &Path,
    header: &Header,
    volume_key: &Secret,
    first_use: FirstUse,
) -> Result<(), String> {
    let geometry = header.geometry().map_err(text)?;
    let mapping = Mapping {
        name: STATE,
        geometry: &geometry,
        device,
        key: volume_key,
    };
    device_mapper::open(&mapping, first_use)
        .map(|_| ())
        .map_err(text)
}
