//! The source of the key service's master secret: two files, or one file that an external KMS must
//! unwrap and that may be in a store. In a pod, this is one file that the control plane's wrapping key
//! decrypts first ([`kubernetes::wrapping_key`]).

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base::crypto::Secret;
use base::master_secret::{MasterSecret, NO_STORE};
use keywrap::Author;
use kubernetes::wrapping_key;
use zeroize::Zeroizing;

/// The master secret, raw bytes, in the pod.
pub const KEY_FILE: &str = "/var/config/mastersecret";
/// Its salt, raw bytes, in the pod.
pub const SALT_FILE: &str = "/var/config/salt";

/// The beginning of a master secret as a key URI.
const URI: &str = "kms://";
/// The minimum length of the master secret in bytes, as in Constellation's key service.
const MIN_KEY_LEN: usize = 16;
/// The minimum length of the salt in bytes, as in Constellation's key service.
const MIN_SALT_LEN: usize = 32;
/// The maximum length of either file. A larger file is not a secret.
const MAX_FILE_LEN: usize = 4096;

/// The location of the master secret.
#[derive(Debug)]
pub struct MasterSecretFiles {
    /// The master secret, at least 16 bytes; or the file of `firstlight wrap`, which names the key
    /// of an external KMS that must unwrap it; or the URI of a store that has such a file.
    pub key: PathBuf,
    /// The salt, at least 32 bytes. A wrapped master secret contains it.
    pub salt: PathBuf,
    /// The directory of the wrapping key, for a master secret that is encrypted for control planes.
    pub wrapping_key: PathBuf,
    /// Whether the wrapping key is written there if it is missing. A cluster of an earlier version has
    /// no such key yet.
    pub places_wrapping_key: bool,
}

impl MasterSecretFiles {
    /// Reads the master secret, and has it unwrapped. One attempt. Then writes the wrapping key, if
    /// this is asked for.
    pub fn read(&self) -> Result<MasterSecret, Error> {
        let secret = self.found()?;
        let key = wrapping_key::of(&secret);
        if self.places_wrapping_key {
            wrapping_key::place(&self.wrapping_key, &key).map_err(Error::WrappingKey)?;
        }
        match wrapping_key::read(&self.wrapping_key).map_err(Error::WrappingKey)? {
            // somebody has replaced the Secret, and would choose all keys of new disks
            Some(there) if there != key => Err(Error::OtherSecret(self.key.clone())),
            _ => Ok(secret),
        }
    }

    fn found(&self) -> Result<MasterSecret, Error> {
        const KEY: &str = "master secret";
        let mut content = read(&self.key, KEY, 0..=wrapping_key::MAX_LEN)?;
        if wrapping_key::is_encrypted(&content) {
            content = self.decrypted(&content)?;
            // the operator's tool encrypts a plain master secret as a key URI
            if let Some(uri) = str::from_utf8(&content)
                .ok()
                .filter(|it| it.starts_with(URI))
            {
                return MasterSecret::from_uris(uri, NO_STORE).map_err(Error::Kms);
            }
        }
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
        MasterSecret::new(key, salt).map_err(Error::Kms)
    }

