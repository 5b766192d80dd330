//! Unlocks the state disk: turns whatever a boot finds on the disk into a mounted file system.
//!
//! ```text
//!              blank, or ours without a cluster                    ours, initialized
//!                           │                                             │
//!                        format                           rejoin ║ recovery: a key that opens it
//!                           │                                             │
//!                          map                                           map
//!                           │                                             │
//!                   make the file system                   cluster ID ──► PCR 15
//!                           │                                             │
//!                         mount                                         mount
//!                           │
//!          (booted system) commit: permanent key
//! ```
//!
//! The order of the changes guarantees that after a power failure at any moment the next boot
//! formats the disk or unlocks it:
//!
//! | power fails …                                   | on the disk                           | the next boot             |
//! |-------------------------------------------------|---------------------------------------|---------------------------|
//! | while formatting                                | blank, or ours without a token        | formats                   |
//! | after formatting, until the node joins or inits | ours, token `false`                   | formats                   |
//! | after PCR 15 was extended                       | ours, token `false`; PCR 15 is reset  | formats                   |
//! | while the node state is written                 | ours, token `false`                   | formats                   |
//! | while the new keyslot's area is written         | ours, token `false`, old slot intact  | formats                   |
//! | in the header write that commits, first copy    | the second copy: token `false`        | formats                   |
//! | in that write, second copy                      | the first copy: token `true`, new key | unlocks                   |
//! | while the old keyslot's area is wiped           | token `true`, new key                 | unlocks                   |
//! | after the commit, before the cluster set-up     | token `true`, not complete            | unlocks, resets, formats  |
//! |   is complete                                   |                                       |                           |
//! | while marking for reset                         | either token                          | as the token says         |
//! | while unlocking                                 | unchanged except the ext4 journal     | unlocks                   |
//!
//! A power failure could leave a Constellation disk in a state from which Constellation could not
//! boot. The next boot with Firstlight repairs it:
//!
//! | power failed in Constellation …                | on the disk                            | the next boot of ours     |
//! |------------------------------------------------|----------------------------------------|---------------------------|
//! | before its format added the keyslot            | header without keyslot and token       | formats                   |
//! | while its format wiped the disk with zeros     | keyslot, no token; journal as made,    | marks it `false`, formats |
//! |                                                | the disk's end still zeros             |                           |
//! | in the same wipe of a disk that was not zeros, | the same, but the disk's end is        | refuses, and names the    |
//! |   or after the wipe, before the token          | written                                |   command that marks it   |
//! | before the node state was durable              | token `true`, no node state            | opens it while migrating; |
//! |                                                |                                        | `run` marks it `false`    |
//!
//! A volume of Constellation's storage driver also has a keyslot and no token. Two places on the
//! disk distinguish it from an unfinished format: its dm-integrity journal, which every write uses
//! except the wipe of a format, and the end of the disk, which every program that makes a file
//! system clears (module `disk::device_mapper::journal`). A disk that cannot be classified is
//! refused and never formatted.
//!
//! If the host may have written the disk, the kernel mounts it only after PCR 15 is extended with
//! the cluster ID. The cluster ID is derived from the measurement secret, which comes from the
//! ticket or the operator, and from the salt in the header, which has a MAC under the measurement
//! secret ([`ClusterToken`]). During a migration, the ticket contains the salt, too. On a first
//! boot PCR 15 is zero, and the file system is new: this boot made it under a random key that has
//! never left the memory of this machine, and each sector is authenticated with its position under
//! that key. The host can withhold sectors or replay older sectors of the same boot, but it cannot
//! make sectors that the kernel accepts. A disk that claims to be uninitialized is formatted in the
//! same way, and nothing of its old content is read.
//!
//! Files: [`waiting`] tries keys, [`rejoin`] and [`recovery`] obtain them; [`peers`] lists the
//! hosts that rejoin asks. [`network`] explains why no host can be reached, [`initrd`] has the
//! settings of an initrd. The operations on the disk are in the crate `disk`.

pub mod initrd;
pub mod network;
pub mod options;
pub mod peers;
pub mod recovery;
pub mod rejoin;
pub mod waiting;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use attest::Issuer;
use base::boot::timeline::Timeline;
use base::crypto::{KEY_LEN, Secret, cluster_id};
use base::machines::Cloud;
use base::stop::Stop;
use disk::device_mapper::{self, FirstUse, Mapping};
use disk::luks::{self, ClusterToken, VOLUME_KEY_LEN};
use disk::state_disk::{
    self, DiskKind, MAPPING, NodeState, device, filesystem, handover, node_state,
};
use node::service_trust::TrustSettings;
use node::{quotes, ticket_client};
use peers::PeerSources;
use recovery::RecoveryServer;
use rejoin::Rejoin;
use waiting::{Opened, Waiting};

