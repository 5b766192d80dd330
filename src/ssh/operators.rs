//! The operators of a cluster, of whom several must sign each attestation policy: their list, what they sign, and their signatures.
//!
//! The list is JSON. Each control plane has it on its encrypted disk, from the init or from its join ticket:
//!
//! ```json
//! {"required": 2, "operators": [{"name": "anna", "key": "ssh-ed25519 AAAA.."}, {"name": "ben", "key": "sk-ssh-ed25519@openssh.com AAAA.."}]}
//! ```
//!
//! The operators sign a statement about a policy, as `ssh-keygen -Y sign -n policy@firstlight` does. It names the cluster, so the
//! policy of one cluster is none of another, and has a number, so nobody can bring back an older policy:
//!
//! ```json
//! {"cluster":"<ID>","number":3,"policy":"<SHA-256>","previous":"<SHA-256 of the statement before>","notAfter":"2027-01-31T00:00:00Z"}
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::SystemTime;

use base::file;
use base::text::{hex, is_visible, printable, quoted};
use base::time;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use super::PublicKey;
use super::{key, signature};

/// The namespace of signatures of policies (PROTOCOL.sshsig).
pub const POLICY_NAMESPACE: &str = "policy@firstlight";
/// The namespace of signatures of a new list of operators.
pub const LIST_NAMESPACE: &str = "operators@firstlight";
/// Maximum number of operators, and bytes of their list: an RSA key of 8192 bits has 1.4 KiB.
const MAX_OPERATORS: usize = 32;
const MAX_LIST: usize = 128 << 10;
/// Maximum characters of an operator's name.
const MAX_NAME: usize = 64;
/// Maximum number of signatures, and of changes of the list.
const MAX_SIGNATURES: usize = 2 * MAX_OPERATORS;
const MAX_CHANGES: usize = 64;
/// Maximum bytes of a statement, which has five short fields.
const MAX_STATEMENT: usize = 4 << 10;
/// The most by which the number of a policy may grow at once. A much higher number, signed by mistake, would be the last one.
pub const MAX_STEP: u64 = 1_000_000;
const END: &str = "-----END SSH SIGNATURE-----";
/// The folder on a control plane, below the directory of the wrapping key.
pub const FOLDER: &str = "policy";
/// The file with the list.
pub const LIST_FILE: &str = "operators.json";
/// The file with the ID of the cluster, hexadecimal.
pub const CLUSTER_FILE: &str = "cluster-id";
/// The file with the newest statement: [`Newest`].
pub const NEWEST_FILE: &str = "newest.json";
/// Readable by every program of the control plane: nothing there is secret.
pub const MODE: u32 = 0o644;

