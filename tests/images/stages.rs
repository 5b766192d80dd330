//! Nodes whose systemd measures the phases of the boot: a unified kernel image with an initrd of dracut that has systemd's units,
//! and a whole Debian as the booted system. Init, reboot by rejoin and recovery work under the one policy that `firstlight measure
//! IMAGE` writes before the machine ever boots.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::measure::{DEFAULT, OS_RELEASE};
use super::{CLOUD, DISK, Maker, NEWEST_SYSTEMD, SYSTEMD_252, SYSTEMD_257};
use machine::flow::{self, PATIENCE, Setting};
use machine::initramfs::{self, Overlay};
use machine::vm::{Firmware, Machine, Source, Vm, kernel};
use machine::{Context, Failure, Result, dist, root, script};
use support::boot_image::{disk, systemd_boot, uki};

/// The machine ID of the systems of tools/systemd-disk.sh.
const MACHINE_ID: &str = "5ec1e7a0000040008000000000000001\n";

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_node_with_systemd_252_meets_one_policy_at_each_stage() -> Result<()> {
    one_policy(node("stages-252", SYSTEMD_252)?)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_node_with_systemd_257_meets_one_policy_at_each_stage() -> Result<()> {
    one_policy(node("stages-257", SYSTEMD_257)?)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_node_with_the_newest_systemd_meets_one_policy_at_each_stage() -> Result<()> {
    one_policy(node("stages-newest", NEWEST_SYSTEMD)?)
}

/// A fresh node on which systemd-pcrmachine runs must not look like a member whose set-up was interrupted.
#[test]
#[ignore = "boots a machine: make test-images"]
fn the_unit_that_wrote_pcr_15_is_named() -> Result<()> {
    let mut setting = node("stages-pcr-15", SYSTEMD_257)?;
    let mut vm = setting.machine.boot()?;
    vm.console.wait_for(" ready:", PATIENCE)?;
    let unit = "systemd-pcrmachine.service";
    let run = format!(
        "rm /usr/lib/systemd/system/{unit}.d/firstlight.conf && systemctl daemon-reload && systemctl start {unit} && \
         systemctl restart bootstrapper"
    );
    vm.command(&run, PATIENCE)?;
    let said = vm
        .console
        .wait_for(" error: PCR 15 is not zero", PATIENCE)?;
    println!("{}", said.text);
    for word in [unit, "machine-id:5ec1e7a0", "belongs to no cluster"] {
        if !said.text.contains(word) {
            return Err(Failure(format!("{word:?} is not in: {}", said.text)));
        }
    }
    // neither the disk nor the machine is reset: `bootstrapper` tries again
    let again = vm
        .console
        .wait_for(" error: PCR 15 is not zero", PATIENCE)?;
    if again.at > said.at {
        Ok(())
    } else {
        Err(Failure("bootstrapper said it only once".to_owned()))
    }
}

/// A member whose initrd runs systemd-pcrmachine: its registers say that it belongs to no cluster, so no cluster gives it the key.
#[test]
#[ignore = "boots a machine: make test-images"]
fn unlock_names_the_unit_that_wrote_pcr_15() -> Result<()> {
    let mut setting = node("stages-pcr-15-initrd", SYSTEMD_257)?;
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);

    let unit = "systemd-pcrmachine.service";
    let service = "[Unit]\nDefaultDependencies=no\nConditionSecurity=measured-uki\n\
        [Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/lib/systemd/systemd-pcrextend --machine-id\n";
    let first = format!("[Unit]\nWants={unit}\nAfter={unit}\n");
    let mut overlay = Overlay::default();
    overlay
        .file("/etc/machine-id", 0o444, MACHINE_ID)
        .file(&format!("/etc/systemd/system/{unit}"), 0o644, service)
        .file(
            "/etc/systemd/system/firstlight-unlock.service.d/first.conf",
            0o644,
            first,
        );
    let initrd = setting.machine.initramfs();
    std::fs::copy(SYSTEMD_257.initrd()?, &initrd).context("copy the initrd")?;
    initramfs::append(&initrd, &overlay)?;
    setting.machine.source = Source::Disk(image(&setting.machine, SYSTEMD_257.suite, &initrd)?);
    let mut vm = setting.machine.boot()?;
    let said = vm
        .console
        .wait_for(" error: PCR 15 is not zero", PATIENCE)?;
    println!("{}", said.text);
    for word in ["[unlock]", unit, "machine-id:5ec1e7a0", "Mask "] {
        if !said.text.contains(word) {
            return Err(Failure(format!("{word:?} is not in: {}", said.text)));
        }
    }
    vm.console
        .wait_for(" failed: the state disk stays closed", PATIENCE)?;
    Ok(())
}

fn one_policy(mut setting: Setting) -> Result<()> {
    let started = Instant::now();
    let took = |what: &str| println!("  {what}: {} s", started.elapsed().as_secs());
    let (mut vm, cluster) = flow::first_boot(&mut setting)?;
    took("init");
    println!("  {}", vm.command("systemctl --version", PATIENCE)?);
    check_phases(&mut vm)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    setting.start_services()?;
    let mut vm = flow::member_again(setting.machine.boot()?, " ticket:", &cluster)?;
    took("rejoin");
    vm.shut_down(PATIENCE)?;
    drop(vm);
    flow::recovered(&mut setting, &cluster)?;
    took("recovery");
    Ok(())
}

/// A new machine, with the policy that is computed from its image.
fn node(name: &str, maker: Maker) -> Result<Setting> {
    let os = root().join(format!("target/images/systemd-{}.disk", maker.suite));
    let bootstrapper = dist("bootstrapper")?;
    node_of(name, maker, &maker.initrd()?, &os, &bootstrapper)
}

/// Such a machine with an initrd of `maker`. Its booted system is made at `os` with the program `bootstrapper`, or with the package
/// that has it.
pub fn node_of(
    name: &str,
    maker: Maker,
    initrd: &Path,
    os: &Path,
    bootstrapper: &Path,
) -> Result<Setting> {
    let disk = [Path::new(maker.suite), os, bootstrapper];
    script("tools/systemd-disk.sh", &disk)?;

    let mut machine = Machine::new(name)?;
    machine.firmware = Firmware::Uefi;
    machine.memory = 1024;
    machine.add_copy_of_disk("root", os)?;
    let image = image(&machine, maker.suite, initrd)?;
    let policy = policy(&image, units(maker))?;
    machine.source = Source::Disk(image);
    Setting::around(machine, DISK, &policy)
}

/// Makes a disk with the unified kernel image on it.
fn image(machine: &Machine, suite: &str, initrd: &Path) -> Result<PathBuf> {
    let linux = std::fs::read(kernel()?).context("read the kernel")?;
    let initrd = std::fs::read(initrd).context("read the initrd")?;
    let root = "root=LABEL=root rw rootfstype=ext4";
    let command_line = format!("{} {root} {CLOUD}", machine.command_line);
    let sections: [(&str, &[u8]); 4] = [
        (".osrel", OS_RELEASE),
        (".cmdline", command_line.as_bytes()),
        (".initrd", &initrd),
        (".linux", &linux),
    ];
    let image = uki(&systemd_boot(suite).join("linuxx64.efi.stub"), &sections);
    let path = machine.folder().join("image.raw");
    disk(&path, 96, 32, &[(DEFAULT, &image)]);
    Ok(path)
}

/// Returns which units of systemd extend registers (`firstlight measure --units`). The dracut of Debian sid also includes the units
/// that systemd has since version 259.
fn units(maker: Maker) -> &'static str {
    match maker.suite {
        "sid" => "all",
        _ => "phases",
    }
}

/// The policy of an image, which differs between the stages.
fn policy(image: &Path, units: &str) -> Result<String> {
    let output = std::process::Command::new(dist("firstlight")?)
        .arg("measure")
        .arg(image)
        .args(["--secure-boot", "off", "--units", units])
        .arg("--accept-efi-variables")
        .output()
        .context("run firstlight")?;
    let policy = String::from_utf8_lossy(&output.stdout).into_owned();
    let has_initramfs = policy.contains(r#""initramfs": {"#);
    if output.status.success() && has_initramfs {
        Ok(policy)
    } else {
        Err(Failure(format!(
            "firstlight measure: {policy}{}",
            String::from_utf8_lossy(&output.stderr)
        )))
    }
}

/// Checks that all of systemd's units have extended their registers. Otherwise the test would prove nothing about the policy.
fn check_phases(vm: &mut Vm) -> Result<()> {
    let active = "systemctl is-active systemd-pcrphase-sysinit systemd-pcrphase || true";
    let said = vm.command(active, PATIENCE)?;
    match said.as_str() {
        "active\nactive" => Ok(()),
        _ => Err(Failure(format!("systemd's units are {said}"))),
    }
}
