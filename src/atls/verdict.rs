//! What the issuer and the judge of the old form said in one handshake.

use std::sync::{Mutex, OnceLock};

use rustls::pki_types::CertificateDer;

use super::{Error, certificate};
use attest::{Accepted, Judge};
use base::sync::lock;

/// The peer that the judge accepted, or why the handshake must fail.
#[derive(Default)]
pub struct Verdict {
    accepted: OnceLock<Accepted>,
    /// Why the issuer or the judge failed; rustls does not preserve this error.
    failure: Mutex<Option<Error>>,
}

impl Verdict {
    /// Asks the judge whether the peer's certificate has a document for our `nonce`.
    pub fn ask(
        &self,
        judge: &dyn Judge,
        leaf: &CertificateDer<'_>,
        nonce: &[u8],
    ) -> Result<(), rustls::Error> {
        match judge.certificate(leaf, nonce) {
            Ok(accepted) => {
                // a handshake has exactly one certificate of the peer
                let _ = self.accepted.set(accepted);
                Ok(())
            }
            Err(reason) => {
                self.fail(Error::Refused(reason));
                Err(certificate::REFUSED)
            }
        }
    }

    /// Notes why the handshake must fail.
    pub fn fail(&self, error: Error) {
        *lock(&self.failure) = Some(error);
    }

    /// Returns the peer, if the judge has accepted it. `result` is that of the handshake; the error
    /// of issuer or judge is more specific.
    pub fn after(&self, result: Result<(), Error>) -> Result<Option<Accepted>, Error> {
        match lock(&self.failure).take() {
            Some(failure) => Err(failure),
            None => result.map(|()| self.accepted.get().cloned()),
        }
    }
}
