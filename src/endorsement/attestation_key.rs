//! The checks on the attestation key of a peer, before a credential is made for it.

use base::bytes::Reader;
use verifier::KeyName;

const ALG_RSA: u16 = 0x0001;
const ALG_SHA256: u16 = 0x000b;
const ALG_SHA384: u16 = 0x000c;
const ALG_SHA512: u16 = 0x000d;
const ALG_NULL: u16 = 0x0010;
const ALG_RSASSA: u16 = 0x0014;
const ALG_RSAPSS: u16 = 0x0016;
const ALG_ECDSA: u16 = 0x0018;
const ALG_ECC: u16 = 0x0023;
/// TPM_ECC_NIST_P256 and TPM_ECC_NIST_P384 with the lengths of their coordinates in bytes.
const CURVES: [(u16, usize); 2] = [(0x0003, 32), (0x0004, 48)];
/// TPMA_OBJECT (part 2 §8.3): fixedTPM, fixedParent, sensitiveDataOrigin, restricted and sign are
/// set, ...
const SET: u32 = 0x0005_0032;
/// ... and encryptedDuplication, decrypt and x509sign are clear.
const CHECKED: u32 = 0x000f_0832;
const DEFAULT_EXPONENT: u32 = 65537;

/// Returns the Name of an attestation key (TPMT_PUBLIC, part 2 §12.2.4) that is made in a TPM,
/// cannot leave it, and signs only structures that the TPM generated. The Name is the hash of these
/// bytes, and nothing may follow the key.
pub fn check(public: &[u8]) -> Result<KeyName, &'static str> {
    let mut reader = Reader(public);
    read(&mut reader).ok_or("its attestation key is truncated")??;
    match reader.0 {
        [] => Ok(KeyName::of(public)),
        _ => Err("bytes follow its attestation key"),
    }
}

