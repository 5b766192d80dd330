//! Machines that boot an image have exactly the registers that `firstlight measure` computes from the image: UKIs with the stubs of
//! Debian 12 (252), Debian 13 (257), Ubuntu 26.04 (259) and of the newest systemd, on a disk, behind systemd-boot, and by QEMU's
//! `-kernel`.
//!
//! The image has the small initramfs of the boot tests, without systemd, so that no unit measures (`--units none`).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use image::{
    Conditions, Image, KnownConditions, Loader, Platform, RTMR_1, RTMR_2, RegisterBank, Units,
};
use machine::initramfs::{self, Overlay};
use machine::vm::{Firmware, Machine, Source, kernel};
use machine::{Context, Failure, Result};
use support::boot_image::{disk, run, signed, systemd_boot, uki};
use verifier::event_log::{self, EV_NO_ACTION};

const COMMAND_LINE: &[u8] = b"console=ttyS0 panic=-1 quiet no_timer_check\n";
pub const OS_RELEASE: &[u8] = b"ID=debian\nVERSION_ID=12\n";
pub const DEFAULT: &str = "EFI/BOOT/BOOTX64.EFI";
/// TPM_ALG_ID of SHA-384, and types of events (TCG PC Client Platform Firmware Profile §10.4.1).
const SHA384: u16 = 0x000c;
const EV_SEPARATOR: u32 = 4;
const EV_EVENT_TAG: u32 = 6;
const PATIENCE: Duration = Duration::from_secs(300);
/// Prints each register, and the firmware's event log in lines of base64.
const SCRIPT: &str = "#!/bin/busybox sh\n\
    for pcr in 2 3 4 5 8 9 11 12 13 15; do echo \"PCR $pcr $(cat /sys/class/tpm/tpm0/pcr-sha256/$pcr)\"; done\n\
    mount -t securityfs securityfs /sys/kernel/security\n\
    base64 /sys/kernel/security/tpm0/binary_bios_measurements | while read line; do echo \"LOG $line\"; done\n";

/// Makes the image with the stub of a release.
fn unified(
    machine: &Machine,
    suite: &str,
    more: &[(&str, &[u8])],
    command_line: &[u8],
) -> Result<Vec<u8>> {
    let linux = std::fs::read(kernel()?).context("read the kernel")?;
    let initrd = std::fs::read(machine.initramfs()).context("read the initramfs")?;
    let sections: [(&str, &[u8]); 4] = [
        (".osrel", OS_RELEASE),
        (".cmdline", command_line),
        (".initrd", &initrd),
        (".linux", &linux),
    ];
    let stub = systemd_boot(suite).join("linuxx64.efi.stub");
    Ok(uki(&stub, &[&sections, more].concat()))
}

fn new_machine(name: &str) -> Result<Machine> {
    let mut machine = Machine::new(name)?;
    machine.firmware = Firmware::Uefi;
    machine.memory = 1024;
    let mut overlay = Overlay::default();
    overlay.file("/case", 0o755, SCRIPT);
    initramfs::build(&machine.initramfs(), &[], &overlay)?;
    Ok(machine)
}

