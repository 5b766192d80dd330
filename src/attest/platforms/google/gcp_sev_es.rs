//! The variant `gcp-sev-es`: a shielded VM of Google Compute Engine with AMD SEV. Google certifies
//! the attestation key of the virtual TPM, and the certificate names the instance.
//!
//! ```text
//! instance info = { zone, project_id, instance_name }, as in Constellation
//! certificate   = in the field ak_cert, where go-tpm-tools puts it: Constellation ignores it, and asks Google's API for the key
//! PCR 0         = the firmware measures its version, and with what the host encrypts the memory
//! ```

use std::sync::{Arc, Mutex};

use base::sync::lock;
use base::text::quoted;
use cloud::http::{Fields, GOOGLE, Http, MAX_BODY};

pub use crate::snp::Names;
use crate::vtpm::{self, VariantData};
use crate::{AttesterVariant, IssueError, Oid, Registers, printable};
use tpm::{KeySource, Tpm};

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "gcp-sev-es",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = GoogleMachine::new(GOOGLE);
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.3.1
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x03, 0x01];
/// The NV indices of the certificate and of the template of the RSA attestation key (go-tpm-tools,
/// client/handles.go).
pub const CERTIFICATE_INDEX: u32 = 0x01c1_0000;
/// The attestation key, which Google certifies.
pub const KEY: KeySource = KeySource::Template(0x01c1_0001);
/// The folder in the metadata, and the header field that the service requires.
const METADATA: &str = "computeMetadata/v1";
const FIELDS: Fields<'_> = &[("Metadata-Flavor", "Google")];
/// Maximum length in characters of a name of the metadata.
const MAX_NAME: usize = 256;

/// A machine of Google Compute Engine.
pub struct GoogleMachine {
    metadata: Http,
    /// The names, cached after the first request because they never change.
    known: Mutex<Option<Names>>,
}

impl GoogleMachine {
    /// Makes a machine whose metadata service has this URL.
    pub fn new(metadata: &str) -> GoogleMachine {
        GoogleMachine {
            metadata: Http::new(metadata),
            known: Mutex::default(),
        }
    }

    /// Returns the names of the machine if they are cached.
    pub fn names(&self) -> Option<Names> {
        let known = lock(&self.known);
        known.clone()
    }

    fn metadata(&self, name: &str) -> Result<String, IssueError> {
        let path = format!("{METADATA}/{name}");
        let body = self.metadata.get(&path, FIELDS, MAX_BODY)?;
        let text = String::from_utf8_lossy(&body);
        let text = text.trim_end();
        if text.is_empty() || printable(text, MAX_NAME) != text {
            Err(IssueError::new(format!(
                "metadata: GET {}: expected a name, got {}",
                self.metadata.url(&path),
                quoted(text, 80)
            )))
        } else {
            Ok(text.to_owned())
        }
    }
}

impl VariantData for GoogleMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn key_source(&self) -> KeySource {
        KEY
    }

    fn prepare(&self, _location: &tpm::Location) -> Result<(), IssueError> {
        let mut known = lock(&self.known);
        if known.is_none() {
            // projects/NUMBER/zones/ZONE
            let zone = self.metadata("instance/zone")?;
            *known = Some(Names {
                zone: zone.rsplit('/').next().unwrap_or_default().into(),
                project_id: self.metadata("project/project-id")?,
                instance_name: self.metadata("instance/name")?,
            });
        }
        Ok(())
    }

    fn instance_info(&self, _: &mut Tpm, _: &[u8; 32]) -> Result<Option<Vec<u8>>, IssueError> {
        let names = self.names();
        let info = names.map(|names| serde_json::to_vec(&names));
        Ok(info.transpose()?)
    }

    fn key_certificate(&self, tpm: &mut Tpm) -> Result<Option<Vec<u8>>, IssueError> {
        Ok(tpm.certificates(CERTIFICATE_INDEX)?.into_iter().next())
    }
}

/// What proves the hardware of a machine of Google, in addition to its names and its certificate.
pub trait Hardware: Send + Sync {
    /// The OID of the variant.
    const OID: Oid;
    /// Returns the instance info of a document with this extra data.
    fn info(
        &self,
        google: &GoogleMachine,
        tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Vec<u8>, IssueError>;
}

/// A machine of Google Compute Engine with such hardware.
pub struct HardwareMachine<H> {
    google: GoogleMachine,
    hardware: H,
}

impl<H> HardwareMachine<H> {
    /// Makes a machine whose metadata service has this URL.
    pub fn new(metadata: &str, hardware: H) -> HardwareMachine<H> {
        HardwareMachine {
            google: GoogleMachine::new(metadata),
            hardware,
        }
    }
}

impl<H: Hardware> VariantData for HardwareMachine<H> {
    fn oid(&self) -> Oid {
        H::OID
    }

    fn key_source(&self) -> KeySource {
        self.google.key_source()
    }

    fn prepare(&self, location: &tpm::Location) -> Result<(), IssueError> {
        self.google.prepare(location)
    }

    fn instance_info(
        &self,
        tpm: &mut Tpm,
        extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        self.hardware.info(&self.google, tpm, extra_data).map(Some)
    }

    fn key_certificate(&self, tpm: &mut Tpm) -> Result<Option<Vec<u8>>, IssueError> {
        self.google.key_certificate(tpm)
    }
}
