//! `firstlight policy`: checks, shows, compares and changes the file with an attestation policy.
//! `text` writes policies for all commands, `edit` changes them, `images` adds and removes images, `facts` describes what a policy
//! requires, `check` finds what it does not pin, and `signed` has what the operators of a cluster sign.

mod check;
mod edit;
mod facts;
mod images;
mod signed;
#[cfg(test)]
mod tests;
mod text;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use verifier::sources::offline;
use verifier::{KeyName, Policy, Variant};

use crate::shell::{
    error::Error,
    files,
    output::{Output, say_all},
};
use crate::workspace::{connect::read_policy, options::VariantOption};
use clap::{Args, ValueEnum};
use signed::{Proposal, SigningOptions};

pub use check::{accepts_any_tpm, found};
pub use edit::Edit;
pub use images::{both_images, only_images};
pub use signed::{
    check_cluster, check_complete, check_newer, check_signed, of_file, read_changes, read_operators,
};
pub use text::text;

/// Check, show, compare, change or sign the file with an attestation policy
///
/// `check FILE` names each error, such as an unknown word, and what the policy does not pin: any TPM, any firmware,
/// another register than those that are named. The exit code is 0 without an error, and 1 with one. It is also an
/// error if a register is zero that every firmware extends, or if the policy accepts any boot loader and kernel.
///
/// `show FILE` prints what the policy requires: variant, images with their registers, attestation keys, roots, and
/// each further requirement in words. `diff FILE FILE` prints what two policies require differently: `-` the first
/// one, `+` the second one. The exit code is 0 if they require the same, and 1 if not.
///
/// `add-key FILE KEY..` and `remove-key FILE KEY..` change which attestation keys the policy accepts. KEY is the name
/// of a key as the console of its machine shows it; `-` reads the names from standard input. The file keeps its mode,
/// and is replaced as a whole. The last key is removed only with --trust-any-tpm, unless the platform endorses keys.
///
/// In a cluster with operators (`firstlight init --operators`), several of them sign each policy. `propose FILE` writes
/// the statement that they sign: FILE.statement, with the cluster's ID, a number, and the policy's digest. `sign FILE`
/// shows the policy, and adds the signature by an SSH key to FILE.signatures. `check-signatures FILE` lists who has
/// signed; the exit code is 0 if they are enough, and 1 if not. Then `firstlight apply` takes the three files.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight policy check policy.json
  firstlight policy show policy.json
  firstlight policy diff policy.json policy-upgrade.json
  firstlight policy add-key policy.json 000b1f0c...
  firstlight policy propose policy.json --overwrite
  firstlight policy sign policy.json --key ~/.ssh/id_ed25519_sk
  firstlight policy check-signatures policy.json --operators operators.json
  kubectl -n kube-system get configmap join-config -o jsonpath={.data.attestationConfig} | firstlight policy show -")]
pub(crate) struct CommandLine {
    /// What to do
    action: PolicyAction,
    /// The policy; - is standard input for check, show and diff
    file: PathBuf,
    /// With diff: the second policy; with add-key and remove-key: the names of keys
    #[arg(value_name = "FILE|KEY")]
    others: Vec<String>,
    /// With remove-key: also remove the last key, after which a program that has no TPM and imitates one is accepted
    #[arg(long)]
    trust_any_tpm: bool,
    #[command(flatten)]
    variant: VariantOption,
    #[command(flatten)]
    output: Output,
    #[command(flatten, next_help_heading = "Policies that operators sign")]
    signing: SigningOptions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyAction {
    Check,
    Show,
    Diff,
    AddKey,
    RemoveKey,
    Propose,
    Sign,
    CheckSignatures,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let variant = self.variant.of(Some(&self.file))?;
        if self.signing.proposal.is_given() && self.action != PolicyAction::Propose {
            let text = "--number, --previous, --not-after and --overwrite are for propose";
            return Err(Error::Usage(text.into()));
        }
        let file = self.file;
        let action = match (self.action, &self.others[..]) {
            (PolicyAction::Check, []) => Action::Check(file),
            (PolicyAction::Show, []) => Action::Show(file),
            (PolicyAction::Diff, [new]) => Action::Diff(file, new.into()),
            (PolicyAction::AddKey, keys @ [_, ..]) => Action::AddKey(file, keys.into()),
            (PolicyAction::RemoveKey, keys @ [_, ..]) => Action::RemoveKey(file, keys.into()),
            (PolicyAction::Propose, []) => Action::Propose(file, self.signing.proposal),
            (PolicyAction::Sign, []) => Action::Sign(file, self.signing.key()?, self.signing.yes),
            (PolicyAction::CheckSignatures, []) => {
                Action::CheckSignatures(file, self.signing.operators()?)
            }
            (known, _) => {
                let operands = match known {
                    PolicyAction::Check => "check FILE",
                    PolicyAction::Show => "show FILE",
                    PolicyAction::Diff => "diff FILE FILE",
                    PolicyAction::AddKey => "add-key FILE KEY..",
                    PolicyAction::RemoveKey => "remove-key FILE KEY..",
                    PolicyAction::Propose => "propose FILE",
                    PolicyAction::Sign => "sign FILE --key FILE",
                    PolicyAction::CheckSignatures => "check-signatures FILE --operators FILE",
                };
                let text = format!("expected firstlight policy {operands}");
                return Err(Error::Usage(text));
            }
        };
        if self.trust_any_tpm && !matches!(action, Action::RemoveKey(..)) {
            return Err(Error::Usage("--trust-any-tpm is for remove-key".into()));
        }
        Ok(Options {
            action,
            variant,
            trust_any_tpm: self.trust_any_tpm,
            output: self.output,
        })
    }
}

