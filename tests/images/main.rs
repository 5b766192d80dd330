//! Image tests: machines under QEMU. Debian's own dracut or initramfs-tools makes the initrd with the files of `initramfs/`, as for
//! an image (docs/images/install.md). The root file system is a small one with the tests' own /sbin/init. The console of every boot is kept
//! in target/boot/.
//!
//! They need `make build`'s programs and take minutes, so `cargo test` skips them: `make boot` runs the module `pairs`, `make
//! test-images` runs all.

mod acpi;
mod evidence;
mod measure;
mod mkosi;
mod newest;
mod packages;
mod pairs;
mod stages;
mod traps;
mod update;
mod update_power_cuts;
mod words;

use machine::flow::{FRESH_NODE, Setting};
use machine::initramfs::{self, Overlay};
use machine::maker::{
    DRACUT, DRACUT_13, INITRAMFS_TOOLS, INITRAMFS_TOOLS_13, INITRAMFS_TOOLS_UBUNTU, Maker,
    NETWORK_MANAGER, NEWEST_SYSTEMD, SYSTEMD_252, SYSTEMD_257, SYSTEMD_257_LINUX_6_12,
};
use machine::vm::Machine;
use machine::{Context, Result, dist, script};

const DISK: u64 = 64 << 20;
/// The settings by which `unlock` knows where it runs, as Constellation's images have them.
const CLOUD: &str = "constel.csp=qemu constel.attestation-variant=qemu-vtpm";

/// A machine with a blank state disk that boots an initrd of `maker`, with `overlay` appended; `words` are added to the kernel's
/// command line.
fn setting(name: &str, maker: Maker, words: &str, overlay: &Overlay) -> Result<Setting> {
    let machine = machine(name, maker, words, overlay)?;
    let mut setting = Setting::around(machine, DISK, FRESH_NODE)?;
    let os = setting.path("os.disk");
    script("initramfs/os-disk.sh", &[&os, &dist("bootstrapper")?])?;
    setting.machine.add_copy_of_disk("root", &os)?;
    Ok(setting)
}

/// Such a machine without its disks.
fn machine(name: &str, maker: Maker, words: &str, overlay: &Overlay) -> Result<Machine> {
    let mut machine = Machine::new(name)?;
    machine.memory = 1024;
    machine.kernel = maker.kernel;
    let root = "root=LABEL=root rw rootfstype=ext4 init=/sbin/init";
    machine.command_line = format!("{} {root} {words}", machine.command_line);
    std::fs::copy(maker.initrd()?, machine.initramfs()).context("copy the initrd")?;
    initramfs::append(&machine.initramfs(), overlay)?;
    Ok(machine)
}
