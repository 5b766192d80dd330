//! The file of the attestation policy, as both services read it: it is in a mounted ConfigMap and may change at any time. If it
//! cannot be read or is not valid, the last valid policy stays in force, and the fault is logged once.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::text::hex;
use ring::digest::{SHA256, digest};
use verifier::{PolicyError, Validator};

/// The name of the file in the configuration directory; it contains JSON.
pub const NAME: &str = "attestationConfig";
/// The maximum size of a policy. A ConfigMap holds at most 1 MiB.
const MAX_LEN: u64 = 1 << 20;

/// Creates the validator of a policy from the text of its file.
pub type Parse = Box<dyn Fn(&str) -> Result<Arc<dyn Validator>, PolicyFileFault> + Send>;

/// The policy in force, and the present fault of its file.
pub struct Loaded {
    path: PathBuf,
    parse: Parse,
    text: String,
    digest: Arc<str>,
    validator: Arc<dyn Validator>,
    fault: Option<String>,
}

impl Loaded {
    /// Reads the first policy, which must be valid.
    pub fn open(path: &Path, parse: Parse) -> Result<Loaded, Error> {
        let read = read(path).and_then(|text| Ok((parse(&text)?, text)));
        let (validator, text) = read.map_err(|fault| Error {
            path: path.into(),
            fault,
        })?;
        let loaded = Loaded {
            path: path.into(),
            parse,
            digest: digest_of(&text),
            text,
            validator,
            fault: None,
        };
        loaded.log("it");
        Ok(loaded)
    }

    /// Reads the file again. Returns the new validator if the policy has changed; when the caller uses
    /// it, [`Loaded::log_new`] says so.
    pub fn reload(&mut self) -> Option<Arc<dyn Validator>> {
        let path = self.path.display();
        let read = read(&self.path).and_then(|text| {
            if text == self.text {
                Ok(None)
            } else {
                Ok(Some(((self.parse)(&text)?, text)))
            }
        });
        let fault = read.as_ref().err().map(PolicyFileFault::to_string);
        if let Some(fault) = fault.as_ref().filter(|_| fault != self.fault) {
            log::error!("attestation policy {path} cannot be used, so the old policy stays in force: {fault}");
        }
        self.fault = fault;
        let (validator, text) = read.ok()??;
        self.digest = digest_of(&text);
        (self.validator, self.text) = (validator, text);
        Some(self.validator())
    }

    /// Logs that callers are judged by the new policy from now on.
    pub fn log_new(&self) {
        self.log("a new policy");
    }

    /// Logs which policy is in force. By its digest an operator sees whether a change has arrived.
    fn log(&self, policy: &str) {
        let path = self.path.display();
        let digest = &self.digest;
        log::info!("attestation policy {path}: {policy} is in force (sha256 {digest})");
    }

    /// Returns the text of the policy in force.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the SHA-256 digest of that text, in hexadecimal digits.
    pub fn digest(&self) -> &Arc<str> {
        &self.digest
    }

    /// Returns the validator of the policy in force.
    pub fn validator(&self) -> Arc<dyn Validator> {
        self.validator.clone()
    }

    /// Returns whether the file cannot be used, so that an old policy is in force.
    pub fn is_stale(&self) -> bool {
        self.fault.is_some()
    }
}

fn digest_of(text: &str) -> Arc<str> {
    hex(digest(&SHA256, text.as_bytes()).as_ref()).into()
}

fn read(path: &Path) -> Result<String, PolicyFileFault> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_LEN + 1).read_to_string(&mut text));
    read.map_err(PolicyFileFault::Read)?;
    match text.len() as u64 {
        0..=MAX_LEN => Ok(text),
        _ => Err(PolicyFileFault::TooLarge),
    }
}

/// Why a service cannot start with its policy file.
#[derive(Debug)]
pub struct Error {
    path: PathBuf,
    /// What is wrong with it.
    pub fault: PolicyFileFault,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "attestation policy {}: {}",
            self.path.display(),
            self.fault
        )
    }
}

impl std::error::Error for Error {}

/// What is wrong with a policy file.
#[derive(Debug)]
pub enum PolicyFileFault {
    /// It cannot be read.
    Read(io::Error),
    /// It is larger than any ConfigMap.
    TooLarge,
    /// It is not a policy, or not one for the cluster's machines.
    Policy(PolicyError),
}

impl fmt::Display for PolicyFileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyFileFault::Read(error) => write!(f, "cannot read it: {error}"),
            PolicyFileFault::TooLarge => write!(f, "it is larger than {MAX_LEN} bytes"),
            PolicyFileFault::Policy(error) => error.fmt(f),
        }
    }
}

impl From<PolicyError> for PolicyFileFault {
    fn from(error: PolicyError) -> PolicyFileFault {
        PolicyFileFault::Policy(error)
    }
}
