//! The token of Microsoft's attestation service (MAA) about an SEV-SNP report whose firmware is not
//! in the policy: `firmwareSignerConfig` with `MAAFallback`.
//!
//! ```text
//! question = report of the chip, certificates above it, runtime data, to the service at the policy's maaURL
//! word     = the claims of the token that the service returns
//! ```
//!
//! The token counts only for this report: its claims must repeat what the chip signed. The
//! validator has already verified the report, so the token only adds that the firmware is Azure's
//! paravisor.

use hardware::snp::report::Report;
use serde::Deserialize;

use super::refusal::{Kind, Refusal};
use super::{hex, printable};

/// The service's claims for an SEV-SNP machine with Azure's paravisor ("Claim sets of Azure
/// Attestation").
const SEV_SNP: &str = "sevsnpvm";
const COMPLIANT: &str = "azure-compliant-cvm";
/// Maximum length of a claim in an error.
const SHOWN: usize = 128;

/// The request to the service.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The URL of the service: `maaURL`.
    pub url: &'a str,
    /// The report of the chip.
    pub report: &'a [u8],
    /// The certificate of the chip's key and the certificates above it in PEM, with which the
    /// caller verified the report.
    pub certificates: &'a [u8],
    /// The runtime data of the paravisor, whose hash is in REPORT_DATA.
    pub runtime_data: &'a [u8],
}

/// The claims of a token that this program checks. A token must contain each of them once.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Word {
    /// The URL of the service.
    #[serde(rename = "iss")]
    pub issuer: String,
    /// When the token expires, in seconds since 1970.
    #[serde(rename = "exp")]
    pub expires: u64,
    /// The kind of the machine.
    #[serde(rename = "x-ms-attestation-type")]
    pub kind: String,
    /// Whether the machine complies with Azure's rules.
    #[serde(rename = "x-ms-compliance-status", default)]
    pub compliance: String,
    /// REPORT_DATA of the report, in hexadecimal.
    #[serde(rename = "x-ms-sevsnpvm-reportdata")]
    pub report_data: String,
    /// The launch measurement of the report, in hexadecimal.
    #[serde(rename = "x-ms-sevsnpvm-launchmeasurement")]
    pub measurement: String,
    /// ID_KEY_DIGEST of the report, in hexadecimal.
    #[serde(rename = "x-ms-sevsnpvm-idkeydigest")]
    pub id_key_digest: String,
    /// AUTHOR_KEY_DIGEST of the report, in hexadecimal.
    #[serde(rename = "x-ms-sevsnpvm-authorkeydigest")]
    pub author_key_digest: String,
    /// HOST_DATA of the report, in hexadecimal.
    #[serde(rename = "x-ms-sevsnpvm-hostdata")]
    pub host_data: String,
    /// VMPL of the report.
    #[serde(rename = "x-ms-sevsnpvm-vmpl")]
    pub vmpl: u32,
    /// Whether the host can debug the machine.
    #[serde(rename = "x-ms-sevsnpvm-is-debuggable")]
    pub is_debuggable: bool,
}

impl Word {
    /// Checks that this token is from the service at this URL and says that this report is from
    /// Azure's paravisor.
    pub fn check(&self, url: &str, report: &Report) -> Result<(), Refusal> {
        let equal = |claim: &str, expected: &str, got: &str| {
            if expected.eq_ignore_ascii_case(got) {
                return Ok(());
            }
            let got = printable(got, SHOWN);
            let text = format!("{claim} is {got:?}, expected {expected:?}");
            Err(Kind::Unproven.because(text).of(claim).values(expected, got))
        };
        let [issuer, url] = [&self.issuer, url].map(|url| url.trim_end_matches('/'));
        equal("iss", url, issuer)?;
        equal("x-ms-attestation-type", SEV_SNP, &self.kind)?;
        equal("x-ms-compliance-status", COMPLIANT, &self.compliance)?;
        let field = |name: &str, expected: &str, got: &str| {
            equal(&format!("x-ms-sevsnpvm-{name}"), expected, got)
        };
        let digits = |name: &str, expected: &[u8], got: &str| field(name, &hex(expected), got);
        digits("reportdata", &report.report_data, &self.report_data)?;
        digits("launchmeasurement", &report.measurement, &self.measurement)?;
        digits("idkeydigest", &report.id_key_digest, &self.id_key_digest)?;
        let author = &report.author_key_digest;
        digits("authorkeydigest", author, &self.author_key_digest)?;
        digits("hostdata", &report.host_data, &self.host_data)?;
        field("vmpl", &report.vmpl.to_string(), &self.vmpl.to_string())?;
        field("is-debuggable", "false", &self.is_debuggable.to_string())
    }
}