/// What is done.
#[derive(Debug)]
pub enum Action {
    /// Errors in the policy, and what it does not pin.
    Check(PathBuf),
    /// What the policy requires.
    Show(PathBuf),
    /// The differences of two policies.
    Diff(PathBuf, PathBuf),
    /// Adds attestation keys.
    AddKey(PathBuf, Vec<String>),
    /// Removes attestation keys.
    RemoveKey(PathBuf, Vec<String>),
    /// Writes the statement that operators sign.
    Propose(PathBuf, Proposal),
    /// Signs the statement with a key, and whether the operator has agreed to that.
    Sign(PathBuf, PathBuf, bool),
    /// Which operators of a list have signed.
    CheckSignatures(PathBuf, PathBuf),
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// What is done.
    pub action: Action,
    /// The attestation variant of the machines, if the policy names none.
    pub variant: &'static Variant,
    /// Whether the last key may be removed.
    pub trust_any_tpm: bool,
    /// The form of the result.
    pub output: Output,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    match &options.action {
        Action::Check(file) => check(options, file),
        Action::Show(file) => {
            let policy = read(file)?;
            options.output.json(&facts::json(&policy))?;
            print(options.output, &facts::table(&policy))
        }
        Action::Diff(old, new) => diff(options, old, new),
        Action::AddKey(file, keys) => add_keys(options, file, &names(keys)?),
        Action::RemoveKey(file, keys) => remove_keys(options, file, &names(keys)?),
        Action::Propose(file, proposal) => {
            signed::propose(file, proposal, options.variant, options.output)
        }
        Action::Sign(file, key, is_agreed) => signed::sign(file, key, *is_agreed, options.output),
        Action::CheckSignatures(file, operators) => {
            signed::check_signatures(file, operators, options.output)
        }
    }
}

/// Reads a policy from a file, or from standard input (`-`).
fn read(file: &Path) -> Result<Policy, Error> {
    if files::is_standard_input(file) {
        read_policy(Path::new("/dev/stdin"))
    } else {
        read_policy(file)
    }
}

fn print(output: Output, lines: &str) -> Result<(), Error> {
    match output {
        Output::Text => say_all(lines),
        Output::Json => Ok(()),
    }
}

fn check(options: &Options, file: &Path) -> Result<(), Error> {
    let found = match read(file) {
        Ok(policy) => check::found(&policy, options.variant),
        Err(why) => check::Found::error(why.to_string()),
    };
    let (errors, open) = (&found.errors, &found.open);
    let json = json!({"variant": options.variant.name, "errors": errors, "open": open});
    options.output.json(&json)?;
    let lines = |kind: &str, all: &[String]| -> String {
        all.iter().map(|it| format!("{kind}: {it}\n")).collect()
    };
    let text = lines("error", errors) + &lines("not pinned", open);
    print(options.output, &text)?;
    let file = file.display();
    match errors.len() {
        0 => options.output.say(format_args!("{file}: no error")),
        1 => Err(Error::content(format!("{file}: 1 error"))),
        count => Err(Error::content(format!("{file}: {count} errors"))),
    }
}

