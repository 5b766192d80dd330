//! Parses and verifies the structures of a quote that a peer sent: TPMS_ATTEST, TPMT_SIGNATURE
//! (TCG, "Trusted Platform Module Library", part 2).

pub mod key;

use base::bytes::Reader;
pub use key::*;
use ring::digest;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey, VerificationAlgorithm,
};

/// TPM_GENERATED_VALUE: marks a structure that the TPM generated (§6.2).
const GENERATED: u32 = 0xff54_4347;
/// TPM_ST_ATTEST_QUOTE (§6.9).
const ATTEST_QUOTE: u16 = 0x8018;

/// A hierarchy of attestation keys (§7.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Hierarchy {
    /// TPM_RH_OWNER.
    Owner = 0x4000_0001,
    /// TPM_RH_ENDORSEMENT.
    Endorsement = 0x4000_000b,
    /// TPM_RH_PLATFORM, which only the firmware can use.
    Platform = 0x4000_000c,
}

/// An attestation key as a verifier uses it.
pub trait Signed {
    /// Returns whether `signature` (TPMT_SIGNATURE, §11.3.4) is a signature of this key over
    /// `message`.
    fn signed(&self, message: &[u8], signature: &[u8]) -> bool;
    /// Returns the hash over `parts` with the key's hash algorithm: a quote's digest of the
    /// registers uses it (part 3 §18.4).
    fn digest(&self, parts: &[&[u8]]) -> digest::Digest;
}

impl Signed for Key<'_> {
    fn signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let mut reader = Reader(signature);
        let (Some(scheme), Some(hash)) = (reader.u16_be(), reader.u16_be()) else {
            return false;
        };
        let genuine = match (&self.public, scheme) {
            (Public::Rsa(modulus), ALG_RSASSA) => {
                rsa_signed(self.hash, modulus, message, &mut reader)
            }
            (Public::Ecc(curve, x, y), ALG_ECDSA) => {
                ecc_signed(curve, &[&[4], *x, *y].concat(), message, &mut reader)
            }
            _ => None,
        };
        hash == self.hash && genuine == Some(true) && reader.0.is_empty()
    }

    fn digest(&self, parts: &[&[u8]]) -> digest::Digest {
        let algorithm = match self.hash {
            ALG_SHA256 => &digest::SHA256,
            ALG_SHA384 => &digest::SHA384,
            _ => &digest::SHA512,
        };
        digest::digest(algorithm, &parts.concat())
    }
}

fn rsa_signed(hash: u16, modulus: &[u8], message: &[u8], rest: &mut Reader<'_>) -> Option<bool> {
    let algorithm: &RsaParameters = match hash {
        ALG_SHA256 => &RSA_PKCS1_2048_8192_SHA256,
        ALG_SHA384 => &RSA_PKCS1_2048_8192_SHA384,
        _ => &RSA_PKCS1_2048_8192_SHA512,
    };
    // ring accepts no leading zeros
    let key = RsaPublicKeyComponents {
        n: modulus,
        e: &DEFAULT_EXPONENT.to_be_bytes()[1..],
    };
    Some(key.verify(algorithm, message, rest.tpm2b()?).is_ok())
}

/// Verifies an ECDSA signature (TPMS_SIGNATURE_ECC: r and s, from which a TPM may omit leading
/// zeros). `None` if it is truncated.
fn ecc_signed(curve: &Curve, point: &[u8], message: &[u8], rest: &mut Reader<'_>) -> Option<bool> {
    let algorithm: &'static dyn VerificationAlgorithm = match curve.id {
        CURVE_P256 => &ECDSA_P256_SHA256_FIXED,
        _ => &ECDSA_P384_SHA384_FIXED,
    };
    let mut signature = vec![];
    for number in [rest.tpm2b()?, rest.tpm2b()?] {
        let zeros = curve.width.checked_sub(number.len())?;
        signature.resize(signature.len() + zeros, 0);
        signature.extend(number);
    }
    let key = UnparsedPublicKey::new(algorithm, point);
    Some(key.verify(message, &signature).is_ok())
}

