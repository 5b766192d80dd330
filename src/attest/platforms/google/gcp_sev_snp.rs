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

use crate::gcp_sev_es::GoogleMachine;
use crate::snp::{InstanceInfo, Kernel, Reporter};
use crate::vtpm::{self, VariantData};
use crate::{AttesterVariant, IssueError, Oid, Registers};
use tpm::{KeySource, Tpm};

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

/// A machine of Google Compute Engine.
pub struct GoogleSnpMachine {
    google: GoogleMachine,
    reporter: Arc<dyn Reporter>,
}

impl GoogleSnpMachine {
    /// Makes a machine whose metadata service has this URL, and whose chip makes these reports.
    pub fn new(metadata: &str, reporter: Arc<dyn Reporter>) -> GoogleSnpMachine {
        GoogleSnpMachine {
            google: GoogleMachine::new(metadata),
            reporter,
        }
    }
}

impl VariantData for GoogleSnpMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn key_source(&self) -> KeySource {
        self.google.key_source()
    }

    fn prepare(&self, location: &tpm::Location) -> Result<(), IssueError> {
        self.google.prepare(location)
    }

    fn instance_info(
        &self,
        _tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let names = self.google.names();
        let info = InstanceInfo::of(&*self.reporter, &report_data(extra_data), names)?;
        Ok(Some(serde_json::to_vec(&info)?))
    }

    fn key_certificate(&self, tpm: &mut Tpm) -> Result<Option<Vec<u8>>, IssueError> {
        self.google.key_certificate(tpm)
    }
}

/// Returns the REPORT_DATA of a document with this extra data.
pub fn report_data(extra_data: &[u8; 32]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data[..32].copy_from_slice(extra_data);
    report_data
}
