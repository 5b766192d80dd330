//! The operators who must sign the attestation policy of a cluster ([`ssh::operators`]).
//!
//! The folder `policy` below the directory of the wrapping key, on the encrypted disk of each control plane, has
//!
//! ```text
//! operators.json   the list, from the init or a join ticket; without it the cluster has no operators, and policies need no signature
//! cluster-id       the ID of the cluster, hexadecimal, from the same
//! newest.json      the newest policy that came into force on this control plane, with the number and digest of its statement
//! ```
//!
//! The ConfigMap `join-config` has the statement and its signatures beside the policy. It may also have new lists of operators, each
//! signed by the previous one: they replace `operators.json`.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base::file;
use base::time;
use ssh::operators::{
    self, CLUSTER_FILE, FOLDER, LIST_FILE, LIST_NAMESPACE, MAX_STEP, MODE, NEWEST_FILE, Newest,
    OperatorList, POLICY_NAMESPACE, PolicyStatement, parse_changes, sha256_hex,
};

/// The keys of the ConfigMap.
pub const STATEMENT: &str = "policyStatement";
/// See [`STATEMENT`].
pub const SIGNATURES: &str = "policySignatures";
/// See [`STATEMENT`].
pub const CHANGES: &str = "operatorChanges";

/// What the operators have published beside a policy. An absent file is empty.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct SignedFiles {
    /// The statement about the policy.
    pub statement: String,
    /// Its signatures.
    pub signatures: String,
    /// New lists of operators.
    pub changes: String,
}

/// A policy that enough operators have signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Approved {
    /// The number of the policy.
    pub number: u64,
    /// The names of the operators who have signed it.
    pub by: Vec<String>,
}

/// The folder of the operators' list.
#[derive(Debug, Clone)]
pub struct PolicyOperators {
    folder: PathBuf,
    /// Whether new lists and the newest statement are written. One program of a control plane does this.
    writes: bool,
}

impl PolicyOperators {
    /// Reads the list below the directory of the wrapping key at each change of the policy, and keeps what is newest there.
    pub fn keeping(wrapping_key: &Path) -> PolicyOperators {
        PolicyOperators {
            folder: wrapping_key.join(FOLDER),
            writes: true,
        }
    }

    /// Reads the list below the directory of the wrapping key, and changes nothing there.
    pub fn reading(wrapping_key: &Path) -> PolicyOperators {
        PolicyOperators {
            folder: wrapping_key.join(FOLDER),
            writes: false,
        }
    }

    /// Returns the list and the newest policy, for a new control plane; `None` if the cluster has no operators.
    pub fn to_hand_over(&self) -> Result<Option<(String, Newest)>, Error> {
        let Some(list) = self.read(LIST_FILE)? else {
            return Ok(None);
        };
        Ok(Some((list, self.newest()?)))
    }

    /// Returns the policy that came into force last on this control plane; `None` if there was none.
    pub fn kept(&self) -> Result<Option<(String, Approved)>, Error> {
        if self.read(LIST_FILE)?.is_none() {
            return Ok(None);
        }
        let Newest {
            number, by, policy, ..
        } = self.newest()?;
        Ok(Some((policy, Approved { number, by })).filter(|(policy, _)| !policy.is_empty()))
    }

