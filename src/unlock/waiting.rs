//! Where the sources of a key meet: each offer is tried on the disk, the first that opens it wins, a wrong one is answered
//! with an error while the others go on.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::crypto::MEASUREMENT_SALT_LEN;
use base::crypto::Secret;
use base::stop::Stop;
use base::timeline::Timeline;
use disk::luks;

/// How often the console hears what is waited for.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// A key that a source found, not yet tried.
pub struct Candidate {
    /// The passphrase of the disk's keyslot.
    pub disk_key: Secret,
    /// From which the cluster ID is derived.
    pub measurement_secret: Secret,
    /// The node's SSH host certificate, renewed; empty for none.
    pub host_certificate: Vec<u8>,
    /// Only while the cluster is migrating: its measurement salt, for a disk whose header has none. Whoever has the key of a
    /// disk is who may say so.
    pub migration_salt: Option<[u8; MEASUREMENT_SALT_LEN]>,
    /// Who brought it, for people: `join service 10.42.0.1:30090`.
    pub from: String,
}

/// A key that opened the disk.
pub struct Opened {
    /// The key of the data.
    pub volume_key: Secret,
    /// As in [`Candidate`].
    pub measurement_secret: Secret,
    /// Of the disk's cluster: from its header, where the measurement secret vouches for it, or the [`Candidate`]'s.
    pub measurement_salt: [u8; MEASUREMENT_SALT_LEN],
    /// As in [`Candidate`].
    pub host_certificate: Vec<u8>,
    /// As in [`Candidate`].
    pub from: String,
}

/// Why an offer was not taken.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The key does not open the disk.
    WrongKey,
    /// It does, but the disk's header is not of the cluster of this measurement secret.
    OtherCluster,
    /// It does, but the disk's header does not say of which cluster it is, and nobody said that the cluster is migrating.
    NoCluster,
    /// Another source was first, or the node is shutting down.
    TooLate,
    /// The disk could not be read: the sentence is for the console.
    Disk(String),
}

/// What one source is doing.
#[derive(Clone)]
pub struct Note {
    /// How often it has tried.
    pub tries: u32,
    /// What came of the last try.
    pub text: String,
}

/// A disk that waits for its key.
pub struct Waiting {
    header: luks::Header,
    device: PathBuf,
    over: Stop,
    timeline: Timeline,
    since: Instant,
    /// Held while a key is tried; never taken by who has `state`.
    trying: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    opened: Option<Opened>,
    done: bool,
    notes: BTreeMap<String, Note>,
}

