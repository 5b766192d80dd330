//! The bootstrapper in the booted system: makes a fresh VM a member of a cluster, or starts the programs of a member.
//!
//! ```text
//!   PCR 15 not zero? ──yes──► is the set-up complete? ──yes──► start the kubelet ─► member
//!        │ no                              │ no
//!        ▼                                 ▼
//!   InitServer ║ JoinClient           did systemd measure into it? ──yes──► error
//!        │ init     │ ticket               │ no
//!        └────┬─────┘                      ▼
//!             │                       mark the disk for reset, reboot
//!             │                            ▲
//!             ▼                            │ failed
//!   node lock (PCR 15) ─► node state, permanent key: the commit ─► cluster ─► complete ─► member
//! ```
//!
//! The modules of each folder use only those of the folders above it:
//!
//! - [`lock`]: the node lock, the race for it, and who may still guess the init secret.
//! - [`state`]: the state disk and its header, with the addresses of join services in it; its size, and the generation that shows an
//!   old copy of it.
//! - [`trust`]: what a join service must prove besides its image, its ticket, and what this machine proves for a join service in a pod.
//! - [`steps`]: each step is a [`job`](steps::job), and [`error`](steps::error) says which one failed; [`setup`](steps::setup) has
//!   those that init and join share, [`kubelet`](steps::kubelet), [`etcd`](steps::etcd) and [`static_pods`](steps::static_pods) manage
//!   what a member runs, [`clock`](steps::clock) tells the time service which servers to ask.
//! - [`first`]: [`init_server`](first::init_server) and [`join_client`](first::join_client) wait; [`init`](first::init),
//!   [`cluster`](first::cluster) and [`join`](first::join) have the steps after the lock.
//! - [`members`]: [`member`](members::member) answers `firstlight status`, [`operator`](members::operator) its other calls;
//!   [`renew`](members::renew) and [`authorities`](members::authorities) renew certificates, [`upgrade`](members::upgrade) brings
//!   another version of Kubernetes, [`update`](members::update) another image, [`restore`](members::restore) the objects of a snapshot.

pub mod first;
pub mod lock;
pub mod members;
pub mod options;
pub mod state;
pub mod steps;
pub mod trust;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use attest::Issuer;
use base::backoff::Backoff;
use base::boot::timeline::Timeline;
use base::child_process;
use base::machines::Cloud;
use base::stop::Stop;
use cloud_api::Service;
use disk::state_disk::device;
use first::init_server::InitServer;
use first::join_client::JoinClient;
use kubernetes::components;
use lock::node_lock::NodeLock;
use lock::race::{Entrant, Race};
use lock::secret_guard::SecretGuard;
use node::quotes;
use state::header_lock::HeaderLock;
use steps::setup::{NodeParts, SetupOutcome};
use trust::service_trust::ServiceTrust;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// The bootstrapper's inputs.
pub struct Bootstrapper {
    /// The state disk; `None` finds it by its serial number.
    pub disk: Option<PathBuf>,
    /// Where the state disk is mounted.
    pub root: PathBuf,
    /// The file in which the initramfs left the passphrase of a new disk.
    pub key_file: PathBuf,
    /// Where the InitServer listens.
    pub listen: SocketAddr,
    /// The cloud of this machine.
    pub cloud: Cloud,
    /// Whether a cloud controller manager will initialize the node.
    pub has_cloud_controller: bool,
    /// The metadata service, which describes this node and its peers.
    pub metadata: Arc<dyn Service>,
    /// Makes evidence of what this machine runs.
    pub issuer: Arc<dyn Issuer>,
    /// The requirements for the evidence of a join service.
    pub trust: ServiceTrust,
    /// The TPM whose PCR 15 is the node lock.
    pub tpm: tpm::Location,
    /// Limits what components may do.
    pub policy: components::ComponentPolicy,
    /// How components are downloaded.
    pub settings: components::InstallSettings,
    /// How long kubeadm waits for each part of Kubernetes; `None`: as long as kubeadm does by default.
    pub kubeadm_timeout: Option<Duration>,
    /// Ends every wait.
    pub stop: Stop,
    /// Prints events on the console.
    pub timeline: Timeline,
}

