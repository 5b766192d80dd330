//! The variant `gcp-tdx`: a machine of Google Compute Engine with Intel TDX, and a virtual TPM.
//! `attest` describes its document.

use std::sync::Arc;

use attest::document::Document;
pub use attest::gcp_tdx::*;
use hardware::tdx::quote::TdxQuote;
use proto::attested::Collateral;

use crate::gcp_sev_es::{self, GoogleAuthority, GoogleFirmware, TDX as INTEL_TDX};
use crate::judged::{CLOUD, FLOORS, KEYS, OF_GOOGLE, TDX};
use crate::refusal::{Kind, Refusal};
use crate::sources::Sources;
use crate::td;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, PolicyError, Variant};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::gcp_tdx::VARIANT,
    judges: &[KEYS, FLOORS, TDX, CLOUD, OF_GOOGLE],
    key: Some(gcp_sev_es::KEY),
    launch: None,
    validator: |policy, sources| {
        let policy = Arc::new(policy);
        let hardware = td::QuoteJudge::new(&policy, sources)?;
        Ok(Arc::new(validator(policy, hardware, sources)?))
    },
    collateral: Some(collateral),
    measure: vtpm::measure,
};

/// Returns the collateral for a document, or `None` if these sources do not have it.
fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Collateral> {
    let key_authority = gcp_sev_es::key_authority(document, sources);
    let of_quote = || {
        let document: Document = serde_json::from_slice(document).ok()?;
        let info: GoogleTdxInfo = serde_json::from_slice(&document.instance_info?.0).ok()?;
        td::collateral_of(&info.attestation_report.0, sources)
    };
    let of_quote = of_quote();
    (of_quote.is_some() || key_authority.is_some()).then(|| Collateral {
        key_authority: key_authority.unwrap_or_default(),
        ..of_quote.unwrap_or_default()
    })
}

/// Makes a validator that accepts documents that meet `policy`, by which `hardware` judges.
pub fn validator(
    policy: Arc<Policy>,
    hardware: td::QuoteJudge,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::VtpmValidator, PolicyError> {
    let google = GoogleAuthority::new(&policy, sources)?;
    let verifier = GoogleTd { google, hardware };
    Ok(vtpm::VtpmValidator::new(policy, Arc::new(verifier)))
}

/// Judges by the quote of TDX and Google's certificate.
struct GoogleTd {
    google: GoogleAuthority,
    hardware: td::QuoteJudge,
}

impl PlatformVerifier for GoogleTd {
    fn oid(&self) -> Oid {
        OID
    }

    // Google certifies only keys in its own TPMs
    fn endorses_keys(&self) -> bool {
        true
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let info = quoted.info::<GoogleTdxInfo>()?;
        let names = info.gcp.as_ref();
        let names = names.ok_or_else(|| {
            Kind::Malformed.because("the instance info does not name Google's machine (GCP)")
        })?;
        let quote = TdxQuote::parse(&info.attestation_report.0)?;
        if quote.body.report_data != report_data(&quoted.extra_data, quoted.key_certificate) {
            let text = "REPORTDATA is not that of this connection and of the attestation key's certificate: the quote of TDX was made \
                        for another one";
            return Err(Kind::Nonce.because(text).of("REPORTDATA"));
        }
        GoogleFirmware::measured(quoted.event_log, quoted.pcr_0()?)?.check_technology(INTEL_TDX)?;
        let sent = info.collateral.as_ref();
        let mut claims = self.hardware.judge(quote, sent, quoted.now)?;
        // last, because it may fetch the certificate of Google's CA: only a machine with a genuine
        // quote can cause that request
        let (root, instance) = self.google.certified(quoted, names)?;
        claims.signed_by += &format!("; the attestation key by {root}");
        claims.properties.extend(instance.properties());
        claims.bound = vec![
            "nonce of the connection: REPORTDATA".into(),
            "attestation key: its certificate, whose hash is in REPORTDATA".into(),
            "quote of TDX: the nonce of the TPM's quote".into(),
        ];
        Ok(Some(claims))
    }
}
