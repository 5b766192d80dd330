//! The variant `aws-sev-snp`: an AWS instance with SEV-SNP and a NitroTPM. `attest` describes its
//! document.
//!
//! The guest chooses REPORT_DATA, so the report endorses no key: anybody with an AWS instance can
//! put any key into it. A document of AWS's hypervisor can endorse the key, if the policy requires
//! one (`cloud`, [`crate::aws_hypervisor`]). Document and report have no machine ID in common. But
//! the quote covers the report, and an image whose registers the policy knows requests the report
//! from its own chip.

use std::sync::Arc;

pub use attest::aws_sev_snp::*;

use crate::aws_hypervisor::AwsHypervisor;
use crate::judged::{CLOUD, KEYS, OF_AWS, SNP};
use crate::refusal::Refusal;
use crate::snp::{self, InstanceInfo, ReportJudge};
use crate::sources::Sources;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, PolicyError, Variant};
use tpm::KeySource;

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::aws_sev_snp::VARIANT,
    judges: &[KEYS, SNP, CLOUD, OF_AWS],
    key: Some(KeySource::Own),
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
    let verifier = AwsChip {
        hypervisor: AwsHypervisor::new(&policy, sources)?,
        hardware: ReportJudge::new(&policy, sources)?,
    };
    Ok(vtpm::VtpmValidator::new(policy, Arc::new(verifier)))
}

/// Judges by the chip's report and by the document of AWS's hypervisor.
struct AwsChip {
    hypervisor: AwsHypervisor,
    hardware: ReportJudge,
}

impl PlatformVerifier for AwsChip {
    fn oid(&self) -> Oid {
        OID
    }

    fn endorses_keys(&self) -> bool {
        self.hypervisor.endorses_keys()
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let info = quoted.info::<InstanceInfo>()?;
        // first, because the judgement of the report may fetch a certificate
        let signed = if self.hypervisor.is_demanded() {
            let document = info.attestation_document.as_ref();
            Some(self.hypervisor.judge(quoted, document, None)?)
        } else {
            // if the policy requires no document, an invalid one must not exclude the machine
            None
        };
        let mut claims = self
            .hardware
            .judge(&info, &report_data(&quoted.spki), quoted.now)?;
        claims.bound = vec!["attestation key: SHA-512 in REPORT_DATA".into()];
        if let Some(signed) = signed {
            claims.signed_by += &format!("; the attestation document by {}", signed.signed_by);
            claims.properties.extend(signed.properties);
            claims.bound.extend(signed.bound);
        }
        Ok(Some(claims))
    }

    fn confirm(
        &self,
        _quoted: &Quoted<'_>,
        platform: PlatformClaims,
    ) -> Result<PlatformClaims, Refusal> {
        self.hypervisor.confirm(platform)
    }
}
