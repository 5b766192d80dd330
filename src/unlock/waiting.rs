//! A disk that waits for its key. Rejoin and recovery offer keys at the same time; each key is
//! tried on the disk. The first key that opens the disk wins. The source of a wrong key gets an
//! error, and the other sources continue.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::network;
use attest::ClusterRegister;
use base::boot::timeline::Timeline;
use base::crypto::{MEASUREMENT_SALT_LEN, Secret, cluster_id};
use base::stop::Stop;
use base::sync::{lock, wait_timeout};
use disk::luks;

/// Interval between two console reports of what the node waits for.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// A key that a source offers and that has not been tried.
pub struct Candidate {
    /// The passphrase of the disk's keyslot.
    pub disk_key: Secret,
    /// The secret from which the cluster ID is derived.
    pub measurement_secret: Secret,
    /// The renewed SSH host certificate of the node; empty if there is none.
    pub host_certificate: Vec<u8>,
    /// The measurement salt of a cluster that is migrating from Constellation, for a disk whose
    /// header has no salt; otherwise `None`. It is trusted because its source also sent the right
    /// key of the disk.
    pub migration_salt: Option<[u8; MEASUREMENT_SALT_LEN]>,
    /// The source, for people: `join service 10.42.0.1:30090`.
    pub from: String,
    /// The register value of the cluster to which the disk must belong; `None` if it may be any
    /// cluster.
    pub cluster: Option<ClusterRegister>,
}

/// A key that opened the disk.
pub struct Opened {
    /// The volume key, which encrypts the data.
    pub volume_key: Secret,
    /// As in [`Candidate`].
    pub measurement_secret: Secret,
    /// The measurement salt of the disk's cluster: from the header, authenticated with the
    /// measurement secret, or, for a disk that is migrating, from the [`Candidate`].
    pub measurement_salt: [u8; MEASUREMENT_SALT_LEN],
    /// As in [`Candidate`].
    pub host_certificate: Vec<u8>,
}

/// Why a key was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub enum KeyRefused {
    /// The key does not open the disk.
    WrongKey,
    /// The key opens the disk, but the header does not belong to the cluster of this measurement
    /// secret.
    OtherCluster,
    /// The key opens the disk, but the disk belongs to another cluster than the setting
    /// `cluster-id` names.
    OtherMember,
    /// The key opens the disk, but the header names no cluster, and the source does not say that
    /// the cluster is migrating.
    NoCluster,
    /// Another key opened the disk first, or the node is stopping.
    TooLate,
    /// The disk could not be read. The text is for the console, not for the source.
    Disk(String),
}

/// The state of one source.
#[derive(Clone)]
pub struct Note {
    /// The number of tries that have ended.
    pub tries: u32,
    /// The result of the last try.
    pub text: String,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.tries {
            0 => f.write_str(&self.text),
            tries => write!(f, "{} (try {tries})", self.text),
        }
    }
}

/// A disk that waits for its key.
pub struct Waiting {
    header: luks::Header,
    device: PathBuf,
    finished: Stop,
    timeline: Timeline,
    since: Instant,
    /// Held while a key is tried. Lock order: `trying`, then `state`.
    trying: Mutex<()>,
    state: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    opened: Option<Opened>,
    done: bool,
    notes: BTreeMap<String, Note>,
}

