//! The variant `aws-sev-snp`: an AWS instance with SEV-SNP and a NitroTPM. The chip signs the
//! digest of the attestation key.
//!
//! ```text
//! REPORT_DATA = SHA-512(attestation key as SubjectPublicKeyInfo, DER), as in Constellation
//! ```
//!
//! The quote of the TPM has the nonce of the connection. The report is signed with AWS's VLEK on
//! shared hosts, and with the chip's VCEK on dedicated hosts.

use std::sync::Arc;

use ring::digest::{SHA512, digest};

use crate::aws_hypervisor::{self, Documents, NitroTpm};
use crate::snp::{InstanceInfo, Kernel, Reporter};
use crate::vtpm::{self, VariantData};
use crate::{AttesterVariant, IssueError, Oid, Registers};
use tpm::Tpm;

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "aws-sev-snp",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let documents = Some(Arc::new(NitroTpm::default()) as Arc<dyn Documents>);
        let machine = AwsSnpMachine::new(Arc::new(Kernel), documents);
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.2.2
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x02, 0x02];

/// A machine of AWS.
pub struct AwsSnpMachine {
    reporter: Arc<dyn Reporter>,
    documents: Option<Arc<dyn Documents>>,
}

impl AwsSnpMachine {
    /// Makes a machine whose chip makes these reports. Without `documents`, it sends the same
    /// evidence as a Constellation machine.
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

impl VariantData for AwsSnpMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn instance_info(
        &self,
        tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let spki = aws_hypervisor::spki(tpm)?;
        let mut info = InstanceInfo::of(&*self.reporter, &report_data(&spki), None)?;
        info.attestation_document =
            aws_hypervisor::document(self.documents.as_ref(), tpm, extra_data, &spki);
        Ok(Some(serde_json::to_vec(&info)?))
    }
}

/// Returns the REPORT_DATA of a machine with this attestation key.
pub fn report_data(spki: &[u8]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data.copy_from_slice(digest(&SHA512, spki).as_ref());
    report_data
}
