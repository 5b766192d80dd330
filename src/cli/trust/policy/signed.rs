//! Policies that the operators of a cluster sign: `propose` writes a statement that names a policy, `sign` signs it with an SSH key, and
//! `check-signatures` shows whether enough operators have signed. Both files are beside the policy, where `firstlight apply` finds them.
//! [`ssh::operators`] has the forms of the statement and of the list of operators.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base::text::hex;
use base::time;
use clap::{Args, value_parser};
use kubernetes::services::SignedPolicy;
use serde_json::json;
use ssh::operators::{self, MAX_STEP, OperatorList, POLICY_NAMESPACE, PolicyStatement, sha256_hex};
use ssh::{PublicKey, signature};
use verifier::sources::offline;
use verifier::{Policy, Variant};

use super::facts;
use crate::shell::{
    consent,
    error::Error,
    files::{self, FileError},
    output::Output,
};
use crate::workspace::{
    connect::and_known,
    ssh_key,
    state::{ClusterOptions, State},
};

/// The ends of the names of the files beside a policy.
const STATEMENT: &str = ".statement";
const SIGNATURES: &str = ".signatures";
/// Prints the statement about the policy of the cluster.
const GET: &str =
    "kubectl -n kube-system get configmap join-config -o jsonpath={.data.policyStatement}";
/// The last line of a signature.
const END: &str = "-----END SSH SIGNATURE-----";
/// The first bytes of a signature (PROTOCOL.sshsig), and of the version that follows.
const MAGIC: &[u8] = b"SSHSIG";
const VERSION_LEN: usize = 4;

/// The options of the actions for signed policies.
#[derive(Debug, Args)]
pub struct SigningOptions {
    #[command(flatten)]
    pub proposal: Proposal,
    /// With sign: your SSH key; the file of the public key if the key is in an agent. ssh-keygen signs with it, and asks
    /// for a passphrase or a touch
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// With sign: do not ask
    #[arg(long)]
    pub yes: bool,
    /// With check-signatures: the list of the cluster's operators (JSON)
    #[arg(long, value_name = "FILE")]
    operators: Option<PathBuf>,
}

/// What a statement says besides the policy.
#[derive(Debug, Args)]
pub struct Proposal {
    /// With propose: the number of the policy, above that of the policy in force; by default the next one
    #[arg(long, value_name = "NUMBER", value_parser = value_parser!(u64).range(1..))]
    number: Option<u64>,
    /// With propose: the statement about the policy in force; by default the one that is replaced
    #[arg(long, value_name = "FILE")]
    previous: Option<PathBuf>,
    /// With propose: the time, as 2027-01-31T00:00:00Z, after which the policy does not come into force any more
    #[arg(long, value_name = "TIME", value_parser = moment)]
    not_after: Option<SystemTime>,
    /// With propose: replace the statement about an earlier policy in this file, and delete its signatures
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    cluster: ClusterOptions,
}

impl SigningOptions {
    /// Returns the key that `sign` needs.
    pub fn key(&self) -> Result<PathBuf, Error> {
        self.key
            .clone()
            .ok_or_else(|| Error::Usage("--key is missing: the file of your SSH key".into()))
    }

    /// Returns the list of operators that `check-signatures` needs.
    pub fn operators(&self) -> Result<PathBuf, Error> {
        self.operators.clone().ok_or_else(|| {
            Error::Usage("--operators is missing: the list of the cluster's operators".into())
        })
    }
}

impl Proposal {
    /// Returns whether an option is given that only `propose` has.
    pub fn is_given(&self) -> bool {
        self.number.is_some()
            || self.previous.is_some()
            || self.not_after.is_some()
            || self.overwrite
    }

    /// Returns the cluster's ID, hexadecimal.
    fn cluster_id(&self, state: Option<&State>) -> Result<String, Error> {
        let id = self.cluster.cluster_id;
        let id = id.or(state.and_then(|state| state.cluster_id));
        id.map(|id| hex(&id)).ok_or_else(|| {
            Error::Usage(
                "the cluster's ID is unknown: give --state FILE, or --cluster-id; `firstlight cluster-id` prints that of a new cluster"
                    .into(),
            )
        })
    }

