//! The attestation policy that is in force: read from a file, read again when the file changes.
//!
//! The file is a mounted ConfigMap, which changes by a symbolic link that points elsewhere, so its content is what is
//! looked at. A change swaps the validator whole; validations that run keep the one they began with, and no lock is held
//! meanwhile. A file that cannot be read or understood leaves the old policy in force, and is said in the log once.
//!
//! Who was let in by the policy of before is not let in by the new one: whoever serves connections hears of a change
//! ([`PolicyFile::on_change`]), and a call that runs is asked about its connection ([`PolicyFile::holds_for`]).

use crate::observed;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use attest::attestation::{Identified, Oid, ValidateError, Validator};
use metrics::Registry;

/// Kubelet itself takes a minute to bring a change here.
const INTERVAL: Duration = Duration::from_secs(3);
/// More than any policy has: a ConfigMap holds at most 1 MiB.
const MAX_LEN: u64 = 1 << 20;

/// Makes a validator of a policy file's text, or says what is wrong with it.
pub type Parse = fn(&str) -> Result<Arc<dyn Validator>, String>;

/// A validator that follows a file.
pub struct PolicyFile {
    current: RwLock<Arc<dyn Validator>>,
    /// The file has, or is, something else than what is in force.
    is_stale: AtomicBool,
    change: Mutex<Change>,
}

/// Of the policy.
#[derive(Default)]
struct Change {
    /// Connections that are older were judged by another policy.
    last: Option<Instant>,
    told: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// The thread that looks at the file; ends with this.
pub struct Watch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Reads the policy, which must be good to begin with, and follows the file from then on.
pub fn follow(path: &Path, parse: Parse) -> Result<(Arc<PolicyFile>, Watch), String> {
    follow_every(INTERVAL, path, parse)
}

fn follow_every(
    interval: Duration,
    path: &Path,
    parse: Parse,
) -> Result<(Arc<PolicyFile>, Watch), String> {
    let text = read(path)?;
    let validator =
        parse(&text).map_err(|error| format!("attestation policy {}: {error}", path.display()))?;
    let policy = PolicyFile {
        current: RwLock::new(validator),
        is_stale: AtomicBool::new(false),
        change: Mutex::default(),
    };
    let policy = Arc::new(policy);
    let mut follower = Follower {
        path: path.into(),
        parse,
        policy: policy.clone(),
        seen: Ok(text),
    };
    let (stop, stopped) = mpsc::channel();
    let thread = thread::Builder::new()
        .name("policy".into())
        .spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                follower.look();
            }
        })
        .map_err(|error| {
            format!(
                "cannot start the thread that follows {}: {error}",
                path.display()
            )
        })?;
    Ok((
        policy,
        Watch {
            stop: Some(stop),
            thread: Some(thread),
        },
    ))
}

