//! Image tests: machines under QEMU whose initrd is made by Debian's own dracut or initramfs-tools with the files of `initramfs/`,
//! as an image builder makes it (docs/images.md). The root file system is a small one with the tests' own /sbin/init. The console
//! of every boot is kept in target/boot/.
//!
//! They need `make build`'s programs and take minutes, so `cargo test` skips them: `make boot` runs the module `pairs`, `make
//! test-images` runs all.

mod evidence;
mod measure;
mod mkosi;
mod newest;
mod packages;
mod pairs;
mod stages;
mod traps;

use machine::flow::{FRESH_NODE, Setting};
use machine::initramfs::{self, Overlay};
use machine::vm::Machine;
use machine::{Context, Result, dist, root, script};
use std::path::{Path, PathBuf};

const DISK: u64 = 64 << 20;
/// The settings by which `unlock` knows where it runs, as the old system's images have them.
const CLOUD: &str = "constel.csp=qemu constel.attestation-variant=qemu-vtpm";

/// What makes the initrd: the arguments of tools/initrd.sh.
#[derive(Clone, Copy)]
struct Maker {
    system: &'static str,
    suite: &'static str,
    kernel: &'static str,
}

/// Debian 12's.
const DRACUT: Maker = Maker::new("dracut", "bookworm");
const INITRAMFS_TOOLS: Maker = Maker::new("initramfs-tools", "bookworm");
/// Debian 13's.
const DRACUT_13: Maker = Maker::new("dracut", "trixie");
const NETWORK_MANAGER: Maker = Maker::new("dracut-network-manager", "trixie");
const INITRAMFS_TOOLS_13: Maker = Maker::new("initramfs-tools", "trixie");
/// Ubuntu 24.04's, with Ubuntu's kernel.
const INITRAMFS_TOOLS_UBUNTU: Maker = Maker::new("initramfs-tools", "noble").with_kernel("noble");
/// Those whose systemd measures the phases of the boot. The newest is of the day when tools/debian.sh fetched sid, systemd 262 when
/// this was written. sid's packages do not fit together on every day; then the script says so.
const SYSTEMD_252: Maker = Maker::new("dracut-measuring", "bookworm");
const SYSTEMD_257: Maker = Maker::new("dracut-measuring", "trixie");
const NEWEST_SYSTEMD: Maker = Maker::new("dracut-measuring", "sid");
/// Debian 13's with its own kernel, which has configfs-tsm.
const SYSTEMD_257_LINUX_6_12: Maker = SYSTEMD_257.with_kernel("trixie");

impl Maker {
    const fn new(system: &'static str, suite: &'static str) -> Maker {
        let kernel = "bookworm";
        Maker {
            system,
            suite,
            kernel,
        }
    }

    /// The same for another kernel of tools/kernel.sh.
    const fn with_kernel(self, kernel: &'static str) -> Maker {
        Maker { kernel, ..self }
    }

    /// Makes the initrd.
    fn initrd(self) -> Result<PathBuf> {
        self.initrd_with(&dist("unlock")?, "initrd")
    }

    /// Makes the initrd with the program `unlock`, or with the package that has it, in a file with the ending `ending`.
    fn initrd_with(self, unlock: &Path, ending: &str) -> Result<PathBuf> {
        let Maker {
            system,
            suite,
            kernel,
        } = self;
        let initrd = format!("target/images/{system}-{suite}-linux-{kernel}.{ending}");
        let initrd = root().join(initrd);
        let [system, suite, kernel] = [system, suite, kernel].map(Path::new);
        let arguments = [system, suite, &initrd, unlock, kernel];
        script("tools/initrd.sh", &arguments)?;
        Ok(initrd)
    }
}

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
