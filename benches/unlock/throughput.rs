//! `cargo bench --bench unlock -- throughput`: what a mapped disk costs with each option of dm-crypt and dm-integrity, in one machine.
//! tests/boot/cases/throughput.sh makes the mappings, and calls this program for each.
//!
//! The disk is in the machine's memory, and QEMU counts an instruction as 1 ns: so the times are those of the kernel's work, and neither
//! the host's disk nor other work of the host changes them. A real disk adds its time for each write and flush, which the last
//! columns count.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use machine::case::Case;
use support::random::Random;
use sys::block::PageBuffer;

use super::{MIB, text};

const BLOCK: usize = 4096;
/// Bytes that are written and read in order, 1 MiB at once.
const SPAN: u64 = 4 * MIB;
/// Number of blocks that are written and read at random places of the span.
const RANDOM: usize = 128;
/// Number of entries that are appended, each with its own fsync.
const ENTRIES: usize = 64;
/// Bytes of an entry, as etcd's benchmark of disks has it (fio --bs=2300).
const ENTRY: usize = 2300;

/// What is measured of each mapping, in the order of the columns.
const COLUMNS: [&str; 7] = [
    "write, ms a MiB",
    "read, ms a MiB",
    "random write µs",
    "random read µs",
    "fsync µs",
    "KiB written an fsync",
    "flushes an fsync",
];

/// Boots the machine, and prints a table.
pub fn compare() -> Result<(), String> {
    let this = std::env::current_exe().and_then(fs::read).map_err(text)?;
    let kernel = machine::script("tools/kernel.sh", &[]).map_err(text)?;
    let modules = Path::new(&kernel).join("lib/modules");
    let mut versions = fs::read_dir(modules).map_err(text)?;
    let version = versions.next().ok_or("the kernel has no modules")?;
    let module = version.map_err(text)?.path();
    let module = fs::read(module.join("kernel/drivers/block/loop.ko")).map_err(text)?;
    let case = Case {
        script: "throughput.sh",
        host_programs: &["cryptsetup", "dmsetup"],
        files: vec![
            ("/usr/bin/unlock".into(), this),
            ("/lib/modules/loop.ko".into(), module),
        ],
        memory: 1024,
        limit: Duration::from_secs(3600),
        ..Case::default()
    };
    let accelerator = machine::script("tools/accel.sh", &[]).map_err(text)?;
    if !accelerator.contains("icount") {
        return Err("call it with FIRSTLIGHT_ACCEL=icount".into());
    }
    println!("guest: 1 processor, 1 GiB, SeaBIOS, {accelerator}\n");
    println!("| mapping | {} |", COLUMNS.join(" | "));
    println!("|---|{}", "---:|".repeat(COLUMNS.len()));
    for row in case.run().map_err(text)? {
        let (name, numbers) = row.split_once(": ").unwrap_or((&row, ""));
        let numbers: Result<Vec<f64>, _> = numbers.split(' ').map(str::parse).collect();
        match numbers {
            Ok(numbers) => {
                let number = |it: &f64| format!("{it:.0$}", usize::from(*it < 100.0));
                let numbers: Vec<String> = numbers.iter().map(number).collect();
                println!("| {name} | {} |", numbers.join(" | "));
            }
            // the kernel does not accept the option
            Err(_) => println!("{row}"),
        }
    }
    Ok(())
}

/// Measures the block device at `mapped`: ms for each MiB in order, µs for each block at random places.
pub fn raw(mapped: &Path) -> Result<(), String> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(mapped)
        .map_err(text)?;
    let mut big = PageBuffer::new(MIB as usize);
    let mut block = PageBuffer::new(BLOCK);
    let mut random = Random::new(1);
    for byte in big.bytes_mut().iter_mut().chain(block.bytes_mut()) {
        *byte = random.next() as u8;
    }
    let places: Vec<u64> = (0..RANDOM)
        .map(|_| random.below(SPAN as usize / BLOCK) as u64 * BLOCK as u64)
        .collect();

    let writing = timed(|| {
        (0..SPAN / MIB).try_for_each(|at| device.write_all_at(big.bytes(), at * MIB))?;
        device.sync_all()
    })?;
    let reading = timed(|| {
        (0..SPAN / MIB).try_for_each(|at| device.read_exact_at(big.bytes_mut(), at * MIB))
    })?;
    let random_writing = timed(|| {
        let mut places = places.iter();
        places.try_for_each(|at| device.write_all_at(block.bytes(), *at))
    })?;
    device.sync_all().map_err(text)?;
    let random_reading = timed(|| {
        let mut places = places.iter();
        places.try_for_each(|at| device.read_exact_at(block.bytes_mut(), *at))
    })?;
    let mib = |took: Duration| took.as_secs_f64() * 1e3 / (SPAN / MIB) as f64;
    let each = |took: Duration| took.as_secs_f64() * 1e6 / RANDOM as f64;
    println!(
        "{:.2} {:.2} {:.1} {:.1}",
        mib(writing),
        mib(reading),
        each(random_writing),
        each(random_reading)
    );
    Ok(())
}

/// Appends entries to a file, each with an fdatasync, as etcd does to its log. Prints the median of the µs, and what the disk did for
/// each entry.
pub fn log(file: &Path, disk: &str) -> Result<(), String> {
    let mut log = File::create(file).map_err(text)?;
    let before = counted(disk)?;
    let mut times = vec![];
    for _ in 0..ENTRIES {
        times.push(timed(|| {
            log.write_all(&[7; ENTRY])?;
            log.sync_data()
        })?);
    }
    let after = counted(disk)?;
    times.sort();
    let each = |index: usize| (after[index] - before[index]) as f64 / ENTRIES as f64;
    println!(
        "{:.1} {:.2} {:.2}",
        times[ENTRIES / 2].as_secs_f64() * 1e6,
        each(0) / 2.0,
        each(1)
    );
    Ok(())
}

/// Returns the numbers of written sectors and of flushes of a disk (Documentation/block/stat.rst).
fn counted(disk: &str) -> Result<[u64; 2], String> {
    let stat = fs::read_to_string(format!("/sys/block/{disk}/stat")).map_err(text)?;
    let fields: Vec<u64> = stat
        .split_whitespace()
        .filter_map(|field| field.parse().ok())
        .collect();
    match (fields.get(6), fields.get(15)) {
        (Some(sectors), Some(flushes)) => Ok([*sectors, *flushes]),
        _ => Err(format!("/sys/block/{disk}/stat has no counters: {stat}")),
    }
}

fn timed(work: impl FnOnce() -> std::io::Result<()>) -> Result<Duration, String> {
    let start = Instant::now();
    work().map_err(text)?;
    Ok(start.elapsed())
}
