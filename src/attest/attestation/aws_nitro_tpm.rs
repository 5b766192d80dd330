//! The variant `aws-nitro-tpm`: a machine of EC2 with a NitroTPM. Nothing certifies its attestation key, but AWS's hypervisor signs the
//! PCRs of its TPM in an attestation document, together with the key that the machine names.
//!
//! ```text
//! instance info = the instance identity document of EC2, as in the old system; beside it, AttestationDocument: nonce = extra data,
//!                 public_key = attestation key (SubjectPublicKeyInfo)
//! ```
//!
//! The document alone proves that some machine of EC2 made it: whoever has one can have any key signed. But a machine whose SHA-384 PCRs are
//! those of a known image names its own key only. So the key is endorsed if the policy has these values (`cloud.sha384`).
//!
//! The document has the ID of the instance. If the policy names accounts or zones (`cloud.accounts`, `cloud.zones`), EC2 says those of this
//! instance to a validator that has credentials of the account.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::text;
use cloud::http::{Http, LINK_LOCAL, MAX_BODY};
use rustls::pki_types::UnixTime;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Registers;
use super::ak_certificate::Root;
use super::document::Base64;
use super::instance::{Demands, Instance, Sha384};
use super::nitro_document::NitroDocument;
use super::nsm;
use super::quote::Key;
use super::sources::Sources;
use super::variant::{CLOUD, KEYS, OF_AWS};
use super::vtpm::{self, Endorser, Evidence, Machine};
use super::{
    IssueError, KeyName, Oid, PlatformClaims, Policy, PolicyError, Variant, hex, printable,
};
use crate::tpm::{self, Bank, KeySource, Tpm};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    name: "aws-nitro-tpm",
    oid: OID,
    registers: Registers::Pcrs,
    judges: &[KEYS, CLOUD, OF_AWS],
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = AwsMachine::new(LINK_LOCAL, Some(Arc::new(NitroTpm::default())));
        Arc::new(vtpm::Issuer::of_this_machine(location, Arc::new(machine)))
    },
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: None,
    measure: vtpm::measure,
    key_name,
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
/// The root of NitroTPMs and Nitro Enclaves.
const ROOTS: &[&roots::Root] = &[&roots::AWS_NITRO];
/// Maximum length of an error of serde_json in a log line.
const SHOWN_ERROR: usize = 160;

/// What is read of the instance info. The names are those of EC2; nothing signs these members.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InstanceInfo {
    instance_id: String,
    #[serde(rename = "AttestationDocument", default)]
    document: Option<Base64>,
}

/// Makes attestation documents of the NitroTPM of this machine.
pub trait Documents: Send + Sync {
    /// Returns a document with this nonce and this public key; `None` if this TPM never makes documents, and the log has said so.
    fn document(
        &self,
        tpm: &mut Tpm,
        nonce: &[u8],
        public_key: &[u8],
    ) -> Result<Option<Vec<u8>>, String>;
}

/// The NitroTPM: AWS's hypervisor makes the document. A TPM that does not know the command is asked once.
#[derive(Default)]
pub struct NitroTpm {
    makes_none: AtomicBool,
}

impl Documents for NitroTpm {
    fn document(
        &self,
        tpm: &mut Tpm,
        nonce: &[u8],
        public_key: &[u8],
    ) -> Result<Option<Vec<u8>>, String> {
        if self.makes_none.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let request = nsm::attestation_request(nonce, public_key)?;
        let answer = tpm.nsm_request(&request).map_err(|error| {
            let makes_none = matches!(error, tpm::Error::NoDocuments(..));
            self.makes_none.store(makes_none, Ordering::Relaxed);
            error.to_string()
        })?;
        match nsm::Answer::parse(&answer) {
            Ok(nsm::Answer::Document(document)) => Ok(Some(document.into())),
            Ok(nsm::Answer::Error(name)) => Err(format!("AWS's hypervisor refused: {name}")),
            Err(why) => Err(format!(
                "the answer of AWS's hypervisor cannot be read: {why}"
            )),
        }
    }
}

/// A machine of EC2.
pub struct AwsMachine {
    metadata: Http,
    documents: Option<Arc<dyn Documents>>,
    /// The instance identity document, which never changes, once it is known.
    known: Mutex<Option<Map<String, Value>>>,
}

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::Validator, PolicyError> {
    let demands = policy.cloud();
    let endorser = AwsHypervisor {
        roots: Root::demanded(demands, ROOTS)?,
        signed: Demands {
            accounts: vec![],
            zones: vec![],
            ..demands.clone()
        },
        demands: demands.clone(),
        sources: sources.clone(),
    };
    Ok(vtpm::Validator::new(policy, Arc::new(endorser)))
}

/// Returns the Name of the attestation key of this machine; creates the key if it does not exist.
pub fn key_name(location: &tpm::Location) -> Result<KeyName, tpm::Error> {
    vtpm::key_name(location, KeySource::Own)
}

impl AwsMachine {
    /// Makes a machine whose metadata service has this URL. Without `documents`, it proves what a machine of the old system proves.
    pub fn new(metadata: &str, documents: Option<Arc<dyn Documents>>) -> AwsMachine {
        AwsMachine {
            metadata: Http::new(metadata),
            documents,
            known: Mutex::default(),
        }
    }

    fn identity(&self) -> Result<Map<String, Value>, IssueError> {
        let failed = |error: cloud::Error| IssueError(error.to_string());
        let token = self.metadata.put(TOKEN, &[LIFETIME]).map_err(failed)?;
        let token = String::from_utf8_lossy(&token);
        let fields = [(TOKEN_FIELD, token.trim_end())];
        let body = self.metadata.get(IDENTITY, &fields, MAX_BODY);
        serde_json::from_slice(&body.map_err(failed)?).map_err(|error| {
            let (url, error) = (
                self.metadata.url(IDENTITY),
                printable(&error.to_string(), SHOWN_ERROR),
            );
            IssueError(format!("metadata: GET {url}: expected an object: {error}"))
        })
    }
}