/// The inputs of unlocking.
pub struct Unlock {
    /// The disk; if `None`, the program finds it by its serial number.
    pub disk: Option<PathBuf>,
    /// The mount point.
    pub root: PathBuf,
    /// The file that hands the passphrase of a new disk to the booted system.
    pub key_file: PathBuf,
    /// The program that makes the ext4 file system.
    pub mke2fs: PathBuf,
    /// The address on which the recovery server listens while the key is missing.
    pub recovery: SocketAddr,
    /// The cloud of this machine.
    pub cloud: Cloud,
    /// How long to wait for the key; `None`: without end.
    pub timeout: Option<Duration>,
    /// The sources of join services other than the disk's header.
    pub sources: PeerSources,
    /// Attests this machine.
    pub issuer: Arc<dyn Issuer>,
    /// The settings about join services.
    pub demands: TrustSettings,
    /// The TPM whose PCR 15 is extended with the cluster ID.
    pub tpm: tpm::Location,
    /// Ends every wait.
    pub stop: Stop,
    /// Receives the events for the console.
    pub timeline: Timeline,
}

impl Unlock {
    /// Turns whatever is on the state disk into a mounted file system. The diagram above shows this
    /// function.
    pub fn run(self) -> Result<(), Error> {
        prepare_mapping();
        let device = device::find(self.disk.as_deref(), self.cloud, &self.stop, &self.timeline)?;
        // removes a mapping that a killed `unlock` left behind; it is an error if that mapping is
        // mounted
        let what = "device-mapper to remove an old mapping";
        if self.timeline.waiting_for(what, unmap)? {
            self.timeline
                .event("closed", "the disk mapping of an unlock that was killed");
        }
        let disk = self.waiting_for_disk(&device, "to be read", || {
            state_disk::classify(&mut handover::open(&device, false)?, &device)
        })?;
        self.timeline.event(
            "disk",
            format_args!("{}: {}", device.display(), describe(&disk)),
        );
        match disk {
            DiskKind::New(_) => self.first_boot(&device),
            DiskKind::Interrupted(header) => {
                self.mark(&device, *header)?;
                self.first_boot(&device)
            }
            DiskKind::Initialized(header) => self.reboot(&device, *header),
        }
    }

    /// Marks the disk of an unfinished format by Constellation as uninitialized. From now on every
    /// boot formats it, even if the power fails now.
    fn mark(&self, device: &Path, mut header: luks::Header) -> Result<(), Error> {
        self.waiting_for_disk(device, "to be marked for reset", || {
            let mut disk = handover::open_exclusive(device)?;
            header
                .mark_for_reset(&mut disk)
                .map_err(|error| Error::Disk(state_disk::Error::Luks(device.into(), error)))
        })
    }

    fn first_boot(&self, device: &Path) -> Result<(), Error> {
        self.check_stop("looking at the disk")?;
        let passphrase = Secret::random(KEY_LEN);
        let volume_key = Secret::random(VOLUME_KEY_LEN);
        let header = self.waiting_for_disk(device, "to be formatted", || {
            let mut disk = handover::open_exclusive(device)?;
            luks::format(&mut disk, &volume_key, &passphrase)
                .map_err(|error| state_disk::Error::Luks(device.into(), error))
        })?;
        self.timeline.event(
            "formatted",
            format_args!("LUKS2 with integrity, {}", header.uuid()),
        );
        self.check_stop("formatting")?;
        let mapped = self.map(device, &header, &volume_key, FirstUse::Create)?;
        self.check_stop("mapping the new disk")?;
        let what = format!("a new file system on {}", mapped.0.display());
        self.timeline
            .waiting_for(what, || {
                filesystem::create(&mapped.0, &self.mke2fs, &self.stop)
            })
            .map_err(state_disk::Error::Filesystem)?;
        self.timeline.event("file-system", "ext4");
        self.check_stop("making the file system")?;
        handover::leave(&self.key_file, &passphrase, &header)?;
        self.mount(mapped)
    }

    fn reboot(&self, device: &Path, mut header: luks::Header) -> Result<(), Error> {
        self.check_cluster_register()?;
        let opened = self.wait_for_key(device, &header)?;
        // an outdated header copy must not become the only valid one
        let repaired = self.waiting_for_disk(device, "to be repaired", || {
            Ok::<_, state_disk::Error>(header.repair(&mut handover::open(device, true)?))
        })?;
        if let Err(error) = repaired {
            log::warn!(
                "cannot repair one copy of the disk's header (the boot uses the other one): {error}"
            );
        }
        let mapped = self.map(device, &header, &opened.volume_key, FirstUse::Existing)?;
        // PCR 15 is extended before the kernel or any program reads the content of the disk
        let cluster = cluster_id(&opened.measurement_secret, &opened.measurement_salt);
        let what = format!("{:#} to extend PCR 15", self.tpm);
        self.timeline
            .waiting_for(what, || measure(&self.tpm, &cluster))?;
        self.timeline.event("measured", "cluster ID into PCR 15");
        self.mount(mapped)?;
        let is_migrating = header
            .cluster_token()
            .map_err(|error| state_disk::Error::Luks(device.into(), error))?
            .is_none();
        if is_migrating {
            self.waiting_for_disk(device, "to be migrated", || {
                self.migrate(device, &mut header, &opened)
            })?;
        }
        self.leave_host_certificate(&opened.host_certificate);
        Ok(())
    }

