//! The result of `firstlight verify`: a table for people, and JSON for programs.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::text::hex;
use serde_json::{Value, json};

use super::demand::{EvidenceSource, MachineRequirements};
use super::presented::PresentedEvidence;
use crate::shell::error::{Error, refusals};
use crate::trust::explain;
use crate::workspace::sources::without_verdicts;
use tpm::CLUSTER_ID_PCR;
use verifier::policy::tpm::TpmClaims;
use verifier::{
    Identified, Image, KeyName, PlatformClaims, Policy, Property, Refusal, RegisterNames,
    Registers, Stage, TcbPart,
};

/// What the command says.
pub struct VerifyReport<'a> {
    source: &'a EvidenceSource,
    demand: &'a MachineRequirements,
    /// What the command found.
    pub verdict: VerifyOutcome,
    form: Option<&'static str>,
    role: Option<&'static str>,
    key: Option<KeyName>,
    /// Whether the TPM or the hardware has signed the registers.
    is_genuine: bool,
    /// Whether a platform endorses the key that signed them.
    is_endorsed: bool,
    /// The proven claims about the platform.
    platform: Option<Arc<PlatformClaims>>,
    stage: Option<Stage>,
    image: Option<String>,
    /// Whether the image confines the host's ACPI tables.
    confines_acpi: Option<bool>,
    /// The proven claims about the TPM.
    tpm: Option<Arc<TpmClaims>>,
    registers: Vec<Register>,
}

/// What the command found.
pub enum VerifyOutcome {
    /// The machine meets all requirements.
    Proven,
    /// The machine does not meet them, for this reason.
    Refused(Refusal),
    /// No server answers, for this reason.
    Unreachable(String),
}

impl VerifyOutcome {
    fn name(&self) -> &'static str {
        match self {
            VerifyOutcome::Proven => "proven",
            VerifyOutcome::Refused(_) => "refused",
            VerifyOutcome::Unreachable(_) => "unreachable",
        }
    }

    fn reason(&self) -> Option<&str> {
        match self {
            VerifyOutcome::Proven => None,
            VerifyOutcome::Refused(refusal) => Some(&refusal.text),
            VerifyOutcome::Unreachable(why) => Some(why),
        }
    }

    /// Returns the reasons of a refusal for programs.
    fn refusals(&self) -> Vec<Value> {
        match self {
            VerifyOutcome::Refused(refusal) => refusals(refusal),
            _ => vec![],
        }
    }
}

/// A register of the machine.
struct Register {
    number: u32,
    verdict: &'static str,
    expected: Option<Vec<u8>>,
    got: Option<Vec<u8>>,
}

