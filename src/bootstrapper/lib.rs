//! The bootstrapper in the booted system: makes a fresh VM a member of a cluster, or starts what a member runs.
//!
//! ```text
//!   PCR 15 not zero? ──yes──► the disk's node ever completed? ──yes──► start it ─► member
//!        │ no                              │ no
//!        ▼                                 ▼
//!   InitServer ║ JoinClient           mark the disk for reset, reboot
//!        │ init     │ ticket               ▲
//!        └────┬─────┘                      │ failed
//!             ▼                            │
//!   node lock (PCR 15) ─► node state, permanent key: the commit ─► cluster ─► complete ─► member
//! ```
//!
//! Files: [`init_server`] with its [`secret_guard`], and [`join_client`] with its [`turn`] and [`ticket`]; [`node_lock`] and the [`race`]
//! for it; [`init`] and [`join`] are what follows the lock, each a [`job`], with what they share in [`setup`]; [`cluster`] is
//! where Kubernetes comes into an init, by a [`command`] after the other; [`kubelet`] and [`etcd`] are what a member runs, and
//! [`member`] what it answers from then on.

pub mod cluster;
pub mod command;
pub mod etcd;
pub mod init;
pub mod init_server;
pub mod job;
pub mod join;
pub mod join_client;
pub mod kubelet;
pub mod member;
pub mod node_lock;
pub mod race;
pub mod secret_guard;
pub mod setup;
pub mod ticket;
pub mod turn;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use attest::attestation::{self, Issuer};
use attest::tpm;
use base::backoff::Backoff;
use base::stop::Stop;
use base::timeline::Timeline;
use cloud::Metadata;
use disk::state_disk::{self, Handover};
use init_server::InitServer;
use join_client::JoinClient;
use kubernetes::components;
use node::quotes;
use node_lock::NodeLock;
use race::{Entrant, Race};
use secret_guard::SecretGuard;
use setup::Node;

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
    /// It became the first of one, by an init.
    Initialized,
    /// It joined one.
    Joined,
    /// It was told to stop, and is as fresh as before.
    Stopped,
    /// Its disk is marked for reset: reboot.
    Reset,
}

impl Ending {
    /// Whether the node belongs to a cluster, and works.
    pub fn is_member(&self) -> bool {
        matches!(self, Ending::Member | Ending::Initialized | Ending::Joined)
    }
}

/// What came of waiting for the node lock.
pub enum Outcome {
    /// It was stopped, and has changed nothing.
    None,
    /// The node is a member.
    Done,
    /// It failed after the lock: the node must reboot, which resets it.
    Failed(String),
}

impl Bootstrapper {
    /// Runs to the end; the module's picture is this function.
    pub fn run(self) -> Result<Ending, Error> {
        if attestation::is_marked(&self.tpm).map_err(Error::Tpm)? {
            return self.start_member();
        }
        let device = state_disk::device::find(self.disk.as_deref(), &self.stop, &self.timeline)
            .map_err(Error::Disk)?;
        let listener =
            TcpListener::bind(self.listen).map_err(|error| Error::Listen(self.listen, error))?;
        let race = Race::new(NodeLock::new(self.tpm));
        let (by_init, by_join) = (race.enter(), race.enter());
        let _told = self.stop.on_stop(move || race.stop());
        let node = Arc::new(Node {
            metadata: self.metadata,
            root: self.root,
            disk: Handover {
                device: device.clone(),
                key_file: self.key_file,
            },
            issuer: self.issuer.clone(),
            policy: self.policy,
            settings: self.settings,
            timeline: self.timeline,
        });

        let joining =
            JoinClient::start(self.issuer.clone(), by_join, node.clone()).map_err(Error::Thread)?;
        quotes::announce_key(&self.timeline, self.issuer.as_ref());
        let initialized = serve_init(listener, self.issuer, by_init, &node)?;
        // whoever won has stopped the other
        let joined = joining.wait();
        match (initialized, joined) {
            (Outcome::Failed(why), _) | (_, Outcome::Failed(why)) => {
                self.timeline.event("failed", &why);
                reset(&device, &self.timeline)
            }
            (Outcome::Done, _) => Ok(Ending::Initialized),
            (_, Outcome::Done) => Ok(Ending::Joined),
            (Outcome::None, Outcome::None) => Ok(Ending::Stopped),
        }
    }

