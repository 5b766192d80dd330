//! TPM2_MakeCredential in software (TPM 2.0 part 1 §24, §B.10.4 and §C.6.4): encrypts a secret so
//! that only a TPM that holds an endorsement key and the key with a certain Name decrypts it.
//!
//! ```text
//! seed       RSA: random                                   secret = OAEP(seed, label "IDENTITY\0")
//!            ECC: KDFe(shared point, "IDENTITY", ..)       secret = the ephemeral point
//! identity   AES-CFB(KDFa(seed, "STORAGE", Name), the secret of the caller)
//! integrity  HMAC(KDFa(seed, "INTEGRITY"), identity ‖ Name)
//! blob       TPM2B(integrity) ‖ identity
//! ```

use aes::cipher::{BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};
use ring::agreement::{self, EphemeralPrivateKey, UnparsedPublicKey, agree_ephemeral};
use ring::rand::SystemRandom;
use ring::{digest, hmac};
use rsa::pkcs8::DecodePublicKey;
use rsa::sha2::Sha256;
use rsa::traits::PublicKeyParts;
use rsa::{Oaep, RsaPublicKey};
use zeroize::Zeroizing;

use tpm::{Credential, EndorsementKind};
use verifier::refusal::{Kind, Refusal};

/// Label of the seed (part 1 §24.4), with a terminating zero if the label has one.
const IDENTITY: &str = "IDENTITY\0";
const STORAGE: &[u8] = b"STORAGE\0";
const INTEGRITY: &[u8] = b"INTEGRITY\0";
/// DER of a SubjectPublicKeyInfo before the uncompressed point (RFC 5480 §2).
const P256: &[u8] = b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\x00";
const P384: &[u8] =
    b"\x30\x76\x30\x10\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x22\x03\x62\x00";
/// The first byte of an uncompressed point.
const UNCOMPRESSED: u8 = 4;
const EXPONENT: u32 = 65537;

/// A public endorsement key that matches its template.
#[derive(Debug)]
pub enum EndorsementKey {
    /// Template L-1.
    Rsa2048(RsaPublicKey),
    /// Template L-2: the uncompressed point.
    P256(Vec<u8>),
    /// Template H-3: the uncompressed point.
    P384(Vec<u8>),
}

/// The elliptic curve of an endorsement key, with the hash of its template.
struct Curve {
    agreement: &'static agreement::Algorithm,
    suite: Suite,
}

/// The algorithms of a template.
#[derive(Clone, Copy)]
struct Suite {
    hash: &'static digest::Algorithm,
    hmac: hmac::Algorithm,
    /// Length of the AES key in bytes.
    key: usize,
}

const SHA256: Suite = Suite {
    hash: &digest::SHA256,
    hmac: hmac::HMAC_SHA256,
    key: 16,
};
const SHA384: Suite = Suite {
    hash: &digest::SHA384,
    hmac: hmac::HMAC_SHA384,
    key: 32,
};

const CURVE_P256: Curve = Curve {
    agreement: &agreement::ECDH_P256,
    suite: SHA256,
};
const CURVE_P384: Curve = Curve {
    agreement: &agreement::ECDH_P384,
    suite: SHA384,
};

impl EndorsementKey {
    /// Parses a SubjectPublicKeyInfo (DER) as the key of this template.
    pub fn parse(kind: EndorsementKind, info: &[u8]) -> Result<EndorsementKey, Refusal> {
        let parsed = match kind {
            EndorsementKind::Rsa2048 => rsa_2048(info).map(EndorsementKey::Rsa2048),
            EndorsementKind::P256 => point(info, P256, 65).map(EndorsementKey::P256),
            EndorsementKind::P384 => point(info, P384, 97).map(EndorsementKey::P384),
        };
        parsed.ok_or_else(|| wrong(format!("its key is not of the template {kind:?}")))
    }