impl Validator for PolicyFile {
    fn oid(&self) -> Oid {
        self.current().oid()
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

impl PolicyFile {
    /// Adds whether the file is what is in force, and whether that believes any TPM, which it says in the log now.
    pub fn add_metrics(self: &Arc<Self>, registry: &Registry) {
        let policy = Arc::downgrade(self);
        let help = "1 while the attestation policy's file cannot be used and the policy of before is in force.";
        registry.gauge_of(
            "firstlight_attestation_policy_stale",
            help,
            &[],
            move || {
                policy
                    .upgrade()
                    .map(|policy| f64::from(u8::from(policy.is_stale.load(Ordering::Relaxed))))
            },
        );
        observed::any_tpm(registry, self);
    }

    /// After each change of the policy this is called, on the thread that follows the file. It has to end all connections that
    /// there are, those in their handshake included.
    pub fn on_change(&self, told: impl Fn() + Send + Sync + 'static) {
        self.change().told = Some(Arc::new(told));
    }

    /// Whether a connection that was made then was judged by the policy that is in force.
    pub fn holds_for(&self, connected_at: Instant) -> bool {
        self.change()
            .last
            .is_none_or(|changed| changed < connected_at)
    }

    fn replace(&self, validator: Arc<dyn Validator>) {
        self.change().last = Some(Instant::now());
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = validator;
        // each ticket asks for the lock: it is not held while connections end
        let told = self.change().told.clone();
        if let Some(told) = told {
            told();
        }
        // a handshake that was under way may have come to its end by the old one meanwhile
        self.change().last = Some(Instant::now());
    }

    fn change(&self) -> MutexGuard<'_, Change> {
        self.change.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Arc<dyn Validator> {
        // a pointer is swapped under the lock, nothing that could be half done
        self.current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // a thread that panicked has said so
            let _ = thread.join();
        }
    }
}

struct Follower {
    path: PathBuf,
    parse: Parse,
    policy: Arc<PolicyFile>,
    /// What the file had, or why it could not be read, when it was last looked at.
    seen: Result<String, String>,
}

impl Follower {
    fn look(&mut self) {
        let now = read(&self.path);
        if now == self.seen {
            return;
        }
        let path = self.path.display();
        let parsed = now
            .as_deref()
            .map_err(|error| error.to_owned())
            .and_then(self.parse);
        self.policy
            .is_stale
            .store(parsed.is_err(), Ordering::Relaxed);
        match parsed {
            Ok(validator) => {
                self.policy.replace(validator);
                log::info!("attestation policy {path}: a new one is in force");
            }
            Err(error) => {
                log::error!("attestation policy {path}: the old one stays in force: {error}")
            }
        }
        self.seen = now;
    }
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_LEN + 1).read_to_string(&mut text));
    read.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    if text.len() as u64 > MAX_LEN {
        return Err(format!("{} is larger than {MAX_LEN} bytes", path.display()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::Instant;

    use super::*;

    /// Accepts documents that equal the policy.
    struct Equal(String);

    impl Validator for Equal {
        fn oid(&self) -> Oid {
            &[]
        }

        fn validate(&self, document: &[u8], _nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
            if document == self.0.as_bytes() {
                Ok(vec![])
            } else {
                Err(ValidateError("other".into()))
            }
        }
    }

    fn parse(text: &str) -> Result<Arc<dyn Validator>, String> {
        // a file that is being rewritten is empty for a moment
        if matches!(text, "" | "bad") {
            Err("bad policy".into())
        } else {
            Ok(Arc::new(Equal(text.into())))
        }
    }

    fn start(path: &Path) -> (Arc<PolicyFile>, Watch) {
        follow_every(Duration::from_millis(5), path, parse).unwrap()
    }

    fn comes_into_force(policy: &PolicyFile, text: &str) -> bool {
        let until = Instant::now() + Duration::from_secs(5);
        while policy.validate(text.as_bytes(), &[]).is_err() {
            if Instant::now() > until {
                return false;
            }
            thread::sleep(Duration::from_millis(2));
        }
        true
    }

    #[test]
    fn a_changed_file_is_in_force_without_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attestationConfig");
        fs::write(&path, "one").unwrap();
        let (policy, _watch) = start(&path);
        assert!(policy.validate(b"one", &[]).is_ok() && policy.validate(b"two", &[]).is_err());
        fs::write(&path, "two").unwrap();
        assert!(comes_into_force(&policy, "two"));
        assert!(policy.validate(b"one", &[]).is_err());
    }

    #[test]
    fn a_swapped_link_counts_as_a_change() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["one", "two"] {
            fs::create_dir(dir.path().join(text)).unwrap();
            fs::write(dir.path().join(text).join("attestationConfig"), text).unwrap();
        }
        let link = |to: &str, name: &str| symlink(to, dir.path().join(name)).unwrap();
        link("one", "data");
        let (policy, _watch) = start(&dir.path().join("data/attestationConfig"));
        link("two", "data.new");
        fs::rename(dir.path().join("data.new"), dir.path().join("data")).unwrap();
        assert!(comes_into_force(&policy, "two"));
    }

    #[test]
    fn the_old_policy_stays_while_the_file_is_bad_or_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attestationConfig");
        fs::write(&path, "one").unwrap();
        let (policy, _watch) = start(&path);
        fs::write(&path, "bad").unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(policy.validate(b"one", &[]).is_ok());
        fs::remove_file(&path).unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(policy.validate(b"one", &[]).is_ok());
        fs::write(&path, "two").unwrap();
        assert!(comes_into_force(&policy, "two"));
    }

    #[test]
    fn a_policy_that_is_bad_to_begin_with_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attestationConfig");
        assert!(follow(&path, parse).is_err());
        fs::write(&path, "bad").unwrap();
        assert!(follow(&path, parse).err().unwrap().contains("bad policy"));
    }
}
