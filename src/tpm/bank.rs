//! The banks of PCRs.

use ring::digest;

/// A bank of PCRs, by its hash (TPM_ALG_ID, TCG Algorithm Registry).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bank {
    /// TPM_ALG_SHA1
    Sha1 = 0x0004,
    /// TPM_ALG_SHA256
    Sha256 = 0x000b,
    /// TPM_ALG_SHA384
    Sha384 = 0x000c,
    /// TPM_ALG_SHA512
    Sha512 = 0x000d,
}

impl Bank {
    /// Returns the bank with this TPM_ALG_ID.
    pub fn with_id(id: u32) -> Option<Bank> {
        [Bank::Sha1, Bank::Sha256, Bank::Sha384, Bank::Sha512]
            .into_iter()
            .find(|bank| *bank as u32 == id)
    }

    pub(super) fn hash(self) -> &'static digest::Algorithm {
        match self {
            Bank::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Bank::Sha256 => &digest::SHA256,
            Bank::Sha384 => &digest::SHA384,
            Bank::Sha512 => &digest::SHA512,
        }
    }

    /// Returns the value of a zero PCR of this bank after TPM2_PCR_Event of `data`.
    pub(super) fn extended_from_zero(self, data: &[u8]) -> Vec<u8> {
        let mut value = digest::Context::new(self.hash());
        value.update(&vec![0; self.hash().output_len()]);
        value.update(digest::digest(self.hash(), data).as_ref());
        value.finish().as_ref().to_vec()
    }
}
