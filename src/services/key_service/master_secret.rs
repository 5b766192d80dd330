//! The source of the key service's master secret: two files, or one file that an external KMS must
//! unwrap and that may be in a store.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base::crypto::Secret;
use keywrap::Author;
use kms::ClusterKms;
use zeroize::Zeroizing;

/// The master secret, raw bytes, in the pod.
pub const KEY_FILE: &str = "/var/config/mastersecret";
/// Its salt, raw bytes, in the pod.
pub const SALT_FILE: &str = "/var/config/salt";

/// The minimum length of the master secret in bytes, as in Constellation's key service.
const MIN_KEY_LEN: usize = 16;
/// The minimum length of the salt in bytes, as in Constellation's key service.
const MIN_SALT_LEN: usize = 32;
/// The maximum length of either file. A larger file is not a secret.
const MAX_FILE_LEN: usize = 4096;

/// The location of the master secret.
#[derive(Debug)]
pub struct MasterSecret {
    /// The master secret, at least 16 bytes; or the file of `firstlight wrap`, which names the key
    /// of an external KMS that must unwrap it; or the URI of a store that has such a file.
    pub key: PathBuf,
    /// The salt, at least 32 bytes. A wrapped master secret contains it.
    pub salt: PathBuf,
}

impl MasterSecret {
    /// Reads the master secret, and has it unwrapped. One attempt.
    pub fn read(&self) -> Result<ClusterKms, Error> {
        const KEY: &str = "master secret";
        let content = read(&self.key, KEY, 0..=keywrap::MAX_LEN)?;
        if let Some(unwrapped) = keywrap::unwrapped(&content, Author::File, None) {
            return unwrapped.map_err(|error| Error::Wrapped(self.key.clone(), error));
        }
        let valid = MIN_KEY_LEN..=MAX_FILE_LEN;
        if !valid.contains(&content.len()) {
            return Err(Error::Size(KEY, self.key.clone(), content.len(), valid));
        }
        let salt = read(
            &self.salt,
            "salt of the master secret",
            MIN_SALT_LEN..=MAX_FILE_LEN,
        )?;
        let [key, salt] = [content, salt].map(|bytes| Secret::new(bytes.to_vec()));
        ClusterKms::new(key, salt).map_err(Error::Kms)
    }
}

/// Reads a file whose length in bytes is in this range. Every byte counts, including a line break.
pub fn read(
    path: &Path,
    what: &'static str,
    lengths: std::ops::RangeInclusive<usize>,
) -> Result<Zeroizing<Vec<u8>>, Error> {
    let failed = |error| Error::Read(what, path.into(), error);
    let file = File::open(path).map_err(failed)?;
    // The capacity is sufficient for the whole file, because a growing vector would leave copies
    // behind.
    let most = *lengths.end() as u64 + 1;
    let mut bytes = Zeroizing::new(Vec::with_capacity(lengths.end() + 1));
    file.take(most).read_to_end(&mut bytes).map_err(failed)?;
    match lengths.contains(&bytes.len()) {
        true => Ok(bytes),
        false => Err(Error::Size(what, path.into(), bytes.len(), lengths)),
    }
}

/// Why there is no master secret.
#[derive(Debug)]
pub enum Error {
    /// The file of the named secret cannot be read.
    Read(&'static str, PathBuf, io::Error),
    /// The named secret's file has the wrong length: its name, path, length and valid lengths in
    /// bytes.
    Size(
        &'static str,
        PathBuf,
        usize,
        std::ops::RangeInclusive<usize>,
    ),
    /// The secret is not valid.
    Kms(kms::Error),
    /// The secret in this file cannot be unwrapped.
    Wrapped(PathBuf, keywrap::Error),
}

impl Error {
    /// Returns whether another attempt may succeed, because the external KMS is unavailable.
    pub fn may_pass(&self) -> bool {
        matches!(self, Error::Wrapped(_, error) if error.may_pass())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Read(what, path, error) => {
                write!(f, "cannot read the {what} from {}: {error}", path.display())
            }
            Error::Size(what, path, len, lengths) => {
                let (path, least, most) = (path.display(), lengths.start(), lengths.end());
                write!(
                    f,
                    "the {what} in {path}: expected {least} to {most} bytes, got {len}"
                )
            }
            Error::Kms(error) => error.fmt(f),
            Error::Wrapped(path, error) => write!(
                f,
                "the master secret in {} cannot be unwrapped: {error}",
                path.display()
            ),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn files(dir: &Path, key: &[u8], salt: &[u8]) -> MasterSecret {
        let (key_file, salt_file) = (dir.join("mastersecret"), dir.join("salt"));
        fs::write(&key_file, key).unwrap();
        fs::write(&salt_file, salt).unwrap();
        MasterSecret {
            key: key_file,
            salt: salt_file,
        }
    }

    #[test]
    fn short_long_and_missing_secrets_are_refused_with_the_file_named() {
        let dir = tempfile::tempdir().unwrap();
        for (key, salt, wrong) in [
            (
                &[1; 15][..],
                &[2; 32][..],
                "mastersecret: expected 16 to 4096 bytes, got 15",
            ),
            (
                &[1; 16],
                &[2; 31],
                "salt: expected 32 to 4096 bytes, got 31",
            ),
            (
                &[1; 5000],
                &[2; 32],
                "mastersecret: expected 16 to 4096 bytes, got 5000",
            ),
        ] {
            let error = files(dir.path(), key, salt).read().unwrap_err().to_string();
            assert!(error.ends_with(wrong), "{error}");
        }
        let there = files(dir.path(), &[1; 16], &[2; 32]);
        assert!(there.read().is_ok());
        fs::remove_file(dir.path().join("salt")).unwrap();
        assert!(matches!(there.read(), Err(Error::Read(..))));
    }

    #[test]
    fn the_secret_is_the_file_byte_for_byte() {
        let dir = tempfile::tempdir().unwrap();
        let kms = files(dir.path(), b"0123456789abcdef\n", &[2; 32])
            .read()
            .unwrap();
        let expected = ClusterKms::new(
            Secret::new(b"0123456789abcdef\n".to_vec()),
            Secret::new(vec![2; 32]),
        );
        assert_eq!(kms, expected.unwrap());
    }

    #[test]
    fn a_wrapped_secret_that_no_service_can_unwrap_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wrapped.json");
        fs::write(&path, r#"{"wrappedKey": "", "version": 1}"#).unwrap();
        let secret = MasterSecret {
            key: path.clone(),
            salt: "/nonexistent".into(),
        };
        let error = secret.read().unwrap_err();
        assert!(!error.may_pass());
        let error = error.to_string();
        assert!(
            error.contains(path.to_str().unwrap()) && error.contains("not a wrapped master secret"),
            "{error}"
        );
    }
}