    /// Returns the number of the policy, and the digest of the statement before.
    fn place(
        &self,
        before: Option<&(String, PolicyStatement)>,
        cluster: &str,
    ) -> Result<(u64, Option<String>), Error> {
        let Some((text, before)) = before else {
            let number = self.number.unwrap_or(1);
            return check_step(number, 0).map(|()| (number, None));
        };
        if before.cluster != cluster {
            return Err(Error::content(format!(
                "the statement before is about the cluster {}, expected {cluster}",
                before.cluster
            )));
        }
        let next = before.number.saturating_add(1);
        let number = self.number.unwrap_or(next);
        check_step(number, before.number)?;
        Ok((number, Some(sha256_hex(text.as_bytes()))))
    }
}

/// Refuses a number that the services do not take after the one before; 0 is before the first.
fn check_step(number: u64, before: u64) -> Result<(), Error> {
    let most = before.saturating_add(MAX_STEP);
    if before < number && number <= most {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "--number {number}: expected {} to {most}, because the statement before has the number {before}",
        before.saturating_add(1)
    )))
}

fn moment(text: &str) -> Result<SystemTime, &'static str> {
    let time = time::parse(text).ok_or("expected a time in UTC, as 2027-01-31T00:00:00Z")?;
    if time > SystemTime::now() {
        Ok(time)
    } else {
        Err("expected a time in the future")
    }
}

/// A policy with the statement about it.
struct Proposed {
    policy: Policy,
    /// The bytes that are signed.
    text: String,
    statement: PolicyStatement,
}

impl Proposed {
    /// Reads a policy and the statement beside it, which must be about this policy.
    fn read(file: &Path) -> Result<Proposed, Error> {
        let policy = read_text(file)?;
        let path = beside(file, STATEMENT);
        if !path.exists() {
            return Err(Error::blocked(format!(
                "{} does not exist: `firstlight policy propose {}` writes it",
                path.display(),
                file.display()
            )));
        }
        let (text, statement) = read_statement(&path)?;
        check_named(file, &policy, &statement)?;
        Ok(Proposed {
            policy: parsed(file, &policy)?,
            text,
            statement,
        })
    }

    /// Returns who of the list has signed the statement, and who has not.
    fn signers(
        &self,
        file: &Path,
        list: &OperatorList,
    ) -> Result<(Vec<String>, Vec<String>), Error> {
        if let Some(cluster) = list.cluster().filter(|id| *id != self.statement.cluster) {
            return Err(Error::content(format!(
                "the statement is about the cluster {}, and the list has the operators of the cluster {cluster}",
                self.statement.cluster
            )));
        }
        let path = beside(file, SIGNATURES);
        let signatures = read_if_there(&path)?.unwrap_or_default();
        match list.signed_by(POLICY_NAMESPACE, self.text.as_bytes(), &signatures) {
            Ok(signed) => {
                let has_signed = |name: &&str| signed.iter().any(|it| it == *name);
                let missing = list.names().filter(|name| !has_signed(name));
                let missing = missing.map(str::to_owned).collect();
                Ok((signed, missing))
            }
            Err(operators::Error::TooFew {
                signed, missing, ..
            }) => Ok((signed, missing)),
            Err(error) => Err(content(&path, error)),
        }
    }

    /// Returns what the statement says, for people.
    fn lines(&self) -> String {
        let statement = &self.statement;
        let mut lines = format!(
            "cluster: {}\nnumber: {}\nsha256: {}\n",
            statement.cluster, statement.number, statement.policy
        );
        if let Some(end) = statement.not_after {
            lines += &format!("comes into force only through {}\n", time::seconds(end));
        }
        lines
    }
}

