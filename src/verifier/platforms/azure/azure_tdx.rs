//! The variant `azure-tdx`: a TDX machine of Azure with a virtual TPM in its paravisor. `attest`
//! describes its document.

use std::sync::Arc;

pub use attest::azure_tdx::*;
use hardware::tdx::quote::TdxQuote;

use crate::document::Document;
use crate::hcl::{self, RuntimeData};
use crate::judged::{FLOORS, KEYS, TDX};
use crate::refusal::Refusal;
use crate::sources::Sources;
use crate::td;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, Variant};
use proto::attested::Collateral as Brought;

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::azure_tdx::VARIANT,
    judges: &[KEYS, FLOORS, TDX],
    key: Some(hcl::KEY),
    launch: None,
    validator: |policy, sources| {
        let policy = Arc::new(policy);
        let hardware = td::QuoteJudge::new(&policy, sources)?;
        Ok(Arc::new(validator(policy, hardware)))
    },
    collateral: Some(collateral),
    measure: vtpm::measure,
};

/// Makes a validator that accepts documents that meet `policy`, by which `hardware` judges.
pub fn validator(policy: Arc<Policy>, hardware: td::QuoteJudge) -> vtpm::VtpmValidator {
    let verifier = Paravisor {
        hardware,
        policy: policy.clone(),
    };
    vtpm::VtpmValidator::new(policy, Arc::new(verifier))
}

/// Returns the collateral for a document, or `None` if these sources do not have it.
fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Brought> {
    let document: Document = serde_json::from_slice(document).ok()?;
    let info: AzureTdxInfo = serde_json::from_slice(&document.instance_info?.0).ok()?;
    td::collateral_of(&info.attestation_report.0, sources)
}

/// Judges by the hardware's quote, which covers the paravisor's key.
struct Paravisor {
    hardware: td::QuoteJudge,
    policy: Arc<Policy>,
}

impl PlatformVerifier for Paravisor {
    fn oid(&self) -> Oid {
        OID
    }

    // only the paravisor of Azure puts its own key into the runtime data
    fn endorses_keys(&self) -> bool {
        self.policy.tdx().pins_firmware()
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let info: AzureTdxInfo = quoted.info()?;
        let quote = TdxQuote::parse(&info.attestation_report.0)?;
        let data =
            RuntimeData::verify(&info.runtime_data.0, &quote.body.report_data, &quoted.spki)?;
        let mut claims = self
            .hardware
            .judge(quote, info.collateral.as_ref(), quoted.now)?;
        claims.properties.extend(data.properties());
        claims.bound = vec!["attestation key: runtime data in REPORTDATA".into()];
        Ok(Some(claims))
    }
}
