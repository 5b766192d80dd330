//! The variant `aws-nitro-tpm`: an EC2 instance with a NitroTPM. No certificate endorses its
//! attestation key, but AWS's hypervisor signs it ([`crate::aws_hypervisor`]).
//!
//! ```text
//! instance info = the instance identity document of EC2, as in Constellation; beside it, AttestationDocument
//! ```

use base::sync::lock;
use std::sync::{Arc, Mutex};

use cloud::http::{AWS, Http};
use serde_json::{Map, Value};

use crate::aws_hypervisor::{self, Documents, NitroTpm};
use crate::vtpm::{self, VariantData};
use crate::{AttesterVariant, IssueError, Oid, Registers};
use tpm::Tpm;

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "aws-nitro-tpm",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = AwsMachine::new(AWS, Some(Arc::new(NitroTpm::default())));
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.2.1
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x02, 0x01];
/// The paths of the metadata service, version 2, with the fields that they need.
const TOKEN: &str = "latest/api/token";
const IDENTITY: &str = "latest/dynamic/instance-identity/document";
const LIFETIME: (&str, &str) = ("X-aws-ec2-metadata-token-ttl-seconds", "60");
const TOKEN_FIELD: &str = "X-aws-ec2-metadata-token";
/// The member of the instance info with the attestation document.
const DOCUMENT: &str = "AttestationDocument";

/// A machine of EC2.
pub struct AwsMachine {
    metadata: Http,
    documents: Option<Arc<dyn Documents>>,
    /// The instance identity document, cached after the first request because it never changes.
    known: Mutex<Option<Map<String, Value>>>,
}

impl AwsMachine {
    /// Makes a machine whose metadata service has this URL. Without `documents`, it sends the same
    /// evidence as a Constellation machine.
    pub fn new(metadata: &str, documents: Option<Arc<dyn Documents>>) -> AwsMachine {
        AwsMachine {
            metadata: Http::new(metadata),
            documents,
            known: Mutex::default(),
        }
    }

    fn identity(&self) -> Result<Map<String, Value>, IssueError> {
        let token = self.metadata.put(TOKEN, &[LIFETIME])?;
        let token = String::from_utf8_lossy(&token);
        let fields = [(TOKEN_FIELD, token.trim_end())];
        Ok(self.metadata.get_json(IDENTITY, &fields, "an object")?)
    }
}

impl VariantData for AwsMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn prepare(&self, _location: &tpm::Location) -> Result<(), IssueError> {
        let mut known = lock(&self.known);
        if known.is_none() {
            *known = Some(self.identity()?);
        }
        Ok(())
    }

    fn instance_info(
        &self,
        tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let known = lock(&self.known).clone();
        let mut info = known.unwrap_or_default();
        let spki = aws_hypervisor::spki(tpm)?;
        let documents = self.documents.as_ref();
        if let Some(document) = aws_hypervisor::document(documents, tpm, extra_data, &spki) {
            info.insert(DOCUMENT.into(), serde_json::to_value(document)?);
        }
        Ok(Some(serde_json::to_vec(&info)?))
    }
}
