//! Asks a node for its attestation document.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::evidence::LogAndQuotes;
use crate::shell::error::Error;
use crate::workspace::{
    connect::{Attempt, Endpoint, Node},
    sources::sources,
};
use proto::init;
use proto::recoverproto;
use verifier::refusal::Kind;
use verifier::{
    CredentialChallenge, Identified, MachineIdentity, Measurement, Policy, Properties, Refusal,
    Validator, Variant,
};

/// Returns the document of the first server of the node that answers: the recovery server of a node
/// in its initramfs, or the server of a booted node.
pub fn ask(address: &str, variant: &'static Variant, deadline: Instant) -> Result<Vec<u8>, Error> {
    let ports = [recoverproto::PORT, init::PORT];
    let endpoints = ports.map(|port| Endpoint::parse(address, port));
    let mut endpoints = endpoints.into_iter().collect::<Result<Vec<_>, _>>();
    if let Ok(endpoints) = &mut endpoints {
        endpoints.dedup();
    }
    let mut failure = Error::failed(format!("{address}: it has no server"));
    for endpoint in endpoints? {
        let recorder = Arc::new(Recorder {
            variant,
            document: OnceLock::new(),
        });
        let mut node = Node::judged_by(&endpoint, recorder.clone());
        node.client = node.client.to_any_server();
        let attempt = node.attempt(deadline);
        if let Some(document) = recorder.document.get() {
            return Ok(document.clone());
        }
        match attempt {
            Err(Attempt::Refused(why)) => {
                let about = format!("{endpoint}: its quote is not genuine");
                return Err(Error::attestation(why, about));
            }
            Err(Attempt::Passing(reason)) => {
                let text = format!("{endpoint}: {reason}");
                failure = Error::Unreachable(text);
            }
            Ok(_) => {}
        }
    }
    Err(failure)
}

/// Keeps each document with a genuine quote, whatever its values.
struct Recorder {
    variant: &'static Variant,
    document: OnceLock<Vec<u8>>,
}

impl Recorder {
    /// Returns a validator that requires the values that the document itself contains.
    fn validator(&self, document: &[u8]) -> Result<Arc<dyn Validator>, Error> {
        let evidence = LogAndQuotes::parse("the document", document)?;
        let quoted = evidence.quoted().into_iter().flatten();
        let demanded = quoted.map(|(number, value)| {
            let measurement = Measurement {
                expected: value.clone(),
                warn_only: false,
            };
            (*number, measurement)
        });
        let demanded: BTreeMap<_, _> = demanded.collect();
        let policy = Policy::new(demanded).map_err(Error::content)?;
        self.variant
            .validator_for(policy.believing_any(), &sources())
            .map_err(Error::content)
    }
}

impl Validator for Recorder {
    fn properties(&self) -> Properties {
        Properties::of_any_tpm(self.variant.oid)
    }

    fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        Ok(None)
    }

    fn judge(&self, evidence: &verifier::Evidence<'_>) -> Result<Identified, Refusal> {
        let validator = self
            .validator(evidence.document)
            .map_err(|error| Kind::Malformed.because(error.to_string()))?;
        let identified = validator.judge(evidence)?;
        // there is only one connection, so nothing is stored yet
        let _ = self.document.set(evidence.document.into());
        Ok(identified)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}
