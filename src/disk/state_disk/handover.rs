//! The handover of a new disk from the initramfs to the booted system: what the initramfs leaves.
//! The booted system takes it in `src/bootstrapper/state/state_disk.rs`.
//!
//! The host may replace the disk's header between the two. The booted system must accept only the
//! header that the initramfs wrote, so a file beside the passphrase records the disk's UUID and a
//! hash of the header.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::Error;
use crate::luks;
use base::crypto::Secret;
use base::text::hex;

/// The path of the passphrase of this boot, as in Constellation. The file system is in RAM, so a
/// reboot loses the file.
pub const KEY_FILE: &str = "/run/cryptsetup-keys.d/state.key";

/// Extension of the file beside the passphrase that describes the header.
const HEADER_EXTENSION: &str = "header";

/// The file beside the passphrase with the SSH host certificate of a rejoin ticket.
pub const HOST_CERTIFICATE: &str = "ssh_host_cert.pub";

/// Writes the passphrase (raw bytes, mode 0400) and the description of the header for the booted
/// system, and replaces those of an earlier try.
pub fn leave(key_file: &Path, passphrase: &Secret, header: &luks::Header) -> Result<(), Error> {
    write(&header_file(key_file), describe(header).as_bytes())?;
    write(key_file, passphrase.expose())
}

/// Returns the file beside the passphrase that describes the header.
pub fn header_file(key_file: &Path) -> PathBuf {
    key_file.with_extension(HEADER_EXTENSION)
}

/// Writes a renewed SSH host certificate beside `key_file` for the booted system. Removes that of
/// an earlier try; an empty `certificate` leaves no file.
pub fn leave_host_certificate(key_file: &Path, certificate: &[u8]) -> Result<(), Error> {
    let path = key_file.with_file_name(HOST_CERTIFICATE);
    match certificate {
        [] => match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::Io("remove", path, error))
            }
            _ => Ok(()),
        },
        _ => write(&path, certificate),
    }
}

fn write(path: &Path, content: &[u8]) -> Result<(), Error> {
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
    write().map_err(|error| Error::Io("write", path.into(), error))
}

/// Describes a header in one line: the UUID, a space, and SHA-256 in hexadecimal.
pub fn describe(header: &luks::Header) -> String {
    format!("{} {}\n", header.uuid(), hex(&header.fingerprint()))
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
            "open for exclusive use (check that it is not mounted or mapped)",
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
        .map_err(|error| Error::Io("open", device.into(), error))
}
