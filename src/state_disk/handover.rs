//! What the initramfs hands to the booted system about a new disk, and the commit with which the disk becomes permanent.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::{Error, NodeState};
use crate::crypto::Secret;
use crate::luks;

/// Where the old system's bootstrapper looks for the passphrase of this boot, too: in RAM, gone with the power.
pub const KEY_FILE: &str = "/run/cryptsetup-keys.d/state.key";
/// A passphrase is 32 bytes; nothing longer is read.
const MAX_KEY: u64 = 512;

/// A new disk's device and the file with its passphrase.
#[derive(Debug, Clone)]
pub struct Handover {
    /// The disk beneath the mapping.
    pub device: PathBuf,
    /// Mode 0400, raw bytes.
    pub key_file: PathBuf,
}

impl Handover {
    /// Leaves the passphrase for the booted system; replaces one of an earlier try.
    pub fn leave(&self, passphrase: &Secret) -> Result<(), Error> {
        let write = || {
            if let Some(directory) = self.key_file.parent() {
                fs::create_dir_all(directory)?;
            }
            if self.key_file.exists() {
                fs::remove_file(&self.key_file)?;
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(&self.key_file)?;
            file.write_all(passphrase.expose())
        };
        write().map_err(|error| Error::Io("writing", self.key_file.clone(), error))
    }

    fn take(&self) -> Result<Secret, Error> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_KEY as usize));
        File::open(&self.key_file)
            .and_then(|file| file.take(MAX_KEY).read_to_end(&mut bytes))
            .map_err(|error| Error::Io("reading the passphrase of this boot from", self.key_file.clone(), error))?;
        Ok(Secret::new(bytes.to_vec()))
    }
}

/// A formatted disk that belongs to no cluster yet.
pub struct NewDisk {
    handover: Handover,
    header: luks::Header,
    volume_key: Secret,
}

impl NewDisk {
    /// Reads and verifies the disk's header once more, and opens it with the passphrase of this boot.
    pub fn open(handover: &Handover) -> Result<NewDisk, Error> {
        let passphrase = handover.take()?;
        let mut device = open(&handover.device, false)?;
        let header = super::classify::ours(&mut device, &handover.device)?;
        let volume_key =
            header.unlock(&mut device, &passphrase).map_err(|error| Error::Luks(handover.device.clone(), error))?;
        Ok(NewDisk { handover: handover.clone(), header, volume_key })
    }

    /// Lower case; names the key that the disk gets.
    pub fn uuid(&self) -> String {
        self.header.uuid()
    }

    /// The commit: after this, and not before, the disk is one that a reboot unlocks. The node's state is durable first;
    /// then one write of the header changes the passphrase and marks the disk.
    pub fn commit(mut self, root: &Path, state: &NodeState, key: &Secret) -> Result<(), Error> {
        state.write(root).map_err(Error::NodeState)?;
        let mut device = open(&self.handover.device, true)?;
        self.header
            .replace_passphrase_and_mark(&mut device, &self.volume_key, key)
            .map_err(|error| Error::Luks(self.handover.device.clone(), error))?;
        // the passphrase of this boot opens nothing any more; what remains of it is forgotten
        if let Err(error) = fs::remove_file(&self.handover.key_file) {
            log::warn!("{} could not be removed: {error}", self.handover.key_file.display());
        }
        Ok(())
    }
}

/// Makes the next boot format the disk afresh.
pub fn mark_for_reset(device: &Path) -> Result<(), Error> {
    let mut file = open(device, true)?;
    let mut header = super::classify::ours(&mut file, device)?;
    header.mark_for_reset(&mut file).map_err(|error| Error::Luks(device.into(), error))
}

/// For writing over everything: fails while the disk is mounted or mapped, under whatever name (`O_EXCL` on a block device,
/// open(2)).
pub(super) fn open_exclusive(device: &Path) -> Result<File, Error> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(device);
    file.map_err(|error| Error::Io("opening for nobody but us (is it mounted or mapped?)", device.into(), error))
}

pub(super) fn open(device: &Path, write: bool) -> Result<File, Error> {
    OpenOptions::new().read(true).write(write).open(device).map_err(|error| Error::Io("opening", device.into(), error))
}
