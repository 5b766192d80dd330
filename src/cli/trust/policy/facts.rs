//! Describes in words what a policy requires.

use std::fmt;

use base::text::hex;
use endorsement::roots::TpmRoot;
use serde_json::{Value, json};
use verifier::{Measurement, Policy, RegisterNames};

use super::text::{MACHINES, in_order, value};
use crate::trust::verify::meaning;

/// The requirements besides registers and keys, each with a description.
const MEANINGS: [(&str, &str); 65] = [
    (
        "require",
        "the form of attested TLS in which machines prove themselves",
    ),
    (
        "requireConfinedAcpi",
        "the kernel of each image confines the code in the host's ACPI tables",
    ),
    (
        "exceptions",
        "not required: flaws that the policy may have (docs/policy.md)",
    ),
    (
        "secureBoot.enabled",
        "the events of PCR 7 show that Secure Boot is on",
    ),
    ("secureBoot.pk", "its platform key is one of these"),
    ("secureBoot.kek", "its key exchange keys are among these"),
    ("secureBoot.db", "its database of keys has only these"),
    (
        "secureBoot.signers",
        "drivers and boot loaders were verified only by these",
    ),
    ("tpm.vendors", "the vendor of the TPM is one of these"),
    (
        "tpm.floors",
        "minimum versions of the firmware of these TPMs",
    ),
    (
        "cloud.roots",
        "the cloud's certificates lead to one of these roots",
    ),
    (
        "cloud.projects",
        "the machine is in one of these projects of Google Cloud",
    ),
    (
        "cloud.accounts",
        "the machine is in one of these accounts of AWS",
    ),
    ("cloud.zones", "the machine is in one of these zones"),
    ("cloud.instances", "the machine is one of these instances"),
    (
        "cloud.sha384",
        "AWS has signed one of these sets of SHA-384 PCRs",
    ),
    (
        "tdx.tcbStatuses",
        "Intel gives the platform one of these statuses",
    ),
    (
        "tdx.platformGraceDays",
        "days after its TCB level's date for which an out-of-date platform is accepted",
    ),
    (
        "tdx.acceptedAdvisories",
        "only these advisories of Intel may apply to the platform",
    ),
    (
        "tdx.rejectedAdvisories",
        "none of these advisories of Intel applies to the platform",
    ),
    (
        "tdx.minimumEvaluation",
        "minimum number of Intel's TCB evaluation",
    ),
    (
        "tdx.maximumCollateralDays",
        "maximum age of Intel's collateral in days",
    ),
    ("tdx.tdAttributes", "accepted attributes of the TD"),
    ("tdx.xfam", "accepted processor features of the TD"),
    ("tdx.mrTd", "the firmware (MRTD) is one of these"),
    ("tdx.mrSeam", "the TDX module (MRSEAM) is one of these"),
    (
        "tdx.mrConfigId",
        "the configuration that the host has named (MRCONFIGID) is one of these",
    ),
    (
        "tdx.mrOwner",
        "the owner that the host has named (MROWNER) is one of these",
    ),
    (
        "tdx.mrOwnerConfig",
        "the configuration of the owner (MROWNERCONFIG) is one of these",
    ),
    (
        "tdx.mrServiceTd",
        "accepted service TDs (MRSERVICETD); a machine without one is accepted too",
    ),
    (
        "tdx.platforms",
        "the platform (PPID or platform instance) is one of these",
    ),
    ("qeSVN", "minimum version of Intel's quoting enclave"),
    (
        "pceSVN",
        "minimum version of Intel's provisioning certification enclave",
    ),
    (
        "teeTCBSVN",
        "minimum version of each part of the TDX module",
    ),
    ("qeVendorID", "vendor of the quoting enclave"),
    ("mrSeam", "the TDX module (MRSEAM)"),
    ("xfam", "processor features of the TD"),
    (
        "intelRootKey",
        "the root of Intel's certificates, in place of the built-in one",
    ),
    (
        "snp.floors",
        "minimum versions of the firmware of these chips",
    ),
    (
        "snp.minimumAbi",
        "minimum version of the ABI in the guest policy",
    ),
    (
        "snp.minimumGuestSvn",
        "minimum version of the guest (GUEST_SVN)",
    ),
    (
        "snp.minimumFirmware",
        "minimum version of the firmware that runs, and of the committed one",
    ),
    ("snp.maximumVmpl", "maximum VMPL of the report"),
    (
        "snp.allowMigration",
        "whether a migration agent may move the machine",
    ),
    (
        "snp.refuseSmt",
        "whether simultaneous multithreading must be off",
    ),
    ("snp.policyBits", "bits of the guest policy that are 1"),
    ("snp.platformBits", "bits of the platform info that are 1"),
    (
        "snp.forbiddenPlatformBits",
        "bits of the platform info that are 0",
    ),
    (
        "snp.mitigationBits",
        "bits of the mitigation vectors that are 1",
    ),
    ("snp.chips", "the chip is one of these"),
    ("snp.clouds", "the cloud of the VLEK is one of these"),
    (
        "snp.launchMeasurements",
        "the launch digest of the firmware is one of these",
    ),
    ("snp.hostData", "HOST_DATA is one of these"),
    ("snp.familyIds", "FAMILY_ID of the ID block is one of these"),
    ("snp.imageIds", "IMAGE_ID of the ID block is one of these"),
    (
        "snp.idKeys",
        "the key that signed the ID block is one of these",
    ),
    (
        "snp.authorKeys",
        "the key that certified the ID key is one of these",
    ),
    (
        "snp.revocationList",
        "whether AMD's list of revoked certificates is needed",
    ),
    (
        "bootloaderVersion",
        "minimum version of the security processor's bootloader",
    ),
    (
        "teeVersion",
        "minimum version of the security processor's system",
    ),
    ("snpVersion", "minimum version of the SNP firmware"),
    ("microcodeVersion", "minimum version of the microcode"),
    ("firmwareSignerConfig", "the signer of the firmware"),
    (
        "amdRootKey",
        "the root of AMD's certificates, in place of the built-in ones",
    ),
    ("amdSigningKey", "AMD's certificate below the root"),
];
/// The requirements whose list of numbers is one version.
const VERSIONS: [&str; 2] = ["snp.minimumAbi", "snp.minimumFirmware"];
/// A requirement other than registers and keys.
struct Requirement {
    /// The path in the policy.
    path: String,
    /// The accepted values, or the required one.
    values: Vec<String>,
}

