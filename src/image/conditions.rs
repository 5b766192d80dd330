//! The factors that determine the registers in addition to the image: the conditions of a boot, and
//! the texts that systemd's units measure.

use base::boot::phases::{self, OS_SEPARATOR, UNTIL_BOOTED};

pub use base::boot::stage::Stage;

use super::event_log::BootLog;

/// Which of systemd's measuring units run. They run only if systemd-stub started the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Units {
    /// All of them, as in an initramfs with a complete systemd.
    All,
    /// systemd-pcrphase in the initramfs and all units in the booted system, as with dracut's
    /// module `systemd-pcrphase`.
    Phases,
    /// The units of the booted system; the initramfs has none.
    Booted,
    /// No unit: all are masked or missing.
    None,
}

/// The conditions of one boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conditions {
    /// The part of the boot.
    pub stage: Stage,
    /// Whether the firmware checks signatures.
    pub secure_boot: bool,
    /// Which of systemd's units run.
    pub units: Units,
    /// Whether the firmware tried a boot option that failed, such as an empty disk, before the
    /// successful one.
    pub failed_option: bool,
}

/// The conditions that an operator knows; `None`: any.
#[derive(Debug, Clone, Copy, Default)]
pub struct KnownConditions {
    /// The part of the boot.
    pub stage: Option<Stage>,
    /// Whether the firmware checks signatures.
    pub secure_boot: Option<bool>,
    /// Which of systemd's units run.
    pub units: Option<Units>,
}

/// The first versions of systemd with systemd-pcrmachine and systemd-pcrfs, with NvPCRs
/// (systemd-tpm2-setup, systemd-pcrnvdone), with systemd-pcrosseparator, and the first whose NvPCRs
/// need no credential on the EFI system partition.
const PCR_MACHINE: u32 = 253;
const NV_PCR: u32 = 259;
const PCR_OS_SEPARATOR: u32 = 261;
const NV_PCR_WITHOUT_CREDENTIAL: u32 = 262;

impl Units {
    /// All possibilities.
    pub const ALL: [Units; 4] = [Units::All, Units::Phases, Units::Booted, Units::None];

    /// Returns the choices that differ with this version of systemd; without a version, no unit can
    /// run.
    pub(crate) fn of(systemd: Option<u32>) -> &'static [Units] {
        match systemd {
            None => &[Units::None],
            Some(..NV_PCR) => &[Units::All, Units::Booted, Units::None],
            Some(_) => &[Units::All, Units::Phases, Units::Booted, Units::None],
        }
    }

    /// Returns the choice in [`Units::of`] this version of systemd that measures the same.
    pub(crate) fn with(self, systemd: Option<u32>) -> Units {
        match (self, systemd) {
            (_, None) => Units::None,
            (Units::Phases, Some(..NV_PCR)) => Units::All,
            (units, Some(_)) => units,
        }
    }

    /// Returns the keyword for command lines: `all`, `phases`, `booted`, `none`.
    pub fn word(self) -> &'static str {
        match self {
            Units::All => "all",
            Units::Phases => "phases",
            Units::Booted => "booted",
            Units::None => "none",
        }
    }

    /// Adds the measurements of the units of this version of systemd up to a stage.
    pub(crate) fn measure(self, systemd: u32, stage: Stage, log: &mut BootLog) {
        let is_booted = stage == Stage::Booted;
        let phases = match self {
            Units::All | Units::Phases => &UNTIL_BOOTED[..],
            Units::Booted => &UNTIL_BOOTED[2..],
            Units::None => &[],
        };
        let reached = match (is_booted, self) {
            (true, _) => phases.len(),
            (false, Units::Booted) => 0,
            (false, _) => phases.len().min(1),
        };
        for word in &phases[..reached] {
            log.word(11, word);
        }
        if self == Units::All && systemd >= PCR_OS_SEPARATOR {
            for pcr in (0..24).filter(|pcr| phases::words_of(*pcr).contains(&OS_SEPARATOR)) {
                log.word(pcr, OS_SEPARATOR);
            }
        }
        let sets_up_nv_pcrs = self == Units::All || is_booted && self != Units::None;
        if systemd >= NV_PCR && sets_up_nv_pcrs {
            let instead = if systemd < NV_PCR_WITHOUT_CREDENTIAL {
                "mask systemd-tpm2-setup in the booted system, which also writes a credential to the EFI system partition: \
                     without that PCR 12 differs from the second boot on. Then pin PCR 11 with 12 and 13"
            } else {
                "pin PCR 11 with 12 and 13, or mask these units"
            };
            let why = "systemd-tpm2-setup and systemd-pcrnvdone measure the set-up of NvPCRs, which differs between machines";
            log.unknown(9, why, instead);
        }
        if systemd >= PCR_MACHINE && is_booted && self != Units::None {
            log.unknown(
                15,
                "systemd-pcrmachine measures the machine ID, and systemd-pcrfs the file systems",
                "mask systemd-pcrmachine and systemd-pcrfs: PCR 15 says whether a node belongs to a cluster",
            );
        }
    }
}

impl Conditions {
    /// Returns all combinations for this version of systemd; those of a usual boot come first.
    pub(crate) fn all(systemd: Option<u32>) -> Vec<Conditions> {
        let mut all = Vec::new();
        for stage in Stage::ALL {
            for failed_option in [false, true] {
                for &units in Units::of(systemd) {
                    for secure_boot in [false, true] {
                        all.push(Conditions {
                            stage,
                            secure_boot,
                            units,
                            failed_option,
                        });
                    }
                }
            }
        }
        all
    }

    /// Describes the conditions that these combinations share and that not all combinations of
    /// `among` share; empty if there are none.
    pub(crate) fn words(these: &[Conditions], among: &[Conditions]) -> String {
        let mut words = Vec::new();
        let has = |list: &[Conditions], test: &dyn Fn(&Conditions) -> bool| list.iter().any(test);
        let one_of = |test: &dyn Fn(&Conditions) -> bool| has(these, test) || !has(among, test);
        match (one_of(&|c| c.secure_boot), one_of(&|c| !c.secure_boot)) {
            (true, false) => words.push("Secure Boot on".to_owned()),
            (false, true) => words.push("Secure Boot off".to_owned()),
            _ => {}
        }
        let used = Units::ALL.map(|units| (units, one_of(&|c| c.units == units)));
        if used.iter().any(|(_, used)| !used) {
            let names = used
                .iter()
                .filter(|(units, _)| has(these, &|c| c.units == *units));
            let names: Vec<_> = names.map(|(units, _)| units.word()).collect();
            words.push(format!("systemd's units: {}", names.join(" or ")));
        }
        match (one_of(&|c| c.failed_option), one_of(&|c| !c.failed_option)) {
            (true, false) => words.push("after a boot option that failed".to_owned()),
            (false, true) => words.push("the first boot option starts".to_owned()),
            _ => {}
        }
        words.join(", ")
    }
}

impl KnownConditions {
    /// Returns whether these conditions are possible.
    pub(crate) fn allows(&self, conditions: &Conditions) -> bool {
        self.stage.is_none_or(|stage| stage == conditions.stage)
            && self
                .secure_boot
                .is_none_or(|on| on == conditions.secure_boot)
            && self.units.is_none_or(|units| units == conditions.units)
    }
}