/// Writes the statement about the policy in a file.
pub fn propose(
    file: &Path,
    proposal: &Proposal,
    variant: &Variant,
    output: Output,
) -> Result<(), Error> {
    let text = read_text(file)?;
    let policy = parsed(file, &text)?;
    endorsement::validator(variant, policy.clone(), &offline())
        .map_err(|error| content(file, error))?;
    let state = State::find(&proposal.cluster.state)?;
    let known = state.iter().flat_map(|state| &state.attestation_keys);
    check_complete(file, &policy, &and_known(policy.clone(), known.copied())?)?;
    let cluster = proposal.cluster_id(state.as_ref())?;
    let path = beside(file, STATEMENT);
    let is_there = path.exists();
    if is_there && !proposal.overwrite {
        return Err(Error::blocked(format!(
            "{} exists: --overwrite replaces it by the next one",
            path.display()
        )));
    }
    let before = proposal.previous.as_ref().or(is_there.then_some(&path));
    let before = before.map(|before| read_statement(before)).transpose()?;
    let (number, previous) = proposal.place(before.as_ref(), &cluster)?;
    let statement = PolicyStatement {
        cluster,
        number,
        policy: sha256_hex(text.as_bytes()),
        previous,
        not_after: proposal.not_after,
    };
    // those of another statement are worth nothing
    let signatures = beside(file, SIGNATURES);
    match fs::remove_file(&signatures) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(FileError::Io("remove", signatures, error).into());
        }
        _ => {}
    }
    write(&path, &statement.to_text(), is_there)?;
    output.json(&json!({
        "statement": path,
        "cluster": statement.cluster,
        "number": number,
        "policy": statement.policy,
        "previous": statement.previous,
        "notAfter": statement.not_after.map(time::seconds),
    }))?;
    output.say(format_args!(
        "{}: number {number} of the cluster {}; each operator signs it with `firstlight policy sign {} --key FILE`",
        path.display(),
        statement.cluster,
        file.display()
    ))
}

/// Signs the statement about the policy in a file with this key. Signatures of another statement, and an earlier one by the same key,
/// are left out.
pub fn sign(file: &Path, key: &Path, is_agreed: bool, output: Output) -> Result<(), Error> {
    let proposed = Proposed::read(file)?;
    let shown = proposed.lines() + &facts::table(&proposed.policy);
    output.say(shown.trim_end())?;
    if !is_agreed {
        consent::ask("Sign this policy?", "`firstlight policy show`")?;
    }
    let armored = ssh_key::sign(key, POLICY_NAMESPACE, proposed.text.as_bytes())?;
    let own = signer(&armored, &proposed.text)
        .map_err(|error| ssh_key::failed(key, &error.to_string()))?;
    let path = beside(file, SIGNATURES);
    let present = read_if_there(&path)?;
    let of_others = |block: &&str| signer(block, &proposed.text).is_ok_and(|other| other != own);
    let mut all: Vec<&str> = blocks(present.as_deref().unwrap_or_default())
        .filter(of_others)
        .collect();
    all.push(armored.trim());
    let text: String = all.iter().map(|block| format!("{block}\n")).collect();
    write(&path, &text, present.is_some())?;
    let (fingerprint, count) = (own.fingerprint(), all.len());
    output.json(&json!({
        "signatures": path,
        "number": proposed.statement.number,
        "fingerprint": fingerprint,
        "count": count,
    }))?;
    output.say(format_args!(
        "signed by the key {fingerprint}: {} has the signatures of {count} key{}",
        path.display(),
        if count == 1 { "" } else { "s" }
    ))
}

/// Shows who of the operators has signed the policy in a file. Fails if they are too few.
pub fn check_signatures(file: &Path, operators: &Path, output: Output) -> Result<(), Error> {
    let proposed = Proposed::read(file)?;
    let (_, list) = read_operators(operators)?;
    let (signed, missing) = proposed.signers(file, &list)?;
    let statement = &proposed.statement;
    output.json(&json!({
        "cluster": statement.cluster,
        "number": statement.number,
        "policy": statement.policy,
        "notAfter": statement.not_after.map(time::seconds),
        "required": list.required(),
        "signed": signed,
        "missing": missing,
    }))?;
    let lines = |what: &str, names: &[String]| -> String {
        names
            .iter()
            .map(|name| format!("{what}: {name}\n"))
            .collect()
    };
    let text = proposed.lines() + &lines("signed", &signed) + &lines("missing", &missing);
    output.say(text.trim_end())?;
    check_count(file, &list, &signed, &missing)?;
    if let Some(end) = statement.not_after.filter(|end| *end < SystemTime::now()) {
        return Err(too_late(file, end));
    }
    output.say(format_args!(
        "{}: enough operators have signed it",
        file.display()
    ))
}

