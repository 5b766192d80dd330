//! The attestation policy in force. It is read from a file, and read again when the file changes.
//!
//! The file is in a mounted ConfigMap, which changes by a symbolic link. Therefore the contents are
//! compared ([`Loaded`]). A change replaces the validator as a whole. A running validation keeps the
//! validator that it started with, and holds no lock.
//!
//! A caller that was accepted under the old policy is not accepted under the new one. The server is
//! notified of a change ([`PolicyFile::on_change`]), and each call checks its connection
//! ([`PolicyFile::holds_for`]).

use base::sync::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::metrics::Registry;
use crate::policy_file::Loaded;
use crate::shared_metrics;
use verifier::{Changing, Validator};

/// How often the file is read. The kubelet takes up to a minute to update it.
const INTERVAL: Duration = Duration::from_secs(3);

/// A validator that follows a policy file.
pub struct PolicyFile {
    current: Mutex<Arc<dyn Validator>>,
    /// Whether the file differs from the policy in force, because it cannot be used.
    is_stale: AtomicBool,
    change: Mutex<Change>,
}

/// The last change of the policy.
#[derive(Default)]
struct Change {
    /// When it happened. Older connections were accepted under another policy.
    last: Option<Instant>,
    listener: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// The thread that reads the file. It ends when this is dropped.
pub struct PolicyWatch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Follows a policy file from now on. Fails if the thread cannot be started.
pub fn follow(file: Loaded) -> io::Result<(Arc<PolicyFile>, PolicyWatch)> {
    follow_every(INTERVAL, file)
}

fn follow_every(
    interval: Duration,
    mut file: Loaded,
) -> io::Result<(Arc<PolicyFile>, PolicyWatch)> {
    let policy = Arc::new(PolicyFile {
        current: Mutex::new(file.validator()),
        is_stale: AtomicBool::new(file.is_stale()),
        change: Mutex::default(),
    });
    let following = policy.clone();
    let (stop, stopped) = mpsc::channel();
    let thread = thread::Builder::new()
        .name("policy".into())
        .spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let changed = file.reload();
                following.is_stale.store(file.is_stale(), Ordering::Relaxed);
                if let Some(validator) = changed {
                    following.replace(validator);
                    file.log_new();
                }
            }
        })?;
    Ok((
        policy,
        PolicyWatch {
            stop: Some(stop),
            thread: Some(thread),
        },
    ))
}

impl Changing for PolicyFile {
    fn current(&self) -> Arc<dyn Validator> {
        lock(&self.current).clone()
    }
}

impl PolicyFile {
    /// Adds metrics: whether the file differs from the policy in force, and whether the policy
    /// accepts any TPM. The latter is also logged now.
    pub fn add_metrics(self: &Arc<Self>, registry: &Registry) {
        let policy = Arc::downgrade(self);
        let help = "1 while the attestation policy's file cannot be used and the old policy stays in force.";
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
        shared_metrics::any_tpm(registry, self);
    }

    /// Sets the function that is called after each change of the policy, on the thread that reads
    /// the file. It has to close all connections, including those in their handshake.
    pub fn on_change(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.change().listener = Some(Arc::new(listener));
    }

    /// Returns whether a connection made at this time was accepted under the policy in force.
    pub fn holds_for(&self, connected_at: Instant) -> bool {
        self.change()
            .last
            .is_none_or(|changed| changed < connected_at)
    }

    fn replace(&self, validator: Arc<dyn Validator>) {
        self.change().last = Some(Instant::now());
        *lock(&self.current) = validator;
        // Each ticket needs this lock, so it is not held while connections are closed.
        let listener = self.change().listener.clone();
        if let Some(listener) = listener {
            listener();
        }
        // A handshake that was running may have been completed by the old validator meanwhile.
        self.change().last = Some(Instant::now());
    }

    fn change(&self) -> MutexGuard<'_, Change> {
        lock(&self.change)
    }
}

