//! `firstlight operator`: certificates for other people, with which they call nodes without the master secret.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base::crypto::SSH_USER_CA_SEED_ID;
use clap::{Args, ValueEnum, value_parser};
use proto::operator::{REVOKE, RevokeRequest, RevokeResponse};
use serde_json::json;
use ssh::{OPERATOR, READER, signature};

use super::session::{Operator, OperatorOptions};
use crate::secrets::ssh::{authority, read_key};
use crate::shell::{error::Error, files, output::Output, progress::Progress};
use crate::workspace::options::time;

/// The longest validity that nodes accept, in hours: 31 days.
const MOST_HOURS: i64 = 31 * 24;

/// Let other people call nodes without the master secret, or end that
///
/// certify makes a certificate for a person's SSH key: of a file, of an agent, or of a FIDO2 token. With it, this
/// person uses `firstlight logs`, `support`, `kubeconfig` and `node` (--certificate and --key); with --read-only only
/// the first two. sshd accepts no such certificate. The comment of the key is the name in the nodes' records. The
/// command needs the master secret, and no connection.
///
/// revoke has nodes refuse a key, also with certificates that are still valid; accept ends that. Only nodes that were
/// asked know it, and a node that joins later does not: ask again, or wait until the certificate has expired.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight operator certify anna.pub --hours 24 --read-only
  firstlight operator revoke anna.pub
  firstlight operator accept SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU control-plane-0")]
pub(crate) struct CommandLine {
    /// What to do
    action: PersonAction,
    /// The file of the person's public key, or its fingerprint (SHA256:..)
    #[arg(value_name = "KEY")]
    person: String,
    /// With revoke and accept: the nodes, by default all of the state file
    #[arg(value_name = "NODE")]
    nodes: Vec<String>,
    /// With certify: how long the certificate is valid; at most 744, a month
    #[arg(long, value_name = "NUMBER", default_value = "24", value_parser = value_parser!(u32).range(1..=MOST_HOURS))]
    hours: u32,
    /// With certify: only for logs and facts
    #[arg(long)]
    read_only: bool,
    /// With certify: the file for the certificate; must not exist
    #[arg(
        long,
        value_name = "FILE",
        default_value = "firstlight-operator-cert.pub"
    )]
    file: PathBuf,
    #[command(flatten)]
    pub operator: OperatorOptions,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "2m")]
    timeout: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PersonAction {
    Certify,
    Revoke,
    Accept,
}

/// Runs the command.
pub fn run(given: &CommandLine) -> Result<(), Error> {
    match given.action {
        PersonAction::Certify if given.nodes.is_empty() => certify(given, Path::new(&given.person)),
        PersonAction::Certify => Err(Error::Usage("certify needs no node".into())),
        action => revoke(given, action == PersonAction::Accept),
    }
}

fn certify(given: &CommandLine, path: &Path) -> Result<(), Error> {
    let CommandLine {
        hours,
        file,
        output,
        ..
    } = given;
    let key = read_key(path)?;
    signature::check_kind(&key)
        .map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
    let authority = authority(&given.operator.secret.source().read()?, SSH_USER_CA_SEED_ID)?;
    let principal = if given.read_only { READER } else { OPERATOR };
    // the certificate begins some minutes ago, and a node counts from there
    let validity = Duration::from_secs(u64::from(*hours) * 3600) - Duration::from_secs(600);
    let line = authority.operator_certificate(&key, &[principal], validity, SystemTime::now());
    files::create_private(file, format!("{line}\n").as_bytes())?;
    output.json(&json!({
        "certificate": file, "fingerprint": key.fingerprint(), "principal": principal, "hours": hours,
    }))?;
    output.say(format_args!(
        "A certificate for the key {}, valid for {hours} hours, is in {}",
        key.fingerprint(),
        file.display()
    ))
}

fn revoke(given: &CommandLine, undo: bool) -> Result<(), Error> {
    let (key, output) = (&given.person, given.output);
    let fingerprint = if key.starts_with("SHA256:") {
        key.clone()
    } else {
        read_key(Path::new(key))?.fingerprint()
    };
    let operator = Operator::of(&given.operator, given.timeout)?;
    let nodes = operator.named_or_all(&given.nodes)?;
    let what = if undo { "accepts" } else { "refuses" };
    let (mut done, mut failed) = (vec![], vec![]);
    for node in &nodes {
        let progress = Progress::on_stderr();
        let answer = operator.connect(node, &progress).and_then(|session| {
            session.call(|channel, caller, options| {
                let request = RevokeRequest {
                    caller: Some(caller),
                    fingerprint: fingerprint.clone(),
                    undo,
                };
                channel.unary::<_, RevokeResponse>(REVOKE, &request, options)
            })
        });
        drop(progress);
        match answer {
            Ok(_) => {
                output.say(format_args!("{node}: {what} the key {fingerprint}"))?;
                done.push(node);
            }
            Err(error) => failed.push(error.to_string()),
        }
    }
    output.json(&json!({"fingerprint": fingerprint, "nodes": done, "failed": failed}))?;
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Error::Unreachable(format!(
            "{} of {} nodes did not answer, and treat the key as before:\n{}",
            failed.len(),
            nodes.len(),
            failed.join("\n")
        )))
    }
}