    /// A node that was unlocked by its cluster: starts what a member runs, unless it never became a working one.
    fn start_member(&self) -> Result<Ending, Error> {
        if !state_disk::is_complete(&self.root)
            .map_err(state_disk::Error::NodeState)
            .map_err(Error::Disk)?
        {
            self.timeline.event(
                "failed",
                "this node's set-up was interrupted: it starts over",
            );
            let disk = state_disk::device::find(self.disk.as_deref(), &self.stop, &self.timeline)
                .map_err(Error::Disk)?;
            return reset(&disk, &self.timeline);
        }
        self.renew_host_certificate();
        if state_disk::has_kubelet(&self.root) {
            kubelet::start(&self.stop).map_err(Error::Kubelet)?;
            self.timeline.event("kubelet", "started");
            etcd::prioritize_io(&self.stop);
        }
        self.timeline
            .event("ready", "a member of its cluster since before this boot");
        Ok(Ending::Member)
    }

    /// Puts the SSH host certificate that came with the rejoin ticket in the place of the one before. Emergency SSH is no reason
    /// for a node not to start.
    fn renew_host_certificate(&self) {
        let certificate = match state_disk::handover::take_host_certificate(&self.key_file) {
            Ok(Some(certificate)) => certificate,
            Ok(None) => return,
            Err(error) => return log::warn!("the SSH host certificate is not renewed: {error}"),
        };
        match ssh::host::renew(&self.root, &certificate) {
            Ok(()) => {
                self.timeline
                    .event("ssh", "the host certificate is renewed");
                ssh::host::reload_sshd();
            }
            Err(error) => log::warn!("the SSH host certificate is not renewed: {error}"),
        }
    }
}

/// Waits for the operator's init, until the join or a stop of the node comes before it.
fn serve_init(
    listener: TcpListener,
    issuer: Arc<dyn Issuer>,
    entrant: Entrant,
    node: &Arc<Node>,
) -> Result<Outcome, Error> {
    let Some(guard) = secret_guard(node, entrant.stop()) else {
        return Ok(Outcome::None);
    };
    let address = listener.local_addr();
    let server =
        InitServer::start(listener, issuer, guard, entrant, node.clone()).map_err(Error::Thread)?;
    if let Ok(address) = address {
        node.timeline.event(
            "ready",
            format_args!("waiting for the operator's init on {address}"),
        );
    }
    Ok(server.wait())
}

/// The guard with the hash from the metadata service, which is asked until it answers; `None` when stopped.
fn secret_guard(node: &Node, stop: &Stop) -> Option<SecretGuard> {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    while !stop.is_stopped() {
        let hash = node
            .metadata
            .init_secret_hash()
            .map_err(|error| error.to_string());
        match hash.and_then(|hash| SecretGuard::new(&hash)) {
            Ok(guard) => return Some(guard),
            Err(error) => node.timeline.event(
                "waiting",
                format_args!("for the init secret's hash: {error}"),
            ),
        }
        stop.wait(backoff.pause());
    }
    None
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
    /// There is no thread to wait with.
    Thread(io::Error),
    /// The kubelet of a member.
    Kubelet(command::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Tpm(error) => write!(f, "reading PCR 15: {error}"),
            Error::Disk(error) => error.fmt(f),
            Error::Listen(address, error) => write!(f, "listening on {address}: {error}"),
            Error::Thread(error) => write!(f, "starting a thread: {error}"),
            Error::Kubelet(error) => write!(f, "starting the kubelet: {error}"),
        }
    }
}

impl std::error::Error for Error {}
