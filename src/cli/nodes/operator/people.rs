//! `firstlight operator`: certificates for other people, with which they call nodes without the master secret.

use std::path::Path;
use std::time::{Duration, SystemTime};

use base::crypto::SSH_USER_CA_SEED_ID;
use base::options::Opt;
use base::program;
use proto::operator::{REVOKE, RevokeRequest, RevokeResponse};
use serde_json::json;
use ssh::{OPERATOR, READER, signature};

use super::session::{CERTIFICATE, KEY, Operator, POLICY};
use crate::secrets::ssh::{authority, read_key};
use crate::shell::{
    error::Error,
    files,
    output::{OUTPUT, Output},
    progress::Progress,
    usage::{Command, Given, Operand, suggestion},
};
use crate::workspace::{
    connect::ATTESTATION_KEY,
    master_secret::{MASTER_SECRET, SHARE_FILE, master_secret_of},
    options::{TIMEOUT, VARIANT},
    sources::{KEPT, OFFLINE},
    state::{CLUSTER_ID, CLUSTER_STATE},
};

const ACTIONS: [&str; 3] = ["certify", "revoke", "accept"];
/// The longest validity that nodes accept, in hours: 31 days.
const MOST_HOURS: u32 = 31 * 24;

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "operator",
    summary: "let other people call nodes without the master secret, or end that",
    about: &[
        "certify makes a certificate for a person's SSH key: of a file, of an agent, or of a FIDO2 token. With it, this person uses \
         `firstlight logs`, `support`, `kubeconfig` and `node` (--certificate and --key); with --read-only only the first two. sshd \
         accepts no such certificate. The comment of the key is the name in the nodes' records. The command needs the master secret, \
         and no connection.",
        "revoke has nodes refuse a key, also with certificates that are still valid; accept ends that. Only nodes that were asked know \
         it, and a node that joins later does not: ask again, or wait until the certificate has expired.",
    ],
    operand: Some(Operand {
        value: "certify|revoke|accept KEY [NODE]..",
        words: &ACTIONS,
        is_needed: true,
        help: "the file of the person's public key, or its fingerprint (SHA256:..); the nodes, by default all of the state file",
    }),
    options: &[
        Opt::value(
            "hours",
            "NUMBER",
            "certify: how long the certificate is valid; at most 744, a month",
        )
        .or("24"),
        Opt::flag("read-only", "certify: only for logs and facts"),
        Opt::value(
            "file",
            "FILE",
            "certify: the file for the certificate; must not exist",
        )
        .or("firstlight-operator-cert.pub"),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        ATTESTATION_KEY,
        CLUSTER_STATE,
        CLUSTER_ID,
        MASTER_SECRET,
        SHARE_FILE,
        CERTIFICATE,
        KEY,
        OUTPUT,
        TIMEOUT.or("2m"),
    ],
    examples: &[
        "firstlight operator certify anna.pub --hours 24 --read-only",
        "firstlight operator revoke anna.pub",
        "firstlight operator accept SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU control-plane-0",
    ],
    run,
};

fn run(given: &Given) -> Result<(), Error> {
    let action = given.operand()?;
    let mut further = vec![];
    for word in given.further().iter().cloned().map(program::text) {
        further.push(word?);
    }
    let Some((key, nodes)) = further.split_first() else {
        return Err(Error::Usage(format!(
            "expected firstlight operator {action} KEY"
        )));
    };
    match action.as_str() {
        "certify" if nodes.is_empty() => certify(given, Path::new(key)),
        "certify" => Err(Error::Usage("certify needs no node".into())),
        "revoke" | "accept" => revoke(given, key, nodes, action == "accept"),
        other => {
            let end = suggestion("", other, ACTIONS);
            Err(Error::Usage(format!("there is no action {other:?}{end}")))
        }
    }
}

fn certify(given: &Given, path: &Path) -> Result<(), Error> {
    let hours: u32 = given.parsed("hours", str::parse)?;
    if hours == 0 || hours > MOST_HOURS {
        return Err(Error::Usage(format!("--hours: expected 1 to {MOST_HOURS}")));
    }
    let (key, output, file) = (read_key(path)?, Output::of(given)?, given.path("file"));
    signature::check_kind(&key)
        .map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
    let authority = authority(&master_secret_of(given)?.read()?, SSH_USER_CA_SEED_ID)?;
    let principal = if given.has("read-only") {
        READER
    } else {
        OPERATOR
    };
    // the certificate begins some minutes ago, and a node counts from there
    let validity = Duration::from_secs(u64::from(hours) * 3600) - Duration::from_secs(600);
    let line = authority.operator_certificate(&key, &[principal], validity, SystemTime::now());
    files::create_private(&file, format!("{line}\n").as_bytes())?;
    output.json(&json!({
        "certificate": file, "fingerprint": key.fingerprint(), "principal": principal, "hours": hours,
    }))?;
    output.say(format_args!(
        "A certificate for the key {}, valid for {hours} hours, is in {}",
        key.fingerprint(),
        file.display()
    ))
}

fn revoke(given: &Given, key: &str, nodes: &[String], undo: bool) -> Result<(), Error> {
    let fingerprint = if key.starts_with("SHA256:") {
        key.to_owned()
    } else {
        read_key(Path::new(key))?.fingerprint()
    };
    let (operator, output) = (Operator::of(given)?, Output::of(given)?);
    let nodes = match nodes {
        [] => operator.nodes(),
        nodes => nodes.to_vec(),
    };
    if nodes.is_empty() {
        return Err(Error::Usage(
            "the state file has no nodes: give their names or addresses".into(),
        ));
    }
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
        Err(Error::failed(format!(
            "{} of {} nodes did not answer; they do not know it:\n{}",
            failed.len(),
            nodes.len(),
            failed.join("\n")
        )))
    }
}
