//! The variant `qemu-snp`: an SEV-SNP machine without a TPM, whose kernel the host hands over.
//! `attest` describes its document.
//!
//! Only the launch digest shows what runs, so a policy must name it, or who signed it (the ID
//! block). The register of the cluster ID is what software on the machine says.

use std::collections::BTreeMap;
use std::sync::Arc;

pub use attest::qemu_snp::*;
use attest::snp::{Kernel, Reporter};
use hardware::snp::report::{Report, ReportSigner};

use crate::judged::{LaunchDigest, Measured, SNP};
use crate::policy::{Fault, PolicyError};
use crate::refusal::Kind;
use crate::snp::{self, ReportJudge};
use crate::sources::Sources;
use crate::{
    ClusterRegister, CredentialChallenge, Evidence, Identified, MachineIdentity, Measurement,
    Policy, Properties, Refusal, RegisterNames, Registers, Stage, Variant, claims,
    cluster_register, hex, json,
};
use proto::attested::Collateral;
use tpm::{CLUSTER_ID_PCR, Location};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::qemu_snp::VARIANT,
    judges: &[SNP],
    key: None,
    launch: Some(launch),
    validator: |policy, sources| Ok(Arc::new(Validator::new(Arc::new(policy), sources)?)),
    collateral: Some(collateral),
    measure,
};

/// Returns the register of the cluster ID in a document of this variant, by its number in policies;
/// `None` if it is not one. Nothing in it is verified.
pub fn said(document: &[u8]) -> Option<BTreeMap<u32, Vec<u8>>> {
    let document: LaunchDocument = serde_json::from_slice(document).ok()?;
    let report = Report::parse(&document.instance_info.attestation_report.0).ok()?;
    let [_, register] = halves(&report);
    Some(BTreeMap::from([(CLUSTER_ID_PCR, register.into())]))
}

/// Returns the collateral for a document, or `None` if these sources do not have it.
fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Collateral> {
    let document: LaunchDocument = serde_json::from_slice(document).ok()?;
    snp::collateral_of(&document.instance_info, sources)
}

/// Validates documents against a policy.
struct Validator {
    policy: Arc<Policy>,
    hardware: ReportJudge,
    /// Whether the policy names clouds whose key (VLEK) may sign.
    accepts_vlek: bool,
}

impl Validator {
    /// Makes a validator for a policy, which must say what boots.
    fn new(policy: Arc<Policy>, sources: &Arc<dyn Sources>) -> Result<Validator, PolicyError> {
        let registers = policy.images().iter().flat_map(|it| it.measurements());
        let other = |(index, it): &(&u32, &Measurement)| {
            **index != CLUSTER_ID_PCR || Registers::of(&it.expected) != Some(Registers::Pcrs)
        };
        if let Some((index, _)) = { registers }.find(other) {
            let register = policy.registers().name(*index);
            return Err(Fault::Variant.because(format!(
                "it has {register}, but machines of the variant qemu-snp have only the register 15: their launch digest shows \
                 what boots (snp.launchMeasurements)"
            )));
        }
        let demands = &policy.snp().snp;
        if !demands.pins_launch() {
            return Err(Fault::Variant.because(
                "snp.launchMeasurements, snp.idKeys and snp.authorKeys are missing: with the variant qemu-snp only they say what \
                 boots, so any program would be accepted. `firstlight measure --snp-firmware` computes launch digests",
            ));
        }
        let accepts_vlek = !demands.clouds.is_empty();
        let hardware = ReportJudge::new(&policy, sources)?;
        Ok(Validator {
            policy,
            hardware,
            accepts_vlek,
        })
    }

    fn check(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let document: LaunchDocument = json::document(evidence.document)?;
        let (info, user_data) = (&document.instance_info, document.user_data.0);
        let report = Report::parse(&info.attestation_report.0)?;
        let [bound, register] = halves(&report);
        let expected = report_data(&user_data, evidence.nonce, register);
        if !expected.starts_with(bound) {
            let text = "REPORT_DATA is not that of this connection and its key: the report was made for another one, or by a machine of \
                        another variant";
            return Err(Kind::Nonce.because(text).of("REPORT_DATA"));
        }
        if report.signer()? == ReportSigner::Vlek && !self.accepts_vlek {
            let text = "the report is signed by a VLEK, the key of a cloud, but the policy names no cloud (snp.clouds)";
            return Err(Kind::Certificate.because(text));
        }
        // before the signatures: a report of another machine must not make this program fetch
        // certificates
        let values = BTreeMap::from([(CLUSTER_ID_PCR, register.to_vec())]);
        let image = self.policy.check(&values, |_, measurement, _| {
            let (expected, got) = (hex(&measurement.expected), hex(register));
            format!("register of the cluster ID: expected {expected}, got {got}")
        })?;
        let mut platform = self.hardware.judge(info, &expected, evidence.now)?;
        platform.bound = vec![
            "key and nonce of the connection: REPORT_DATA".into(),
            "cluster ID, as software on the machine says: REPORT_DATA".into(),
        ];
        Ok(Identified {
            user_data,
            machine: None,
            stage: None,
            image: Some(image.id().clone()),
            platform: Some(Arc::new(claims::printable(platform))),
            is_endorsed: true,
            tpm: None,
            cluster: ClusterRegister::new(register),
        })
    }
}

impl crate::Validator for Validator {
    fn properties(&self) -> Properties {
        Properties {
            oid: OID,
            challenges: false,
            takes_collateral: false,
            requires_strong: self.policy.requires_strong(),
            believes_any_tpm: false,
        }
    }

    fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        Ok(None)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.check(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn crate::Validator>> {
        None
    }
}

/// Returns the two halves of a report's REPORT_DATA: the hash over the nonce and the key of the
/// connection, and the register of the cluster ID.
fn halves(report: &Report) -> [&[u8]; 2] {
    let (bound, register) = report.report_data.split_at(32);
    [bound, register]
}

/// Returns the launch digest of this machine.
fn launch() -> Result<LaunchDigest, tpm::Error> {
    let wrong = |why| tpm::Error::Failed(format!("the launch digest of this machine: {why}"));
    let report = Kernel.report(&[0; 64]);
    let (report, _) = report.map_err(|error| wrong(error.to_string()))?;
    let report = Report::parse(&report).map_err(|error| wrong(error.to_string()))?;
    Ok(report.measurement)
}

/// Measures this machine: its only register is that of the cluster ID, with the same value in the
/// initramfs and in the booted system.
fn measure(location: &Location, _stage: Stage) -> Result<Measured, tpm::Error> {
    let measurement = Measurement {
        expected: cluster_register(location)?.as_ref().into(),
        warn_only: false,
    };
    let values = BTreeMap::from([(CLUSTER_ID_PCR, measurement)]);
    Ok(Measured {
        booted: values.clone(),
        initramfs: values,
    })
}
