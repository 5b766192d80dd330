//! The endorsement key (EK): a decryption key that the vendor of the TPM has certified. It cannot
//! sign. It proves that another key is in the same TPM: the TPM decrypts a credential only if it
//! holds both the EK and the key that the credential names (TPM2_MakeCredential and
//! TPM2_ActivateCredential, part 1 §24).
//!
//! The seed of the endorsement hierarchy and the template always give the same key, so the EK is
//! made for each use, and needs no persistent handle.

use super::channel::{CommandError, Result, TpmChannel};
use super::commands::{ENDORSEMENT, sized};
use super::{Error, KeySource, Tpm, attestation_key};
use base::crypto::Secret;
use base::der::{DerReader, SEQUENCE};

/// The NV indices of the CA certificates for the endorsement keys ("TCG EK Credential Profile",
/// §2.2.1.5.2).
const CHAIN: std::ops::RangeInclusive<u32> = 0x01c0_0100..=0x01c0_01ff;
/// The first NV index of the profile.
const FIRST: u32 = 0x01c0_0000;
/// The policies of the templates ("TCG EK Credential Profile", annex B).
const POLICY_A: [u8; 32] = [
    0x83, 0x71, 0x97, 0x67, 0x44, 0x84, 0xb3, 0xf8, 0x1a, 0x90, 0xcc, 0x8d, 0x46, 0xa5, 0xd7, 0x24,
    0xfd, 0x52, 0xd7, 0x6e, 0x06, 0x52, 0x0b, 0x64, 0xf2, 0xa1, 0xda, 0x1b, 0x33, 0x14, 0x69, 0xaa,
];
const POLICY_B: [u8; 48] = [
    0xb2, 0x6e, 0x7d, 0x28, 0xd1, 0x1a, 0x50, 0xbc, 0x53, 0xd8, 0x82, 0xbc, 0xf5, 0xfd, 0x3a, 0x1a,
    0x07, 0x41, 0x48, 0xbb, 0x35, 0xd3, 0xb4, 0xe4, 0xcb, 0x1c, 0x0a, 0xd9, 0xbd, 0xe4, 0x19, 0xca,
    0xcb, 0x47, 0xba, 0x09, 0x69, 0x96, 0x46, 0x15, 0x0f, 0x9f, 0xc0, 0x00, 0xf3, 0xf8, 0x0e, 0x12,
];
/// With these codes a TPM says that a credential is not for its keys, or is not a credential:
/// TPM_RC_FAILURE, VALUE, SCHEME, SIZE, INSUFFICIENT, INTEGRITY, ECC_POINT (part 2 §6.6.3). libtpms
/// answers FAILURE if the secret is encrypted for another RSA key; a TPM in failure mode would have
/// refused the commands before.
const NOT_FOR_US: [u32; 7] = [0x101, 0x084, 0x092, 0x095, 0x09a, 0x09f, 0x0a7];
/// An NV index was defined, and never written: TPM_RC_NV_UNINITIALIZED (part 2 §6.6.3).
const NV_UNINITIALIZED: u32 = 0x14a;
/// Maximum number of handles in one answer (MAX_CAP_HANDLES, part 2 §10.9.3).
const HANDLES_A_READ: u32 = 254;

/// The template of an endorsement key ("TCG EK Credential Profile", annex B). The value is the NV
/// index of its certificate (§2.2.1).
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

    /// Returns the template (TPMT_PUBLIC).
    fn template(self) -> Vec<u8> {
        // fixedTPM, fixedParent, sensitiveDataOrigin, adminWithPolicy, restricted, decrypt;
        // template H-3 has userWithAuth, too
        const ATTRIBUTES: u32 = 0x0003_00b2;
        const USER_WITH_AUTH: u32 = 1 << 6;
        const AES_128_CFB: [u8; 6] = [0x00, 0x06, 0x00, 0x80, 0x00, 0x43];
        const AES_256_CFB: [u8; 6] = [0x00, 0x06, 0x01, 0x00, 0x00, 0x43];
        let low = |algorithm: u8, rest: &[u8]| {
            let attributes = ATTRIBUTES.to_be_bytes();
            [
                &[0, algorithm, 0, 0x0b][..],
                &attributes,
                &sized(&POLICY_A),
                &AES_128_CFB,
                rest,
            ]
            .concat()
        };
        let zeros = |len: usize| sized(&vec![0; len]);
        match self {
            // no scheme, 2048 bits, exponent 65537 as 0, 256 zeros in place of the modulus
            EndorsementKind::Rsa2048 => low(
                0x01,
                &[&[0, 0x10, 0x08, 0, 0, 0, 0, 0][..], &zeros(256)].concat(),
            ),
            // no scheme, P-256, no derivation of keys, zeros in place of the point
            EndorsementKind::P256 => low(
                0x23,
                &[&[0, 0x10, 0, 0x03, 0, 0x10][..], &zeros(32), &zeros(32)].concat(),
            ),
            EndorsementKind::P384 => {
                let attributes = (ATTRIBUTES | USER_WITH_AUTH).to_be_bytes();
                let rest = [0, 0x10, 0, 0x04, 0, 0x10, 0, 0, 0, 0];
                [
                    &[0, 0x23, 0, 0x0c][..],
                    &attributes,
                    &sized(&POLICY_B),
                    &AES_256_CFB,
                    &rest,
                ]
                .concat()
            }
        }
    }
}