/// A difference between two policies.
pub struct PolicyDifference {
    /// What differs.
    pub what: String,
    /// The first policy's requirement; `None` if it has none.
    pub before: Option<String>,
    /// The second policy's requirement.
    pub after: Option<String>,
}

impl fmt::Display for PolicyDifference {
    /// Writes a line with `-` for the first policy, and one with `+` for the second.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (sign, value) in [('-', &self.before), ('+', &self.after)] {
            if let Some(value) = value {
                writeln!(f, "{sign} {}: {value}", self.what)?;
            }
        }
        Ok(())
    }
}

impl Requirement {
    fn meaning(&self) -> &'static str {
        let known = MEANINGS.iter().find(|(path, _)| *path == self.path);
        known.map_or("", |(_, meaning)| meaning)
    }
}

/// Returns the requirements of a policy besides registers and keys.
fn requirements(policy: &Policy) -> Vec<Requirement> {
    let value = value(policy);
    let mut all = vec![];
    for (name, value) in value.as_object().map(in_order).unwrap_or_default() {
        match value
            .as_object()
            .filter(|_| ["cloud", "secureBoot", "snp", "tdx", "tpm"].contains(&name.as_str()))
        {
            _ if MACHINES.contains(&name.as_str()) => {}
            Some(members) => {
                let members = in_order(members).into_iter();
                all.extend(
                    members.map(|(member, value)| (format!("{name}.{member}"), value.clone())),
                );
            }
            // an empty text requires nothing
            None if value == "" => {}
            None => all.push((name.clone(), value.clone())),
        }
    }
    let words = |value: &Value| match value {
        Value::String(text) => root(text),
        other => other.to_string(),
    };
    let requirement = |(path, value): (String, Value)| {
        let values = match (&value, &*path) {
            (Value::Array(list), path) if !VERSIONS.contains(&path) => {
                list.iter().map(words).collect()
            }
            (one, _) => vec![words(one)],
        };
        Requirement { path, values }
    };
    all.into_iter().map(requirement).collect()
}

/// Returns the name of a root, or the fingerprint of certificates in PEM; returns other texts
/// unchanged.
fn root(entry: &str) -> String {
    match TpmRoot::parse(entry) {
        Ok(root) if root.name != entry => format!("certificate SHA-256 {}", root.name),
        _ => base::text::printable(entry, 200),
    }
}

fn mode(measurement: &Measurement) -> &'static str {
    if measurement.warn_only {
        "only warns"
    } else {
        "enforced"
    }
}

