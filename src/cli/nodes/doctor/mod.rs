//! `firstlight doctor`: runs the checks that an experienced operator would run on a cluster, and
//! says what to do about each finding. It changes nothing.
//!
//! ```text
//!  status::view     the API server's objects, what each node proves, what its servers show ─┐
//!  folder           the operator's files                                                    ├─► Gathered
//!  the policy       of the operator, beside the one in force                               ─┘      │
//!                                                                          checks: Gathered -> findings
//! ```

mod checks;
mod diagnosis;
mod folder;
mod gathered;

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use base::crypto::CLUSTER_ID_LEN;
use clap::Args;
use serde_json::{Value, json};
use verifier::{KeyName, Variant};

use crate::cluster::{
    status::inquiry::Inquiry,
    status::view::{self, SecretAccess},
};
use crate::shell::{
    error::Error,
    output::{Output, say_all},
    progress::Progress,
};
use crate::workspace::{
    connect::{KeyOptions, read_policy, read_policy_with},
    kubeconfig::KubeconfigOption,
    master_secret::MASTER_SECRET_FILE,
    options::{PolicyOptions, time},
    state::{ClusterOptions, State},
};
use checks::{CHECKS, Check};
use diagnosis::{Diagnosis, Severity};
use folder::{Folder, Paths};
use gathered::Gathered;

/// Exit code: a check has found an error or a warning.
pub const FOUND: u8 = 9;

/// How many objects are named of findings that are shown as one.
const SHOWN: usize = 5;

/// Check a running cluster, and say what to do about each finding
///
/// Runs the checks that an experienced operator would run: API servers, versions, certificates, etcd, nodes and what
/// they prove, records, services, the policy in force, clocks, and the files of the operator. It prints each finding
/// with one sentence that says what to do, errors first, then warnings, then notes. It changes nothing.
/// docs/day-two/doctor.md explains each check.
///
/// The exit code is 0 if there is no error and no warning, and 9 otherwise. Notes are about what you may want, and
/// about what could not be checked.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight doctor --policy policy.json
  firstlight doctor --policy policy.json -o json")]
pub(crate) struct CommandLine {
    #[command(flatten)]
    pub policy: PolicyOptions,
    #[command(flatten)]
    keys: KeyOptions,
    #[command(flatten)]
    cluster: ClusterOptions,
    /// The master secret, of which only the mode and the cluster are checked; may be missing
    #[arg(long, value_name = "FILE", default_value = MASTER_SECRET_FILE)]
    master_secret: PathBuf,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "60s")]
    timeout: Duration,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        Ok(Options {
            variant: self.policy.variant()?,
            paths: Paths {
                policy: self.policy.policy,
                state: self.cluster.state,
                master_secret: self.master_secret,
                kubeconfigs: self.kubeconfig.paths(),
            },
            keys: self.keys.attestation_key,
            cluster_id: self.cluster.cluster_id,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The operator's files.
    pub paths: Paths,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// Additional attestation keys that are accepted.
    pub keys: Vec<KeyName>,
    /// The cluster's ID; replaces the one in the state file.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// The form of the output.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let progress = Progress::on_stderr();
    progress.phase("asking the API server and all nodes");
    let facts = gather(options)?;
    drop(progress);
    let mut found: Vec<(&Check, Diagnosis)> = CHECKS
        .iter()
        .flat_map(|check| check.run(&facts).into_iter().map(move |it| (check, it)))
        .collect();
    // stable: within a severity, the order of the checks
    found.sort_by_key(|(_, finding)| finding.severity);
    options.output.json(&json(&facts, &found))?;
    if options.output == Output::Text {
        say_all(&text(&facts, &found))?;
    }
    match count(&found, Severity::Error) + count(&found, Severity::Warning) {
        0 => Ok(()),
        _ => Err(Error::State(FOUND, summary(&found))),
    }
}

/// Gathers what the checks judge. If the API server cannot be asked, that is a fact, too.
fn gather(options: &Options) -> Result<Gathered, Error> {
    let state = State::find(&options.paths.state);
    let state = state.as_ref().ok().and_then(Option::as_ref);
    let known: Vec<KeyName> = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied())
        .collect();
    let policy = read_policy_with(
        options.variant,
        &options.paths.policy,
        &options.keys,
        known.iter().copied(),
    )?;
    let inquiry = Inquiry {
        variant: options.variant,
        policy: &policy,
        cluster: options
            .cluster_id
            .or(state.and_then(|state| state.cluster_id)),
        deadline: Instant::now() + options.timeout,
    };
    let (view, unlisted) =
        match view::gather(&inquiry, &options.paths.kubeconfigs, SecretAccess::Read) {
            Ok(view) => (view, None),
            // the operator's certificate may be the reason
            Err(unlisted) => (
                unlisted.known,
                Some((unlisted.cause, unlisted.error.to_string())),
            ),
        };
    Ok(Gathered {
        now: SystemTime::now(),
        unlisted,
        view,
        policy: read_policy(&options.paths.policy)?,
        known,
        policy_file: options.paths.policy.clone(),
        variant: options.variant,
        folder: Folder::look(&options.paths, options.cluster_id),
    })
}

