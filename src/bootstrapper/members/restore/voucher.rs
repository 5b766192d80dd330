//! Who vouches for a snapshot: the owner of the master secret by a signature beside it, or the operator by
//! its SHA-256. Without one of the two it is not restored, because etcd's data decide all permissions in
//! the cluster.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use kubernetes::etcd_signature::{self, Statement};
use kubernetes::wrapping_key;

use super::failed_check::{FailedCheck, failed_check};
use super::manifest::shown;
use super::snapshot::Snapshot;

/// The folder of the wrapping key in the folder of the cluster's files.
const FOLDER: &str = "firstlight";

/// Who vouches for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Voucher {
    /// The owner of the master secret has signed this.
    Signature(Box<Statement>),
    /// Only the operator, who has named its SHA-256.
    Operator,
}

impl Voucher {
    /// Returns who vouches for the snapshot at this path. `unsigned` is the SHA-256 that the operator vouches for, or empty. The error is
    /// a sentence.
    pub fn of(
        path: &Path,
        snapshot: &Snapshot,
        kubernetes: &Path,
        unsigned: &str,
    ) -> Result<Voucher, FailedCheck> {
        let file = etcd_signature::file_of(path);
        let why = match (read(&file)?, wrapping_key::read(&kubernetes.join(FOLDER))) {
            (None, _) => format!("{} is missing", file.display()),
            (Some(_), Err(error)) => format!("the key of this node cannot be read: {error}"),
            (Some(_), Ok(None)) => format!(
                "this node has no key to verify its signature: {} is missing",
                kubernetes.join(FOLDER).join(wrapping_key::FILE).display()
            ),
            (Some(content), Ok(Some(key))) => {
                let statement = Statement::verified(&content, &key).map_err(|why| {
                    failed_check!("{}: {why}: take another copy of both files", file.display())
                })?;
                return if statement.sha256 == snapshot.hash {
                    Ok(Voucher::Signature(Box::new(statement)))
                } else {
                    Err(failed_check!(
                        "{} is the signature of another snapshot: expected the SHA-256 {}, got {}",
                        file.display(),
                        snapshot.hash,
                        shown(&statement.sha256)
                    ))
                };
            }
        };
        match unsigned {
            "" => Err(failed_check!(
                "the snapshot's signature cannot be verified: {why}. Anyone who could write the file could have added an administrator. If \
                 you know that it is yours, run the command with --unsigned and the SHA-256 that `firstlight etcd snapshot` printed"
            )),
            hash if hash.eq_ignore_ascii_case(&snapshot.hash) => Ok(Voucher::Operator),
            hash => Err(failed_check!(
                "the snapshot is not the one that --unsigned names: expected the SHA-256 {}, got {}",
                shown(hash),
                snapshot.hash
            )),
        }
    }
}

/// Reads a signature; `None` if there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>, FailedCheck> {
    let mut content = vec![];
    let limit = etcd_signature::MAX_LEN as u64 + 1;
    let read = File::open(path).and_then(|file| file.take(limit).read_to_end(&mut content));
    match read {
        Ok(_) => Ok(Some(content)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed_check!("cannot read {}: {error}", path.display())),
    }
}

impl fmt::Display for Voucher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Voucher::Signature(it) => write!(
                f,
                "signed with this cluster's master secret by firstlight {}: of the cluster {}, by etcd {} on {} (machine {}), at {}, of revision \
                 {} or later",
                shown(&it.firstlight),
                shown(&it.cluster),
                shown(&it.etcd),
                shown(&it.node),
                if it.machine.is_empty() {
                    "unknown".into()
                } else {
                    shown(&it.machine)
                },
                shown(&it.saved),
                it.revision
            ),
            Voucher::Operator => f.write_str(
                "NO SIGNATURE WAS VERIFIED: it is trusted only by the SHA-256 that you gave (--unsigned)",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use base::crypto::{KEY_LEN, Secret};

    use super::*;

    #[test]
    fn a_snapshot_without_a_voucher_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshot.db");
        let hash = "ab".repeat(32);
        let snapshot = Snapshot {
            length: 1,
            hash: hash.clone(),
            is_of_cluster: true,
        };
        let of = |unsigned: &str| {
            let vouched = Voucher::of(&path, &snapshot, folder.path(), unsigned);
            vouched.map_err(|why| why.to_string())
        };
        let refused = |unsigned: &str, says: &str| {
            let why = of(unsigned).unwrap_err();
            assert!(why.contains(says), "{why}");
        };
        refused("", "snapshot.db.signature is missing");
        refused(&"cd".repeat(32), "not the one that --unsigned names");
        assert_eq!(of(&hash.to_uppercase()), Ok(Voucher::Operator));

        let key = |byte: u8| Secret::new(vec![byte; KEY_LEN]);
        let statement = Statement {
            sha256: hash.clone(),
            ..Statement::default()
        };
        let sign = |statement: &Statement, byte: u8| {
            let signature = statement.sign(&key(byte));
            fs::write(folder.path().join("snapshot.db.signature"), signature).unwrap();
        };
        sign(&statement, 1);
        refused("", "this node has no key to verify its signature");
        assert_eq!(of(&hash), Ok(Voucher::Operator));
        fs::create_dir(folder.path().join(FOLDER)).unwrap();
        fs::write(
            folder.path().join(FOLDER).join(wrapping_key::FILE),
            key(1).expose(),
        )
        .unwrap();
        assert!(matches!(of(""), Ok(Voucher::Signature(_))));
        // a wrong signature is worse than none
        sign(&statement, 2);
        refused(&hash, "the signature is wrong");
        let other = Statement {
            sha256: "cd".repeat(32),
            ..statement
        };
        sign(&other, 1);
        refused(&hash, "the signature of another snapshot");
    }
}