/// Checks that enough operators of this list have signed the policy in a file. Returns the ID of the cluster in their statement.
pub fn check_signed(file: &Path, list: &OperatorList) -> Result<String, Error> {
    let proposed = Proposed::read(file)?;
    let (signed, missing) = proposed.signers(file, list)?;
    check_count(file, list, &signed, &missing)?;
    match proposed
        .statement
        .not_after
        .filter(|end| *end < SystemTime::now())
    {
        Some(end) => Err(too_late(file, end)),
        None => Ok(proposed.statement.cluster),
    }
}

fn check_count(
    file: &Path,
    list: &OperatorList,
    signed: &[String],
    missing: &[String],
) -> Result<(), Error> {
    if signed.len() >= list.required() {
        return Ok(());
    }
    Err(Error::content(format!(
        "{0}: {1} of {2} required signatures; missing: {3}. Each of them runs `firstlight policy sign {0} --key KEY`",
        file.display(),
        signed.len(),
        list.required(),
        missing.join(", ")
    )))
}

/// Returns what operators have signed about the policy in this file: the texts of the files beside it, empty without them. `text` is
/// that of the policy.
pub fn of_file(file: &Path, text: &str) -> Result<SignedPolicy, Error> {
    let path = beside(file, STATEMENT);
    let Some(statement) = read_if_there(&path)? else {
        return Ok(SignedPolicy::default());
    };
    check_named(file, text, &parsed_statement(&path, &statement)?)?;
    let Some(signatures) = read_if_there(&beside(file, SIGNATURES))? else {
        return Err(Error::blocked(format!(
            "nobody has signed {0} yet: `firstlight policy sign {1}`; if the cluster has no operators, remove {0}",
            path.display(),
            file.display()
        )));
    };
    Ok(SignedPolicy {
        statement,
        signatures,
        operator_changes: String::new(),
    })
}

/// Reads a list of operators. Returns its text, too.
pub fn read_operators(path: &Path) -> Result<(String, OperatorList), Error> {
    let text = read_text(path)?;
    let list = OperatorList::parse(&text).map_err(|error| content(path, error))?;
    Ok((text, list))
}

/// Refuses a policy for signatures that differs from the `wanted` one, because `apply` cannot add anything to what is signed.
pub fn check_complete(file: &Path, policy: &Policy, wanted: &Policy) -> Result<(), Error> {
    if wanted == policy {
        return Ok(());
    }
    let keys = wanted.keys().difference(policy.keys());
    let mut lacking: Vec<String> = keys
        .map(|key| format!("the attestation key {key}"))
        .collect();
    if wanted.requires_strong() && !policy.requires_strong() {
        lacking.push(
            "\"require\": \"strong\" (or give `firstlight apply` the option --require any)".into(),
        );
    }
    Err(Error::content(format!(
        "{} lacks {}, which `firstlight apply` adds only to a policy that nobody signs: add it to the file, and propose and sign that",
        file.display(),
        lacking.join(", ")
    )))
}

/// Refuses a policy that is signed for another cluster than the one with this ID.
pub fn check_cluster(file: &Path, signed: &SignedPolicy, cluster: &str) -> Result<(), Error> {
    let path = beside(file, STATEMENT);
    let statement = parsed_statement(&path, &signed.statement)?;
    if statement.cluster == cluster {
        return Ok(());
    }
    Err(content(
        &path,
        format_args!(
            "it is about the cluster {}, expected {cluster}",
            statement.cluster
        ),
    ))
}

/// Refuses a policy that the services of a cluster do not take after the `present` one.
pub fn check_newer(
    file: &Path,
    signed: &SignedPolicy,
    present: &SignedPolicy,
) -> Result<(), Error> {
    if signed.statement == present.statement {
        return Ok(());
    }
    let name = file.display();
    if signed.statement.is_empty() {
        return Err(Error::blocked(format!(
            "the policy of this cluster is signed by its operators, and {name} is not: `{GET} > in-force.statement`, `firstlight \
             policy propose {name} --previous in-force.statement`, and `firstlight policy sign {name}`"
        )));
    }
    let new = parsed_statement(&beside(file, STATEMENT), &signed.statement)?;
    if let Some(end) = new.not_after.filter(|end| *end < SystemTime::now()) {
        return Err(too_late(file, end));
    }
    // one that cannot be read was never in force
    let Ok(before) = PolicyStatement::parse(&present.statement) else {
        return Ok(());
    };
    let is_next = before.number.checked_add(1) == Some(new.number);
    let names_it = new.previous == Some(sha256_hex(present.statement.as_bytes()));
    if new.number > before.number && (names_it || !is_next) {
        return Ok(());
    }
    Err(Error::blocked(format!(
        "{name} has the number {}, and does not follow the policy of the cluster, which has the number {}: `{GET} > \
         in-force.statement`, `firstlight policy propose {name} --overwrite --previous in-force.statement`, and sign it again",
        new.number, before.number
    )))
}

