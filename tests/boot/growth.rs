//! The cloud enlarges the state disk of a member: the next boot maps all of it, and its file system grows.

use machine::case::Case;
use machine::flow::{self, PATIENCE, Setting};
use machine::vm::Vm;
use machine::{Context, Failure, Result};
use std::fs::File;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const SMALL: u64 = 64 * MIB;
/// More than two flex groups, each of 16 groups of 128 MiB, whose bitmaps lie side by side.
const LARGE: u64 = 5000 * MIB;
/// Does not fit into the small file system.
const FILE_MIB: u64 = 200;

/// A disk that grows, one that was only shown larger, and a forged superblock are mapped at the size that they have.
#[test]
#[ignore = "boots a machine: make boot"]
fn a_disk_is_mapped_at_its_present_size() -> Result<()> {
    let case = Case {
        script: "grow.sh",
        host_programs: &["dmsetup"],
        files: vec![(
            "/usr/bin/dm_guest".to_owned(),
            machine::example("dm_guest")?,
        )],
        disks: &[("disk1", 1024 * MIB)],
        limit: Duration::from_secs(600),
        ..Case::default()
    };
    println!("passed:\n  {}", case.run()?.join("\n  "));
    Ok(())
}

#[test]
#[ignore = "boots a machine: make boot"]
fn the_file_system_grows_with_the_disk() -> Result<()> {
    let mut setting = Setting::new("growth", SMALL)?;
    let (mut vm, cluster) = flow::first_boot(&mut setting)?;
    let first = size(&mut vm)?;
    vm.shut_down(PATIENCE)?;
    let disk = File::options()
        .write(true)
        .open(setting.machine.disk("state"));
    disk.and_then(|disk| disk.set_len(LARGE))
        .context("enlarge the disk")?;

    // the power fails while it grows: the next boot goes on
    setting.start_services()?;
    let mut cut = setting.machine.boot()?;
    cut.console.wait_for(" growing:", PATIENCE)?;
    cut.cut_power();
    let mut vm = flow::member_again(setting.machine.boot()?, " ticket:", &cluster)?;
    assert!(has_grown(&vm), "the console does not say so");
    let grown = size(&mut vm)?;
    println!("the file system had {first} KiB, and has {grown} KiB");
    if first > SMALL >> 10 || grown < (LARGE - LARGE / 10) >> 10 {
        return Err(Failure(format!(
            "the file system has {grown} KiB, and had {first} KiB"
        )));
    }
    vm.command(
        &format!(
            "dd if=/dev/urandom of=/run/state/large bs=1M count={FILE_MIB} 2>/dev/null && sync"
        ),
        PATIENCE,
    )?;
    let sum = vm.command("sha256sum /run/state/large", PATIENCE)?;
    vm.shut_down(PATIENCE)?;

    let mut vm = flow::member_again(setting.machine.boot()?, " ticket:", &cluster)?;
    assert_eq!(vm.command("sha256sum /run/state/large", PATIENCE)?, sum);
    assert_eq!(size(&mut vm)?, grown);
    let errors = "dmesg | grep -E 'AEAD ERROR|EXT4-fs error|I/O error' || true";
    assert_eq!(vm.command(errors, PATIENCE)?, "");
    assert!(!has_grown(&vm), "it grew again");
    vm.shut_down(PATIENCE)
}

fn has_grown(vm: &Vm) -> bool {
    let lines = vm.console.lines();
    lines.iter().any(|line| line.text.contains(" grown:"))
}

/// Returns the size of the file system in KiB.
fn size(vm: &mut Vm) -> Result<u64> {
    let size = vm.command("df -k /run/state | awk 'END { print $2 }'", PATIENCE)?;
    size.parse().context("read the size of the file system")
}