impl Waiting {
    /// A disk on `device` whose verified header is `header`; `over` tells the sources that the wait is over.
    pub fn new(header: luks::Header, device: &Path, over: Stop, timeline: Timeline) -> Waiting {
        Waiting {
            header,
            device: device.into(),
            over,
            timeline,
            since: Instant::now(),
            trying: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// The disk's UUID, lower case.
    pub fn uuid(&self) -> String {
        self.header.uuid()
    }

    /// Stopped when no key is wanted any more.
    pub fn over(&self) -> &Stop {
        &self.over
    }

    /// Tries a key. Offers are tried one at a time: a keyslot may ask for a lot of memory. It may also take seconds, during
    /// which the node still says what it waits for, and can be stopped.
    pub fn offer(&self, candidate: Candidate) -> Result<(), Refused> {
        let _turn = self.trying.lock().unwrap_or_else(PoisonError::into_inner);
        if self.lock().done || self.over.is_stopped() {
            return Err(Refused::TooLate);
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
                let Candidate {
                    measurement_secret,
                    host_certificate,
                    from,
                    ..
                } = candidate;
                let mut state = self.lock();
                if state.done {
                    return Err(Refused::TooLate); // stopped meanwhile
                }
                state.opened = Some(Opened {
                    volume_key,
                    measurement_secret,
                    measurement_salt,
                    host_certificate,
                    from,
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

    fn unlock(&self, disk_key: &Secret) -> Result<Secret, Refused> {
        let failed = |error: &dyn std::fmt::Display| {
            Refused::Disk(format!("{}: {error}", self.device.display()))
        };
        let mut device = open_device(&self.device).map_err(|error| failed(&error))?;
        self.header
            .unlock(&mut device, disk_key)
            .map_err(|error| match error {
                luks::Error::WrongPassphrase { .. } => Refused::WrongKey,
                error => failed(&error),
            })
    }

    /// Of the cluster that the disk belongs to: a volume of the same cluster has a key of the same kind, but not this.
    fn measurement_salt(
        &self,
        candidate: &Candidate,
    ) -> Result<[u8; MEASUREMENT_SALT_LEN], Refused> {
        let token = self
            .header
            .cluster_token()
            .map_err(|error| Refused::Disk(error.to_string()))?;
        match token {
            Some(token) => token
                .verified_salt(&self.uuid(), &candidate.measurement_secret)
                .ok_or(Refused::OtherCluster),
            None => candidate.migration_salt.ok_or(Refused::NoCluster),
        }
    }

    /// Records what the source `name` is doing; replaces what it said before and counts one more try.
    pub fn note(&self, name: &str, text: impl Into<String>) {
        let mut state = self.lock();
        let tries = state.notes.get(name).map_or(0, |note| note.tries) + 1;
        state.notes.insert(
            name.into(),
            Note {
                tries,
                text: text.into(),
            },
        );
    }

    /// What is waited for, and since when.
    pub fn report(&self) -> (Duration, Vec<(String, Note)>) {
        let notes = self
            .lock()
            .notes
            .iter()
            .map(|(name, note)| (name.clone(), note.clone()))
            .collect();
        (self.since.elapsed(), notes)
    }

    /// Blocks until an offer opened the disk; `None` when `node` stops first. Says on the console what it waits for.
    pub fn wait(&self, node: &Stop) -> Option<Opened> {
        let mut next_report = REPORT_EVERY;
        let mut state = self.lock();
        loop {
            if let Some(opened) = state.opened.take() {
                return Some(opened);
            }
            if node.is_stopped() {
                state.done = true;
                return None;
            }
            if self.since.elapsed() >= next_report {
                next_report += REPORT_EVERY;
                self.tell(&state);
            }
            // the node's stop does not know this condition variable: look at it a few times a second
            state = self
                .changed
                .wait_timeout(state, Duration::from_millis(200))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn tell(&self, state: &State) {
        let seconds = self.since.elapsed().as_secs();
        self.timeline.event(
            "waiting",
            format_args!("for a key of disk {} since {seconds} s", self.uuid()),
        );
        for (name, note) in &state.notes {
            self.timeline.event(
                "waiting",
                format_args!("  {name}: {} (try {})", note.text, note.tries),
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_device(path: &Path) -> io::Result<File> {
    File::open(path)
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refused::WrongKey => f.write_str("it does not open this disk"),
            Refused::OtherCluster => f.write_str(
                "it opens this disk, whose header is not of the cluster of this measurement secret: is it a state disk?",
            ),
            Refused::NoCluster => f.write_str(
                "it opens this disk, whose header does not say of which cluster it is, as on disks of the old system and \
                 volumes; if it is a state disk of before, switch migration on: --migrate-until of the join service, \
                 --migrate of firstlight recover",
            ),
            Refused::TooLate => f.write_str("the disk is being opened by another key, or the node is stopping"),
            Refused::Disk(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Refused {}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use base::crypto::KEY_LEN;

    #[test]
    fn while_a_key_is_tried_the_node_says_what_it_waits_for_and_can_be_stopped() {
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
        // a try lasts for as long as nobody opens the pipe's other end
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
        };
        let trying = thread::spawn({
            let waiting = waiting.clone();
            move || waiting.offer(key())
        });
        while waiting.trying.try_lock().is_ok() {
            thread::yield_now();
        }
        waiting.note("join service", "refused");
        assert_eq!(waiting.report().1.len(), 1);
        let node = Stop::new();
        node.stop();
        assert!(waiting.wait(&node).is_none());

        drop(File::options().write(true).open(&slow).unwrap());
        assert!(matches!(trying.join().unwrap(), Err(Refused::Disk(_))));
        assert_eq!(waiting.offer(key()), Err(Refused::TooLate));
    }
}