    /// Checks that the operators have signed this policy, and no newer one before; `None` if the cluster has no operators.
    pub fn approve(
        &self,
        policy: &str,
        signed: &SignedFiles,
        now: SystemTime,
    ) -> Result<Option<Approved>, Error> {
        let Some(text) = self.read(LIST_FILE)? else {
            return if signed.statement.is_empty() {
                Ok(None)
            } else {
                Err(Error::NoList)
            };
        };
        // the pods of an upgrade's old and new version may run at the same time
        let _alone = self.alone()?;
        let cluster = self.read(CLUSTER_FILE)?.ok_or(Error::NoClusterId)?;
        let cluster = cluster.trim();
        let newest = self.newest()?;
        if signed.statement.is_empty() {
            let list = OperatorList::parse(&text).map_err(Error::List)?;
            return Err(Error::Unsigned(list.required()));
        }
        let statement = PolicyStatement::parse(&signed.statement).map_err(Error::Form)?;
        if statement.cluster != cluster {
            return Err(Error::OtherCluster(statement.cluster));
        }
        if !statement.names(policy) {
            return Err(Error::OtherPolicy);
        }
        let message = signed.statement.as_bytes();
        let digest = sha256_hex(message);
        let (list, newer) = follow(&text, cluster, &signed.changes)?;
        let by = if digest == newest.statement && newer.is_none() && !newest.by.is_empty() {
            // it is in force: the list may have changed since
            newest.by.clone()
        } else {
            let by = list.signed_by(POLICY_NAMESPACE, message, &signed.signatures);
            let by = by.map_err(Error::Form)?;
            check_newer(&statement, &digest, &newest, now)?;
            if let Some(newer) = newer.filter(|_| self.writes) {
                log::warn!(
                    "the list of operators who sign policies has changed (sha256 {})",
                    list.digest()
                );
                self.write(LIST_FILE, newer.as_bytes())?;
            }
            by
        };
        let number = statement.number;
        let present = Newest {
            number,
            statement: digest,
            by: by.clone(),
            policy: policy.to_owned(),
        };
        if self.writes && present != newest {
            self.write(NEWEST_FILE, &present.to_json())?;
        }
        Ok(Some(Approved { number, by }))
    }

    /// Waits until no other process changes the folder.
    fn alone(&self) -> Result<Option<File>, Error> {
        if !self.writes {
            return Ok(None);
        }
        let lock = File::open(&self.folder).and_then(|folder| folder.lock().map(|()| folder));
        let lock = lock.map_err(|error| Error::Io(self.folder.clone(), error))?;
        Ok(Some(lock))
    }

    fn newest(&self) -> Result<Newest, Error> {
        let text = self.read(NEWEST_FILE)?.ok_or(Error::NoNewest)?;
        serde_json::from_str(&text).map_err(|error| {
            let error = io::Error::new(ErrorKind::InvalidData, error);
            Error::Io(self.folder.join(NEWEST_FILE), error)
        })
    }

    fn read(&self, name: &str) -> Result<Option<String>, Error> {
        let path = self.folder.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::Io(path, error)),
        }
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<(), Error> {
        let path = self.folder.join(name);
        file::replace(&path, content, MODE).map_err(|error| Error::Io(path, error))
    }
}

/// Returns the present list, and its text if it is a newer one: that on the disk, or the last of the lists that follow from it by
/// signatures.
fn follow(
    text: &str,
    cluster: &str,
    changes: &str,
) -> Result<(OperatorList, Option<String>), Error> {
    let mut list = OperatorList::parse(text).map_err(Error::List)?;
    let mut newer = None;
    if changes.is_empty() {
        return Ok((list, newer));
    }
    for change in parse_changes(changes).map_err(Error::Change)? {
        let next = OperatorList::parse(&change.list).map_err(Error::Change)?;
        // a change that was made before
        if next.previous() != Some(list.digest()) {
            continue;
        }
        if next.cluster() != Some(cluster) {
            let named = next.cluster().unwrap_or("none");
            return Err(Error::OtherCluster(named.to_owned()));
        }
        let by = list.signed_by(LIST_NAMESPACE, change.list.as_bytes(), &change.signatures);
        by.map_err(Error::Change)?;
        (list, newer) = (next, Some(change.list));
    }
    Ok((list, newer))
}

/// Refuses a statement that is not newer than the newest one.
fn check_newer(
    statement: &PolicyStatement,
    digest: &str,
    newest: &Newest,
    now: SystemTime,
) -> Result<(), Error> {
    let (got, newest_number) = (statement.number, newest.number);
    if got < newest_number {
        return Err(Error::Older {
            got,
            newest: newest_number,
        });
    }
    if got == newest_number && newest.statement == digest {
        return Ok(());
    }
    if got == newest_number {
        return Err(Error::Fork(got));
    }
    if got - newest_number > MAX_STEP {
        return Err(Error::Step(got, newest_number));
    }
    match statement.not_after.filter(|end| *end < now) {
        Some(end) => Err(Error::Ended(end)),
        None => Ok(()),
    }
}

