//! Signatures of files and messages by SSH keys (PROTOCOL.sshsig of OpenSSH's sources), as `ssh-keygen -Y sign` makes them: with a
//! key in a file, in an agent, or on a FIDO2 token.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{self, Algorithm, SHA256, SHA512, digest};
use ring::signature::{
    self, Ed25519KeyPair, KeyPair, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};

use super::key::{self, PublicKey};
use super::wire::{WireError, WireReader, Writer};
use base::crypto::Secret;

/// Maximum length in bytes of a signature: one of an RSA key with 16 384 bits has 4.2 KiB.
pub const MAX_SIGNATURE: usize = 8 << 10;
const MAGIC: &[u8] = b"SSHSIG";
const VERSION: u32 = 1;
const BEGIN: &str = "-----BEGIN SSH SIGNATURE-----";
const END: &str = "-----END SSH SIGNATURE-----";
/// PROTOCOL.u2f, "SSH U2F Signatures": the owner touched the token.
const USER_PRESENT: u8 = 1;

/// Returns the bytes of a signature in the file that ssh-keygen writes.
pub fn blob_of_file(text: &str) -> Result<Vec<u8>, Error> {
    let base64 = text
        .trim()
        .strip_prefix(BEGIN)
        .and_then(|text| text.strip_suffix(END))
        .ok_or(Error::Malformed)?;
    let compact: String = base64.split_ascii_whitespace().collect();
    STANDARD.decode(compact).map_err(|_| Error::Malformed)
}

/// A new Ed25519 key that signs.
pub struct SigningKey {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

impl SigningKey {
    /// Makes a key.
    pub fn generate() -> SigningKey {
        let seed = Secret::random(key::ED25519_LEN);
        let pair = Ed25519KeyPair::from_seed_unchecked(seed.expose())
            .expect("a seed of this length is a key");
        let public = PublicKey::ed25519(pair.public_key().as_ref());
        SigningKey { pair, public }
    }

