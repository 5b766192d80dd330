//! The variant `aws-sev-snp`: a machine of AWS with SEV-SNP, and a NitroTPM. The chip signs the digest of the attestation key.
//!
//! ```text
//! REPORT_DATA = SHA-512(attestation key as SubjectPublicKeyInfo, DER), as in the old system
//! ```
//!
//! The quote of the TPM has the nonce of the connection. AWS signs with a VLEK on shared hosts, the chip with a VCEK on dedicated ones.
//!
//! The guest chooses REPORT_DATA, so the report endorses no key: whoever has a machine of AWS can have any key in it. An attestation
//! document of AWS's hypervisor can, if the policy demands one (`cloud`, [`super::aws_hypervisor`]). Document and report name no common
//! machine. But the quote covers the report, and an image whose registers the policy knows asks its own chip for it.

use std::sync::Arc;

use ring::digest::{SHA512, digest};

use super::Registers;
use super::aws_hypervisor::{self, AwsHypervisor, Documents, NitroTpm};
use super::snp::{self, Hardware, InstanceInfo, Kernel, Reporter};
use super::sources::Sources;
use super::variant::{CLOUD, KEYS, OF_AWS, SNP};
use super::vtpm::{self, Endorser, Evidence, Machine};
use super::{IssueError, KeyName, Oid, PlatformClaims, Policy, PolicyError, Variant};
use tpm::{self, KeySource, Tpm};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    name: "aws-sev-snp",
    oid: OID,
    registers: Registers::Pcrs,
    judges: &[KEYS, SNP, CLOUD, OF_AWS],
    location: tpm::Location::default_device,
    issuer: |location| {
        let documents = Some(Arc::new(NitroTpm::default()) as Arc<dyn Documents>);
        let machine = AwsSnpMachine::new(Arc::new(Kernel), documents);
        Arc::new(vtpm::Issuer::of_this_machine(location, Arc::new(machine)))
    },
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: Some(snp::collateral),
    measure: vtpm::measure,
    key_name,
};
/// 1.3.9900.2.2
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x02, 0x02];

/// A machine of AWS.
pub struct AwsSnpMachine {
    reporter: Arc<dyn Reporter>,
    documents: Option<Arc<dyn Documents>>,
}

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

/// Returns the Name of the attestation key of this machine; creates the key if it does not exist.
pub fn key_name(location: &tpm::Location) -> Result<KeyName, tpm::Error> {
    vtpm::key_name(location, KeySource::Own)
}

impl AwsSnpMachine {
    /// Makes a machine whose chip makes these reports. Without `documents`, it proves what a machine of the old system proves.
    pub fn new(
        reporter: Arc<dyn Reporter>,
        documents: Option<Arc<dyn Documents>>,
    ) -> AwsSnpMachine {
        AwsSnpMachine {
            reporter,
            documents,
        }
    }
}

impl Machine for AwsSnpMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn instance_info(
        &self,
        tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let spki = aws_hypervisor::spki(tpm)?;
        let info = InstanceInfo::of(&*self.reporter, &report_data(&spki), None);
        let mut info = info.map_err(IssueError)?;
        info.attestation_document =
            aws_hypervisor::document(self.documents.as_ref(), tpm, extra_data, &spki);
        serde_json::to_vec(&info)
            .map(Some)
            .map_err(|error| IssueError(error.to_string()))
    }
}

fn report_data(spki: &[u8]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data.copy_from_slice(digest(&SHA512, spki).as_ref());
    report_data
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