/// Returns the template (TPMT_PUBLIC) of an endorsement key of this TPM: that of the profile, unless the
/// vendor wrote another one into the NV index behind the certificate. In the low range the vendor's nonce
/// may be between the two; without a template it has no meaning (§2.2.1).
fn template(tpm: &mut TpmChannel, kind: EndorsementKind) -> Result<Vec<u8>> {
    let next = kind as u32 + 1;
    let there = tpm.handles(next, 2)?;
    let mut written = |index| {
        if there.contains(&index) {
            match tpm.nv_read(index, &[]) {
                Err(error) if error.is(NV_UNINITIALIZED) => Ok(None),
                read => read.map(Some),
            }
        } else {
            Ok(None)
        }
    };
    let other = next + u32::from(kind != EndorsementKind::P384);
    let Some(template) = written(other)? else {
        return Ok(kind.template());
    };
    if other == next {
        Ok(template)
    } else {
        Ok(match written(next)? {
            Some(nonce) => with_nonce(kind, template, nonce),
            None => template,
        })
    }
}

/// Returns the template L-1 or L-2 with the nonce, and zeros behind it, as the modulus or the point.
fn with_nonce(kind: EndorsementKind, mut template: Vec<u8>, mut nonce: Vec<u8>) -> Vec<u8> {
    // algorithms and attributes, a policy with its length, the cipher; then what a kind of key has
    let common = 10 + template.get(9).map_or(0, |len| usize::from(*len)) + 6;
    let (before, len, rest) = match kind {
        EndorsementKind::Rsa2048 => (common + 8, 256, vec![]),
        _ => (common + 6, 32, sized(&[0; 32])),
    };
    nonce.resize(len, 0);
    template.truncate(before);
    [template, sized(&nonce), rest].concat()
}

/// A TPM's statement about one of its endorsement keys. Nothing in it is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEndorsement {
    /// The template of the key.
    pub kind: EndorsementKind,
    /// The certificate of the key: X.509, DER.
    pub certificate: Vec<u8>,
    /// The CA certificates above it that the TPM has: X.509, DER.
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
    /// Returns the endorsement keys whose certificates the TPM holds. A TPM without certificates,
    /// as clouds offer them, gives none.
    pub fn endorsements(&mut self) -> std::result::Result<Vec<KeyEndorsement>, Error> {
        self.run("reading the certificates of the endorsement key", read_all)
    }

    /// Returns the secret of a credential that a peer made for an endorsement key and the
    /// attestation key of this TPM. [`Error::Credential`] if it was made for another TPM or another
    /// key.
    pub fn activate(
        &mut self,
        source: KeySource,
        kind: EndorsementKind,
        credential: &Credential,
    ) -> std::result::Result<Secret, Error> {
        let (key, public) = self.load_key(source)?;
        let activated = self.run("ActivateCredential", |tpm| {
            activate(tpm, key, kind, credential)
        });
        attestation_key::used(self.channel()?, &public);
        activated.map_err(|error| match error {
            Error::Command(_, _, CommandError::Refused(code))
                if NOT_FOR_US.contains(&code.kind()) =>
            {
                Error::Credential
            }
            error => error,
        })
    }
}