/// Why a policy is not one of the cluster's operators.
#[derive(Debug)]
pub enum Error {
    /// A file of the folder cannot be read or written.
    Io(PathBuf, io::Error),
    /// The folder has a list of operators, and not the cluster's ID.
    NoClusterId,
    /// The policy is signed, and this control plane has no list of operators.
    NoList,
    /// There was a list of operators while this service runs, and there is none now.
    ListGone,
    /// The folder has a list of operators, and not the newest policy.
    NoNewest,
    /// The list on the disk is malformed.
    List(operators::Error),
    /// A new list is malformed, or not signed by the previous one.
    Change(operators::Error),
    /// There is no statement: how many operators must sign.
    Unsigned(usize),
    /// The statement is malformed, or too few have signed it.
    Form(operators::Error),
    /// The statement or list is for the cluster with this ID.
    OtherCluster(String),
    /// The statement is about another policy.
    OtherPolicy,
    /// The policy is older than one that came into force before.
    Older {
        /// Its number.
        got: u64,
        /// The number of the newest one.
        newest: u64,
    },
    /// Another policy with this number came into force before.
    Fork(u64),
    /// The policy should have come into force before this time.
    Ended(SystemTime),
    /// The number is much higher than the newest one.
    Step(u64, u64),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Error::NoClusterId => {
                write!(
                    f,
                    "{CLUSTER_FILE} is missing beside {LIST_FILE} on this control plane, so no signature can be checked"
                )
            }
            Error::NoList => f.write_str(
                "it is signed, but this control plane has no list of operators, because it joined by an image or a join service of an \
                 earlier version: remove it, and let a new machine join (docs/day-two/remove-node.md)",
            ),
            Error::ListGone => write!(f, "{LIST_FILE} of this control plane is gone"),
            Error::NoNewest => write!(
                f,
                "{NEWEST_FILE} is missing beside {LIST_FILE} on this control plane, so an older policy would not be noticed"
            ),
            Error::List(error) => write!(f, "{LIST_FILE} on this control plane: {error}"),
            Error::Change(error) => write!(f, "{CHANGES} in the ConfigMap join-config: {error}"),
            Error::Unsigned(required) => write!(
                f,
                "it has no signatures, and {required} operators must sign: `firstlight policy propose`, `firstlight policy sign`, \
                 `firstlight apply`"
            ),
            Error::Form(error) => write!(f, "its signatures: {error}"),
            Error::OtherCluster(id) => write!(f, "the signatures are for another cluster, {id}"),
            Error::OtherPolicy => f.write_str(
                "the signed statement is about another policy: somebody changed the policy without the operators, or the statement is of \
                 an earlier one",
            ),
            Error::Older { got, newest } => write!(
                f,
                "its number is {got}, and number {newest} was in force on this control plane: sign it again with a higher number"
            ),
            Error::Fork(number) => write!(
                f,
                "another policy with the number {number} was in force on this control plane: sign it again with a higher number"
            ),
            Error::Ended(end) => {
                write!(f, "it should have come into force before {}", time::seconds(*end))
            }
            Error::Step(got, newest) => write!(
                f,
                "its number is {got}, and number {newest} was in force on this control plane: sign it again with a number that is at \
                 most {MAX_STEP} higher"
            ),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use ssh::signature::SigningKey;
    use std::time::Duration;

