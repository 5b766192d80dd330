//! Checks a policy: finds what makes it unusable or worthless (an error), and what it does not pin.

use verifier::constellation::snp::Enforcement;
use verifier::secure_boot;
use verifier::sources::offline;
use verifier::{Image, Policy, RegisterNames, Registers, Variant};

use crate::trust::verify::meaning;

/// The registers that depend on the image, its settings and the firmware's settings.
const USUAL_PCRS: &[u32] = &[4, 7, 8, 9, 11, 12, 13];
/// The same for machines with Intel TDX.
const USUAL_RTMRS: &[u32] = &[0, 1, 2, 3];

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
    for flaw in variant.flaws(policy) {
        if policy.permits(flaw.permitted_by) {
            let permitted = format!("{}: an exception permits it", flaw.why);
            found.open.push(permitted);
        } else if found.errors.iter().all(|it| !it.contains(&flaw.why)) {
            found.errors.push(flaw.why);
        }
    }
    for useless in variant.useless_exceptions(policy) {
        found.open.push(format!(
            "the exception {useless} (exceptions): the policy has no such flaw, and a later image may bring one: remove it"
        ));
    }
    // the launch digest shows what boots, and the validator demands it
    let by_registers = variant.launch.is_none();
    for image in policy.images().iter().filter(|_| by_registers) {
        of_image(&mut found, policy, image);
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

fn of_image(found: &mut Found, policy: &Policy, image: &Image) {
    let kind = policy.registers();
    let usual = match kind {
        Registers::Pcrs => USUAL_PCRS,
        Registers::Rtmrs => USUAL_RTMRS,
    };
    let of_which = match policy.images() {
        [_] => String::new(),
        _ => format!(" of {image}"),
    };
    let is_enforced = |index: &u32| {
        let booted = image
            .measurements()
            .get(index)
            .is_some_and(|it| !it.warn_only);
        booted && image.initramfs().get(index).is_none_or(|it| !it.warn_only)
    };
    // Secure Boot is required in another way
    let is_shown = |index: &u32| *index == secure_boot::PCR && policy.secure_boot().is_some();
    let open = usual.iter().filter(|index| !is_enforced(index));
    if let Some(required) = policy.secure_boot() {
        let lists = [
            (&required.db, "any key may verify programs (secureBoot.db)"),
            (
                &required.signers,
                "any key may have verified the boot loader, also one of shim's own list (secureBoot.signers)",
            ),
        ];
        let missing = lists.into_iter().filter(|(list, _)| list.is_empty());
        found
            .open
            .extend(missing.map(|(_, what)| format!("Secure Boot{of_which}: {what}")));
    }
    for index in open.filter(|index| !is_shown(index)) {
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
