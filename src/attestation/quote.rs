//! What a TPM signed (TCG, "Trusted Platform Module Library", part 2): TPMS_ATTEST, TPMT_SIGNATURE, TPMT_PUBLIC, read from
//! bytes that a peer sent, and checked.

use ring::signature::{RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents};

/// TPM_GENERATED_VALUE: the TPM made this structure itself (§6.2).
const GENERATED: u32 = 0xff54_4347;
/// TPM_ST_ATTEST_QUOTE (§6.9).
const ATTEST_QUOTE: u16 = 0x8018;
const ALG_RSA: u16 = 0x0001;
const ALG_SHA256: u16 = 0x000b;
const ALG_NULL: u16 = 0x0010;
const ALG_RSASSA: u16 = 0x0014;
/// Attributes that make a key one that signs only what its TPM generated: fixedTPM, restricted, sign, and not decrypt (§8.3).
const RESTRICTED_SIGNING: u32 = 0x0005_0002;
const DECRYPT: u32 = 0x0002_0000;

/// An attestation key.
#[derive(Debug)]
pub struct Key<'a> {
    modulus: &'a [u8],
    exponent: u32,
}

impl<'a> Key<'a> {
    /// Reads a TPMT_PUBLIC (§12.2.4): RSA, restricted, RSASSA with SHA-256.
    pub fn parse(public: &'a [u8]) -> Result<Key<'a>, &'static str> {
        Self::read(&mut Reader(public)).ok_or("the attestation key is cut short")?
    }

    fn read(reader: &mut Reader<'a>) -> Option<Result<Key<'a>, &'static str>> {
        let (kind, _name_hash, attributes) = (reader.u16()?, reader.u16()?, reader.u32()?);
        reader.sized()?; // authPolicy
        if kind != ALG_RSA {
            return Some(Err("the attestation key is not an RSA key"));
        }
        if attributes & RESTRICTED_SIGNING != RESTRICTED_SIGNING || attributes & DECRYPT != 0 {
            return Some(Err("the attestation key may sign more than what its TPM generated"));
        }
        if (reader.u16()?, reader.u16()?, reader.u16()?) != (ALG_NULL, ALG_RSASSA, ALG_SHA256) {
            return Some(Err("the attestation key does not sign by RSASSA with SHA-256"));
        }
        let (_bits, exponent) = (reader.u16()?, reader.u32()?);
        let modulus = reader.sized()?;
        // 0 stands for the default (§12.2.3.5)
        Some(Ok(Key { modulus, exponent: if exponent == 0 { 65537 } else { exponent } }))
    }

    /// Whether `signature` (TPMT_SIGNATURE, §11.3.4) is this key's over `message`.
    pub fn signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let mut reader = Reader(signature);
        let mut parts = || Some((reader.u16()?, reader.u16()?, reader.sized()?));
        let Some((ALG_RSASSA, ALG_SHA256, signature)) = parts() else { return false };
        let exponent = self.exponent.to_be_bytes();
        // ring wants no leading zeros
        let first = exponent.iter().position(|byte| *byte != 0).unwrap_or(exponent.len());
        RsaPublicKeyComponents { n: self.modulus, e: &exponent[first..] }
            .verify(&RSA_PKCS1_2048_8192_SHA256, message, signature)
            .is_ok()
    }
}

/// What a quote says (TPMS_ATTEST with TPMS_QUOTE_INFO, §10.12).
#[derive(Debug, PartialEq, Eq)]
pub struct Attest<'a> {
    /// The nonce that the verifier chose.
    pub extra_data: &'a [u8],
    /// TPM_ALG_ID of the one bank that was quoted.
    pub bank: u16,
    /// The PCRs that were quoted, ascending.
    pub pcrs: Vec<u32>,
    /// Hash of their values, one after the other.
    pub pcr_digest: &'a [u8],
}

impl<'a> Attest<'a> {
    /// Reads a quote of one bank.
    pub fn parse(attest: &'a [u8]) -> Option<Attest<'a>> {
        let mut reader = Reader(attest);
        if (reader.u32()?, reader.u16()?) != (GENERATED, ATTEST_QUOTE) {
            return None;
        }
        reader.sized()?; // qualifiedSigner
        let extra_data = reader.sized()?;
        reader.take(8 + 4 + 4 + 1)?; // clockInfo
        reader.take(8)?; // firmwareVersion
        if reader.u32()? != 1 {
            return None;
        }
        let bank = reader.u16()?;
        let size = reader.take(1)?[0];
        let bitmap = reader.take(size.into()).filter(|bitmap| bitmap.len() <= 4)?;
        let bits = bitmap.iter().enumerate().flat_map(|(at, byte)| (0..8).map(move |bit| (at * 8 + bit, byte >> bit)));
        let pcrs = bits.filter(|(_, byte)| byte & 1 == 1).map(|(pcr, _)| pcr as u32).collect();
        let pcr_digest = reader.sized()?;
        reader.0.is_empty().then_some(Attest { extra_data, bank, pcrs, pcr_digest })
    }
}

/// Big endian.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// TPM2B_...
    fn sized(&mut self) -> Option<&'a [u8]> {
        let len = self.u16()?;
        self.take(len.into())
    }
}
