//! The record that a node keeps about itself on its state disk: its role, and the salt of its
//! cluster ID. `constellation/node_state.json` has the format of Constellation, whose initramfs also
//! reads it. The booted system writes it (`src/bootstrapper/state/state_disk.rs`).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use base::crypto::MEASUREMENT_SALT_LEN;
use base::machines::Role;

/// The path of the file below the mount point.
pub const FILE: &str = "constellation/node_state.json";
/// Maximum number of bytes that are read; a real file has 32 bytes of salt and a role.
const MAX_FILE: u64 = 4096;

/// The content of the node state file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    /// The role. It is written for Constellation only: after a reboot the role comes from the
    /// metadata service.
    pub role: Role,
    /// The HKDF salt of the cluster ID; not secret.
    pub measurement_salt: [u8; MEASUREMENT_SALT_LEN],
}

#[derive(Deserialize)]
struct Json {
    #[serde(rename = "Role")]
    role: String,
    #[serde(rename = "MeasurementSalt")]
    measurement_salt: String,
}

/// Why the node state cannot be used.
#[derive(Debug)]
pub enum Error {
    /// The file is missing or empty: the node never became a member of a cluster.
    Missing(PathBuf),
    /// The content of the file is invalid.
    Malformed(PathBuf, String),
    /// The file cannot be read or written.
    Io(PathBuf, io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Missing(path) => write!(f, "{} is missing or empty", path.display()),
            Error::Malformed(path, why) => write!(f, "{} is malformed: {why}", path.display()),
            Error::Io(path, error) => write!(f, "cannot access {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for Error {}

/// The fault in the content of the file, as a clause.
#[derive(Debug)]
pub struct MalformedState(pub String);

impl From<String> for MalformedState {
    fn from(why: String) -> MalformedState {
        MalformedState(why)
    }
}

impl NodeState {
    /// Reads the state of the disk mounted at `root`.
    pub fn read(root: &Path) -> Result<NodeState, Error> {
        let path = root.join(FILE);
        let mut text = String::new();
        // the content of the disk may be hostile: a pipe would block, a link could lead out of the
        // disk
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let read = File::options()
            .read(true)
            .custom_flags(flags)
            .open(&path)
            .and_then(|file| {
                if !file.metadata()?.is_file() {
                    return Err(io::Error::other("it is not a regular file"));
                }
                file.take(MAX_FILE).read_to_string(&mut text)
            });
        match read {
            Ok(0) => Err(Error::Missing(path)),
            Ok(_) => Self::parse(&text).map_err(|why| Error::Malformed(path, why.0)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::Missing(path)),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(Error::Malformed(path, "it is not UTF-8".into()))
            }
            Err(error) => Err(Error::Io(path, error)),
        }
    }

    /// Parses the content of the node state file.
    pub fn parse(text: &str) -> Result<NodeState, MalformedState> {
        let json: Json = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let salt = STANDARD
            .decode(&json.measurement_salt)
            .map_err(|error| format!("MeasurementSalt: {error}"))?;
        let length = salt.len();
        let measurement_salt = salt.try_into().map_err(|_| {
            format!("MeasurementSalt has {length} bytes, expected {MEASUREMENT_SALT_LEN}")
        })?;
        Ok(NodeState {
            role: Role::parse(&json.role),
            measurement_salt,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use support::mutation::mutations;

    #[test]
    fn an_absent_or_empty_file_is_missing() {
        let disk = tempfile::tempdir().unwrap();
        assert!(matches!(
            NodeState::read(disk.path()),
            Err(Error::Missing(_))
        ));
        fs::create_dir_all(disk.path().join("constellation")).unwrap();
        fs::write(disk.path().join(FILE), "").unwrap();
        assert!(matches!(
            NodeState::read(disk.path()),
            Err(Error::Missing(_))
        ));
    }

    #[test]
    fn a_pipe_or_a_link_instead_of_the_file_is_an_error_at_once() {
        let disk = tempfile::tempdir().unwrap();
        let path = disk.path().join(FILE);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&path)
                .status()
                .unwrap()
                .success()
        );
        assert!(matches!(NodeState::read(disk.path()), Err(Error::Io(..))));
        fs::remove_file(&path).unwrap();
        let elsewhere = tempfile::NamedTempFile::new().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &path).unwrap();
        assert!(matches!(NodeState::read(disk.path()), Err(Error::Io(..))));
    }

    #[test]
    fn malformed_files_say_what_is_wrong() {
        for (text, why) in [
            ("{", "EOF"),
            (
                r#"{"Role":"Worker","MeasurementSalt":"?"}"#,
                "MeasurementSalt",
            ),
            (
                r#"{"Role":"Worker","MeasurementSalt":"U2FsdA=="}"#,
                "has 4 bytes, expected 32",
            ),
        ] {
            assert!(
                NodeState::parse(text).unwrap_err().0.contains(why),
                "{text}"
            );
        }
    }

    #[test]
    fn mutated_files_give_a_state_or_an_error() {
        let valid =
            r#"{"Role":"Worker","MeasurementSalt":"U1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1M="}"#;
        let texts = mutations(valid.as_bytes(), 20_000)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let good = texts.filter(|text| NodeState::parse(text).is_ok()).count();
        assert!((10..20_000).contains(&good), "{good}");
    }
}
