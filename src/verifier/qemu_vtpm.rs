//! The variant `qemu-vtpm`: the TPM 2.0 of a machine, without a platform that endorses its attestation key.
//!
//! If the policy names keys or roots, the key must be one of them or lead to one of them. If the policy names neither, every key is
//! accepted, as in the old system; then a program without a TPM can attest with a key that it made. The variant is for tests, and for
//! clouds whose virtual TPM is trusted.

use std::path::PathBuf;
use std::sync::Arc;

use super::Registers;
use super::variant::KEYS;
use super::vtpm::{self, Endorser, Evidence, Machine};
use super::{KeyName, Oid, PlatformClaims, Policy, Variant};
use tpm::{self, KeySource};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    name: "qemu-vtpm",
    oid: OID,
    registers: Registers::Pcrs,
    judges: &[KEYS],
    location: tpm::Location::default_device,
    issuer: |location| Arc::new(vtpm::Issuer::of_this_machine(location, Arc::new(QemuVtpm))),
    validator: |policy, _| Ok(Arc::new(validator(Arc::new(policy)))),
    collateral: None,
    measure: vtpm::measure,
    key_name,
};
/// 1.3.9900.5.1
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x05, 0x01];

struct QemuVtpm;

/// Makes an issuer for the TPM at `location`, with the event log in the given file if it exists.
pub fn issuer(location: tpm::Location, event_log: Option<PathBuf>) -> vtpm::Issuer {
    vtpm::Issuer::new(location, event_log, Arc::new(QemuVtpm))
}

/// Makes a validator that accepts documents that meet `policy`.
pub fn validator(policy: Arc<Policy>) -> vtpm::Validator {
    vtpm::Validator::new(policy, Arc::new(QemuVtpm))
}

/// Returns the Name of the attestation key of this machine; creates the key if it does not exist.
pub fn key_name(location: &tpm::Location) -> Result<KeyName, tpm::Error> {
    vtpm::key_name(location, KeySource::Own)
}

impl Machine for QemuVtpm {
    fn oid(&self) -> Oid {
        OID
    }
}

impl Endorser for QemuVtpm {
    fn oid(&self) -> Oid {
        OID
    }

    fn endorses_keys(&self) -> bool {
        false
    }

    /// Nothing endorses the key: the keys and the roots of the policy decide.
    fn endorse(&self, _evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        Ok(None)
    }
}
