//! An operator's requirements for a report: the minimum versions as data, the others by name.

use serde::{Deserialize, Serialize};

use super::report::{FirmwareVersion, GuestPolicy, Report};
use super::tcb::{Cpuid, Product, Tcb, Tcbs};
use crate::json::{Digits, Number, is_default};
use crate::refusal::{Kind, Refusal};

/// What a policy requires of a report. By default refuses what no operator wants (debugging,
/// migration, a VMPL above 0, provisional firmware) and requires no minimum version.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SnpRequirements {
    /// The minimum for every chip.
    #[serde(skip)]
    pub minimum: Tcb,
    /// Additional minimums for particular chips. Each one that matches a chip applies; if this list
    /// is not empty, a chip that matches none is refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub floors: Vec<Floor>,
    /// The minimum ABI version that the guest policy must require: major, minor.
    #[serde(skip_serializing_if = "is_default")]
    pub minimum_abi: (u8, u8),
    /// The minimum version of the guest.
    #[serde(skip_serializing_if = "is_default")]
    pub minimum_guest_svn: u32,
    /// The minimum version of the running and of the committed firmware: major, minor, build.
    #[serde(skip_serializing_if = "is_default")]
    pub minimum_firmware: (u8, u8, u8),
    /// The maximum VMPL.
    #[serde(skip_serializing_if = "is_default")]
    pub maximum_vmpl: u32,
    /// Whether a migration agent may move the guest.
    #[serde(skip_serializing_if = "is_default")]
    pub allow_migration: bool,
    /// Whether the guest may run with simultaneous multithreading; `true` also requires that it is
    /// off on the platform.
    #[serde(skip_serializing_if = "is_default")]
    pub refuse_smt: bool,
    /// Bits of the guest policy that must be 1 (RAPL_DIS 23, CIPHERTEXT_HIDING 24,
    /// PAGE_SWAP_DISABLE 25).
    #[serde(skip_serializing_if = "is_default")]
    pub policy_bits: Number,
    /// Bits of the platform info that must be 1 (RAPL_DIS 3, CIPHERTEXT_HIDING_DRAM 4,
    /// ALIAS_CHECK_COMPLETE 5).
    #[serde(skip_serializing_if = "is_default")]
    pub platform_bits: Number,
    /// Bits of the platform info that must be 0 (TSME_EN 1, TIO_EN 7).
    #[serde(skip_serializing_if = "is_default")]
    pub forbidden_platform_bits: Number,
    /// Bits of both mitigation vectors that must be 1.
    #[serde(skip_serializing_if = "is_default")]
    pub mitigation_bits: Number,
    /// The accepted chips; empty for every chip.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chips: Vec<Chip>,
    /// The accepted clouds of a VLEK; empty for every cloud.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub clouds: Vec<String>,
    /// The accepted launch digests; empty for every one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub launch_measurements: Vec<Digits<48>>,
    /// The accepted host data; empty for every value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host_data: Vec<Digits<32>>,
    /// The accepted families of the guest, from its ID block; empty for every one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub family_ids: Vec<Digits<16>>,
    /// The accepted images of the guest, from its ID block; empty for every one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_ids: Vec<Digits<16>>,
    /// The accepted digests of ID keys; empty for every one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub id_keys: Vec<Digits<48>>,
    /// The accepted digests of author keys; empty for every one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub author_keys: Vec<Digits<48>>,
    /// What happens without AMD's list of revoked certificates. The caller applies this, because it
    /// may have the list.
    #[serde(skip_serializing_if = "is_default")]
    pub revocation_list: RevocationCheck,
}

/// What happens if AMD's list of revoked certificates is missing or not valid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RevocationCheck {
    /// The policy does not say it: like [`Required`](Self::Required) in a program that can fetch
    /// the list, else like [`Optional`](Self::Optional).
    #[default]
    #[serde(skip)]
    Unsaid,
    /// Refuse the machine. A node refuses it too: it has only the revocation list that the peer
    /// sent.
    Required,
    /// The machine is accepted with a warning.
    Optional,
}

