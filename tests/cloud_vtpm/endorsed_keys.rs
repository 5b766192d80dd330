//! Tests which attestation keys a platform endorses. A chip signs what its guest asks for, so the owner of such a machine can put
//! any key into a report: the report endorses the key only if the policy knows the firmware that put it there.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use verifier::Variant;
use verifier::{Evidence, Policy, Validator, aws_sev_snp, azure_sev_snp, gcp_sev_snp};

use crate::aws_nitro_tpm::INSTANCE;
use crate::cloud_tpm::NONCE;
use crate::meeting::refused;
use crate::sev_snp::{ours, with};

/// A policy's requirements on the report in a document.
struct Said {
    measurement: String,
    id_key: String,
    chip: String,
    mr_td: String,
}

fn said(document: &[u8]) -> Said {
    let decoded = |value: &Value| STANDARD.decode(value.as_str().unwrap()).unwrap();
    let document: Value = serde_json::from_slice(document).unwrap();
    let info: Value = serde_json::from_slice(&decoded(&document["InstanceInfo"])).unwrap();
    let report = decoded(&info["AttestationReport"]);
    let hex = |at: usize, len: usize| -> String {
        let bytes = report.get(at..at + len).unwrap_or_default();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    };
    Said {
        measurement: hex(0x90, 48),
        id_key: hex(0xe0, 48),
        chip: hex(0x1a0, 64),
        mr_td: hex(48 + 136, 48),
    }
}

fn policy(further: Value) -> Policy {
    let registers =
        json!({"exceptions": ["any-image"], "measurements": {"15": {"expected": "00".repeat(32)}}});
    Policy::from_json(&with(registers, &further).to_string()).unwrap()
}

/// The verifier's result for a document whose key the policy does not name.
#[derive(Debug, PartialEq)]
enum Belief {
    /// A platform endorses the key.
    Endorsed,
    /// The key is any key: the services accept it with a warning, and `firstlight init` does not.
    AnyKey,
}

fn belief(
    document: &[u8],
    judge: impl Fn(Policy) -> Arc<dyn Validator>,
    policy: &Policy,
) -> Belief {
    let usual = judge(policy.clone());
    usual.judge(&Evidence::new(document, NONCE)).unwrap();
    let careful = judge(policy.clone().only_named_keys());
    match careful.judge(&Evidence::new(document, NONCE)) {
        Ok(_) => {
            assert!(!usual.properties().believes_any_tpm);
            Belief::Endorsed
        }
        Err(refusal) => {
            let refusal = refusal.to_string();
            assert!(refusal.contains("the policy names no key"), "{refusal}");
            assert!(usual.properties().believes_any_tpm);
            Belief::AnyKey
        }
    }
}

fn of_variant(variant: &'static Variant) -> impl Fn(Policy) -> Arc<dyn Validator> {
    let sources = verifier::sources::offline();
    move |policy| variant.validator_for(policy, &sources).unwrap()
}

#[test]
fn no_report_of_a_machine_of_aws_endorses_a_key_but_the_registers_that_aws_signed_do() {
    let (document, _) = crate::sev_snp::correct_of_aws().sample();
    let said = said(&document);
    for further in [
        json!({}),
        json!({"snp": {"launchMeasurements": [said.measurement]}}),
        json!({"snp": {"chips": [said.chip]}}),
    ] {
        let policy = policy(with(ours(), &further));
        let belief = belief(&document, of_variant(&aws_sev_snp::VARIANT), &policy);
        assert_eq!(belief, Belief::AnyKey, "{further}");
    }

    for correct in [
        crate::sev_snp::correct_of_aws_with_documents(),
        crate::aws_nitro_tpm::correct(),
    ] {
        let (document, _) = correct.sample();
        let roots = &correct.policy["cloud"]["roots"];
        for (further, expected) in [
            (json!({"roots": roots}), Belief::AnyKey),
            (
                json!({"roots": roots, "instances": [INSTANCE]}),
                Belief::AnyKey,
            ),
            (correct.policy["cloud"].clone(), Belief::Endorsed),
        ] {
            let policy = with(correct.policy.clone(), &json!({"cloud": further}));
            let belief = belief(
                &document,
                of_variant(correct.variant),
                &self::policy(policy),
            );
            assert_eq!(belief, expected, "{:?}: {further}", correct.variant);
        }
    }
}

#[test]
fn a_report_of_azure_endorses_a_key_if_the_policy_knows_the_firmware_or_the_chip() {
    let (document, _) = crate::azure_sev_snp::correct().sample();
    let said = said(&document);
    let signer = |enforcement: &str| json!({"firmwareSignerConfig": {"acceptedKeyDigests": [said.id_key], "enforcementPolicy": enforcement}});
    for (further, expected) in [
        (json!({}), Belief::AnyKey),
        (
            json!({"snpVersion": 1, "snp": {"maximumVmpl": 0}}),
            Belief::AnyKey,
        ),
        (signer("WarnOnly"), Belief::AnyKey),
        (signer("Equal"), Belief::Endorsed),
        (signer("MAAFallback"), Belief::Endorsed),
        (json!({"snp": {"idKeys": [said.id_key]}}), Belief::Endorsed),
        (
            json!({"snp": {"launchMeasurements": [said.measurement]}}),
            Belief::Endorsed,
        ),
        (json!({"snp": {"chips": [said.chip]}}), Belief::Endorsed),
    ] {
        let policy = policy(with(ours(), &further));
        let belief = belief(&document, of_variant(&azure_sev_snp::VARIANT), &policy);
        assert_eq!(belief, expected, "{further}");
    }
}

#[test]
fn a_quote_of_azure_endorses_a_key_if_the_policy_knows_the_firmware() {
    let (machine, document) = crate::azure_tdx::machine();
    let said = said(&document);
    for (further, expected) in [
        (json!({}), Belief::AnyKey),
        (
            json!({"tdx": {"mrConfigId": "00".repeat(48)}}),
            Belief::AnyKey,
        ),
        (
            json!({"tdx": {"mrTd": ["11".repeat(48), said.mr_td]}}),
            Belief::Endorsed,
        ),
    ] {
        let judge = |policy: Policy| machine.judge(policy);
        assert_eq!(
            belief(
                &document,
                judge,
                &machine.trusting(&policy(further.clone()))
            ),
            expected,
            "{further}"
        );
    }
    let other = policy(json!({"tdx": {"mrTd": ["11".repeat(48)]}}));
    let other = machine.judge(machine.trusting(&other));
    let refusal = refused(&other, &document);
    assert!(
        refusal.contains("the measurement of the firmware (MRTD)"),
        "{refusal}"
    );
}

#[test]
fn google_endorses_the_keys_of_its_machines() {
    let correct = crate::sev_snp::correct_of_google();
    let (document, _) = correct.sample();
    let policy = policy(correct.policy.clone());
    let belief = belief(&document, of_variant(&gcp_sev_snp::VARIANT), &policy);
    assert_eq!(belief, Belief::Endorsed);
}