/// The content of a quote (TPMS_ATTEST with TPMS_QUOTE_INFO, §10.12).
#[derive(Debug, PartialEq, Eq)]
pub struct Attest<'a> {
    /// The Qualified Name of the key that signed.
    pub signer: &'a [u8],
    /// The nonce that the verifier chose.
    pub extra_data: &'a [u8],
    firmware_version: u64,
    /// TPM_ALG_ID of the quoted bank.
    pub bank: u16,
    /// The quoted PCRs in ascending order.
    pub pcrs: Vec<u32>,
    /// Hash of the concatenated values.
    pub pcr_digest: &'a [u8],
}

impl<'a> Attest<'a> {
    /// Parses a quote of one bank.
    pub fn parse(attest: &'a [u8]) -> Option<Attest<'a>> {
        let mut reader = Reader(attest);
        if (reader.u32_be()?, reader.u16_be()?) != (GENERATED, ATTEST_QUOTE) {
            return None;
        }
        let signer = reader.tpm2b()?;
        let extra_data = reader.tpm2b()?;
        reader.take(8 + 4 + 4 + 1)?; // clockInfo
        let firmware_version = reader.array().copied().map(u64::from_be_bytes)?;
        if reader.u32_be()? != 1 {
            return None;
        }
        let bank = reader.u16_be()?;
        let size = reader.take(1)?[0];
        let bitmap = reader
            .take(size.into())
            .filter(|bitmap| bitmap.len() <= 4)?;
        let bits = bitmap
            .iter()
            .enumerate()
            .flat_map(|(at, byte)| (0..8).map(move |bit| (at * 8 + bit, byte >> bit)));
        let pcrs = bits
            .filter(|(_, byte)| byte & 1 == 1)
            .map(|(pcr, _)| pcr as u32)
            .collect();
        let pcr_digest = reader.tpm2b()?;
        reader.0.is_empty().then_some(Attest {
            signer,
            extra_data,
            firmware_version,
            bank,
            pcrs,
            pcr_digest,
        })
    }

    /// Returns the hierarchy in which the Qualified Name of the signer is that of a primary key with
    /// this TPMT_PUBLIC (part 1 §16); `None` if there is none. The TPM signs the Qualified Name, so a
    /// machine cannot get another name by another encoding of its key.
    pub fn hierarchy_of(&self, public: &[u8]) -> Option<Hierarchy> {
        let name = |bytes: &[u8]| {
            let hash = digest::digest(&digest::SHA256, bytes);
            [&ALG_SHA256.to_be_bytes()[..], hash.as_ref()].concat()
        };
        let own = name(public);
        let is_below = |parent: &Hierarchy| {
            let handle = (*parent as u32).to_be_bytes();
            self.signer == name(&[&handle[..], &own].concat())
        };
        let all = [
            Hierarchy::Owner,
            Hierarchy::Endorsement,
            Hierarchy::Platform,
        ];
        all.into_iter().find(is_below)
    }

    /// Returns the version of the TPM's firmware: TPM_PT_FIRMWARE_VERSION_1 and _2 (§6.13). `None` if
    /// the signer is in the owner hierarchy: then the TPM adds a secret of its own to the number, which
    /// is constant for a key (`FillInAttestInfo` in the reference code).
    pub fn firmware_version(&self, signer: Hierarchy) -> Option<u64> {
        (signer != Hierarchy::Owner).then_some(self.firmware_version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// A TPMT_PUBLIC of the template of GCE for P-256.
    const KEY: &[u8] = &[
        0, 0x23, 0, 0x0b, 0, 5, 0, 0x72, 0, 0, 0, 0x10, 0, 0x18, 0, 0x0b, 0, 3, 0, 0x10,
    ];

    #[test]
    fn no_mutated_bytes_are_a_signature() {
        let coordinate = [&[0, 32][..], &[1; 32]].concat();
        let key = [KEY, &coordinate, &coordinate].concat();
        let key = Key::parse(&key).unwrap();
        let number = [&[0, 32][..], &[2; 32]].concat();
        let signature = [&[0, 0x18, 0, 0x0b][..], &number, &number].concat();
        for bytes in mutations(&signature, 20_000) {
            assert!(!key.signed(b"message", &bytes));
        }
    }
}
