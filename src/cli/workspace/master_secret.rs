//! The master secret file: the operator's only secret, from which every key of the cluster is
//! derived.
//!
//! Constellation's format: a JSON object, indented by tabs, of two byte strings in base64 (RFC 4648
//! §4).
//!
//! ```text
//! {
//!         "key": "..",
//!         "salt": ".."
//! }
//! ```
//!
//! Without it the cluster cannot be recovered. So the command makes it durable before a node gets
//! it, and never overwrites it.
//!
//! Instead, the file may contain the master secret as wrapped by `firstlight wrap`: then an
//! external KMS unwraps it at each use. Instead of a file, the operator may also give the URI of a
//! store that has the wrapped one.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::shell::{
    error::Error,
    files::{self, FileError},
};
use crate::workspace::{keeping::Wish, shares};
use base::crypto::{KEY_LEN, Secret};
use base::master_secret::MasterSecret;
use clap::Args;
use keywrap::{Author, store};
use kubernetes::wrapping_key;

/// Minimum bytes of the key that the key service and Constellation accept.
pub const MIN_KEY_LEN: usize = 16;
/// Minimum bytes of the salt that the key service and Constellation accept.
pub const MIN_SALT_LEN: usize = 32;

/// The default file of the master secret.
pub const MASTER_SECRET_FILE: &str = "firstlight-mastersecret.json";

/// The default file of a wrapped master secret.
pub const WRAPPED_SECRET_FILE: &str = "firstlight-mastersecret.wrapped.json";

/// The master secret of the cluster.
#[derive(Debug, Clone, Args)]
pub struct SecretOptions {
    /// The cluster's master secret; - is standard input; storage://.. is a wrapped one in a store (docs/kms.md)
    #[arg(long, value_name = "FILE", default_value = MASTER_SECRET_FILE, conflicts_with = "share")]
    pub master_secret: Option<PathBuf>,
    /// In place of --master-secret: the file of a share that `firstlight share` made; may be repeated; with - the missing
    /// shares are asked for on the terminal
    #[arg(long, value_name = "FILE")]
    pub share: Vec<PathBuf>,
}

impl SecretOptions {
    /// Returns the source of the master secret.
    pub fn source(&self) -> SecretSource {
        if self.share.is_empty() {
            let file = self.master_secret.clone();
            SecretSource::File(file.unwrap_or_else(|| MASTER_SECRET_FILE.into()))
        } else {
            SecretSource::Shares(self.share.clone())
        }
    }
}

/// The origin of a master secret.
#[derive(Debug, PartialEq, Eq)]
pub enum SecretOrigin {
    /// This call made and wrote it.
    Created,
    /// The file had it.
    Found,
}

/// The source from which a command gets the master secret.
#[derive(Debug, Clone)]
pub enum SecretSource {
    /// This file, or the store with this URI.
    File(PathBuf),
    /// The shares in these files; `-` is the terminal.
    Shares(Vec<PathBuf>),
}

impl SecretSource {
    /// Reads the master secret, or restores it from its shares.
    pub fn read(&self) -> Result<MasterSecret, Error> {
        self.read_wrapped(None)
    }

    /// The same; `kms` is the key URI that the operator gave to the command, if any.
    pub fn read_wrapped(&self, kms: Option<&str>) -> Result<MasterSecret, Error> {
        match self {
            SecretSource::File(path) => Ok(read_wrapped(path, kms)?),
            SecretSource::Shares(paths) => shares::read(paths),
        }
    }
}

/// Reads the master secret in the file. If there is no file, makes a new one and writes it with
/// mode 0600, wrapped if the operator asks for that.
pub fn open_or_create(path: &Path, wish: &Wish) -> Result<(MasterSecret, SecretOrigin), FileError> {
    let is_file = !files::is_standard_input(path) && store_uri(path).is_none();
    if is_file && !path.exists() {
        match create(path, wish) {
            Err(error) if error.kind() == Some(io::ErrorKind::AlreadyExists) => {}
            created => return Ok((created?, SecretOrigin::Created)),
        }
    }
    Ok((
        read_wrapped(path, wish.kms.as_deref())?,
        SecretOrigin::Found,
    ))
}

/// Returns the URI of a store that is given instead of a file.
fn store_uri(path: &Path) -> Option<&str> {
    store::uri(path.as_os_str().as_bytes())
}

/// Reads the master secret in the file, which only its owner may read, or from standard input
/// (`-`). Has an external KMS unwrap it if it is wrapped.
pub fn read(path: &Path) -> Result<MasterSecret, FileError> {
    read_wrapped(path, None)
}

/// The same; `kms` is the key URI that the operator gave to the command, if any.
pub fn read_wrapped(path: &Path, kms: Option<&str>) -> Result<MasterSecret, FileError> {
    let (content, author) = match store_uri(path) {
        Some(uri) => (Zeroizing::new(uri.as_bytes().to_vec()), Author::Operator),
        None => (files::read_secret(path)?, Author::File),
    };
    if wrapping_key::is_encrypted(&content) {
        let why = "it is encrypted for the control planes of its cluster, and no command reads it: give the file that it was made of";
        return Err(FileError::Content(path.into(), why.into()));
    }
    if let Some(unwrapped) = keywrap::unwrapped(&content, author, kms) {
        return unwrapped.map_err(|error| FileError::Content(path.into(), error.to_string()));
    }
    parse(&content)
        .map_err(|what| FileError::Content(path.into(), format!("not a master secret: {what}")))
}

