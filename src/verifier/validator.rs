//! The interface of a variant on the side that judges a document.

use std::sync::Arc;

use attest::{ClusterRegister, Form, KeyName, MachineIdentity, Oid};
use base::boot::stage::Stage;
use hardware::claims::PlatformClaims;
use proto::attested::Collateral;
use rustls::pki_types::UnixTime;
use tpm::{Credential, EndorsementKind};
use zeroize::Zeroizing;

use crate::policy::tpm::{TpmClaims, TpmModel};
use crate::refusal::{Kind, Refusal};

/// Judges the evidence of machines of one variant.
///
/// No method has a default, so a validator that wraps other validators must implement each method itself.
pub trait Validator: Send + Sync {
    /// Returns what is the same for each peer.
    fn properties(&self) -> Properties;
    /// Returns a challenge, which the TPM of a peer must decrypt to prove that its attestation key
    /// is certified; `None` if the policy does not require this of the key. At this time nothing in
    /// the peer's endorsements is verified.
    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal>;
    /// Judges evidence: its document must be genuine, fresh for the nonce and accepted by the
    /// policy. Attested TLS checks to which connection the returned user data bind it.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal>;
    /// Returns a fixed validator for one connection, if the policy of this one may change during
    /// the handshake.
    fn of_connection(&self) -> Option<Arc<dyn Validator>>;
}

/// A validator that may be replaced at any time, as when its policy changes.
pub trait Changing: Send + Sync {
    /// Returns the validator in force.
    fn current(&self) -> Arc<dyn Validator>;
}

impl<T: Changing> Validator for T {
    fn properties(&self) -> Properties {
        self.current().properties()
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.current().challenge(peer)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.current().judge(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        Some(self.current())
    }
}

/// What a validator answers without evidence. Nothing has a default: a validator that uses another
/// one takes all properties from it, and replaces some.
#[derive(Clone, Copy)]
pub struct Properties {
    /// The OID of the variant.
    pub oid: Oid,
    /// Whether [`Validator::challenge`] may return a challenge.
    pub challenges: bool,
    /// Whether the peer must send the collateral of its document, because this program does not
    /// fetch it.
    pub takes_collateral: bool,
    /// Whether evidence of the old form of attested TLS is refused.
    pub requires_strong: bool,
    /// Whether a quote of any TPM is accepted. Then a program without a TPM is accepted too.
    pub believes_any_tpm: bool,
}

impl Properties {
    /// Returns those of a validator that accepts any TPM and both forms of attested TLS, without challenges and collateral.
    pub fn of_any_tpm(oid: Oid) -> Properties {
        Properties {
            oid,
            challenges: false,
            takes_collateral: false,
            requires_strong: false,
            believes_any_tpm: true,
        }
    }
}

/// A secret that only a TPM with the given endorsement key and attestation key can decrypt.
pub struct CredentialChallenge {
    /// The template of the endorsement key.
    pub kind: EndorsementKind,
    /// The encrypted secret.
    pub credential: Credential,
    /// The secret. A machine that knows it has both keys in one TPM.
    pub secret: Zeroizing<[u8; 32]>,
    /// The root that certified the endorsement key, by its name in the policy.
    pub certified_by: String,
    /// The TPM that the certificate names.
    pub tpm: Option<TpmModel>,
}

/// An attestation key that is in one TPM with a certified endorsement key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertifiedKey {
    /// The Name of the key.
    pub name: KeyName,
    /// The TPM that the certificate of the endorsement key names.
    pub tpm: Option<TpmModel>,
}

/// The content of an accepted document.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identified {
    /// The user data that the issuer bound.
    pub user_data: Vec<u8>,
    /// The name of the machine, which does not change with a reboot: at most 64 lower-case
    /// hexadecimal digits.
    pub machine: Option<Arc<str>>,
    /// The stage of the machine's boot; `None` if the validator does not distinguish stages.
    pub stage: Option<Stage>,
    /// The [ID](crate::policy::Image::id) of the policy's image that has the machine's registers.
    pub image: Option<Arc<str>>,
    /// What the evidence proves about the platform; `None` if it contains nothing that a platform
    /// signed.
    pub platform: Option<Arc<PlatformClaims>>,
    /// Whether a platform endorses the key that signed the registers; then the policy need not list
    /// the key.
    pub is_endorsed: bool,
    /// What the evidence proves about the TPM, if its endorsement key is certified.
    pub tpm: Option<Arc<TpmClaims>>,
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
    /// As [`Identified::image`].
    pub image: Option<Arc<str>>,
    /// As [`Identified::platform`].
    pub platform: Option<Arc<PlatformClaims>>,
}

/// What a peer presents as proof in one connection.
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// The attestation document.
    pub document: &'a [u8],
    /// The nonce for which the document must be fresh.
    pub nonce: &'a [u8],
    /// The time at which the document is judged.
    pub now: UnixTime,
    /// The peer's attestation key if the peer got a challenge for this key; then the peer's document
    /// covers the secret.
    pub certified: Option<&'a CertifiedKey>,
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
    /// The identity that the peer sent in its offer.
    pub peer: &'a MachineIdentity,
    /// The collateral that the peer sent with the document. The document does not cover it.
    pub collateral: Option<&'a Collateral>,
}

impl<'a> Evidence<'a> {
    /// Returns evidence that is not bound to a connection of the strong form, and that is judged now.
    pub fn new(document: &'a [u8], nonce: &'a [u8]) -> Evidence<'a> {
        Evidence {
            document,
            nonce,
            now: UnixTime::now(),
            certified: None,
            session: None,
        }
    }

    /// Refuses evidence of the old form if the validator requires the strong form.
    pub fn check_form(&self, properties: &Properties) -> Result<(), Refusal> {
        if self.session.is_none() && properties.requires_strong {
            Err(Kind::Form.because(
            "the policy requires the strong form of attested TLS (\"require\":\"strong\"), but the peer used the old one",
        ))
        } else {
            Ok(())
        }
    }
}
