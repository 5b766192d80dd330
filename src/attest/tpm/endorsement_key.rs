//! The endorsement key (EK): a decryption key that the vendor of the TPM has certified. It cannot sign. It proves that another key
//! is in the same TPM: the TPM decrypts a credential only if it holds both the EK and the key that the credential names
//! (TPM2_MakeCredential and TPM2_ActivateCredential, part 1 §24).
//!
//! The seed of the endorsement hierarchy and the template always give the same key, so the EK is made for each use, and needs no
//! persistent handle.

use tss_esapi::abstraction::{AsymmetricAlgorithmSelection, ek};
use tss_esapi::constants::response_code::Tss2ResponseCodeKind;
use tss_esapi::constants::{CapabilityType, SessionType};
use tss_esapi::handles::{AuthHandle, KeyHandle};
use tss_esapi::interface_types::algorithm::HashingAlgorithm;
use tss_esapi::interface_types::ecc::EccCurve;
use tss_esapi::interface_types::key_bits::RsaKeyBits;
use tss_esapi::interface_types::session_handles::{AuthSession, PolicySession};
use tss_esapi::structures::{
    CapabilityData, Digest, EncryptedSecret, IdObject, Nonce, SymmetricDefinition,
};
use tss_esapi::{Context, Result};

use super::{Error, KeySource, Tpm, attestation_key, nv};
use base::crypto::Secret;

/// The NV indices of certificates above those of the endorsement keys ("TCG EK Credential Profile", §2.2.1.5.2).
const CHAIN: std::ops::RangeInclusive<u32> = 0x01c0_0100..=0x01c0_01ff;
/// The first NV index of the profile.
const FIRST: u32 = 0x01c0_0000;
/// Maximum number of handles in one answer (MAX_CAP_HANDLES, part 2 §10.9.3).
const HANDLES_A_READ: u32 = 254;

/// The template of an endorsement key ("TCG EK Credential Profile", annex B). The value is the NV index of its certificate (§2.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum EndorsementKind {
    /// Template L-1: RSA with 2048 bits, SHA-256, AES-128.
    Rsa2048 = 0x01c0_0002,
    /// Template L-2: P-256, SHA-256, AES-128.
    P256 = 0x01c0_000a,
    /// Template H-3: P-384, SHA-384, AES-256.
    P384 = 0x01c0_0016,
}

impl EndorsementKind {
    /// All templates that this program knows.
    pub const ALL: [EndorsementKind; 3] = [
        EndorsementKind::Rsa2048,
        EndorsementKind::P256,
        EndorsementKind::P384,
    ];

    /// Returns the template whose certificate has this NV index.
    pub fn with_index(index: u32) -> Option<EndorsementKind> {
        EndorsementKind::ALL
            .into_iter()
            .find(|kind| *kind as u32 == index)
    }

    fn algorithm(self) -> AsymmetricAlgorithmSelection {
        match self {
            EndorsementKind::Rsa2048 => AsymmetricAlgorithmSelection::Rsa(RsaKeyBits::Rsa2048),
            EndorsementKind::P256 => AsymmetricAlgorithmSelection::Ecc(EccCurve::NistP256),
            EndorsementKind::P384 => AsymmetricAlgorithmSelection::Ecc(EccCurve::NistP384),
        }
    }

    /// Returns whether the empty password authorizes the use of the key. The other templates demand a policy session.
    fn has_password(self) -> bool {
        self == EndorsementKind::P384
    }
}

/// What a TPM tells about one of its endorsement keys. Nothing of it is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endorsement {
    /// The template of the key.
    pub kind: EndorsementKind,
    /// The certificate of the key: X.509, DER.
    pub certificate: Vec<u8>,
    /// The certificates above it, as far as the TPM has them: X.509, DER.
    pub chain: Vec<Vec<u8>>,
}

/// An encrypted secret for a TPM with a certain endorsement key and a certain attestation key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential {
    /// The content of the TPM2B_ID_OBJECT, without its length.
    pub blob: Vec<u8>,
    /// The content of the TPM2B_ENCRYPTED_SECRET, without its length.
    pub secret: Vec<u8>,
}

impl Tpm {
    /// Returns the endorsement keys whose certificates the TPM holds. A TPM without certificates, as clouds offer them, gives none.
    pub fn endorsements(&mut self) -> std::result::Result<Vec<Endorsement>, Error> {
        self.run("reading the certificates of the endorsement key", read_all)
    }

    /// Returns the secret of a credential that a peer made for an endorsement key and the attestation key of this TPM.
    /// [`Error::Credential`] if it was made for another TPM or another key.
    pub fn activate(
        &mut self,
        source: KeySource,
        kind: EndorsementKind,
        credential: &Credential,
    ) -> std::result::Result<Secret, Error> {
        let (key, public) = self.run("loading the attestation key", |context| {
            attestation_key::load(context, source)
        })?;
        let activated = self.run("ActivateCredential", |context| {
            activate(context, key, kind, credential)
        });
        attestation_key::used(self.context()?, &public);
        activated.map_err(|error| match error {
            Error::Command(_, _, tss_esapi::Error::Tss2Error(code)) if refuses(code.kind()) => {
                Error::Credential
            }
            error => error,
        })
    }
}

