//! The state file on the operator's machine. It has the measurement salt (so that a repeated init
//! makes the same cluster ID), the ID of the created cluster, the attestation keys of nodes that got
//! the master secret, and the nodes that the cluster had when a command last listed them.
//!
//! An earlier `firstlight` reads the file too: it ignores the list of nodes, and drops it when it
//! writes the file.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::shell::{
    error::Error,
    files::{self, FileError},
};
use base::crypto::{self, CLUSTER_ID_LEN, MEASUREMENT_SALT_LEN};
use base::machines::Role;
use base::text::{self, hex};
use base::time;
use clap::Args;
use verifier::KeyName;

const VERSION: u32 = 1;
/// Maximum number of nodes in the file, so that it stays smaller than the largest file that is read:
/// a node has at most 600 bytes. Control planes come first.
pub const MAX_NODES: usize = 1500;
/// Maximum number of addresses of a node in the file.
pub const MAX_ADDRESSES: usize = 4;

/// The default state file.
pub const STATE_FILE: &str = "firstlight-state.json";

/// What the operator knows of the cluster.
#[derive(Debug, Args)]
pub struct ClusterOptions {
    /// The state file, which has the cluster's ID and its nodes' attestation keys; may be missing
    #[arg(long, value_name = "FILE", default_value = STATE_FILE)]
    pub state: PathBuf,
    /// The cluster's ID; replaces the one in the state file
    #[arg(long, value_name = "HEX", value_parser = cluster_id)]
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
}

/// Parses the ID of a cluster.
pub fn cluster_id(text: &str) -> Result<[u8; CLUSTER_ID_LEN], &'static str> {
    unhex(text).ok_or("expected 64 hexadecimal digits")
}

/// The state file, in memory and on disk.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    /// The salt from which the cluster ID is derived, together with the master secret.
    pub measurement_salt: [u8; MEASUREMENT_SALT_LEN],
    /// The cluster's ID; `None` until the init is complete.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// The attestation keys of nodes that got the master secret.
    pub attestation_keys: BTreeSet<KeyName>,
    /// The nodes of the cluster, as its API server last listed them.
    pub nodes: Vec<KnownNode>,
    /// When the API server listed the nodes.
    pub nodes_listed: Option<SystemTime>,
}

/// A node of the cluster, which can be reached without the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownNode {
    /// The name of the Node.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// Its addresses, the internal ones first.
    pub addresses: Vec<String>,
    /// Its attestation key, from the record of the join service. Only `recover --all` believes it:
    /// unlike [`State::attestation_keys`], it adds nothing to the policy of the services.
    pub key: Option<KeyName>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    version: u32,
    measurement_salt: String,
    #[serde(rename = "clusterID", skip_serializing_if = "Option::is_none", default)]
    cluster_id: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    attestation_keys: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    nodes_listed: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    nodes: Vec<Entry>,
}

/// A node in the file.
#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    role: String,
    addresses: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    key: Option<String>,
}

impl State {
    /// Makes a new state with a random salt, and writes it.
    pub fn create(path: &Path) -> Result<State, FileError> {
        let state = State {
            path: path.into(),
            measurement_salt: crypto::random(),
            cluster_id: None,
            attestation_keys: BTreeSet::new(),
            nodes: vec![],
            nodes_listed: None,
        };
        state.save()?;
        Ok(state)
    }

    /// Writes the file of a cluster that another program has made.
    pub fn adopt(
        path: &Path,
        measurement_salt: [u8; MEASUREMENT_SALT_LEN],
        cluster_id: [u8; CLUSTER_ID_LEN],
    ) -> Result<(), FileError> {
        let state = State {
            path: path.into(),
            measurement_salt,
            cluster_id: Some(cluster_id),
            attestation_keys: BTreeSet::new(),
            nodes: vec![],
            nodes_listed: None,
        };
        state.save()
    }

    /// Reads the state in the file.
    pub fn open(path: &Path) -> Result<State, FileError> {
        parse(path, &files::read(path)?)
            .map_err(|what| FileError::Content(path.into(), what.to_string()))
    }