impl<'a> VerifyReport<'a> {
    /// Makes the report on a machine's evidence. The outer error of the verdict: no server answers.
    pub fn new(
        source: &'a EvidenceSource,
        demand: &'a MachineRequirements,
        presented: Option<&PresentedEvidence>,
        verdict: Result<Result<Identified, Refusal>, Error>,
    ) -> VerifyReport<'a> {
        // the proven facts about a refused machine: its signatures, and the policy's requirements
        // for the platform
        let genuine = || {
            let any = demand.policy.clone().of_any_image().believing_any();
            let any = any.without_cloud_statements();
            let validator = demand.variant.validator_for(any, &without_verdicts());
            presented?.identified_by(&*validator.ok()?)
        };
        let (verdict, genuine) = match verdict {
            Ok(Ok(identified)) => (VerifyOutcome::Proven, Some(identified)),
            Ok(Err(why)) => (VerifyOutcome::Refused(why), genuine()),
            Err(why) => (VerifyOutcome::Unreachable(why.to_string()), genuine()),
        };
        let key = genuine.as_ref().and_then(|it| it.machine.as_deref());
        let mut report = VerifyReport {
            source,
            demand,
            form: presented.map(|presented| presented.channel().name()),
            role: presented
                .zip(genuine.as_ref())
                .and_then(|(presented, identified)| presented.role(identified))
                .map(|role| role.name()),
            key: key.and_then(|name| name.parse().ok()),
            is_genuine: genuine.is_some(),
            is_endorsed: genuine.as_ref().is_some_and(|it| it.is_endorsed),
            platform: genuine.as_ref().and_then(|it| it.platform.clone()),
            tpm: genuine.as_ref().and_then(|it| it.tpm.clone()),
            stage: None,
            image: None,
            confines_acpi: None,
            registers: vec![],
            verdict,
        };
        if let Some(presented) = presented.filter(|_| report.is_genuine) {
            report.compare(&explain::quoted(presented.document()).unwrap_or_default());
        }
        report
    }

    /// Compares the registers with those of the nearest image, at the nearest stage.
    fn compare(&mut self, values: &BTreeMap<u32, Vec<u8>>) {
        let (stage, image) = nearest(&self.demand.policy, values);
        self.stage = stage;
        self.confines_acpi = Some(image.confines_acpi());
        self.image = Some(image.name().into()).filter(|name: &String| !name.is_empty());
        let is_set = |value: &Vec<u8>| !value.iter().all(|byte| matches!(byte, 0 | 0xff));
        let measurements = image.measurements();
        let mut numbers: Vec<u32> = values
            .iter()
            .filter(|(_, value)| is_set(value))
            .map(|(number, _)| *number)
            .chain(measurements.keys().copied())
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        self.registers = numbers
            .into_iter()
            .map(|number| {
                let got = values.get(&number);
                let measurement = measurements.get(&number);
                let verdict = match (measurement, got) {
                    (None, _) => "not in the policy",
                    (Some(it), Some(got)) if it.expected[..] == got[..] => "as expected",
                    (Some(it), _) if it.warn_only => "differs (only a warning)",
                    (Some(_), Some(_)) => "differs",
                    (Some(_), None) => "not quoted",
                };
                Register {
                    number,
                    verdict,
                    expected: measurement.map(|it| it.expected.to_vec()),
                    got: got.cloned(),
                }
            })
            .collect();
    }

    /// Returns why the policy trusts the key that signed the registers.
    fn belief(&self) -> Option<&'static str> {
        let policy = &self.demand.policy;
        let names_none = policy.keys().is_empty() && policy.endorsement_roots().is_empty();
        match (&self.key, &self.verdict) {
            (Some(key), _) if policy.keys().contains(key) => Some("named"),
            // without a TPM the platform signs the registers itself, and there is no key that the
            // policy could list
            (None, VerifyOutcome::Proven) if self.is_endorsed => Some("endorsed"),
            _ if self.is_endorsed && names_none => Some("endorsed"),
            (None, _) => None,
            _ if policy.believes_any_key() => Some("any key"),
            (_, VerifyOutcome::Proven) => Some("certified"),
            _ => None,
        }
    }

    fn stage(&self) -> Option<&'static str> {
        self.stage.map(|stage| match stage {
            Stage::Initramfs => "initramfs",
            Stage::Booted => "booted",
        })
    }

    /// Returns how the proven image treats the host's ACPI tables.
    fn acpi(&self) -> Option<&'static str> {
        let is_proven = matches!(self.verdict, VerifyOutcome::Proven);
        self.confines_acpi
            .filter(|_| is_proven)
            .map(|confines| if confines { "the host's tables are confined" } else {
                "the host's tables are trusted: the policy does not say that the kernel confines them (requireConfinedAcpi refuses such \
                 images)"
            })
    }

    /// Returns the cluster in the evidence.
    fn cluster(&self) -> Option<String> {
        let proven = matches!(self.verdict, VerifyOutcome::Proven);
        self.demand.cluster.filter(|_| proven).map(|id| hex(&id))
    }

    /// Returns the kind of the registers in the requirements.
    fn kind(&self) -> Registers {
        self.demand.policy.registers()
    }

    fn meaning(&self, number: u32) -> &'static str {
        meaning(self.kind(), number)
    }

    /// Returns the table for people.
    pub fn text(&self) -> String {
        let no_cluster = match self.verdict {
            VerifyOutcome::Proven => "none",
            _ => "not proven",
        };
        let platform = self.platform.as_deref();
        let mut facts = vec![
            ("source", Some(self.source.to_string()), ""),
            ("verdict", Some(self.verdict.name().into()), ""),
            ("form", self.form.map(String::from), "unknown"),
            ("role", self.role.map(String::from), "unknown"),
            ("stage", self.stage().map(String::from), "unknown"),
            ("image", self.image.clone(), "without a name"),
            ("cluster", self.cluster(), no_cluster),
            ("key", self.key.map(|key| key.to_string()), "none"),
            ("believed", self.belief().map(String::from), "no"),
        ];
        if let Some(tpm) = &self.tpm {
            let firmware = tpm
                .firmware
                .map_or("not shown".into(), |it| format!("{:#x}", it.0));
            let text = format!("{} {}, firmware {firmware}", tpm.vendor, tpm.model);
            facts.push(("TPM", Some(text), ""));
        }
        if let Some(platform) = platform {
            let chip = platform.chip.clone();
            facts.push(("platform", Some(platform.technology.clone()), ""));
            facts.push(("signed by", Some(platform.signed_by.clone()), ""));
            facts.push(("chip", chip, "not named"));
        }
        facts.push(("ACPI", self.acpi().map(String::from), "unknown"));
        let exceptions = self.demand.policy.exceptions().iter();
        facts.extend(exceptions.map(|it| ("exception", Some(it.to_string()), "")));
        let shown = if self.is_genuine { facts.len() } else { 2 };
        let mut text = String::new();
        for (name, value, otherwise) in &facts[..shown] {
            let value = value.as_deref().unwrap_or(otherwise);
            text += &format!("{:<10} {value}\n", format!("{name}:"));
        }
        text += &platform.map(of_platform).unwrap_or_default();
        if !self.registers.is_empty() {
            text += "\n";
        }
        let verdicts = self.registers.iter().map(|it| it.verdict.len());
        let width = verdicts.max().unwrap_or_default();
        for register in &self.registers {
            let Register {
                number, verdict, ..
            } = register;
            let value = |value: &Option<Vec<u8>>| value.as_deref().map_or("-".into(), hex);
            let got = value(&register.got);
            let (name, meaning) = (self.kind().name(*number), self.meaning(*number));
            text += &format!("{name:<6}  {verdict:width$}  {got:.8}..  {meaning}\n");
            if register.is_wrong() {
                let expected = value(&register.expected);
                text += &format!("        expected {expected}\n        got      {got}\n");
            }
        }
        text
    }

    /// Returns the JSON for programs.
    pub fn json(&self) -> String {
        let registers = self.registers.iter().map(|register| {
            let value = |value: &Option<Vec<u8>>| value.as_deref().map(hex);
            json!({
                "index": register.number,
                "name": self.kind().name(register.number),
                "meaning": self.meaning(register.number),
                "verdict": register.verdict,
                "expected": value(&register.expected),
                "got": value(&register.got),
            })
        });
        let report = json!({
            "source": self.source.to_string(),
            "verdict": self.verdict.name(),
            "reason": self.verdict.reason(),
            "refusals": self.verdict.refusals(),
            "form": self.form,
            "role": self.role,
            "stage": self.stage(),
            "image": self.image,
            "confinesAcpi": self.confines_acpi.filter(|_| matches!(self.verdict, VerifyOutcome::Proven)),
            "cluster": self.cluster(),
            "key": self.key.map(|key| key.to_string()),
            "believed": self.belief(),
            "platform": self.platform.as_deref(),
            "tpm": self.tpm.as_deref(),
            "registers": registers.collect::<Vec<Value>>(),
        });
        format!("{report:#}\n")
    }
}

