//! The state disk in the booted system: takes over a new disk from the initramfs, commits it, and
//! changes what its header says. The crate `disk` has what the initramfs needs too.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use crate::state::peers_token;
use base::crypto::Secret;
use base::file;
use disk::luks::{self, ClusterToken, Integrity, Peers, Probe, probe};
use disk::state_disk;
use disk::state_disk::handover::{HOST_CERTIFICATE, describe, header_file, open};
use disk::state_disk::node_state::{self, NodeState};

/// Maximum number of bytes that are read of a passphrase. A passphrase has 32 bytes.
const MAX_KEY: u64 = 512;
/// Maximum number of bytes that are read of that file: one line with a UUID, a space, and SHA-256
/// in hexadecimal.
const MAX_LINE: u64 = 256;
/// Maximum number of bytes of an SSH host certificate; real ones are much smaller.
const MAX_CERTIFICATE: u64 = 64 << 10;
/// Exists if the node's cluster set-up was completed.
const COMPLETE_MARK: &str = "firstlight/complete";
/// Exists if the node's cluster set-up has begun.
const BEGUN_MARK: &str = "firstlight/begun";
/// Written by kubeadm. On a disk that Constellation set up it is the only sign of a completed
/// set-up.
const KUBELET_CONFIG: &str = "kubernetes/kubelet.conf";

/// Why the booted system cannot use the state disk.
#[derive(Debug)]
pub enum Error {
    /// The disk cannot be read or written, or is not usable.
    Disk(state_disk::Error),
    /// The header is not the one that the initramfs wrote. Both are described by UUID and hash.
    Exchanged {
        /// The disk.
        device: PathBuf,
        /// The header that the initramfs wrote.
        expected: String,
        /// The header on the disk.
        got: String,
    },
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Disk(error) => {
                error.fmt(f)?;
                if is_damage(error) {
                    f.write_str(DAMAGE)
                } else {
                    Ok(())
                }
            }
            Error::Exchanged {
                device,
                expected,
                got,
            } => write!(
                f,
                "{}: this is not the LUKS2 header that the initramfs wrote: expected {expected}, got {got}. The host or \
                 another party replaced it: reboot the machine",
                device.display()
            ),
        }
    }
}

impl std::error::Error for Error {}

// errno-base.h and errno.h of Linux
const EIO: i32 = 5;
const EILSEQ: i32 = 84;
/// What Linux does not say of an I/O error on a disk with integrity.
const DAMAGE: &str = ": if the kernel log (dmesg) has INTEGRITY AEAD ERROR, the host or another party changed or lost the content of the disk. \
    If the host cannot bring it back, remove this node from the cluster, and let it join with a blank disk";

/// Returns whether the content of the disk may have failed its integrity check: dm-crypt gives EILSEQ, file systems EIO.
fn is_damage(error: &state_disk::Error) -> bool {
    match error {
        state_disk::Error::NodeState(node_state::Error::Io(_, error)) => {
            matches!(error.raw_os_error(), Some(EIO | EILSEQ))
        }
        _ => false,
    }
}

impl From<state_disk::Error> for Error {
    fn from(error: state_disk::Error) -> Error {
        Error::Disk(error)
    }
}

fn io_error(doing: &'static str, path: PathBuf, error: io::Error) -> Error {
    Error::Disk(state_disk::Error::Io(doing, path, error))
}

fn luks_error(path: &Path, error: luks::Error) -> Error {
    Error::Disk(state_disk::Error::Luks(path.into(), error))
}

fn of_node_state(path: &Path, error: io::Error) -> Error {
    let error = node_state::Error::Io(path.into(), error);
    Error::Disk(state_disk::Error::NodeState(error))
}

/// The device of a new disk and the file with its passphrase, as the initramfs left them.
#[derive(Debug, Clone)]
pub struct Handover {
    /// The disk below the mapping.
    pub device: PathBuf,
    /// The file with the passphrase.
    pub key_file: PathBuf,
}

/// Reads the passphrase of this boot.
fn passphrase(handover: &Handover) -> Result<Secret, Error> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_KEY as usize));
    File::open(&handover.key_file)
        .and_then(|file| file.take(MAX_KEY).read_to_end(&mut bytes))
        .map_err(|error| {
            io_error(
                "read the passphrase of this boot from",
                handover.key_file.clone(),
                error,
            )
        })?;
    Ok(Secret::new(bytes.to_vec()))
}