/// Reads the changes of the list of operators.
pub fn read_changes(path: &Path) -> Result<String, Error> {
    let text = read_text(path)?;
    operators::parse_changes(&text).map_err(|error| content(path, error))?;
    Ok(text)
}

fn too_late(file: &Path, end: SystemTime) -> Error {
    Error::content(format!(
        "{0}: the policy should have come into force before {1}: `firstlight policy propose {0} --overwrite`, and sign it again",
        file.display(),
        time::seconds(end)
    ))
}

fn check_named(file: &Path, policy: &str, statement: &PolicyStatement) -> Result<(), Error> {
    if statement.names(policy) {
        return Ok(());
    }
    Err(Error::content(format!(
        "{} is about another policy than {1}, which has the sha256 {2}, expected {3}: if {1} is right, `firstlight policy propose \
         {1} --overwrite`, and sign again",
        beside(file, STATEMENT).display(),
        file.display(),
        sha256_hex(policy.as_bytes()),
        statement.policy
    )))
}

/// Returns the key that has signed the statement in this block of lines.
fn signer(block: &str, statement: &str) -> Result<PublicKey, signature::Error> {
    let blob = signature::blob_of_file(block)?;
    let key = key_in(&blob).ok_or(signature::Error::Malformed)?;
    signature::verify(&blob, &key, POLICY_NAMESPACE, statement.as_bytes())?;
    Ok(key)
}

/// Returns the key that a signature names (PROTOCOL.sshsig), which nobody has verified yet.
fn key_in(blob: &[u8]) -> Option<PublicKey> {
    let rest = blob.strip_prefix(MAGIC)?.get(VERSION_LEN..)?;
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
    PublicKey::from_blob(rest.get(..len)?).ok()
}

/// Returns the signatures in a text, each as ssh-keygen prints it.
fn blocks(text: &str) -> impl Iterator<Item = &str> {
    let blocks = text.split_inclusive(END).map(str::trim);
    blocks.filter(|block| !block.is_empty())
}

fn beside(policy: &Path, end: &str) -> PathBuf {
    let mut path = policy.as_os_str().to_owned();
    path.push(end);
    path.into()
}

fn read_statement(path: &Path) -> Result<(String, PolicyStatement), Error> {
    let text = read_text(path)?;
    let statement = parsed_statement(path, &text)?;
    Ok((text, statement))
}

fn parsed_statement(path: &Path, text: &str) -> Result<PolicyStatement, Error> {
    PolicyStatement::parse(text).map_err(|error| content(path, error))
}

fn parsed(file: &Path, text: &str) -> Result<Policy, Error> {
    Policy::from_json(text).map_err(|error| content(file, error))
}

fn read_text(path: &Path) -> Result<String, Error> {
    let bytes = files::read(path)?;
    let text = str::from_utf8(&bytes).map_err(|error| content(path, error))?;
    Ok(text.to_owned())
}

fn read_if_there(path: &Path) -> Result<Option<String>, Error> {
    match read_text(path) {
        Err(Error::File(error)) if error.kind() == Some(ErrorKind::NotFound) => Ok(None),
        read => read.map(Some),
    }
}

/// Writes a file. One that is there keeps its mode.
fn write(path: &Path, text: &str, is_there: bool) -> Result<(), Error> {
    if is_there {
        files::replace(path, text.as_bytes())?;
    } else {
        files::create_private(path, text.as_bytes())?;
    }
    Ok(())
}