/// How a successful run ended.
#[derive(Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// The node has been a member of a cluster since before this boot.
    Member,
    /// An init made the node the first member of a cluster.
    Initialized,
    /// The node joined a cluster.
    Joined,
    /// The node was stopped and is unchanged.
    Stopped,
    /// The state disk is marked for reset: the machine has to reboot.
    Reset,
}

impl RunOutcome {
    /// Returns whether the node is a working member of a cluster.
    pub fn is_member(&self) -> bool {
        matches!(
            self,
            RunOutcome::Member | RunOutcome::Initialized | RunOutcome::Joined
        )
    }
}

impl Bootstrapper {
    /// Runs the bootstrapper until it ends; the diagram at the top of this module shows this
    /// function.
    pub fn run(self) -> Result<RunOutcome, Error> {
        let what = format!("{:#} to read PCR 15", self.tpm);
        let is_marked = self
            .timeline
            .waiting_for(what, || trust::evidence::is_marked(&self.tpm));
        if is_marked.map_err(Error::Tpm)? {
            return self.start_member();
        }
        let what = format!(
            "{:#} to give the values that join services must have",
            self.tpm
        );
        let trust = self
            .timeline
            .waiting_for(what, || trust::platform::demanding(self.trust, &self.tpm))
            // a policy lists this name
            .inspect_err(|_| quotes::announce_key(&self.timeline, self.issuer.as_ref(), &self.tpm))
            .map_err(Error::Unpinned)?;
        let device = device::find(self.disk.as_deref(), self.cloud, &self.stop, &self.timeline)
            .map_err(|error| Error::Disk(error.into()))?;
        let listener =
            TcpListener::bind(self.listen).map_err(|error| Error::Listen(self.listen, error))?;
        let race = Race::new(NodeLock::new(self.tpm.clone()));
        let (by_init, by_join) = (race.enter(), race.enter());
        let _told = self.stop.on_stop(move || race.stop());
        let node = Arc::new(NodeParts {
            has_cloud_controller: self.has_cloud_controller,
            metadata: self.metadata,
            root: self.root,
            disk: state::state_disk::Handover {
                device: device.clone(),
                key_file: self.key_file,
            },
            issuer: self.issuer.clone(),
            trust,
            tpm: self.tpm,
            policy: self.policy,
            settings: self.settings,
            kubeadm_timeout: self.kubeadm_timeout,
            timeline: self.timeline,
            peers: OnceLock::new(),
        });

        let joining =
            JoinClient::start(self.issuer.clone(), by_join, node.clone()).map_err(Error::Thread)?;
        quotes::announce_key(&self.timeline, self.issuer.as_ref(), &node.tpm);
        let initialized = serve_init(listener, self.issuer, by_init, &node)?;
        // the winner has stopped the other entrant
        let joined = joining.wait();
        match (initialized, joined) {
            (SetupOutcome::Failed(why), _) | (_, SetupOutcome::Failed(why)) => {
                self.timeline.event("failed", &why);
                reset(&device, &self.timeline)
            }
            (SetupOutcome::Done, _) => Ok(RunOutcome::Initialized),
            (_, SetupOutcome::Done) => Ok(RunOutcome::Joined),
            (SetupOutcome::None, SetupOutcome::None) => Ok(RunOutcome::Stopped),
        }
    }

    /// Starts the kubelet of a node whose disk its cluster opened; resets a node whose set-up never
    /// completed.
    fn start_member(&self) -> Result<RunOutcome, Error> {
        let what = format!("the file system at {} to be read", self.root.display());
        let is_complete = self
            .timeline
            .waiting_for(what, || state::state_disk::is_complete(&self.root));
        let writer = attest::foreign_writer(&self.tpm);
        if !is_complete.map_err(Error::Disk)? {
            // a reset would not help: the next boot measures the same programs
            if let Some(writer) = writer {
                return Err(Error::ForeignWriter(writer));
            }
            self.timeline.event(
                "failed",
                "an earlier set-up was interrupted: this node starts over",
            );
            let disk = device::find(self.disk.as_deref(), self.cloud, &self.stop, &self.timeline)
                .map_err(|error| Error::Disk(error.into()))?;
            return reset(&disk, &self.timeline);
        }
        if let Some(writer) = writer {
            log::warn!("{writer}");
        }
        state::growth::grow(&self.root, &self.timeline);
        self.renew_host_certificate();
        if state::state_disk::has_kubelet(&self.root) {
            steps::kubelet::start(&self.stop, &self.timeline).map_err(Error::Kubelet)?;
            self.timeline.event("kubelet", "started");
            steps::etcd::prioritize_io(&self.stop, &self.timeline);
        }
        self.timeline.event(
            "ready",
            "a member of its cluster, which it joined in an earlier boot",
        );
        Ok(RunOutcome::Member)
    }

