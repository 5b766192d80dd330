//! The variant `gcp-sev-snp`: a machine of Google Compute Engine with SEV-SNP, and a virtual TPM.
//! The chip signs the nonce of the connection, and Google certifies the attestation key.
//!
//! ```text
//! REPORT_DATA = SHA-256(user data ‖ verifier's nonce) ‖ 32 zeros, as in Constellation
//! certificate = that of the attestation key, as in gcp-sev-es
//! PCR 0       = the firmware measures that the host encrypts the memory with SEV-SNP
//! ```
//!
//! The quote covers the report. Report and TPM have no machine ID in common. But PCR 0 shows that
//! the TPM, too, belongs to a machine with SEV-SNP.

use std::sync::Arc;

use cloud::http::GOOGLE;

use crate::gcp_sev_es::{GoogleMachine, Hardware, HardwareMachine};
use crate::snp::{InstanceInfo, Kernel, Reporter};
use crate::vtpm;
use crate::{AttesterVariant, IssueError, Oid, Registers};
use tpm::Tpm;

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "gcp-sev-snp",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = GoogleSnpMachine::new(GOOGLE, Arc::new(Kernel));
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.3.2
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x03, 0x02];

/// A machine of Google Compute Engine whose chip makes such reports.
pub type GoogleSnpMachine = HardwareMachine<Arc<dyn Reporter>>;

impl Hardware for Arc<dyn Reporter> {
    const OID: Oid = OID;

    fn info(
        &self,
        google: &GoogleMachine,
        _: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Vec<u8>, IssueError> {
        let info = InstanceInfo::of(&**self, &report_data(extra_data), google.names())?;
        Ok(serde_json::to_vec(&info)?)
    }
}

/// Returns the REPORT_DATA of a document with this extra data.
pub fn report_data(extra_data: &[u8; 32]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data[..32].copy_from_slice(extra_data);
    report_data
}
