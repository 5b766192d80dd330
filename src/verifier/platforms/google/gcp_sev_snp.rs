//! The variant `gcp-sev-snp`: a machine of Google Compute Engine with SEV-SNP, and a virtual TPM.
//! `attest` describes its document.

use std::sync::Arc;

pub use attest::gcp_sev_snp::*;
use proto::attested::Collateral;

use crate::gcp_sev_es::{self, GoogleAuthority, GoogleFirmware, SEV_SNP};
use crate::judged::{CLOUD, FLOORS, KEYS, OF_GOOGLE, SNP};
use crate::refusal::{Kind, Refusal};
use crate::snp::{self, InstanceInfo, ReportJudge};
use crate::sources::Sources;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, PolicyError, Variant};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::gcp_sev_snp::VARIANT,
    judges: &[KEYS, FLOORS, SNP, CLOUD, OF_GOOGLE],
    key: Some(gcp_sev_es::KEY),
    launch: None,
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: Some(collateral),
    measure: vtpm::measure,
};

/// Returns the collateral for a document, or `None` if these sources do not have it.
fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Collateral> {
    let of_chip = snp::collateral(document, sources);
    let key_authority = gcp_sev_es::key_authority(document, sources);
    (of_chip.is_some() || key_authority.is_some()).then(|| Collateral {
        key_authority: key_authority.unwrap_or_default(),
        ..of_chip.unwrap_or_default()
    })
}

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::VtpmValidator, PolicyError> {
    let verifier = GoogleChip {
        google: GoogleAuthority::new(&policy, sources)?,
        hardware: ReportJudge::new(&policy, sources)?,
    };
    Ok(vtpm::VtpmValidator::new(policy, Arc::new(verifier)))
}

/// Judges by the chip's report and Google's certificate.
struct GoogleChip {
    google: GoogleAuthority,
    hardware: ReportJudge,
}

impl PlatformVerifier for GoogleChip {
    fn oid(&self) -> Oid {
        OID
    }

    // Google certifies only keys in its own TPMs
    fn endorses_keys(&self) -> bool {
        true
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let info = quoted.info::<InstanceInfo>()?;
        let names = info.gcp.as_ref();
        let names = names.ok_or_else(|| {
            Kind::Malformed.because("the instance info does not name Google's machine (GCP)")
        })?;
        let mut claims =
            self.hardware
                .judge(&info, &report_data(&quoted.extra_data), quoted.now)?;
        // last, because it may fetch the certificate of Google's CA: only a machine with a genuine
        // report can cause that request
        let (root, instance) = self.google.certified(quoted, names)?;
        GoogleFirmware::measured(quoted.event_log, quoted.pcr_0()?)?.check_technology(SEV_SNP)?;
        claims.signed_by += &format!("; the attestation key by {root}");
        claims.properties.extend(instance.properties());
        claims.bound = vec![
            "nonce of the connection: REPORT_DATA".into(),
            "attestation key: its certificate".into(),
            "report: the nonce of the quote".into(),
        ];
        Ok(Some(claims))
    }
}