/// Reads the master secret in a file without any server: `None` if an external KMS has wrapped it, or
/// if the path is the URI of a store.
pub fn read_plain(path: &Path) -> Result<Option<MasterSecret>, FileError> {
    if store_uri(path).is_some() {
        return Ok(None);
    }
    let content = files::read_private(path)?;
    if keywrap::find(&content, Author::File).is_some() {
        return Ok(None);
    }
    let parsed = parse(&content).map(Some);
    parsed.map_err(|what| FileError::Content(path.into(), format!("not a master secret: {what}")))
}

fn create(path: &Path, wish: &Wish) -> Result<MasterSecret, FileError> {
    let fault = |error: String| FileError::Content(path.into(), error);
    let (key, salt) = (Secret::random(KEY_LEN), Secret::random(MIN_SALT_LEN));
    let secret = MasterSecret::new(key, salt).map_err(|error| fault(error.to_string()))?;
    let external = wish.key().map_err(|error| fault(error.to_string()))?;
    let content = external.map(|external| wish.wrap(&secret, &external));
    let content = content
        .transpose()
        .map_err(|error| fault(format!("not written: {error}")))?;
    let content = content.map_or_else(|| text(&secret), Zeroizing::new);
    files::create_private(path, content.as_bytes())?;
    Ok(secret)
}

/// Writes a master secret, plain or wrapped, to a new file or a store. Returns the path or URI from
/// which it can be read.
pub fn write(out: &Path, content: &[u8]) -> Result<PathBuf, FileError> {
    let Some(uri) = store_uri(out) else {
        return files::create_private(out, content).map(|()| out.into());
    };
    let written = store::write_once(uri, content).map_err(|error| error.to_string());
    written
        .map(PathBuf::from)
        .map_err(|why| FileError::Content(out.into(), why))
}

/// Returns the file's text. It has no line break at the end, as in Constellation.
pub fn text(secret: &MasterSecret) -> Zeroizing<String> {
    let base64 = |secret: &Secret| Zeroizing::new(STANDARD.encode(secret.expose()));
    Zeroizing::new(format!(
        "{{\n\t\"key\": \"{}\",\n\t\"salt\": \"{}\"\n}}",
        *base64(secret.key()),
        *base64(secret.salt())
    ))
}

/// Parses the file. The error contains no part of the content.
fn parse(content: &[u8]) -> Result<MasterSecret, Error> {
    #[derive(Deserialize, Zeroize, ZeroizeOnDrop)]
    struct File {
        key: String,
        salt: String,
    }
    if content.is_empty() {
        return Err(Error::content(
            "it is empty. An earlier run may have been interrupted, and no node has got a secret from it: remove the file",
        ));
    }
    let file: File = serde_json::from_slice(content).map_err(|error| {
        format!(
            "expected a JSON object with key and salt (line {})",
            error.line()
        )
    })?;
    let key = field("key", &file.key, MIN_KEY_LEN)?;
    let salt = field("salt", &file.salt, MIN_SALT_LEN)?;
    MasterSecret::new(key, salt).map_err(Error::content)
}

fn field(name: &str, base64: &str, min: usize) -> Result<Secret, Error> {
    let bytes = STANDARD
        .decode(base64)
        .map_err(|_| format!("{name} is not base64"))?;
    let secret = Secret::new(bytes);
    match secret.len() {
        len if len < min => Err(Error::Content(format!(
            "{name} has {len} bytes, expected at least {min}"
        ))),
        _ => Ok(secret),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use support::mutation::mutations;

    const OLD: &str = "{\n\t\"key\": \"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\",\n\t\"salt\": \"AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\"\n}";

    fn ones_and_twos() -> MasterSecret {
        MasterSecret::new(Secret::new(vec![1; 32]), Secret::new(vec![2; 32])).unwrap()
    }

    #[test]
    fn the_format_is_the_old_systems() {
        assert_eq!(text(&ones_and_twos()).as_str(), OLD);
        assert_eq!(parse(OLD.as_bytes()).unwrap(), ones_and_twos());
    }

    #[test]
    fn a_new_secret_is_written_once_and_found_ever_after() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("master.json");
        let (first, origin) = open_or_create(&path, &Wish::default()).unwrap();
        assert_eq!(origin, SecretOrigin::Created);
        let written = fs::read(&path).unwrap();
        let (second, origin) = open_or_create(&path, &Wish::default()).unwrap();
        assert_eq!((second, origin), (first, SecretOrigin::Found));
        assert_eq!(fs::read(&path).unwrap(), written);
    }

    #[test]
    fn a_file_that_is_no_secret_is_neither_used_nor_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("master.json");
        for (content, expected) in [
            ("", "it is empty"),
            ("{}", "expected a JSON object"),
            (r#"{"key":"AQ==","salt":"AQ=="}"#, "key has 1 bytes"),
            (r#"{"key":"!","salt":"AQ=="}"#, "key is not base64"),
            (
                r#"{"key":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","salt":"AQ=="}"#,
                "salt has 1 bytes",
            ),
        ] {
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            let error = open_or_create(&path, &Wish::default())
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{content}: {error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
    }

    #[test]
    fn a_secret_that_others_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("master.json");
        fs::write(&path, OLD).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(
            open_or_create(&path, &Wish::default()),
            Err(FileError::Loose(..))
        ));
    }

    #[test]
    fn mutated_files_give_a_secret_or_an_error_without_its_text() {
        for bytes in mutations(OLD.as_bytes(), 20_000) {
            if let Err(error) = parse(&bytes) {
                let error = error.to_string();
                assert!(!error.contains("AQE") && !error.contains("AgI"), "{error}");
            }
        }
    }
}
