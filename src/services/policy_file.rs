//! The file of the attestation policy, as both services read it: it is in a mounted ConfigMap and may change at any time. If it
//! cannot be read or is not valid, the last valid policy stays in force, and the fault is logged once. In a cluster with
//! [operators](crate::policy_operators) it must be signed.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use ssh::operators::sha256_hex;
use verifier::{PolicyError, Validator};

use crate::policy_operators::{self, Approved, PolicyOperators, SignedFiles};

/// The name of the file in the configuration directory; it contains JSON.
pub const NAME: &str = "attestationConfig";
/// The maximum size of a policy. A ConfigMap holds at most 1 MiB.
const MAX_LEN: u64 = 1 << 20;

/// Creates the validator of a policy from the text of its file.
pub type Parse = Box<dyn Fn(&str) -> Result<Arc<dyn Validator>, PolicyFileFault> + Send>;

/// The policy in force, and the present fault of its file.
pub struct Loaded {
    path: PathBuf,
    operators: Option<PolicyOperators>,
    parse: Parse,
    files: Files,
    /// The files that were refused last, so that their signatures are checked once.
    refused: Option<Files>,
    approved: Option<Approved>,
    digest: Arc<str>,
    validator: Arc<dyn Validator>,
    fault: Option<String>,
}

/// The contents of the policy's file and of those beside it.
#[derive(PartialEq, Eq)]
struct Files {
    policy: String,
    signed: SignedFiles,
}

impl Loaded {
    /// Reads the first policy, which must be valid. In a cluster with operators it must be signed; if it is not, the policy that was in
    /// force before on this control plane is used, so that nobody stops the service by a change of the file.
    pub fn open(
        path: &Path,
        operators: Option<PolicyOperators>,
        parse: Parse,
    ) -> Result<Loaded, Error> {
        let load = || -> Result<_, PolicyFileFault> {
            let files = Files::read(path, operators.is_some())?;
            let validator = parse(&files.policy)?;
            Ok((validator, files.approved(operators.as_ref())?, files))
        };
        let kept = || {
            let (policy, approved) = operators.as_ref()?.kept().ok()??;
            let validator = parse(&policy).ok()?;
            let signed = SignedFiles::default();
            Some((validator, Some(approved), Files { policy, signed }))
        };
        let ((validator, approved, files), fault) = match load() {
            Ok(found) => (found, None),
            Err(fault) => match kept() {
                Some(kept) => (kept, Some(fault.to_string())),
                None => {
                    let path = path.into();
                    return Err(Error { path, fault });
                }
            },
        };
        let loaded = Loaded {
            path: path.into(),
            operators,
            parse,
            digest: sha256_hex(files.policy.as_bytes()).into(),
            files,
            refused: None,
            approved,
            validator,
            fault,
        };
        match &loaded.fault {
            None => loaded.log("it"),
            Some(fault) => {
                let path = path.display();
                log::error!(
                    "attestation policy {path} cannot be used, so the old policy stays in force: {fault}"
                );
                loaded.log("the policy that was in force before");
            }
        }
        Ok(loaded)
    }

    /// Reads the file again. Returns the new validator if the policy has changed; when the caller uses
    /// it, [`Loaded::log_new`] says so.
    pub fn reload(&mut self) -> Option<Arc<dyn Validator>> {
        let fault = match Files::read(&self.path, self.operators.is_some()) {
            Ok(files) if files == self.files => {
                (self.fault, self.refused) = (None, None);
                return None;
            }
            Ok(files) if self.refused.as_ref() == Some(&files) => return None,
            Ok(files) => match self.load(&files) {
                Ok((validator, approved)) => {
                    self.digest = sha256_hex(files.policy.as_bytes()).into();
                    (self.validator, self.approved, self.files) = (validator, approved, files);
                    (self.fault, self.refused) = (None, None);
                    return Some(self.validator());
                }
                Err(fault) => {
                    self.refused = Some(files).filter(|_| fault.is_of_content());
                    fault
                }
            },
            Err(fault) => fault,
        };
        let fault = fault.to_string();
        if self.fault.as_ref() != Some(&fault) {
            let path = self.path.display();
            log::error!(
                "attestation policy {path} cannot be used, so the old policy stays in force: {fault}"
            );
        }
        self.fault = Some(fault);
        None
    }