impl Machine for AwsMachine {
    fn oid(&self) -> Oid {
        OID
    }

    fn prepare(&self, _location: &tpm::Location) -> Result<(), IssueError> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
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
        let known = self
            .known
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut info = known.unwrap_or_default();
        if let Some(documents) = &self.documents {
            let key = tpm.attestation_key(self.key_source());
            let key = key.map_err(|error| IssueError(error.to_string()))?;
            let key = Key::parse(&key).map_err(|error| IssueError(error.into()))?;
            match documents.document(tpm, extra_data, &key.spki()) {
                Ok(Some(document)) => {
                    let document = serde_json::to_value(Base64(document));
                    let document = document.map_err(|error| IssueError(error.to_string()))?;
                    info.insert(DOCUMENT.into(), document);
                }
                Ok(None) => {}
                // a peer whose policy demands none accepts the machine
                Err(why) => log::warn!("no attestation document of the NitroTPM is sent: {why}"),
            }
        }
        serde_json::to_vec(&info)
            .map(Some)
            .map_err(|error| IssueError(error.to_string()))
    }
}

/// Judges by what AWS's hypervisor signs, and by what EC2 says of the instance.
struct AwsHypervisor {
    roots: Vec<Root>,
    demands: Demands,
    /// Those that what the hypervisor signs must meet: all but what EC2 alone knows.
    signed: Demands,
    sources: Arc<dyn Sources>,
}

impl Endorser for AwsHypervisor {
    fn oid(&self) -> Oid {
        OID
    }

    fn endorses_keys(&self) -> bool {
        !self.demands.sha384.is_empty()
    }

    fn endorse(&self, evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        let info: InstanceInfo = evidence.info()?;
        match &info.document {
            Some(document) => self
                .judge(evidence, &info.instance_id, &document.0)
                .map(Some)
                .map_err(|why| format!("the attestation document of the NitroTPM: {why}")),
            None if self.demands == Demands::default() => Ok(None),
            None => Err(
                "the policy demands what AWS's hypervisor signs (cloud), and the machine sent no attestation document of its NitroTPM"
                    .into(),
            ),
        }
    }

    fn confirm(&self, platform: PlatformClaims) -> Result<PlatformClaims, String> {
        let id = match &platform.chip {
            Some(id) if self.signed != self.demands => id,
            _ => return Ok(platform),
        };
        let instance = self.sources.ec2_instance(id)?;
        self.demands.judge(&instance)?;
        Ok(PlatformClaims {
            properties: instance.properties(),
            ..platform
        })
    }
}

impl AwsHypervisor {
    fn judge(
        &self,
        evidence: &Evidence<'_>,
        instance_id: &str,
        document: &[u8],
    ) -> Result<PlatformClaims, String> {
        let document = NitroDocument::parse(document)?;
        let root = document.verify(&self.roots, UnixTime::now())?;
        if document.nonce != Some(&evidence.extra_data) {
            return Err("it was made for another connection: its nonce does not match".into());
        }
        if document.public_key != Some(&evidence.spki) {
            return Err("it names another key than the one that signed the quote".into());
        }
        let module = document.module.split_once("-tpm").map(|(id, _)| id);
        if module != Some(instance_id) {
            return Err(format!(
                "it is of {:.80}, and the machine says that it is {}",
                document.module,
                text::quoted(instance_id, 80)
            ));
        }
        let instance = Instance {
            id: Some(instance_id.into()),
            ..Instance::default()
        };
        self.signed.judge(&instance)?;
        check_quoted(&document, evidence)?;
        check_signed(&document, &self.demands.sha384)?;
        Ok(PlatformClaims {
            technology: "AWS NitroTPM".into(),
            signed_by: root.into(),
            chip: instance.id,
            tcb: vec![],
            properties: vec![],
            bound: match self.demands.sha384.is_empty() {
                true => vec!["nonce of the connection: nonce".into()],
                false => vec![
                    "attestation key: public_key".into(),
                    "nonce of the connection: nonce".into(),
                ],
            },
        })
    }
}

/// Checks that the document has all PCRs of one of these sets. The error tells of the set with the fewest others.
fn check_signed(document: &NitroDocument<'_>, sets: &[Sha384]) -> Result<(), String> {
    let others = |set: &Sha384| -> Vec<String> {
        let line = |(index, expected): (&u32, &String)| {
            let got = document.pcrs.get(index).map(|value| hex(value));
            let is_other = got.as_ref() != Some(expected);
            let got = got.unwrap_or_else(|| "nothing".into());
            is_other.then(|| format!("SHA-384 PCR {index}: expected {expected}, got {got}"))
        };
        set.iter().filter_map(line).collect()
    };
    match sets.iter().map(others).min_by_key(Vec::len) {
        Some(others) if !others.is_empty() => Err(others.join("; ")),
        _ => Ok(()),
    }
}

/// Checks that the document has the values that the TPM quoted, if it quoted that bank.
fn check_quoted(document: &NitroDocument<'_>, evidence: &Evidence<'_>) -> Result<(), String> {
    let Some(quoted) = evidence.pcrs_of(Bank::Sha384)? else {
        return Ok(());
    };
    for (index, value) in &document.pcrs {
        if quoted.get(index).is_some_and(|quoted| quoted != value) {
            return Err(format!(
                "its PCR {index} is not the one that the TPM quoted"
            ));
        }
    }
    Ok(())
}
