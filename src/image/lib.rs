//! Computes the register values of a TPM or a TDX machine after booting an image, from only the image: the measurements of the
//! firmware (OVMF), systemd-boot, systemd-stub, the kernel and systemd's units. `docs/measure.md` lists it.
//!
//! [`Image`] is what boots. It gives a [`BootLog`] for each of the [`Conditions`] of a boot, and for
//! each register the [`Case`]s: the value under certain conditions, or why the value cannot be
//! predicted.

mod bytes;
mod conditions;
mod cpio;
mod digest;
mod disk;
mod error;
mod event_log;
mod fat;
pub mod firmware;
mod gpt;
pub mod host;
mod initrd;
pub mod launch_endorsement;
mod linux;
mod pe;
mod platform;
pub mod slots;
pub mod snp;
pub mod tdx;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod uki;

use std::collections::BTreeMap;
use std::io::{Read, Seek};

pub use conditions::{Conditions, KnownConditions, Stage, Units};
use digest::Digest;
pub use digest::RegisterBank;
use disk::Disk;
pub use error::Error;
pub use event_log::{BootLog, LoggedEvent, Missing};
use linux::Linux;
pub use linux::Loader;
use platform::PARTITION_TABLE;
pub use platform::{Platform, REGISTERS, RTMR_1, RTMR_2};
use uki::Uki;

/// The firmware measures these before it starts a boot option, and after one that failed (TCG PC
/// Client Platform Firmware Profile §10.4.1, EV_EFI_ACTION).
const CALLING: &str = "Calling EFI Application from Boot Option";
const RETURNING: &str = "Returning from EFI Application from Boot Option";
/// The firmware measures these when the kernel takes over.
const EXIT: [&str; 2] = [
    "Exit Boot Services Invocation",
    "Exit Boot Services Returned with Success",
];

/// The image or kernel that a machine boots.
pub struct Image(Kind);

enum Kind {
    /// From a disk.
    Disk(Box<Disk>),
    /// From a file on an EFI system partition about which nothing else is known.
    File(Uki),
    /// From QEMU.
    DirectUki(Uki),
    DirectLinux(Linux),
}

/// The value of a register, or why it cannot be predicted.
pub type Value = Result<Vec<u8>, Missing>;

/// A value of a register, and the conditions for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// The value.
    pub value: Value,
    /// The part of the boot; `None`: both.
    pub stage: Option<Stage>,
    /// The other conditions in words; empty if there are none.
    pub when: String,
    /// The events that give the value.
    pub events: Vec<LoggedEvent>,
}

impl Image {
    /// Reads a raw disk image with an EFI system partition. `chosen` is the path on it of the
    /// unified kernel image that boots; without it there must be only one. `profile` is the ID or
    /// the number of the image's profile that boots; without it, it is the first.
    pub fn disk(
        disk: impl Read + Seek,
        chosen: Option<&str>,
        profile: Option<&str>,
    ) -> Result<Image, Error> {
        Disk::read(disk, chosen, profile).map(|disk| Image(Kind::Disk(Box::new(disk))))
    }

    /// Returns the paths of the unified kernel images on a disk, if systemd-boot chooses between only
    /// such images.
    pub fn choices(disk: impl Read + Seek) -> Result<Vec<String>, Error> {
        Disk::choices(disk)
    }

    /// Reads a raw disk image whose boot manager will start the unified kernel image `added`, which
    /// an update writes to it.
    pub fn added(disk: impl Read + Seek, added: &[u8]) -> Result<Image, Error> {
        Disk::with(disk, added).map(|disk| Image(Kind::Disk(Box::new(disk))))
    }

    /// Returns the kernel command line in a unified kernel image.
    pub fn command_line(uki: &[u8]) -> Result<String, Error> {
        uki::words(uki)
    }

    /// Reads a unified kernel image that the firmware starts from an EFI system partition.
    /// `profile` is as for a disk.
    pub fn uki(bytes: &[u8], profile: Option<&str>) -> Result<Image, Error> {
        let surroundings = uki::Surroundings::default();
        Uki::parse(bytes, Some(&surroundings), profile).map(|uki| Image(Kind::File(uki)))
    }

