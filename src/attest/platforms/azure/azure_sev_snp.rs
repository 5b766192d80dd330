//! The variant `azure-sev-snp`: a machine of Azure with SEV-SNP, and a virtual TPM in its
//! paravisor. The paravisor's report contains the attestation key, and the chip signs that report.
//!
//! ```text
//! instance info = { certificate of the chip's key, its chain, report of the chip, runtime data of the paravisor }, as in Constellation
//! REPORT_DATA   = SHA-256(runtime data) ‖ 32 zeros; the runtime data has the attestation key
//! ```
//!
//! The report is the same for each connection: only the TPM's quote contains the nonce.

use std::sync::Arc;

use cloud::http::{Http, LINK_LOCAL};
use serde::Deserialize;

use super::prepared::{Prepared, Source};
use crate::document::Base64;
use crate::hcl::{self, HardwareReport, HclReport};
use crate::snp::{Azure, InstanceInfo};
use crate::{AttesterVariant, IssueError, Oid, Registers, vtpm};

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "azure-sev-snp",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = Prepared::new(AzureSnpMachine::new(LINK_LOCAL));
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.4.1
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x04, 0x01];
/// The path at which Azure serves the certificate of the chip.
const CERTIFICATION: &str = "metadata/THIM/amd/certification";

/// What Azure serves about the chip: PEM.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Certification {
    vcek_cert: String,
    #[serde(default)]
    certificate_chain: String,
}

/// A machine of Azure, by the services of its host.
pub struct AzureSnpMachine(Http);

impl AzureSnpMachine {
    /// Makes a machine whose host has its services at this URL.
    pub fn new(host: &str) -> AzureSnpMachine {
        AzureSnpMachine(Http::new(host))
    }

    fn certification(&self) -> Result<Certification, base::machines::Error> {
        let (fields, expected) = ([("Metadata", "true")], "the certificate of the chip");
        self.0.get_json(CERTIFICATION, &fields, expected)
    }
}

impl Source for AzureSnpMachine {
    type Info = InstanceInfo;
    const OID: Oid = OID;

    fn info(&self, location: &tpm::Location) -> Result<(InstanceInfo, bool), IssueError> {
        let stored = hcl::stored(location)?;
        let report = HclReport::parse(&stored).map_err(IssueError::new)?;
        let HardwareReport::Snp(report_of_chip) = report.hardware else {
            let why = "the HCL report is not of SEV-SNP: is this another variant of Azure?";
            return Err(IssueError::new(why));
        };
        // a missing certificate is no error: a verifier can get it from AMD
        let certification = self.certification();
        let certification = certification.inspect_err(|why| log::warn!("{why}")).ok();
        let is_complete = certification.is_some();
        let pem = |text: String| Base64(text.trim().into());
        let certificates =
            |found: Certification| (pem(found.vcek_cert), pem(found.certificate_chain));
        let (report_signer, cert_chain) = certification.map(certificates).unzip();
        let info = InstanceInfo {
            report_signer,
            cert_chain,
            attestation_report: Base64(report_of_chip.into()),
            azure: Some(Azure {
                runtime_data: Base64(report.runtime_data.into()),
                maa_token: String::new(),
            }),
            gcp: None,
            attestation_document: None,
        };
        Ok((info, is_complete))
    }
}
