//! The variant `azure-trustedlaunch`: a virtual machine of Azure with a virtual TPM, which is not
//! confidential. Azure certifies the attestation key of the TPM. `attest` describes its document.
//!
//! If a certificate does not contain the URL of its issuer, the issuer is built in. No list of
//! revoked certificates is consulted: Azure publishes none for attestation keys, which are
//! certified for a year.

use std::sync::Arc;

pub use attest::azure_trustedlaunch::*;
use base::text;
use webpki::KeyUsage;

use crate::ak_certificate::{self, AkRoot};
use crate::hcl;
use crate::instance::{CloudInstance, CloudRequirements};
use crate::judged::{CLOUD, FLOORS, KEYS};
use crate::refusal::{Kind, Refusal};
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, PolicyError, Variant};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::azure_trustedlaunch::VARIANT,
    judges: &[KEYS, FLOORS, CLOUD],
    key: Some(hcl::KEY),
    launch: None,
    validator: |policy, _| Ok(Arc::new(validator(Arc::new(policy))?)),
    collateral: None,
    measure: vtpm::measure,
};

/// The extended key usage of attestation keys, tcg-kp-AIKCertificate (2.23.133.8.3): the content of
/// the OID.
const ATTESTATION_KEY: &[u8] = &[0x67, 0x81, 0x05, 0x08, 0x03];

/// The suffixes of the names in the certificates, of machines without and with confidential
/// hardware.
const NAMES: [&str; 2] = [
    ".TrustedVM.Azure.windows.net",
    ".ConfidentialVM.Azure.windows.net",
];

/// Azure's roots, with the CAs below them that no certificate's URL leads to.
const ROOTS: &[&roots::Root] = &[&roots::AZURE_2023, &roots::MICROSOFT_2021];

/// Makes a validator that accepts documents that meet `policy`.
fn validator(policy: Arc<Policy>) -> Result<vtpm::VtpmValidator, PolicyError> {
    let verifier = AzureAuthority {
        roots: AkRoot::demanded(policy.cloud(), ROOTS)?,
        demands: policy.cloud().clone(),
    };
    Ok(vtpm::VtpmValidator::new(policy, Arc::new(verifier)))
}

/// Judges by Azure's certificates.
struct AzureAuthority {
    roots: Vec<AkRoot>,
    demands: CloudRequirements,
}

impl PlatformVerifier for AzureAuthority {
    fn oid(&self) -> Oid {
        OID
    }

    // Azure certifies only keys in its own TPMs
    fn endorses_keys(&self) -> bool {
        true
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let info: TrustedLaunchInfo = quoted.info()?;
        let above = [info.ca].into_iter().chain(info.chain).map(|one| one.0);
        let chain: Vec<_> = above.filter(|one| !one.is_empty()).collect();
        let certificate = ak_certificate::of_key(&info.ak_cert.0, &quoted.spki)?;
        let root = ak_certificate::verify(
            &info.ak_cert.0,
            &chain,
            &self.roots,
            KeyUsage::required(ATTESTATION_KEY),
            quoted.now,
        )?;
        let name = certificate.common_name().unwrap_or_default();
        let id = NAMES.iter().find_map(|end| name.strip_suffix(end));
        let id = id.ok_or_else(|| {
            Kind::Certificate.because(format!(
                "the certificate of the attestation key is of {}, expected *{}",
                text::quoted(name, 80),
                NAMES.join(" or *")
            ))
        })?;
        let instance = CloudInstance {
            id: Some(id.into()),
            ..CloudInstance::default()
        };
        self.demands.judge(&instance)?;
        Ok(Some(PlatformClaims {
            technology: "Azure trusted launch".into(),
            signed_by: format!("{root}, {name:.80}"),
            chip: instance.id,
            tcb: vec![],
            properties: vec![],
            bound: vec!["attestation key: its certificate".into()],
        }))
    }
}