/// Returns a policy's requirements as JSON, for programs.
pub fn json(policy: &Policy) -> Value {
    let kind = policy.registers();
    let images = policy.images().iter().map(|image| {
        let stages = [
            ("booted", image.measurements()),
            ("initramfs", image.initramfs()),
        ];
        let registers = stages.iter().flat_map(|(stage, registers)| {
            registers.iter().map(move |(index, it)| {
                json!({
                    "index": index,
                    "name": kind.name(*index),
                    "meaning": meaning(kind, *index),
                    "stage": stage,
                    "enforced": !it.warn_only,
                    "expected": hex(&it.expected),
                })
            })
        });
        let name = (!image.name().is_empty()).then(|| image.name());
        json!({"name": name, "registers": registers.collect::<Vec<_>>()})
    });
    let requirements = requirements(policy)
        .into_iter()
        .map(|it| json!({"path": it.path, "meaning": it.meaning(), "values": it.values}));
    let keys = policy.keys().iter().map(ToString::to_string);
    let roots = policy.endorsement_roots().iter().map(|entry| root(entry));
    json!({
        "variant": policy.variant(),
        "images": images.collect::<Vec<_>>(),
        "attestationKeys": keys.collect::<Vec<_>>(),
        "endorsementRoots": roots.collect::<Vec<_>>(),
        "requirements": requirements.collect::<Vec<_>>(),
    })
}

/// Returns a policy's requirements as a table, for people.
pub fn table(policy: &Policy) -> String {
    let kind = policy.registers();
    let variant = policy.variant().unwrap_or("not named");
    let mut text = format!("variant: {variant}\n");
    for image in policy.images() {
        text += &match image.name() {
            "" => "image: without a name\n".to_owned(),
            name => format!("image: {name}\n"),
        };
        for (stage, registers) in [
            ("", image.measurements()),
            (" in the initramfs", image.initramfs()),
        ] {
            for (index, it) in registers {
                let name = format!("{}{stage}", kind.name(*index));
                let (mode, expected, meaning) =
                    (mode(it), hex(&it.expected), meaning(kind, *index));
                text += &format!("  {name:<7}  {mode:<10}  {expected}  {meaning}\n");
            }
        }
    }
    text += "attestation keys:";
    text += if policy.keys().is_empty() {
        " none is named\n"
    } else {
        "\n"
    };
    text.extend(policy.keys().iter().map(|key| format!("  {key}\n")));
    let roots = policy.endorsement_roots();
    if !roots.is_empty() {
        text += "roots that certify further attestation keys:\n";
        text.extend(roots.iter().map(|entry| format!("  {}\n", root(entry))));
    }
    let requirements = requirements(policy);
    if !requirements.is_empty() {
        text += "further requirements:\n";
    }
    for one in requirements {
        text += &format!("  {}: {}\n", one.path, one.meaning());
        text.extend(one.values.iter().map(|value| format!("    {value}\n")));
    }
    text
}

/// Returns each fact of a policy: its subject, and the policy's requirement.
fn facts(policy: &Policy) -> Vec<(String, String)> {
    let said = |what: &str, value: &str| (what.to_owned(), value.to_owned());
    let mut all = vec![];
    all.extend(policy.variant().map(|variant| said("variant", variant)));
    for image in policy.images() {
        for (stage, registers) in [
            ("", image.measurements()),
            (" in the initramfs", image.initramfs()),
        ] {
            for (index, it) in registers {
                let name = policy.registers().name(*index);
                let value = format!("{} ({})", hex(&it.expected), mode(it));
                all.push((format!("{image}: {name}{stage}"), value));
            }
        }
    }
    let keys = policy.keys().iter();
    all.extend(keys.map(|key| (format!("attestation key {key}"), "believed".into())));
    let roots = policy.endorsement_roots().iter();
    all.extend(roots.map(|entry| {
        (
            format!("endorsement root {}", root(entry)),
            "believed".into(),
        )
    }));
    if policy.believes_any_key() {
        all.push(said("attestation keys", "none is named"));
    }
    for one in requirements(policy) {
        match one.values.as_slice() {
            [value] => all.push((one.path, value.clone())),
            several => {
                let accepted = several
                    .iter()
                    .map(|value| (format!("{} {value}", one.path), "accepted".to_owned()));
                all.extend(accepted);
            }
        }
    }
    all
}

/// Returns the differences of two policies.
pub fn differences(old: &Policy, new: &Policy) -> Vec<PolicyDifference> {
    let (old, new) = (facts(old), facts(new));
    let of = |facts: &[(String, String)], what: &str| {
        let found = facts.iter().find(|(other, _)| other == what);
        found.map(|(_, value)| value.clone())
    };
    let added = new.iter().filter(|(what, _)| of(&old, what).is_none());
    let all = old.iter().chain(added).map(|(what, _)| PolicyDifference {
        what: what.clone(),
        before: of(&old, what),
        after: of(&new, what),
    });
    all.filter(|it| it.before != it.after).collect()
}
