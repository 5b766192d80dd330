//! Inputs that a host can give a machine in addition to its image: each attack of the list in docs/threat-model.md against each
//! image that we ship.
//!
//! All attacks on an image share one boot. The machine must boot as without them, with the registers that `firstlight measure`
//! computed. Each attack that succeeds leaves a mark, and no mark may be there. To show that the marks work, the same attacks run
//! against the same system without Firstlight's protection, where each must leave its mark.
//!
//! They need `make build`'s programs and root, and take minutes, so `cargo test` skips them; `make test-host` runs them. The console of
//! every boot is kept in target/boot/.

mod attacks;
mod images;

use attacks::{ATTACKS, Seen, mark};
use machine::flow::{self, INIT, PATIENCE, Setting};
use machine::maker::{
    DRACUT, DRACUT_13, INITRAMFS_TOOLS, INITRAMFS_TOOLS_13, Maker, NETWORK_MANAGER,
};
use machine::vm::{Machine, Vm};
use machine::{Failure, Result};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit of a boot with all attacks, on a loaded machine without KVM.
const BOOT: Duration = Duration::from_secs(1800);

/// The image that a machine boots.
#[derive(Clone, Copy)]
pub enum Image {
    /// An initrd, and a Debian as the booted system.
    Initrd(Maker),
    /// The release image of `make mkosi`.
    Mkosi,
}

#[test]
#[ignore = "boots a machine: make test-host"]
fn nothing_of_the_host_runs_beside_an_initrd_of_dracut() -> Result<()> {
    nothing_works("host-dracut", Image::Initrd(DRACUT))
}

#[test]
#[ignore = "boots a machine: make test-host"]
fn nothing_of_the_host_runs_beside_an_initrd_of_debian_13s_dracut() -> Result<()> {
    nothing_works("host-dracut-13", Image::Initrd(DRACUT_13))
}

#[test]
#[ignore = "boots a machine: make test-host"]
fn nothing_of_the_host_runs_beside_an_initrd_with_network_manager() -> Result<()> {
    nothing_works("host-network-manager", Image::Initrd(NETWORK_MANAGER))
}

#[test]
#[ignore = "boots a machine: make test-host"]
fn nothing_of_the_host_runs_beside_an_initrd_of_initramfs_tools() -> Result<()> {
    nothing_works("host-initramfs-tools", Image::Initrd(INITRAMFS_TOOLS))
}

#[test]
#[ignore = "boots a machine: make test-host"]
fn nothing_of_the_host_runs_beside_an_initrd_of_debian_13s_initramfs_tools() -> Result<()> {
    nothing_works("host-initramfs-tools-13", Image::Initrd(INITRAMFS_TOOLS_13))
}

#[test]
#[ignore = "boots a machine: make test-host"]
fn nothing_of_the_host_runs_in_the_image_of_mkosi() -> Result<()> {
    nothing_works("host-mkosi", Image::Mkosi)
}

/// systemd 252 in the initrd and in the booted system.
#[test]
#[ignore = "boots a machine: make test-host"]
fn the_attacks_work_on_a_system_of_dracut_without_us() -> Result<()> {
    they_work("host-dracut-without", Image::Initrd(DRACUT))
}

/// systemd 257 in the initrd and in the booted system.
#[test]
#[ignore = "boots a machine: make test-host"]
fn the_attacks_work_on_a_system_of_debian_13s_dracut_without_us() -> Result<()> {
    they_work("host-dracut-13-without", Image::Initrd(DRACUT_13))
}

/// systemd 257 in the booted system only.
#[test]
#[ignore = "boots a machine: make test-host"]
fn the_attacks_work_on_a_system_of_initramfs_tools_without_us() -> Result<()> {
    they_work(
        "host-initramfs-tools-13-without",
        Image::Initrd(INITRAMFS_TOOLS_13),
    )
}

/// With the programs and drivers of our image, which are few, and without the words of its command line.
#[test]
#[ignore = "boots a machine: make test-host"]
fn the_attacks_work_in_the_image_of_mkosi_with_a_bare_command_line() -> Result<()> {
    they_work("host-mkosi-without", Image::Mkosi)
}

/// The stub adds words from the firmware's tables to the kernel command line; PCR 12 shows this.
#[test]
#[ignore = "boots a machine: make test-host"]
fn a_kernel_command_line_of_the_host_is_refused_by_pcr_12() -> Result<()> {
    let mut setting = images::node("host-words", Image::Mkosi)?;
    let word = "io.systemd.stub.kernel-cmdline-extra=host-runs-words";
    setting.machine.add_smbios_string(word)?;
    refused(&mut setting, "PCR 12").map(drop)
}

/// systemd-boot adds words from the firmware's tables only to entries that are no unified kernel images: if they got to the stub or the
/// kernel, PCR 12 and 9 would differ.
#[test]
#[ignore = "boots a machine: make test-host"]
fn words_of_the_host_for_systemd_boot_reach_no_kernel() -> Result<()> {
    let word = "io.systemd.boot.kernel-cmdline-extra=host-runs-words";
    changes_no_register("host-boot-words", |machine| machine.add_smbios_string(word))
}

/// The host may choose between the images of the disk: each one is measured, and here there is only one.
#[test]
#[ignore = "boots a machine: make test-host"]
fn variables_of_systemd_boot_choose_only_between_measured_images() -> Result<()> {
    changes_no_register("host-entries", images::choose_entry)
}

/// A boot option may have a command line for the image that it starts.
#[test]
#[ignore = "boots a machine: make test-host"]
fn a_boot_option_of_the_host_is_refused_by_pcr_12() -> Result<()> {
    let mut setting = images::node("host-boot-option", Image::Mkosi)?;
    images::add_boot_option(&mut setting.machine, "host-runs-option")?;
    refused(&mut setting, "PCR 12").map(drop)
}