fn read(reader: &mut Reader<'_>) -> Option<Result<(), &'static str>> {
    let (kind, name_hash, attributes) = (reader.u16_be()?, reader.u16_be()?, reader.u32_be()?);
    reader.tpm2b()?; // authPolicy
    if name_hash != ALG_SHA256 {
        return Some(Err("the nameAlg of its attestation key is not SHA-256"));
    }
    if attributes & CHECKED != SET {
        return Some(Err(
            "its attestation key can leave its TPM, or can sign data that the TPM did not generate",
        ));
    }
    if reader.u16_be()? != ALG_NULL {
        return Some(Err("its attestation key has a symmetric algorithm"));
    }
    let (scheme, hash) = match reader.u16_be()? {
        ALG_NULL => return Some(Err("its attestation key has no signing scheme of its own")),
        scheme => (scheme, reader.u16_be()?),
    };
    if !matches!(hash, ALG_SHA256 | ALG_SHA384 | ALG_SHA512) {
        return Some(Err(
            "its attestation key does not sign with SHA-256 or a longer hash",
        ));
    }
    match (kind, scheme) {
        (ALG_RSA, ALG_RSASSA | ALG_RSAPSS) => read_rsa(reader),
        (ALG_ECC, ALG_ECDSA) => read_ecc(reader),
        _ => Some(Err(
            "its attestation key is neither an RSA key for RSASSA or RSAPSS nor an ECC key for ECDSA",
        )),
    }
}

fn read_rsa(reader: &mut Reader<'_>) -> Option<Result<(), &'static str>> {
    let (bits, exponent, modulus) = (reader.u16_be()?, reader.u32_be()?, reader.tpm2b()?);
    let is_strong = matches!(bits, 2048 | 3072 | 4096)
        && modulus.len() * 8 == usize::from(bits)
        && matches!(exponent, 0 | DEFAULT_EXPONENT);
    Some(if is_strong {
        Ok(())
    } else {
        Err("its attestation key is not an RSA key with 2048, 3072 or 4096 bits")
    })
}

fn read_ecc(reader: &mut Reader<'_>) -> Option<Result<(), &'static str>> {
    let (curve, derivation) = (reader.u16_be()?, reader.u16_be()?);
    let (x, y) = (reader.tpm2b()?, reader.tpm2b()?);
    let length = CURVES.iter().find(|(known, _)| *known == curve);
    let is_strong = derivation == ALG_NULL
        && length.is_some_and(|(_, length)| x.len() == *length && y.len() == *length);
    Some(if is_strong {
        Ok(())
    } else {
        Err("its attestation key is not a key on the curve P-256 or P-384")
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use support::mutation::mutations;

    /// Returns an RSA key with these attributes, nameAlg, scheme and hash.
    pub fn rsa(attributes: u32, name_hash: u16, scheme: u16, hash: u16) -> Vec<u8> {
        [
            &[0, 1][..],
            &name_hash.to_be_bytes(),
            &attributes.to_be_bytes(),
            &[0, 0, 0, 0x10],
            &scheme.to_be_bytes(),
            &hash.to_be_bytes(),
            &[8, 0, 0, 0, 0, 0, 1, 0],
            &[0xab; 256],
        ]
        .concat()
    }

    fn ecc(curve: u16, length: usize) -> Vec<u8> {
        let coordinate = [&(length as u16).to_be_bytes()[..], &vec![1; length]].concat();
        [
            &[
                0, 0x23, 0, 0x0b, 0, 5, 0, 0x72, 0, 0, 0, 0x10, 0, 0x18, 0, 0x0b,
            ][..],
            &curve.to_be_bytes(),
            &[0, 0x10],
            &coordinate,
            &coordinate,
        ]
        .concat()
    }

    #[test]
    fn keys_that_only_sign_what_their_tpm_generated_are_accepted() {
        for key in [
            rsa(0x0005_0072, ALG_SHA256, ALG_RSASSA, ALG_SHA256),
            rsa(0x0005_0472, ALG_SHA256, ALG_RSAPSS, ALG_SHA384),
            ecc(3, 32),
            ecc(4, 48),
        ] {
            assert_eq!(check(&key), Ok(KeyName::of(&key)));
        }
    }

    #[test]
    fn others_are_refused_by_name() {
        let good = rsa(0x0005_0072, ALG_SHA256, ALG_RSASSA, ALG_SHA256);
        let with = |attributes| rsa(attributes, ALG_SHA256, ALG_RSASSA, ALG_SHA256);
        for (key, why) in [
            (good[..good.len() - 1].to_vec(), "truncated"),
            ([&good[..], &[0]].concat(), "bytes follow"),
            (with(0x0004_0072), "can sign data"),
            (with(0x0007_0072), "can sign data"),
            (with(0x000d_0072), "can sign data"),
            (with(0x0005_0070), "can leave"),
            (with(0x0005_0062), "can leave"),
            (with(0x0005_0052), "can leave"),
            (with(0x0005_0872), "can leave"),
            (rsa(0x0005_0072, 4, ALG_RSASSA, ALG_SHA256), "nameAlg"),
            (rsa(0x0005_0072, ALG_SHA256, ALG_RSASSA, 4), "longer hash"),
            (
                rsa(0x0005_0072, ALG_SHA256, ALG_NULL, ALG_SHA256),
                "no signing scheme",
            ),
            (
                rsa(0x0005_0072, ALG_SHA256, ALG_ECDSA, ALG_SHA256),
                "neither",
            ),
            (ecc(3, 31), "P-256"),
            (ecc(0x10, 32), "P-256"),
        ] {
            let error = check(&key).unwrap_err();
            assert!(error.contains(why), "{error}, expected: {why}");
        }
    }

    #[test]
    fn mutated_keys_cause_no_panic() {
        for key in [
            rsa(0x0005_0072, ALG_SHA256, ALG_RSASSA, ALG_SHA256),
            ecc(3, 32),
        ] {
            for key in mutations(&key, 5000) {
                let _ = check(&key);
            }
        }
    }
}
