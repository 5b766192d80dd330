//! The interface of a variant on the machine that proves itself: it makes documents.

use std::fmt;
use std::sync::Arc;

use proto::attested::Collateral;

use super::{DocumentRequest, MachineIdentity, Oid, Registers};

/// An attestation variant: what a machine presents as evidence. The file of the variant defines it.
pub struct AttesterVariant {
    /// The name on the kernel command line, on the command lines of the programs, and in the Helm
    /// chart.
    pub name: &'static str,
    /// The OID of the certificate extension that contains a document of this variant.
    pub oid: Oid,
    /// The kind of its machines' registers.
    pub registers: Registers,
    /// Returns the location of this machine's registers, if no option sets it: its TPM.
    pub location: fn() -> Result<tpm::Location, tpm::Error>,
    /// Creates the issuer of this machine with the TPM at this location.
    pub issuer: fn(&tpm::Location) -> Arc<dyn Issuer>,
}

impl fmt::Debug for AttesterVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Makes attestation documents of one variant for the machine on which it runs.
pub trait Issuer: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Makes a document that binds `user_data` (attested TLS: SHA-256 of the public key of the
    /// certificate) and the `nonce` of the peer to the state of the machine.
    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError>;
    /// Makes a document for a peer that called this machine and is not authenticated. Documents for
    /// peers that this machine calls have priority.
    fn issue_for_stranger(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.issue(user_data, nonce)
    }
    /// Returns what a peer learns about this machine before the peer requests a proof.
    fn identity(&self) -> Result<MachineIdentity, IssueError> {
        Ok(MachineIdentity::default())
    }
    /// Returns the identity if it is cached, so that the TPM is not used.
    fn known_identity(&self) -> Option<MachineIdentity> {
        None
    }
    /// Makes the document for one connection of the strong form of attested TLS.
    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        if request.challenge.is_some() {
            return Err(IssueError::new(
                "the peer requires a certified attestation key, but this variant has none",
            ));
        }
        let user_data = request.user_data(&[]);
        if request.for_stranger {
            self.issue_for_stranger(&user_data, request.nonce)
        } else {
            self.issue(&user_data, request.nonce)
        }
    }
    /// Returns cached collateral for a document of this machine. Sends no request.
    fn collateral(&self, _document: &[u8]) -> Option<Collateral> {
        None
    }
    /// Returns the name of this machine as validators report it ([`Accepted::machine`](super::Accepted::machine)); `None`
    /// if the variant has no names.
    fn machine(&self) -> Result<Option<Arc<str>>, IssueError> {
        Ok(None)
    }
}

/// Why a document could not be made: a sentence for the console of the machine.
#[derive(Debug, Clone)]
pub struct IssueError(String);

impl IssueError {
    /// Makes an error of this sentence.
    pub fn new(why: impl Into<String>) -> IssueError {
        IssueError(why.into())
    }
}

impl fmt::Display for IssueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Takes the errors of TPM, hardware, metadata services and parsers.
impl<E: std::error::Error> From<E> for IssueError {
    fn from(error: E) -> IssueError {
        IssueError(error.to_string())
    }
}