/// The firmware runs a driver that its variables name, from any disk, before the image.
#[test]
#[ignore = "boots a machine: make test-host"]
fn a_firmware_driver_of_the_host_is_refused_by_pcr_2() -> Result<()> {
    let mut setting = images::node("host-driver", Image::Mkosi)?;
    images::add_driver(&mut setting.machine)?;
    let vm = refused(&mut setting, "PCR 2:")?;
    let lines = vm.console.lines();
    if lines.iter().any(|it| it.text.contains("host-runs-driver")) {
        Ok(())
    } else {
        Err(Failure(
            "the driver did not run, so this proves nothing".to_owned(),
        ))
    }
}

/// Boots the image of mkosi after this change, which no register shows.
fn changes_no_register(name: &str, change: impl FnOnce(&mut Machine) -> Result<()>) -> Result<()> {
    let mut setting = images::node(name, Image::Mkosi)?;
    change(&mut setting.machine)?;
    let vm = ready(&mut setting)?;
    setting.accept(&flow::attestation_key(&vm)?)?;
    println!("{}", setting.status_of_fresh(&vm, INIT)?);
    Ok(())
}

/// Boots with all attacks. The machine has the registers of its policy, and no attack leaves its mark.
fn nothing_works(name: &str, image: Image) -> Result<()> {
    let mut setting = images::node(name, image)?;
    attacks::give_all(&mut setting.machine)?;
    let second_console = attacks::second_console(&setting.machine);
    let mut vm = ready(&mut setting)?;
    setting.accept(&flow::attestation_key(&vm)?)?;
    println!("{}", setting.status_of_fresh(&vm, INIT)?);
    match &left_marks(&mut vm, image, &second_console)?[..] {
        [] => Ok(()),
        marks => Err(Failure(format!(
            "the host had its way: {}",
            marks.join(", ")
        ))),
    }
}

/// Boots the same image without Firstlight. There the attacks work, and each leaves the mark that shows it.
fn they_work(name: &str, image: Image) -> Result<()> {
    let mut machine = images::without_us(name, image)?;
    attacks::give_all(&mut machine)?;
    let second_console = attacks::second_console(&machine);
    let mut vm = machine.boot()?;
    match image {
        Image::Mkosi => drop(vm.console.wait_for("firstlight[run]", BOOT)?),
        Image::Initrd(_) => first_answer(&mut vm)?,
    }
    let marks = left_marks(&mut vm, image, &second_console)?;
    println!("  these work without Firstlight: {}", marks.join(", "));
    let expected = ATTACKS.iter().filter(|attack| (attack.works)(image));
    let missing = expected.filter(|attack| !marks.contains(&attack.name));
    match &missing.map(|attack| attack.name).collect::<Vec<_>>()[..] {
        [] => Ok(()),
        names => Err(Failure(format!(
            "these do not work, though nothing stops them, so their marks prove nothing: {}",
            names.join(", ")
        ))),
    }
}

/// Boots, and has `firstlight status` refuse the machine for this register.
fn refused(setting: &mut Setting, register: &str) -> Result<Vm> {
    let vm = ready(setting)?;
    setting.accept(&flow::attestation_key(&vm)?)?;
    match setting.status_of_fresh(&vm, INIT) {
        Err(Failure(why)) if why.contains(register) => {
            println!("  {why}");
            Ok(vm)
        }
        Err(other) => Err(other),
        Ok(_) => Err(Failure(format!("{register} should have another value"))),
    }
}

/// Boots with a blank disk until the machine waits for init.
fn ready(setting: &mut Setting) -> Result<Vm> {
    let mut vm = setting.machine.boot()?;
    vm.console.wait_for(" ready:", BOOT)?;
    Ok(vm)
}

/// Text that is typed before a program reads the console is lost.
fn first_answer(vm: &mut Vm) -> Result<()> {
    let deadline = Instant::now() + BOOT;
    while let Err(error) = vm.command("true", Duration::from_secs(20)) {
        if Instant::now() > deadline {
            return Err(error);
        }
    }
    Ok(())
}

/// Runs the attacks that a host can make on a running machine. Returns the names of those that have left their mark.
fn left_marks(vm: &mut Vm, image: Image, second_console: &Path) -> Result<Vec<&'static str>> {
    vm.monitor("nmi")?;
    vm.monitor("chardev-send-break serial0")?;
    // the key works if it follows soon; without SysRq, a program that reads the console gets it as a line
    vm.type_line("h")?;
    let answers = match image {
        Image::Mkosi => {
            // the marks that would show now
            std::thread::sleep(Duration::from_secs(20));
            String::new()
        }
        Image::Initrd(_) => {
            first_answer(vm)?;
            vm.command(&questions(), PATIENCE)?
        }
    };
    let second = std::fs::read_to_string(second_console).unwrap_or_default();
    let lines = vm.console.lines();
    let on_console = |text: &str| lines.iter().any(|line| line.text.ends_with(text));
    let worked = ATTACKS.iter().filter(|attack| match attack.seen {
        Seen::Console => on_console(&mark(attack)),
        Seen::Text(text) => lines.iter().any(|line| line.text.contains(text)),
        Seen::SecondConsole(text) => second.contains(text),
        Seen::Command(_) => answers.lines().any(|line| line == mark(attack)),
    });
    Ok(worked.map(|attack| attack.name).collect())
}

/// A shell command that writes the marks of the attacks that cannot write them themselves.
fn questions() -> String {
    let commands = ATTACKS.iter().filter_map(|attack| match attack.seen {
        Seen::Command(command) => Some(format!("if {command}; then echo {}; fi", mark(attack))),
        _ => None,
    });
    commands.collect::<Vec<_>>().join("; ")
}
