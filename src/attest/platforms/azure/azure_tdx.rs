//! The variant `azure-tdx`: a TDX machine of Azure with a virtual TPM in its paravisor. The
//! paravisor's report contains the attestation key, and the hardware signs that report.
//!
//! ```text
//! instance info = { quote of TDX, runtime data of the paravisor }, as in Constellation; beside it, Intel's collateral if the machine has it
//! REPORTDATA    = SHA-256(runtime data) ‖ 32 zeros; the runtime data has the attestation key
//! ```
//!
//! The report is the same for each connection: only the TPM's quote contains the nonce. The
//! policy's registers are the PCRs.

use std::path::Path;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use cloud::http::{Http, LINK_LOCAL};
use serde::{Deserialize, Serialize};
use tee::collateral::TdxCollateral;

use super::prepared::{Prepared, Source};
use crate::document::Base64;
use crate::hcl::{self, HardwareReport, HclReport};
use crate::{AttesterVariant, IssueError, Oid, Registers, td, vtpm};

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "azure-tdx",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = Prepared::new(AzureTdxMachine::new(LINK_LOCAL));
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.4.3
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x04, 0x03];
/// The path of Azure's quoting service, which makes a quote from a TDREPORT.
const QUOTE_PATH: &str = "acc/tdquote";

/// The field names are Constellation's, except `collateral`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct AzureTdxInfo {
    /// The quote.
    pub attestation_report: Base64,
    /// The runtime data of the paravisor.
    pub runtime_data: Base64,
    /// Intel's collateral of the platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collateral: Option<TdxCollateral>,
}

#[derive(Deserialize)]
struct Answer {
    quote: String,
}

/// A machine of Azure, by the services of its host.
pub struct AzureTdxMachine(Http);

impl AzureTdxMachine {
    /// Makes a machine whose host has its services at this URL.
    pub fn new(host: &str) -> AzureTdxMachine {
        AzureTdxMachine(Http::new(host))
    }
}

impl Source for AzureTdxMachine {
    type Info = AzureTdxInfo;
    const OID: Oid = OID;

    fn info(&self, location: &tpm::Location) -> Result<(AzureTdxInfo, bool), IssueError> {
        let stored = hcl::stored(location)?;
        let report = HclReport::parse(&stored).map_err(IssueError::new)?;
        let HardwareReport::Tdx(report_of_td) = report.hardware else {
            let why = "the HCL report is not of TDX: is this another variant of Azure?";
            return Err(IssueError::new(why));
        };
        let request = format!(r#"{{"report":"{}"}}"#, URL_SAFE_NO_PAD.encode(report_of_td));
        let answer = self
            .0
            .post_json(QUOTE_PATH, &[("Metadata", "true")], &request)?;
        let read = || {
            let answer: Answer = serde_json::from_slice(&answer).ok()?;
            URL_SAFE_NO_PAD
                .decode(answer.quote.trim_end_matches('='))
                .ok()
        };
        let quote = read().ok_or_else(|| {
            let url = self.0.url(QUOTE_PATH);
            IssueError::new(format!("POST {url}: expected a quote in base64url"))
        })?;
        let info = AzureTdxInfo {
            attestation_report: Base64(quote),
            runtime_data: Base64(report.runtime_data.into()),
            collateral: None,
        };
        Ok((info, true))
    }

    fn add_present(&self, info: &mut AzureTdxInfo) {
        info.collateral = td::collateral(Path::new(td::COLLATERAL));
    }
}