fn diff(options: &Options, old: &Path, new: &Path) -> Result<(), Error> {
    let differences = facts::differences(&read(old)?, &read(new)?);
    let json = differences
        .iter()
        .map(|it| json!({"what": it.what, "before": it.before, "after": it.after}));
    options.output.json(&json.collect::<Vec<Value>>().into())?;
    let lines: String = differences.iter().map(ToString::to_string).collect();
    print(options.output, &lines)?;
    if differences.is_empty() {
        Ok(())
    } else {
        Err(Error::content(format!(
            "{} and {} differ",
            old.display(),
            new.display()
        )))
    }
}

/// Returns what the policy in force and the one in a file require differently, each as a phrase.
pub fn differences(in_force: &Policy, file: &Policy) -> Vec<String> {
    let value = |value: Option<String>| value.unwrap_or_else(|| "nothing".into());
    let all = facts::differences(in_force, file).into_iter();
    all.map(|it| {
        let (in_force, file) = (value(it.before), value(it.after));
        format!("{}: in force {in_force}, in the file {file}", it.what)
    })
    .collect()
}

fn add_keys(options: &Options, file: &Path, keys: &[KeyName]) -> Result<(), Error> {
    let policy = read_policy(file)?;
    if !options.variant.judges("attestationKeys") {
        return Err(Error::content(format!(
            "{}: machines with the attestation variant {} have no attestation key",
            file.display(),
            options.variant.name
        )));
    }
    if policy.believes_any_key() {
        log::warn!(
            "the policy named no key before: now it accepts only machines whose keys it names"
        );
    }
    let (present, new): (Vec<&KeyName>, Vec<_>) =
        keys.iter().partition(|key| policy.keys().contains(*key));
    if !new.is_empty() {
        let added = policy.clone().believing(new.iter().map(|key| **key));
        write(file, &added.map_err(Error::content)?)?;
    }
    let json = json!({"added": shown(&new), "present": shown(&present)});
    options.output.json(&json)?;
    for key in present {
        options.output.say(format_args!("already there: {key}"))?;
    }
    for key in new {
        options.output.say(format_args!("added: {key}"))?;
    }
    Ok(())
}

fn remove_keys(options: &Options, file: &Path, keys: &[KeyName]) -> Result<(), Error> {
    let policy = read_policy(file)?;
    let failed = |why: String| Error::content(format!("{}: {why}", file.display()));
    if let Some(key) = keys.iter().find(|key| !policy.keys().contains(*key)) {
        return Err(failed(format!(
            "the policy does not name the key {key}: nothing was changed"
        )));
    }
    let removed = policy.disbelieving(keys).map_err(Error::content)?;
    let judge = endorsement::validator(options.variant, removed.clone(), &offline());
    let judge = judge.map_err(|error| failed(error.to_string()))?;
    if judge.properties().believes_any_tpm && !options.trust_any_tpm {
        return Err(failed(
            "without its last key the policy would accept any TPM, and a program that only simulates one: add another key first \
             (`firstlight policy add-key`), or give --trust-any-tpm"
                .into(),
        ));
    }
    write(file, &removed)?;
    options.output.json(&json!({"removed": shown(keys)}))?;
    for key in keys {
        options.output.say(format_args!("removed: {key}"))?;
    }
    Ok(())
}

fn shown(keys: &[impl ToString]) -> Vec<String> {
    keys.iter().map(ToString::to_string).collect()
}

/// Returns the keys with these names, each once. `-` stands for the lines of standard input.
fn names(texts: &[String]) -> Result<Vec<KeyName>, Error> {
    let mut all = vec![];
    for text in texts {
        if text != "-" {
            all.push(text.clone());
            continue;
        }
        let input = files::read_open(Path::new("standard input"), io::stdin().lock());
        let input = String::from_utf8_lossy(&input?).into_owned();
        all.extend(input.split_whitespace().map(str::to_owned));
    }
    let keys: Result<BTreeSet<KeyName>, _> = all.iter().map(|text| text.parse()).collect();
    let keys = keys.map_err(Error::Usage)?;
    if keys.is_empty() {
        Err(Error::Usage("standard input has no key".into()))
    } else {
        Ok(keys.into_iter().collect())
    }
}

fn write(file: &Path, policy: &Policy) -> Result<(), Error> {
    let text = text(policy) + "\n";
    files::replace(file, text.as_bytes()).map_err(Error::from)
}
