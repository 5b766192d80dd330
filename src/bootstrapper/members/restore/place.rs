//! The files of a restoration. Their paths record its progress, so a killed restoration can
//! continue.
//!
//! ```text
//! /etc/kubernetes/manifests/etcd.yaml, kube-apiserver.yaml      while they run
//! /etc/kubernetes/restore-etcd/etcd.yaml, kube-apiserver.yaml   while they are stopped
//! /etc/kubernetes/restore-etcd/record.json                      until the restoration has succeeded
//! DATA/member                                                   what etcd uses
//! DATA/restore-TIME/{restoring-X,restored}                      the data of the snapshot: incomplete, complete
//! DATA/restore-TIME/before                                      `member` of before
//! DATA/restore-copy-X                                           the copy of the snapshot, for a moment: it then has no name
//! ```
//!
//! Each move is a rename within one file system: /etc/kubernetes and etcd's folder may be different ones.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use base::crypto::random;
use base::file;
use base::text::hex;
use serde_json::{Value, json};

use super::database::StoredMember;
use super::failed_check::{FailedCheck, failed_check};
use crate::steps::error::Error as Step;

const FOLDER: &str = "restore-etcd";
const RECORD: &str = "record.json";
/// The static pods that stop. The API server is the first, because it needs etcd.
pub const PODS: [&str; 2] = ["kube-apiserver", "etcd"];

/// A restoration that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoreRecord {
    /// The SHA-256 of the snapshot.
    pub hash: String,
    /// The revision of etcd that the API server has at least when the restoration has succeeded.
    pub revision: u64,
    /// When it began, in seconds since 1970. The folder of the data has it in its name.
    pub time: u64,
    /// The other members of before.
    pub others: Vec<StoredMember>,
}

impl RestoreRecord {
    fn parse(text: &[u8]) -> Option<RestoreRecord> {
        let value: Value = serde_json::from_slice(text).ok()?;
        let others = value.get("others")?.as_array()?.iter();
        Some(RestoreRecord {
            hash: value.get("hash")?.as_str()?.to_owned(),
            revision: value.get("revision")?.as_u64()?,
            time: value.get("time")?.as_u64()?,
            others: others.map(StoredMember::of).collect::<Option<_>>()?,
        })
    }
}

/// The folders of this control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoreFolders {
    /// The cluster's files: /etc/kubernetes.
    pub kubernetes: PathBuf,
    /// The folder of etcd's data.
    pub data: PathBuf,
}

/// Which data etcd has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Those of before, or none.
    Before,
    /// None: those of before are away, and those of the snapshot are complete beside them.
    Between,
    /// Those of the snapshot.
    Restored,
    /// Unknown: `--undo` was interrupted, another program has started etcd meanwhile, or the folder of the restoration is gone.
    Unclear,
}

/// Returns the path of a manifest, whether its pod runs or is stopped. Errors if there are two.
pub fn manifest(kubernetes: &Path, pod: &str) -> Result<PathBuf, FailedCheck> {
    let [runs, stopped] = manifests(kubernetes, pod);
    match (runs.exists(), stopped.exists()) {
        (true, true) => Err(failed_check!(
            "{} and {} both exist: a restoration moved the second one, and another program wrote the first; move one of them away",
            runs.display(),
            stopped.display()
        )),
        (false, true) => Ok(stopped),
        (true, false) => Ok(runs),
        (false, false) => Err(failed_check!(
            "{} does not exist: this node is no control plane with etcd, as kubeadm makes it",
            runs.display()
        )),
    }
}

/// Returns the paths of a manifest whose pod runs, or is stopped.
fn manifests(kubernetes: &Path, pod: &str) -> [PathBuf; 2] {
    ["manifests", FOLDER].map(|folder| kubernetes.join(folder).join(format!("{pod}.yaml")))
}