/// Who the operators are, and how many of them must sign.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorList {
    required: usize,
    operators: Vec<(String, PublicKey)>,
    cluster: Option<String>,
    previous: Option<String>,
    digest: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListForm {
    required: usize,
    operators: Vec<OperatorForm>,
    cluster: Option<String>,
    previous: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OperatorForm {
    name: String,
    key: String,
}

impl OperatorList {
    /// Parses a list, and checks that enough different keys are in it.
    pub fn parse(text: &str) -> Result<OperatorList, Error> {
        let form: ListForm = read("the list of operators", text, MAX_LIST)?;
        let count = form.operators.len();
        if !(1..=MAX_OPERATORS).contains(&count) {
            return Err(Error::Count(count));
        }
        if !(1..=count).contains(&form.required) {
            return Err(Error::Required {
                required: form.required,
                count,
            });
        }
        for digest in [&form.cluster, &form.previous].into_iter().flatten() {
            check_digest(digest)?;
        }
        let operators: Vec<_> = form
            .operators
            .into_iter()
            .map(OperatorForm::check)
            .collect::<Result<_, _>>()?;
        let names: BTreeSet<_> = operators.iter().map(|(name, _)| name).collect();
        let keys: BTreeSet<_> = operators.iter().map(|(_, key)| key.blob()).collect();
        if names.len() < count || keys.len() < count {
            return Err(Error::Twice);
        }
        Ok(OperatorList {
            required: form.required,
            operators,
            cluster: form.cluster,
            previous: form.previous,
            digest: sha256_hex(text.as_bytes()),
        })
    }

    /// Returns how many operators must sign.
    pub fn required(&self) -> usize {
        self.required
    }

    /// Returns the names of the operators.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.operators.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the SHA-256 of the text of the list, hexadecimal.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the ID of the cluster whose list it is, hexadecimal; the first list names none.
    pub fn cluster(&self) -> Option<&str> {
        self.cluster.as_deref()
    }

    /// Returns the digest of the list that it replaces; the first list names none.
    pub fn previous(&self) -> Option<&str> {
        self.previous.as_deref()
    }

    /// Returns the names of the operators who have signed `message`, if they are enough. `signatures` is the output of `ssh-keygen -Y
    /// sign` of each, one after the other. Signatures by other keys, or of something else, do not count.
    pub fn signed_by(
        &self,
        namespace: &str,
        message: &[u8],
        signatures: &str,
    ) -> Result<Vec<String>, Error> {
        let blocks: Vec<&str> = signatures
            .split_inclusive(END)
            .filter(|block| !block.trim().is_empty())
            .collect();
        if blocks.len() > MAX_SIGNATURES {
            return Err(Error::Signatures(blocks.len()));
        }
        let (mut signed, mut wrong) = (BTreeSet::new(), vec![]);
        let blobs = blocks
            .into_iter()
            .filter_map(|block| signature::blob_of_file(block).ok());
        for blob in blobs {
            for (name, key) in &self.operators {
                match signature::verify(&blob, key, namespace, message) {
                    Ok(()) => {
                        signed.insert(name.clone());
                    }
                    Err(signature::Error::OtherKey | signature::Error::Malformed) => {}
                    Err(error) => wrong.push((name.clone(), error)),
                }
            }
        }
        if signed.len() >= self.required {
            return Ok(signed.into_iter().collect());
        }
        let missing = self.names().filter(|name| !signed.contains(*name));
        Err(Error::TooFew {
            missing: missing.map(str::to_owned).collect(),
            signed: signed.into_iter().collect(),
            required: self.required,
            wrong,
        })
    }
}

impl OperatorForm {
    fn check(self) -> Result<(String, PublicKey), Error> {
        let is_name = (1..=MAX_NAME).contains(&self.name.chars().count())
            && self.name.chars().all(is_visible);
        if !is_name {
            return Err(Error::Name(quoted(&self.name, MAX_NAME)));
        }
        let key = PublicKey::from_line(&self.key);
        let key = key.map_err(|error| Error::Key(self.name.clone(), error))?;
        signature::check_kind(&key).map_err(|error| Error::Kind(self.name.clone(), error))?;
        Ok((self.name, key))
    }
}

/// What operators sign about a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyStatement {
    /// The ID of the cluster, hexadecimal.
    pub cluster: String,
    /// The number of the policy. It never falls.
    pub number: u64,
    /// The SHA-256 of the policy's text, hexadecimal.
    pub policy: String,
    /// The SHA-256 of the statement with the number before, hexadecimal.
    pub previous: Option<String>,
    /// Until when the policy may come into force.
    pub not_after: Option<SystemTime>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct StatementForm {
    cluster: String,
    number: u64,
    policy: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_after: Option<String>,
}

impl PolicyStatement {
    /// Parses the text that was signed.
    pub fn parse(text: &str) -> Result<PolicyStatement, Error> {
        let form: StatementForm = read("the statement about the policy", text, MAX_STATEMENT)?;
        if form.number == 0 {
            return Err(Error::Number);
        }
        for digest in [
            Some(&form.cluster),
            Some(&form.policy),
            form.previous.as_ref(),
        ] {
            digest.map_or(Ok(()), |digest| check_digest(digest))?;
        }
        let not_after = match form.not_after {
            None => None,
            Some(text) => {
                Some(time::parse(&text).ok_or_else(|| Error::Time(printable(&text, 40)))?)
            }
        };
        Ok(PolicyStatement {
            cluster: form.cluster,
            number: form.number,
            policy: form.policy,
            previous: form.previous,
            not_after,
        })
    }

    /// Returns the text to sign: one line of JSON.
    pub fn to_text(&self) -> String {
        let form = StatementForm {
            cluster: self.cluster.clone(),
            number: self.number,
            policy: self.policy.clone(),
            previous: self.previous.clone(),
            not_after: self.not_after.map(time::seconds),
        };
        let text = serde_json::to_string(&form).expect("texts and a number have a form in JSON");
        text + "\n"
    }

    /// Returns whether it is about the policy with this text.
    pub fn names(&self, policy: &str) -> bool {
        self.policy == sha256_hex(policy.as_bytes())
    }
}

/// The newest policy that came into force on a control plane.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Newest {
    /// Its number; 0 before the first one.
    pub number: u64,
    /// The SHA-256 of its statement, hexadecimal; empty before the first one.
    pub statement: String,
    /// Who signed it.
    #[serde(default)]
    pub by: Vec<String>,
    /// The policy itself; empty on a new control plane.
    #[serde(default)]
    pub policy: String,
}