fn content(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::content(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use ssh::signature::SigningKey;
    use tempfile::TempDir;
    use verifier::KeyName;

    const CLUSTER: &str = "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a";

    fn policy() -> String {
        format!(
            r#"{{"measurements":{{"4":{{"expected":"{}","warnOnly":false}}}}}}"#,
            "ab".repeat(32)
        )
    }

    fn statement(number: u64) -> PolicyStatement {
        PolicyStatement {
            cluster: CLUSTER.into(),
            number,
            policy: sha256_hex(policy().as_bytes()),
            previous: None,
            not_after: None,
        }
    }

    fn proposal(number: Option<u64>) -> Proposal {
        Proposal {
            number,
            previous: None,
            not_after: None,
            overwrite: false,
            cluster: ClusterOptions {
                state: "none".into(),
                cluster_id: None,
            },
        }
    }

    fn armored(key: &SigningKey, message: &str) -> String {
        let blob = BASE64_STANDARD.encode(key.sign(POLICY_NAMESPACE, message.as_bytes()));
        format!("-----BEGIN SSH SIGNATURE-----\n{blob}\n{END}\n")
    }

    /// A folder with a policy, a statement about it, and these signatures.
    fn folder(signatures: Option<&str>) -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policy.json");
        fs::write(&file, policy()).unwrap();
        fs::write(beside(&file, STATEMENT), statement(1).to_text()).unwrap();
        if let Some(signatures) = signatures {
            fs::write(beside(&file, SIGNATURES), signatures).unwrap();
        }
        (folder, file)
    }

    #[test]
    fn a_policy_has_the_next_number_and_names_the_statement_before() {
        let before = statement(7);
        let before = (before.to_text(), before);
        let digest = Some(sha256_hex(before.0.as_bytes()));
        let place = |number, before: Option<&_>| proposal(number).place(before, CLUSTER);
        assert_eq!(place(None, None).unwrap(), (1, None));
        assert_eq!(place(Some(5), None).unwrap(), (5, None));
        assert_eq!(place(None, Some(&before)).unwrap(), (8, digest.clone()));
        assert_eq!(place(Some(12), Some(&before)).unwrap(), (12, digest));
        let error = place(Some(7), Some(&before)).unwrap_err().to_string();
        assert!(
            error.contains("because the statement before has the number 7"),
            "{error}"
        );
        let other = proposal(None).place(Some(&before), &"0b".repeat(32));
        let error = other.unwrap_err().to_string();
        assert!(error.contains("is about the cluster 0a0a"), "{error}");
    }

    #[test]
    fn a_signature_names_its_key_and_counts_only_for_its_statement() {
        let (anna, ben) = (SigningKey::generate(), SigningKey::generate());
        let (one, two) = (statement(1).to_text(), statement(2).to_text());
        let text = format!("\n{}{}\n\n", armored(&anna, &one), armored(&ben, &two));
        let of = |statement: &str| -> Vec<Option<PublicKey>> {
            blocks(&text)
                .map(|block| signer(block, statement).ok())
                .collect()
        };
        assert_eq!(of(&one), [Some(anna.public().clone()), None]);
        assert_eq!(of(&two), [None, Some(ben.public().clone())]);
        let whole = anna.sign(POLICY_NAMESPACE, b"");
        assert_eq!(key_in(&whole).unwrap(), *anna.public());
        for len in 0..60 {
            assert!(key_in(&whole[..len]).is_none(), "{len}");
        }
        assert!(signer("", &one).is_err());
    }

    #[test]
    fn what_is_signed_is_beside_the_policy_and_about_it() {
        let (_folder, file) = folder(Some("signatures"));
        let signed = of_file(&file, &policy()).unwrap();
        assert_eq!(signed.statement, statement(1).to_text());
        assert_eq!(signed.signatures, "signatures");
        let changed = of_file(&file, &(policy() + "\n")).unwrap_err().to_string();
        assert!(
            changed.contains("is about another policy than"),
            "{changed}"
        );
        let (_folder, file) = folder(None);
        let unsigned = of_file(&file, &policy()).unwrap_err().to_string();
        assert!(unsigned.contains("nobody has signed"), "{unsigned}");
        let other = file.with_file_name("other.json");
        assert_eq!(of_file(&other, &policy()).unwrap(), SignedPolicy::default());
    }

    #[test]
    fn a_policy_follows_the_one_in_the_cluster() {
        let file = Path::new("policy.json");
        let signed = |statement: &PolicyStatement| SignedPolicy {
            statement: statement.to_text(),
            ..SignedPolicy::default()
        };
        let (none, present) = (SignedPolicy::default(), signed(&statement(3)));
        let next = PolicyStatement {
            previous: Some(sha256_hex(present.statement.as_bytes())),
            ..statement(4)
        };
        let late = PolicyStatement {
            not_after: time::parse("2026-01-01T00:00:00Z"),
            ..next.clone()
        };
        let unreadable = SignedPolicy {
            statement: "{}".into(),
            ..SignedPolicy::default()
        };
        for (new, present, expected) in [
            (&none, &none, ""),
            (&signed(&statement(1)), &none, ""),
            (&present, &present, ""),
            (&signed(&next), &present, ""),
            (&signed(&statement(5)), &present, ""),
            (&signed(&statement(1)), &unreadable, ""),
            (
                &none,
                &present,
                "is signed by its operators, and policy.json is not",
            ),
            (&signed(&statement(4)), &present, "does not follow"),
            (
                &signed(&statement(2)),
                &present,
                "has the number 2, and does not follow",
            ),
            (
                &signed(&late),
                &none,
                "come into force before 2026-01-01T00:00:00Z",
            ),
        ] {
            let said = check_newer(file, new, present).err();
            let said = said.map_or_else(String::new, |error| error.to_string());
            assert_eq!(said.is_empty(), expected.is_empty(), "{said}");
            assert!(said.contains(expected), "{said}");
        }
        assert!(check_cluster(file, &present, CLUSTER).is_ok());
        let error = check_cluster(file, &present, &"0b".repeat(32)).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("is about the cluster 0a0a"), "{error}");
    }

    #[test]
    fn enough_operators_of_the_list_must_have_signed() {
        let keys = [SigningKey::generate(), SigningKey::generate()];
        let list = |more: &str| {
            let [anna, ben] = keys.each_ref().map(|key| key.public().line());
            let text = format!(
                r#"{{{more}"required":2,"operators":[{{"name":"anna","key":"{anna}"}},{{"name":"ben","key":"{ben}"}}]}}"#
            );
            OperatorList::parse(&text).unwrap()
        };
        let text = statement(1).to_text();
        let [anna, ben] = keys.each_ref().map(|key| armored(key, &text));
        let stranger = armored(&SigningKey::generate(), &text);
        for (signatures, expected) in [
            (format!("{anna}{ben}"), ""),
            (anna.clone(), "1 of 2 required signatures; missing: ben"),
            (
                format!("{anna}{stranger}"),
                "1 of 2 required signatures; missing: ben",
            ),
            (
                String::new(),
                "0 of 2 required signatures; missing: anna, ben",
            ),
            (
                format!("{anna}{}", armored(&keys[1], "{}")),
                "1 of 2 required signatures; missing: ben",
            ),
        ] {
            let (_folder, file) = folder(Some(&signatures));
            match check_signed(&file, &list("")) {
                Ok(cluster) => assert_eq!((cluster.as_str(), expected), (CLUSTER, "")),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!expected.is_empty() && error.contains(expected), "{error}");
                }
            }
        }
        let (_folder, file) = folder(Some(&format!("{anna}{ben}")));
        let other = list(&format!(r#""cluster":"{}","#, "0b".repeat(32)));
        let error = check_signed(&file, &other).unwrap_err().to_string();
        assert!(
            error.contains("the operators of the cluster 0b0b"),
            "{error}"
        );
    }

    #[test]
    fn a_policy_to_which_something_would_be_added_is_not_proposed() {
        let file = Path::new("policy.json");
        let read = |more: &str| Policy::from_json(&policy().replacen('{', more, 1)).unwrap();
        let keys = |names: &str| format!(r#"{{"attestationKeys":[{names}],"#);
        let [a, b] = ["a", "b"].map(|name| format!("\"{}\"", KeyName::of(name.as_bytes())));
        let (one, both) = (read(&keys(&a)), read(&keys(&format!("{a},{b}"))));
        assert!(check_complete(file, &one, &one).is_ok());
        let error = check_complete(file, &one, &both).unwrap_err().to_string();
        let expected = format!("lacks the attestation key {}, which", b.trim_matches('"'));
        assert!(error.contains(&expected), "{error}");
        let strong = one.clone().requiring_strong();
        let error = check_complete(file, &one, &strong).unwrap_err().to_string();
        assert!(error.contains("--require any"), "{error}");
    }
}
