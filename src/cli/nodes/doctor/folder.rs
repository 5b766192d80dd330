//! The operator's files. Of the master secret only the cluster's ID is kept.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base::crypto::CLUSTER_ID_LEN;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::cluster::init::expected_cluster_id;
use crate::shell::files::FileError;
use crate::workspace::{master_secret, state::State};

/// Where the operator's files are.
#[derive(Debug)]
pub struct Paths {
    /// The attestation policy that the nodes must meet.
    pub policy: PathBuf,
    /// The state file; it may be missing.
    pub state: PathBuf,
    /// The file with the master secret; it may be missing.
    pub master_secret: PathBuf,
    /// The administrator's kubeconfigs.
    pub kubeconfigs: Vec<PathBuf>,
}

/// The operator's files.
#[derive(Debug, Default)]
pub struct Folder {
    /// The files that exist.
    pub files: Vec<OwnFile>,
    /// The measurement salt in the state file, in base64, if there is a state file.
    pub salt: Option<String>,
    /// The cluster's ID in the state file or from the command line.
    pub cluster: Option<[u8; CLUSTER_ID_LEN]>,
    /// The ID of the cluster that the master secret and the salt make.
    pub derived: Option<[u8; CLUSTER_ID_LEN]>,
    /// Why a file cannot be used: the file, and the reason.
    pub unusable: Vec<(PathBuf, String)>,
    /// Whether there is a state file.
    pub has_state: bool,
    /// Whether there is a file with the master secret, or a place that keeps it.
    pub has_master_secret: bool,
}

/// A file of the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnFile {
    /// Its path.
    pub path: PathBuf,
    /// The permissions.
    pub mode: u32,
    /// The user who owns it.
    pub owner: u32,
    /// Whether its content is secret.
    pub is_secret: bool,
}

impl Folder {
    /// Looks at the files; `cluster` is the cluster's ID on the command line.
    pub fn look(paths: &Paths, cluster: Option<[u8; CLUSTER_ID_LEN]>) -> Folder {
        let mut folder = Folder::default();
        folder.add(&paths.policy, false);
        folder.has_state = folder.add(&paths.state, true);
        folder.has_master_secret = folder.add(&paths.master_secret, true);
        for kubeconfig in &paths.kubeconfigs {
            folder.add(kubeconfig, true);
        }
        let state = folder.used(&paths.state, State::find(&paths.state));
        let state = state.flatten();
        folder.cluster = cluster.or(state.as_ref().and_then(|state| state.cluster_id));
        folder.salt = state
            .as_ref()
            .map(|state| STANDARD.encode(state.measurement_salt));
        let secret = match master_secret::read_plain(&paths.master_secret) {
            // the check of the modes says so
            Err(FileError::Loose(..)) => None,
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => None,
            read => folder.used(&paths.master_secret, read).flatten(),
        };
        if let (Some(secret), Some(state)) = (secret, &state) {
            folder.derived = expected_cluster_id(&secret, &state.measurement_salt).ok();
        }
        folder
    }

    /// Adds a file if it exists. Returns whether it does.
    fn add(&mut self, path: &Path, is_secret: bool) -> bool {
        let Ok(metadata) = fs::metadata(path) else {
            return false;
        };
        // a pipe or a device is no file that stays
        if metadata.is_file() {
            self.files.push(OwnFile {
                path: path.into(),
                mode: metadata.mode() & 0o7777,
                owner: metadata.uid(),
                is_secret,
            });
        }
        true
    }

    fn used<T>(&mut self, path: &Path, read: Result<T, FileError>) -> Option<T> {
        match read {
            Ok(value) => Some(value),
            Err(error) => {
                self.unusable.push((path.into(), error.to_string()));
                None
            }
        }
    }
}