fn read_all(tpm: &mut TpmChannel) -> Result<Vec<KeyEndorsement>> {
    let indices = tpm.handles(FIRST, HANDLES_A_READ)?;
    let mut chain = vec![];
    for index in indices.iter().filter(|index| CHAIN.contains(index)) {
        chain.extend(tpm.nv_read(*index, &[])?);
    }
    let chain = split(&chain);
    let mut endorsements = vec![];
    for kind in EndorsementKind::ALL {
        if !indices.contains(&(kind as u32)) {
            continue;
        }
        match split(&tpm.nv_read(kind as u32, &[])?).into_iter().next() {
            Some(certificate) => endorsements.push(KeyEndorsement {
                kind,
                certificate,
                chain: chain.clone(),
            }),
            None => log::warn!(
                "ignoring NV index {:#x} of the TPM: it has no certificate",
                kind as u32
            ),
        }
    }
    Ok(endorsements)
}

/// Returns the certificates at the start of an NV index: DER, one after the other. Padding follows
/// them. Nuvoton and others write a header before the certificate (PC Client Implementation
/// Specification for Conventional BIOS, §7.3.2): TCG_TAG_PCCLIENT_STORED_CERT, the type "full", and
/// a length. TCG_TAG_PCCLIENT_FULL_CERT may follow.
pub(super) fn split(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    if let [0x10, 0x01, 0x00, _, _, rest @ ..] = bytes {
        bytes = rest.strip_prefix(&[0x10, 0x02]).unwrap_or(rest);
    }
    let mut reader = DerReader::new(bytes);
    let certificates = std::iter::from_fn(|| reader.expect_whole(SEQUENCE).ok());
    certificates.map(<[u8]>::to_vec).collect()
}

fn activate(
    tpm: &mut TpmChannel,
    key: u32,
    kind: EndorsementKind,
    credential: &Credential,
) -> Result<Secret> {
    let template = template(tpm, kind)?;
    let (endorsement_key, _) = tpm.create_primary(ENDORSEMENT, &template)?;
    let (blob, secret) = (&credential.blob, &credential.secret);
    // userWithAuth: the empty password authorizes the key; others require a policy session
    let by_password = template.get(7).is_some_and(|low| low & 1 << 6 != 0);
    let activated = tpm.activate_credential(key, endorsement_key, by_password, blob, secret);
    tpm.flush(endorsement_key)?;
    activated
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn a_nonce_takes_the_place_of_the_modulus_or_the_first_coordinate() {
        let (rsa, ecc) = (EndorsementKind::Rsa2048, EndorsementKind::P256);
        for (kind, nonce, room) in [
            (rsa, 20, 256),
            (rsa, 256, 256),
            (ecc, 20, 32),
            (ecc, 32, 32),
        ] {
            let plain = kind.template();
            let made = with_nonce(kind, plain.clone(), vec![7; nonce]);
            let start = plain.len() - if kind == rsa { 256 } else { 66 };
            let expected = [&plain[..start], &vec![7; nonce], &plain[start + nonce..]].concat();
            assert!(made == expected && nonce <= room, "{kind:?} {nonce}");
            for bytes in mutations(&plain, 200) {
                let len = with_nonce(kind, bytes.clone(), vec![7; nonce]).len();
                assert!(len <= bytes.len() + room + 36);
            }
        }
    }

    #[test]
    fn certificates_are_taken_out_of_their_padding() {
        let short = [&[0x30, 0x81, 130][..], &[1; 130]].concat();
        let long = [&[0x30, 0x82, 2, 0][..], &[2; 512]].concat();
        let both = [short.clone(), long.clone()].concat();
        for padding in [&[][..], &[0; 100], &[0xff; 100], &[0x30], &[0x30, 0x82, 1]] {
            let padded = [&both, padding].concat();
            assert_eq!(split(&padded), [short.clone(), long.clone()]);
        }
        for header in [&[0x10, 1, 0, 2, 4][..], &[0x10, 1, 0, 2, 6, 0x10, 2]] {
            let stored = [header, &long, &[0xff; 100]].concat();
            assert_eq!(split(&stored), std::slice::from_ref(&long));
            for end in 0..header.len() + long.len() {
                assert_eq!(split(&stored[..end]), Vec::<Vec<u8>>::new());
            }
            for bytes in mutations(&stored, 1000) {
                let length: usize = split(&bytes).iter().map(Vec::len).sum();
                assert!(length <= bytes.len());
            }
        }
        assert_eq!(split(&long[..515]), Vec::<Vec<u8>>::new());
        assert_eq!(split(&[0; 8]), Vec::<Vec<u8>>::new());
        for bytes in mutations(&both, 5000) {
            let length: usize = split(&bytes).iter().map(Vec::len).sum();
            assert!(length <= bytes.len());
        }
    }
}