impl Waiting {
    /// Makes the waiting disk on `device` with the verified `header`. `finished` ends the work of
    /// the sources.
    pub fn new(header: luks::Header, device: &Path, finished: Stop, timeline: Timeline) -> Waiting {
        Waiting {
            header,
            device: device.into(),
            finished,
            timeline,
            since: Instant::now(),
            trying: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Returns the UUID of the disk in lower case.
    pub fn uuid(&self) -> String {
        self.header.uuid()
    }

    /// Returns the stop that is set when no key is needed any more.
    pub fn finished(&self) -> &Stop {
        &self.finished
    }

    /// Tries a key. Only one key is tried at a time, because a keyslot may require much memory. A
    /// try may take seconds; meanwhile the node still reports what it waits for, and it can be
    /// stopped.
    pub fn offer(&self, candidate: Candidate) -> Result<(), KeyRefused> {
        let _turn = lock(&self.trying);
        if self.lock().done || self.finished.is_stopped() {
            return Err(KeyRefused::TooLate);
        }
        let unlocked = self
            .unlock(&candidate.disk_key)
            .and_then(|key| Ok((key, self.measurement_salt(&candidate)?)));
        match unlocked {
            Ok((volume_key, measurement_salt)) => {
                self.timeline.event(
                    "key-slot",
                    format_args!("opened with the key from {}", candidate.from),
                );
                let mut state = self.lock();
                if state.done {
                    return Err(KeyRefused::TooLate); // stopped during the try
                }
                state.opened = Some(Opened {
                    volume_key,
                    measurement_secret: candidate.measurement_secret,
                    measurement_salt,
                    host_certificate: candidate.host_certificate,
                });
                state.done = true;
                drop(state);
                self.changed.notify_all();
                Ok(())
            }
            Err(refused) => {
                log::warn!(
                    "the key from {} was not accepted: {refused}",
                    candidate.from
                );
                Err(refused)
            }
        }
    }

    fn unlock(&self, disk_key: &Secret) -> Result<Secret, KeyRefused> {
        let failed = |error: &dyn std::fmt::Display| {
            KeyRefused::Disk(format!("{}: {error}", self.device.display()))
        };
        let mut device = File::open(&self.device).map_err(|error| failed(&error))?;
        self.header
            .unlock(&mut device, disk_key)
            .map_err(|error| match error {
                luks::Error::WrongPassphrase { .. } => KeyRefused::WrongKey,
                error => failed(&error),
            })
    }

    /// Returns the measurement salt of the cluster to which the disk belongs. The header must name
    /// the cluster: a storage volume of the same cluster opens with a key of the same kind, but
    /// names no cluster.
    fn measurement_salt(
        &self,
        candidate: &Candidate,
    ) -> Result<[u8; MEASUREMENT_SALT_LEN], KeyRefused> {
        let token = self
            .header
            .cluster_token()
            .map_err(|error| KeyRefused::Disk(error.to_string()))?;
        let salt = match token {
            Some(token) => token
                .verified_salt(&self.uuid(), &candidate.measurement_secret)
                .ok_or(KeyRefused::OtherCluster),
            None => candidate.migration_salt.ok_or(KeyRefused::NoCluster),
        }?;
        let id = cluster_id(&candidate.measurement_secret, &salt);
        if candidate
            .cluster
            .as_ref()
            .is_none_or(|expected| expected.is_of(&id))
        {
            Ok(salt)
        } else {
            Err(KeyRefused::OtherMember)
        }
    }

    /// Records a message about `name` that is not the result of a try; an earlier report stays.
    pub fn hint(&self, name: &str, text: &str) {
        let text = text.into();
        let hint = Note { tries: 0, text };
        let mut state = self.lock();
        state.notes.entry(name.into()).or_insert(hint);
    }

    /// Removes the last report of the source `name`, which has answered without an error or is not
    /// asked any more.
    pub fn forget(&self, name: &str) {
        self.lock().notes.remove(name);
    }

    /// Records the result of a try of the source `name`: replaces its last report and counts the
    /// try.
    pub fn note(&self, name: &str, text: impl Into<String>) {
        let mut state = self.lock();
        let tries = state.notes.get(name).map_or(0, |note| note.tries) + 1;
        let text = text.into();
        state.notes.insert(name.into(), Note { tries, text });
    }

    /// Returns how long the disk has waited, and the last report of each source.
    pub fn report(&self) -> (Duration, Vec<(String, Note)>) {
        let cloned = |(name, note): (&String, &Note)| (name.clone(), note.clone());
        let notes = self.lock().notes.iter().map(cloned).collect();
        (self.since.elapsed(), notes)
    }

    /// Blocks until a key opens the disk, and meanwhile reports on the console what the node waits
    /// for. Returns `None` if `node` is stopped first, or after `timeout`.
    pub fn wait(&self, node: &Stop, timeout: Option<Duration>) -> Option<Opened> {
        let mut next_report = REPORT_EVERY;
        let mut state = self.lock();
        loop {
            if let Some(opened) = state.opened.take() {
                return Some(opened);
            }
            let is_late = timeout.is_some_and(|timeout| self.since.elapsed() >= timeout);
            if node.is_stopped() || is_late {
                state.done = true;
                return None;
            }
            if self.since.elapsed() >= next_report {
                next_report += REPORT_EVERY;
                self.report_on_console(&state);
            }
            // the stop of the node does not signal this condition variable, so it is polled
            state = wait_timeout(&self.changed, state, Duration::from_millis(200));
        }
    }

    /// Returns in one line how long the disk waited, and the last result of each source.
    pub fn summary(&self) -> String {
        let (waited, notes) = self.report();
        let network = network::trouble().map(|trouble| format!("; network: {trouble}"));
        let mut summary = format!("waited {} s", waited.as_secs());
        summary.push_str(&network.unwrap_or_default());
        for (name, note) in notes {
            summary.push_str(&format!("; {name}: {}", note.text));
        }
        summary
    }

    fn report_on_console(&self, state: &Progress) {
        let event = |text: std::fmt::Arguments| self.timeline.event("waiting", text);
        let (seconds, uuid) = (self.since.elapsed().as_secs(), self.uuid());
        event(format_args!("for a key of disk {uuid}, {seconds} s so far"));
        if let Some(trouble) = network::trouble() {
            event(format_args!("  network: {trouble}"));
        }
        for (name, note) in &state.notes {
            event(format_args!("  {name}: {note}"));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        lock(&self.state)
    }
}

impl std::fmt::Display for KeyRefused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KeyRefused::WrongKey => f.write_str("the key does not open this disk"),
            KeyRefused::OtherCluster => f.write_str(
                "the key opens this disk, but the measurement secret sent with it is of another cluster than the disk's header; check that this is a state disk",
            ),
            KeyRefused::OtherMember => f.write_str(
                "the key opens this disk, but the disk belongs to another cluster than the setting cluster-id names (PCR 15)",
            ),
            KeyRefused::NoCluster => f.write_str(
                "the key opens this disk, but the disk's header names no cluster, as on state disks of Constellation and on \
                 storage volumes; for a state disk of Constellation, enable migration: --migrate-until of the join \
                 service, --migrate of firstlight recover",
            ),
            KeyRefused::TooLate => f.write_str("another key has opened the disk, or the node is stopping"),
            KeyRefused::Disk(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for KeyRefused {}

#[cfg(test)]
mod tests {
    use std::fs::{self, DirEntry};
    use std::process::Command;
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use base::crypto::KEY_LEN;

    #[test]
    fn while_a_key_is_tried_the_node_reports_and_can_be_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&disk)
            .unwrap();
        file.set_len(luks::MIN_DEVICE_SIZE).unwrap();
        let volume_key = Secret::random(luks::VOLUME_KEY_LEN);
        let header = luks::format(&mut file, &volume_key, &Secret::random(KEY_LEN)).unwrap();
        // the try blocks until the other end of the pipe is opened
        let slow = folder.path().join("pipe");
        assert!(
            Command::new("mkfifo")
                .arg(&slow)
                .status()
                .unwrap()
                .success()
        );

        let waiting = Arc::new(Waiting::new(
            header,
            &slow,
            Stop::new(),
            Timeline::new("test"),
        ));
        let key = || Candidate {
            disk_key: Secret::random(32),
            measurement_secret: Secret::random(32),
            host_certificate: vec![],
            migration_salt: None,
            from: "me".into(),
            cluster: None,
        };
        let trying = {
            let waiting = waiting.clone();
            let thread = thread::Builder::new().name("trying".into());
            thread.spawn(move || waiting.offer(key())).unwrap()
        };
        // it has the lock before it opens the pipe, so it also has to sleep (proc(5), /proc/pid/stat)
        let is_asleep = |task: DirEntry| {
            let stat = fs::read_to_string(task.path().join("stat"));
            stat.is_ok_and(|stat| stat.contains("(trying) S"))
        };
        let tasks = || fs::read_dir("/proc/self/task").unwrap();
        while waiting.trying.try_lock().is_ok() || !tasks().flatten().any(is_asleep) {
            thread::yield_now();
        }
        waiting.note("join service", "refused");
        assert_eq!(waiting.report().1.len(), 1);
        let node = Stop::new();
        node.stop();
        assert!(waiting.wait(&node, None).is_none());

        drop(File::options().write(true).open(&slow).unwrap());
        assert!(matches!(trying.join().unwrap(), Err(KeyRefused::Disk(_))));
        assert_eq!(waiting.offer(key()), Err(KeyRefused::TooLate));
    }
}
