//! Attestation documents: JSON, the TPM's structures in it, the policy. The seed is a genuine document of a software TPM for the
//! nonce below, so that the fuzzer also reaches the code after the check of the signature. The signature does not cover values and
//! event log.
#![no_main]

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use verifier::qemu_vtpm::validator;
use verifier::sources::offline;
use verifier::variant::{self, ALL};
use verifier::vtpm::VtpmValidator;
use verifier::{Evidence, Measurement, Policy, Validator as _};

const NONCE: &[u8] = b"the verifier's own random number";
const USER_DATA: &[u8] = b"the hash of a certificate's key.";

/// Policies that accept the seed's register 15. Both expect a wrong value of register 9: one only warns about it, the other enforces it.
static POLICIES: LazyLock<[VtpmValidator; 2]> = LazyLock::new(|| {
    [true, false].map(|warn_only| {
        let zero = Measurement {
            expected: vec![0; 32],
            warn_only: false,
        };
        let wrong = Measurement {
            expected: vec![0xaa; 32],
            warn_only,
        };
        let policy =
            Policy::new(BTreeMap::from([(15, zero), (9, wrong)])).expect("one is enforced");
        validator(Arc::new(policy))
    })
});

/// The validator of machines without a TPM that are accepted by their launch digest.
static LAUNCHED: LazyLock<Arc<dyn verifier::Validator>> = LazyLock::new(|| {
    let zeros = ["00".repeat(32), "aa".repeat(48)];
    let [register, digest] = &zeros;
    let json = format!(
        r#"{{"measurements":{{"15":"{register}"}},"snp":{{"launchMeasurements":["{digest}"]}}}}"#
    );
    let policy = Policy::from_json(&json).expect("it is correct");
    let variant = ALL
        .iter()
        .find(|it| it.launch.is_some())
        .expect("there is one");
    variant
        .validator_for(policy, &offline())
        .expect("it pins the launch")
});

/// Returns the user data of a document that the first policy accepts.
fn user_data(document: &[u8]) -> Option<Vec<u8>> {
    let judged = POLICIES[0].judge(&Evidence::new(document, NONCE));
    judged.ok().map(|identified| identified.user_data)
}

fn init() {
    // without this, the fuzzer would not reach the code after the check of the signature
    let genuine = include_bytes!("../../../tests/data/attestation-document");
    assert_eq!(user_data(genuine).as_deref(), Some(USER_DATA));
}

fuzz_target!(init: init(), |input: &[u8]| {
    // no mutation makes another valid signature, so an accepted document has the signed user data
    if let Some(user_data) = user_data(input) {
        assert_eq!(user_data, USER_DATA);
    }
    assert!(POLICIES[1].judge(&Evidence::new(input, NONCE)).is_err());
    // no chip has signed a report with this launch digest
    assert!(LAUNCHED.judge(&Evidence::new(input, NONCE)).is_err());
    let _ = variant::said(input);
});
