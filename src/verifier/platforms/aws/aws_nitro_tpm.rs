//! The variant `aws-nitro-tpm`: an EC2 instance with a NitroTPM. No certificate endorses its
//! attestation key, but AWS's hypervisor signs it ([`crate::aws_hypervisor`]). `attest` describes
//! its document.

use std::sync::Arc;

pub use attest::aws_nitro_tpm::*;
use serde::Deserialize;

use crate::aws_hypervisor::AwsHypervisor;
use crate::document::Base64;
use crate::judged::{CLOUD, KEYS, OF_AWS};
use crate::refusal::Refusal;
use crate::sources::Sources;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, PolicyError, Variant};
use tpm::KeySource;

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::aws_nitro_tpm::VARIANT,
    judges: &[KEYS, CLOUD, OF_AWS],
    key: Some(KeySource::Own),
    launch: None,
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: None,
    measure: vtpm::measure,
};

/// The members of the instance info that this validator reads. The names are EC2's; the members are
/// not signed.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InstanceInfo {
    instance_id: String,
    #[serde(rename = "AttestationDocument", default)]
    document: Option<Base64>,
}

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::VtpmValidator, PolicyError> {
    let verifier = AwsNitroTpm(AwsHypervisor::new(&policy, sources)?);
    Ok(vtpm::VtpmValidator::new(policy, Arc::new(verifier)))
}

/// Judges by the document of AWS's hypervisor.
struct AwsNitroTpm(AwsHypervisor);

impl PlatformVerifier for AwsNitroTpm {
    fn oid(&self) -> Oid {
        OID
    }

    fn endorses_keys(&self) -> bool {
        self.0.endorses_keys()
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let info: InstanceInfo = quoted.info()?;
        let document = info.document.as_ref();
        if document.is_none() && !self.0.is_demanded() {
            return Ok(None);
        }
        self.0
            .judge(quoted, document, Some(&info.instance_id))
            .map(Some)
    }

    fn confirm(
        &self,
        _quoted: &Quoted<'_>,
        platform: PlatformClaims,
    ) -> Result<PlatformClaims, Refusal> {
        self.0.confirm(platform)
    }
}
