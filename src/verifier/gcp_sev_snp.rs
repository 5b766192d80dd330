//! The variant `gcp-sev-snp`: a machine of Google Compute Engine with SEV-SNP, and a virtual TPM. The chip signs the nonce of the
//! connection, and Google certifies the attestation key.
//!
//! ```text
//! REPORT_DATA = SHA-256(user data ‖ verifier's nonce) ‖ 32 zeros, as in the old system
//! certificate = that of the attestation key, as in gcp-sev-es
//! PCR 0       = the firmware measures that the host encrypts the memory with SEV-SNP
//! ```
//!
//! The quote covers the report. Report and TPM name no common machine: PCR 0 says that the TPM is that of a machine with SEV-SNP, too.

use std::sync::Arc;

use cloud::http::LINK_LOCAL;

use super::Registers;
use super::gcp_sev_es::{self, Firmware, GoogleAuthority, GoogleMachine};
use super::snp::{self, Hardware, InstanceInfo, Kernel, Reporter};
use super::sources::Sources;
use super::variant::{CLOUD, KEYS, OF_GOOGLE, SNP};
use super::vtpm::{self, Endorser, Evidence, Machine};
use super::{IssueError, Oid, PlatformClaims, Policy, PolicyError, Variant};
use tpm::{self, KeySource, Tpm};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    name: "gcp-sev-snp",
    oid: OID,
    registers: Registers::Pcrs,
    judges: &[KEYS, SNP, CLOUD, OF_GOOGLE],
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = GoogleSnpMachine::new(LINK_LOCAL, Arc::new(Kernel));
        Arc::new(vtpm::Issuer::of_this_machine(location, Arc::new(machine)))
    },
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: Some(snp::collateral),
    measure: vtpm::measure,
    key_name: gcp_sev_es::key_name,
};
/// 1.3.9900.3.2
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x03, 0x02];

/// A machine of Google Compute Engine.
pub struct GoogleSnpMachine {
    google: GoogleMachine,
    reporter: Arc<dyn Reporter>,
}

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::Validator, PolicyError> {
    let endorser = GoogleChip {
        google: GoogleAuthority::new(&policy)?,
        hardware: Hardware::new(&policy, sources)?,
    };
    Ok(vtpm::Validator::new(policy, Arc::new(endorser)))
}

impl GoogleSnpMachine {
    /// Makes a machine whose metadata service has this URL, and whose chip makes these reports.
    pub fn new(metadata: &str, reporter: Arc<dyn Reporter>) -> GoogleSnpMachine {
        GoogleSnpMachine {
            google: GoogleMachine::new(metadata),
            reporter,
        }
    }
}

impl Machine for GoogleSnpMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn key_source(&self) -> KeySource {
        self.google.key_source()
    }

    fn prepare(&self, location: &tpm::Location) -> Result<(), IssueError> {
        self.google.prepare(location)
    }

    fn instance_info(
        &self,
        _tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let names = self.google.names();
        let info = InstanceInfo::of(&*self.reporter, &report_data(extra_data), names);
        serde_json::to_vec(&info.map_err(IssueError)?)
            .map(Some)
            .map_err(|error| IssueError(error.to_string()))
    }

    fn key_certificate(&self, tpm: &mut Tpm) -> Result<Option<Vec<u8>>, IssueError> {
        self.google.key_certificate(tpm)
    }
}

fn report_data(extra_data: &[u8; 32]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data[..32].copy_from_slice(extra_data);
    report_data
}

/// Judges by the report of the chip, and by the certificate of Google.
struct GoogleChip {
    google: GoogleAuthority,
    hardware: Hardware,
}

impl Endorser for GoogleChip {
    fn oid(&self) -> Oid {
        OID
    }

    // Google certified the key as that of a TPM of its own
    fn endorses_keys(&self) -> bool {
        true
    }

    fn endorse(&self, evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        let info = evidence.info::<InstanceInfo>()?;
        let names = info.gcp.as_ref();
        let names = names.ok_or("the instance info does not name Google's machine (GCP)")?;
        let (root, instance) = self.google.certified(evidence, names)?;
        let pcr_0 = evidence.pcrs.get(&0).ok_or("PCR 0 was not quoted")?;
        Firmware::measured(evidence.event_log, pcr_0)?.check_snp()?;
        let mut claims = self
            .hardware
            .judge(&info, &report_data(&evidence.extra_data))?;
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