    /// Returns the public key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Signs `message` in this namespace. Returns the bytes of the signature.
    pub fn sign(&self, namespace: &str, message: &[u8]) -> Vec<u8> {
        let signature = self
            .pair
            .sign(&signed(namespace, b"sha512", &SHA512, message));
        let signature = Writer::default()
            .string(key::ED25519.as_bytes())
            .string(signature.as_ref());
        let blob = Writer::default()
            .raw(MAGIC)
            .u32(VERSION)
            .string(self.public.blob())
            .string(namespace.as_bytes())
            .string(b"")
            .string(b"sha512")
            .string(signature.bytes());
        blob.bytes().to_vec()
    }
}

/// Returns the bytes that the key signs.
fn signed(namespace: &str, name: &[u8], algorithm: &'static Algorithm, message: &[u8]) -> Vec<u8> {
    Writer::default()
        .raw(MAGIC)
        .string(namespace.as_bytes())
        .string(b"")
        .string(name)
        .string(digest(algorithm, message).as_ref())
        .bytes()
        .to_vec()
}

/// Checks that `blob` is a signature by `key` of `message` in this namespace. A key on a FIDO2 token must have been touched.
pub fn verify(blob: &[u8], key: &PublicKey, namespace: &str, message: &[u8]) -> Result<(), Error> {
    if blob.len() > MAX_SIGNATURE {
        return Err(Error::Malformed);
    }
    let body = blob.strip_prefix(MAGIC).ok_or(Error::Malformed)?;
    let mut reader = WireReader::new(body);
    if reader.u32()? != VERSION {
        return Err(Error::Malformed);
    }
    if reader.string()? != key.blob() {
        return Err(Error::OtherKey);
    }
    if reader.string()? != namespace.as_bytes() {
        return Err(Error::OtherNamespace);
    }
    let _reserved = reader.string()?;
    let hash = reader.string()?;
    let algorithm = match hash {
        b"sha256" => &SHA256,
        b"sha512" => &SHA512,
        _ => return Err(Error::Malformed),
    };
    let signature = reader.string()?;
    reader.end()?;
    by_key(key, &signed(namespace, hash, algorithm, message), signature)
}

/// Checks that signatures of this kind of key can be verified. The library has no P-521, and RSA only from 2048 to 8192 bits.
pub fn check_kind(key: &PublicKey) -> Result<(), Error> {
    match key.kind() {
        kind @ "ecdsa-sha2-nistp521" => Err(Error::Kind(kind)),
        kind @ "ssh-rsa" => {
            let mut fields = WireReader::new(key.fields());
            let (_exponent, modulus) = (fields.string()?, positive(fields.string()?)?);
            if (2048 / 8..=8192 / 8).contains(&modulus.len()) {
                Ok(())
            } else {
                Err(Error::Kind(kind))
            }
        }
        _ => Ok(()),
    }
}

/// Checks the signature of the key itself (RFC 4253 §6.6 and the documents of each kind of key).
fn by_key(key: &PublicKey, signed: &[u8], signature: &[u8]) -> Result<(), Error> {
    let (mut fields, mut reader) = (WireReader::new(key.fields()), WireReader::new(signature));
    let name = reader.string()?;
    let bytes = reader.string()?;
    match (key.kind(), name) {
        ("ssh-ed25519", b"ssh-ed25519") => {
            reader.end()?;
            check(&signature::ED25519, fields.string()?, signed, bytes)
        }
        ("sk-ssh-ed25519@openssh.com", b"sk-ssh-ed25519@openssh.com") => {
            let point = fields.string()?;
            let signed = by_token(fields.string()?, signed, reader)?;
            check(&signature::ED25519, point, &signed, bytes)
        }
        ("ecdsa-sha2-nistp256", b"ecdsa-sha2-nistp256") => {
            reader.end()?;
            let (_curve, point) = (fields.string()?, fields.string()?);
            check(
                &signature::ECDSA_P256_SHA256_FIXED,
                point,
                signed,
                &fixed::<32>(bytes)?,
            )
        }
        ("ecdsa-sha2-nistp384", b"ecdsa-sha2-nistp384") => {
            reader.end()?;
            let (_curve, point) = (fields.string()?, fields.string()?);
            check(
                &signature::ECDSA_P384_SHA384_FIXED,
                point,
                signed,
                &fixed::<48>(bytes)?,
            )
        }
        ("sk-ecdsa-sha2-nistp256@openssh.com", b"sk-ecdsa-sha2-nistp256@openssh.com") => {
            let (_curve, point) = (fields.string()?, fields.string()?);
            let signed = by_token(fields.string()?, signed, reader)?;
            check(
                &signature::ECDSA_P256_SHA256_FIXED,
                point,
                &signed,
                &fixed::<32>(bytes)?,
            )
        }
        ("ssh-rsa", b"rsa-sha2-512") => {
            reader.end()?;
            by_rsa(
                &signature::RSA_PKCS1_2048_8192_SHA512,
                fields,
                signed,
                bytes,
            )
        }
        ("ssh-rsa", b"rsa-sha2-256") => {
            reader.end()?;
            by_rsa(
                &signature::RSA_PKCS1_2048_8192_SHA256,
                fields,
                signed,
                bytes,
            )
        }
        // SHA-1 of `ssh-rsa`, and P-521, which the library does not have
        (kind, _) => Err(Error::Kind(kind)),
    }
}

fn check(
    algorithm: &'static dyn VerificationAlgorithm,
    key: &[u8],
    signed: &[u8],
    signature: &[u8],
) -> Result<(), Error> {
    UnparsedPublicKey::new(algorithm, key)
        .verify(signed, signature)
        .map_err(|_| Error::Signature)
}

fn by_rsa(
    algorithm: &'static signature::RsaParameters,
    mut fields: WireReader<'_>,
    signed: &[u8],
    signature: &[u8],
) -> Result<(), Error> {
    let e = positive(fields.string()?)?;
    let n = positive(fields.string()?)?;
    RsaPublicKeyComponents { n, e }
        .verify(algorithm, signed, signature)
        .map_err(|_| Error::Signature)
}

/// Returns what a FIDO2 token signs (PROTOCOL.u2f): the digest of the application, flags and counter, the digest of the message.
/// `reader` is after the token's signature.
fn by_token(
    application: &[u8],
    message: &[u8],
    mut reader: WireReader<'_>,
) -> Result<Vec<u8>, Error> {
    let (flags, counter) = (reader.byte()?, reader.u32()?);
    reader.end()?;
    if flags & USER_PRESENT == 0 {
        return Err(Error::Untouched);
    }
    let digest = |bytes: &[u8]| digest::digest(&SHA256, bytes);
    Ok([
        digest(application).as_ref(),
        &[flags],
        &counter.to_be_bytes(),
        digest(message).as_ref(),
    ]
    .concat())
}

/// Returns both numbers of an ECDSA signature (RFC 5656 §3.1.2) one after the other, each with `N` bytes.
fn fixed<const N: usize>(signature: &[u8]) -> Result<Vec<u8>, Error> {
    let mut reader = WireReader::new(signature);
    let mut all = vec![];
    for _ in 0..2 {
        let number = positive(reader.string()?)?;
        let zeros = N.checked_sub(number.len()).ok_or(Error::Malformed)?;
        all.resize(all.len() + zeros, 0);
        all.extend_from_slice(number);
    }
    reader.end()?;
    Ok(all)
}

/// Returns a positive number in the format mpint (RFC 4251 §5) without leading zeros.
fn positive(number: &[u8]) -> Result<&[u8], Error> {
    match number {
        [first, ..] if first & 0x80 != 0 => Err(Error::Malformed),
        [0, rest @ ..] => Ok(rest),
        [] => Err(Error::Malformed),
        number => Ok(number),
    }
}

/// Why a signature is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The format is wrong.
    Malformed,
    /// It is by another key.
    OtherKey,
    /// It is for another purpose.
    OtherNamespace,
    /// Signatures of keys of this kind cannot be verified, or not with this hash.
    Kind(&'static str),
    /// The owner did not touch the FIDO2 token.
    Untouched,
    /// It is wrong.
    Signature,
}

impl From<WireError> for Error {
    fn from(_: WireError) -> Error {
        Error::Malformed
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Malformed => f.write_str("it is not a signature in OpenSSH's format"),
            Error::OtherKey => f.write_str("it was made by another key than the certified one"),
            Error::OtherNamespace => f.write_str("it is for another purpose"),
            Error::Kind(kind) => write!(
                f,
                "signatures of a key of the kind {kind} cannot be verified: use an Ed25519 key, a P-256 or P-384 key, an RSA key \
                 of 2048 to 8192 bits with SHA-2, or a FIDO2 token"
            ),
            Error::Untouched => f.write_str("nobody touched the FIDO2 token"),
            Error::Signature => f.write_str("it is wrong: the message or the key differs"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// The message and the namespace of tests/data/ssh-signatures.
    const MESSAGE: &[u8] = b"This is a test, this is only a test";
    const NAMESPACE: &str = "unittest";

    macro_rules! genuine {
        ($name:literal) => {
            (
                PublicKey::from_line(include_str!(concat!(
                    "../../tests/data/ssh-signatures/",
                    $name,
                    ".pub"
                )))
                .unwrap(),
                blob_of_file(include_str!(concat!(
                    "../../tests/data/ssh-signatures/",
                    $name,
                    ".sig"
                )))
                .unwrap(),
            )
        };
    }

    #[test]
    fn genuine_signatures_are_accepted_for_their_key_namespace_and_message_only() {
        let all = [
            genuine!("ed25519_sk"),
            genuine!("ecdsa_sk"),
            genuine!("rsa"),
        ];
        for (key, blob) in &all {
            assert_eq!(verify(blob, key, NAMESPACE, MESSAGE), Ok(()), "{key:?}");
            assert_eq!(
                verify(blob, key, "file", MESSAGE),
                Err(Error::OtherNamespace)
            );
            assert_eq!(verify(blob, key, NAMESPACE, b"This"), Err(Error::Signature));
            let other = &all.iter().find(|(other, _)| other != key).unwrap().0;
            assert_eq!(
                verify(blob, other, NAMESPACE, MESSAGE),
                Err(Error::OtherKey)
            );
        }
    }

    #[test]
    fn an_own_signature_is_accepted() {
        let key = SigningKey::generate();
        let blob = key.sign(NAMESPACE, MESSAGE);
        assert_eq!(verify(&blob, key.public(), NAMESPACE, MESSAGE), Ok(()));
    }

    #[test]
    fn a_token_that_nobody_touched_is_refused() {
        let (key, mut blob) = genuine!("ed25519_sk");
        let flags = blob.len() - 5;
        assert_eq!(blob[flags], USER_PRESENT);
        blob[flags] = 0;
        assert_eq!(
            verify(&blob, &key, NAMESPACE, MESSAGE),
            Err(Error::Untouched)
        );
        blob[flags] = USER_PRESENT | 4;
        assert_eq!(
            verify(&blob, &key, NAMESPACE, MESSAGE),
            Err(Error::Signature)
        );
    }

    #[test]
    fn no_mutated_signature_is_accepted() {
        for (key, blob) in [genuine!("ed25519_sk"), genuine!("ecdsa_sk")] {
            let accepted = mutations(&blob, 5_000)
                .filter(|it| *it != blob && verify(it, &key, NAMESPACE, MESSAGE).is_ok())
                .count();
            assert_eq!(accepted, 0, "{key:?}");
        }
    }
}
