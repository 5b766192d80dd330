//! Attestation keys: TPMT_PUBLIC (TCG, "Trusted Platform Module Library", part 2), and the form
//! that certificates contain.

use attest::spki::{rsa_spki, spki};
use base::bytes::Reader;

/// TPM_ALG_RSA (§6.3).
pub const ALG_RSA: u16 = 0x0001;
/// TPM_ALG_SHA256 (§6.3).
pub const ALG_SHA256: u16 = 0x000b;
/// TPM_ALG_SHA384 (§6.3).
pub const ALG_SHA384: u16 = 0x000c;
/// TPM_ALG_SHA512 (§6.3).
pub const ALG_SHA512: u16 = 0x000d;
const ALG_NULL: u16 = 0x0010;
/// TPM_ALG_RSASSA (§6.3).
pub const ALG_RSASSA: u16 = 0x0014;
/// TPM_ALG_ECDSA (§6.3).
pub const ALG_ECDSA: u16 = 0x0018;
const ALG_ECC: u16 = 0x0023;
/// TPM_ECC_NIST_P256 (§6.4).
pub const CURVE_P256: u16 = 0x0003;
/// TPM_ECC_NIST_P384.
pub const CURVE_P384: u16 = 0x0004;
/// The attributes of an attestation key (§8.3): fixedTPM, fixedParent, sensitiveDataOrigin,
/// userWithAuth, restricted, sign. Such a key signs only structures that its TPM generated. Azure's
/// key also has noDA, and so did ours in an earlier version.
const ATTRIBUTES: u32 = 0x0005_0072;
const NO_DA: u32 = 0x0000_0400;
/// The exponent of every RSA key of a TPM.
pub const DEFAULT_EXPONENT: u32 = 65537;

/// An attestation key.
#[derive(Debug)]
pub struct Key<'a> {
    /// TPM_ALG_ID of the hash that the key signs.
    pub hash: u16,
    /// The public key.
    pub public: Public<'a>,
}

