//! The state disk's life: from whatever a boot finds on it to a mounted file system.
//!
//! ```text
//!              blank, or ours without a cluster                    ours, initialised
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
//! Every change is ordered so that the next boot finishes, starts over, or unlocks, whenever the power goes:
//!
//! | power lost …                                    | on the disk                           | the next boot             |
//! |-------------------------------------------------|---------------------------------------|---------------------------|
//! | while formatting                                | blank, or ours without a token        | formats                   |
//! | after formatting, until the node joins or inits | ours, token `false`                   | formats                   |
//! | after PCR 15 was extended                       | ours, token `false`; PCR 15 forgets   | formats                   |
//! | while the node state is written                 | ours, token `false`                   | formats                   |
//! | while the new keyslot's area is written         | ours, token `false`, old slot whole   | formats                   |
//! | in the header write that commits, first copy    | the second copy: token `false`        | formats                   |
//! | in that write, second copy                      | the first copy: token `true`, new key | unlocks                   |
//! | while the old keyslot's area is wiped           | token `true`, new key                 | unlocks                   |
//! | after the commit, before the cluster's set-up   | token `true`, not complete            | unlocks, resets, formats  |
//! |   has ended                                     |                                       |                           |
//! | while marking for reset                         | either token                          | as the token says         |
//! | while unlocking                                 | unchanged but for ext4's journal      | unlocks                   |
//!
//! Disks that the old system left in one of its dead ends come out of them:
//!
//! | the old system lost power …                    | on the disk                            | the next boot of ours     |
//! |------------------------------------------------|----------------------------------------|---------------------------|
//! | before its format added the keyslot            | header without keyslot and token       | formats                   |
//! | while its format wiped the disk with zeros     | keyslot, no token; journal as made,    | marks it `false`, formats |
//! |                                                | the disk's end still zeros             |                           |
//! | in the same wipe of a disk that was not zeros, | the same, but the disk's end is        | refuses, and names the    |
//! |   or after the wipe, before the token          | written                                |   command that marks it   |
//! | before the node state was durable              | token `true`, no node state            | opens it while migrating; |
//! |                                                |                                        | `run` marks it `false`    |
//!
//! A volume of the old system's storage driver has a keyslot and no token, too. It is told by its journal, through which all is
//! written that is not a format's wipe, and by its end, which every program clears that makes a file system (the module
//! `disk::device_mapper::journal`). What cannot be told is refused, and never formatted.
//!
//! No kernel file system touches a disk that somebody else may have made before PCR 15 is set. What is measured, the cluster's
//! ID, comes from the ticket (or the operator) and from the header, where the salt is under a MAC of the measurement secret
//! ([`ClusterToken`]); while a cluster is migrating, from the ticket alone. On a first boot PCR 15 is zero, and the file system
//! is our own: made a moment ago, under a random key that has never left this machine's memory, on sectors each of which is
//! authenticated under that key with its place. The host can withhold them or bring back older ones of this same boot, but has
//! none of its own that the kernel would take. A disk that claims to be uninitialised gets there too: it is formatted, and
//! nothing that it held is read.
//!
//! Files: [`waiting`] is where keys are tried, [`rejoin`] and [`recovery`] bring them. What is done to the disk is in the crate
//! `disk`.

pub mod recovery;
pub mod rejoin;
pub mod waiting;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use attest::attestation::Issuer;
use attest::tpm;
use base::crypto::{KEY_LEN, Secret, cluster_id};
use base::stop::Stop;
use base::timeline::Timeline;
use cloud::Metadata;
use disk::device_mapper::{self, FirstUse, Mapping};
use disk::luks::{self, ClusterToken, VOLUME_KEY_LEN};
use disk::state_disk::{
    self, Disk, Handover, MAPPING, NodeState, device, filesystem, handover, node_state,
};
use node::quotes;
use node::tickets::Asking;
use recovery::RecoveryServer;
use rejoin::Rejoin;
use waiting::{Opened, Waiting};