    /// Decrypts a master secret with this machine's wrapping key.
    fn decrypted(&self, content: &[u8]) -> Result<Zeroizing<Vec<u8>>, Error> {
        let there = wrapping_key::read(&self.wrapping_key);
        let key = match there.map_err(Error::WrappingKey)? {
            Some(key) => key,
            None => return Err(Error::NoWrappingKey(self.wrapping_key.clone())),
        };
        let decrypted = wrapping_key::decrypt(content, &key);
        decrypted.map_err(|error| Error::Encrypted(self.key.clone(), error))
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
    if lengths.contains(&bytes.len()) {
        Ok(bytes)
    } else {
        Err(Error::Size(what, path.into(), bytes.len(), lengths))
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
    Kms(base::master_secret::Error),
    /// The secret in this file cannot be unwrapped.
    Wrapped(PathBuf, keywrap::Error),
    /// The secret in this file cannot be decrypted.
    Encrypted(PathBuf, wrapping_key::Undecipherable),
    /// This directory has no wrapping key.
    NoWrappingKey(PathBuf),
    /// The secret in this file is not the one of this control plane's wrapping key.
    OtherSecret(PathBuf),
    /// The wrapping key cannot be read or written.
    WrappingKey(io::Error),
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
            Error::Encrypted(path, error) => {
                write!(f, "the master secret in {}: {error}", path.display())
            }
            Error::NoWrappingKey(directory) => write!(
                f,
                "this machine has no wrapping key ({}): control planes get it in their join ticket. If this is a control plane, \
                 remove it (firstlight node remove --may-return) and let it join again with an image of this version",
                directory.join(wrapping_key::FILE).display()
            ),
            Error::OtherSecret(path) => write!(
                f,
                "the master secret in {} is of another cluster than this control plane's wrapping key: find out who changed the \
                 Secret, and run `firstlight apply` with the cluster's own master secret",
                path.display()
            ),
            Error::WrappingKey(error) => write!(f, "the wrapping key: {error}"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn files(dir: &Path, key: &[u8], salt: &[u8]) -> MasterSecretFiles {
        let (key_file, salt_file) = (dir.join("mastersecret"), dir.join("salt"));
        fs::write(&key_file, key).unwrap();
        fs::write(&salt_file, salt).unwrap();
        MasterSecretFiles {
            key: key_file,
            salt: salt_file,
            wrapping_key: dir.join("firstlight"),
            places_wrapping_key: false,
        }
    }

    /// Writes the key as [`wrapping_key::place`], but for the group of the file, which only root may give it.
    fn write_wrapping_key(secret: &MasterSecretFiles, key: &Secret) {
        fs::create_dir(&secret.wrapping_key).unwrap();
        let file = secret.wrapping_key.join(wrapping_key::FILE);
        fs::write(file, key.expose()).unwrap();
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
        let expected = MasterSecret::new(
            Secret::new(b"0123456789abcdef\n".to_vec()),
            Secret::new(vec![2; 32]),
        );
        assert_eq!(kms, expected.unwrap());
    }

    #[test]
    fn an_encrypted_secret_opens_only_where_the_wrapping_key_is() {
        let dir = tempfile::tempdir().unwrap();
        let secret = |byte| Secret::new(vec![byte; 32]);
        let kms = MasterSecret::new(secret(1), secret(2)).unwrap();
        let key = wrapping_key::of(&kms);
        let text = wrapping_key::encrypt(kms.uri().as_bytes(), &key).unwrap();
        let there = files(dir.path(), text.as_bytes(), b"");
        let error = there.read().unwrap_err();
        assert!(matches!(error, Error::NoWrappingKey(_)), "{error}");
        write_wrapping_key(&there, &key);
        assert_eq!(there.read().unwrap(), kms);
        let other = wrapping_key::encrypt(b"kms://", &secret(3)).unwrap();
        let error = files(dir.path(), other.as_bytes(), b"").read().unwrap_err();
        assert!(matches!(error, Error::Encrypted(..)), "{error}");
    }

    #[test]
    fn a_plain_secret_can_place_the_wrapping_key_that_its_encrypted_form_needs() {
        if !support::is_root("give a file to a group") {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let plain = MasterSecretFiles {
            places_wrapping_key: true,
            ..files(dir.path(), &[1; 32], &[2; 32])
        };
        let kms = plain.read().unwrap();
        let key = wrapping_key::read(&plain.wrapping_key).unwrap();
        assert_eq!(key, Some(wrapping_key::of(&kms)));
        plain.read().unwrap();
        let other = MasterSecretFiles {
            places_wrapping_key: true,
            ..files(dir.path(), &[3; 32], &[2; 32])
        };
        let error = other.read().unwrap_err();
        assert!(matches!(error, Error::WrappingKey(_)), "{error}");
        let only_read = MasterSecretFiles {
            places_wrapping_key: false,
            ..other
        };
        let error = only_read.read().unwrap_err();
        assert!(matches!(error, Error::OtherSecret(_)), "{error}");
    }

    #[test]
    fn an_encrypted_secret_may_need_an_external_kms_too() {
        let dir = tempfile::tempdir().unwrap();
        let key = Secret::new(vec![1; 32]);
        let wrapped = br#"{"wrappedKey": "", "version": 1}"#;
        let text = wrapping_key::encrypt(wrapped, &key).unwrap();
        let there = files(dir.path(), text.as_bytes(), b"");
        write_wrapping_key(&there, &key);
        let error = there.read().unwrap_err();
        assert!(matches!(error, Error::Wrapped(..)), "{error}");
    }

    #[test]
    fn a_wrapped_secret_that_no_service_can_unwrap_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wrapped.json");
        fs::write(&path, r#"{"wrappedKey": "", "version": 1}"#).unwrap();
        let secret = MasterSecretFiles {
            key: path.clone(),
            salt: "/nonexistent".into(),
            wrapping_key: "/nonexistent".into(),
            places_wrapping_key: false,
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