/// Source the machine; each of these registers must have the computed value.
fn boot_and_compare(machine: &mut Machine, image: &Image, registers: &[u32]) -> Result<()> {
    let has_failed_option = matches!(machine.source, Source::SecondDisk(_));
    let given = KnownConditions {
        secure_boot: Some(machine.firmware == Firmware::SecureUefi),
        units: Some(Units::None),
        stage: None,
    };
    let conditions = image.conditions(&given);
    let conditions = conditions
        .iter()
        .find(|it| it.failed_option == has_failed_option);
    let conditions = conditions.ok_or_else(|| Failure("no such boot".to_owned()))?;
    let log = image.log(Platform::Tpm(RegisterBank::Sha256), conditions);
    let mut vm = machine.boot()?;
    vm.console.wait_for("END of case", PATIENCE)?;
    let lines = vm.console.lines();
    for pcr in registers {
        let prefix = format!("PCR {pcr} ");
        let got = lines
            .iter()
            .find_map(|line| line.text.strip_prefix(&prefix));
        let expected = log.value(*pcr).map_err(|missing| Failure(missing.why))?;
        let expected: String = expected.iter().map(|byte| format!("{byte:02x}")).collect();
        let got = got.unwrap_or_default().trim().to_ascii_lowercase();
        if got != expected {
            let events: Vec<String> = log
                .events(*pcr)
                .map(|event| format!("{event:02x?}"))
                .collect();
            return Err(Failure(format!(
                "PCR {pcr}: expected {expected}, got {got:?}; expected events:\n{}",
                events.join("\n")
            )));
        }
    }
    println!("{}: PCR {registers:?}", image.description());
    let log: String = lines
        .iter()
        .filter_map(|line| line.text.strip_prefix("LOG "))
        .map(str::trim)
        .collect();
    let logged = STANDARD.decode(log).context("read the event log")?;
    compare_sha_384(image, conditions, &logged, registers)?;
    std::fs::write(event_log(machine), logged).context("keep the event log")
}

/// The firmware's log has the digests of each bank. Those of SHA-384 are computed too, and in the order of the log they are the
/// events of RTMR 1 and 2 of a TDX machine, with two exceptions: OVMF has a separator for each PCR, and one for RTMR 1;
/// systemd-boot before 261 measures its configuration only into a TPM.
fn compare_sha_384(
    image: &Image,
    conditions: &Conditions,
    logged: &[u8],
    registers: &[u32],
) -> Result<()> {
    let logged = event_log::parse(logged);
    let digests = |pcrs: &[u32]| -> Vec<Vec<u8>> {
        let of_tpm_alone = |event: &event_log::LogEntry<'_>| {
            let kinds = [EV_SEPARATOR, EV_EVENT_TAG];
            pcrs.len() > 1 && event.pcr == 5 && kinds.contains(&event.kind)
        };
        let wanted = |event: &&event_log::LogEntry<'_>| {
            pcrs.contains(&event.pcr) && event.kind != EV_NO_ACTION && !of_tpm_alone(event)
        };
        let events = logged.events.iter().filter(|event| wanted(event));
        let digests = events.filter_map(|event| event_log::digest_of(&logged, event, SHA384));
        digests.map(<[u8]>::to_vec).collect()
    };
    let predicted = |platform, register| -> Vec<Vec<u8>> {
        let log = image.log(platform, conditions);
        let events = log.events(register);
        events.map(|event| event.digest.clone()).collect()
    };
    let compare = |name: &str, got: Vec<Vec<u8>>, expected: Vec<Vec<u8>>| {
        if got == expected {
            Ok(())
        } else {
            Err(Failure(format!(
                "{name}, SHA-384: expected {expected:02x?}, got {got:02x?}"
            )))
        }
    };
    for pcr in registers {
        let expected = predicted(Platform::Tpm(RegisterBank::Sha384), *pcr);
        compare(&format!("PCR {pcr}"), digests(&[*pcr]), expected)?;
    }
    let value = |platform, register| image.log(platform, conditions).value(register);
    // RTMR 2 has the events of PCR 9, which can be unknown
    if value(Platform::Tpm(RegisterBank::Sha384), 9).is_err()
        && value(Platform::Tdx, RTMR_2).is_ok()
    {
        let text = "PCR 9 cannot be computed, but RTMR 2 has a value".to_owned();
        return Err(Failure(text));
    }
    if measures_all_on_tdx(image) && registers.contains(&9) {
        let rtmr_2 = predicted(Platform::Tdx, RTMR_2);
        compare("RTMR 2", digests(&[8, 9, 11, 12, 13]), rtmr_2)?;
    }
    compare("RTMR 1", digests(&[4, 5]), predicted(Platform::Tdx, RTMR_1))
}

/// Returns whether the stub measures the same on TDX machines: one before 256 measures its sections only into a TPM, and one before 261
/// the number of a profile.
fn measures_all_on_tdx(image: &Image) -> bool {
    let description = image.description();
    let version = description
        .split_once("systemd-stub ")
        .map(|(_, rest)| rest.split(|it: char| !it.is_ascii_digit()).next());
    let version: Option<u32> = version.flatten().and_then(|it| it.parse().ok());
    let since = if image.profile().as_deref() == Some("other") {
        261
    } else {
        256
    };
    version.is_some_and(|version| version >= since)
}

