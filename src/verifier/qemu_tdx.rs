//! The variant `qemu-tdx`: a TDX machine without a TPM, whose own registers are the measurements.
//!
//! ```text
//! REPORTDATA = SHA-256(user data ‖ verifier's nonce) ‖ 32 zeros
//! document   = { quote over REPORTDATA, user data }, as in the old system; beside it, Intel's collateral if the machine has it, and
//!              the event log of the firmware (ACPI table CCEL), which explains registers to a person and proves nothing
//! registers  = 0: MRTD, 1 to 4: RTMR 0 to 3; RTMR 3 names the cluster
//! ```
//!
//! The quote names no machine that stays the same after a reboot, so documents have no machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hardware::tdx::quote::{Body, Quote, Register};
use hardware::tdx::{Collateral, guest};
use serde::{Deserialize, Serialize};

use super::document::{Base64, MAX_DOCUMENT};
use super::policy::PolicyError;
use super::sources::Sources;
use super::variant::Measured;
use super::variant::TDX;
use super::{
    ClusterRegister, Identified, IssueError, KeyName, Measurement, Oid, Policy, Registers, Stage,
    ValidateError, Variant, excerpt, hex, printable, sha256, td,
};
use proto::attested::Collateral as Brought;
use tpm::{self, Location};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    name: "qemu-tdx",
    oid: OID,
    registers: Registers::Rtmrs,
    judges: &[TDX],
    location: default_location,
    issuer: |_| {
        let (collateral, event_log) = (td::COLLATERAL.into(), EVENT_LOG.into());
        Arc::new(Issuer::new(
            Arc::new(Kernel),
            Some(collateral),
            Some(event_log),
        ))
    },
    validator: |policy, sources| {
        let policy = Arc::new(policy);
        let hardware = td::Hardware::new(&policy, sources)?;
        Ok(Arc::new(Validator::new(policy, hardware)?))
    },
    collateral: Some(collateral),
    measure,
    key_name: no_key,
};
/// 1.3.9900.5.99
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x05, 0x63];

/// The file in which the kernel provides the event log of the firmware, with the bytes behind its end.
const EVENT_LOG: &str = "/sys/firmware/acpi/tables/data/CCEL";
/// The greatest length of a document with an event log, in bytes: a document must fit a TLS handshake message of 64 KiB. Of a longer log,
/// the data that say least are cut.
const MAX_SENT: usize = 48 << 10;
/// Maximum length of an error of serde_json in a log line.
const SHOWN_ERROR: usize = 160;

/// The document: the names are those of the old system.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    raw_quote: Base64,
    user_data: Base64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    collateral: Option<Collateral>,
    #[serde(default, skip_serializing_if = "Base64::is_empty")]
    event_log: Base64,
}

/// What a document says; nothing of it is verified.
pub struct Said {
    /// The registers by the numbers of policies.
    pub registers: BTreeMap<u32, Vec<u8>>,
    /// The event log of the firmware; empty if there is none.
    pub event_log: Vec<u8>,
}

/// Returns what a document of this variant says; `None` if it is none.
pub fn said(document: &[u8]) -> Option<Said> {
    let document: Document = serde_json::from_slice(document).ok()?;
    let quote = Quote::parse(&document.raw_quote.0).ok()?;
    Some(Said {
        registers: registers(&quote.body),
        event_log: document.event_log.0,
    })
}

/// Makes the quotes of a machine.
pub trait Quoter: Send + Sync {
    /// Returns a quote over these bytes.
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, String>;
}

/// The kernel of this machine.
struct Kernel;

impl Quoter for Kernel {
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, String> {
        guest::quote(report_data)
    }
}

/// Makes documents of this machine.
pub struct Issuer {
    quoter: Arc<dyn Quoter>,
    collateral: Option<PathBuf>,
    event_log: Option<PathBuf>,
}

impl Issuer {
    /// Makes an issuer, which adds the collateral and the event log in these files if they exist.
    pub fn new(
        quoter: Arc<dyn Quoter>,
        collateral: Option<PathBuf>,
        event_log: Option<PathBuf>,
    ) -> Issuer {
        Issuer {
            quoter,
            collateral,
            event_log,
        }
    }

    /// Returns the event log in at most `max` bytes. A validator does not need it.
    fn event_log(&self, max: usize) -> Vec<u8> {
        let log = self.event_log.as_ref().map(std::fs::read);
        let log = log.and_then(Result::ok).unwrap_or_default();
        excerpt::excerpt(&log, max)
    }
}

impl super::Issuer for Issuer {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let report_data = report_data(user_data, nonce);
        let mut document = Document {
            raw_quote: Base64(self.quoter.quote(&report_data).map_err(IssueError)?),
            user_data: Base64(user_data.into()),
            collateral: self.collateral.as_deref().and_then(td::collateral),
            event_log: Base64::default(),
        };
        let encode = |document: &Document| {
            serde_json::to_vec(document).map_err(|error| IssueError(error.to_string()))
        };
        // base64 adds a third, and the field has a name
        let room = MAX_SENT.saturating_sub(encode(&document)?.len() + 32) / 4 * 3;
        document.event_log = Base64(self.event_log(room));
        encode(&document)
    }
}

