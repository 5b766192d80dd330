//! The common part of the AWS variants: the document in which AWS's hypervisor signs the PCRs of a
//! machine's NitroTPM, together with a key that the machine chose.
//!
//! ```text
//! AttestationDocument in the instance info: nonce = extra data, public_key = attestation key (SubjectPublicKeyInfo)
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::document::Base64;
use crate::spki::rsa_spki;
use crate::{IssueError, nsm};
use tpm::{KeySource, Tpm};

/// Makes attestation documents of the NitroTPM of this machine.
pub trait Documents: Send + Sync {
    /// Returns a document with this nonce and this public key; `None` if this TPM never makes
    /// documents; then the log already says so.
    fn document(
        &self,
        tpm: &mut Tpm,
        nonce: &[u8],
        public_key: &[u8],
    ) -> Result<Option<Vec<u8>>, IssueError>;
}

/// The NitroTPM: AWS's hypervisor makes the document. If a TPM does not know the command, it is not
/// asked again.
#[derive(Default)]
pub struct NitroTpm {
    makes_none: AtomicBool,
}

impl Documents for NitroTpm {
    fn document(
        &self,
        tpm: &mut Tpm,
        nonce: &[u8],
        public_key: &[u8],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        if self.makes_none.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let request = nsm::attestation_request(nonce, public_key)?;
        let answer = tpm.nsm_request(&request).inspect_err(|error| {
            let makes_none = matches!(error, tpm::Error::NoDocuments(..));
            self.makes_none.store(makes_none, Ordering::Relaxed);
        })?;
        match nsm::NsmResponse::parse(&answer)? {
            nsm::NsmResponse::Document(document) => Ok(Some(document)),
            nsm::NsmResponse::Error(name) => {
                Err(IssueError::new(format!("AWS's hypervisor refused: {name}")))
            }
        }
    }
}

/// Returns the attestation key of this machine as certificates contain it: SubjectPublicKeyInfo,
/// DER.
pub fn spki(tpm: &mut Tpm) -> Result<Vec<u8>, IssueError> {
    let key = tpm.attestation_key(KeySource::Own)?;
    // an own key is made from the template: RSA with 2048 bits, and the modulus is the last field
    let modulus = key.last_chunk::<256>();
    let modulus = modulus
        .ok_or_else(|| IssueError::new("the attestation key is shorter than its modulus"))?;
    Ok(rsa_spki(modulus))
}

/// Returns a document with this extra data and this key, for the instance info. If there is none,
/// logs the reason: a peer whose policy does not require a document still accepts the machine.
pub fn document(
    documents: Option<&Arc<dyn Documents>>,
    tpm: &mut Tpm,
    extra_data: &[u8; 32],
    spki: &[u8],
) -> Option<Base64> {
    match documents?.document(tpm, extra_data, spki) {
        Ok(document) => document.map(Base64),
        Err(why) => {
            log::warn!("cannot get the NitroTPM's attestation document: {why}");
            None
        }
    }
}
