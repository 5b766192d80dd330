//! Checks a policy: finds what makes it unusable or worthless (an error), and what it does not pin.

use verifier::constellation::snp::Enforcement;
use verifier::sources::offline;
use verifier::{Image, Policy, RegisterNames, Registers, Variant};

use crate::trust::verify::meaning;

/// The registers that the firmware extends in each boot (TCG PC Client Platform Firmware Profile:
/// at least by a separator; MRTD, RTMR 0 and 1 of a TDX machine). If one is zero, nothing extends
/// the bank, so software can set the other registers to any value.
const EXTENDED: [(Registers, &[u32]); 2] = [
    (Registers::Pcrs, &[0, 1, 2, 3, 4, 5, 6, 7]),
    (Registers::Rtmrs, &[0, 1, 2]),
];
/// The registers of which at least one identifies what boots.
const BOOTS: [(Registers, &[u32]); 2] = [(Registers::Pcrs, &[4, 11]), (Registers::Rtmrs, &[2, 3])];
/// The registers that depend on the image, its settings and the firmware's settings.
const USUAL: [(Registers, &[u32]); 2] = [
    (Registers::Pcrs, &[4, 7, 8, 9, 11, 12, 13]),
    (Registers::Rtmrs, &[0, 1, 2, 3]),
];

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Why the policy must not be used.
    pub errors: Vec<String>,
    /// What the policy does not pin, and the consequences.
    pub open: Vec<String>,
}

impl Found {
    /// Returns a single error.
    pub fn error(why: String) -> Found {
        let (errors, open) = (vec![why], vec![]);
        Found { errors, open }
    }
}

/// Returns whether a policy accepts any TPM, and so a program that simulates one.
pub fn accepts_any_tpm(policy: &Policy, variant: &Variant) -> bool {
    let judge = endorsement::validator(variant, policy.clone(), &offline());
    judge.is_ok_and(|judge| judge.properties().believes_any_tpm)
}

/// Checks a policy for machines of this variant.
pub fn found(policy: &Policy, variant: &Variant) -> Found {
    let mut found = Found::default();
    match endorsement::validator(variant, policy.clone(), &offline()) {
        Err(error) => found.errors.push(error.to_string()),
        Ok(judge) if judge.properties().believes_any_tpm => found.open.push(
            "the attestation key: any TPM is accepted, and a program that only simulates one (`firstlight policy add-key`)".into(),
        ),
        Ok(_) => {}
    }
    // the launch digest shows what boots, and the validator demands it
    let by_registers = variant.launch.is_none();
    for image in policy.images().iter().filter(|_| by_registers) {
        of_image(&mut found, policy, image);
    }
    for set in &policy.cloud().sha384 {
        for (index, value) in set {
            if *index <= 7 && value.bytes().all(|digit| digit == b'0') {
                found
                    .errors
                    .push(never_zero(&format!("cloud.sha384: PCR {index}")));
            }
        }
    }
    of_platform(&mut found, policy, variant);
    if !policy.requires_strong() {
        found.open.push(
            "the form of attested TLS (require): evidence of the old form is accepted, which another machine can pass on".into(),
        );
    }
    if policy.variant().is_none() {
        let name = variant.name;
        found.open.push(format!(
            "the attestation variant (variant): judged as {name}; `firstlight measure --attestation-variant` writes it"
        ));
    }
    found
}

fn of(table: &[(Registers, &'static [u32])], kind: Registers) -> &'static [u32] {
    let found = table.iter().find(|(of, _)| *of == kind);
    found.map_or(&[], |(_, registers)| registers)
}

fn never_zero(register: &str) -> String {
    format!(
        "{register} is zero, but every firmware extends it: the firmware does not extend this bank of the TPM, so its registers prove nothing about the machine"
    )
}

fn of_image(found: &mut Found, policy: &Policy, image: &Image) {
    let kind = policy.registers();
    let of_which = match policy.images() {
        [_] => String::new(),
        _ => format!(" of {image}"),
    };
    let stages = [image.measurements(), image.initramfs()];
    for (index, it) in stages.iter().flat_map(|registers| registers.iter()) {
        let is_zero = it.expected.iter().all(|byte| *byte == 0);
        if is_zero && !it.warn_only && of(&EXTENDED, kind).contains(index) {
            let register = kind.name(*index) + &of_which;
            found.errors.push(never_zero(&register));
        }
    }
    let is_enforced = |index: &u32| {
        let booted = image
            .measurements()
            .get(index)
            .is_some_and(|it| !it.warn_only);
        booted && image.initramfs().get(index).is_none_or(|it| !it.warn_only)
    };
    let boots = of(&BOOTS, kind);
    if !boots.iter().any(is_enforced) {
        let names: Vec<_> = boots.iter().map(|index| kind.name(*index)).collect();
        let names = names.join(" nor ");
        found.errors.push(format!(
            "neither {names}{of_which} is enforced, so the policy does not say what boots: any image is accepted"
        ));
    }
    for index in of(&USUAL, kind).iter().filter(|index| !is_enforced(index)) {
        let (name, meaning) = (kind.name(*index), meaning(kind, *index));
        let why = if image.measurements().contains_key(index) {
            "another value only warns"
        } else {
            "any value is accepted"
        };
        found
            .open
            .push(format!("{name}{of_which} ({meaning}): {why}"));
    }
}

/// Adds what the policy does not pin about the platform: firmware, versions, and the machine's
/// owner.
fn of_platform(found: &mut Found, policy: &Policy, variant: &Variant) {
    let (snp, tdx, cloud) = (policy.snp(), policy.tdx(), policy.cloud());
    let mut open = |is_open: bool, what: &str| {
        if is_open {
            found.open.push(what.to_owned());
        }
    };
    if variant.judges("snp") {
        let signer = snp.firmware_signer_config.as_ref();
        let only_warns = signer.is_some_and(|it| it.enforcement_policy == Enforcement::WarnOnly);
        let report = snp.of_report();
        open(
            !report.pins_firmware() && (signer.is_none() || only_warns),
            "the firmware (snp.launchMeasurements, snp.idKeys, firmwareSignerConfig): any firmware is accepted",
        );
        open(
            report.floors.is_empty() && report.minimum == Default::default(),
            "the versions of AMD's firmware (snp.floors): one with known vulnerabilities is accepted",
        );
    }
    if variant.judges("tdx") && variant.registers == Registers::Pcrs {
        open(
            !tdx.pins_firmware(),
            "the firmware (tdx.mrTd): any firmware is accepted",
        );
    }
    let names_machines = !cloud.instances.is_empty();
    open(
        variant.judges("cloud.projects") && cloud.projects.is_empty() && !names_machines,
        "the project (cloud.projects): machines of every customer of Google are accepted",
    );
    open(
        variant.judges("cloud.accounts") && cloud.accounts.is_empty() && !names_machines,
        "the account (cloud.accounts): machines of every customer of AWS are accepted",
    );
}
