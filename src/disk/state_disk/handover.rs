//! What the initramfs hands to the booted system about a new disk, and the commit with which the disk becomes permanent.
//!
//! Between the two the host may exchange the disk's header: the booted system works with the header that the initramfs wrote,
//! or with none. So beside the passphrase there is a file with the disk's UUID and the header's hash.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::{Error, NodeState};
use crate::luks::{self, ClusterToken};
use base::crypto::Secret;

/// Where the old system's bootstrapper looks for the passphrase of this boot, too: in RAM, gone with the power.
pub const KEY_FILE: &str = "/run/cryptsetup-keys.d/state.key";
/// A passphrase is 32 bytes; nothing longer is read.
const MAX_KEY: u64 = 512;
/// The file beside the passphrase's has this extension ...
const HEADER_EXTENSION: &str = "header";
/// ... and one line, of a UUID, a space, and SHA-256 in hex.
const MAX_LINE: u64 = 256;
/// Beside it, too: the SSH host certificate that came with a rejoin ticket, for the system on a disk that was opened.
const HOST_CERTIFICATE: &str = "ssh_host_cert.pub";
/// Far above any certificate.
const MAX_CERTIFICATE: u64 = 64 << 10;

/// A new disk's device and the file with its passphrase.
#[derive(Debug, Clone)]
pub struct Handover {
    /// The disk beneath the mapping.
    pub device: PathBuf,
    /// Mode 0400, raw bytes.
    pub key_file: PathBuf,
}

impl Handover {
    /// Leaves the passphrase, and what the header is, for the booted system; replaces those of an earlier try.
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

    /// Fails unless this is the header that the initramfs wrote.
    fn check(&self, header: &luks::Header) -> Result<(), Error> {
        let path = self.header_file();
        let mut expected = String::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_LINE).read_to_string(&mut expected))
            .map_err(|error| {
                Error::Io(
                    "reading what the initramfs said of the disk from",
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

    /// What this boot left is of no use any more.
    fn forget(&self) {
        for path in [&self.key_file, &self.header_file()] {
            if let Err(error) = fs::remove_file(path) {
                log::warn!("{} could not be removed: {error}", path.display());
            }
        }
    }
}

/// Leaves a renewed SSH host certificate beside `key_file` for the booted system; one of an earlier try goes, and nothing takes
/// its place where there is none.
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

/// Takes the renewed SSH host certificate that the initramfs left, if it did.
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
    /// Reads the disk's header once more, which must be the one that the initramfs wrote, and opens it with the passphrase of
    /// this boot.
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

    /// Lower case; names the key that the disk gets.
    pub fn uuid(&self) -> String {
        self.header.uuid()
    }

    /// The commit: after this, and not before, the disk is one that a reboot unlocks. The node's state is durable first;
    /// then one write of the header changes the passphrase, marks the disk, and ties it to the cluster of this measurement
    /// secret.
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
        // the passphrase of this boot opens nothing any more
        self.handover.forget();
        Ok(())
    }
}

/// Makes the next boot format the disk afresh.
pub fn mark_for_reset(device: &Path) -> Result<(), Error> {
    let mut file = open(device, true)?;
    let mut header = super::classify::ours(&mut file, device)?;
    header
        .mark_for_reset(&mut file)
        .map_err(|error| Error::Luks(device.into(), error))
}

/// For writing over everything: fails while the disk is mounted or mapped, under whatever name (`O_EXCL` on a block device,
/// open(2)).
pub fn open_exclusive(device: &Path) -> Result<File, Error> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_EXCL)
        .open(device);
    file.map_err(|error| {
        Error::Io(
            "opening for nobody but us (is it mounted or mapped?)",
            device.into(),
            error,
        )
    })
}

/// For reading, or for writing single parts, too.
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
    fn the_booted_system_takes_no_other_header_than_the_one_that_the_initramfs_wrote() {
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

        // what opens with the same passphrase, and would have had another disk's key
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

        // and after a new start of the first boot the new one counts
        let header = luks::format(&mut disk, &volume_key, &passphrase).unwrap();
        handover.leave(&passphrase, &header).unwrap();
        let state = NodeState {
            role: cloud::Role::Worker,
            measurement_salt: [2; 32],
        };
        let secret = Secret::random(KEY_LEN);
        NewDisk::open(&handover)
            .unwrap()
            .commit(folder.path(), &state, &Secret::random(KEY_LEN), &secret)
            .unwrap();
        let header = super::super::classify::ours(&mut disk, &handover.device).unwrap();
        let token = header.cluster_token().unwrap().unwrap();
        assert_eq!(token.verified_salt(&header.uuid(), &secret), Some([2; 32]));
        assert!(!handover.key_file.exists() && !handover.header_file().exists());
    }
}