impl RestoreFolders {
    /// Returns the record of a restoration that has begun.
    pub fn record(&self) -> Result<Option<RestoreRecord>, Step> {
        let path = self.folder().join(RECORD);
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            text => {
                let record = text.map(|text| RestoreRecord::parse(&text));
                let malformed = || io::Error::other("it is not what a restoration writes");
                let record = record.and_then(|it| it.ok_or_else(malformed));
                record.map(Some).map_err(|error| Step::Io(path, error))
            }
        }
    }

    /// Writes the record: from here on, a restoration has begun.
    pub fn begin(&self, record: &RestoreRecord) -> Result<(), Step> {
        make(&self.folder())?;
        make(&self.of(record, ""))?;
        let RestoreRecord {
            hash,
            revision,
            time,
            others,
        } = record;
        let others: Vec<_> = others.iter().map(StoredMember::json).collect();
        let text = json!({"hash": hash, "revision": revision, "time": time, "others": others});
        let path = self.folder().join(RECORD);
        file::replace(&path, text.to_string().as_bytes(), 0o600)
            .map_err(|error| Step::Io(path, error))
    }

    /// Removes the record, which ends the restoration.
    pub fn end(&self) -> Result<(), Step> {
        let path = self.folder().join(RECORD);
        let removed = fs::remove_file(&path).and_then(|()| file::sync_directory(&path));
        removed.map_err(|error| Step::Io(path, error))
    }

    /// Returns the folder in which the manifests of stopped pods are.
    pub fn folder(&self) -> PathBuf {
        self.kubernetes.join(FOLDER)
    }

    /// Returns the path of a part of the data of a restoration.
    pub fn of(&self, record: &RestoreRecord, name: &str) -> PathBuf {
        self.data
            .join(format!("restore-{}", record.time))
            .join(name)
    }

    /// Returns the folder that etcd uses.
    pub fn member(&self) -> PathBuf {
        self.data.join("member")
    }

    /// Returns etcd's database.
    pub fn database(&self) -> PathBuf {
        self.member().join("snap/db")
    }

    /// Returns which data etcd has.
    pub fn data(&self, record: &RestoreRecord) -> Data {
        if !self.of(record, "").exists() {
            return Data::Unclear;
        }
        if !self.of(record, "before").exists() {
            return Data::Before;
        }
        match (self.member().exists(), self.is_restored(record)) {
            (true, false) => Data::Restored,
            (false, true) => Data::Between,
            (true, true) | (false, false) => Data::Unclear,
        }
    }

    /// Returns whether the data of the snapshot are complete, and not in use.
    pub fn is_restored(&self, record: &RestoreRecord) -> bool {
        self.of(record, "restored/member").exists()
    }

    /// Moves a manifest, if it is not there yet, so that the kubelet stops or starts the pod.
    pub fn set_running(&self, pod: &str, runs: bool) -> Result<(), Step> {
        let [mut from, mut to] = manifests(&self.kubernetes, pod);
        if runs {
            (from, to) = (to, from);
        } else {
            make(&self.folder())?;
        }
        match (from.exists(), to.exists()) {
            (true, true) => Err(Step::Io(to, ErrorKind::AlreadyExists.into())),
            (true, false) => rename(&from, &to),
            (false, _) => Ok(()),
        }
    }

    /// Locks etcd's database as etcd itself does (bbolt: flock). Returns `None` if etcd has it.
    pub fn lock(&self) -> Result<Option<File>, Step> {
        let path = self.database();
        let failed = |error| Step::Io(path.clone(), error);
        let database = File::open(&path).map_err(failed)?;
        match database.try_lock() {
            Ok(()) => Ok(Some(database)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(failed(error)),
        }
    }

    /// Returns a new path for the data of the snapshot. Removes incomplete data of earlier runs; if etcdutl of a killed run still
    /// works on them, it fails.
    pub fn restoring(&self, record: &RestoreRecord) -> Result<PathBuf, Step> {
        const NAME: &str = "restoring-";
        let folder = self.of(record, "");
        let remove = || {
            for entry in fs::read_dir(&folder)? {
                let entry = entry?;
                if entry
                    .file_name()
                    .as_encoded_bytes()
                    .starts_with(NAME.as_bytes())
                {
                    fs::remove_dir_all(entry.path())?;
                }
            }
            Ok(())
        };
        remove().map_err(|error| Step::Io(folder.clone(), error))?;
        Ok(folder.join(format!("{NAME}{}", hex(&random::<4>()))))
    }

    /// Gives the data that etcdutl made at `path` the owner of etcd's data, makes it durable, and marks it as
    /// complete.
    pub fn restored(&self, record: &RestoreRecord, path: &Path) -> Result<(), Step> {
        let owner = fs::metadata(self.member()).or_else(|_| fs::metadata(&self.data));
        owner
            .and_then(|owner| settle(path, owner.uid(), owner.gid()))
            .and_then(|()| fs::set_permissions(path.join("member"), Permissions::from_mode(0o700)))
            .map_err(|error| Step::Io(path.into(), error))?;
        rename(path, &self.of(record, "restored"))
    }

    /// Puts the data of before aside.
    pub fn put_aside(&self, record: &RestoreRecord) -> Result<(), Step> {
        rename(&self.member(), &self.of(record, "before"))
    }

    /// Gives etcd the data of the snapshot.
    pub fn put_restored(&self, record: &RestoreRecord) -> Result<(), Step> {
        rename(&self.of(record, "restored/member"), &self.member())
    }

    /// Gives etcd its old data back. etcd must be stopped.
    pub fn put_back(&self, record: &RestoreRecord) -> Result<(), Step> {
        let before = self.of(record, "before");
        if !before.exists() {
            return Ok(());
        }
        if self.member().exists() {
            rename(
                &self.member(),
                &self.of(record, &format!("undone-{}", hex(&random::<4>()))),
            )?;
        }
        rename(&before, &self.member())
    }
}

fn make(path: &Path) -> Result<(), Step> {
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path);
    made.and_then(|()| file::sync_directory(path))
        .map_err(|error| Step::Io(path.into(), error))
}

/// Moves durably.
fn rename(from: &Path, to: &Path) -> Result<(), Step> {
    let moved = fs::rename(from, to)
        .and_then(|()| file::sync_directory(to))
        .and_then(|()| file::sync_directory(from));
    moved.map_err(|error| Step::Io(from.into(), error))
}

/// Sets the owner of a tree, and makes all of it durable.
fn settle(path: &Path, user: u32, group: u32) -> io::Result<()> {
    chown(path, Some(user), Some(group))?;
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            settle(&entry?.path(), user, group)?;
        }
    }
    File::open(path)?.sync_all()
}