/// Returns the file for the event log of the machine's last boot.
fn event_log(machine: &Machine) -> PathBuf {
    machine.folder().join("event-log")
}

/// Runs `firstlight explain` for the machine's event log; returns whether all registers are as expected, and the output.
fn explained(machine: &Machine, image: &Path) -> Result<(bool, String)> {
    let mut command = Command::new(support::program::built("firstlight"));
    command.arg("explain").arg(event_log(machine));
    command.arg("--against-image").arg(image);
    command.args(["--pcrs", "4,5,8,9,11,12,13,15"]);
    let output = command.output().context("run firstlight explain")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok((output.status.success(), text))
}

fn read(path: &Path) -> Result<Image> {
    let file = std::fs::File::open(path).context("open the disk image")?;
    Image::disk(file, None, None).context("compute the registers")
}

/// Source a disk with these files on its EFI system partition.
fn on_disk(
    name: &str,
    suite: &str,
    more: &[(&str, &[u8])],
    files: &[(&str, &[u8])],
) -> Result<Machine> {
    let mut machine = new_machine(name)?;
    let image = unified(&machine, suite, more, COMMAND_LINE)?;
    let path = machine.folder().join("image.raw");
    let place = if files.iter().any(|(file, _)| *file == DEFAULT) {
        "EFI/Linux/the image.efi"
    } else {
        DEFAULT
    };
    disk(&path, 96, 32, &[files, &[(place, &image[..])]].concat());
    machine.source = Source::Disk(path.clone());
    boot_and_compare(
        &mut machine,
        &read(&path)?,
        &[2, 3, 4, 5, 8, 9, 11, 12, 13, 15],
    )?;
    Ok(machine)
}

