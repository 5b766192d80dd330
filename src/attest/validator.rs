//! The interface of a variant on the side that judges a document.

use std::fmt;
use std::sync::Arc;

use base::boot::Stage;
use proto::attested::Collateral;
use rustls_pki_types::CertificateDer;
use tee::claims::PlatformClaims;
use tpm::{Credential, Endorsement, EndorsementKind};
use zeroize::Zeroizing;

use super::{ClusterRegister, Identity, KeyName, Oid, self_signed};

/// Validates attestation documents of one variant.
pub trait Validator: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Returns the user data of a document that is genuine, fresh for `nonce` and accepted by the
    /// policy.
    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError>;
    /// Validates a document and also returns the name of the machine, if the variant has names.
    fn identify(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, ValidateError> {
        Ok(Identified {
            user_data: self.validate(document, nonce)?,
            machine: None,
            stage: None,
            platform: None,
            is_endorsed: false,
            cluster: None,
        })
    }
    /// Returns a challenge, which the TPM of a peer must decrypt to prove that its attestation key
    /// (TPMT_PUBLIC) is certified; `None` if the policy does not require this of the key. Attested
    /// TLS then calls [`Validator::identify_certified`] instead of [`Validator::identify`]. At this
    /// time nothing in the peer's `endorsements` is verified.
    fn challenge(
        &self,
        _key: &[u8],
        _endorsements: &[Endorsement],
    ) -> Result<Option<Challenge>, ValidateError> {
        Ok(None)
    }
    /// Returns whether [`Validator::challenge`] may return a challenge.
    fn challenges(&self) -> bool {
        false
    }
    /// Validates the document of a peer as [`Validator::identify`] does, when the peer knows the
    /// secret of a challenge. The peer made the document after its TPM decrypted the secret; this
    /// validator made the challenge for the attestation key with this Name.
    fn identify_certified(
        &self,
        document: &[u8],
        nonce: &[u8],
        _key: &KeyName,
    ) -> Result<Identified, ValidateError> {
        self.identify(document, nonce)
    }
    /// Judges the evidence of a peer in a connection. Attested TLS calls only this method.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        evidence.judged_by(self)
    }
    /// Returns the public key (DER SubjectPublicKeyInfo) of a self-signed certificate. The error is
    /// a clause. No validator needs another implementation; a program without validators does not
    /// link this one.
    fn self_signed(&self, certificate: &CertificateDer<'_>) -> Result<Vec<u8>, String> {
        self_signed::verify(certificate)
    }
    /// Returns whether the peer must send the collateral of its document, because this program does
    /// not fetch it.
    fn takes_collateral(&self) -> bool {
        false
    }
    /// Returns a fixed validator for one connection, if the policy of this one may change during
    /// the handshake.
    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
    /// Returns whether evidence of the old form of attested TLS is refused.
    fn requires_strong(&self) -> bool {
        false
    }
    /// Returns whether a quote of any TPM is accepted. Then a program without a TPM is accepted
    /// too.
    fn believes_any_tpm(&self) -> bool {
        false
    }
}

/// A secret that only a TPM with the given endorsement key and attestation key can decrypt.
pub struct Challenge {
    /// The template of the endorsement key.
    pub kind: EndorsementKind,
    /// What the TPM decrypts.
    pub credential: Credential,
    /// The secret. A machine that knows it has both keys in one TPM.
    pub secret: Zeroizing<[u8; 32]>,
    /// The root that certified the endorsement key, by its name in the policy.
    pub certified_by: String,
}

/// The content of an accepted document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identified {
    /// The user data that the issuer bound.
    pub user_data: Vec<u8>,
    /// The name of the machine, which does not change with a reboot: at most 64 lower-case
    /// hexadecimal digits.
    pub machine: Option<Arc<str>>,
    /// The stage of the machine's boot; `None` if the validator does not distinguish stages.
    pub stage: Option<Stage>,
    /// What the evidence proves about the platform; `None` if it contains nothing that a platform
    /// signed.
    pub platform: Option<Arc<PlatformClaims>>,
    /// Whether a platform endorses the key that signed the registers; then the policy need not list
    /// the key.
    pub is_endorsed: bool,
    /// The register of the cluster ID; `None` if the evidence does not prove it.
    pub cluster: Option<ClusterRegister>,
}

/// What is known about a connection in addition to the name of the peer. Attested TLS passes it to
/// the handlers of the peer's calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// The form of attested TLS.
    pub form: Form,
    /// As [`Identified::stage`].
    pub stage: Option<Stage>,
    /// As [`Identified::platform`].
    pub platform: Option<Arc<PlatformClaims>>,
}

/// The two forms of attested TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Documents are in certificates and bind the certificates' keys, as in Constellation.
    Old,
    /// Documents are exchanged inside the connection and bind its exporter.
    Strong,
}

/// What a peer presents as proof in one connection.
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// The attestation document.
    pub document: &'a [u8],
    /// The nonce for which the document must be fresh.
    pub nonce: &'a [u8],
    /// The Name of the peer's attestation key if the peer got a challenge for this key; then the
    /// peer's document covers the secret.
    pub certified: Option<&'a KeyName>,
    /// The connection in the strong form of attested TLS; `None` in the old form.
    pub session: Option<Session<'a>>,
}

/// The values to which the documents of one strong-form connection are bound.
#[derive(Clone, Copy)]
pub struct Session<'a> {
    /// The digest of the connection.
    pub digest: &'a [u8; 32],
    /// The secret of the challenge; empty if there is none.
    pub secret: &'a [u8],
    /// The roles in which the peer may prove itself.
    pub peer: &'a Identity,
    /// The collateral that the peer sent with the document. The document does not cover it.
    pub collateral: Option<&'a Collateral>,
}

impl Evidence<'_> {
    /// Refuses evidence of the old form if the validator requires the strong form.
    pub fn check_form(&self, validator: &dyn Validator) -> Result<(), ValidateError> {
        match self.session.is_none() && validator.requires_strong() {
            false => Ok(()),
            true => Err(ValidateError(
                "the policy requires the strong form of attested TLS (\"require\":\"strong\"), and it used the old one".into(),
            )),
        }
    }

    /// Returns the result of `validator` for the document; does not check the connection.
    pub fn judged_by<V: Validator + ?Sized>(
        &self,
        validator: &V,
    ) -> Result<Identified, ValidateError> {
        match self.certified {
            None => validator.identify(self.document, self.nonce),
            Some(key) => validator.identify_certified(self.document, self.nonce, key),
        }
    }
}

/// Why a document was refused. `Display` is for the validating side and names registers; the peer
/// learns only that the document was refused.
#[derive(Debug, Clone)]
pub struct ValidateError(pub Arc<str>);

impl fmt::Display for ValidateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