/// Fails unless `header` is the header that the initramfs wrote.
fn check(handover: &Handover, header: &luks::Header) -> Result<(), Error> {
    let path = header_file(&handover.key_file);
    let mut expected = String::new();
    File::open(&path)
        .and_then(|file| file.take(MAX_LINE).read_to_string(&mut expected))
        .map_err(|error| {
            io_error(
                "read the description of the disk's header from",
                path,
                error,
            )
        })?;
    let got = describe(header);
    if got == expected {
        return Ok(());
    }
    let line = |text: &str| text.trim_end().escape_default().to_string();
    Err(Error::Exchanged {
        device: handover.device.clone(),
        expected: line(&expected),
        got: line(&got),
    })
}

/// Overwrites the passphrase, whose memory the kernel does not wipe, and removes the files, which
/// are not needed any more.
fn remove_files(handover: &Handover) {
    let overwritten = File::options().write(true).open(&handover.key_file);
    let overwritten = overwritten.and_then(|mut file| {
        let len = file.metadata()?.len().min(MAX_KEY);
        file.write_all(&vec![0; len as usize])
    });
    if let Err(error) = overwritten {
        log::warn!(
            "cannot overwrite the key file {}: {error}",
            handover.key_file.display()
        );
    }
    for path in [&handover.key_file, &header_file(&handover.key_file)] {
        if let Err(error) = fs::remove_file(path) {
            log::warn!("cannot remove {}: {error}", path.display());
        }
    }
}

/// Reads and removes the renewed SSH host certificate of the initramfs; `None` if there is none.
pub fn take_host_certificate(key_file: &Path) -> Result<Option<Vec<u8>>, Error> {
    let path = key_file.with_file_name(HOST_CERTIFICATE);
    let mut certificate = Vec::new();
    match File::open(&path)
        .and_then(|file| file.take(MAX_CERTIFICATE).read_to_end(&mut certificate))
    {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("reading", path, error)),
    }
    fs::remove_file(&path).map_err(|error| io_error("removing", path, error))?;
    Ok(Some(certificate))
}

/// A formatted disk that belongs to no cluster yet.
pub struct NewDisk {
    handover: Handover,
    header: luks::Header,
    volume_key: Secret,
}

impl NewDisk {
    /// Reads the disk's header again and opens it with the passphrase of this boot.
    ///
    /// # Errors
    /// [`Error::Exchanged`] if it is not the header that the initramfs wrote.
    pub fn open(handover: &Handover) -> Result<NewDisk, Error> {
        let passphrase = passphrase(handover)?;
        let mut device = open(&handover.device, false)?;
        let header = ours(&mut device, &handover.device)?;
        check(handover, &header)?;
        let volume_key = header
            .unlock(&mut device, &passphrase)
            .map_err(|error| luks_error(&handover.device, error))?;
        Ok(NewDisk {
            handover: handover.clone(),
            header,
            volume_key,
        })
    }

    /// Returns the UUID of the disk in lower case; it names the permanent key of the disk.
    pub fn uuid(&self) -> String {
        self.header.uuid()
    }

    /// Writes the addresses of the cluster's join services into the header. The commit keeps them;
    /// a disk without a commit is formatted.
    pub fn name_peers(&mut self, peers: &Peers) -> Result<(), Error> {
        let mut device = open(&self.handover.device, true)?;
        let written = peers_token::set(&mut self.header, &mut device, peers);
        written
            .map(drop)
            .map_err(|error| luks_error(&self.handover.device, error))
    }

    /// Commits the disk: only after this call does a reboot unlock it. The node state becomes
    /// durable first. Then one write of the header replaces the passphrase, marks the disk as
    /// initialized, and binds it to the cluster of `measurement_secret`.
    pub fn commit(
        mut self,
        root: &Path,
        state: &NodeState,
        key: &Secret,
        measurement_secret: &Secret,
    ) -> Result<(), Error> {
        write_node_state(root, state)?;
        let mut device = open(&self.handover.device, true)?;
        let cluster = ClusterToken::new(&self.uuid(), measurement_secret, state.measurement_salt);
        self.header
            .replace_passphrase_and_mark(&mut device, &self.volume_key, key, &cluster)
            .map_err(|error| luks_error(&self.handover.device, error))?;
        // the passphrase of this boot does not open the disk any more
        remove_files(&self.handover);
        Ok(())
    }
}

/// Returns the verified header of a disk that must be a state disk.
fn ours(device: &mut File, path: &Path) -> Result<luks::Header, Error> {
    let foreign = |what| Err(state_disk::Error::Foreign(path.into(), what).into());
    match probe(device).map_err(|error| luks_error(path, error))? {
        Probe::Luks(header) => match header.check_ours(Integrity::Required) {
            Ok(()) => Ok(header),
            Err(error) => Err(luks_error(path, error)),
        },
        Probe::Blank | Probe::Unfinished => foreign("no LUKS2 header".into()),
        Probe::Unknown(what) => foreign(what),
    }
}

