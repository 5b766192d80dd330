//! Validators that are made of others.

use std::sync::Arc;

use super::{Challenge, Identified, Identity, KeyName, Oid, ValidateError, Validator};
use proto::attested::Collateral;
use tpm::Endorsement;

/// Maximum size in bytes of the collateral that a peer sends: Intel's of a platform has about 25 KiB.
pub const MAX_COLLATERAL: usize = 128 << 10;

/// What a peer presents as proof in one connection.
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// The attestation document.
    pub document: &'a [u8],
    /// The nonce for which the document must be fresh.
    pub nonce: &'a [u8],
    /// The Name of the peer's attestation key if a challenge is for this key: then a document of the peer covers the secret.
    pub certified: Option<&'a KeyName>,
    /// The connection in the strong form of attested TLS; `None` in the old form.
    pub session: Option<Session<'a>>,
}

/// What the documents of one connection of the strong form are bound to.
#[derive(Clone, Copy)]
pub struct Session<'a> {
    /// The digest of the connection.
    pub digest: &'a [u8; 32],
    /// The secret of the challenge; empty if there is none.
    pub secret: &'a [u8],
    /// Who the peer says it is.
    pub peer: &'a Identity,
    /// What the peer brought beside the document. The document does not cover it.
    pub collateral: Option<&'a Collateral>,
}

impl Evidence<'_> {
    /// Refuses evidence of the old form if the validator requires the strong one.
    pub fn check_form(&self, validator: &dyn Validator) -> Result<(), ValidateError> {
        match self.session.is_none() && validator.requires_strong() {
            false => Ok(()),
            true => Err(ValidateError(
                "the policy requires the strong form of attested TLS (\"require\":\"strong\"), and it used the old one".into(),
            )),
        }
    }

    /// Returns what `validator` says of the document, without the connection.
    pub fn judged_by(&self, validator: &dyn Validator) -> Result<Identified, ValidateError> {
        match self.certified {
            None => validator.identify(self.document, self.nonce),
            Some(key) => validator.identify_certified(self.document, self.nonce, key),
        }
    }
}

/// A validator that judges documents by other validators. It is a [`Validator`] without further work.
pub trait Composite: Send + Sync {
    /// Returns the validator that names the variant, and demands proofs of attestation keys.
    fn lead(&self) -> Arc<dyn Validator>;

    /// Judges a document by the other validators.
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