/// Returns the lines about a platform: which values are bound to each other, the versions with
/// their minimums, the other properties.
fn of_platform(claims: &PlatformClaims) -> String {
    let bound = claims.bound.iter().map(|it| ("bound".into(), it.clone()));
    let version = |part: &TcbPart| {
        let TcbPart { name, got, minimum } = part;
        (
            format!("TCB {name}"),
            format!("{got}, at least {minimum} is demanded"),
        )
    };
    let property = |it: &Property| (it.name.to_owned(), it.value.clone());
    let lines: Vec<(String, String)> = bound
        .chain(claims.tcb.iter().map(version))
        .chain(claims.properties.iter().map(property))
        .collect();
    let width = lines.iter().map(|(name, _)| name.len()).max();
    let width = width.unwrap_or_default();
    let lines = lines
        .iter()
        .map(|(name, value)| format!("{name:width$}  {value}\n"));
    format!("\n{}", lines.collect::<String>())
}

impl Register {
    fn is_wrong(&self) -> bool {
        !matches!(self.verdict, "as expected" | "not in the policy")
    }
}

/// Returns how messages call the image of a policy whose registers are those of an attestation
/// document, which a validator has accepted; `None` if it has no registers.
pub fn image_of(policy: &Policy, document: &[u8]) -> Option<Box<str>> {
    let (_, image) = nearest(policy, &explain::quoted(document)?);
    Some(image.to_string().into())
}

