//! Brings a snapshot of etcd into a file, compares the hash that etcd added to it, and looks for the challenge that the command has
//! written into the cluster before: who does not read etcd of this cluster cannot know it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use base::crypto::random;
use base::text::hex;
use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use zeroize::Zeroizing;

use crate::shell::{
    error::Error,
    files::{self, FileError},
};

/// etcd's database consists of pages; etcd itself recognizes the hash by what is left of this length.
const PAGE: u64 = 512;
/// The number at the beginning of the first page's content.
const MAGIC: [u8; 4] = 0xED0C_DAED_u32.to_le_bytes();
const MAGIC_AT: usize = 16;
const BUFFER: usize = 64 << 10;

/// A complete snapshot.
pub struct DownloadedSnapshot {
    /// Its length in bytes.
    pub length: u64,
    /// The SHA-256 of the database, in hexadecimal digits.
    pub hash: String,
}

/// What the snapshot must have.
pub struct ExpectedFile<'a> {
    /// The length that was announced.
    pub length: Option<u64>,
    /// The text that an object of the cluster has.
    pub challenge: &'a str,
    /// The control plane whose etcd has saved it.
    pub node: &'a str,
}

/// Creates the file, with mode 0600. It exists only if all of the snapshot has arrived as etcd of this cluster wrote it.
pub fn download(
    expected: &ExpectedFile,
    content: impl Read,
    path: &Path,
) -> Result<DownloadedSnapshot, Error> {
    let part = part_of(path);
    files::create_private_by(path, &part, |file| copy(expected, content, file, path))
}

fn copy(
    expected: &ExpectedFile,
    mut content: impl Read,
    file: &mut File,
    path: &Path,
) -> Result<DownloadedSnapshot, Error> {
    let mut seen = Seen::new(expected.challenge);
    let mut buffer = Zeroizing::new(vec![0; BUFFER]);
    loop {
        let count = match content.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(cut_off(&error.to_string(), seen.length)),
        };
        seen.add(&buffer[..count]);
        let written = file.write_all(&buffer[..count]);
        written.map_err(|error| FileError::Io("write", path.into(), error))?;
    }
    if let Some(expected) = expected.length.filter(|it| *it != seen.length) {
        return Err(cut_off(
            &format!("{expected} bytes were announced"),
            seen.length,
        ));
    }
    let has_challenge = seen.challenge.is_found;
    let snapshot = seen.finish()?;
    if has_challenge {
        Ok(snapshot)
    } else {
        Err(Error::Refused(format!(
            "what arrived is not of etcd of this cluster: it does not have the challenge that this command has just written into the \
         annotations of its Job; nothing was kept. Something else than etcd on {} has answered, or the API server encrypts Jobs",
            expected.node
        )))
    }
}

/// Returns the name of an incomplete file; two commands never share one.
fn part_of(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.part", hex(&random::<4>())));
    part.into()
}

fn cut_off(why: &str, length: u64) -> Error {
    Error::Unreachable(format!(
        "the snapshot broke off after {length} bytes ({why}): nothing was kept; run the command again"
    ))
}

/// What has arrived so far.
struct Seen {
    length: u64,
    beginning: Vec<u8>,
    hash: Context,
    /// The last bytes, which may be the hash.
    tail: Zeroizing<Vec<u8>>,
    challenge: Needle,
}

/// A text that is looked for.
struct Needle {
    text: Vec<u8>,
    /// The last bytes before, in which the text may begin.
    kept: Zeroizing<Vec<u8>>,
    is_found: bool,
}

impl Needle {
    fn add(&mut self, bytes: &[u8]) {
        let length = self.text.len();
        let has = |bytes: &[u8], text: &[u8]| bytes.windows(length).any(|it| it == text);
        let begin = &bytes[..bytes.len().min(length)];
        self.kept.extend_from_slice(begin);
        self.is_found = self.is_found || has(bytes, &self.text) || has(&self.kept, &self.text);
        if bytes.len() > length {
            self.kept.clear();
            self.kept.extend_from_slice(&bytes[bytes.len() - length..]);
        } else {
            let surplus = self.kept.len().saturating_sub(length);
            self.kept.drain(..surplus);
        }
    }
}

