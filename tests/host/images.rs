//! The machines that are attacked.

use super::Image;
use machine::flow::Setting;
use machine::host::{Variable, Vendor, load_option, utf16};
use machine::vm::{self, Firmware, Machine, Source};
use machine::{Context, Result, dist, root, script};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::boot_image::{disk, run};

const DISK: u64 = 64 << 20;
/// The beginnings of the words on the command line without which the image of mkosi does not boot.
const BARE: [&str; 6] = [
    "roothash=",
    "console=",
    "panic=",
    "no_timer_check",
    "systemd.volatile=",
    "systemd.verity_root_",
];
/// The driver of the host, on a disk of the host.
const DRIVER: &str = "host.efi";

/// A fresh node with a blank state disk, and the policy that `firstlight measure` computes.
pub fn node(name: &str, image: Image) -> Result<Setting> {
    let mut machine = new_machine(name)?;
    let policy = match image {
        Image::Initrd(maker) => {
            let os = system(maker.suite, &dist("bootstrapper")?, "")?;
            boots(&mut machine, &maker.initrd()?, &os)?;
            let words = " constel.csp=qemu constel.attestation-variant=qemu-vtpm";
            machine.command_line.push_str(words);
            machine.policy()?
        }
        Image::Mkosi => {
            let image = PathBuf::from(script("tools/mkosi.sh", &[Path::new("release")])?);
            machine.source = Source::Disk(image.clone());
            let options = ["--secure-boot", "off", "--units", "all"].map(OsStr::new);
            vm::measured(&[&[image.as_os_str()], &options[..]].concat())?
        }
    };
    Setting::around(machine, DISK, &policy)
}

/// The same machine with the same systems, but without anything of Firstlight. The image of mkosi stays unchanged, except that its
/// command line has only the words without which it does not boot.
pub fn without_us(name: &str, image: Image) -> Result<Machine> {
    let mut machine = new_machine(name)?;
    match image {
        Image::Initrd(maker) => {
            let os = system(maker.suite, Path::new("-"), "-without")?;
            boots(&mut machine, &maker.initrd_without_us()?, &os)?;
        }
        Image::Mkosi => {
            let image = PathBuf::from(script("tools/mkosi.sh", &[Path::new("release")])?);
            machine.source = Source::Unified(with_bare_command_line(&machine, &image)?);
            machine.add_copy_of_disk("image", &image)?;
            machine.add_disk("state", DISK)?;
        }
    }
    Ok(machine)
}

/// Returns the kernel command line of the image of mkosi.
fn command_line(machine: &Machine, image: &Path) -> Result<String> {
    let [words, copy] = ["words", "copy.efi"].map(|it| machine.folder().join(it));
    let section = format!(".cmdline={}", words.display());
    // this program also writes the whole file again
    run(Command::new("objcopy")
        .args(["--dump-section", &section])
        .arg(image.with_extension("efi"))
        .arg(copy));
    let line = std::fs::read_to_string(&words).context("read the command line")?;
    Ok(line.trim_end_matches(['\0', '\n']).to_owned())
}

/// Makes a copy of the unified kernel image of a disk image. The copy has only the necessary words on its command line.
fn with_bare_command_line(machine: &Machine, image: &Path) -> Result<PathBuf> {
    let line = command_line(machine, image)?;
    let needed = line
        .split(' ')
        .filter(|word| BARE.iter().any(|name| word.starts_with(name)));
    let [words, bare] = ["words", "bare.efi"].map(|it| machine.folder().join(it));
    std::fs::write(&words, needed.collect::<Vec<_>>().join(" ")).context("write a command line")?;
    let section = format!(".cmdline={}", words.display());
    run(Command::new("objcopy")
        .args(["--update-section", &section])
        .arg(image.with_extension("efi"))
        .arg(&bare));
    Ok(bare)
}

fn new_machine(name: &str) -> Result<Machine> {
    let mut machine = Machine::new(name)?;
    machine.firmware = Firmware::Uefi;
    machine.memory = 1024;
    Ok(machine)
}

/// A Debian with systemd and the kernel's modules, and a service that runs commands from the serial line.
fn system(suite: &str, bootstrapper: &Path, ending: &str) -> Result<PathBuf> {
    let os = root().join(format!("target/images/host-{suite}{ending}.disk"));
    let arguments = [Path::new(suite), &os, bootstrapper, Path::new("bookworm")];
    script("tools/systemd-disk.sh", &arguments)?;
    Ok(os)
}

fn boots(machine: &mut Machine, initrd: &Path, os: &Path) -> Result<()> {
    std::fs::copy(initrd, machine.initramfs()).context("copy the initrd")?;
    machine
        .command_line
        .push_str(" root=LABEL=root rw rootfstype=ext4");
    machine.add_copy_of_disk("root", os)
}

/// Adds a disk with a driver for the firmware, and the variables that have it loaded.
pub fn add_driver(machine: &mut Machine) -> Result<()> {
    let folder = machine.folder().to_owned();
    let [object, program, image] = ["driver.o", DRIVER, "driver.raw"].map(|it| folder.join(it));
    run(Command::new("as")
        .arg(root().join("tests/host/driver.s"))
        .arg("-o")
        .arg(&object));
    // subsystem 11: a driver that ends with the firmware's services
    run(Command::new("ld")
        .args(["-m", "i386pep", "--subsystem", "11", "--image-base", "0"])
        .args(["--dynamicbase", "-e", "start", "-o"])
        .args([&program, &object]));
    let driver = std::fs::read(&program).context("read the driver")?;
    disk(&image, 40, 32, &[(DRIVER, &driver)]);
    machine.add_copy_of_disk("driver", &image)?;
    machine.set_variables(&[
        Variable {
            vendor: Vendor::Uefi,
            name: "Driver0000",
            content: load_option(&format!("\\{DRIVER}"), ""),
        },
        Variable {
            vendor: Vendor::Uefi,
            name: "DriverOrder",
            content: vec![0, 0],
        },
    ])
}

/// Has systemd-boot show its menu, and names entries that it should start.
pub fn choose_entry(machine: &mut Machine) -> Result<()> {
    let variables = [
        ("LoaderConfigTimeout", "2"),
        ("LoaderConfigTimeoutOneShot", "2"),
        ("LoaderEntryDefault", "SPARE1"),
        ("LoaderEntryOneShot", "auto-efi-shell"),
        ("LoaderEntryLastBooted", "host.conf"),
        (
            "LoaderDevicePartUUID",
            "5ec1e7a0-1111-4000-8000-000000000001",
        ),
    ];
    machine.set_variables(&variables.map(|(name, text)| Variable {
        vendor: Vendor::Loader,
        name,
        content: utf16(text),
    }))
}

/// Adds a boot option that starts the image, without systemd-boot, with its kernel command line and this word. The stub takes the line of a boot option in place
/// of its own.
pub fn add_boot_option(machine: &mut Machine, word: &str) -> Result<()> {
    let image = PathBuf::from(script("tools/mkosi.sh", &[Path::new("release")])?);
    let words = format!("{} {word}", command_line(machine, &image)?);
    let version = std::fs::read_to_string(image.with_file_name("version"));
    let version = version.context("read the version of the image")?;
    let path = format!("\\EFI\\Linux\\firstlight_{}.efi", version.trim());
    machine.set_variables(&[
        Variable {
            vendor: Vendor::Uefi,
            name: "Boot0000",
            content: load_option(&path, &words),
        },
        Variable {
            vendor: Vendor::Uefi,
            name: "BootOrder",
            content: vec![0, 0],
        },
    ])
}