    /// Writes the cluster token into the header of a Constellation disk, if the salt in the node
    /// state matches. Unmounts and fails if it does not.
    fn migrate(
        &self,
        device: &Path,
        header: &mut luks::Header,
        opened: &Opened,
    ) -> Result<(), Error> {
        match NodeState::read(&self.root) {
            Ok(state) if state.measurement_salt == opened.measurement_salt => {
                let token = ClusterToken::new(
                    &header.uuid(),
                    &opened.measurement_secret,
                    opened.measurement_salt,
                );
                header
                    .add_cluster_token(&mut handover::open(device, true)?, &token)
                    .map_err(|error| state_disk::Error::Luks(device.into(), error))?;
                self.timeline
                    .event("migrated", "the disk's header now names the cluster");
                Ok(())
            }
            // this node never became a member: the booted system resets it and starts over
            Err(node_state::Error::Missing(path)) => {
                log::warn!(
                    "cannot migrate the disk's header: {} is missing",
                    path.display()
                );
                Ok(())
            }
            read => {
                filesystem::unmount(&self.root).map_err(state_disk::Error::Filesystem)?;
                unmap()?;
                Err(read.map_or_else(
                    |error| Error::Disk(state_disk::Error::NodeState(error)),
                    |_| Error::NotOfCluster(device.into()),
                ))
            }
        }
    }

    /// Leaves the SSH host certificate for the booted system, which installs it for sshd. An error
    /// does not fail the boot, because SSH is for emergencies only.
    fn leave_host_certificate(&self, certificate: &[u8]) {
        if let Err(error) = handover::leave_host_certificate(&self.key_file, certificate) {
            log::warn!("cannot renew the SSH host certificate: {error}");
        }
    }

    /// Returns an error if systemd has measured into PCR 15: no cluster gives such a machine its
    /// key.
    fn check_cluster_register(&self) -> Result<(), Error> {
        let what = format!("{:#} to read PCR 15", self.tpm);
        let writer = self
            .timeline
            .waiting_for(what, || attest::foreign_writer(&self.tpm));
        writer.map_or(Ok(()), |writer| Err(Error::ForeignWriter(writer)))
    }

    /// Runs rejoin and recovery at the same time until one of them offers a key that opens the
    /// disk.
    fn wait_for_key(&self, device: &Path, header: &luks::Header) -> Result<Opened, Error> {
        let finished = Stop::new();
        let waiting = Arc::new(Waiting::new(
            header.clone(),
            device,
            finished.clone(),
            self.timeline,
        ));
        let recovery = RecoveryServer::start(
            self.recovery,
            self.issuer.clone(),
            self.demands.cluster_register(),
            waiting.clone(),
            self.timeline,
        );
        if let Err(error) = &recovery {
            waiting.note(
                "recovery server",
                format!("cannot listen on {}: {error}", self.recovery),
            );
        }
        let (issuer, timeline) = (self.issuer.clone(), self.timeline);
        let rejoin = Arc::new(Rejoin {
            waiting: waiting.clone(),
            issuer,
            demands: self.demands,
            timeline,
        });
        let rejoin = ticket_client::start(self.sources.with(header), rejoin);
        if let Err(error) = &rejoin {
            waiting.note("rejoin", format!("cannot start: {error}"));
        }
        network::watch(finished.clone(), self.timeline);
        quotes::announce_key(&self.timeline, self.issuer.as_ref(), &self.tpm);
        let opened = waiting.wait(&self.stop, self.timeout);
        finished.stop();
        drop((recovery, rejoin));
        match opened {
            Some(opened) => Ok(opened),
            None if self.stop.is_stopped() => Err(Error::Disk(state_disk::Error::Stopped(
                "waiting for the disk's key",
            ))),
            None => Err(Error::NoKey(waiting.summary())),
        }
    }

    fn map(
        &self,
        device: &Path,
        header: &luks::Header,
        volume_key: &Secret,
        first_use: FirstUse,
    ) -> Result<Mapped, Error> {
        let geometry = header
            .geometry()
            .map_err(|error| state_disk::Error::Luks(device.into(), error))?;
        let mapping = Mapping {
            name: MAPPING,
            geometry: &geometry,
            device,
            key: volume_key,
        };
        let what = format!("device-mapper to map the disk {}", device.display());
        let mapped = self
            .timeline
            .waiting_for(what, || device_mapper::open(&mapping, first_use));
        let mapped = Mapped(mapped.map_err(state_disk::Error::DeviceMapper)?);
        self.timeline.event("mapped", mapped.0.display());
        Ok(mapped)
    }

