//! The register values that a TPM will have after a machine boots an image, computed from the image alone: what the firmware (OVMF),
//! systemd-boot, systemd-stub, the kernel and systemd's units measure. `docs/measure.md` lists it.
//!
//! [`Image`] is what boots. It gives a [`Log`] for each of the [`Conditions`] of a boot, and for each register the [`Case`]s: which
//! value it has when, or why its value cannot be known.

mod bytes;
mod conditions;
mod cpio;
mod disk;
mod event_log;
mod fat;
pub mod firmware;
mod gpt;
mod linux;
mod pe;
pub mod snp;
pub mod tdx;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod uki;

use std::collections::BTreeMap;
use std::io::{Read, Seek};

pub use conditions::{Conditions, Given, Stage, Units};
use disk::Disk;
pub use event_log::{Digest, Event, Log, Missing, REGISTERS};
use event_log::{PARTITION_TABLE, sha256};
use linux::Linux;
use uki::Uki;

/// What the firmware measures before it starts a boot option, and after one that failed (TCG PC Client Platform Firmware Profile
/// §10.4.1, EV_EFI_ACTION).
const CALLING: &str = "Calling EFI Application from Boot Option";
const RETURNING: &str = "Returning from EFI Application from Boot Option";
/// What the firmware measures when the kernel takes over.
const EXIT: [&str; 2] = [
    "Exit Boot Services Invocation",
    "Exit Boot Services Returned with Success",
];

/// What a machine boots.
pub struct Image(Kind);

enum Kind {
    /// From a disk.
    Disk(Disk),
    /// From a file of an EFI system partition of which nothing else is known.
    File(Uki),
    /// From QEMU.
    DirectUki(Uki),
    DirectLinux(Linux),
}

/// A value of a register, and when the register has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// The value, or why it cannot be known.
    pub value: Result<Digest, Missing>,
    /// The part of the boot; `None`: both.
    pub stage: Option<Stage>,
    /// The other conditions in words; empty: under all conditions.
    pub when: String,
    /// The events that give the value.
    pub events: Vec<Event>,
}

impl Image {
    /// Reads a raw disk image with an EFI system partition. `chosen` is the path on it of the unified kernel image that boots; without
    /// it there must be only one.
    pub fn disk(disk: impl Read + Seek, chosen: Option<&str>) -> Result<Image, String> {
        Disk::read(disk, chosen).map(|disk| Image(Kind::Disk(disk)))
    }

    /// Reads a unified kernel image that the firmware starts from an EFI system partition.
    pub fn uki(bytes: &[u8]) -> Result<Image, String> {
        let surroundings = uki::Surroundings::default();
        Uki::parse(bytes, Some(&surroundings)).map(|uki| Image(Kind::File(uki)))
    }

    /// Reads a unified kernel image that QEMU hands to the firmware (`-kernel`).
    pub fn direct_uki(bytes: &[u8]) -> Result<Image, String> {
        Uki::parse(bytes, None).map(|uki| Image(Kind::DirectUki(uki)))
    }

    /// Reads a kernel that QEMU hands to the firmware (`-kernel`, `-initrd`, `-append`). `memory` is the machine's memory in bytes;
    /// without it PCR 4 is not known.
    pub fn direct_linux(
        kernel: &[u8],
        initrd: Option<&[u8]>,
        command_line: &str,
        memory: Option<u64>,
    ) -> Result<Image, String> {
        Linux::new(kernel, initrd, command_line, memory)
            .map(|linux| Image(Kind::DirectLinux(linux)))
    }

    /// Returns whether a file is a unified kernel image.
    pub fn is_uki(bytes: &[u8]) -> bool {
        uki::has_stub(bytes)
    }

    fn unified(&self) -> Option<&Uki> {
        match &self.0 {
            Kind::Disk(disk) => Some(&disk.uki),
            Kind::File(uki) | Kind::DirectUki(uki) => Some(uki),
            Kind::DirectLinux(_) => None,
        }
    }

    /// Returns in words what boots.
    pub fn description(&self) -> String {
        let stub = |uki: &Uki| format!("a unified kernel image with systemd-stub {}", uki.version);
        match &self.0 {
            Kind::Disk(disk) => format!(
                "{}{}, {}",
                disk.boot_manager
                    .as_ref()
                    .map_or("", |_| "systemd-boot, then "),
                disk.path.escape_debug(),
                stub(&disk.uki)
            ),
            Kind::File(uki) => stub(uki),
            Kind::DirectUki(uki) => format!("{}, by QEMU's -kernel", stub(uki)),
            Kind::DirectLinux(_) => "a kernel by QEMU's -kernel".into(),
        }
    }

    /// Returns what an operator should know before he relies on the values.
    pub fn warnings(&self) -> &[String] {
        match &self.0 {
            Kind::DirectLinux(linux) => &linux.warnings,
            _ => self.unified().map_or(&[], |uki| &uki.warnings),
        }
    }