impl Newest {
    /// Returns the content of its file.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and texts have a form in JSON")
    }
}

/// Writes the files of a new control plane below the directory of the wrapping key: the list, the ID of the cluster, and the newest
/// policy of the cluster. Files of an earlier attempt are replaced.
pub fn install(directory: &Path, list: &str, cluster: &[u8], newest: &Newest) -> io::Result<()> {
    let folder = directory.join(FOLDER);
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(&folder)?;
    file::replace(&folder.join(CLUSTER_FILE), hex(cluster).as_bytes(), MODE)?;
    file::replace(&folder.join(NEWEST_FILE), &newest.to_json(), MODE)?;
    // the services ask for signatures as soon as there is a list
    file::replace(&folder.join(LIST_FILE), list.as_bytes(), MODE)
}

/// A new list of operators that the previous one has signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatorChange {
    /// The text of the new list.
    pub list: String,
    /// Signatures of the namespace [`LIST_NAMESPACE`] by operators of the previous list.
    pub signatures: String,
}

/// Parses the changes of a list, the oldest first: a JSON list.
pub fn parse_changes(text: &str) -> Result<Vec<OperatorChange>, Error> {
    let changes: Vec<OperatorChange> = read(
        "the changes of the list of operators",
        text,
        MAX_CHANGES * MAX_LIST,
    )?;
    match changes.len() {
        0..=MAX_CHANGES => Ok(changes),
        count => Err(Error::Changes(count)),
    }
}

/// Returns the SHA-256 of these bytes, hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

fn read<'a, T: Deserialize<'a>>(
    what: &'static str,
    text: &'a str,
    limit: usize,
) -> Result<T, Error> {
    if text.len() > limit {
        return Err(Error::Size(what, limit));
    }
    serde_json::from_str(text).map_err(|error| Error::Form(what, error.to_string()))
}

fn check_digest(text: &str) -> Result<(), Error> {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() == 64 && text.bytes().all(is_digit) {
        Ok(())
    } else {
        Err(Error::Digest(printable(text, 80)))
    }
}

