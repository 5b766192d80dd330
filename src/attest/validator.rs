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
    /// Returns the user data of a document that is genuine, fresh for `nonce` and accepted by the policy.
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
    /// Returns what the TPM of a peer must decrypt to prove that its attestation key (TPMT_PUBLIC) is certified; `None` if the
    /// policy does not demand this of the key. Attested TLS then calls [`Validator::identify_certified`] instead of
    /// [`Validator::identify`]. Nothing of the peer's `endorsements` is verified yet.
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
    /// Validates a document as [`Validator::identify`] does, of a peer that knows the secret of a challenge. It made the document
    /// after it decrypted the secret, and the challenge was made by this validator for the attestation key with this Name.
    fn identify_certified(
        &self,
        document: &[u8],
        nonce: &[u8],
        _key: &KeyName,
    ) -> Result<Identified, ValidateError> {
        self.identify(document, nonce)
    }
    /// Judges what a peer presents in a connection: the only judgement for which attested TLS asks.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        evidence.judged_by(self)
    }
    /// Returns the public key (DER SubjectPublicKeyInfo) of a certificate that is signed by it. The error is a clause. No validator needs
    /// another implementation; a program without validators does not link this one.
    fn self_signed(&self, certificate: &CertificateDer<'_>) -> Result<Vec<u8>, String> {
        self_signed::verify(certificate)
    }
    /// Returns whether the peer shall bring the collateral of its document, because this program does not fetch it.
    fn takes_collateral(&self) -> bool {
        false
    }
    /// Returns the validator of one connection, if the policy of this one may change before the end of the handshake.
    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
    /// Returns whether evidence of the old form of attested TLS is refused.
    fn requires_strong(&self) -> bool {
        false
    }
    /// Returns whether the quote of any TPM is accepted. Then a program without a TPM is accepted too.
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
    /// The secret. Who knows it has both keys in one TPM.
    pub secret: Zeroizing<[u8; 32]>,
    /// The root that certified the endorsement key: its name in the policy.
    pub certified_by: String,
}

/// The content of an accepted document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identified {
    /// The user data that the issuer bound.
    pub user_data: Vec<u8>,
    /// The name of the machine, which does not change with a reboot: at most 64 lower-case hexadecimal digits.
    pub machine: Option<Arc<str>>,
    /// The stage of the machine's boot; `None` if the validator does not distinguish stages.
    pub stage: Option<Stage>,
    /// What the evidence proves about the platform; `None` if it contains nothing that a platform signed.
    pub platform: Option<Arc<PlatformClaims>>,
    /// Whether a platform endorses the key that signed the registers, so that it needs no mention in the policy.
    pub is_endorsed: bool,
    /// The register of the cluster ID; `None` if it was not proved.
    pub cluster: Option<ClusterRegister>,
}

/// What is known about a connection beside the name of the peer. Attested TLS gives it to the handlers of the peer's calls.
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
    /// Documents are in certificates and cover the keys of these, as in the old system.
    Old,
    /// Documents are exchanged inside the connection and cover its exporter.
    Strong,
}

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

/// Why a document was refused. `Display` is for the validating side and names registers; the peer learns only that the document
/// was refused.
#[derive(Debug, Clone)]
pub struct ValidateError(pub Arc<str>);

impl fmt::Display for ValidateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
