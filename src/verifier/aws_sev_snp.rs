//! The variant `aws-sev-snp`: a machine of AWS with SEV-SNP, and a NitroTPM. `attest` describes its document.
//!
//! The guest chooses REPORT_DATA, so the report endorses no key: whoever has a machine of AWS can have any key in it. An attestation
//! document of AWS's hypervisor can, if the policy demands one (`cloud`, [`super::aws_hypervisor`]). Document and report name no common
//! machine. But the quote covers the report, and an image whose registers the policy knows asks its own chip for it.

use std::sync::Arc;

pub use attest::aws_sev_snp::*;

use super::aws_hypervisor::AwsHypervisor;
use super::judged::{CLOUD, KEYS, OF_AWS, SNP};
use super::snp::{self, Hardware, InstanceInfo};
use super::sources::Sources;
use super::vtpm::{self, Endorser, Evidence};
use super::{Oid, PlatformClaims, Policy, PolicyError, Variant};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::aws_sev_snp::VARIANT,
    judges: &[KEYS, SNP, CLOUD, OF_AWS],
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: Some(snp::collateral),
    measure: vtpm::measure,
};

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::Validator, PolicyError> {
    let endorser = AwsChip {
        hypervisor: AwsHypervisor::new(&policy, sources)?,
        hardware: Hardware::new(&policy, sources)?,
    };
    Ok(vtpm::Validator::new(policy, Arc::new(endorser)))
}

/// Judges by the report of the chip, and by what AWS's hypervisor signs.
struct AwsChip {
    hypervisor: AwsHypervisor,
    hardware: Hardware,
}

impl Endorser for AwsChip {
    fn oid(&self) -> Oid {
        OID
    }

    fn endorses_keys(&self) -> bool {
        self.hypervisor.endorses_keys()
    }

    fn endorse(&self, evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        let info = evidence.info::<InstanceInfo>()?;
        // it comes first: the judgement of the report may fetch a certificate
        let signed = match self.hypervisor.is_demanded() {
            true => {
                let document = info.attestation_document.as_ref();
                Some(self.hypervisor.judge(evidence, document, None)?)
            }
            // a document that nothing demands could only shut the machine out
            false => None,
        };
        let mut claims = self.hardware.judge(&info, &report_data(&evidence.spki))?;
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
        _evidence: &Evidence<'_>,
        platform: PlatformClaims,
    ) -> Result<PlatformClaims, String> {
        self.hypervisor.confirm(platform)
    }
}
