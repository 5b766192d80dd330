//! A table of the host that writes the kernel's memory: stock kernels permit this, and the kernel of our image refuses it. No
//! register of the TPM shows whether the table is there. tests/images/acpi.asl is the table.

use super::mkosi;
use machine::flow::{self, INIT, PATIENCE};
use machine::initramfs::{self, Overlay};
use machine::vm::{Firmware, Machine, Source};
use machine::{Context, Failure, Result, script};
use std::path::{Path, PathBuf};
use std::process::Command;

const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 nokaslr loglevel=4 no_timer_check lockdown=confidentiality";
/// The line that our kernel prints when it refuses.
const REFUSED: &str = "refused: a table of the host wants";
/// The part of an ACPI error that says that AML may only read its own table.
const READ_ONLY: &str = "AE_ACCESS";

/// The machine's report about itself; see [`INIT_SCRIPT`].
struct Said(Vec<String>);

/// Each line begins with a word that names its subject.
const INIT_SCRIPT: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
grep ' init_uts_ns$' /proc/kallsyms | while read -r at _; do echo "SAYS names-at $at"; done
grep ' _text$' /proc/kallsyms | while read -r at _; do echo "SAYS text-at $at"; done
grep 'Kernel code' /proc/iomem | while read -r range _; do echo "SAYS code-at ${range%%-*}"; done
for entry in /sys/firmware/efi/runtime-map/*; do
  [ "$(cat $entry/type)" != 0x6 ] || echo "SAYS runtime-at $(cat $entry/phys_addr)"
done
grep 'ACPI Tables' /proc/iomem | while read -r range _; do echo "SAYS tables-at ${range%%-*}"; done
echo "SAYS node $(uname -n)"
echo "SAYS domain $(cat /proc/sys/kernel/domainname)"
echo "SAYS version $(uname -v)"
for register in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
  echo "SAYS register $register $(cat /sys/class/tpm/tpm0/pcr-sha256/$register)"
done
dmesg | grep -e 'table of the host' -e AE_ACCESS | while read -r line; do echo "SAYS kernel $line"; done
echo "SAYS end"
poweroff -f
"#;

#[test]
#[ignore = "boots machines: make test-images"]
fn a_table_of_the_host_changes_the_kernel_of_debian_12() -> Result<()> {
    changed("acpi-bookworm", &stock("bookworm")?)
}

#[test]
#[ignore = "boots machines: make test-images"]
fn a_table_of_the_host_changes_the_kernel_of_debian_13() -> Result<()> {
    changed("acpi-trixie", &stock("trixie")?)
}

#[test]
#[ignore = "builds a kernel and boots machines: make test-images"]
fn the_kernel_of_our_image_refuses_what_a_table_of_the_host_wants() -> Result<()> {
    let kernel = PathBuf::from(script("tools/mkosi-kernel.sh", &[])?).join("vmlinuz");
    let mut machine = machine("acpi-confined", &kernel)?;
    let (before, with_table) = without_and_with_table(&mut machine)?;
    let version = before.of("version")?;
    assert!(version.ends_with(" aml-confined"), "{version}");
    assert!(version.len() <= 64, "{version}");
    assert_eq!(
        before.all("kernel"),
        Vec::<&str>::new(),
        "tables of the firmware"
    );
    for name in ["node", "domain"] {
        assert_eq!(with_table.of(name)?, "(none)", "{name}");
    }
    let refusals = with_table.all("kernel").join("\n");
    println!("{refusals}");
    let addresses = Addresses::of(&before)?;
    for address in [
        addresses.name,
        addresses.domain,
        addresses.runtime,
        addresses.tables,
        0xf_fff0,
    ] {
        let named = format!(" at {address:#x}, ");
        let refused = |line: &&str| line.contains(REFUSED) && line.contains(&named);
        assert!(refusals.lines().any(|line| refused(&line)), "{address:#x}");
    }
    let own = |line: &str| line.contains("_SB.TLEN._INI") && line.contains(READ_ONLY);
    assert!(refusals.lines().any(own), "the table's own length");
    Ok(())
}

/// The address is in RAM, whatever the kernel's address is.
#[test]
#[ignore = "builds an image and boots it: make test-images"]
fn the_image_of_mkosi_becomes_a_node_beside_a_table_of_the_host() -> Result<()> {
    let mut setting = mkosi::setting("mkosi-acpi", &mkosi::image()?, super::DISK)?;
    let table = Addresses {
        name: 0x0301_a7a1,
        domain: 0x0301_a8a5,
        runtime: 0x0200_0000,
        tables: 0x0210_0000,
    };
    let table = table.compiled(setting.machine.folder())?;
    setting.machine.extra = vec!["-acpitable".to_owned(), format!("file={}", table.display())];
    let mut vm = flow::new_machine(&mut setting)?;
    let lines = vm.console.lines();
    let refused = lines.iter().find(|line| line.text.contains(REFUSED));
    let refused = refused.ok_or_else(|| Failure("the console names no refusal".to_owned()))?;
    println!("  {}", refused.text);
    // its registers are those of a machine without the table
    setting.accept(&flow::attestation_key(&vm)?)?;
    println!("{}", setting.status_of_fresh(&vm, INIT)?);
    println!("{}", setting.init(&vm)?);
    vm.console.wait_for(" complete:", PATIENCE)?;
    vm.press_power_button()?;
    vm.wait_off(PATIENCE).map(drop)
}

/// The kernel of tools/kernel.sh.
fn stock(suite: &str) -> Result<PathBuf> {
    let folder = PathBuf::from(script("tools/kernel.sh", &[Path::new(suite)])?).join("boot");
    let files = std::fs::read_dir(&folder).context("read the kernel's folder")?;
    let mut kernels = files
        .filter_map(|file| Some(file.ok()?.path()))
        .filter(|path| path.to_string_lossy().contains("/vmlinuz-"));
    kernels
        .next()
        .ok_or_else(|| Failure(format!("{} has no kernel", folder.display())))
}

fn changed(name: &str, kernel: &Path) -> Result<()> {
    let mut machine = machine(name, kernel)?;
    let (before, with_table) = without_and_with_table(&mut machine)?;
    for name in ["node", "domain"] {
        assert_eq!(before.of(name)?, "(none)", "{name}");
        assert_eq!(with_table.of(name)?, "PWND", "{name}");
    }
    Ok(())
}

/// Boots the machine without the table and with it, and compares the registers.
fn without_and_with_table(machine: &mut Machine) -> Result<(Said, Said)> {
    let arguments = machine.extra.clone();
    let before = boot(machine)?;
    let table = Addresses::of(&before)?.compiled(machine.folder())?;
    machine
        .extra
        .extend(["-acpitable".to_owned(), format!("file={}", table.display())]);
    let with_table = boot(machine)?;
    machine.extra = arguments;
    let registers = before.all("register");
    assert_eq!(registers.len(), 16);
    assert!(
        registers.iter().all(|line| line.len() > 64),
        "{registers:?}"
    );
    assert_eq!(registers, with_table.all("register"));
    Ok((before, with_table))
}

fn machine(name: &str, kernel: &Path) -> Result<Machine> {
    let mut machine = Machine::new(name)?;
    machine.firmware = Firmware::Uefi;
    machine.memory = 1024;
    machine.source = Source::Unified(kernel.to_owned());
    let initrd = machine.initramfs();
    let mut overlay = Overlay::default();
    overlay
        .file("/init", 0o755, INIT_SCRIPT)
        .host_program("busybox")?;
    std::fs::write(&initrd, b"").context("write the initrd")?;
    initramfs::append(&initrd, &overlay)?;
    machine.extra = vec![
        "-initrd".to_owned(),
        initrd.display().to_string(),
        "-append".to_owned(),
        COMMAND_LINE.to_owned(),
    ];
    Ok(machine)
}

fn boot(machine: &mut Machine) -> Result<Said> {
    let mut vm = machine.boot()?;
    vm.console.wait_for("SAYS end", PATIENCE)?;
    let lines = vm.console.lines();
    let said = lines
        .iter()
        .filter_map(|line| Some(line.text.split_once("SAYS ")?.1.to_owned()));
    Ok(Said(said.collect()))
}

impl Said {
    /// Returns the rest of each line that begins with the word.
    fn all(&self, word: &str) -> Vec<&str> {
        let after = |line: &'_ String| line.starts_with(word).then_some(word.len() + 1);
        self.0
            .iter()
            .filter_map(|line| line.get(after(line)?..))
            .collect()
    }

    fn of(&self, word: &str) -> Result<&str> {
        let first = self.all(word).first().copied();
        first.ok_or_else(|| Failure(format!("the machine says nothing of {word}")))
    }

    fn number(&self, word: &str) -> Result<u64> {
        let digits = self.of(word)?.trim_start_matches("0x");
        u64::from_str_radix(digits, 16).context(&format!("read {word}"))
    }
}

/// The memory that the table accesses.
struct Addresses {
    /// The machine's name, in `struct new_utsname` the second of six fields of 65 bytes.
    name: u64,
    /// The name of its domain, the last of them.
    domain: u64,
    runtime: u64,
    tables: u64,
}

impl Addresses {
    fn of(said: &Said) -> Result<Addresses> {
        // the virtual and the physical address of the kernel's first byte
        let (text, code) = (said.number("text-at")?, said.number("code-at")?);
        let names = said.number("names-at")?;
        let names = names
            .checked_sub(text)
            .ok_or_else(|| Failure(format!("init_uts_ns is before the kernel: {names:#x}")))?;
        let names = code + names;
        Ok(Addresses {
            name: names + 65,
            domain: names + 5 * 65,
            runtime: said.number("runtime-at")?,
            tables: said.number("tables-at")?,
        })
    }

    /// The table, compiled by iasl in `folder`.
    fn compiled(&self, folder: &Path) -> Result<PathBuf> {
        let inner = include_str!("acpi-inner.asl").replace("@DOMAIN@", &hex(self.domain));
        let inner = std::fs::read(compile(folder, "inner", &inner)?).context("read the table")?;
        let bytes: Vec<String> = inner.iter().map(|byte| format!("{byte:#04x}")).collect();
        let table = include_str!("acpi.asl")
            .replace("@NAME@", &hex(self.name))
            .replace("@RUNTIME@", &hex(self.runtime))
            .replace("@TABLES@", &hex(self.tables))
            .replace("@INNERBITS@", &(inner.len() * 8).to_string())
            .replace("@INNER@", &bytes.join(", "));
        compile(folder, "attack", &table)
    }
}

fn hex(address: u64) -> String {
    format!("{address:#x}")
}

fn compile(folder: &Path, name: &str, source: &str) -> Result<PathBuf> {
    let file = folder.join(name).with_extension("asl");
    std::fs::write(&file, source).context("write a table")?;
    let output = Command::new("iasl")
        .current_dir(folder)
        .args(["-p", name])
        .arg(&file)
        .output()
        .context("run iasl")?;
    if output.status.success() {
        Ok(folder.join(name).with_extension("aml"))
    } else {
        Err(Failure(format!(
            "iasl: {}",
            String::from_utf8_lossy(&output.stdout)
        )))
    }
}
