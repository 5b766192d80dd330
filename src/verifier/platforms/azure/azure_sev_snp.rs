//! The variant `azure-sev-snp`: a machine of Azure with SEV-SNP, and a virtual TPM in its
//! paravisor. `attest` describes its document.
//!
//! Microsoft's attestation service is asked last, only by a validator that may use the network, and
//! only about firmware whose signer is not in the policy (`MAAFallback`).

use std::sync::Arc;

pub use attest::azure_sev_snp::*;
use hardware::snp::report::{Report, ReportSigner};

use crate::hcl::{self, RuntimeData};
use crate::judged::{FLOORS, KEYS, SNP};
use crate::maa::Question;
use crate::refusal::{Kind, Refusal};
use crate::snp::{self, InstanceInfo, ReportJudge};
use crate::sources::Sources;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, PolicyError, Variant};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::azure_sev_snp::VARIANT,
    judges: &[KEYS, FLOORS, SNP],
    key: Some(hcl::KEY),
    launch: None,
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: Some(snp::collateral),
    measure: vtpm::measure,
};

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::VtpmValidator, PolicyError> {
    policy.snp().check_maa_url()?;
    let verifier = AzureChip {
        hardware: ReportJudge::new(&policy, sources)?,
        policy: policy.clone(),
        sources: sources.clone(),
    };
    Ok(vtpm::VtpmValidator::new(policy, Arc::new(verifier)))
}

/// Judges by the report of the chip.
struct AzureChip {
    hardware: ReportJudge,
    policy: Arc<Policy>,
    sources: Arc<dyn Sources>,
}

impl PlatformVerifier for AzureChip {
    fn oid(&self) -> Oid {
        OID
    }

    // only the paravisor of Azure puts its own key into the runtime data
    fn endorses_keys(&self) -> bool {
        self.hardware.pins_firmware()
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let info: InstanceInfo = quoted.info()?;
        let azure = info.azure.as_ref();
        let azure =
            azure.ok_or_else(|| Kind::Malformed.because("the document has no runtime data"))?;
        let report = Report::parse(&info.attestation_report.0)?;
        let data = RuntimeData::verify(&azure.runtime_data.0, &report.report_data, &quoted.spki)?;
        if report.signer()? != ReportSigner::Vcek {
            return Err(Kind::Certificate
                .because("the report is signed by a VLEK, which machines of Azure do not have"));
        }
        self.policy
            .snp()
            .check_firmware_signer(&report.id_key_digest)?;
        let collected = self.hardware.collect(&report, &info)?;
        let mut claims = self
            .hardware
            .judge_report(&report, &collected, quoted.now)?;
        claims.properties.extend(data.properties());
        claims.bound = vec!["attestation key: runtime data in REPORT_DATA".into()];
        Ok(Some(claims))
    }

    fn confirm(
        &self,
        quoted: &Quoted<'_>,
        mut platform: PlatformClaims,
    ) -> Result<PlatformClaims, Refusal> {
        let demands = self.policy.snp();
        if !demands.asks_microsoft() {
            return Ok(platform);
        }
        let info: InstanceInfo = quoted.info()?;
        let report = Report::parse(&info.attestation_report.0)?;
        let Some(url) = demands.check_firmware_signer(&report.id_key_digest)? else {
            return Ok(platform);
        };
        let collected = self.hardware.collect(&report, &info)?;
        let certificates = self
            .hardware
            .certificates(&report, &collected, quoted.now)?;
        let question = Question {
            url,
            report: &info.attestation_report.0,
            certificates: &certificates,
            runtime_data: info.azure.as_ref().map_or(&[], |it| &it.runtime_data.0),
        };
        let word = self.sources.microsofts_word(&question);
        let word = word.map_err(Refusal::from);
        word.and_then(|word| word.check(url, &report)).map_err(|refusal| {
            refusal.reworded(|why| format!(
                "ID_KEY_DIGEST is {}, which firmwareSignerConfig does not name, and Microsoft's attestation service has not confirmed it: {why}",
                crate::hex(&report.id_key_digest)
            ))
        })?;
        platform.signed_by += &format!("; the firmware is Azure's by {url}");
        Ok(platform)
    }
}