impl Drop for PolicyWatch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is already in the log.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::time::Instant;
    use verifier::refusal::Kind;

    use super::*;
    use crate::policy_file::PolicyFileFault;
    use crate::policy_operators::PolicyOperators;
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD as STANDARD;
    use ssh::operators::{Newest, POLICY_NAMESPACE, PolicyStatement, sha256_hex};
    use ssh::signature::SigningKey;
    use verifier::{
        CredentialChallenge, Evidence, Identified, MachineIdentity, Policy, Properties, Refusal,
    };

    /// Accepts documents that are equal to the policy.
    struct Equal(String);

    impl Validator for Equal {
        fn properties(&self) -> Properties {
            Properties::of_any_tpm(&[])
        }

        fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
            Ok(None)
        }

        fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
            if evidence.document == self.0.as_bytes() {
                Ok(Identified::default())
            } else {
                Err(Kind::Unproven.because("other"))
            }
        }

        fn of_connection(&self) -> Option<Arc<dyn Validator>> {
            None
        }
    }

    fn accepts(policy: &dyn Validator, document: &str) -> bool {
        policy
            .judge(&Evidence::new(document.as_bytes(), &[]))
            .is_ok()
    }

    fn parse(text: &str) -> Result<Arc<dyn Validator>, PolicyFileFault> {
        // A file that is being rewritten is empty for a moment.
        if matches!(text, "" | "bad") {
            Err(Policy::from_json(text).unwrap_err().into())
        } else {
            Ok(Arc::new(Equal(text.into())))
        }
    }

    fn start(path: &Path) -> (Arc<PolicyFile>, PolicyWatch) {
        let file = Loaded::open(path, None, Box::new(parse)).unwrap();
        follow_every(Duration::from_millis(5), file).unwrap()
    }

    fn comes_into_force(policy: &PolicyFile, text: &str) -> bool {
        let until = Instant::now() + Duration::from_secs(5);
        while !accepts(policy, text) {
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
        assert!(accepts(&*policy, "one") && !accepts(&*policy, "two"));
        fs::write(&path, "two").unwrap();
        assert!(comes_into_force(&policy, "two"));
        assert!(!accepts(&*policy, "one"));
    }

    /// A challenge and the document that answers it are judged by one policy.
    #[test]
    fn a_connection_keeps_the_policy_under_which_it_began() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attestationConfig");
        fs::write(&path, "one").unwrap();
        let (policy, _watch) = start(&path);
        let of_connection = policy.of_connection().unwrap();
        fs::write(&path, "two").unwrap();
        assert!(comes_into_force(&policy, "two"));
        assert!(accepts(&*of_connection, "one"));
        assert!(!accepts(&*of_connection, "two"));
        let of_next = policy.of_connection().unwrap();
        assert!(accepts(&*of_next, "two"));
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
        let until = Instant::now() + Duration::from_secs(5);
        while !policy.is_stale.load(Ordering::Relaxed) {
            assert!(Instant::now() < until, "the bad file is not noticed");
            thread::sleep(Duration::from_millis(2));
        }
        assert!(accepts(&*policy, "one"));
        fs::remove_file(&path).unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(accepts(&*policy, "one"));
        fs::write(&path, "two").unwrap();
        assert!(comes_into_force(&policy, "two"));
        assert!(!policy.is_stale.load(Ordering::Relaxed));
    }

    /// What somebody with all rights on the ConfigMap, and one operator of two, can put there.
    #[test]
    fn fifty_forged_policies_admit_nobody_in_a_cluster_with_operators() {
        let keys = [SigningKey::generate(), SigningKey::generate()];
        let [anna, ben] = &keys;
        let (mallory, cluster) = (SigningKey::generate(), [7; 32]);
        let key_of = |name: &str, key: &SigningKey| {
            format!(r#"{{"name":"{name}","key":"{}"}}"#, key.public().line())
        };
        let operators = [key_of("anna", anna), key_of("ben", ben)].join(",");
        let list = format!(r#"{{"required":2,"operators":[{operators}]}}"#);
        let dir = tempfile::tempdir().unwrap();
        ssh::operators::install(dir.path(), &list, &cluster, &Newest::default()).unwrap();
        let statement = |number: u64, policy: &str, cluster: [u8; 32]| PolicyStatement {
            cluster: base::text::hex(&cluster),
            number,
            policy: sha256_hex(policy.as_bytes()),
            previous: None,
            not_after: None,
        };
        let block = |key: &SigningKey, text: &str| {
            let blob = STANDARD.encode(key.sign(POLICY_NAMESPACE, text.as_bytes()));
            format!("-----BEGIN SSH SIGNATURE-----\n{blob}\n-----END SSH SIGNATURE-----\n")
        };
        let publish = |policy: &str, statement: &str, by: &[&SigningKey]| {
            let signatures: String = by.iter().map(|key| block(key, statement)).collect();
            fs::write(dir.path().join("attestationConfig"), policy).unwrap();
            fs::write(dir.path().join("policyStatement"), statement).unwrap();
            fs::write(dir.path().join("policySignatures"), signatures).unwrap();
        };
        let first = statement(1, "one", cluster).to_text();
        publish("one", &first, &[anna, ben]);
        let operators = || Some(PolicyOperators::keeping(dir.path()));
        let path = dir.path().join("attestationConfig");
        let mut file = Loaded::open(&path, operators(), Box::new(parse)).unwrap();
        for n in 0..10 {
            let forged = format!("forged {n}");
            let own = statement(2 + n, &forged, cluster).to_text();
            publish(&forged, &first, &[anna, ben]);
            assert!(file.reload().is_none());
            publish(&forged, "", &[]);
            assert!(file.reload().is_none());
            publish(&forged, &own, &[anna, anna, &mallory]);
            assert!(file.reload().is_none());
            publish(&forged, &own, &[&mallory, &SigningKey::generate()]);
            assert!(file.reload().is_none());
            let elsewhere = statement(2 + n, &forged, [8; 32]).to_text();
            publish(&forged, &elsewhere, &[anna, ben]);
            assert!(file.reload().is_none());
            assert!(file.is_stale() && accepts(&*file.validator(), "one"));
            // a service that starts now uses the policy that was in force
            let started = Loaded::open(&path, operators(), Box::new(parse)).unwrap();
            assert!(started.is_stale() && accepts(&*started.validator(), "one"));
        }
        publish("two", &statement(2, "two", cluster).to_text(), &[anna, ben]);
        assert!(accepts(&*file.reload().unwrap(), "two"));
        publish("one", &first, &[anna, ben]);
        assert!(file.reload().is_none() && file.is_stale());
        fs::remove_file(dir.path().join("policy/operators.json")).unwrap();
        publish("forged", "", &[]);
        assert!(file.reload().is_none() && file.is_stale());
    }

    #[test]
    fn a_policy_that_is_bad_to_begin_with_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attestationConfig");
        let fault = || {
            Loaded::open(&path, None, Box::new(parse))
                .err()
                .unwrap()
                .fault
        };
        assert!(matches!(fault(), PolicyFileFault::Read(_)));
        fs::write(&path, "bad").unwrap();
        assert!(matches!(fault(), PolicyFileFault::Policy(_)));
        fs::write(&path, vec![b' '; (1 << 20) + 1]).unwrap();
        assert!(matches!(fault(), PolicyFileFault::TooLarge));
    }
}
