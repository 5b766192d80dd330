//! Two ends of attested TLS.

use std::any::Any;
use std::sync::Arc;

use common::attested;
use hardware::PlatformClaims;
use serde_json::{Value, json};
use verifier::sources::{Sources, offline};
use verifier::{Evidence, Issuer, Policy, Validator, Variant};

use crate::cloud_tpm::{NONCE, USER_DATA};

/// A document for the nonce of the tests, and its validator.
pub type Sample = (Vec<u8>, Arc<dyn Validator>);

/// A correct machine.
pub struct Correct {
    pub variant: &'static Variant,
    pub issuer: Arc<dyn Issuer>,
    /// The other fields of a policy, without the registers.
    pub policy: Value,
    /// Intel's collateral (JSON), if its evidence is a quote of TDX.
    pub collateral: Option<String>,
    /// The TPM and the services of its host.
    _parts: Box<dyn Any>,
}

impl Correct {
    pub fn new(
        variant: &'static Variant,
        issuer: Arc<dyn Issuer>,
        policy: Value,
        parts: impl Any,
    ) -> Correct {
        Correct {
            variant,
            issuer,
            policy,
            collateral: None,
            _parts: Box::new(parts),
        }
    }

    /// Returns a document of the machine with its validator.
    pub fn sample(&self) -> Sample {
        let document = self.issuer.issue(USER_DATA, NONCE).unwrap();
        (document, validator(self.variant, &self.policy))
    }
}

/// Returns the policy whose PCR 15 is zero, with these further members of its JSON.
pub fn policy(further: &Value) -> Policy {
    let zero = json!({"15": {"expected": "00".repeat(32)}});
    let mut policy = json!({"exceptions": ["any-image"], "measurements": zero});
    // an empty object would require nothing, and a policy has no empty objects
    let further = further.as_object().unwrap().iter();
    for (name, value) in further.filter(|(_, value)| **value != json!({})) {
        policy[name] = value.clone();
    }
    Policy::from_json(&policy.to_string()).unwrap()
}

/// Returns the validator of a variant for such a policy.
pub fn validator(variant: &Variant, further: &Value) -> Arc<dyn Validator> {
    validator_with(variant, further, &offline())
}

/// Returns the same validator with these sources.
pub fn validator_with(
    variant: &Variant,
    further: &Value,
    sources: &Arc<dyn Sources>,
) -> Arc<dyn Validator> {
    let policy = policy(further);
    let written = cli::trust::policy::text(&policy);
    assert_eq!(Policy::from_json(&written).as_ref(), Ok(&policy));
    variant.validator_for(policy, sources).unwrap()
}

/// Returns what a document for the nonce of the tests proves of its platform.
pub fn proven(judge: &Arc<dyn Validator>, document: &[u8]) -> Arc<PlatformClaims> {
    let identified = judge.judge(&Evidence::new(document, NONCE)).unwrap();
    identified.platform.unwrap()
}

/// Returns the value of a property of the platform.
pub fn property<'a>(claims: &'a PlatformClaims, name: &str) -> Option<&'a str> {
    let found = claims.properties.iter().find(|one| one.name == name);
    found.map(|one| &*one.value)
}

/// Returns why such a document is refused.
pub fn refused(judge: &Arc<dyn Validator>, document: &[u8]) -> String {
    let judged = judge.judge(&Evidence::new(document, NONCE));
    judged.unwrap_err().to_string()
}

/// Checks that such a document is refused in another connection.
pub fn assert_no_replay(judge: &Arc<dyn Validator>, document: &[u8]) {
    let judged = judge.judge(&Evidence::new(document, b"another"));
    let error = judged.unwrap_err().to_string();
    assert!(error.contains("another connection"), "{error}");
}

/// Proves a machine to a caller, in the strong form and in the old form. Returns the reason for a refusal.
pub fn prove(issuer: Arc<dyn Issuer>, validator: Arc<dyn Validator>) -> Result<(), String> {
    for is_old in [false, true] {
        let client = atls::Client::new(None, Some(verifier::judge(validator.clone())));
        let client = if is_old { client.only_old() } else { client };
        let server = atls::Server::new(Some(issuer.clone()), None);
        meet(client, server)?;
    }
    // the machine is the one that calls, too
    let client = atls::Client::new(Some(issuer), None);
    meet(
        client,
        atls::Server::new(None, Some(verifier::judge(validator))),
    )
}

fn meet(client: atls::Client, server: atls::Server) -> Result<(), String> {
    match attested::meet(client, server) {
        [None, None] => Ok(()),
        [client, server] => Err(format!(
            "client: {}\nserver: {}",
            client.unwrap_or_default(),
            server.unwrap_or_default()
        )),
    }
}
