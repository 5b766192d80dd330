//! The variant `qemu-vtpm`: the TPM 2.0 of a machine, without a platform that endorses its
//! attestation key.

use std::path::PathBuf;
use std::sync::Arc;

use crate::vtpm::{self, VariantData};
use crate::{AttesterVariant, Oid, Registers};

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "qemu-vtpm",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(QemuVtpm),
        ))
    },
};

/// 1.3.9900.5.1
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x05, 0x01];

struct QemuVtpm;

/// Makes an issuer for the TPM at `location`, with the event log in the given file if it exists.
pub fn issuer(location: tpm::Location, event_log: Option<PathBuf>) -> vtpm::TpmIssuer {
    vtpm::TpmIssuer::new(location, event_log, Arc::new(QemuVtpm))
}

impl VariantData for QemuVtpm {
    fn oid(&self) -> Oid {
        OID
    }
}