    /// Encrypts `secret` for a TPM with this key and the key whose Name (with its nameAlg) is
    /// `name`.
    pub fn make_credential(&self, name: &[u8], secret: &[u8; 32]) -> Result<Credential, Refusal> {
        match self {
            EndorsementKey::Rsa2048(key) => {
                let seed = Zeroizing::new(base::crypto::random::<32>());
                let padding = Oaep::new_with_label::<Sha256, _>(IDENTITY);
                let encrypted = key
                    .encrypt(&mut rsa::rand_core::OsRng, padding, &seed[..])
                    .map_err(|error| wrong(format!("RSA encryption fails: {error}")))?;
                Ok(Credential {
                    blob: seal(SHA256, &seed[..], name, secret),
                    secret: encrypted,
                })
            }
            EndorsementKey::P256(point) => for_point(&CURVE_P256, point, name, secret),
            EndorsementKey::P384(point) => for_point(&CURVE_P384, point, name, secret),
        }
    }
}

fn wrong(why: impl Into<String>) -> Refusal {
    Kind::Certificate.because(why)
}

fn rsa_2048(info: &[u8]) -> Option<RsaPublicKey> {
    let key = RsaPublicKey::from_public_key_der(info).ok()?;
    let fits = key.size() == 256 && key.n().bits() == 2048 && *key.e() == EXPONENT.into();
    fits.then_some(key)
}

fn point(info: &[u8], prefix: &[u8], length: usize) -> Option<Vec<u8>> {
    let point = info.strip_prefix(prefix)?;
    (point.len() == length && point[0] == UNCOMPRESSED).then(|| point.to_vec())
}

fn for_point(
    curve: &Curve,
    point: &[u8],
    name: &[u8],
    secret: &[u8; 32],
) -> Result<Credential, Refusal> {
    let wrong = |_| wrong("its key is not a point of its curve");
    let ephemeral =
        EphemeralPrivateKey::generate(curve.agreement, &SystemRandom::new()).map_err(wrong)?;
    let ours = ephemeral.compute_public_key().map_err(wrong)?;
    let (our_x, our_y) = coordinates(ours.as_ref());
    let (their_x, _) = coordinates(point);
    let theirs = UnparsedPublicKey::new(curve.agreement, point);
    let seed = agree_ephemeral(ephemeral, &theirs, |shared| {
        kdf_e(curve.suite, shared, our_x, their_x)
    })
    .map_err(wrong)?;
    Ok(Credential {
        blob: seal(curve.suite, &seed, name, secret),
        secret: [sized(our_x), sized(our_y)].concat(),
    })
}

/// Returns the coordinates of an uncompressed point.
fn coordinates(point: &[u8]) -> (&[u8], &[u8]) {
    let coordinates = &point[1..];
    coordinates.split_at(coordinates.len() / 2)
}

/// Returns the content of the TPM2B_ID_OBJECT.
fn seal(suite: Suite, seed: &[u8], name: &[u8], secret: &[u8; 32]) -> Vec<u8> {
    let key = kdf_a(suite, seed, STORAGE, name, suite.key);
    let mut identity = sized(secret);
    match suite.key {
        16 => cfb(
            &Aes128::new_from_slice(&key).expect("16 bytes"),
            &mut identity,
        ),
        _ => cfb(
            &Aes256::new_from_slice(&key).expect("32 bytes"),
            &mut identity,
        ),
    }
    let key = kdf_a(suite, seed, INTEGRITY, &[], suite.hash.output_len());
    let mut mac = hmac::Context::with_key(&hmac::Key::new(suite.hmac, &key));
    mac.update(&identity);
    mac.update(name);
    [sized(mac.sign().as_ref()), identity].concat()
}

