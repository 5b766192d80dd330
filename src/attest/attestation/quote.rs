//! Parses and verifies the structures of a quote that a peer sent: TPMS_ATTEST, TPMT_SIGNATURE, TPMT_PUBLIC (TCG, "Trusted
//! Platform Module Library", part 2).

use base::bytes::Reader;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents};

/// TPM_GENERATED_VALUE: marks a structure that the TPM generated (§6.2).
const GENERATED: u32 = 0xff54_4347;
/// TPM_ST_ATTEST_QUOTE (§6.9).
const ATTEST_QUOTE: u16 = 0x8018;
const ALG_RSA: u16 = 0x0001;
const ALG_SHA256: u16 = 0x000b;
const ALG_NULL: u16 = 0x0010;
const ALG_RSASSA: u16 = 0x0014;
/// Attributes of a key that signs only structures that its TPM generated: fixedTPM, restricted, sign, and not decrypt (§8.3).
const RESTRICTED_SIGNING: u32 = 0x0005_0002;
const DECRYPT: u32 = 0x0002_0000;
const DEFAULT_EXPONENT: u32 = 65537;

/// An attestation key.
#[derive(Debug)]
pub struct Key<'a> {
    modulus: &'a [u8],
}

impl<'a> Key<'a> {
    /// Parses a TPMT_PUBLIC (§12.2.4): RSA, restricted, nameAlg SHA-256, no policy, RSASSA with SHA-256. The hash of these bytes
    /// names the machine, so only one encoding of a key is accepted, and no bytes may follow.
    pub fn parse(public: &'a [u8]) -> Result<Key<'a>, &'static str> {
        let mut reader = Reader(public);
        let key = Self::read(&mut reader).ok_or("the attestation key is truncated")??;
        if reader.0.is_empty() {
            Ok(key)
        } else {
            Err("bytes follow the attestation key")
        }
    }

    fn read(reader: &mut Reader<'a>) -> Option<Result<Key<'a>, &'static str>> {
        let (kind, name_hash, attributes, policy) = (
            reader.u16_be()?,
            reader.u16_be()?,
            reader.u32_be()?,
            reader.tpm2b()?,
        );
        if kind != ALG_RSA {
            return Some(Err("the attestation key is not an RSA key"));
        }
        if name_hash != ALG_SHA256 {
            return Some(Err("the nameAlg of the attestation key is not SHA-256"));
        }
        if !policy.is_empty() {
            return Some(Err("the attestation key has an authorization policy"));
        }
        if attributes & RESTRICTED_SIGNING != RESTRICTED_SIGNING || attributes & DECRYPT != 0 {
            return Some(Err(
                "the attestation key can sign data that its TPM did not generate",
            ));
        }
        if (reader.u16_be()?, reader.u16_be()?, reader.u16_be()?)
            != (ALG_NULL, ALG_RSASSA, ALG_SHA256)
        {
            return Some(Err(
                "the attestation key does not sign with RSASSA and SHA-256",
            ));
        }
        let (bits, exponent, modulus) = (reader.u16_be()?, reader.u32_be()?, reader.tpm2b()?);
        // the sizes that TPMs have (TCG Algorithm Registry, RSA key bits); the first bit of a modulus is set
        if !matches!(bits, 2048 | 3072 | 4096)
            || modulus.len() * 8 != usize::from(bits)
            || modulus.first().is_none_or(|byte| byte >> 7 == 0)
        {
            return Some(Err("the attestation key's modulus has a wrong size"));
        }
        // 0 means the default, 65537 (§12.2.3.5); no TPM of a cloud uses another exponent
        if !matches!(exponent, 0 | DEFAULT_EXPONENT) {
            return Some(Err("the attestation key's exponent is not 65537"));
        }
        Some(Ok(Key { modulus }))
    }

