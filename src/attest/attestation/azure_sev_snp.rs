//! The variant `azure-sev-snp`: a machine of Azure with SEV-SNP, and a virtual TPM in its paravisor. The paravisor's report has the
//! attestation key, and the chip has signed the report.
//!
//! ```text
//! instance info = { certificate of the chip's key, its chain, report of the chip, runtime data of the paravisor }, as in the old system
//! REPORT_DATA   = SHA-256(runtime data) ‖ 32 zeros; the runtime data has the attestation key
//! ```
//!
//! The report is the same for each connection: the quote of the TPM has the nonce. Microsoft's attestation service is not asked.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cloud::http::{Http, LINK_LOCAL, MAX_BODY};
use hardware::snp;
use hardware::snp::certificate::Certificate;
use hardware::snp::chain::Chain;
use hardware::snp::report::{Report, Signer};
use hardware::snp::tcb::Product;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use serde::{Deserialize, Serialize};

use super::document::Base64;
use super::hcl::{self, HardwareReport, HclReport, KEY_HANDLE, RuntimeData};
use super::sources::Sources;
use super::vtpm::{self, Endorser, Evidence, Machine};
use super::{IssueError, KeyName, Oid, PlatformClaims, Policy, PolicyError, Variant, printable};
use crate::tpm::{self, KeySource, Tpm};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    name: "azure-sev-snp",
    oid: OID,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = AzureSnpMachine::new(LINK_LOCAL);
        Arc::new(vtpm::Issuer::of_this_machine(location, Arc::new(machine)))
    },
    validator: |policy, sources| Ok(Arc::new(validator(amd(), Arc::new(policy), sources)?)),
    measure: vtpm::measure,
    key_name,
};
/// 1.3.9900.4.1
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x04, 0x01];

/// Where Azure has the certificate of the chip.
const CERTIFICATION: &str = "metadata/THIM/amd/certification";
/// Pause before the certificate of the chip is asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Maximum length of an error of serde_json in a log line.
const SHOWN_ERROR: usize = 160;

/// The names are those of the old system.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InstanceInfo {
    /// The certificate of the chip's key in PEM.
    report_signer: Option<Base64>,
    /// The certificates above it in PEM, which nobody needs.
    cert_chain: Option<Base64>,
    attestation_report: Base64,
    azure: Option<Azure>,
    #[serde(rename = "GCP", default, skip_deserializing)]
    gcp: (),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Azure {
    runtime_data: Base64,
    /// A token of Microsoft's attestation service, which is not asked.
    #[serde(rename = "MAAToken", default)]
    maa_token: String,
}

/// What Azure has about the chip: PEM.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Certification {
    vcek_cert: String,
    #[serde(default)]
    certificate_chain: String,
}

/// AMD's certificates of a product: the root, and the one of VCEKs below it.
pub struct Authority {
    /// The product.
    pub product: Product,
    /// ARK.
    pub root: Vec<u8>,
    /// ASK.
    pub between: Vec<u8>,
}

/// A machine of Azure.
pub struct AzureSnpMachine {
    host: Http,
    known: Mutex<Option<Known>>,
}

/// The instance info, which is good until the machine reboots.
struct Known {
    info: Vec<u8>,
    /// When the certificate of the chip is asked for again, if it is missing.
    ask_again: Option<Instant>,
}

/// Returns AMD's certificates.
pub fn amd() -> Vec<Authority> {
    [
        (Product::Milan, &roots::AMD_MILAN),
        (Product::Genoa, &roots::AMD_GENOA),
        (Product::Turin, &roots::AMD_TURIN),
    ]
    .into_iter()
    .filter_map(|(product, root)| {
        // the first one is that of VCEKs
        let between = root.between.first()?.der.to_vec();
        let root = root.root.der.to_vec();
        Some(Authority {
            product,
            root,
            between,
        })
    })
    .collect()
}

