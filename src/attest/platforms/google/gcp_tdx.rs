//! The variant `gcp-tdx`: a machine of Google Compute Engine with Intel TDX, and a virtual TPM. The
//! TDX module signs the nonce of the connection, and Google certifies the attestation key.
//! Constellation does not have it.
//!
//! ```text
//! instance info = { quote of TDX, names of the machine }; beside them, Intel's collateral if the machine has it
//! REPORTDATA    = SHA-256(user data ‖ verifier's nonce) ‖ SHA-256(certificate of the attestation key)
//! certificate   = that of the attestation key, as in gcp-sev-es
//! PCR 0         = the firmware measures that the host encrypts the memory with TDX
//! ```
//!
//! The quote of the TPM covers that of TDX. The policy's registers are the PCRs. Quote and TPM have no
//! machine ID in common. But PCR 0 shows that the TPM, too, belongs to a machine with TDX.
//!
//! The kernel gets the quote of TDX while this issuer has the TPM open: other users of the TPM wait
//! until then.

use std::path::Path;
use std::sync::Arc;

use cloud::http::GOOGLE;
use serde::{Deserialize, Serialize};
use tee::collateral::TdxCollateral;

use crate::document::Base64;
use crate::gcp_sev_es::{GoogleMachine, Hardware, HardwareMachine};
use crate::snp::Names;
use crate::td::{self, Quoter};
use crate::vtpm::{self, VariantData};
use crate::{AttesterVariant, IssueError, Oid, Registers, sha256};
use tpm::Tpm;

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "gcp-tdx",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = GoogleTdxMachine::new(GOOGLE, Arc::new(td::Kernel));
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.3.3
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x03, 0x03];

/// What a machine adds to a document. The field names are those of the other variants of Google and TDX.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct GoogleTdxInfo {
    /// The quote of TDX.
    pub attestation_report: Base64,
    /// The names of the machine.
    #[serde(rename = "GCP")]
    pub gcp: Option<Names>,
    /// Intel's collateral of the platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collateral: Option<TdxCollateral>,
}

/// A machine of Google Compute Engine whose TDX module makes such quotes.
pub type GoogleTdxMachine = HardwareMachine<Arc<dyn Quoter>>;

impl Hardware for Arc<dyn Quoter> {
    const OID: Oid = OID;

    fn info(
        &self,
        google: &GoogleMachine,
        tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Vec<u8>, IssueError> {
        let certificate = google.key_certificate(tpm)?.unwrap_or_default();
        let info = GoogleTdxInfo {
            attestation_report: Base64(self.quote(&report_data(extra_data, &certificate))?),
            gcp: google.names(),
            collateral: td::collateral(Path::new(td::COLLATERAL)),
        };
        Ok(serde_json::to_vec(&info)?)
    }
}

/// Returns the REPORTDATA of a document with this extra data and this certificate of the attestation key (DER).
pub fn report_data(extra_data: &[u8; 32], certificate: &[u8]) -> [u8; 64] {
    let mut report_data = [0; 64];
    let (first, last) = report_data.split_at_mut(32);
    first.copy_from_slice(extra_data);
    last.copy_from_slice(&sha256(&[certificate]));
    report_data
}
