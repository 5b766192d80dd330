//! A snapshot that an operator brings: `firstlight etcd snapshot` or `etcdctl snapshot save` wrote it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use zeroize::Zeroizing;

use base::crypto::MEASUREMENT_SALT_LEN;
use base::text::hex;

use super::objection::{Objection, objection};

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

/// Reads a snapshot, compares the hash that etcd added, and looks for the salt of this node's
/// cluster, which the ConfigMap `join-config` has. The error is a clause.
pub fn read(path: &Path, salt: &[u8; MEASUREMENT_SALT_LEN]) -> Result<Snapshot, Objection> {
    let read = || -> io::Result<_> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        if length % PAGE != SHA256_OUTPUT_LEN as u64 || length < PAGE {
            return Err(io::Error::other(format!(
                "it has {length} bytes, which is no snapshot of etcd: expected pages of {PAGE} bytes and a hash of {SHA256_OUTPUT_LEN} \
                 (a copy of etcd's file has no hash)"
            )));
        }
        let body = (&mut file).take(length - SHA256_OUTPUT_LEN as u64);
        let (hash, is_of_cluster) = scan(body, salt)?;
        let mut expected = [0; SHA256_OUTPUT_LEN];
        file.read_exact(&mut expected)?;
        if hash != expected {
            return Err(io::Error::other(format!(
                "it was changed: its SHA-256 is {}, and etcd wrote {}",
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
    read().map_err(|error| objection!("{error}"))
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

    fn read_bytes(bytes: &[u8]) -> Result<Snapshot, Objection> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read(file.path(), &SALT)
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
