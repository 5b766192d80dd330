//! `gcp-tdx`: the key, the certificate and the log of a machine of Google, and a quote that a hierarchy of the tests has signed, under a root
//! that the policy names (`intelRootKey`).

use std::fs;
use std::sync::Arc;

use serde_json::{Value, json};
use support::foreign::rust_crate;
use verifier::gcp_tdx::{GoogleTdxInfo, GoogleTdxMachine, VARIANT, report_data};
use verifier::sources::Sources;
use verifier::td::Quoter;
use verifier::{Evidence, IssueError, Issuer, vtpm};

use crate::authority::Authority;
use crate::azure_tdx::Collected;
use crate::cloud_tpm::{NONCE, USER_DATA};
use crate::forged_tdx::{Parts, Signed};
use crate::gcp_sev_es::{Machine, events, good};
use crate::meeting::{Correct, Sample, assert_no_replay, prove, refused, validator_with};

/// Signs quotes of these parts, after a change of what they cover.
struct Signer(Parts, fn(&mut [u8; 64]));

impl Quoter for Signer {
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, IssueError> {
        let mut report_data = *report_data;
        (self.1)(&mut report_data);
        Ok(self.0.sign(&report_data).quote)
    }
}

/// Returns always the same quote.
struct Fixed(Vec<u8>);

impl Quoter for Fixed {
    fn quote(&self, _: &[u8; 64]) -> Result<Vec<u8>, IssueError> {
        Ok(self.0.clone())
    }
}

/// A machine with its certificate, and the collateral of its hierarchy.
struct OfGoogle {
    machine: Machine,
    authority: Authority,
    parts: Parts,
    signed: Signed,
}

impl OfGoogle {
    /// Makes a machine whose firmware has measured this technology.
    fn start(technology: u8) -> OfGoogle {
        let (authority, machine) = (Authority::new(), Machine::start(&events("1", technology)));
        machine.certify(&authority, &good());
        let mut parts = Parts::of_today();
        parts.keep_keys();
        let signed = parts.sign(&[7; 64]);
        OfGoogle {
            machine,
            authority,
            parts,
            signed,
        }
    }

    fn issuer(&self, quoter: impl Quoter + 'static) -> Arc<dyn Issuer> {
        let log = Some(self.machine.cloud.path("log").into());
        let location = self.machine.cloud.location();
        let machine = GoogleTdxMachine::new(self.machine.host.url(), Arc::new(quoter));
        Arc::new(vtpm::TpmIssuer::new(location, log, Arc::new(machine)))
    }

    fn signer(&self) -> Signer {
        Signer(self.parts.clone(), |_| ())
    }

    fn policy(&self) -> Value {
        json!({"intelRootKey": self.signed.root_in_pem, "cloud": {"roots": [self.authority.root_pem()]}})
    }

    fn sources(&self) -> Arc<dyn Sources> {
        Arc::new(Collected(Arc::new(self.signed.collateral.clone())))
    }

    /// Returns why a document is refused.
    fn refusal(&self, policy: &Value, document: &[u8]) -> String {
        let judge = validator_with(&VARIANT, policy, &self.sources());
        refused(&judge, document)
    }
}

/// Returns a correct machine with collateral of today.
pub fn correct() -> Correct {
    let google = OfGoogle::start(3);
    let collateral = serde_json::to_string(&google.signed.collateral).unwrap();
    let (issuer, policy) = (google.issuer(google.signer()), google.policy());
    let mut correct = Correct::new(&VARIANT, issuer, policy, google);
    correct.collateral = Some(collateral);
    correct
}

/// Returns a correct document with its validator.
pub fn sample() -> Sample {
    let google = OfGoogle::start(3);
    let document = google.issuer(google.signer()).issue(USER_DATA, NONCE);
    let judge = validator_with(&VARIANT, &google.policy(), &google.sources());
    (document.unwrap(), judge)
}

#[test]
fn a_machine_is_proved_by_its_quote_and_its_certificate() {
    let google = OfGoogle::start(3);
    let (issuer, policy) = (google.issuer(google.signer()), google.policy());
    let judge = validator_with(&VARIANT, &policy, &google.sources());
    prove(issuer.clone(), judge.clone()).unwrap();
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let identified = judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    assert!(identified.is_endorsed);
    let claims = identified.platform.unwrap();
    assert_eq!(claims.technology, "Intel TDX");
    assert_eq!(claims.bound.len(), 3);
    for name in ["MRTD", "zone", "project", "instance"] {
        assert!(claims.properties.iter().any(|it| it.name == name), "{name}");
    }
    assert_no_replay(&judge, &document);
    for (further, why) in [
        (json!({"cloud": {}}), "leads to none of the accepted roots"),
        (json!({"intelRootKey": ""}), "does not lead to the root"),
        (
            json!({"cloud": {"roots": policy["cloud"]["roots"], "projects": ["other"]}}),
            "project",
        ),
        (
            json!({"tdx": {"mrTd": ["ab".repeat(48)]}}),
            "(MRTD): expected abab",
        ),
    ] {
        let mut policy = policy.clone();
        for (name, value) in further.as_object().unwrap() {
            policy[name] = value.clone();
        }
        let error = google.refusal(&policy, &document);
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

/// A quote for another connection or key, which the TPM of this machine quotes: of a hierarchy of the tests, and a genuine one.
#[test]
fn a_quote_that_does_not_name_connection_and_key_is_refused() {
    let google = OfGoogle::start(3);
    let sample = rust_crate("dcap_qvl", "dcap-qvl").join("sample/tdx_quote");
    let genuine = Fixed(fs::read(sample).unwrap());
    let other = |change| google.issuer(Signer(google.parts.clone(), change));
    for issuer in [
        other(|it| it[0] ^= 1),
        other(|it| it[63] ^= 1),
        // as a quote of qemu-tdx has it
        other(|it| it[32..].fill(0)),
        google.issuer(genuine),
    ] {
        let document = issuer.issue(USER_DATA, NONCE).unwrap();
        let error = google.refusal(&google.policy(), &document);
        assert!(error.contains("REPORTDATA is not that of"), "{error}");
    }
    // the quote names the certificate, not only the key
    let covered = report_data(&[1; 32], b"one");
    assert_eq!(covered[..32], [1; 32]);
    assert_ne!(covered, report_data(&[1; 32], b"two"));
}

#[test]
fn a_tpm_whose_host_does_not_say_tdx_is_refused() {
    for (technology, name) in [(0, "nothing"), (2, "AMD SEV-ES"), (4, "AMD SEV-SNP")] {
        let google = OfGoogle::start(technology);
        let document = google.issuer(google.signer()).issue(USER_DATA, NONCE);
        let error = google.refusal(&google.policy(), &document.unwrap());
        let why = format!("encrypts the memory with {name}, expected Intel TDX");
        assert!(error.contains(&why), "{error}");
    }
}

#[test]
fn what_a_service_brings_is_intels_collateral_and_googles_authority() {
    let google = OfGoogle::start(3);
    let document = google.issuer(google.signer()).issue(USER_DATA, NONCE);
    let find = VARIANT.collateral.unwrap();
    let brought = find(&document.unwrap(), &*google.sources()).unwrap();
    let intel = serde_json::to_vec(&google.signed.collateral).unwrap();
    assert_eq!(brought.intel, intel);
    assert!(brought.key_authority.is_empty());
    // a part of Constellation's form, and what is not read is refused
    let info: Result<GoogleTdxInfo, _> = serde_json::from_str(r#"{"AttestationReport":"AA=="}"#);
    assert!(info.is_ok_and(|it| it.gcp.is_none()));
}