/// What unlocking needs to know.
pub struct Unlock {
    /// The disk; found by its serial number when absent.
    pub disk: Option<PathBuf>,
    /// Where to mount it.
    pub root: PathBuf,
    /// Where the passphrase of a new disk is left.
    pub key_file: PathBuf,
    /// The program that makes ext4.
    pub mke2fs: PathBuf,
    /// Where the recovery server listens while a key is missing.
    pub recovery: SocketAddr,
    /// Who this node and its peers are.
    pub metadata: Arc<Metadata>,
    /// Proves what this machine runs.
    pub issuer: Arc<dyn Issuer>,
    /// The TPM that the cluster ID is measured into.
    pub tpm: tpm::Location,
    /// Ends every wait.
    pub stop: Stop,
    /// Tells the console.
    pub timeline: Timeline,
}

impl Unlock {
    /// Turns whatever is on the state disk into a mounted file system; the module's picture is this function.
    pub fn run(self) -> Result<(), Error> {
        let device = device::find(self.disk.as_deref(), &self.stop, &self.timeline)?;
        // what is mounted stays as it is; what a killed unlock left goes
        if unmap()? {
            self.timeline
                .event("closed", "a mapping that a killed unlock left behind");
        }
        let disk = state_disk::classify(&mut handover::open(&device, false)?, &device)?;
        self.timeline.event(
            "disk",
            format_args!("{}: {}", device.display(), describe(&disk)),
        );
        match disk {
            Disk::New(_) => self.first_boot(&device),
            Disk::CutOff(header) => {
                self.mark(&device, *header)?;
                self.first_boot(&device)
            }
            Disk::Initialised(header) => self.reboot(&device, *header),
        }
    }

    /// Finishes the old system's format: with the mark it is a disk that any boot formats, wherever the power goes.
    fn mark(&self, device: &Path, mut header: luks::Header) -> Result<(), Error> {
        let mut disk = handover::open_exclusive(device)?;
        header
            .mark_for_reset(&mut disk)
            .map_err(|error| Error::Disk(state_disk::Error::Luks(device.into(), error)))
    }

    fn first_boot(&self, device: &Path) -> Result<(), Error> {
        self.go_on("looking at the disk")?;
        let passphrase = Secret::random(KEY_LEN);
        let volume_key = Secret::random(VOLUME_KEY_LEN);
        let header = luks::format(
            &mut handover::open_exclusive(device)?,
            &volume_key,
            &passphrase,
        )
        .map_err(|error| state_disk::Error::Luks(device.into(), error))?;
        self.timeline.event(
            "formatted",
            format_args!("LUKS2 with integrity, {}", header.uuid()),
        );
        self.go_on("formatting")?;
        let mapped = self.map(device, &header, &volume_key, FirstUse::Create)?;
        self.go_on("mapping the new disk")?;
        filesystem::create(&mapped.0, &self.mke2fs).map_err(state_disk::Error::Filesystem)?;
        self.timeline.event("file-system", "ext4");
        self.go_on("making the file system")?;
        Handover {
            device: device.into(),
            key_file: self.key_file.clone(),
        }
        .leave(&passphrase, &header)?;
        self.mount(mapped)
    }

    fn reboot(&self, device: &Path, mut header: luks::Header) -> Result<(), Error> {
        let opened = self.wait_for_key(device, &header)?;
        // an older copy says what the disk was before, and must not be all that is left one day
        header
            .repair(&mut handover::open(device, true)?)
            .map_err(|error| state_disk::Error::Luks(device.into(), error))?;
        let mapped = self.map(device, &header, &opened.volume_key, FirstUse::Existing)?;
        // before the kernel's file system, or anything else, reads what is on it
        measure(
            &self.tpm,
            &cluster_id(&opened.measurement_secret, &opened.measurement_salt),
        )?;
        self.timeline.event("measured", "cluster ID into PCR 15");
        self.mount(mapped)?;
        let is_migrating = header
            .cluster_token()
            .map_err(|error| state_disk::Error::Luks(device.into(), error))?
            .is_none();
        if is_migrating {
            self.migrate(device, &mut header, &opened)?;
        }
        self.leave_host_certificate(&opened.host_certificate);
        Ok(())
    }

