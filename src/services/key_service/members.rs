//! The validator of machines of this cluster. They meet the attestation policy, and their PCR 15
//! contains the cluster's ID.
//!
//! The ID depends on a secret that every worker has. So it does not distinguish a control plane
//! from a worker; [`grants`](super::grants) limits what members get.
//!
//! Both ends use this check. The key service computes the ID from the master secret. A client
//! cannot, because the measurement secret is one of the keys that it asks for. It uses the value of
//! its own PCR 15, which must be equal to that of the key service.
//!
//! The policy is read for each handshake, which is rare: one after each start of a service. If the
//! file cannot be read or is not valid, the last valid policy stays in force.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use verifier::sources::Sources;
use verifier::{
    Challenge, ClusterRegister, Evidence, Identified, Identity, Policy, Properties, Refusal, Stage,
    Validator, Variant,
};

/// The attestation policy as JSON, in the configuration directory.
const POLICY_FILE: &str = "attestationConfig";
/// The maximum size of the policy. A ConfigMap holds at most 1 MiB.
const MAX_LEN: u64 = 1 << 20;

/// Accepts machines of the cluster.
pub struct Members {
    variant: &'static Variant,
    file: PathBuf,
    register: ClusterRegister,
    sources: Arc<dyn Sources>,
    last: Mutex<Last>,
}

/// The last valid policy, and the present error of the file, if any.
struct Last {
    text: String,
    validator: Arc<dyn Validator>,
    problem: Option<String>,
}

impl Members {
    /// Creates a validator for the policy in this directory and this value of PCR 15. Fails if the
    /// policy is not valid.
    pub fn new(
        variant: &'static Variant,
        config_dir: &Path,
        register: ClusterRegister,
        sources: Arc<dyn Sources>,
    ) -> Result<Members, String> {
        let file = config_dir.join(POLICY_FILE);
        let text = read(&file)?;
        let validator = validator(variant, &file, &text, &register, &sources)?;
        Ok(Members {
            variant,
            file,
            register,
            sources,
            last: Mutex::new(Last {
                text,
                validator,
                problem: None,
            }),
        })
    }

    fn current(&self) -> Arc<dyn Validator> {
        // The lock is held only while a small file is read.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = read(&self.file).and_then(|text| match text == last.text {
            true => Ok(None),
            false => validator(
                self.variant,
                &self.file,
                &text,
                &self.register,
                &self.sources,
            )
            .map(|validator| Some((text, validator))),
        });
        let problem = now.as_ref().err().cloned();
        if let Ok(Some((text, validator))) = now {
            log::info!(
                "attestation policy {}: a new policy is in force",
                self.file.display()
            );
            (last.text, last.validator) = (text, validator);
        }
        if problem != last.problem {
            if let Some(problem) = &problem {
                log::error!("the old attestation policy stays in force: {problem}");
            }
            last.problem = problem;
        }
        last.validator.clone()
    }
}

impl Validator for Members {
    fn properties(&self) -> Properties {
        self.current().properties()
    }

    fn challenge(&self, peer: &Identity) -> Result<Option<Challenge>, Refusal> {
        self.current().challenge(peer)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.current().judge(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        Some(self.current())
    }
}

fn validator(
    variant: &Variant,
    file: &Path,
    text: &str,
    register: &ClusterRegister,
    sources: &Arc<dyn Sources>,
) -> Result<Arc<dyn Validator>, String> {
    let policy = Policy::from_json(text).map_err(|error| format!("{}: {error}", file.display()))?;
    let policy = policy.at(Stage::Booted).expecting(register);
    endorsement::validator(variant, policy, sources)
        .map_err(|error| format!("{}: {error}", file.display()))
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_LEN + 1).read_to_string(&mut text));
    read.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    match text.len() as u64 {
        0..=MAX_LEN => Ok(text),
        _ => Err(format!("{} is larger than {MAX_LEN} bytes", path.display())),
    }
}
