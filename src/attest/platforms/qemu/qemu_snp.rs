//! The variant `qemu-snp`: an SEV-SNP machine without a TPM, whose kernel the host hands over. The
//! launch digest shows which firmware, kernel, initrd and command line it started.
//!
//! ```text
//! REPORT_DATA = SHA-256(OID ‖ user data ‖ verifier's nonce) ‖ register of the cluster ID
//! document    = { report over REPORT_DATA with the certificate of the chip, user data }
//! ```
//!
//! SEV-SNP has no register that a running machine can extend. So the register of the cluster ID is
//! a file in memory, and a program with root can claim any value. Therefore the cluster must be in
//! the launch digest: the programs on the node demand the setting `cluster-id`
//! (`node::Options::attestation`), which the command line or the initrd contains. Then only this
//! cluster can get root on a machine with this launch digest.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::document::Base64;
use crate::snp::{InstanceInfo, Kernel, Reporter};
use crate::{AttesterVariant, ClusterRegister, IssueError, Oid, Registers, sha256};
use tpm::{Error, Location};

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "qemu-snp",
    oid: OID,
    registers: Registers::Pcrs,
    location: || Ok(Location::Snp(REGISTER.into())),
    issuer: |location| Arc::new(LaunchIssuer::new(Arc::new(Kernel), location.clone())),
};

/// 1.3.9900.5.98, which Constellation does not use: its arc for QEMU has 1 and 99.
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x05, 0x62];
/// The file with the register. It is kept from the initramfs to the next start of the machine.
const REGISTER: &str = "/run/firstlight/cluster";
/// Why no document is made with the registers of another kind of machine.
const NO_REGISTER: &str = "a machine of this variant has no TPM: expected snp:FILE in --tpm";

/// The document.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct LaunchDocument {
    /// The report, and the certificates that the host gave.
    pub instance_info: InstanceInfo,
    /// The user data that the report covers.
    pub user_data: Base64,
}

/// Makes documents of this machine.
pub struct LaunchIssuer {
    reporter: Arc<dyn Reporter>,
    register: Location,
}

impl LaunchIssuer {
    /// Makes an issuer for the register of the cluster ID at a location.
    pub fn new(reporter: Arc<dyn Reporter>, register: Location) -> LaunchIssuer {
        LaunchIssuer { reporter, register }
    }
}

impl crate::Issuer for LaunchIssuer {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let Location::Snp(file) = &self.register else {
            return Err(IssueError::new(NO_REGISTER));
        };
        let register = register(file)?;
        let report_data = report_data(user_data, nonce, register.as_ref());
        Ok(serde_json::to_vec(&LaunchDocument {
            instance_info: InstanceInfo::of(&*self.reporter, &report_data, None)?,
            user_data: Base64(user_data.into()),
        })?)
    }
}

/// Returns the data that the report of a document covers.
pub fn report_data(user_data: &[u8], nonce: &[u8], register: &[u8]) -> [u8; 64] {
    let mut report_data = [0; 64];
    let content = [&sha256(&[OID, user_data, nonce]), register].concat();
    let filled = report_data.iter_mut().zip(content);
    filled.for_each(|(byte, content)| *byte = content);
    report_data
}

/// Returns the register of the cluster ID in a file. It is zero if there is no file.
pub(crate) fn register(file: &Path) -> Result<ClusterRegister, Error> {
    let value = match fs::read(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Registers::Pcrs.fresh()),
        read => read.map_err(|error| unusable(file, &error.to_string()))?,
    };
    let register = ClusterRegister::new(&value).filter(|it| it.kind() == Registers::Pcrs);
    register.ok_or_else(|| unusable(file, "expected 32 bytes: reboot the machine"))
}

/// Writes the register after one extension. It must not exist: a machine joins one cluster.
pub(crate) fn mark(file: &Path, register: &ClusterRegister) -> Result<(), Error> {
    let folder = file.parent().map_or(Ok(()), fs::create_dir_all);
    let made = folder.and_then(|()| File::create_new(file)?.write_all(register.as_ref()));
    made.map_err(|error| unusable(file, &error.to_string()))
}

fn unusable(file: &Path, why: &str) -> Error {
    let file = file.display();
    Error::Failed(format!("the register of the cluster ID, {file}: {why}"))
}