/// The public key of an attestation key.
#[derive(Debug, PartialEq, Eq)]
pub enum Public<'a> {
    /// The modulus; the exponent is 65537.
    Rsa(&'a [u8]),
    /// An elliptic curve: the coordinates of the point, padded to the full width of the curve.
    Ecc(&'static Curve, &'a [u8], &'a [u8]),
}

/// A curve, with the only hash that is accepted for it.
#[derive(Debug, PartialEq, Eq)]
pub struct Curve {
    /// TPM_ECC_CURVE.
    pub id: u16,
    hash: u16,
    /// The length of a coordinate in bytes.
    pub width: usize,
}

const CURVES: [Curve; 2] = [
    Curve {
        id: CURVE_P256,
        hash: ALG_SHA256,
        width: 32,
    },
    Curve {
        id: CURVE_P384,
        hash: ALG_SHA384,
        width: 48,
    },
];

impl<'a> Key<'a> {
    /// Parses a TPMT_PUBLIC (§12.2.4) of the template: nameAlg SHA-256, no policy; RSA for RSASSA with SHA-256, SHA-384 or SHA-512,
    /// or P-256 and P-384 for ECDSA with the hash of the same size. No bytes may follow. Even so a key has several encodings, and
    /// the hash of these bytes identifies the machine. So each quote names this encoding: it contains the key's Qualified Name, and
    /// the TPM signs it.
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
        if !matches!(kind, ALG_RSA | ALG_ECC) {
            return Some(Err("the attestation key is neither an RSA nor an ECC key"));
        }
        if name_hash != ALG_SHA256 {
            return Some(Err("the nameAlg of the attestation key is not SHA-256"));
        }
        if !policy.is_empty() {
            return Some(Err("the attestation key has an authorization policy"));
        }
        if attributes & !NO_DA != ATTRIBUTES {
            return Some(Err(
                "the attributes of the attestation key are not 0x00050072 or 0x00050472: it could sign data that its TPM did not generate",
            ));
        }
        let (symmetric, scheme, hash) = (reader.u16_be()?, reader.u16_be()?, reader.u16_be()?);
        let is_known = match kind {
            ALG_RSA => scheme == ALG_RSASSA,
            _ => scheme == ALG_ECDSA,
        };
        if symmetric != ALG_NULL
            || !is_known
            || !matches!(hash, ALG_SHA256 | ALG_SHA384 | ALG_SHA512)
        {
            return Some(Err(
                "the attestation key does not sign with RSASSA or ECDSA and SHA-256 or a longer hash",
            ));
        }
        let public = match kind {
            ALG_RSA => Self::read_rsa(reader)?,
            _ => Self::read_ecc(reader, hash)?,
        };
        Some(public.map(|public| Key { hash, public }))
    }

    fn read_rsa(reader: &mut Reader<'a>) -> Option<Result<Public<'a>, &'static str>> {
        let (bits, exponent, modulus) = (reader.u16_be()?, reader.u32_be()?, reader.tpm2b()?);
        // the sizes that TPMs support (TCG Algorithm Registry, RSA key bits); the first bit of a
        // modulus is set
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
        Some(Ok(Public::Rsa(modulus)))
    }

    fn read_ecc(reader: &mut Reader<'a>, hash: u16) -> Option<Result<Public<'a>, &'static str>> {
        let (id, derivation) = (reader.u16_be()?, reader.u16_be()?);
        let (x, y) = (reader.tpm2b()?, reader.tpm2b()?);
        let Some(curve) = CURVES
            .iter()
            .find(|curve| (curve.id, curve.hash) == (id, hash))
        else {
            return Some(Err(
                "the attestation key is neither for P-256 with SHA-256 nor for P-384 with SHA-384",
            ));
        };
        if derivation != ALG_NULL || x.len() != curve.width || y.len() != curve.width {
            return Some(Err("the attestation key's point has a wrong size"));
        }
        Some(Ok(Public::Ecc(curve, x, y)))
    }

    /// Returns the key as certificates contain it: SubjectPublicKeyInfo (RFC 3279 §2.3.1, RFC 5480
    /// §2), DER.
    pub fn spki(&self) -> Vec<u8> {
        // id-ecPublicKey with secp256r1, secp384r1
        const P256: &[u8] =
            b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07";
        const P384: &[u8] = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x22";
        match self.public {
            Public::Rsa(modulus) => rsa_spki(modulus),
            Public::Ecc(curve, x, y) if curve.id == CURVE_P256 => spki(P256, &[&[4], x, y]),
            Public::Ecc(_, x, y) => spki(P384, &[&[4], x, y]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// Returns a TPMT_PUBLIC of our template from these parts.
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
                assert_eq!(
                    Key::parse(&key).unwrap().public,
                    Public::Rsa(&vec![0xab; bytes.into()])
                );
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

    /// Constellation's test vector is the SHA-512 of an RSA key with 1024 bits; OpenSSL writes
    /// longer ones in the same form.
    #[test]
    fn a_key_is_written_as_certificates_contain_it() {
        let rsa = key(ALG_SHA256, &[], 2048, 0, &[0xab; 256]);
        let spki = Key::parse(&rsa).unwrap().spki();
        assert_eq!(spki[..4], [0x30, 0x82, 0x01, 0x22]);
        assert_eq!(
            spki[24..33],
            [0x30, 0x82, 0x01, 0x0a, 0x02, 0x82, 0x01, 0x01, 0]
        );
        assert!(spki.ends_with(&[0xab, 2, 3, 1, 0, 1]) && spki.len() == 294);
        // the generator of P-256 in the worked example of Constellation's documentation
        let spki = Key::parse(&ecc(CURVE_P256, ALG_SHA256, 32)).unwrap().spki();
        assert_eq!(spki.len(), 91);
        assert!(spki.starts_with(b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08"));
        assert_eq!(spki[23..27], [0x03, 0x42, 0, 4]);
    }

    /// Returns a TPMT_PUBLIC of the template of GCE for ECC keys with this curve, hash and width.
    fn ecc(curve: u16, hash: u16, width: u16) -> Vec<u8> {
        let coordinate = [&width.to_be_bytes()[..], &vec![1; width.into()]].concat();
        [
            &[0, 0x23, 0, 0x0b, 0, 5, 0, 0x72, 0, 0, 0, 0x10, 0, 0x18][..],
            &hash.to_be_bytes(),
            &curve.to_be_bytes(),
            &[0, 0x10],
            &coordinate,
            &coordinate,
        ]
        .concat()
    }

    #[test]
    fn a_curve_goes_with_the_hash_of_its_size_and_points_have_their_full_width() {
        for (curve, hash, width, accepted) in [
            (CURVE_P256, ALG_SHA256, 32, true),
            (CURVE_P384, ALG_SHA384, 48, true),
            (CURVE_P256, ALG_SHA384, 32, false),
            (CURVE_P384, ALG_SHA256, 48, false),
            (CURVE_P256, 4, 32, false),
            (5, ALG_SHA512, 66, false),
            (CURVE_P256, ALG_SHA256, 31, false),
            (CURVE_P384, ALG_SHA384, 32, false),
        ] {
            let key = ecc(curve, hash, width);
            assert_eq!(Key::parse(&key).is_ok(), accepted, "{curve} {hash} {width}");
        }
        for bytes in mutations(&ecc(CURVE_P256, ALG_SHA256, 32), 20_000) {
            if let Ok(key) = Key::parse(&bytes) {
                assert_eq!(key.spki().len(), 91);
            }
        }
    }

    #[test]
    fn mutated_keys_cause_no_panic() {
        for bytes in mutations(&key(ALG_SHA256, &[], 2048, 0, &[0xab; 256]), 20_000) {
            if let Ok(key) = Key::parse(&bytes) {
                assert!(matches!(key.public, Public::Rsa(modulus) if modulus.len() == 256));
                key.spki();
            }
        }
    }
}
