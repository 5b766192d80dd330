//! Tests that are a shell script inside the machine: each of its lines `PASS what` is a proof, `FAIL what: why` a failure.

use super::initramfs::{self, Overlay};
use super::vm::{Firmware, Machine, Vm};
use super::{Context, Failure, Result, root};
use std::time::Duration;

/// A script of tests/boot/cases, and the programs, disks and ports that it needs.
pub struct Case<'a> {
    /// The file's name in tests/boot/cases.
    pub script: &'a str,
    /// Programs of the host that it calls, with their libraries; `make build`'s programs are always in /usr/bin.
    pub host_programs: &'a [&'a str],
    /// Further programs or files: the path in the machine, its content. They may be executed.
    pub files: Vec<(String, Vec<u8>)>,
    /// Which of `make build`'s programs it calls.
    pub programs: &'a [&'a str],
    /// Blank disks, sparse: the serial number (/dev/disk/by-id/virtio-SERIAL), the size in bytes.
    pub disks: &'a [(&'a str, u64)],
    /// Ports of the host at 10.42.0.1, and the loopback port that each leads to.
    pub host_ports: &'a [(u16, u16)],
    /// What starts the kernel.
    pub firmware: Firmware,
    /// The machine's memory in MiB.
    pub memory: u32,
    /// The time limit.
    pub limit: Duration,
}

impl Default for Case<'_> {
    fn default() -> Self {
        Case {
            script: "",
            host_programs: &[],
            files: Vec::new(),
            programs: &[],
            disks: &[],
            host_ports: &[],
            firmware: Firmware::Bios,
            memory: 512,
            limit: Duration::from_secs(300),
        }
    }
}

impl Case<'_> {
    /// Boots a machine, runs the script in it, returns what passed; an error if anything failed, nothing passed, or the script did
    /// not reach its end.
    pub fn run(&self) -> Result<Vec<String>> {
        let mut machine = Machine::new(self.script)?;
        machine.memory = self.memory;
        machine.firmware = self.firmware;
        machine.host_ports.extend(self.host_ports.iter().copied());
        self.disks
            .iter()
            .try_for_each(|(serial, size)| machine.add_disk(serial, *size))?;
        let mut overlay = Overlay::default();
        add_script(&mut overlay, self.script)?;
        for name in self.host_programs {
            overlay.host_program(name)?;
        }
        for (path, content) in &self.files {
            overlay.file(path, 0o755, content.clone());
        }
        initramfs::build(&machine.initramfs(), self.programs, &overlay)?;

        judge(&mut machine.boot()?, self.limit)
    }
}

/// Adds a script of tests/boot/cases to an initramfs whose init will run it instead of opening the disk.
pub fn add_script(overlay: &mut Overlay, name: &str) -> Result<()> {
    let path = root().join("tests/boot/cases").join(name);
    overlay.file(
        "/case",
        0o755,
        std::fs::read(&path).context(&format!("read {}", path.display()))?,
    );
    Ok(())
}

/// Waits for the end of the script and returns what passed; an error if anything failed, nothing passed, or the script did not
/// reach its end.
pub fn judge(vm: &mut Vm, limit: Duration) -> Result<Vec<String>> {
    let end = vm.console.wait_for("END of case: ", limit)?;
    let lines = vm.console.lines();
    let said = |word: &str| -> Vec<String> {
        lines
            .iter()
            .filter_map(|line| line.text.strip_prefix(word))
            .map(str::to_owned)
            .collect()
    };
    let (passed, failed) = (said("PASS "), said("FAIL "));
    if !failed.is_empty() || passed.is_empty() || !end.text.ends_with("exit code 0") {
        let all: Vec<&str> = lines.iter().map(|line| line.text.as_str()).collect();
        let (passed, failed) = (passed.len(), failed.len());
        return Err(Failure(format!(
            "{passed} passed, {failed} failed, {}; the console:\n{}",
            end.text,
            all.join("\n")
        )));
    }
    Ok(passed)
}
