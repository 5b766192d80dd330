//! The record that a node keeps about itself on its state disk: its role, the salt of its cluster
//! ID, and whether its set-up was completed.
//!
//! `constellation/node_state.json` has the format of Constellation, whose initramfs also reads it.
//! The completion mark exists only in Firstlight: in Constellation, a node whose power failed
//! during the set-up came back as a broken member.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use base::crypto::MEASUREMENT_SALT_LEN;
use machines::Role;
use sys::file;

/// The path of the file below the mount point.
pub const FILE: &str = "constellation/node_state.json";
/// Exists if the node's cluster set-up was completed.
const COMPLETE_MARK: &str = "firstlight/complete";
/// Exists if the node's cluster set-up has begun.
const BEGUN_MARK: &str = "firstlight/begun";
/// Written by kubeadm. On a disk that Constellation set up it is the only sign of a completed
/// set-up.
const KUBELET_CONFIG: &str = "kubernetes/kubelet.conf";
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

#[derive(Serialize, Deserialize)]
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
            Error::Io(path, error) => write!(f, "{}: {error}", path.display()),
        }
    }
}

impl std::error::Error for Error {}

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
            Ok(_) => Self::parse(&text).map_err(|why| Error::Malformed(path, why)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::Missing(path)),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(Error::Malformed(path, "it is not UTF-8".into()))
            }
            Err(error) => Err(Error::Io(path, error)),
        }
    }

    /// Parses the content of the node state file. The error says what is wrong.
    pub fn parse(text: &str) -> Result<NodeState, String> {
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

    /// Writes the file below `root` atomically and durably.
    pub fn write(&self, root: &Path) -> Result<(), Error> {
        let state = Json {
            role: self.role.to_string(),
            measurement_salt: STANDARD.encode(self.measurement_salt),
        };
        let mut json = Vec::new();
        let tabs = serde_json::ser::PrettyFormatter::with_indent(b"\t");
        state
            .serialize(&mut serde_json::Serializer::with_formatter(&mut json, tabs))
            .map_err(|error| Error::Malformed(root.join(FILE), error.to_string()))?;
        write_durably(root, FILE, &json)
    }
}

/// Durably records that the set-up has begun: from now on [`is_complete`] is true only after
/// [`mark_complete`].
pub fn mark_begun(root: &Path) -> Result<(), Error> {
    write_durably(root, BEGUN_MARK, b"")
}

/// Durably records that the set-up is complete.
pub fn mark_complete(root: &Path) -> Result<(), Error> {
    write_durably(root, COMPLETE_MARK, b"")
}

/// Returns whether the set-up of the node whose disk is mounted at `root` was completed. If this is
/// false, the disk is formatted; a disk that cannot be read is therefore an error.
pub fn is_complete(root: &Path) -> Result<bool, Error> {
    let exists = |name: &str| {
        let path = root.join(name);
        path.try_exists().map_err(|error| Error::Io(path, error))
    };
    Ok(exists(COMPLETE_MARK)? || !exists(BEGUN_MARK)? && exists(KUBELET_CONFIG)?)
}

/// Returns whether kubeadm has configured a kubelet on the disk mounted at `root`.
pub fn has_kubelet(root: &Path) -> bool {
    root.join(KUBELET_CONFIG).exists()
}

/// Writes a file atomically and durably, and creates its directories below `root`.
fn write_durably(root: &Path, name: &str, content: &[u8]) -> Result<(), Error> {
    let path = root.join(name);
    let write = || {
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        file::replace(&path, content, 0o644)?;
        File::open(root)?.sync_all()
    };
    write().map_err(|error| Error::Io(path.clone(), error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    fn state() -> NodeState {
        NodeState {
            role: Role::ControlPlane,
            measurement_salt: [b'S'; 32],
        }
    }

    #[test]
    fn the_file_has_the_format_that_the_old_initramfs_reads() {
        let disk = tempfile::tempdir().unwrap();
        state().write(disk.path()).unwrap();
        assert_eq!(
            fs::read_to_string(disk.path().join(FILE)).unwrap(),
            "{\n\t\"Role\": \"ControlPlane\",\n\t\"MeasurementSalt\": \"U1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1NTU1M=\"\n}"
        );
        assert_eq!(NodeState::read(disk.path()).unwrap(), state());
    }

    #[test]
    fn a_second_write_replaces_the_first() {
        let disk = tempfile::tempdir().unwrap();
        state().write(disk.path()).unwrap();
        let other = NodeState {
            measurement_salt: [7; 32],
            ..state()
        };
        other.write(disk.path()).unwrap();
        assert_eq!(NodeState::read(disk.path()).unwrap(), other);
    }

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
            assert!(NodeState::parse(text).unwrap_err().contains(why), "{text}");
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

    #[test]
    fn a_disk_is_complete_by_our_mark_or_by_what_kubeadm_leaves() {
        let disk = tempfile::tempdir().unwrap();
        assert!(!is_complete(disk.path()).unwrap());
        mark_complete(disk.path()).unwrap();
        assert!(is_complete(disk.path()).unwrap());
        let old = tempfile::tempdir().unwrap();
        fs::create_dir_all(old.path().join("kubernetes")).unwrap();
        fs::write(old.path().join(KUBELET_CONFIG), "").unwrap();
        assert!(is_complete(old.path()).unwrap() && has_kubelet(old.path()));
    }

    #[test]
    fn a_disk_whose_set_up_has_begun_is_complete_by_our_mark_alone() {
        let disk = tempfile::tempdir().unwrap();
        mark_begun(disk.path()).unwrap();
        fs::create_dir_all(disk.path().join("kubernetes")).unwrap();
        fs::write(disk.path().join(KUBELET_CONFIG), "").unwrap();
        assert!(!is_complete(disk.path()).unwrap());
        mark_complete(disk.path()).unwrap();
        assert!(is_complete(disk.path()).unwrap());
    }

    #[test]
    fn a_disk_that_cannot_be_read_is_an_error_and_not_incomplete() {
        let disk = tempfile::tempdir().unwrap();
        // a read below a file fails like a read of a broken sector: with another error than "not
        // found"
        fs::write(disk.path().join("firstlight"), "").unwrap();
        assert!(matches!(is_complete(disk.path()), Err(Error::Io(..))));
    }
}