impl Seen {
    fn new(challenge: &str) -> Seen {
        Seen {
            length: 0,
            beginning: vec![],
            hash: Context::new(&SHA256),
            tail: Zeroizing::new(Vec::with_capacity(BUFFER + SHA256_OUTPUT_LEN)),
            challenge: Needle {
                text: challenge.into(),
                kept: Zeroizing::new(Vec::with_capacity(2 * challenge.len())),
                is_found: false,
            },
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        self.length += bytes.len() as u64;
        let missing = (MAGIC_AT + MAGIC.len()).saturating_sub(self.beginning.len());
        self.beginning.extend(bytes.iter().take(missing));
        self.challenge.add(bytes);
        self.tail.extend_from_slice(bytes);
        let hashed = self.tail.len().saturating_sub(SHA256_OUTPUT_LEN);
        self.hash.update(&self.tail[..hashed]);
        self.tail.drain(..hashed);
    }

    fn finish(self) -> Result<DownloadedSnapshot, Error> {
        let has_hash = self.length % PAGE == SHA256_OUTPUT_LEN as u64;
        if !has_hash
            || !self.beginning.ends_with(&MAGIC)
            || self.beginning.len() != MAGIC_AT + MAGIC.len()
        {
            return Err(Error::Refused(format!(
                "what arrived is no snapshot of etcd: {} bytes, expected pages of {PAGE} bytes and a hash of {SHA256_OUTPUT_LEN}; nothing was \
                 kept",
                self.length
            )));
        }
        let hash = self.hash.finish();
        if hash.as_ref() == &**self.tail {
            Ok(DownloadedSnapshot {
                length: self.length,
                hash: hex(hash.as_ref()),
            })
        } else {
            Err(Error::Refused(format!(
                "the snapshot was changed on its way: its SHA-256 is {}, and etcd wrote {}; nothing was kept. Run the command again",
                hex(hash.as_ref()),
                hex(&self.tail)
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use ring::digest::digest;
    use support::mutation::mutations;

    use super::*;

    const TEXT: &str = "the challenge";

    fn expected(length: Option<u64>) -> ExpectedFile<'static> {
        ExpectedFile {
            length,
            challenge: TEXT,
            node: "a",
        }
    }

    /// A database of this many pages, with its hash.
    fn snapshot(pages: usize) -> Vec<u8> {
        let mut content = vec![7; pages * PAGE as usize];
        content[MAGIC_AT..MAGIC_AT + 4].copy_from_slice(&MAGIC);
        content[100..][..TEXT.len()].copy_from_slice(TEXT.as_bytes());
        let hash = digest(&SHA256, &content);
        [&content, hash.as_ref()].concat()
    }

    /// Gives one byte, then two, and so on.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 += 1;
            let count = self.1.min(self.0.len()).min(buffer.len());
            let (now, later) = self.0.split_at(count);
            buffer[..count].copy_from_slice(now);
            self.0 = later;
            Ok(count)
        }
    }

    #[test]
    fn a_file_exists_only_if_it_has_all_that_etcd_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshot.db");
        let try_it = |content: &[u8], expected: Option<u64>| {
            let result = download(&super::tests::expected(expected), content, &path);
            let names = std::fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(names, usize::from(result.is_ok()));
            result
        };
        let good = snapshot(300);
        let length = good.len() as u64;
        let mut changed = good.clone();
        changed[9999] ^= 1;
        let without_hash = &good[..good.len() - SHA256_OUTPUT_LEN];
        let other = [&vec![7; 512], digest(&SHA256, &[7; 512]).as_ref()].concat();
        for (content, expected, says) in [
            (&changed[..], None, "changed on its way"),
            (without_hash, None, "no snapshot of etcd"),
            (&other, None, "no snapshot of etcd"),
            (&[], None, "no snapshot of etcd"),
            (
                &good[..PAGE as usize + SHA256_OUTPUT_LEN],
                None,
                "changed on its way",
            ),
            (
                &good[..100_000],
                Some(length),
                "broke off after 100000 bytes",
            ),
        ] {
            let error = try_it(content, expected).err().unwrap().to_string();
            assert!(error.contains(says), "{error}");
        }
        let saved = try_it(&good, Some(length)).unwrap();
        assert_eq!(
            (saved.length, std::fs::read(&path).unwrap()),
            (length, good.clone())
        );
        // another file is never replaced
        assert!(download(&expected(None), &good[..], &path).is_err());
        std::fs::remove_file(&path).unwrap();
        download(&expected(None), Slow(&good, 0), &path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), good);
    }

    #[test]
    fn only_the_content_that_was_hashed_is_accepted() {
        let good = snapshot(2);
        for content in mutations(&good, 2000) {
            let mut seen = Seen::new(TEXT);
            seen.add(&content);
            let is_good = content == good;
            assert!(is_good || seen.finish().is_err());
        }
    }

    #[test]
    fn a_snapshot_of_another_etcd_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshot.db");
        let forged = snapshot(3);
        let other = ExpectedFile {
            challenge: "another challenge",
            ..expected(None)
        };
        let error = download(&other, &forged[..], &path).err().unwrap();
        let error = error.to_string();
        assert!(error.contains("not of etcd of this cluster"), "{error}");
        assert!(error.contains("Something else than etcd on a"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_challenge_is_found_however_the_bytes_arrive() {
        let text = b"0123456789 the challenge 0123456789";
        for step in 1..=text.len() {
            let mut seen = Seen::new(TEXT);
            text.chunks(step).for_each(|chunk| seen.add(chunk));
            assert!(seen.challenge.is_found, "{step}");
            let mut seen = Seen::new("the challenges");
            text.chunks(step).for_each(|chunk| seen.add(chunk));
            assert!(!seen.challenge.is_found, "{step}");
        }
    }
}