/// Makes a validator that accepts documents that meet `policy`. An error names the demand that cannot be met.
pub fn validator(
    authorities: Vec<Authority>,
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::Validator, PolicyError> {
    let demands = policy.snp().of_report();
    let named = policy.snp().amd_root_key.as_deref().unwrap_or_default();
    if !named.is_empty() {
        let named = CertificateDer::from_pem_slice(named.as_bytes());
        let is_known =
            |named: &CertificateDer<'_>| authorities.iter().any(|one| one.root == named.as_ref());
        if !named.is_ok_and(|named| is_known(&named)) {
            let why = "amdRootKey is none of AMD's roots, and no other one is known";
            return Err(PolicyError(why.into()));
        }
    }
    let endorser = SnpHardware {
        authorities,
        demands,
        policy: policy.clone(),
        sources: sources.clone(),
    };
    Ok(vtpm::Validator::new(policy, Arc::new(endorser)))
}

/// Returns the Name of the attestation key of this machine.
pub fn key_name(location: &tpm::Location) -> Result<KeyName, tpm::Error> {
    vtpm::key_name(location, KeySource::Persistent(KEY_HANDLE))
}

impl AzureSnpMachine {
    /// Makes a machine whose host has its services at this URL.
    pub fn new(host: &str) -> AzureSnpMachine {
        AzureSnpMachine {
            host: Http::new(host),
            known: Mutex::default(),
        }
    }

    fn evidence(&self, location: &tpm::Location) -> Result<Known, IssueError> {
        let stored = hcl::stored(location)?;
        let report = HclReport::parse(&stored).map_err(|why| IssueError(why.into()))?;
        let HardwareReport::Snp(report_of_chip) = report.hardware else {
            let why = "the HCL report is not of SEV-SNP: is this another variant of Azure?";
            return Err(IssueError(why.into()));
        };
        // a verifier may get the certificate from AMD
        let certification = self.certification();
        let certification = certification.inspect_err(|why| log::warn!("{why}")).ok();
        let is_missing = certification.is_none();
        let (signer, chain) = match certification {
            Some(found) => (
                Some(Base64(found.vcek_cert.trim().into())),
                Some(Base64(found.certificate_chain.trim().into())),
            ),
            None => (None, None),
        };
        let info = InstanceInfo {
            report_signer: signer,
            cert_chain: chain,
            attestation_report: Base64(report_of_chip.into()),
            azure: Some(Azure {
                runtime_data: Base64(report.runtime_data.into()),
                maa_token: String::new(),
            }),
            gcp: (),
        };
        Ok(Known {
            info: serde_json::to_vec(&info).map_err(|error| IssueError(error.to_string()))?,
            ask_again: is_missing.then(|| Instant::now() + ASK_AGAIN),
        })
    }

    fn certification(&self) -> Result<Certification, String> {
        let fields = [("Metadata", "true")];
        let body = self.host.get(CERTIFICATION, &fields, MAX_BODY);
        serde_json::from_slice(&body.map_err(|error| error.to_string())?).map_err(|error| {
            let (url, error) = (
                self.host.url(CERTIFICATION),
                printable(&error.to_string(), SHOWN_ERROR),
            );
            format!("metadata: GET {url}: expected the certificate of the chip: {error}")
        })
    }
}

impl Machine for AzureSnpMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn key_source(&self) -> KeySource {
        KeySource::Persistent(KEY_HANDLE)
    }

    fn prepare(&self, location: &tpm::Location) -> Result<(), IssueError> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_missing = |known: &Known| known.ask_again.is_some_and(|at| at <= Instant::now());
        if known.as_ref().is_none_or(is_missing) {
            *known = Some(self.evidence(location)?);
        }
        Ok(())
    }

    fn instance_info(
        &self,
        _tpm: &mut Tpm,
        _extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(known.as_ref().map(|known| known.info.clone()))
    }
}

/// Judges by the report of the chip.
struct SnpHardware {
    authorities: Vec<Authority>,
    demands: snp::demands::Demands,
    policy: Arc<Policy>,
    sources: Arc<dyn Sources>,
}

impl Endorser for SnpHardware {
    fn oid(&self) -> Oid {
        OID
    }

    fn endorse(&self, evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        let info: InstanceInfo = evidence.info()?;
        let runtime_data = info
            .azure
            .ok_or("the document has no runtime data")?
            .runtime_data
            .0;
        let report = Report::parse(&info.attestation_report.0)?;
        let data = RuntimeData::verify(&runtime_data, &report.report_data, &evidence.spki)?;
        let mut claims = self.judge(&report, info.report_signer.as_ref())?;
        claims.properties.extend(data.properties());
        claims.bound = vec!["attestation key: runtime data in REPORT_DATA".into()];
        Ok(Some(claims))
    }
}

impl SnpHardware {
    fn judge(&self, report: &Report, sent: Option<&Base64>) -> Result<PlatformClaims, String> {
        if report.signer()? != Signer::Vcek {
            return Err(
                "the report is signed by a VLEK, which machines of Azure do not have".into(),
            );
        }
        let sent = sent.map(|sent| leaf(&sent.0)).transpose()?;
        let product = match (report.cpuid, &sent) {
            (Some(cpuid), _) => {
                Product::of(cpuid).ok_or_else(|| format!("no known product has {cpuid}"))?
            }
            (None, Some(leaf)) => Certificate::parse(leaf)?.product,
            (None, None) => Product::Milan, // later chips have later reports
        };
        let authority = self.authorities.iter().find(|one| one.product == product);
        let authority = authority.ok_or_else(|| format!("no root of a {product} is known"))?;
        let fetched = match &sent {
            Some(_) => self.sources.snp_authority(product, report.signer()?),
            None => self.sources.snp_certificates(report, product),
        };
        let leaf = match (&sent, &fetched) {
            (Some(sent), _) => sent,
            (None, Ok(fetched)) => fetched
                .leaf
                .as_ref()
                .ok_or("nobody has the certificate of the chip")?,
            (None, Err(why)) => return Err(why.clone()),
        };
        let chain = Chain {
            leaf,
            intermediate: &authority.between,
            root: &authority.root,
            revoked: fetched
                .as_ref()
                .ok()
                .and_then(|fetched| fetched.revoked.as_deref()),
        };
        let claims = snp::verify(report, &chain, &self.demands, UnixTime::now())?;
        self.policy
            .snp()
            .check_firmware_signer(&report.id_key_digest)?;
        Ok(claims)
    }
}

/// Returns the only certificate in PEM.
fn leaf(pem: &[u8]) -> Result<Vec<u8>, String> {
    let mut certificates = CertificateDer::pem_slice_iter(pem);
    match (certificates.next(), certificates.next()) {
        (Some(Ok(one)), None) => Ok(one.to_vec()),
        _ => Err("the certificate of the chip is not one in PEM".into()),
    }
}
