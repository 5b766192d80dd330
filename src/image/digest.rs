//! Digests of measured data, in each bank at once: the data may be long, and is read only once.

use ring::digest::{Context, SHA256, SHA384};

/// A bank of registers, by its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterBank {
    /// SHA-256: the bank in policies with PCRs.
    Sha256,
    /// SHA-384: the bank in AWS's attestation documents, and the registers of TDX.
    Sha384,
}

/// The digests of the same bytes for each bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest {
    sha256: [u8; 32],
    sha384: [u8; 48],
}

/// Hashes data that arrives in parts.
pub(crate) struct Hasher {
    sha256: Context,
    sha384: Context,
}

impl RegisterBank {
    /// Returns the length of a register in bytes.
    pub fn size(self) -> usize {
        match self {
            RegisterBank::Sha256 => 32,
            RegisterBank::Sha384 => 48,
        }
    }

    /// Returns the value of a register after an event with this digest.
    pub(crate) fn extended(self, value: &[u8], digest: &[u8]) -> Vec<u8> {
        let mut context = Context::new(match self {
            RegisterBank::Sha256 => &SHA256,
            RegisterBank::Sha384 => &SHA384,
        });
        context.update(value);
        context.update(digest);
        context.finish().as_ref().to_vec()
    }
}

impl Digest {
    /// Returns the digests of all these bytes.
    pub fn of(parts: &[&[u8]]) -> Digest {
        let mut hasher = Hasher::new();
        parts.iter().for_each(|part| hasher.update(part));
        hasher.finish()
    }

    /// Returns the digest for a bank.
    pub fn in_bank(&self, bank: RegisterBank) -> &[u8] {
        match bank {
            RegisterBank::Sha256 => &self.sha256,
            RegisterBank::Sha384 => &self.sha384,
        }
    }
}

impl Hasher {
    pub fn new() -> Hasher {
        Hasher {
            sha256: Context::new(&SHA256),
            sha384: Context::new(&SHA384),
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        self.sha384.update(bytes);
    }

    pub fn finish(self) -> Digest {
        let (mut sha256, mut sha384) = ([0; 32], [0; 48]);
        sha256.copy_from_slice(self.sha256.finish().as_ref());
        sha384.copy_from_slice(self.sha384.finish().as_ref());
        Digest { sha256, sha384 }
    }
}