/// KDFa (part 1 §11.4.10.2). The label ends with a zero; the second context is always empty. One
/// block is enough for all lengths here.
fn kdf_a(
    suite: Suite,
    key: &[u8],
    label: &[u8],
    context: &[u8],
    length: usize,
) -> Zeroizing<Vec<u8>> {
    debug_assert!(length <= suite.hash.output_len());
    let mut mac = hmac::Context::with_key(&hmac::Key::new(suite.hmac, key));
    mac.update(&1_u32.to_be_bytes());
    mac.update(label);
    mac.update(context);
    mac.update(&(8 * length as u32).to_be_bytes());
    Zeroizing::new(mac.sign().as_ref()[..length].to_vec())
}

/// KDFe (part 1 §11.4.10.3): one block, which is as long as the seed.
fn kdf_e(suite: Suite, shared: &[u8], our_x: &[u8], their_x: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut hash = digest::Context::new(suite.hash);
    hash.update(&1_u32.to_be_bytes());
    hash.update(shared);
    hash.update(IDENTITY.as_bytes());
    hash.update(our_x);
    hash.update(their_x);
    Zeroizing::new(hash.finish().as_ref().to_vec())
}

/// Encrypts in CFB mode with a zero IV (NIST SP 800-38A §6.3, segments of a block).
fn cfb(cipher: &impl BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16>, data: &mut [u8]) {
    let mut feedback = Block::default();
    for segment in data.chunks_mut(16) {
        cipher.encrypt_block(&mut feedback);
        for (byte, mask) in segment.iter_mut().zip(&feedback) {
            *byte ^= mask;
        }
        feedback[..segment.len()].copy_from_slice(segment);
    }
}

/// Returns the bytes, preceded by their length (TPM2B).
fn sized(bytes: &[u8]) -> Vec<u8> {
    // at most 256 bytes
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn a_key_fits_its_template_only() {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let p256 = rcgen::PublicKeyData::subject_public_key_info(&key);
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        let p384 = rcgen::PublicKeyData::subject_public_key_info(&key);
        for (info, fits) in [
            (&p256, EndorsementKind::P256),
            (&p384, EndorsementKind::P384),
        ] {
            for kind in EndorsementKind::ALL {
                assert_eq!(EndorsementKey::parse(kind, info).is_ok(), kind == fits);
            }
            for info in mutations(info, 2000) {
                if let Ok(key) = EndorsementKey::parse(fits, &info) {
                    // a point that is not on the curve is refused here
                    let _ = key.make_credential(&[0; 34], &[1; 32]);
                }
            }
            let mut wrong = info.clone();
            *wrong.last_mut().unwrap() ^= 1;
            let key = EndorsementKey::parse(fits, &wrong).unwrap();
            let error = key.make_credential(&[0; 34], &[1; 32]).unwrap_err();
            assert!(error.text.contains("not a point"), "{error}");
        }
    }

    #[test]
    fn each_credential_is_another() {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        let info = rcgen::PublicKeyData::subject_public_key_info(&key);
        let key = EndorsementKey::parse(EndorsementKind::P384, &info).unwrap();
        let make = || key.make_credential(&[0; 34], &[1; 32]).unwrap();
        let (one, other) = (make(), make());
        assert_ne!(one, other);
        // TPM2B of a SHA-384 HMAC and of 32 bytes; two TPM2B of coordinates
        assert_eq!((one.blob.len(), one.secret.len()), (2 + 48 + 2 + 32, 100));
    }

    /// The input of zeros yields the key stream: the cipher, applied repeatedly to a block of
    /// zeros.
    #[test]
    fn cfb_is_that_of_a_zero_iv() {
        let cipher = Aes128::new_from_slice(&[7; 16]).unwrap();
        let mut expected = Block::default();
        cipher.encrypt_block(&mut expected);
        let mut data = [0; 34];
        cfb(&cipher, &mut data);
        assert_eq!(data[..16], expected[..]);
        cipher.encrypt_block(&mut expected);
        assert_eq!(data[16..32], expected[..]);
        cipher.encrypt_block(&mut expected);
        assert_eq!(data[32..], expected[..2]);
    }
}