/// A chip, as certificates and reports name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a chip has 128 hexadecimal digits, of a Turin 16"
)]
pub enum Chip {
    /// Of a Milan or Genoa.
    Long(Digits<64>),
    /// Of a Turin.
    Short(Digits<8>),
}

impl Chip {
    fn bytes(&self) -> &[u8] {
        match self {
            Chip::Long(digits) => &digits.0,
            Chip::Short(digits) => &digits.0,
        }
    }
}

/// A minimum for some chips.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Floor {
    /// The product, and so the family.
    pub product: Product,
    /// The model; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<u8>,
    /// The stepping; `None` for all. The microcode of each stepping has its own numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stepping: Option<u8>,
    /// The minimum of LAUNCH_TCB, REPORTED_TCB, COMMITTED_TCB and CURRENT_TCB.
    pub minimum: Tcb,
}

impl Floor {
    /// Returns whether this minimum applies to a chip. Without the CPUID, which a report of version
    /// 2 lacks, only a minimum for the whole product applies.
    fn fits(&self, product: Product, cpuid: Option<Cpuid>) -> bool {
        let is = |wanted: Option<u8>, got: Option<u8>| wanted.is_none() || wanted == got;
        self.product == product
            && is(self.model, cpuid.map(|cpuid| cpuid.model))
            && is(self.stepping, cpuid.map(|cpuid| cpuid.stepping))
    }
}

impl SnpRequirements {
    /// Returns whether the policy pins the firmware, its signer, or the chips.
    pub fn pins_firmware(&self) -> bool {
        self.pins_launch() || !self.chips.is_empty()
    }

    /// Returns whether the policy pins what the machine launched, or who signed that.
    pub fn pins_launch(&self) -> bool {
        let signers = self.id_keys.iter().chain(&self.author_keys);
        signers.chain(&self.launch_measurements).next().is_some()
    }

    /// Returns the minimum that applies to the chip, or the first requirement that is not met.
    /// `chip` and `cloud` are those of the key that signed the report.
    pub fn check(
        &self,
        report: &Report,
        chip: Option<&[u8]>,
        cloud: Option<&str>,
        product: Product,
        tcbs: &Tcbs,
    ) -> Result<Tcb, Refusal> {
        self.check_policy(report.policy)?;
        self.check_platform(report)?;
        self.check_lists(report, chip, cloud)?;
        check_order(report, tcbs)?;
        self.check_firmware(report)?;
        let minimum = self.floor(product, report.cpuid)?;
        for (name, tcb) in [
            ("LAUNCH_TCB", tcbs.launch),
            ("REPORTED_TCB", tcbs.reported),
            ("COMMITTED_TCB", tcbs.committed),
            ("CURRENT_TCB", tcbs.current),
        ] {
            if let Some((part, got, minimum)) = tcb.below(&minimum).first() {
                let text = format!(
                    "{name}: the version of {part} is {got}, below the minimum {minimum}: update the firmware of the host"
                );
                let refusal = Kind::Outdated.because(text).of(format!("{name} {part}"));
                return Err(refusal.values(minimum, got));
            }
        }
        Ok(minimum)
    }

    fn check_firmware(&self, report: &Report) -> Result<(), Refusal> {
        let (major, minor, build) = self.minimum_firmware;
        let minimum = FirmwareVersion {
            major,
            minor,
            build,
        };
        for (name, got) in [
            ("CURRENT_VERSION", report.current_firmware),
            ("COMMITTED_VERSION", report.committed_firmware),
        ] {
            if got < minimum {
                let text = format!(
                    "the firmware's {name} is {got}, below the minimum {minimum}: update the firmware of the host"
                );
                let refusal = Kind::Outdated.because(text).of("minimumFirmware");
                return Err(refusal.values(minimum, got));
            }
        }
        Ok(())
    }

