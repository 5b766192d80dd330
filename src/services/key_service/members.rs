//! Who is a machine of this cluster: one that meets the attestation policy, but for PCR 15, which holds the cluster's ID.
//!
//! That is knowledge of a secret that every worker has, so it tells no control plane from a worker: what a member may have is
//! the business of [`grants`](super::grants).
//!
//! Both ends hold each other to it. The key service computes the ID, since it has the master secret. Whoever asks it cannot,
//! as the measurement secret is one of the keys that it asks for; it goes by its own PCR 15, which a peer must share.
//!
//! The policy is read for each handshake, of which there is one when a service starts and hardly any more; while the file
//! cannot be read, what it had last stays in force.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use attest::attestation::{Identified, Oid, Policy, ValidateError, Validator, qemu_vtpm};

/// In the configuration directory: the attestation policy, JSON.
const POLICY_FILE: &str = "attestationConfig";
/// A ConfigMap holds at most 1 MiB.
const MAX_LEN: u64 = 1 << 20;

/// Accepts machines of the cluster.
pub struct Members {
    file: PathBuf,
    pcr15: [u8; 32],
    last: Mutex<Last>,
}

/// What the file had when it was last good, and what is wrong with it since.
struct Last {
    text: String,
    validator: Arc<qemu_vtpm::Validator>,
    problem: Option<String>,
}

impl Members {
    /// Those that meet the policy in this directory, and have this in PCR 15. The policy must be good to begin with.
    pub fn new(config_dir: &Path, pcr15: [u8; 32]) -> Result<Members, String> {
        let file = config_dir.join(POLICY_FILE);
        let text = read(&file)?;
        let validator = validator(&file, &text, pcr15)?;
        Ok(Members {
            file,
            pcr15,
            last: Mutex::new(Last {
                text,
                validator,
                problem: None,
            }),
        })
    }

    fn current(&self) -> Arc<qemu_vtpm::Validator> {
        // held for as long as a small file takes to be read
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = read(&self.file).and_then(|text| match text == last.text {
            true => Ok(None),
            false => {
                validator(&self.file, &text, self.pcr15).map(|validator| Some((text, validator)))
            }
        });
        let problem = now.as_ref().err().cloned();
        if let Ok(Some((text, validator))) = now {
            log::info!(
                "attestation policy {}: a new one is in force",
                self.file.display()
            );
            (last.text, last.validator) = (text, validator);
        }
        if problem != last.problem {
            if let Some(problem) = &problem {
                log::error!("the attestation policy of before stays in force: {problem}");
            }
            last.problem = problem;
        }
        last.validator.clone()
    }
}

impl Validator for Members {
    fn oid(&self) -> Oid {
        qemu_vtpm::OID
    }

    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
        self.current().validate(document, nonce)
    }

    fn identify(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, ValidateError> {
        self.current().identify(document, nonce)
    }

    fn believes_any_tpm(&self) -> bool {
        self.current().believes_any_tpm()
    }
}

fn validator(
    file: &Path,
    text: &str,
    pcr15: [u8; 32],
) -> Result<Arc<qemu_vtpm::Validator>, String> {
    let policy = Policy::from_json(text).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(Arc::new(qemu_vtpm::Validator::new(Arc::new(
        policy.expecting_pcr15(pcr15),
    ))))
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