/// Returns the text for people. Findings that differ only in their object are shown as one.
fn text(facts: &Gathered, found: &[(&Check, Diagnosis)]) -> String {
    let mut merged: Vec<(&Check, &Diagnosis, Vec<&str>)> = vec![];
    for (check, finding) in found {
        let known = merged
            .iter_mut()
            .find(|(of, it, _)| of.name == check.name && it.is_like(finding));
        match known {
            Some((.., objects)) => objects.push(&finding.object),
            None => merged.push((check, finding, vec![&finding.object])),
        }
    }
    let mut text = String::new();
    for (check, finding, objects) in merged {
        let mut shown = objects[..objects.len().min(SHOWN)].join(", ");
        if let more @ 1.. = objects.len().saturating_sub(SHOWN) {
            shown += &format!(" and {more} more");
        }
        text += &finding.text(check.name, &shown);
    }
    let nodes = match (&facts.unlisted, facts.view.nodes.len()) {
        (Some(_), _) => "no node was asked".to_owned(),
        (None, 1) => "1 node".to_owned(),
        (None, nodes) => format!("{nodes} nodes"),
    };
    format!(
        "{text}{} ({} checks, {nodes})\n",
        summary(found),
        CHECKS.len()
    )
}

fn count(found: &[(&Check, Diagnosis)], severity: Severity) -> usize {
    let of_it = found
        .iter()
        .filter(|(_, finding)| finding.severity == severity);
    of_it.count()
}

fn summary(found: &[(&Check, Diagnosis)]) -> String {
    let counted = |severity: Severity| {
        let count = count(found, severity);
        let plural = if count == 1 { "" } else { "s" };
        format!("{count} {}{plural}", severity.word())
    };
    format!(
        "{}, {}, {}",
        counted(Severity::Error),
        counted(Severity::Warning),
        counted(Severity::Note)
    )
}

/// Returns the JSON for programs. docs/cli.md describes it.
fn json(facts: &Gathered, found: &[(&Check, Diagnosis)]) -> Value {
    let findings = found.iter().map(|(check, it)| it.json(check.name));
    json!({
        "server": facts.view.server,
        "nodes": facts.view.nodes.len(),
        "errors": count(found, Severity::Error),
        "warnings": count(found, Severity::Warning),
        "notes": count(found, Severity::Note),
        "findings": findings.collect::<Vec<Value>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::status::view::ListFailure;

    /// The page that explains the checks.
    const PAGE: &str = include_str!("../../../../docs/day-two/doctor.md");

    #[test]
    fn the_page_explains_every_check_and_no_other() {
        let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `"));
        let mut explained: Vec<&str> = rows.filter_map(|row| row.split('`').next()).collect();
        let mut known: Vec<&str> = CHECKS.iter().map(|check| check.name).collect();
        explained.sort_unstable();
        known.sort_unstable();
        assert_eq!(explained, known);
    }

    #[test]
    fn findings_are_counted_by_their_severity() {
        let finding = Diagnosis::warning("a", "b", "c");
        let found = [(&CHECKS[0], finding.clone()), (&CHECKS[0], finding)];
        assert_eq!(summary(&found), "0 errors, 2 warnings, 0 notes");
        assert_eq!(summary(&found[..1]), "0 errors, 1 warning, 0 notes");
        let text = found[0].1.text("x", "a");
        assert_eq!(text, "warning (x): a: b\n    c\n");
    }

    #[test]
    fn findings_that_differ_only_in_their_object_are_shown_as_one() {
        let of = |object: &str, text: &str| (&CHECKS[0], Diagnosis::warning(object, text, "c"));
        let mut found = vec![of("a", "x"), of("b", "y"), of("c", "x")];
        let mut facts = super::checks::tests::healthy();
        let said = text(&facts, &found);
        let expected = "warning (api-server): a, c: x\n    c\nwarning (api-server): b: y\n    c\n0 errors, 3 warnings, 0 notes";
        assert!(said.starts_with(expected), "{said}");
        assert!(said.ends_with("checks, 4 nodes)\n"), "{said}");
        found.extend(["d", "e", "f", "g", "h"].map(|object| of(object, "x")));
        facts.unlisted = Some((ListFailure::Refused, String::new()));
        let said = text(&facts, &found);
        assert!(said.contains(": a, c, d, e, f and 2 more: x\n"), "{said}");
        assert!(said.ends_with("checks, no node was asked)\n"), "{said}");
    }

    #[test]
    fn texts_of_others_cannot_forge_a_finding() {
        let text = Diagnosis::note("a", "c\u{1b}[2J", "d").text("y", "a\nerror (x): b");
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
