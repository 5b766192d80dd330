//! The handover of a new disk from the initramfs to the booted system, and the commit that makes
//! the disk permanent.
//!
//! The host may replace the disk's header between the two. The booted system must accept only the
//! header that the initramfs wrote, so a file beside the passphrase records the disk's UUID and a
//! hash of the header.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::{Error, NodeState};
use crate::luks::{self, ClusterToken, Peers};
use base::crypto::Secret;

/// The path of the passphrase of this boot, as in Constellation. The file system is in RAM, so a
/// reboot loses the file.
pub const KEY_FILE: &str = "/run/cryptsetup-keys.d/state.key";
/// Maximum number of bytes that are read of a passphrase. A passphrase has 32 bytes.
const MAX_KEY: u64 = 512;
/// Extension of the file beside the passphrase that describes the header.
const HEADER_EXTENSION: &str = "header";
/// Maximum number of bytes that are read of that file: one line with a UUID, a space, and SHA-256
/// in hexadecimal.
const MAX_LINE: u64 = 256;
/// The file beside the passphrase with the SSH host certificate of a rejoin ticket.
const HOST_CERTIFICATE: &str = "ssh_host_cert.pub";
/// Maximum number of bytes of an SSH host certificate; real ones are much smaller.
const MAX_CERTIFICATE: u64 = 64 << 10;

/// The device of a new disk and the file with its passphrase.
#[derive(Debug, Clone)]
pub struct Handover {
    /// The disk below the mapping.
    pub device: PathBuf,
    /// The file with the passphrase: raw bytes, mode 0400.
    pub key_file: PathBuf,
}

impl Handover {
    /// Writes the passphrase and the description of the header for the booted system, and replaces
    /// those of an earlier try.
    pub fn leave(&self, passphrase: &Secret, header: &luks::Header) -> Result<(), Error> {
        leave(&self.header_file(), describe(header).as_bytes())?;
        leave(&self.key_file, passphrase.expose())
    }

    fn header_file(&self) -> PathBuf {
        self.key_file.with_extension(HEADER_EXTENSION)
    }

    fn take(&self) -> Result<Secret, Error> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_KEY as usize));
        File::open(&self.key_file)
            .and_then(|file| file.take(MAX_KEY).read_to_end(&mut bytes))
            .map_err(|error| {
                Error::Io(
                    "reading the passphrase of this boot from",
                    self.key_file.clone(),
                    error,
                )
            })?;
        Ok(Secret::new(bytes.to_vec()))
    }

    /// Fails unless `header` is the header that the initramfs wrote.
    fn check(&self, header: &luks::Header) -> Result<(), Error> {
        let path = self.header_file();
        let mut expected = String::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_LINE).read_to_string(&mut expected))
            .map_err(|error| {
                Error::Io(
                    "reading the description of the disk's header from",
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
            device: self.device.clone(),
            expected: line(&expected),
            got: line(&got),
        })
    }

    /// Removes the files, which are not needed any more.
    fn remove_files(&self) {
        for path in [&self.key_file, &self.header_file()] {
            if let Err(error) = fs::remove_file(path) {
                log::warn!("cannot remove {}: {error}", path.display());
            }
        }
    }
}

/// Writes a renewed SSH host certificate beside `key_file` for the booted system. Removes that of
/// an earlier try; an empty `certificate` leaves no file.
pub fn leave_host_certificate(key_file: &Path, certificate: &[u8]) -> Result<(), Error> {
    let path = key_file.with_file_name(HOST_CERTIFICATE);
    match certificate {
        [] => match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::Io("removing", path, error))
            }
            _ => Ok(()),
        },
        _ => leave(&path, certificate),
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
        Err(error) => return Err(Error::Io("reading", path, error)),
    }
    fs::remove_file(&path).map_err(|error| Error::Io("removing", path, error))?;
    Ok(Some(certificate))
}

fn leave(path: &Path, content: &[u8]) -> Result<(), Error> {
    let write = || {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        if path.exists() {
            fs::remove_file(path)?;
        }
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o400)
            .open(path)?
            .write_all(content)
    };
    write().map_err(|error| Error::Io("writing", path.into(), error))
}