    /// Returns what is measured in a boot under these conditions.
    pub fn log(&self, conditions: &Conditions) -> Log {
        let mut log = Log::default();
        let is_direct = matches!(self.0, Kind::DirectUki(_) | Kind::DirectLinux(_));
        // OVMF loads what QEMU hands to it before it calls the first boot option
        if is_direct {
            self.measure_image(&mut log);
        }
        log.word(4, CALLING);
        for pcr in [4, PARTITION_TABLE] {
            log.extend(pcr, "a separator", sha256(&[&[0; 4]]));
        }
        if conditions.failed_option && !is_direct {
            log.word(4, RETURNING);
            log.word(4, CALLING);
        }
        match &self.0 {
            Kind::Disk(disk) => {
                log.extend(PARTITION_TABLE, "the partition table", disk.partition_table);
                if let Some((manager, configuration)) = disk.boot_manager {
                    log.extend(4, "systemd-boot", manager);
                    if let Some(digest) = configuration {
                        log.extend(PARTITION_TABLE, "loader.conf", digest);
                    }
                }
            }
            Kind::File(_) => log.unknown(
                PARTITION_TABLE,
                "it has the partition table of the disk",
                "leave it out: it changes when the disk grows",
            ),
            Kind::DirectUki(_) | Kind::DirectLinux(_) => {}
        }
        if !is_direct {
            self.measure_image(&mut log);
        }
        for action in EXIT {
            log.word(PARTITION_TABLE, action);
        }
        match (&self.0, self.unified()) {
            (Kind::DirectLinux(linux), _) => linux.measure(&mut log),
            (_, Some(uki)) => uki.measure(conditions, &mut log),
            (_, None) => {}
        }
        log
    }

    fn measure_image(&self, log: &mut Log) {
        match &self.0 {
            Kind::DirectLinux(linux) => linux.measure_image(log),
            Kind::Disk(disk) => disk.uki.measure_image(log),
            Kind::File(uki) | Kind::DirectUki(uki) => uki.measure_image(log),
        }
    }

    /// Returns the possible conditions of a boot, a usual boot's first.
    pub fn conditions(&self, given: &Given) -> Vec<Conditions> {
        let systemd = self.unified().and_then(Uki::systemd);
        let units = given.units.map(|units| units.with(systemd));
        let given = Given { units, ..*given };
        Conditions::all(systemd)
            .into_iter()
            .filter(|conditions| given.allows(conditions))
            .collect()
    }

    /// Returns the values of each register under the given conditions: [`REGISTERS`] and PCR 5.
    pub fn registers(&self, given: &Given) -> BTreeMap<u32, Vec<Case>> {
        let conditions = self.conditions(given);
        let logs: Vec<_> = conditions.iter().map(|it| (*it, self.log(it))).collect();
        let registers = REGISTERS.into_iter().chain([PARTITION_TABLE]);
        registers.map(|pcr| (pcr, cases(pcr, &logs))).collect()
    }

    /// Returns the only value of a register under the given conditions, if the firmware's first boot option starts; the error has all
    /// cases.
    pub fn value(&self, pcr: u32, given: &Given) -> Result<Digest, Vec<Case>> {
        let conditions = self.conditions(given);
        let usual = conditions.iter().filter(|it| !it.failed_option);
        let logs: Vec<_> = usual.map(|it| (*it, self.log(it))).collect();
        let cases = cases(pcr, &logs);
        let mut values = cases.iter().map(|case| case.value.clone().ok());
        match values.next().flatten() {
            Some(first) if values.all(|value| value == Some(first)) => Ok(first),
            _ => Err(cases),
        }
    }
}

/// Returns the values of a register in these boots, each with what distinguishes its boots from the others.
fn cases(pcr: u32, logs: &[(Conditions, Log)]) -> Vec<Case> {
    let mut all: Vec<Case> = Vec::new();
    for stage in Stage::ALL {
        let logs: Vec<_> = logs.iter().filter(|(it, _)| it.stage == stage).collect();
        let among: Vec<Conditions> = logs.iter().map(|(it, _)| *it).collect();
        let mut values: Vec<(Result<Digest, Missing>, Vec<Conditions>, &Log)> = Vec::new();
        for (conditions, log) in logs {
            let value = log.value(pcr);
            match values.iter_mut().find(|(other, ..)| *other == value) {
                Some((_, these, _)) => these.push(*conditions),
                None => values.push((value, vec![*conditions], log)),
            }
        }
        for (value, these, log) in values {
            let when = Conditions::words(&these, &among);
            let other = all
                .iter_mut()
                .find(|case| case.value == value && case.when == when);
            match other {
                Some(case) => case.stage = None,
                None => all.push(Case {
                    value,
                    stage: Some(stage),
                    when,
                    events: log.events(pcr).cloned().collect(),
                }),
            }
        }
    }
    all
}
