//! The bootstrapper in the booted system: makes a fresh VM a member of a cluster, or starts what a member runs.
//!
//! ```text
//!   PCR 15 not zero? ──yes──► the disk's node ever completed? ──yes──► start it, done
//!        │ no                              │ no
//!        ▼                                 ▼
//!   InitServer waits                  mark the disk for reset, reboot
//!        │ init
//!        ▼
//!   node lock (PCR 15) ─► node state, permanent key: the commit ─► cluster ─► complete, answer, done
//! ```
//!
//! Files: [`init_server`] with its [`secret_guard`]; [`node_lock`] and the [`race`] for it; [`init`] is what follows the lock, a [`job`] that is
//! watched; [`cluster`] is where Kubernetes comes in, by a [`command`] after the other; [`kubelet`] and [`etcd`] are what a
//! member runs.

pub mod cluster;
pub mod command;
pub mod etcd;
pub mod init;
pub mod init_server;
pub mod job;
pub mod kubelet;
pub mod node_lock;
pub mod race;
pub mod secret_guard;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::attestation::{self, Issuer};
use crate::backoff::Backoff;
use crate::kubernetes::components;
use crate::metadata::Metadata;
use crate::state_disk::{self, Handover};
use crate::stop::Stop;
use crate::timeline::Timeline;
use crate::tpm;
use init::Node;
use init_server::{InitServer, Outcome};
use node_lock::NodeLock;
use race::Race;
use secret_guard::SecretGuard;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// What the bootstrapper needs to know.
pub struct Bootstrapper {
    /// The state disk; found by its serial number when absent.
    pub disk: Option<PathBuf>,
    /// Where it is mounted.
    pub root: PathBuf,
    /// Where the initramfs left the passphrase of a new disk.
    pub key_file: PathBuf,
    /// Where the InitServer listens.
    pub listen: SocketAddr,
    /// Who this node is.
    pub metadata: Arc<Metadata>,
    /// Proves what this machine runs.
    pub issuer: Arc<dyn Issuer>,
    /// Holds the node lock.
    pub tpm: tpm::Location,
    /// What components may ask for.
    pub policy: components::Policy,
    /// How components are fetched.
    pub settings: components::Settings,
    /// Ends every wait.
    pub stop: Stop,
    /// Tells the console.
    pub timeline: Timeline,
}

/// How a run ended well.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    /// The node has been a member before this boot.
    Member,
    /// It became one.
    Initialized,
    /// It was told to stop, and is as fresh as before.
    Stopped,
    /// Its disk is marked for reset: reboot.
    Reset,
}

impl Bootstrapper {
    /// Runs to the end; the module's picture is this function.
    pub fn run(self) -> Result<Ending, Error> {
        if attestation::is_marked(&self.tpm).map_err(Error::Tpm)? {
            return self.start_member();
        }
        let Some(guard) = self.secret_guard() else { return Ok(Ending::Stopped) };
        let device = state_disk::device::find(self.disk.as_deref(), &self.stop, &self.timeline).map_err(Error::Disk)?;
        let listener = TcpListener::bind(self.listen).map_err(|error| Error::Listen(self.listen, error))?;
        let race = Race::new(NodeLock::new(self.tpm));
        let entrant = race.enter();
        let _told = self.stop.on_stop(move || race.stop());
        let node = Node {
            metadata: self.metadata.clone(),
            root: self.root.clone(),
            disk: Handover { device: device.clone(), key_file: self.key_file },
            policy: self.policy,
            settings: self.settings,
            timeline: self.timeline,
            stop: entrant.stop().clone(),
        };
        let server = InitServer::start(listener, self.issuer, guard, entrant, node)
            .map_err(|error| Error::Listen(self.listen, error))?;
        self.timeline.event("ready", format_args!("waiting for the operator's init on {}", self.listen));
        match server.wait() {
            Outcome::Done => Ok(Ending::Initialized),
            Outcome::None => Ok(Ending::Stopped),
            Outcome::Failed(why) => {
                self.timeline.event("failed", &why);
                reset(&device, &self.timeline)
            }
        }
    }

    /// A node that was unlocked by its cluster: starts what a member runs, unless it never became a working one.
    fn start_member(&self) -> Result<Ending, Error> {
        if !state_disk::is_complete(&self.root).map_err(state_disk::Error::NodeState).map_err(Error::Disk)? {
            self.timeline.event("failed", "this node's set-up was interrupted: it starts over");
            let disk =
                state_disk::device::find(self.disk.as_deref(), &self.stop, &self.timeline).map_err(Error::Disk)?;
            return reset(&disk, &self.timeline);
        }
        if state_disk::has_kubelet(&self.root) {
            kubelet::start(&self.stop).map_err(Error::Kubelet)?;
            self.timeline.event("kubelet", "started");
            etcd::prioritize_io(&self.stop);
        }
        self.timeline.event("ready", "a member of its cluster since before this boot");
        Ok(Ending::Member)
    }

    /// The guard with the hash from the metadata service, which is asked until it answers; `None` when stopped.
    fn secret_guard(&self) -> Option<SecretGuard> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let hash = self.metadata.init_secret_hash().map_err(|error| error.to_string());
            match hash.and_then(|hash| SecretGuard::new(&hash)) {
                Ok(guard) => return Some(guard),
                Err(error) => self.timeline.event("waiting", format_args!("for the init secret's hash: {error}")),
            }
            if self.stop.wait(backoff.pause()) {
                return None;
            }
        }
    }
}

fn reset(disk: &Path, timeline: &Timeline) -> Result<Ending, Error> {
    state_disk::mark_for_reset(disk).map_err(Error::Disk)?;
    timeline.event("reset", "the next boot formats the state disk");
    Ok(Ending::Reset)
}

/// Why a run failed.
#[derive(Debug)]
pub enum Error {
    /// The TPM does not say whether the node is marked.
    Tpm(tpm::Error),
    /// The state disk.
    Disk(state_disk::Error),
    /// The InitServer's address.
    Listen(SocketAddr, io::Error),
    /// The kubelet of a member.
    Kubelet(command::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Tpm(error) => write!(f, "reading PCR 15: {error}"),
            Error::Disk(error) => error.fmt(f),
            Error::Listen(address, error) => write!(f, "listening on {address}: {error}"),
            Error::Kubelet(error) => write!(f, "starting the kubelet: {error}"),
        }
    }
}

impl std::error::Error for Error {}