fn describe(header: &luks::Header) -> String {
    let hash: String = header
        .fingerprint()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{} {hash}\n", header.uuid())
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
        let passphrase = handover.take()?;
        let mut device = open(&handover.device, false)?;
        let header = super::classify::ours(&mut device, &handover.device)?;
        handover.check(&header)?;
        let volume_key = header
            .unlock(&mut device, &passphrase)
            .map_err(|error| Error::Luks(handover.device.clone(), error))?;
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
        let written = self.header.set_peers(&mut device, peers);
        written
            .map(drop)
            .map_err(|error| Error::Luks(self.handover.device.clone(), error))
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
        state.write(root).map_err(Error::NodeState)?;
        let mut device = open(&self.handover.device, true)?;
        let cluster = ClusterToken::new(&self.uuid(), measurement_secret, state.measurement_salt);
        self.header
            .replace_passphrase_and_mark(&mut device, &self.volume_key, key, &cluster)
            .map_err(|error| Error::Luks(self.handover.device.clone(), error))?;
        // the passphrase of this boot does not open the disk any more
        self.handover.remove_files();
        Ok(())
    }
}

/// Returns the addresses of the cluster's join services in the disk's header; nothing if it has
/// none.
pub fn peers(device: &Path) -> Result<Peers, Error> {
    let header = super::classify::ours(&mut open(device, false)?, device)?;
    // a faulty token counts as none, and is replaced
    Ok(header.peers().ok().flatten().unwrap_or_default())
}

/// Writes the addresses of the cluster's join services into the header of the disk. Returns whether
/// they have changed.
pub fn set_peers(device: &Path, peers: &Peers) -> Result<bool, Error> {
    let mut file = open(device, true)?;
    let mut header = super::classify::ours(&mut file, device)?;
    header
        .set_peers(&mut file, peers)
        .map_err(|error| Error::Luks(device.into(), error))
}

/// Marks the disk so that the next boot formats it.
pub fn mark_for_reset(device: &Path) -> Result<(), Error> {
    let mut file = open(device, true)?;
    let mut header = super::classify::ours(&mut file, device)?;
    header
        .mark_for_reset(&mut file)
        .map_err(|error| Error::Luks(device.into(), error))
}

/// Opens the disk to overwrite it. Fails while the disk is mounted or mapped under any name
/// (`O_EXCL` on a block device, open(2)).
pub fn open_exclusive(device: &Path) -> Result<File, Error> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_EXCL)
        .open(device);
    file.map_err(|error| {
        Error::Io(
            "opening for exclusive use (check that it is not mounted or mapped)",
            device.into(),
            error,
        )
    })
}

/// Opens the disk to read it, and with `write` also to change parts of it.
pub fn open(device: &Path, write: bool) -> Result<File, Error> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .open(device)
        .map_err(|error| Error::Io("opening", device.into(), error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::luks::{MIN_DEVICE_SIZE, VOLUME_KEY_LEN};
    use base::crypto::KEY_LEN;

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
            matches!(NewDisk::open(&handover), Err(Error::Io(..))),
            "nothing was handed over"
        );
        handover.leave(&passphrase, &header).unwrap();
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
        handover.leave(&passphrase, &header).unwrap();
        let state = NodeState {
            role: machines::Role::Worker,
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
        let before = super::super::classify::ours(&mut disk, &handover.device).unwrap();
        assert!(!set_peers(&handover.device, &known).unwrap());
        let after = super::super::classify::ours(&mut disk, &handover.device).unwrap();
        assert_eq!(before.sequence_id(), after.sequence_id());
        assert!(set_peers(&handover.device, &Peers::default()).unwrap());
        assert!(peers(&handover.device).unwrap().is_empty());
        let header = super::super::classify::ours(&mut disk, &handover.device).unwrap();
        let token = header.cluster_token().unwrap().unwrap();
        assert_eq!(token.verified_salt(&header.uuid(), &secret), Some([2; 32]));
        assert!(!handover.key_file.exists() && !handover.header_file().exists());
    }
}