/// Returns the image with the fewest differences, and the stage at which it has them; no stage if
/// the policy does not distinguish them.
fn nearest(policy: &Policy, values: &BTreeMap<u32, Vec<u8>>) -> (Option<Stage>, Image) {
    let stages: &[Option<Stage>] = if policy.knows_stages() {
        &[Some(Stage::Initramfs), Some(Stage::Booted)]
    } else {
        &[None]
    };
    let candidates = stages.iter().map(|stage| {
        let policy = policy.clone().at(stage.unwrap_or(Stage::Booted));
        (*stage, policy.nearest(values).clone())
    });
    let nearest = candidates.min_by_key(|(_, image)| {
        let wrong = image.mismatches(values);
        wrong
            .filter(|(_, measurement, _)| !measurement.warn_only)
            .count()
    });
    nearest.unwrap_or_else(|| (None, policy.images()[0].clone()))
}

/// Returns what is measured into a register.
pub fn meaning(kind: Registers, number: u32) -> &'static str {
    match kind {
        Registers::Pcrs => of_pcr(number),
        Registers::Rtmrs => of_rtmr(number),
    }
}

/// Returns what is measured into a PCR (TCG PC Client Platform Firmware Profile; UAPI group, "Linux
/// TPM PCR Registry").
fn of_pcr(number: u32) -> &'static str {
    match number {
        0 => "firmware",
        1 => "configuration of the firmware",
        2 => "drivers and programs of extension cards",
        3 => "configuration of extension cards",
        4 => "boot loader and unified kernel image",
        5 => "configuration of the boot loader, partition table",
        6 => "of the vendor of the machine",
        7 => "Secure Boot: state, keys, certificates",
        8 => "commands of GRUB, kernel command line",
        9 => "files that GRUB or the kernel loads: initrd, command line",
        10 => "files that the kernel's IMA measures",
        11 => "unified kernel image, and the phases of its boot",
        12 => "command line, credentials and addons from outside the image",
        13 => "system extensions of the initrd",
        14 => "keys of shim",
        CLUSTER_ID_PCR => "the ID of the cluster; zero: of none",
        16 => "debug",
        17..=22 => "dynamic root of trust",
        23 => "applications",
        _ => "not defined",
    }
}

/// Returns what is measured into a register of a TDX machine (Intel TDX Virtual Firmware Design
/// Guide).
fn of_rtmr(number: u32) -> &'static str {
    match number {
        0 => "virtual firmware",
        1 => "configuration of the firmware, Secure Boot",
        2 => "boot loader, partition table, kernel",
        3 => "command line, initrd; the ID of the cluster",
        4 => "applications",
        _ => "not defined",
    }
}