    /// Returns the minimum of a chip.
    fn floor(&self, product: Product, cpuid: Option<Cpuid>) -> Result<Tcb, Refusal> {
        let floors = self.floors.iter();
        let fitting: Vec<_> = floors.filter(|floor| floor.fits(product, cpuid)).collect();
        if fitting.is_empty() && !self.floors.is_empty() {
            let which = cpuid.map_or("unknown models".into(), |cpuid| cpuid.to_string());
            let text = format!(
                "the policy has minimums for some chips (floors), but none for a {product} of {which}"
            );
            return Err(Kind::Machine.because(text).of("floors"));
        }
        let fitting = fitting.iter();
        Ok(fitting.fold(self.minimum, |all, floor| all.max(&floor.minimum)))
    }

    fn check_policy(&self, policy: GuestPolicy) -> Result<(), Refusal> {
        let refuse = |field: &str, what: &str| {
            let text = format!("the guest policy {:#x} {what}", policy.0);
            Err(Kind::Protection.because(text).of(field))
        };
        if policy.bit(19) {
            return refuse(
                "POLICY",
                "allows debugging (DEBUG): the host can read the guest",
            );
        }
        if policy.bit(18) && !self.allow_migration {
            return refuse("allowMigration", "allows a migration agent (MIGRATE_MA)");
        }
        if policy.bit(16) && self.refuse_smt {
            return refuse("refuseSmt", "allows simultaneous multithreading (SMT)");
        }
        if policy.bit(21) {
            return refuse("POLICY", "allows memory over CXL (CXL_ALLOW)");
        }
        if policy.abi() < self.minimum_abi {
            let (major, minor) = self.minimum_abi;
            let what = format!("demands an ABI below {major}.{minor}");
            return refuse("minimumAbi", &what);
        }
        match self.policy_bits.0 & !policy.0 {
            0 => Ok(()),
            missing => refuse("policyBits", &format!("lacks the bits {missing:#x}")),
        }
    }

    fn check_platform(&self, report: &Report) -> Result<(), Refusal> {
        let refuse = |field: &str, text: String| Err(Kind::Protection.because(text).of(field));
        if report.vmpl > self.maximum_vmpl {
            let (got, maximum) = (report.vmpl, self.maximum_vmpl);
            let text = format!("the report was requested at VMPL {got}, above {maximum}");
            return refuse("maximumVmpl", text);
        }
        if self.refuse_smt && report.platform_info & 1 != 0 {
            let text = "the platform has simultaneous multithreading on (SMT_EN)";
            return refuse("refuseSmt", text.into());
        }
        let missing = self.platform_bits.0 & !report.platform_info;
        if missing != 0 {
            let text = format!("the platform info lacks the bits {missing:#x}");
            return refuse("platformBits", text);
        }
        let forbidden = self.forbidden_platform_bits.0 & report.platform_info;
        if forbidden != 0 {
            let text = format!("the platform info has the bits {forbidden:#x}");
            return refuse("forbiddenPlatformBits", text);
        }
        let mitigations = report.mitigations.map(|both| both.launch & both.current);
        match (self.mitigation_bits.0, mitigations) {
            (0, _) => Ok(()),
            (_, None) => {
                let text = format!(
                    "a report of version {} has no mitigation vectors, but the policy requires bits of them",
                    report.version
                );
                Err(Kind::Unproven.because(text).of("mitigationBits"))
            }
            (bits, Some(got)) if bits & !got == 0 => Ok(()),
            (bits, Some(got)) => {
                let text = format!("the mitigation vectors lack the bits {:#x}", bits & !got);
                refuse("mitigationBits", text)
            }
        }
    }