/// The image explains each event of its firmware's log, and the log shows which part of another image differs.
#[test]
#[ignore = "boots a machine: make boot"]
fn a_disk_with_the_stub_of_systemd_252_has_the_computed_registers() -> Result<()> {
    let machine = on_disk("measure-252", "bookworm", &[], &[])?;
    let (is_same, text) = explained(&machine, &machine.folder().join("image.raw"))?;
    assert!(is_same, "{text}");
    let other = machine.folder().join("other.raw");
    let file = unified(&machine, "bookworm", &[], b"console=ttyS0 init=/bin/sh")?;
    disk(&other, 96, 32, &[(DEFAULT, &file[..])]);
    let (is_same, text) = explained(&machine, &other)?;
    println!("{text}");
    let (_, of_11) = text.split_once("PCR 11: differs").unwrap_or_default();
    let mut marked = of_11.lines().filter(|line| line.starts_with("  - "));
    let first = marked.next().unwrap_or_default();
    assert!(!is_same && first.contains(".cmdline"), "{text}");
    Ok(())
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_disk_with_the_stub_of_systemd_257_has_the_computed_registers() -> Result<()> {
    let more: [(&str, &[u8]); 4] = [
        (".uname", b"6.1"),
        (".pcrpkey", b"-----BEGIN PUBLIC KEY-----\n"),
        (".pcrsig", b"{}\0\0"),
        (".profile", b"ID=main\n"),
    ];
    // sections before .profile are those of all profiles
    on_disk("measure-257", "trixie", &more, &[]).map(drop)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_disk_with_the_stub_of_systemd_259_has_the_computed_registers() -> Result<()> {
    on_disk("measure-259", "resolute", &[], &[]).map(drop)
}

/// systemd 259 to 261 write such a credential to the EFI system partition. The stub measures it at the next boot.
#[test]
#[ignore = "boots a machine: make test-images"]
fn a_credential_on_the_partition_changes_only_pcr_12_and_the_initrd() -> Result<()> {
    for suite in ["resolute", "sid"] {
        let mut machine = new_machine(&format!("measure-credential-{suite}"))?;
        let image = unified(&machine, suite, &[], COMMAND_LINE)?;
        let path = machine.folder().join("image.raw");
        disk(&path, 96, 32, &[(DEFAULT, &image)]);
        let before = read(&path)?;
        machine.source = Source::Disk(path.clone());
        boot_and_compare(&mut machine, &before, &[2, 3, 4, 5, 8, 11, 12, 13, 15])?;

        let credential = machine.folder().join("credential");
        std::fs::write(&credential, b"a sealed secret\n").context("write a credential")?;
        let esp = format!("{}@@1M", path.display());
        let name = "loader/credentials/nvpcr-anchor.debian.cred";
        run(Command::new("mmd").args(["-i", &esp, "::loader", "::loader/credentials"]));
        let mut copy = Command::new("mcopy");
        run(copy
            .args(["-i", &esp])
            .arg(&credential)
            .arg(format!("::{name}")));
        let after = read(&path)?;
        boot_and_compare(&mut machine, &before, &[2, 3, 4, 5, 8, 11, 13, 15])?;
        let log = std::fs::read(event_log(&machine)).context("read the event log")?;
        let log = event_log::parse(&log);
        let parameters = log.events.iter().filter(|event| event.pcr == 12);
        let texts: Vec<_> = parameters
            .map(|event| String::from_utf8_lossy(event.data).replace('\0', ""))
            .collect();
        if texts != ["Global credentials initrd"] {
            return Err(Failure(format!("events of PCR 12: {texts:?}")));
        }
        match after.value(
            Platform::Tpm(RegisterBank::Sha256),
            12,
            &KnownConditions::default(),
        ) {
            Ok(value) => return Err(Failure(format!("PCR 12 is computed: {value:02x?}"))),
            Err(cases) => println!("{cases:?}"),
        }
    }
    Ok(())
}

/// systemd-boot measures the option by which it chooses a profile, and the stub measures the profile's number.
#[test]
#[ignore = "boots a machine: make test-images"]
fn a_profile_that_systemd_boot_chooses_has_the_computed_registers() -> Result<()> {
    for suite in ["trixie", "sid"] {
        let mut machine = new_machine(&format!("measure-profile-{suite}"))?;
        let more: [(&str, &[u8]); 3] = [
            (".profile", b"ID=main\n"),
            // objcopy makes no two sections of one name: these get theirs below
            (".pr0file", b"ID=other\n"),
            (
                ".cm0line",
                b"console=ttyS0 panic=-1 quiet no_timer_check other\n",
            ),
        ];
        // the kernel comes before all profiles
        let mut image = unified(&machine, suite, &more, COMMAND_LINE)?;
        for (from, to) in [(b".pr0file", b".profile"), (b".cm0line", b".cmdline")] {
            let at = image.windows(8).position(|it| it == from);
            let at = at.ok_or_else(|| Failure("a section has no name".to_owned()))?;
            image[at..at + 8].copy_from_slice(to);
        }
        let manager = systemd_boot(suite).join("systemd-bootx64.efi");
        let manager = std::fs::read(manager).context("read systemd-boot")?;
        let path = machine.folder().join("image.raw");
        let files: [(&str, &[u8]); 3] = [
            (DEFAULT, &manager),
            ("loader/loader.conf", b"timeout 0\ndefault *@other\n"),
            ("EFI/Linux/image.efi", &image),
        ];
        disk(&path, 96, 32, &files);
        machine.source = Source::Disk(path.clone());
        let disk = std::fs::File::open(&path).context("open the disk image")?;
        let image = Image::disk(disk, None, Some("other")).context("compute the registers")?;
        // the newest stub adds a secret of the machine to the initrd
        let registers: &[u32] = match suite {
            "sid" => &[2, 3, 4, 5, 8, 11, 12, 13, 15],
            _ => &[2, 3, 4, 5, 8, 9, 11, 12, 13, 15],
        };
        boot_and_compare(&mut machine, &image, registers)?;
    }
    Ok(())
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn systemd_boot_and_its_configuration_are_in_the_computed_registers() -> Result<()> {
    let manager = systemd_boot("trixie").join("systemd-bootx64.efi");
    let manager = std::fs::read(manager).context("read systemd-boot")?;
    let files: [(&str, &[u8]); 2] = [(DEFAULT, &manager), ("loader/loader.conf", b"timeout 0\n")];
    on_disk("measure-systemd-boot", "trixie", &[], &files).map(drop)
}

/// The newest stub adds a secret of the machine to the initrd, unless the random seed is read-only.
#[test]
#[ignore = "boots a machine: make test-images"]
fn the_newest_stub_has_the_computed_registers_where_its_secret_is_kept_out() -> Result<()> {
    let mut machine = new_machine("measure-newest")?;
    let image = unified(&machine, "sid", &[], COMMAND_LINE)?;
    let path = machine.folder().join("image.raw");
    disk(
        &path,
        96,
        32,
        &[(DEFAULT, &image[..]), ("loader/random-seed", &[7; 32])],
    );
    machine.source = Source::Disk(path.clone());
    boot_and_compare(
        &mut machine,
        &read(&path)?,
        &[2, 3, 4, 5, 8, 11, 12, 13, 15],
    )?;

    let esp = format!("{}@@1M", path.display());
    run(std::process::Command::new("mattrib").args(["-i", &esp, "+r", "::loader/random-seed"]));
    boot_and_compare(
        &mut machine,
        &read(&path)?,
        &[2, 3, 4, 5, 8, 9, 11, 12, 13, 15],
    )?;

    let file = machine.folder().join("image.efi");
    std::fs::write(&file, &image).context("write the image")?;
    machine.source = Source::Unified(file);
    let direct = Image::direct_uki(&image, None).context("compute the registers")?;
    boot_and_compare(&mut machine, &direct, &[2, 3, 4, 5, 8, 9, 11, 12, 13, 15])
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_boot_option_that_fails_is_in_the_computed_registers() -> Result<()> {
    let mut machine = new_machine("measure-second-disk")?;
    let image = unified(&machine, "trixie", &[], COMMAND_LINE)?;
    let path = machine.folder().join("image.raw");
    disk(&path, 96, 32, &[(DEFAULT, &image[..])]);
    machine.source = Source::SecondDisk(path.clone());
    boot_and_compare(
        &mut machine,
        &read(&path)?,
        &[2, 3, 4, 8, 9, 11, 12, 13, 15],
    )
}

/// With Secure Boot the firmware does not measure the kernel in the image: systemd-stub replaces the firmware's check.
#[test]
#[ignore = "boots a machine: make test-images"]
fn a_signed_image_has_the_computed_registers_with_secure_boot() -> Result<()> {
    let mut machine = new_machine("measure-secure-boot")?;
    machine.firmware = Firmware::SecureUefi;
    let image = signed(&unified(&machine, "trixie", &[], COMMAND_LINE)?);
    let path = machine.folder().join("image.raw");
    disk(&path, 96, 32, &[(DEFAULT, &image[..])]);
    machine.source = Source::Disk(path.clone());
    boot_and_compare(
        &mut machine,
        &read(&path)?,
        &[2, 3, 4, 5, 8, 9, 11, 12, 13, 15],
    )
}

/// QEMU writes addresses into a kernel, and OVMF adds a word to its command line.
#[test]
#[ignore = "boots a machine: make test-images"]
fn a_kernel_by_qemu_has_the_computed_registers_with_little_and_much_memory() -> Result<()> {
    for memory in [512, 3072] {
        let mut machine = new_machine("measure-kernel")?;
        machine.memory = memory;
        let linux = std::fs::read(kernel()?).context("read the kernel")?;
        let initrd = std::fs::read(machine.initramfs()).context("read the initramfs")?;
        let bytes = Loader::Patched(u64::from(memory) << 20);
        let image = Image::direct_linux(&linux, Some(&initrd), &machine.command_line, bytes);
        let image = image.context("compute the registers")?;
        boot_and_compare(&mut machine, &image, &[2, 3, 4, 5, 8, 9, 11, 12, 13, 15])?;
    }
    Ok(())
}