    /// Checks a changed policy.
    fn load(
        &self,
        files: &Files,
    ) -> Result<(Arc<dyn Validator>, Option<Approved>), PolicyFileFault> {
        let validator = (self.parse)(&files.policy)?;
        let approved = files.approved(self.operators.as_ref())?;
        match (&self.approved, &approved) {
            (Some(_), None) => Err(policy_operators::Error::ListGone.into()),
            // a service that does not write the newest number remembers it
            (Some(present), Some(new)) if new.number < present.number => {
                let (got, newest) = (new.number, present.number);
                Err(policy_operators::Error::Older { got, newest }.into())
            }
            _ => Ok((validator, approved)),
        }
    }

    /// Logs that callers are judged by the new policy from now on.
    pub fn log_new(&self) {
        self.log("a new policy");
    }

    /// Logs which policy is in force. By its digest an operator sees whether a change has arrived.
    fn log(&self, policy: &str) {
        let path = self.path.display();
        let digest = &self.digest;
        let by = self.approved.as_ref().map_or(String::new(), |approved| {
            format!(
                ", number {}, signed by {}",
                approved.number,
                approved.by.join(", ")
            )
        });
        log::info!("attestation policy {path}: {policy} is in force (sha256 {digest}{by})");
    }

    /// Returns the text of the policy in force.
    pub fn text(&self) -> &str {
        &self.files.policy
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

impl Files {
    /// Reads the files at one time. The kubelet makes a new directory for each change of a ConfigMap, swaps a link to it, and deletes the
    /// old one, so the links are followed once for all files, and again at the end.
    fn read(path: &Path, has_operators: bool) -> Result<Files, PolicyFileFault> {
        if !has_operators {
            let policy = read(path)?;
            let signed = SignedFiles::default();
            return Ok(Files { policy, signed });
        }
        let followed = || path.canonicalize().map_err(PolicyFileFault::Read);
        let mut at = followed()?;
        loop {
            let files = Files::beside(&at);
            let now = followed()?;
            if now == at {
                return files;
            }
            at = now;
        }
    }

    fn beside(path: &Path) -> Result<Files, PolicyFileFault> {
        let beside = |name: &str| match read(&path.with_file_name(name)) {
            Err(PolicyFileFault::Read(error)) if error.kind() == io::ErrorKind::NotFound => {
                Ok(String::new())
            }
            read => read,
        };
        Ok(Files {
            policy: read(path)?,
            signed: SignedFiles {
                statement: beside(policy_operators::STATEMENT)?,
                signatures: beside(policy_operators::SIGNATURES)?,
                changes: beside(policy_operators::CHANGES)?,
            },
        })
    }

    fn approved(
        &self,
        operators: Option<&PolicyOperators>,
    ) -> Result<Option<Approved>, PolicyFileFault> {
        let Some(operators) = operators else {
            return Ok(None);
        };
        Ok(operators.approve(&self.policy, &self.signed, SystemTime::now())?)
    }
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
    /// The cluster's operators have not signed it.
    Unsigned(policy_operators::Error),
}

impl fmt::Display for PolicyFileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyFileFault::Read(error) => write!(f, "cannot read it: {error}"),
            PolicyFileFault::TooLarge => write!(f, "it is larger than {MAX_LEN} bytes"),
            PolicyFileFault::Policy(error) => error.fmt(f),
            PolicyFileFault::Unsigned(error) => error.fmt(f),
        }
    }
}

impl PolicyFileFault {
    /// Returns whether the same content will be refused again.
    fn is_of_content(&self) -> bool {
        match self {
            PolicyFileFault::Read(_) => false,
            PolicyFileFault::Unsigned(error) => !matches!(error, policy_operators::Error::Io(..)),
            PolicyFileFault::TooLarge | PolicyFileFault::Policy(_) => true,
        }
    }
}

impl From<policy_operators::Error> for PolicyFileFault {
    fn from(error: policy_operators::Error) -> PolicyFileFault {
        PolicyFileFault::Unsigned(error)
    }
}

impl From<PolicyError> for PolicyFileFault {
    fn from(error: PolicyError) -> PolicyFileFault {
        PolicyFileFault::Policy(error)
    }
}