/// Returns whether the TPM says that a credential is not for its keys, or is no credential. libtpms answers TPM_RC_FAILURE if the secret
/// is encrypted for another RSA key; a TPM in failure mode would have refused the commands before.
fn refuses(kind: Option<Tss2ResponseCodeKind>) -> bool {
    use Tss2ResponseCodeKind::{EccPoint, Failure, Insufficient, Integrity, Scheme, Size, Value};
    matches!(
        kind,
        Some(EccPoint | Failure | Insufficient | Integrity | Scheme | Size | Value)
    )
}

fn read_all(context: &mut Context) -> Result<Vec<Endorsement>> {
    let (CapabilityData::Handles(handles), _) =
        context.get_capability(CapabilityType::Handles, FIRST, HANDLES_A_READ)?
    else {
        return Ok(vec![]);
    };
    let indices: Vec<u32> = handles.into_inner().into_iter().map(u32::from).collect();
    let mut chain = vec![];
    for index in indices.iter().filter(|index| CHAIN.contains(index)) {
        chain.extend(nv::read(context, *index)?);
    }
    let chain = split(&chain);
    let mut endorsements = vec![];
    for kind in EndorsementKind::ALL {
        if !indices.contains(&(kind as u32)) {
            continue;
        }
        match split(&nv::read(context, kind as u32)?).into_iter().next() {
            Some(certificate) => endorsements.push(Endorsement {
                kind,
                certificate,
                chain: chain.clone(),
            }),
            None => log::warn!(
                "NV index {:#x} of the TPM has no certificate: it is ignored",
                kind as u32
            ),
        }
    }
    Ok(endorsements)
}

/// Returns the certificates at the start of an NV index: DER, one after the other. What follows them is padding.
fn split(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut certificates = vec![];
    // a certificate has more than 127 and fewer than 65536 bytes
    while let [0x30, rest @ ..] = bytes {
        let content = match rest {
            [0x81, length, ..] => 2 + usize::from(*length),
            [0x82, high, low, ..] => 3 + usize::from(u16::from_be_bytes([*high, *low])),
            _ => break,
        };
        let Some((certificate, rest)) = bytes.split_at_checked(1 + content) else {
            break;
        };
        certificates.push(certificate.to_vec());
        bytes = rest;
    }
    certificates
}

fn activate(
    context: &mut Context,
    key: KeyHandle,
    kind: EndorsementKind,
    credential: &Credential,
) -> Result<Secret> {
    let blob = IdObject::try_from(credential.blob.as_slice())?;
    let secret = EncryptedSecret::try_from(credential.secret.as_slice())?;
    let endorsement_key = ek::create_ek_object_2(context, kind.algorithm(), None)?;
    let activated = authorize(context, kind).and_then(|session| {
        let sessions = (Some(AuthSession::Password), Some(session), None);
        let activated = context.execute_with_sessions(sessions, |context| {
            context.activate_credential(key, endorsement_key, blob, secret)
        });
        // a policy session ends with a successful command only
        if activated.is_err()
            && let AuthSession::PolicySession(session) = session
        {
            let _ = flush(context, session);
        }
        activated
    });
    context.flush_context(endorsement_key.into())?;
    activated.map(|digest: Digest| Secret::new(digest.to_vec()))
}

/// Returns a session that authorizes one use of an endorsement key.
fn authorize(context: &mut Context, kind: EndorsementKind) -> Result<AuthSession> {
    if kind.has_password() {
        return Ok(AuthSession::Password);
    }
    let started = context.start_auth_session(
        None,
        None,
        None,
        SessionType::Policy,
        SymmetricDefinition::AES_128_CFB,
        HashingAlgorithm::Sha256,
    )?;
    let wrong = tss_esapi::Error::WrapperError(tss_esapi::WrapperErrorKind::WrongValueFromTpm);
    let session = started.ok_or(wrong)?;
    let policy = PolicySession::try_from(session)?;
    // policy A of the profile: the password of the endorsement hierarchy
    let proved = context.execute_with_nullauth_session(|context| {
        context.policy_secret(
            policy,
            AuthHandle::Endorsement,
            Nonce::default(),
            Digest::default(),
            Nonce::default(),
            None,
        )
    });
    match proved {
        Ok(_) => Ok(session),
        Err(error) => {
            let _ = flush(context, policy);
            Err(error)
        }
    }
}

fn flush(context: &mut Context, session: PolicySession) -> Result<()> {
    let handle = tss_esapi::handles::SessionHandle::from(session);
    context.flush_context(handle.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn certificates_are_taken_out_of_their_padding() {
        let short = [&[0x30, 0x81, 130][..], &[1; 130]].concat();
        let long = [&[0x30, 0x82, 2, 0][..], &[2; 512]].concat();
        let both = [short.clone(), long.clone()].concat();
        for padding in [&[][..], &[0; 100], &[0xff; 100], &[0x30], &[0x30, 0x82, 1]] {
            let padded = [&both, padding].concat();
            assert_eq!(split(&padded), [short.clone(), long.clone()]);
        }
        assert_eq!(split(&long[..515]), Vec::<Vec<u8>>::new());
        assert_eq!(split(&[0; 8]), Vec::<Vec<u8>>::new());
        for bytes in mutations(&both, 5000) {
            let length: usize = split(&bytes).iter().map(Vec::len).sum();
            assert!(length <= bytes.len());
        }
    }
}