    /// Reads a unified kernel image that QEMU passes to the firmware (`-kernel`). `profile` is as
    /// for a disk.
    pub fn direct_uki(bytes: &[u8], profile: Option<&str>) -> Result<Image, Error> {
        Uki::parse(bytes, None, profile).map(|uki| Image(Kind::DirectUki(uki)))
    }

    /// Reads a kernel that QEMU passes to the firmware (`-kernel`, `-initrd`, `-append`).
    pub fn direct_linux(
        kernel: &[u8],
        initrd: Option<&[u8]>,
        command_line: &str,
        loader: Loader,
    ) -> Result<Image, Error> {
        Linux::new(kernel, initrd, command_line, loader)
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

    /// Returns the name of the profile that boots; `None` if the image has none.
    pub fn profile(&self) -> Option<String> {
        Some(self.unified()?.profile()?.to_string())
    }

    /// Returns a description of what boots.
    pub fn description(&self) -> String {
        let profile = |uki: &Uki| match uki.profile() {
            Some(profile) if profile.title().is_empty() => format!(", its profile {profile}"),
            Some(profile) => format!(", its profile {profile} ({})", profile.title()),
            None => String::new(),
        };
        let stub = |uki: &Uki| {
            let (version, profile) = (&uki.version, profile(uki));
            format!("a unified kernel image with systemd-stub {version}{profile}")
        };
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

    /// Returns warnings that an operator should read before relying on the values.
    pub fn warnings(&self) -> &[String] {
        match &self.0 {
            Kind::DirectLinux(linux) => &linux.warnings,
            _ => self.unified().map_or(&[], |uki| &uki.warnings),
        }
    }

    /// Returns the known facts about how the image treats its machine's host.
    pub fn contents(&self) -> &host::Contents {
        match &self.0 {
            Kind::DirectLinux(linux) => &linux.contents,
            Kind::Disk(disk) => &disk.uki.contents,
            Kind::File(uki) | Kind::DirectUki(uki) => &uki.contents,
        }
    }

    /// Returns each channel from the host into the machine, and whether the image closes it. If the
    /// operator says that Secure Boot is on, PCR 4 may differ from its value without Secure Boot:
    /// then PCR 4 proves that it is on.
    pub fn channels(&self, platform: Platform, given: &KnownConditions) -> Vec<host::HostChannel> {
        let with = |on| {
            let secure_boot = Some(on);
            let given = KnownConditions {
                secure_boot,
                ..*given
            };
            self.value(platform, platform.boot_loader(), &given)
        };
        let proves_it = given.secure_boot == Some(true)
            && matches!((with(true), with(false)), (Ok(on), Ok(off)) if on != off);
        self.contents().channels(proves_it)
    }

    /// Returns the measurements of a boot under these conditions.
    pub fn log(&self, platform: Platform, conditions: &Conditions) -> BootLog {
        let mut log = BootLog::new(platform);
        let is_direct = matches!(self.0, Kind::DirectUki(_) | Kind::DirectLinux(_));
        // OVMF loads the files from QEMU before it calls the first boot option
        if is_direct {
            self.measure_image(&mut log);
        }
        log.word(4, CALLING);
        // the firmware ends its own part of each PCR, and of RTMR 1 as a whole
        let ended = if log.is_tdx() {
            &[4][..]
        } else {
            &[2, 3, 4, PARTITION_TABLE]
        };
        for pcr in ended {
            log.extend(*pcr, "a separator", Digest::of(&[&[0; 4]]));
        }
        if conditions.failed_option && !is_direct {
            log.word(4, RETURNING);
            log.word(4, CALLING);
        }
        match &self.0 {
            Kind::Disk(disk) => {
                log.extend(PARTITION_TABLE, "the partition table", disk.partition_table);
                if let Some(manager) = &disk.boot_manager {
                    log.extend(4, "systemd-boot", manager.image);
                    let is_measured = manager.measures_on_tdx || !log.is_tdx();
                    if let Some(digest) = manager.configuration.filter(|_| is_measured) {
                        log.extend(PARTITION_TABLE, "loader.conf", digest);
                    }
                    if let Some(option) = disk.uki.profile().and_then(uki::Profile::option) {
                        log.utf16(12, "systemd-boot's option for the profile", &option);
                    }
                }
            }
            Kind::File(_) => log.unknown(
                PARTITION_TABLE,
                "it has the partition table of the disk",
                "give the disk; a TPM has it only in PCR 5, which changes when the disk grows: leave it out",
            ),
            Kind::DirectUki(_) | Kind::DirectLinux(_) => {}
        }
        if !is_direct {
            self.measure_image(&mut log);
        }
        match (&self.0, self.unified()) {
            (Kind::DirectLinux(linux), _) => linux.measure(&mut log),
            (_, Some(uki)) => uki.measure(conditions.secure_boot, &mut log),
            (_, None) => {}
        }
        for action in EXIT {
            log.word(PARTITION_TABLE, action);
        }
        // the booted system: systemd's units measure only into a TPM
        if let (Some(systemd), false) = (self.unified().and_then(Uki::systemd), log.is_tdx()) {
            conditions
                .units
                .measure(systemd, conditions.stage, &mut log);
        }
        log
    }

    fn measure_image(&self, log: &mut BootLog) {
        match &self.0 {
            Kind::DirectLinux(linux) => linux.measure_image(log),
            Kind::Disk(disk) => disk.uki.measure_image(log),
            Kind::File(uki) | Kind::DirectUki(uki) => uki.measure_image(log),
        }
    }

    /// Returns the possible conditions of a boot, starting with a usual boot.
    pub fn conditions(&self, given: &KnownConditions) -> Vec<Conditions> {
        let systemd = self.unified().and_then(Uki::systemd);
        let units = given.units.map(|units| units.with(systemd));
        let given = KnownConditions { units, ..*given };
        Conditions::all(systemd)
            .into_iter()
            .filter(|conditions| given.allows(conditions))
            .collect()
    }

    /// Returns the possible values of each register that can be predicted, under the given
    /// conditions.
    pub fn registers(
        &self,
        platform: Platform,
        given: &KnownConditions,
    ) -> BTreeMap<u32, Vec<Case>> {
        let conditions = self.conditions(given);
        let logs: Vec<_> = conditions
            .iter()
            .map(|it| (*it, self.log(platform, it)))
            .collect();
        let known = platform.known().into_iter();
        known
            .map(|register| (register, cases(register, &logs)))
            .collect()
    }

    /// Returns the value of a register under the given conditions, if the firmware's first boot
    /// option starts. If there are several values, the error has all cases.
    pub fn value(
        &self,
        platform: Platform,
        register: u32,
        given: &KnownConditions,
    ) -> Result<Vec<u8>, Vec<Case>> {
        let conditions = self.conditions(given);
        let usual = conditions.iter().filter(|it| !it.failed_option);
        let logs: Vec<_> = usual.map(|it| (*it, self.log(platform, it))).collect();
        let cases = cases(register, &logs);
        match cases.first().map(|case| &case.value) {
            Some(Ok(first)) if cases.iter().all(|case| case.value.as_ref() == Ok(first)) => {
                Ok(first.clone())
            }
            _ => Err(cases),
        }
    }

    /// Returns whether a TDX machine's registers cover the partition table of the disk, which
    /// changes when the disk grows.
    pub fn has_partition_table(&self) -> bool {
        matches!(self.0, Kind::Disk(_))
    }
}

/// Returns the values of a register in these boots, each with the conditions that distinguish its
/// boots from the others.
fn cases(register: u32, logs: &[(Conditions, BootLog)]) -> Vec<Case> {
    let mut all: Vec<Case> = Vec::new();
    for stage in Stage::ALL {
        let logs: Vec<_> = logs.iter().filter(|(it, _)| it.stage == stage).collect();
        let among: Vec<Conditions> = logs.iter().map(|(it, _)| *it).collect();
        let mut values: Vec<(Value, Vec<Conditions>, &BootLog)> = Vec::new();
        for (conditions, log) in logs {
            let value = log.value(register);
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
                    events: log.events(register).cloned().collect(),
                }),
            }
        }
    }
    all
}