/// Why a list, a statement, or signatures are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The text is longer than this.
    Size(&'static str, usize),
    /// The text is not JSON of this form.
    Form(&'static str, String),
    /// The number of operators.
    Count(usize),
    /// How many operators must sign, of how many.
    Required {
        /// Who must sign.
        required: usize,
        /// Who can.
        count: usize,
    },
    /// Two operators have the same name or key.
    Twice,
    /// A name is empty, too long, or has invisible characters.
    Name(String),
    /// The key of this operator is malformed.
    Key(String, key::Error),
    /// The number is 0.
    Number,
    /// A field is no SHA-256.
    Digest(String),
    /// A field is no time.
    Time(String),
    /// The number of signatures.
    Signatures(usize),
    /// The number of changes.
    Changes(usize),
    /// Signatures by the key of this operator cannot be verified.
    Kind(String, signature::Error),
    /// Too few operators have signed.
    TooFew {
        /// Who has.
        signed: Vec<String>,
        /// Who has not.
        missing: Vec<String>,
        /// How many must.
        required: usize,
        /// Whose signatures are wrong, and why.
        wrong: Vec<(String, signature::Error)>,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Size(what, limit) => write!(f, "{what} is longer than {limit} bytes"),
            Error::Form(what, why) => write!(f, "{what} is not in the documented form: {why}"),
            Error::Count(count) => {
                write!(
                    f,
                    "the list has {count} operators, expected 1 to {MAX_OPERATORS}"
                )
            }
            Error::Required { required, count } => write!(
                f,
                "the list requires {required} signatures of {count} operators, expected 1 to {count}"
            ),
            Error::Twice => {
                f.write_str("two operators of the list have the same name or the same key")
            }
            Error::Name(name) => write!(
                f,
                "the name {name} of an operator is not 1 to {MAX_NAME} visible characters"
            ),
            Error::Key(name, error) => write!(f, "the key of the operator {name}: {error}"),
            Error::Number => f.write_str("the policy has the number 0, expected at least 1"),
            Error::Digest(text) => write!(f, "{text:?} is not 64 lower-case hexadecimal digits"),
            Error::Time(text) => write!(f, "{text:?} is not a time like 2027-01-31T00:00:00Z"),
            Error::Signatures(count) => {
                write!(
                    f,
                    "there are {count} signatures, expected at most {MAX_SIGNATURES}"
                )
            }
            Error::Changes(count) => {
                write!(
                    f,
                    "there are {count} changes of the list, expected at most {MAX_CHANGES}"
                )
            }
            Error::Kind(name, error) => write!(f, "the key of the operator {name}: {error}"),
            Error::TooFew {
                signed,
                missing,
                required,
                wrong,
            } => {
                let by = match &signed[..] {
                    [] => "nobody of the list has signed".to_owned(),
                    names => format!("only {} signed", names.join(", ")),
                };
                write!(
                    f,
                    "{by}, and {required} must; missing: {}",
                    missing.join(", ")
                )?;
                wrong
                    .iter()
                    .try_for_each(|(name, error)| write!(f, "; a signature of {name}: {error}"))
            }
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use signature::SigningKey;

    const MESSAGE: &[u8] = b"a statement";

    fn list(required: usize, keys: &[&SigningKey]) -> String {
        let names = ["anna", "ben", "cara"];
        let operators: Vec<_> = names
            .iter()
            .zip(keys)
            .map(|(name, key)| format!(r#"{{"name":"{name}","key":"{}"}}"#, key.public().line()))
            .collect();
        format!(
            r#"{{"required":{required},"operators":[{}]}}"#,
            operators.join(",")
        )
    }

    fn armored(key: &SigningKey, namespace: &str, message: &[u8]) -> String {
        let blob = BASE64_STANDARD.encode(key.sign(namespace, message));
        format!("-----BEGIN SSH SIGNATURE-----\n{blob}\n{END}\n")
    }

    #[test]
    fn enough_different_operators_must_sign() {
        let keys: Vec<_> = (0..4).map(|_| SigningKey::generate()).collect();
        let [anna, ben, cara, stranger] = &keys[..] else {
            unreachable!()
        };
        let list = OperatorList::parse(&list(2, &[anna, ben, cara])).unwrap();
        let by = |signers: &[&SigningKey]| {
            let blocks: String = signers
                .iter()
                .map(|key| armored(key, POLICY_NAMESPACE, MESSAGE))
                .collect();
            list.signed_by(POLICY_NAMESPACE, MESSAGE, &blocks)
        };
        assert_eq!(by(&[ben, anna]).unwrap(), ["anna", "ben"]);
        assert_eq!(by(&[cara, stranger, anna]).unwrap(), ["anna", "cara"]);
        for (signers, expected) in [
            (
                vec![],
                "nobody of the list has signed, and 2 must; missing: anna, ben, cara",
            ),
            (
                vec![anna],
                "only anna signed, and 2 must; missing: ben, cara",
            ),
            (
                vec![anna, anna],
                "only anna signed, and 2 must; missing: ben, cara",
            ),
            (
                vec![anna, stranger],
                "only anna signed, and 2 must; missing: ben, cara",
            ),
        ] {
            assert_eq!(by(&signers).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_signature_of_something_else_is_refused() {
        let (anna, ben) = (SigningKey::generate(), SigningKey::generate());
        let list = OperatorList::parse(&list(1, &[&anna, &ben])).unwrap();
        let good = armored(&ben, POLICY_NAMESPACE, MESSAGE);
        let another: &[u8] = b"another";
        for (namespace, message, expected) in [
            (
                LIST_NAMESPACE,
                MESSAGE,
                "a signature of anna: it is for another purpose",
            ),
            (
                POLICY_NAMESPACE,
                another,
                "a signature of anna: it is wrong",
            ),
        ] {
            let block = armored(&anna, namespace, message);
            let error = list.signed_by(POLICY_NAMESPACE, MESSAGE, &block);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            // it does not spoil the others
            let both = list.signed_by(POLICY_NAMESPACE, MESSAGE, &(block + &good));
            assert_eq!(both.unwrap(), ["ben"]);
        }
        let cut = good.replace("END", "END OF");
        assert!(list.signed_by(POLICY_NAMESPACE, MESSAGE, &cut).is_err());
    }

    #[test]
    fn a_list_that_cannot_be_met_or_counts_a_key_twice_is_refused() {
        let keys: Vec<_> = (0..2).map(|_| SigningKey::generate()).collect();
        let [anna, ben] = &keys[..] else {
            unreachable!()
        };
        let good = list(2, &[anna, ben]);
        assert!(OperatorList::parse(&good).is_ok());
        for (text, expected) in [
            (list(0, &[anna]), "requires 0 signatures of 1 operators"),
            (
                list(3, &[anna, ben]),
                "requires 3 signatures of 2 operators",
            ),
            (list(1, &[]), "has 0 operators"),
            (list(1, &[anna, anna]), "the same name or the same key"),
            (
                good.replace("\"ben\"", "\"anna\""),
                "the same name or the same key",
            ),
            (
                good.replace("\"ben\"", "\"be\\u202en\""),
                "visible characters",
            ),
            (
                good.replace("ssh-ed25519 ", "ssh-dss "),
                "the key of the operator anna",
            ),
            (
                good.replace("required", "threshold"),
                "not in the documented form",
            ),
            (
                good.replace("{\"required\"", "{\"cluster\":\"AB\",\"required\""),
                "\"AB\" is not 64",
            ),
            (" ".repeat(MAX_LIST + 1), "is longer than 131072 bytes"),
        ] {
            let error = OperatorList::parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_statement_is_read_as_it_was_written() {
        let statement = PolicyStatement {
            cluster: "0a".repeat(32),
            number: 3,
            policy: sha256_hex(b"{}"),
            previous: Some("0b".repeat(32)),
            not_after: time::parse("2027-01-31T00:00:00Z"),
        };
        let text = statement.to_text();
        assert_eq!(PolicyStatement::parse(&text), Ok(statement.clone()));
        assert!(statement.names("{}") && !statement.names("{} "));
        let first = PolicyStatement {
            previous: None,
            not_after: None,
            ..statement
        };
        assert!(!first.to_text().contains("null"));
        assert_eq!(PolicyStatement::parse(&first.to_text()), Ok(first));
        for (from, to, expected) in [
            (
                "\"number\":3",
                "\"number\":-3",
                "not in the documented form",
            ),
            ("\"number\":3", "\"number\":0", "expected at least 1"),
            ("0a0a", "0A0A", "hexadecimal digits"),
            ("2027-01-31T00", "2027-13-31T00", "is not a time"),
            ("\"number\"", "\"extra\":1,\"number\"", "unknown field"),
            ("}", "} {}", "trailing characters"),
        ] {
            let error = PolicyStatement::parse(&text.replacen(from, to, 1));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