    const POLICY: &str = "{}";

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(24 * 3600)
    }

    /// A control plane whose cluster has two operators, both of whom must sign.
    struct Cluster {
        directory: tempfile::TempDir,
        keys: [SigningKey; 2],
        id: String,
    }

    impl Cluster {
        fn new() -> Cluster {
            let cluster = Cluster {
                directory: tempfile::tempdir().unwrap(),
                keys: [SigningKey::generate(), SigningKey::generate()],
                id: "0a".repeat(32),
            };
            let (list, id) = (list(&cluster.keys, ""), [0x0a; 32]);
            operators::install(cluster.directory.path(), &list, &id, &Newest::default()).unwrap();
            cluster
        }

        fn statement(&self, number: u64) -> PolicyStatement {
            PolicyStatement {
                cluster: self.id.clone(),
                number,
                policy: sha256_hex(POLICY.as_bytes()),
                previous: None,
                not_after: None,
            }
        }

        fn approve(&self, signed: &SignedFiles) -> Result<Option<Approved>, Error> {
            PolicyOperators::keeping(self.directory.path()).approve(POLICY, signed, now())
        }

        /// Returns what this statement's approval says.
        fn says(&self, statement: &PolicyStatement) -> String {
            match self.approve(&signed(statement, &self.keys)) {
                Ok(approved) => format!("number {}", approved.unwrap().number),
                Err(error) => error.to_string(),
            }
        }
    }

    fn list(keys: &[SigningKey], more: &str) -> String {
        let operators: Vec<_> = ["anna", "ben"]
            .iter()
            .zip(keys)
            .map(|(name, key)| format!(r#"{{"name":"{name}","key":"{}"}}"#, key.public().line()))
            .collect();
        format!(
            r#"{{{more}"required":{},"operators":[{}]}}"#,
            keys.len(),
            operators.join(",")
        )
    }

    fn armored(keys: &[SigningKey], namespace: &str, message: &str) -> String {
        let block = |key: &SigningKey| {
            let blob = BASE64_STANDARD.encode(key.sign(namespace, message.as_bytes()));
            format!("-----BEGIN SSH SIGNATURE-----\n{blob}\n-----END SSH SIGNATURE-----\n")
        };
        keys.iter().map(block).collect()
    }

    fn signed(statement: &PolicyStatement, keys: &[SigningKey]) -> SignedFiles {
        let statement = statement.to_text();
        SignedFiles {
            signatures: armored(keys, POLICY_NAMESPACE, &statement),
            statement,
            changes: String::new(),
        }
    }

    #[test]
    fn without_a_list_no_signature_is_needed() {
        let directory = tempfile::tempdir().unwrap();
        let operators = PolicyOperators::keeping(directory.path());
        let approved = operators.approve(POLICY, &SignedFiles::default(), now());
        assert_eq!(approved.unwrap(), None);
        assert_eq!(operators.to_hand_over().unwrap(), None);
    }

    #[test]
    fn only_a_policy_that_enough_operators_signed_for_this_cluster_is_taken() {
        let cluster = Cluster::new();
        let (good, own) = (cluster.statement(1), &cluster.keys);
        let other_cluster = PolicyStatement {
            cluster: "0b".repeat(32),
            ..good.clone()
        };
        let other_policy = PolicyStatement {
            policy: sha256_hex(b"{ }"),
            ..good.clone()
        };
        for (signed, expected) in [
            (
                SignedFiles::default(),
                "it has no signatures, and 2 operators must sign",
            ),
            (
                signed(&good, &own[..1]),
                "only anna signed, and 2 must; missing: ben",
            ),
            (
                signed(&good, &[SigningKey::generate(), SigningKey::generate()]),
                "nobody of the list",
            ),
            (signed(&other_cluster, own), "for another cluster, 0b0b"),
            (signed(&other_policy, own), "about another policy"),
        ] {
            let error = cluster.approve(&signed).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let handed = || PolicyOperators::reading(cluster.directory.path()).to_hand_over();
        assert_eq!(handed().unwrap().unwrap().1, Newest::default());
        let approved = cluster.approve(&signed(&good, own)).unwrap().unwrap();
        assert_eq!(
            (approved.number, approved.by),
            (1, vec!["anna".into(), "ben".into()])
        );
        let (handed, newest) = handed().unwrap().unwrap();
        assert_eq!(
            (handed, newest.number, newest.policy),
            (list(own, ""), 1, POLICY.to_owned())
        );
    }

    #[test]
    fn an_older_policy_or_another_one_with_the_same_number_is_refused() {
        let cluster = Cluster::new();
        let first = cluster.statement(1);
        assert_eq!(cluster.says(&first), "number 1");
        assert_eq!(cluster.says(&cluster.statement(2)), "number 2");
        assert_eq!(cluster.says(&cluster.statement(2)), "number 2");
        assert!(
            cluster
                .says(&first)
                .contains("its number is 1, and number 2 was in force")
        );
        let other = PolicyStatement {
            previous: Some(sha256_hex(first.to_text().as_bytes())),
            ..cluster.statement(2)
        };
        assert!(
            cluster
                .says(&other)
                .contains("another policy with the number 2")
        );
        // a control plane that was off misses statements
        assert_eq!(cluster.says(&cluster.statement(7)), "number 7");
        assert!(
            cluster
                .says(&cluster.statement(u64::MAX))
                .contains("at most 1000000 higher")
        );
        let late = PolicyStatement {
            not_after: Some(now() - Duration::from_secs(1)),
            ..cluster.statement(9)
        };
        assert!(
            cluster
                .says(&late)
                .contains("come into force before 1970-01-01T23:59:59Z")
        );
        let reading = PolicyOperators::reading(cluster.directory.path());
        let newer = signed(&cluster.statement(9), &cluster.keys);
        assert!(reading.approve(POLICY, &newer, now()).is_ok());
        let (_, newest) = reading.to_hand_over().unwrap().unwrap();
        assert_eq!(newest.number, 7);
        assert_eq!(reading.kept().unwrap().unwrap().0, POLICY);
        fs::remove_file(cluster.directory.path().join(FOLDER).join(NEWEST_FILE)).unwrap();
        assert!(cluster.says(&first).contains("newest.json is missing"));
        fs::remove_file(cluster.directory.path().join(FOLDER).join(LIST_FILE)).unwrap();
        assert!(
            cluster
                .says(&first)
                .contains("this control plane has no list of operators")
        );
    }

    #[test]
    fn a_new_list_needs_signatures_of_the_old_one() {
        let cluster = Cluster::new();
        let old = list(&cluster.keys, "");
        let next = [SigningKey::generate()];
        let head = |cluster: &str, previous: &str| {
            format!(r#""cluster":"{cluster}","previous":"{previous}","#)
        };
        let new = list(&next, &head(&cluster.id, &sha256_hex(old.as_bytes())));
        let foreign = list(&next, &head(&"0b".repeat(32), &sha256_hex(old.as_bytes())));
        let with = |list: &str, by: &[SigningKey]| {
            let change = operators::OperatorChange {
                list: list.into(),
                signatures: armored(by, LIST_NAMESPACE, list),
            };
            SignedFiles {
                changes: serde_json::to_string(&[change]).unwrap(),
                ..signed(&cluster.statement(1), &next)
            }
        };
        for (signed, expected) in [
            (with(&new, &cluster.keys[..1]), "only anna signed"),
            (with(&new, &next), "nobody of the list has signed"),
            (with(&foreign, &cluster.keys), "for another cluster"),
        ] {
            let error = cluster.approve(&signed).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let approved = cluster
            .approve(&with(&new, &cluster.keys))
            .unwrap()
            .unwrap();
        assert_eq!(approved.by, ["anna"]);
        let handed = PolicyOperators::reading(cluster.directory.path()).to_hand_over();
        assert_eq!(handed.unwrap().unwrap().0, new);
        // the change stays in the ConfigMap
        assert!(cluster.approve(&with(&new, &cluster.keys)).is_ok());
        // also if the policy was in force before the change, as it is then signed again
        let second = Cluster::new();
        let head = head(&second.id, &sha256_hex(list(&second.keys, "").as_bytes()));
        let new = list(&next, &head);
        let signatures = armored(&second.keys, LIST_NAMESPACE, &new);
        let change = operators::OperatorChange {
            list: new.clone(),
            signatures,
        };
        let changes = serde_json::to_string(&[change]).unwrap();
        let with = |by: &[SigningKey]| SignedFiles {
            changes: changes.clone(),
            ..signed(&second.statement(1), by)
        };
        assert_eq!(second.says(&second.statement(1)), "number 1");
        assert!(second.approve(&with(&second.keys)).is_err());
        assert_eq!(second.approve(&with(&next)).unwrap().unwrap().by, ["anna"]);
        let handed = PolicyOperators::reading(second.directory.path()).to_hand_over();
        assert_eq!(handed.unwrap().unwrap().0, new);
        // what is in force stays so, and nothing new of the old list does
        assert!(cluster.approve(&signed(&cluster.statement(1), &[])).is_ok());
        let by_old = signed(&cluster.statement(2), &cluster.keys);
        assert!(cluster.approve(&by_old).is_err());
    }
}