    /// Reads the state in the file; `None` if there is no file.
    pub fn find(path: &Path) -> Result<Option<State>, FileError> {
        match State::open(path) {
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Writes the state to its file.
    pub fn save(&self) -> Result<(), FileError> {
        files::replace_private(&self.path, self.text().as_bytes())
    }

    /// Changes the state in the file. Two commands that do so at the same time wait for each other,
    /// so neither loses the change of the other.
    pub fn change(path: &Path, change: impl FnOnce(&mut State)) -> Result<(), FileError> {
        let _locked = lock(path)?;
        let mut state = State::open(path)?;
        change(&mut state);
        state.save()
    }

    fn text(&self) -> String {
        let file = Content {
            version: VERSION,
            measurement_salt: STANDARD.encode(self.measurement_salt),
            cluster_id: self.cluster_id.map(|id| hex(&id)),
            attestation_keys: self
                .attestation_keys
                .iter()
                .map(KeyName::to_string)
                .collect(),
            nodes_listed: self.nodes_listed.map(time::seconds),
            nodes: self.nodes.iter().map(Entry::of).collect(),
        };
        let mut out = Vec::new();
        let tabs = serde_json::ser::PrettyFormatter::with_indent(b"\t");
        file.serialize(&mut serde_json::Serializer::with_formatter(&mut out, tabs))
            .expect("strings and a number are JSON, and a vector takes any number of bytes");
        out.push(b'\n');
        String::from_utf8(out).expect("JSON is UTF-8")
    }
}

impl Entry {
    fn of(node: &KnownNode) -> Entry {
        Entry {
            name: node.name.clone(),
            role: role_name(node.role).into(),
            addresses: node.addresses.clone(),
            key: node.key.map(|key| key.to_string()),
        }
    }

    fn read(self) -> Result<KnownNode, Error> {
        Ok(KnownNode {
            role: Role::parse(&self.role),
            key: self.key.map(|key| key.parse()).transpose()?,
            name: self.name,
            addresses: self.addresses,
        })
    }
}

/// Returns the role as commands show it.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::ControlPlane => "control-plane",
        Role::Worker => "worker",
        Role::Unknown => "unknown",
    }
}

/// Locks the file until the returned handle is closed. A file is replaced by another one, so the
/// lock counts only if its file still has the name.
fn lock(path: &Path) -> Result<File, FileError> {
    let fault = |action| move |error| FileError::Io(action, path.into(), error);
    loop {
        let opened = File::options().read(true).write(true).open(path);
        let file = opened.map_err(fault("open"))?;
        file.lock().map_err(fault("lock"))?;
        let ours = file.metadata().map_err(fault("read the inode of"))?;
        match fs::metadata(path) {
            Ok(present) if (present.dev(), present.ino()) == (ours.dev(), ours.ino()) => {
                return Ok(file);
            }
            Ok(_) => {}
            Err(error) => return Err(fault("read the inode of")(error)),
        }
    }
}

fn parse(path: &Path, content: &[u8]) -> Result<State, Error> {
    let file: Content =
        serde_json::from_slice(content).map_err(|error| format!("not a state file: {error}"))?;
    if file.version != VERSION {
        return Err(Error::Content(format!(
            "state file of version {}, expected {VERSION}",
            file.version
        )));
    }
    let salt = STANDARD
        .decode(&file.measurement_salt)
        .ok()
        .and_then(|salt| salt.try_into().ok());
    let cluster_id = match &file.cluster_id {
        Some(id) => Some(
            unhex(id)
                .ok_or_else(|| format!("clusterID {id:?} is not {CLUSTER_ID_LEN} bytes in hex"))?,
        ),
        None => None,
    };
    Ok(State {
        path: path.into(),
        measurement_salt: salt.ok_or_else(|| {
            format!("measurementSalt is not {MEASUREMENT_SALT_LEN} bytes in base64")
        })?,
        cluster_id,
        attestation_keys: file
            .attestation_keys
            .iter()
            .map(|name| name.parse())
            .collect::<Result<_, _>>()?,
        nodes: file
            .nodes
            .into_iter()
            .map(Entry::read)
            .collect::<Result<_, _>>()?,
        nodes_listed: file.nodes_listed.as_deref().and_then(time::parse),
    })
}