    /// Replaces the SSH host certificate with the one from the rejoin ticket. A failure is only
    /// logged: a node also works without emergency SSH.
    fn renew_host_certificate(&self) {
        let certificate = match state::state_disk::take_host_certificate(&self.key_file) {
            Ok(Some(certificate)) => certificate,
            Ok(None) => return,
            Err(error) => return log::warn!("cannot renew the SSH host certificate: {error}"),
        };
        match ssh::host::renew(&self.root, &certificate) {
            Ok(()) => {
                self.timeline
                    .event("ssh", "the host certificate is renewed");
                ssh::host::reload_sshd(&self.stop);
            }
            Err(error) => log::warn!("cannot renew the SSH host certificate: {error}"),
        }
    }
}

/// Waits for the operator's init, until a join wins the race or the node is stopped.
fn serve_init(
    listener: TcpListener,
    issuer: Arc<dyn Issuer>,
    entrant: Entrant,
    node: &Arc<NodeParts>,
) -> Result<SetupOutcome, Error> {
    let Some(guard) = secret_guard(node, entrant.stop()) else {
        return Ok(SetupOutcome::None);
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

/// Returns the guard with the hash from the metadata service. Asks the service until it answers;
/// `None` when stopped.
fn secret_guard(node: &NodeParts, stop: &Stop) -> Option<SecretGuard> {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    while !stop.is_stopped() {
        let what = "the metadata service to give the init secret's hash";
        let hash = node
            .timeline
            .waiting_for(what, || node.metadata.init_secret_hash());
        let why = match hash.map(|hash| SecretGuard::new(&hash)) {
            Ok(Ok(guard)) => return Some(guard),
            Ok(Err(bad)) => bad.to_string(),
            Err(error) => error.to_string(),
        };
        node.timeline
            .event("waiting", format_args!("for the init secret's hash: {why}"));
        stop.wait(backoff.pause());
    }
    None
}

fn reset(disk: &Path, timeline: &Timeline) -> Result<RunOutcome, Error> {
    let what = format!("the disk {} to be marked for reset", disk.display());
    timeline.waiting_for(what, || {
        let _lock = HeaderLock::take(disk).map_err(Error::Locked)?;
        state::state_disk::mark_for_reset(disk).map_err(Error::Disk)
    })?;
    timeline.event("reset", "the next boot formats the state disk");
    Ok(RunOutcome::Reset)
}

/// Why a run failed.
#[derive(Debug)]
pub enum Error {
    /// PCR 15 cannot be read.
    Tpm(tpm::Error),
    /// The setting `require=strong` would accept a program without a TPM.
    Unpinned(trust::platform::Error),
    /// Another program has measured into PCR 15: which one, and what to do.
    ForeignWriter(String),
    /// The state disk is missing, or cannot be used.
    Disk(state::state_disk::Error),
    /// The lock of the state disk's header was not taken.
    Locked(state::header_lock::Error),
    /// The InitServer cannot listen on this address.
    Listen(SocketAddr, io::Error),
    /// A thread cannot be started.
    Thread(io::Error),
    /// The kubelet of a member cannot be started.
    Kubelet(child_process::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Tpm(error) => write!(f, "cannot read PCR 15: {error}"),
            Error::Unpinned(error) => error.fmt(f),
            Error::ForeignWriter(text) => f.write_str(text),
            Error::Locked(error) => error.fmt(f),
            Error::Disk(error) => error.fmt(f),
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            Error::Thread(error) => write!(f, "cannot start a thread: {error}"),
            Error::Kubelet(error) => write!(f, "cannot start the kubelet: {error}"),
        }
    }
}

impl std::error::Error for Error {}