    fn mount(&self, mapped: Mapped) -> Result<(), Error> {
        let what = format!("the kernel to mount {}", mapped.0.display());
        self.timeline
            .waiting_for(what, || filesystem::mount(&mapped.0, &self.root, false))
            .map_err(state_disk::Error::Filesystem)?;
        mapped.keep();
        self.timeline.event("mounted", self.root.display());
        Ok(())
    }

    /// Does `work`, and after some time reports that it waits for the disk.
    fn waiting_for_disk<T>(&self, device: &Path, doing: &str, work: impl FnOnce() -> T) -> T {
        let what = format!("the disk {} {doing}", device.display());
        self.timeline.waiting_for(what, work)
    }

    /// Returns an error if a signal has stopped the program; `done` names the step that has just
    /// ended.
    fn check_stop(&self, done: &'static str) -> Result<(), Error> {
        if self.stop.is_stopped() {
            Err(Error::Disk(state_disk::Error::Stopped(done)))
        } else {
            Ok(())
        }
    }
}

/// The block device of the mapping. The mapping is removed on drop, unless [`Mapped::keep`] was
/// called.
struct Mapped(PathBuf);

impl Mapped {
    /// Keeps the mapping, because it is mounted now.
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Err(error) = unmap() {
            log::warn!("cannot unmap the disk: {error}");
        }
    }
}

/// Makes the kernel prepare the mapping while the program waits for the disk and its key. If this
/// fails, opening the mapping only takes longer.
fn prepare_mapping() {
    let prepare = || match device_mapper::prepare() {
        Ok(()) => log::debug!("the kernel has loaded the disk's cipher"),
        Err(error) => log::debug!("cannot load the disk's cipher in advance: {error}"),
    };
    let thread = thread::Builder::new().name("cipher".into());
    if let Err(error) = thread.spawn(prepare) {
        log::debug!("cannot load the disk's cipher in advance: {error}");
    }
}

/// Removes the mapping and returns whether it existed.
///
/// # Errors
/// If the mapping is in use: the disk is mounted, and nothing may change it.
fn unmap() -> Result<bool, Error> {
    match device_mapper::close(MAPPING) {
        Ok(()) => Ok(true),
        Err(device_mapper::Error::NotActive(_)) => Ok(false),
        // device-mapper is not loaded; its device node may exist nevertheless
        Err(device_mapper::Error::Control(error))
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)
            ) =>
        {
            Ok(false)
        }
        Err(error) => Err(Error::Disk(state_disk::Error::DeviceMapper(error))),
    }
}

fn describe(disk: &DiskKind) -> String {
    match disk {
        DiskKind::New(why) => format!("{why}: formatting it"),
        DiskKind::Interrupted(_) => {
            "a format by Constellation was interrupted, and no data was written since: formatting it"
                .into()
        }
        DiskKind::Initialized(header) => format!("state disk {} of a cluster's node", header.uuid()),
    }
}

fn measure(location: &tpm::Location, cluster: &[u8; 32]) -> Result<(), Error> {
    attest::mark(location, cluster).map_err(|error| match attest::foreign_writer(location) {
        Some(writer) => Error::ForeignWriter(writer),
        None => Error::Tpm(error),
    })
}

/// Why the state disk was not mounted. `Display` is for the console of a machine that cannot boot.
#[derive(Debug)]
pub enum Error {
    /// The disk is missing or unusable, or its content is not ours.
    Disk(state_disk::Error),
    /// The header names no cluster, and the node state on the disk belongs to another cluster.
    NotOfCluster(PathBuf),
    /// No source sent the key in time: the last report of each source.
    NoKey(String),
    /// Another program has measured into PCR 15: which one, and what to do.
    ForeignWriter(String),
    /// The TPM did not extend PCR 15 with the cluster ID.
    Tpm(tpm::Error),
}

impl From<state_disk::Error> for Error {
    fn from(error: state_disk::Error) -> Self {
        Error::Disk(error)
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Disk(error) => error.fmt(f),
            Error::NotOfCluster(device) => write!(
                f,
                "{}: its node state has another measurement salt than the cluster whose key opened the disk: the disk belongs to another cluster",
                device.display()
            ),
            Error::NoKey(summary) => write!(f, "no key for the state disk in time: {summary}"),
            Error::ForeignWriter(writer) => f.write_str(writer),
            Error::Tpm(error) => write!(f, "cannot extend PCR 15 with the cluster ID: {error}"),
        }
    }
}

impl std::error::Error for Error {}
