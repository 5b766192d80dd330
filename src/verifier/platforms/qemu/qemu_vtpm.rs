//! The variant `qemu-vtpm`: the TPM 2.0 of a machine, without a platform that endorses its
//! attestation key.
//!
//! If the policy names keys or roots, the key must be one of them or lead to one of them. If the
//! policy names neither, every key is accepted, as in Constellation; then a program without a TPM
//! can attest with a key that it made. The variant is for tests, and for clouds whose virtual TPM
//! is trusted.

use std::sync::Arc;

pub use attest::qemu_vtpm::*;

use crate::judged::KEYS;
use crate::refusal::Refusal;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, Variant};
use tpm::KeySource;

/// No platform endorses keys.
struct AnyPlatform;

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::qemu_vtpm::VARIANT,
    judges: &[KEYS],
    key: Some(KeySource::Own),
    launch: None,
    validator: |policy, _| Ok(Arc::new(validator(Arc::new(policy)))),
    collateral: None,
    measure: vtpm::measure,
};

/// Makes a validator that accepts documents that meet `policy`.
pub fn validator(policy: Arc<Policy>) -> vtpm::VtpmValidator {
    vtpm::VtpmValidator::new(policy, Arc::new(AnyPlatform))
}

impl PlatformVerifier for AnyPlatform {
    fn oid(&self) -> Oid {
        OID
    }

    fn endorses_keys(&self) -> bool {
        false
    }

    /// No platform endorses the key: the policy's keys and roots decide.
    fn verify(&self, _quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        Ok(None)
    }
}
