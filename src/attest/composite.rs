//! The evidence of a peer, and validators that use other validators.

use std::sync::Arc;

use super::{Challenge, Evidence, Identified, KeyName, Oid, ValidateError, Validator};
use tpm::Endorsement;

/// Maximum size in bytes of the collateral that a peer sends: Intel's collateral for a platform has
/// about 25 KiB.
pub const MAX_COLLATERAL: usize = 128 << 10;

/// A validator that passes documents to other validators. Implementing this trait also implements
/// [`Validator`].
pub trait Composite: Send + Sync {
    /// Returns the inner validator that defines the variant and makes challenges for attestation
    /// keys.
    fn lead(&self) -> Arc<dyn Validator>;

    /// Judges a document with the inner validators.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        self.lead().judge(evidence)
    }

    /// As [`Validator::takes_collateral`].
    fn takes_collateral(&self) -> bool {
        false
    }

    /// As [`Validator::of_connection`].
    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

impl<T: Composite> Validator for T {
    fn oid(&self) -> Oid {
        self.lead().oid()
    }

    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
        self.identify(document, nonce)
            .map(|identified| identified.user_data)
    }

    fn identify(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, ValidateError> {
        Composite::judge(
            self,
            &Evidence {
                document,
                nonce,
                certified: None,
                session: None,
            },
        )
    }

    fn challenge(
        &self,
        key: &[u8],
        endorsements: &[Endorsement],
    ) -> Result<Option<Challenge>, ValidateError> {
        self.lead().challenge(key, endorsements)
    }

    fn challenges(&self) -> bool {
        self.lead().challenges()
    }

    fn identify_certified(
        &self,
        document: &[u8],
        nonce: &[u8],
        key: &KeyName,
    ) -> Result<Identified, ValidateError> {
        Composite::judge(
            self,
            &Evidence {
                document,
                nonce,
                certified: Some(key),
                session: None,
            },
        )
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        Composite::judge(self, evidence)
    }

    fn takes_collateral(&self) -> bool {
        Composite::takes_collateral(self)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        Composite::of_connection(self)
    }

    fn requires_strong(&self) -> bool {
        self.lead().requires_strong()
    }

    fn believes_any_tpm(&self) -> bool {
        self.lead().believes_any_tpm()
    }
}