    fn check_lists(
        &self,
        report: &Report,
        chip: Option<&[u8]>,
        cloud: Option<&str>,
    ) -> Result<(), Refusal> {
        let machine = |field: &str, text: String| Kind::Machine.because(text).of(field);
        if report.guest_svn < self.minimum_guest_svn {
            let (got, minimum) = (report.guest_svn, self.minimum_guest_svn);
            let text = format!("GUEST_SVN is {got}, below the minimum {minimum}");
            let refusal = Kind::Outdated.because(text).of("minimumGuestSvn");
            return Err(refusal.values(minimum, got));
        }
        if !self.chips.is_empty() {
            match chip {
                Some(chip) if self.chips.iter().any(|one| one.bytes() == chip) => {}
                Some(chip) => {
                    let text = format!("the chip {} is not accepted", crate::hex(chip));
                    return Err(machine("chips", text));
                }
                None => {
                    let text = "the policy names the accepted chips, but a report signed by a VLEK names none";
                    return Err(Kind::Unproven.because(text).of("chips"));
                }
            }
        }
        if !self.clouds.is_empty() {
            let cloud = cloud.unwrap_or("none");
            if !self.clouds.iter().any(|one| one == cloud) {
                let text = format!("the cloud of the VLEK is {cloud}, which is not accepted");
                return Err(machine("clouds", text));
            }
        }
        let field = ("launchMeasurements", "MEASUREMENT");
        listed(field, &self.launch_measurements, &report.measurement)?;
        let field = ("hostData", "HOST_DATA");
        listed(field, &self.host_data, &report.host_data)?;
        listed(
            ("familyIds", "FAMILY_ID"),
            &self.family_ids,
            &report.family_id,
        )?;
        listed(("imageIds", "IMAGE_ID"), &self.image_ids, &report.image_id)?;
        // a machine without an ID block has this digest
        if !self.id_keys.is_empty() && report.id_key_digest.iter().all(|byte| *byte == 0) {
            let text = "the machine was started without an ID block (ID_KEY_DIGEST is zero)";
            return Err(Kind::Unproven.because(text).of("idKeys"));
        }
        let field = ("idKeys", "ID_KEY_DIGEST");
        listed(field, &self.id_keys, &report.id_key_digest)?;
        if !self.author_keys.is_empty() && !report.has_author_key() {
            let text = "no author key certified the ID key (AUTHOR_KEY_EN)";
            return Err(Kind::Unproven.because(text).of("authorKeys"));
        }
        let field = ("authorKeys", "AUTHOR_KEY_DIGEST");
        listed(field, &self.author_keys, &report.author_key_digest)
    }
}

/// Refuses provisional firmware: the host can still return to the committed version, and never runs
/// less than that.
fn check_order(report: &Report, tcbs: &Tcbs) -> Result<(), Refusal> {
    for (name, tcb) in [
        ("COMMITTED_TCB", tcbs.committed),
        ("REPORTED_TCB", tcbs.reported),
    ] {
        if let Some((part, current, tcb)) = tcbs.current.below(&tcb).first() {
            let text = format!(
                "CURRENT_TCB: the version of {part} is {current}, below that of {name}, {tcb}"
            );
            let refusal = Kind::Outdated
                .because(text)
                .of(format!("CURRENT_TCB {part}"));
            return Err(refusal.values(tcb, current));
        }
    }
    let (current, committed) = (report.current_firmware, report.committed_firmware);
    if current >= committed {
        Ok(())
    } else {
        let text = format!("the firmware {current} runs below the committed {committed}");
        Err(Kind::Outdated.because(text).values(committed, current))
    }
}

/// Checks that the report's value is in the policy's list; any value is accepted if the policy has no list. `names` are the name of the
/// list in the policy, and the vendor's name of the value.
fn listed<const N: usize>(
    names: (&str, &str),
    accepted: &[Digits<N>],
    got: &[u8; N],
) -> Result<(), Refusal> {
    if accepted.is_empty() || accepted.contains(&Digits(*got)) {
        return Ok(());
    }
    let ((field, name), got) = (names, crate::hex(got));
    let text = format!("{name} is {got}, which is not accepted");
    let accepted: Vec<_> = accepted.iter().map(|one| crate::hex(&one.0)).collect();
    let refusal = Kind::Measurement.because(text).of(field);
    Err(refusal.values(accepted.join(" or "), got))
}
