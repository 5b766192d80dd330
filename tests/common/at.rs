//! A validator at another time than now.

use std::sync::Arc;
use std::time::Duration;

use attest::MachineIdentity;
use rustls::pki_types::UnixTime;
use verifier::refusal::Refusal;
use verifier::{CredentialChallenge, Evidence, Identified, Properties, Validator};

/// A validator that judges each peer at this time, in seconds since 1970.
pub struct At(pub u64, pub Arc<dyn Validator>);

impl Validator for At {
    fn properties(&self) -> Properties {
        self.1.properties()
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.1.challenge(peer)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(self.0));
        self.1.judge(&Evidence { now, ..*evidence })
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        self.1.of_connection()
    }
}
