//! The common part of the SEV-SNP variants: the chip's report in the instance info.
//!
//! ```text
//! instance info = { certificate of the chip's key, its chain, report of the chip, what the cloud adds }, as in Constellation
//! ```
//!
//! What REPORT_DATA binds differs by variant; the variants' files describe it.

use base::der;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use tee::certificate_table::{CertificateTable, EntryKind};
use tee::snp::{self as guest, ReportSigner};

use super::IssueError;
use super::document::Base64;

/// The names are those of Constellation.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct InstanceInfo {
    /// The certificate of the key that signed the report, in PEM.
    #[serde(default)]
    pub report_signer: Option<Base64>,
    /// The certificates above it in PEM. A root among them is not trusted.
    #[serde(default)]
    pub cert_chain: Option<Base64>,
    /// The report.
    pub attestation_report: Base64,
    /// What Azure's paravisor adds.
    #[serde(default)]
    pub azure: Option<Azure>,
    /// The names of a Google machine.
    #[serde(rename = "GCP", default)]
    pub gcp: Option<Names>,
    /// The attestation document of AWS's hypervisor. Constellation does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attestation_document: Option<Base64>,
}

/// The names of a machine, with Constellation's field names, which come from go-tpm-tools.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Names {
    /// The zone.
    pub zone: String,
    /// The project.
    pub project_id: String,
    /// The instance.
    pub instance_name: String,
}

/// What Azure's paravisor adds.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Azure {
    /// The runtime data of the paravisor.
    pub runtime_data: Base64,
    /// Constellation's field for a token of Microsoft's attestation service; not used here.
    #[serde(rename = "MAAToken", default)]
    pub maa_token: String,
}

/// Requests reports of the chip.
pub trait Reporter: Send + Sync {
    /// Returns a report over these bytes, and the certificate table of the host.
    fn report(&self, report_data: &[u8; 64]) -> Result<(Vec<u8>, Vec<u8>), IssueError>;
}

/// The kernel of this machine.
pub struct Kernel;

impl Reporter for Kernel {
    fn report(&self, report_data: &[u8; 64]) -> Result<(Vec<u8>, Vec<u8>), IssueError> {
        Ok(guest::report(report_data)?)
    }
}

impl InstanceInfo {
    /// Makes the instance info with a report over these bytes. A chip's certificate may be missing,
    /// because a verifier can get it from AMD. A cloud key's certificate must be there.
    pub fn of(
        reporter: &dyn Reporter,
        report_data: &[u8; 64],
        gcp: Option<Names>,
    ) -> Result<InstanceInfo, IssueError> {
        let (report, table) = reporter.report(report_data)?;
        let table = CertificateTable::parse(&table)?;
        let (kind, signer) = match ReportSigner::of_report(&report)? {
            signer @ ReportSigner::Vcek => (EntryKind::VCEK, signer),
            signer @ ReportSigner::Vlek => (EntryKind::VLEK, signer),
        };
        let leaf = table.get(kind).map(pem);
        if leaf.is_none() && signer == ReportSigner::Vlek {
            let why = "the host did not give the certificate of the VLEK that signed the report, and no server publishes it";
            return Err(IssueError::new(why));
        }
        Ok(InstanceInfo {
            report_signer: leaf.map(Base64),
            cert_chain: table.get(EntryKind::ASK).map(|ask| Base64(pem(ask))),
            attestation_report: Base64(report),
            azure: None,
            gcp,
            attestation_document: None,
        })
    }
}

/// Returns a certificate of the host's table in PEM. The table has it in PEM or DER, possibly
/// followed by zeros.
pub fn pem(certificate: &[u8]) -> Vec<u8> {
    let Ok(der) = der::DerReader::new(certificate).expect_whole(der::SEQUENCE) else {
        let end = certificate.iter().rposition(|byte| *byte != 0);
        let text = &certificate[..end.map_or(0, |end| end + 1)];
        return text.trim_ascii().to_vec();
    };
    let text = STANDARD.encode(der);
    let mut pem = b"-----BEGIN CERTIFICATE-----\n".to_vec();
    for line in text.as_bytes().chunks(64) {
        pem.extend_from_slice(line);
        pem.push(b'\n');
    }
    pem.extend_from_slice(b"-----END CERTIFICATE-----");
    pem
}