    /// Returns whether `signature` (TPMT_SIGNATURE, §11.3.4) is a signature of this key over `message`.
    pub fn signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let mut reader = Reader(signature);
        let mut parts = || Some((reader.u16_be()?, reader.u16_be()?, reader.tpm2b()?));
        let Some((ALG_RSASSA, ALG_SHA256, signature)) = parts() else {
            return false;
        };
        if !reader.0.is_empty() {
            return false;
        }
        // ring accepts no leading zeros
        RsaPublicKeyComponents {
            n: self.modulus,
            e: &DEFAULT_EXPONENT.to_be_bytes()[1..],
        }
        .verify(&RSA_PKCS1_2048_8192_SHA256, message, signature)
        .is_ok()
    }
}

/// The content of a quote (TPMS_ATTEST with TPMS_QUOTE_INFO, §10.12).
#[derive(Debug, PartialEq, Eq)]
pub struct Attest<'a> {
    /// The nonce that the verifier chose.
    pub extra_data: &'a [u8],
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
        reader.tpm2b()?; // qualifiedSigner
        let extra_data = reader.tpm2b()?;
        reader.take(8 + 4 + 4 + 1)?; // clockInfo
        reader.take(8)?; // firmwareVersion
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
            extra_data,
            bank,
            pcrs,
            pcr_digest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// Returns a TPMT_PUBLIC of our template with these parts.
    fn key(name_hash: u16, policy: &[u8], bits: u16, exponent: u32, modulus: &[u8]) -> Vec<u8> {
        [
            &[0, 1][..],
            &name_hash.to_be_bytes(),
            &[0x00, 0x05, 0x04, 0x72],
            &(policy.len() as u16).to_be_bytes(),
            policy,
            &[0, 0x10, 0, 0x14, 0, 0x0b],
            &bits.to_be_bytes(),
            &exponent.to_be_bytes(),
            &(modulus.len() as u16).to_be_bytes(),
            modulus,
        ]
        .concat()
    }

    #[test]
    fn a_key_of_every_size_that_tpms_have_is_read() {
        for bytes in [256, 384, 512] {
            for exponent in [0, 65537] {
                let key = key(
                    ALG_SHA256,
                    &[],
                    bytes * 8,
                    exponent,
                    &vec![0xab; bytes.into()],
                );
                assert_eq!(Key::parse(&key).unwrap().modulus.len(), usize::from(bytes));
            }
        }
    }

    #[test]
    fn a_key_has_one_form_and_nothing_after_it() {
        let modulus = [0xab; 256];
        let good = key(ALG_SHA256, &[], 2048, 0, &modulus);
        assert!(Key::parse(&good).is_ok());
        for (bad, why) in [
            ([&good[..], &[0]].concat(), "bytes follow"),
            (good[..good.len() - 1].to_vec(), "truncated"),
            (
                key(ALG_SHA256, &[1; 32], 2048, 0, &modulus),
                "authorization policy",
            ),
            (key(4, &[], 2048, 0, &modulus), "SHA-256"),
            (key(ALG_SHA256, &[], 2048, 3, &modulus), "exponent"),
            (key(ALG_SHA256, &[], 2047, 0, &modulus), "size"),
            (key(ALG_SHA256, &[], 3072, 0, &modulus), "size"),
            (key(ALG_SHA256, &[], 2048, 0, &modulus[1..]), "size"),
            (key(ALG_SHA256, &[], 2048, 0, &[0x7b; 256]), "size"),
            (key(ALG_SHA256, &[], 1024, 0, &modulus[..128]), "size"),
            (key(ALG_SHA256, &[], 2056, 0, &[0xab; 257]), "size"),
            (key(ALG_SHA256, &[], 0, 0, &[]), "size"),
        ] {
            let error = Key::parse(&bad).unwrap_err();
            assert!(error.contains(why), "{error}, expected: {why}");
        }
    }

    #[test]
    fn mutated_keys_cause_no_panic() {
        for bytes in mutations(&key(ALG_SHA256, &[], 2048, 0, &[0xab; 256]), 20_000) {
            if let Ok(key) = Key::parse(&bytes) {
                assert_eq!(key.modulus.len(), 256);
            }
        }
    }
}