/// Returns the addresses of the cluster's join services in the disk's header; nothing if it has
/// none.
pub fn peers(device: &Path) -> Result<Peers, Error> {
    let header = ours(&mut open(device, false)?, device)?;
    // a faulty token counts as none, and is replaced
    Ok(header.peers().ok().flatten().unwrap_or_default())
}

/// Writes the addresses of the cluster's join services into the header of the disk. Returns whether
/// they have changed.
pub fn set_peers(device: &Path, peers: &Peers) -> Result<bool, Error> {
    let mut file = open(device, true)?;
    let mut header = ours(&mut file, device)?;
    let written = peers_token::set(&mut header, &mut file, peers);
    written.map_err(|error| luks_error(device, error))
}

/// Marks the disk so that the next boot formats it.
pub fn mark_for_reset(device: &Path) -> Result<(), Error> {
    let mut file = open(device, true)?;
    let mut header = ours(&mut file, device)?;
    header
        .mark_for_reset(&mut file)
        .map_err(|error| luks_error(device, error))
}

/// Writes the node state below `root` atomically and durably, in the form of Constellation.
fn write_node_state(root: &Path, state: &NodeState) -> Result<(), Error> {
    let (role, salt) = (state.role, STANDARD.encode(state.measurement_salt));
    let json = format!("{{\n\t\"Role\": \"{role}\",\n\t\"MeasurementSalt\": \"{salt}\"\n}}");
    write_durably(root, node_state::FILE, json.as_bytes())
}

/// Durably records that the set-up has begun: from now on [`is_complete`] is true only after
/// [`mark_complete`].
pub fn mark_begun(root: &Path) -> Result<(), Error> {
    write_durably(root, BEGUN_MARK, b"")
}

/// Durably records that the set-up is complete.
pub fn mark_complete(root: &Path) -> Result<(), Error> {
    write_durably(root, COMPLETE_MARK, b"")
}

/// Returns whether the set-up of the node whose disk is mounted at `root` was completed. If this is
/// false, the disk is formatted; a disk that cannot be read is therefore an error.
pub fn is_complete(root: &Path) -> Result<bool, Error> {
    let exists = |name: &str| {
        let path = root.join(name);
        path.try_exists()
            .map_err(|error| of_node_state(&path, error))
    };
    Ok(exists(COMPLETE_MARK)? || !exists(BEGUN_MARK)? && exists(KUBELET_CONFIG)?)
}

/// Returns whether kubeadm has configured a kubelet on the disk mounted at `root`.
pub fn has_kubelet(root: &Path) -> bool {
    root.join(KUBELET_CONFIG).exists()
}