    /// The disk of a node from before says from now on of which cluster it is, if what the node keeps about itself agrees.
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
                self.timeline.event(
                    "migrated",
                    "the disk's header says now of which cluster it is",
                );
                Ok(())
            }
            // a node that never worked: the booted system starts over
            Err(node_state::Error::Missing(path)) => {
                log::warn!(
                    "there is no {}: the disk's header does not get to say of which cluster it is",
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

    /// The booted system puts it where sshd looks. Emergency SSH is no reason for a node not to boot.
    fn leave_host_certificate(&self, certificate: &[u8]) {
        if let Err(error) = handover::leave_host_certificate(&self.key_file, certificate) {
            log::warn!("the SSH host certificate is not renewed: {error}");
        }
    }

    /// Rejoin and recovery, side by side, until one of them has brought a key that opens the disk.
    fn wait_for_key(&self, device: &Path, header: &luks::Header) -> Result<Opened, Error> {
        let over = Stop::new();
        let waiting = Arc::new(Waiting::new(
            header.clone(),
            device,
            over.clone(),
            self.timeline,
        ));
        let recovery = RecoveryServer::start(self.recovery, self.issuer.clone(), waiting.clone());
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
            timeline,
        });
        let rejoin = Asking::start(self.metadata.clone(), rejoin);
        if let Err(error) = &rejoin {
            waiting.note("rejoin", format!("cannot start: {error}"));
        }
        quotes::announce_key(&self.timeline, self.issuer.as_ref());
        let opened = waiting.wait(&self.stop);
        over.stop();
        drop((recovery, rejoin));
        opened.ok_or(Error::Disk(state_disk::Error::Stopped(
            "waiting for the disk's key",
        )))
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
            luks_uuid: &geometry.uuid,
            device,
            data_offset: geometry.data_offset,
            sector_size: geometry.sector_size,
            cipher: &geometry.cipher,
            integrity: geometry.integrity.as_deref(),
            key: volume_key,
            digest: geometry.digest_id,
        };
        let mapped = Mapped(
            device_mapper::open(&mapping, first_use).map_err(state_disk::Error::DeviceMapper)?,
        );
        self.timeline.event("mapped", mapped.0.display());
        Ok(mapped)
    }

    fn mount(&self, mapped: Mapped) -> Result<(), Error> {
        filesystem::mount(&mapped.0, &self.root, false).map_err(state_disk::Error::Filesystem)?;
        mapped.keep();
        self.timeline.event("mounted", self.root.display());
        Ok(())
    }

    /// Between two steps: whether a signal ends it here.
    fn go_on(&self, done: &'static str) -> Result<(), Error> {
        if self.stop.is_stopped() {
            Err(Error::Disk(state_disk::Error::Stopped(done)))
        } else {
            Ok(())
        }
    }
}

/// The mapping's block device. Dropped without [`Mapped::keep`], it is unmapped again.
struct Mapped(PathBuf);

impl Mapped {
    /// It is mounted now.
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Err(error) = unmap() {
            log::warn!("the disk stays mapped: {error}");
        }
    }
}

/// Removes the mapping; whether there was one.
///
/// # Errors
/// When it is in use: then the disk is mounted, and nothing may be done to it.
fn unmap() -> Result<bool, Error> {
    match device_mapper::close(MAPPING) {
        Ok(()) => Ok(true),
        Err(device_mapper::Error::NotActive { .. }) => Ok(false),
        // the kernel's device-mapper is not even loaded, whether its node is there or not
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

fn describe(disk: &Disk) -> String {
    match disk {
        Disk::New(why) => format!("{why}: formatting it"),
        Disk::CutOff(_) => {
            "the old system's format of it was cut off, nothing was written since: formatting it"
                .into()
        }
        Disk::Initialised(header) => format!("state disk {} of a cluster's node", header.uuid()),
    }
}

fn measure(location: &tpm::Location, cluster: &[u8; 32]) -> Result<(), Error> {
    tpm::Tpm::open(location)
        .and_then(|mut tpm| tpm.measure_cluster_id(cluster))
        .map_err(Error::Tpm)
}

/// Why there is no mounted state disk. `Display` is for the console of a machine that cannot boot.
#[derive(Debug)]
pub enum Error {
    /// The disk.
    Disk(state_disk::Error),
    /// A disk without a word of its cluster, in which another one is written.
    NotOfCluster(PathBuf),
    /// Measuring the cluster ID.
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
                "{}: the node state in it has another measurement salt than the cluster whose key opened it: this is \
                 no state disk of that cluster",
                device.display()
            ),
            Error::Tpm(error) => write!(f, "measuring the cluster ID: {error}"),
        }
    }
}

impl std::error::Error for Error {}
