//! A snapshot that an operator brings: `firstlight etcd snapshot` or `etcdctl snapshot save` wrote it.
//!
//! The operator's file is read once, into a private copy on the state disk. All checks read the copy,
//! and etcdutl restores it: the operator's file may lie where another program can change it meanwhile.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use zeroize::Zeroizing;

use base::crypto::{MEASUREMENT_SALT_LEN, random};
use base::text::hex;

use super::failed_check::{FailedCheck, failed_check};

/// The database consists of pages of at least this size; etcd adds its hash.
const PAGE: u64 = 512;
const BUFFER: usize = 1 << 20;

/// A snapshot that is as etcd wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The bytes.
    pub length: u64,
    /// The SHA-256 that etcd added, in hexadecimal digits.
    pub hash: String,
    /// Whether it has an object with this cluster's salt.
    pub is_of_cluster: bool,
}

/// A copy of a snapshot without a name, so that no other program opens it by accident, and it is gone with this process.
#[derive(Debug)]
pub struct PrivateCopy(File);

impl PrivateCopy {
    /// Copies a snapshot into a folder of the state disk. The error is a clause.
    pub fn new(snapshot: &Path, folder: &Path) -> Result<PrivateCopy, FailedCheck> {
        let from = File::open(snapshot).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (length, from) = from.map_err(|error| failed_check!("{error}"))?;
        let path = folder.join(format!("restore-copy-{}", hex(&random::<4>())));
        let copy = || {
            let mut options = File::options();
            options.read(true).write(true).create_new(true).mode(0o600);
            let mut file = options.open(&path)?;
            fs::remove_file(&path)?;
            io::copy(&mut from.take(length), &mut file)?;
            Ok(PrivateCopy(file))
        };
        copy().map_err(|error: io::Error| {
            failed_check!("it cannot be copied to {}: {error}", folder.display())
        })
    }

    /// Returns the content.
    pub fn file(&self) -> &File {
        &self.0
    }

    /// Returns the path at which a child process opens the copy.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", process::id(), self.0.as_raw_fd()).into()
    }
}

/// Reads a snapshot, compares the hash that etcd added, and looks for the salt of this node's
/// cluster, which the ConfigMap `join-config` has. The error is a clause.
pub fn read(
    copy: &PrivateCopy,
    salt: &[u8; MEASUREMENT_SALT_LEN],
) -> Result<Snapshot, FailedCheck> {
    let read = || -> io::Result<_> {
        let mut file = copy.file();
        file.rewind()?;
        let length = file.metadata()?.len();
        if length % PAGE != SHA256_OUTPUT_LEN as u64 || length < PAGE {
            return Err(io::Error::other(format!(
                "it is no snapshot of etcd: it has {length} bytes, expected pages of {PAGE} bytes and a hash of {SHA256_OUTPUT_LEN} (a \
                 copy of etcd's file has no hash)"
            )));
        }
        let body = file.take(length - SHA256_OUTPUT_LEN as u64);
        let (hash, is_of_cluster) = scan(body, salt)?;
        let mut expected = [0; SHA256_OUTPUT_LEN];
        file.read_exact(&mut expected)?;
        if hash != expected {
            return Err(io::Error::other(format!(
                "it was changed: its SHA-256 is {}, but etcd wrote {}",
                hex(&hash),
                hex(&expected)
            )));
        }
        Ok(Snapshot {
            length,
            hash: hex(&hash),
            is_of_cluster,
        })
    };
    read().map_err(|error| failed_check!("{error}"))
}

/// Returns the hash, and whether the content has the salt: as bytes, or in base64 if the API server
/// stores JSON.
fn scan(
    mut content: impl Read,
    salt: &[u8; MEASUREMENT_SALT_LEN],
) -> io::Result<([u8; SHA256_OUTPUT_LEN], bool)> {
    let text = STANDARD.encode(salt);
    let has = |seen: &[u8], needle: &[u8]| seen.windows(needle.len()).any(|it| it == needle);
    let mut hash = Context::new(&SHA256);
    // with the end of the bytes before
    let mut seen = Zeroizing::new(vec![0; text.len() + BUFFER]);
    let (mut kept, mut is_there) = (0, false);
    loop {
        let count = match content.read(&mut seen[kept..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        if count == 0 {
            break;
        }
        let end = kept + count;
        hash.update(&seen[kept..end]);
        is_there = is_there || has(&seen[..end], salt) || has(&seen[..end], text.as_bytes());
        kept = end.min(text.len());
        seen.copy_within(end - kept..end, 0);
    }
    let hash = hash.finish();
    let hash = hash.as_ref().try_into().map_err(io::Error::other)?;
    Ok((hash, is_there))
}

#[cfg(test)]
mod tests {
    use ring::digest::digest;

    use super::*;

    const SALT: [u8; MEASUREMENT_SALT_LEN] = *b"the salt of one cluster of tests";

    fn snapshot(content: &[u8]) -> Vec<u8> {
        [content, digest(&SHA256, content).as_ref()].concat()
    }

    fn read_bytes(bytes: &[u8]) -> Result<Snapshot, FailedCheck> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshot.db");
        fs::write(&path, bytes).unwrap();
        let copy = PrivateCopy::new(&path, folder.path()).unwrap();
        // a program that writes to the operator's file changes nothing
        fs::write(&path, "changed").unwrap();
        assert_eq!(fs::read(copy.path()).unwrap(), bytes);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        read(&copy, &SALT)
    }

    #[test]
    fn only_what_etcd_wrote_is_read() {
        let mut good = snapshot(&[7; 4096]);
        let read = read_bytes(&good).unwrap();
        assert_eq!((read.length, read.is_of_cluster), (4128, false));
        assert!(
            read_bytes(&good[..4096])
                .unwrap_err()
                .contains("no snapshot of etcd")
        );
        assert!(read_bytes(&[]).unwrap_err().contains("no snapshot of etcd"));
        assert!(read_bytes(digest(&SHA256, b"").as_ref()).is_err());
        good[100] ^= 1;
        assert!(read_bytes(&good).unwrap_err().contains("it was changed"));
    }

    #[test]
    fn the_salt_is_found_wherever_it_is() {
        let text = STANDARD.encode(SALT);
        for needle in [&SALT[..], text.as_bytes()] {
            let end = 2 * BUFFER - needle.len();
            for at in [0, BUFFER - 1, BUFFER + 1, BUFFER + 20, BUFFER + 43, end] {
                let mut content = vec![0; 2 * BUFFER];
                content[at..][..needle.len()].copy_from_slice(needle);
                assert!(
                    read_bytes(&snapshot(&content)).unwrap().is_of_cluster,
                    "{at}"
                );
            }
        }
    }
}
