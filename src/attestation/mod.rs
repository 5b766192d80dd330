//! Attestation: documents that prove to a peer what software a machine runs.
//!
//! An [`Issuer`] makes a document on the machine itself, a [`Validator`] judges one that came from a peer; attested TLS
//! ([`crate::atls`]) carries it in a certificate extension whose OID names the variant. One file or folder a variant.

use std::sync::Arc;

/// Names an attestation variant in a certificate: the DER of the OID with tag and length, e.g. `06 05 2b cd 2c 05 01`.
pub type Oid = &'static [u8];

/// Makes attestation documents of one variant about the machine it runs on.
pub trait Issuer: Send + Sync {
    /// The variant.
    fn oid(&self) -> Oid;
    /// A document that binds `user_data` (attested TLS: SHA-256 of the certificate's public key) and the `nonce` that the
    /// peer chose to the machine's state.
    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError>;
}

/// Judges attestation documents of one variant.
pub trait Validator: Send + Sync {
    /// The variant.
    fn oid(&self) -> Oid;
    /// The user data of a document that is genuine, fresh for `nonce` and meets the policy.
    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError>;
}

/// Why no document could be made: a sentence for the machine's own console.
#[derive(Debug, Clone)]
pub struct IssueError(pub String);

/// Why a document was refused. `Display` is for whoever judged, and names registers; the peer learns only that it was
/// refused.
#[derive(Debug, Clone)]
pub struct ValidateError(pub Arc<str>);

impl std::fmt::Display for IssueError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::fmt::Display for ValidateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for IssueError {}
impl std::error::Error for ValidateError {}