/// Returns what validators of a document need beside it, as these sources have it.
fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Brought> {
    let document: Document = serde_json::from_slice(document).ok()?;
    td::collateral_of(&document.raw_quote.0, sources)
}

fn report_data(user_data: &[u8], nonce: &[u8]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data[..32].copy_from_slice(&sha256(&[user_data, nonce]));
    report_data
}

/// Validates documents against a policy.
pub struct Validator {
    policy: Arc<Policy>,
    hardware: td::Hardware,
}

impl Validator {
    /// Makes a validator by a policy, by which `hardware` judges. It must be one of TDX machines.
    pub fn new(policy: Arc<Policy>, hardware: td::Hardware) -> Result<Validator, PolicyError> {
        // a policy of any image has no registers
        let has_some = !policy.images()[0].measurements().is_empty();
        if has_some && policy.registers() == Registers::Pcrs {
            return Err(PolicyError(
                "it has PCRs of a TPM, but machines of the variant qemu-tdx have registers of 48 bytes: 0 is MRTD, 1 to 4 are \
                 RTMR 0 to 3"
                    .into(),
            ));
        }
        Ok(Validator { policy, hardware })
    }

    fn check(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, String> {
        if document.len() > MAX_DOCUMENT {
            let len = document.len();
            return Err(format!(
                "the document has {len} bytes, expected at most {MAX_DOCUMENT}"
            ));
        }
        let document: Document = serde_json::from_slice(document).map_err(|error| {
            let error = printable(&error.to_string(), SHOWN_ERROR);
            format!("the document cannot be read: {error}")
        })?;
        let quote = Quote::parse(&document.raw_quote.0).map_err(|error| error.to_string())?;
        if quote.body.report_data != report_data(&document.user_data.0, nonce) {
            return Err(
                "the quote was made for another connection: its nonce does not match".into(),
            );
        }
        let cluster = ClusterRegister::new(&quote.body.rtmr[3]);
        // before the signatures: a quote with other registers must not make this program fetch collateral
        self.policy
            .check(&registers(&quote.body), |index, measurement, got| {
                let (name, expected) = (Registers::Rtmrs.name(index), hex(&measurement.expected));
                match got {
                    Some(got) => format!("{name}: expected {expected}, got {}", hex(got)),
                    None => {
                        format!(
                            "{name}: expected {expected}, but a TDX machine has no such register"
                        )
                    }
                }
            })?;
        let sent = document.collateral.as_ref();
        let mut platform = self.hardware.judge(quote, sent)?;
        platform.bound = vec!["key and nonce of the connection: REPORTDATA".into()];
        Ok(Identified {
            user_data: document.user_data.0,
            machine: None,
            stage: None,
            platform: Some(Arc::new(platform.printable())),
            is_endorsed: true,
            cluster,
        })
    }
}

impl super::Validator for Validator {
    fn oid(&self) -> Oid {
        OID
    }

    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
        self.identify(document, nonce)
            .map(|identified| identified.user_data)
    }

    fn identify(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, ValidateError> {
        self.check(document, nonce)
            .map_err(|why| ValidateError(why.into()))
    }

    fn requires_strong(&self) -> bool {
        self.policy.requires_strong()
    }
}

/// Returns the registers by the numbers of policies.
fn registers(body: &Body) -> BTreeMap<u32, Vec<u8>> {
    by_number(&[
        body.mr_td,
        body.rtmr[0],
        body.rtmr[1],
        body.rtmr[2],
        body.rtmr[3],
    ])
}

fn by_number(registers: &[Register; 5]) -> BTreeMap<u32, Vec<u8>> {
    (0..).zip(registers.iter().map(|it| it.to_vec())).collect()
}

/// Returns the location of the registers of this machine.
fn default_location() -> Result<Location, tpm::Error> {
    match Path::new(guest::MEASUREMENTS).is_dir() {
        true => Ok(Location::Tdx(guest::MEASUREMENTS.into())),
        false => Err(tpm::Error::Registers(format!(
            "this machine is no TDX machine, or its Linux is older than 6.16: {} does not exist",
            guest::MEASUREMENTS
        ))),
    }
}

/// Returns the registers of this machine. No part of systemd extends them, so they are the same at each stage.
fn measure(location: &Location, _stage: Stage) -> Result<Measured, tpm::Error> {
    let measured = |(index, expected)| {
        let warn_only = false;
        (
            index,
            Measurement {
                expected,
                warn_only,
            },
        )
    };
    let values = by_number(&td::read(location)?);
    let values: BTreeMap<_, _> = values.into_iter().map(measured).collect();
    Ok(Measured {
        booted: values.clone(),
        initramfs: values,
    })
}

/// A TDX machine has no attestation key of its own: a quoting enclave of the host has it.
fn no_key(_location: &Location) -> Result<KeyName, tpm::Error> {
    Err(tpm::Error::Registers(
        "a machine of the variant qemu-tdx has no attestation key that a policy could name; the platform of the host signs its quotes"
            .into(),
    ))
}
