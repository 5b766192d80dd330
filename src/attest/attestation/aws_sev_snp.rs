//! The variant `aws-sev-snp`: a machine of AWS with SEV-SNP, and a NitroTPM. The chip signs the digest of the attestation key.
//!
//! ```text
//! REPORT_DATA = SHA-512(attestation key as SubjectPublicKeyInfo, DER), as in the old system
//! ```
//!
//! The quote of the TPM has the nonce of the connection. AWS signs with a VLEK on shared hosts, the chip with a VCEK on dedicated ones.

use std::sync::Arc;

use ring::digest::{SHA512, digest};

use super::Registers;
use super::quote::Key;
use super::snp::{self, Hardware, InstanceInfo, Kernel, Reporter};
use super::sources::Sources;
use super::variant::{KEYS, SNP};
use super::vtpm::{self, Endorser, Evidence, Machine};
use super::{IssueError, KeyName, Oid, PlatformClaims, Policy, PolicyError, Variant};
use crate::tpm::{self, KeySource, Tpm};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    name: "aws-sev-snp",
    oid: OID,
    registers: Registers::Pcrs,
    judges: &[KEYS, SNP],
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = AwsSnpMachine::new(Arc::new(Kernel));
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
}

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::Validator, PolicyError> {
    let endorser = AwsChip(Hardware::new(&policy, sources)?);
    Ok(vtpm::Validator::new(policy, Arc::new(endorser)))
}

/// Returns the Name of the attestation key of this machine; creates the key if it does not exist.
pub fn key_name(location: &tpm::Location) -> Result<KeyName, tpm::Error> {
    vtpm::key_name(location, KeySource::Own)
}

impl AwsSnpMachine {
    /// Makes a machine whose chip makes these reports.
    pub fn new(reporter: Arc<dyn Reporter>) -> AwsSnpMachine {
        AwsSnpMachine { reporter }
    }
}

impl Machine for AwsSnpMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn instance_info(
        &self,
        tpm: &mut Tpm,
        _extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let key = tpm.attestation_key(self.key_source());
        let key = key.map_err(|error| IssueError(error.to_string()))?;
        let key = Key::parse(&key).map_err(|error| IssueError(error.into()))?;
        let info = InstanceInfo::of(&*self.reporter, &report_data(&key.spki()), None);
        serde_json::to_vec(&info.map_err(IssueError)?)
            .map(Some)
            .map_err(|error| IssueError(error.to_string()))
    }
}

fn report_data(spki: &[u8]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data.copy_from_slice(digest(&SHA512, spki).as_ref());
    report_data
}

/// Judges by the report of the chip.
struct AwsChip(Hardware);

impl Endorser for AwsChip {
    fn oid(&self) -> Oid {
        OID
    }

    // the guest chooses REPORT_DATA: whoever has a machine of AWS can have any key in it
    fn endorses_keys(&self) -> bool {
        false
    }

    fn endorse(&self, evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        let info = evidence.info::<InstanceInfo>()?;
        let mut claims = self.0.judge(&info, &report_data(&evidence.spki))?;
        claims.bound = vec!["attestation key: SHA-512 in REPORT_DATA".into()];
        Ok(Some(claims))
    }
}