/// Writes a file atomically and durably, and creates its directories below `root`.
fn write_durably(root: &Path, name: &str, content: &[u8]) -> Result<(), Error> {
    let path = root.join(name);
    let write = || {
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        file::replace(&path, content, 0o644)?;
        File::open(root)?.sync_all()
    };
    write().map_err(|error| of_node_state(&path, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::KEY_LEN;
    use base::machines::Role;
    use disk::luks::{MIN_DEVICE_SIZE, VOLUME_KEY_LEN};
    use disk::state_disk::handover::leave;

    fn state() -> NodeState {
        NodeState {
            role: Role::ControlPlane,
            measurement_salt: [b'S'; 32],
        }
    }

    #[test]
    fn an_io_error_says_where_to_look_for_damage() {
        let said =
            |code| of_node_state(Path::new("/a"), io::Error::from_raw_os_error(code)).to_string();
        for code in [EIO, EILSEQ] {
            let said = said(code);
            assert!(
                said.starts_with("cannot access /a: ") && said.contains("INTEGRITY AEAD ERROR"),
                "{said}"
            );
        }
        assert!(!said(13).contains("INTEGRITY"));
    }

    #[test]
    fn the_booted_system_accepts_only_the_header_that_the_initramfs_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let handover = Handover {
            device: folder.path().join("disk"),
            key_file: folder.path().join("state.key"),
        };
        let mut disk = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&handover.device)
            .unwrap();
        disk.set_len(MIN_DEVICE_SIZE).unwrap();
        let (volume_key, passphrase) = (Secret::random(VOLUME_KEY_LEN), Secret::random(KEY_LEN));
        let header = luks::format(&mut disk, &volume_key, &passphrase).unwrap();
        assert!(
            matches!(
                NewDisk::open(&handover),
                Err(Error::Disk(state_disk::Error::Io(..)))
            ),
            "nothing was handed over"
        );
        leave(&handover.key_file, &passphrase, &header).unwrap();
        assert_eq!(NewDisk::open(&handover).unwrap().uuid(), header.uuid());

        // another header that opens with the same passphrase
        luks::format(&mut disk, &volume_key, &passphrase).unwrap();
        let error = NewDisk::open(&handover).err().unwrap();
        assert!(
            matches!(&error, Error::Exchanged { expected, .. } if expected.starts_with(&header.uuid())),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("is not the LUKS2 header that the initramfs wrote"),
            "{error}"
        );

        // after another first boot the new header is accepted
        let header = luks::format(&mut disk, &volume_key, &passphrase).unwrap();
        leave(&handover.key_file, &passphrase, &header).unwrap();
        let state = NodeState {
            role: base::machines::Role::Worker,
            measurement_salt: [2; 32],
        };
        let secret = Secret::random(KEY_LEN);
        let known = Peers {
            load_balancer: Some("cluster.example".into()),
            control_planes: vec![[10, 0, 0, 11].into()],
        };
        let mut new = NewDisk::open(&handover).unwrap();
        new.name_peers(&known).unwrap();
        new.commit(folder.path(), &state, &Secret::random(KEY_LEN), &secret)
            .unwrap();
        // the commit keeps the peers in the header, and equal peers are not written again
        assert_eq!(peers(&handover.device).unwrap(), known);
        let before = ours(&mut disk, &handover.device).unwrap();
        assert!(!set_peers(&handover.device, &known).unwrap());
        let after = ours(&mut disk, &handover.device).unwrap();
        assert_eq!(before.sequence_id(), after.sequence_id());
        assert!(set_peers(&handover.device, &Peers::default()).unwrap());
        assert!(peers(&handover.device).unwrap().is_empty());
        let header = ours(&mut disk, &handover.device).unwrap();
        let token = header.cluster_token().unwrap().unwrap();
        assert_eq!(token.verified_salt(&header.uuid(), &secret), Some([2; 32]));
        assert!(!handover.key_file.exists() && !header_file(&handover.key_file).exists());
    }

    #[test]
    fn the_file_has_the_format_that_the_old_initramfs_reads() {
        let disk = tempfile::tempdir().unwrap();
        write_node_state(disk.path(), &state()).unwrap();
        assert_eq!(
            fs::read_to_string(disk.path().join(node_state::FILE)).unwrap(),
            "{\n\t\"Role\": \"ControlPlane\",\n\t\"MeasurementSalt\": \"U1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1M=\"\n}"
        );
        assert_eq!(NodeState::read(disk.path()).unwrap(), state());
    }

    #[test]
    fn a_second_write_replaces_the_first() {
        let disk = tempfile::tempdir().unwrap();
        write_node_state(disk.path(), &state()).unwrap();
        let other = NodeState {
            measurement_salt: [7; 32],
            ..state()
        };
        write_node_state(disk.path(), &other).unwrap();
        assert_eq!(NodeState::read(disk.path()).unwrap(), other);
    }

    #[test]
    fn a_disk_is_complete_by_our_mark_or_by_what_kubeadm_leaves() {
        let disk = tempfile::tempdir().unwrap();
        assert!(!is_complete(disk.path()).unwrap());
        mark_complete(disk.path()).unwrap();
        assert!(is_complete(disk.path()).unwrap());
        let old = tempfile::tempdir().unwrap();
        fs::create_dir_all(old.path().join("kubernetes")).unwrap();
        fs::write(old.path().join(KUBELET_CONFIG), "").unwrap();
        assert!(is_complete(old.path()).unwrap() && has_kubelet(old.path()));
    }

    #[test]
    fn a_disk_whose_set_up_has_begun_is_complete_by_our_mark_alone() {
        let disk = tempfile::tempdir().unwrap();
        mark_begun(disk.path()).unwrap();
        fs::create_dir_all(disk.path().join("kubernetes")).unwrap();
        fs::write(disk.path().join(KUBELET_CONFIG), "").unwrap();
        assert!(!is_complete(disk.path()).unwrap());
        mark_complete(disk.path()).unwrap();
        assert!(is_complete(disk.path()).unwrap());
    }

    #[test]
    fn a_disk_that_cannot_be_read_is_an_error_and_not_incomplete() {
        let disk = tempfile::tempdir().unwrap();
        // a read below a file fails like a read of a broken sector: with another error than "not
        // found"
        fs::write(disk.path().join("firstlight"), "").unwrap();
        assert!(matches!(
            is_complete(disk.path()),
            Err(Error::Disk(state_disk::Error::NodeState(
                node_state::Error::Io(..)
            )))
        ));
    }
}