/// Parses hexadecimal digits in upper or lower case.
pub fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    text::unhex(text)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn a_second_run_uses_the_salt_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let mut first = State::create(&path).unwrap();
        assert_eq!(
            State::open(&path).unwrap().measurement_salt,
            first.measurement_salt
        );
        first.cluster_id = Some([0xab; 32]);
        first.attestation_keys = [KeyName::of(b"b"), KeyName::of(b"a")].into();
        first.nodes = vec![
            node("cp-0", Some(KeyName::of(b"c"))),
            node("worker-0", None),
        ];
        first.nodes_listed = time::parse("2026-11-27T03:00:00Z");
        first.save().unwrap();
        let second = State::open(&path).unwrap();
        assert_eq!(
            (second.cluster_id, second.attestation_keys),
            (Some([0xab; 32]), first.attestation_keys)
        );
        assert_eq!(
            (second.nodes, second.nodes_listed),
            (first.nodes, first.nodes_listed)
        );
        assert!(second.nodes_listed.is_some());
        assert_eq!(
            State::find(&dir.path().join("other.json"))
                .unwrap()
                .map(|_| ()),
            None
        );
    }

    fn node(name: &str, key: Option<KeyName>) -> KnownNode {
        KnownNode {
            name: name.into(),
            role: Role::ControlPlane,
            addresses: vec!["10.0.0.7".into(), "fd00::7".into()],
            key,
        }
    }

    #[test]
    fn commands_that_change_the_file_at_the_same_time_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        State::create(&path).unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4u8 {
                let path = &path;
                scope.spawn(move || {
                    for number in 0..20u8 {
                        let key = KeyName::of(&[writer, number]);
                        State::change(path, |state| state.attestation_keys.extend([key])).unwrap();
                    }
                });
            }
        });
        assert_eq!(State::open(&path).unwrap().attestation_keys.len(), 80);
    }

    #[test]
    fn the_largest_list_of_nodes_can_be_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let mut state = State::create(&path).unwrap();
        // the longest name of a Node (RFC 1123 subdomain)
        let mut longest = node(&"n".repeat(253), Some(KeyName::of(b"")));
        longest.addresses = vec!["fd00:".repeat(8); MAX_ADDRESSES];
        state.nodes = vec![longest; MAX_NODES];
        state.save().unwrap();
        assert_eq!(State::open(&path).unwrap().nodes.len(), MAX_NODES);
    }

    #[test]
    fn a_file_of_another_kind_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let bad_key = format!(
            r#"{{"version":1,"measurementSalt":"{}","attestationKeys":["x"]}}"#,
            STANDARD.encode([7; 32])
        );
        for content in [
            "",
            "{}",
            r#"{"version":2,"measurementSalt":""}"#,
            r#"{"version":1,"measurementSalt":"AQ=="}"#,
            &bad_key,
        ] {
            std::fs::write(&path, content).unwrap();
            assert!(
                matches!(State::find(&path), Err(FileError::Content(..))),
                "{content}"
            );
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
    }

    #[test]
    fn mutated_files_give_a_state_or_an_error() {
        let path = Path::new("state.json");
        let attestation_keys = [KeyName::of(b"a")].into();
        let valid = State {
            path: path.into(),
            measurement_salt: [7; 32],
            cluster_id: Some([9; 32]),
            attestation_keys,
            nodes: vec![node("cp-0", Some(KeyName::of(b"c")))],
            nodes_listed: None,
        }
        .text();
        let good = mutations(valid.as_bytes(), 20_000)
            .filter(|bytes| parse(path, bytes).is_ok())
            .count();
        assert!((10..20_000).contains(&good), "{good}");
    }
}
