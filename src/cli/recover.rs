//! `firstlight recover`: sends the master secret to a node that waits for the key of its disk.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::connect::{
    ATTESTATION_KEY, Endpoint, NODE_OPERAND, Node, Pause, Reached, TRUST_ANY_TPM, Trust, and_known,
    endpoint_of, read_policy, trust_of,
};
use super::interrupt;
use super::master_secret::{MASTER_SECRET, SHARE_FILE, SecretSource, master_secret_of};
use super::options::{POLICY, TIMEOUT, VARIANT, time, variant_of};
use super::output::{OUTPUT, Output};
use super::progress::{Progress, human, printable};
use super::sources::{KEPT, OFFLINE};
use super::state::{KNOWN_NODES, State};
use super::usage::{Command, Given};
use crate::error::Error;
use base::options::Opt;
use kms::{ClusterKms, NO_STORE};
use proto::recoverproto;
use proto::recoverproto::{RecoverMessage, RecoverResponse, StatusRequest, StatusResponse};
use rpc::grpc::{CallOptions, Channel, Code, Status};
use serde_json::{Value, json};
use verifier::{KeyName, Variant};

/// The method that takes the master secret.
const RECOVER: &str = "/recoverproto.API/Recover";
/// The method that tells what the node waits for.
const STATUS: &str = "/recoverproto.API/Status";

/// Time limit of a status call, which the node answers from memory.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a recover call. The argon2id of a Constellation keyslot may need a GiB of memory
/// and much time on a small machine.
const RECOVER_TIMEOUT: Duration = Duration::from_secs(120);

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "recover",
    summary: "send the master secret to a node that waits for the key of its disk",
    about: &[
        "A node waits in its initramfs if its cluster cannot give it the key of its disk, because no other control plane \
              runs. This command connects to the node over attested TLS, checks that it meets the policy, and sends it the \
              master secret. It succeeds when the node has opened its disk. If several nodes share an address, each run \
              recovers one of them.",
        "The policy, the state file or the command line must name the node's attestation key. The state file has the keys of \
              nodes that were initialized or recovered with it. Every node shows its key on its console, and a running \
              cluster has it in its records.",
        "When a whole cluster was off, recover control planes until more than half of them run. Then the cluster is back, and \
              opens the disks of its other nodes by itself.",
    ],
    operand: Some(NODE_OPERAND),
    options: &[
        Opt::value(
            "endpoint",
            "HOST[:PORT]",
            "the node; the default port is 9999",
        ),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        MASTER_SECRET,
        SHARE_FILE,
        ATTESTATION_KEY,
        TRUST_ANY_TPM,
        KNOWN_NODES,
        Opt::flag(
            "migrate",
            "also open a disk whose header does not name its cluster, such as a disk of Constellation; use it only for a \
             disk that you know to be this node's; needs the measurement salt of the state file",
        ),
        Opt::flag(
            "status",
            "only show what the node waits for: the disk, since when, what it tried",
        ),
        OUTPUT,
        TIMEOUT.or("10m"),
    ],
    examples: &[
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --status",
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --master-secret /media/safe/mastersecret.json",
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --share alice.txt --share bob.txt --share -",
    ],
    run: |given| run(&options(given)?),
};

fn options(given: &Given) -> Result<Options, Error> {
    let secret = ["master-secret", "share"]
        .into_iter()
        .find(|name| given.has(name));
    let action = match (given.has("status"), secret) {
        (true, None) => Action::Status,
        (true, Some(name)) => return Err(Error::Usage(format!("--status needs no --{name}"))),
        (false, _) => Action::Push {
            master_secret: master_secret_of(given)?,
            is_migrating: given.has("migrate"),
        },
    };
    Ok(Options {
        endpoint: endpoint_of(given, recoverproto::PORT)?,
        variant: variant_of(given)?,
        policy: given.path("policy"),
        trust: trust_of(given)?,
        state: given.path("state"),
        action,
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The node's address.
    pub endpoint: Endpoint,
    /// The attestation policy that the node must meet.
    pub policy: PathBuf,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// The TPMs that may get the master secret.
    pub trust: Trust,
    /// The state file, which has the keys of known nodes; it may be missing.
    pub state: PathBuf,
    /// What to do with the node.
    pub action: Action,
    /// The form of the output.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// What to do with a node.
#[derive(Debug)]
pub enum Action {
    /// Send the master secret.
    Push {
        /// The source of the master secret.
        master_secret: SecretSource,
        /// Whether a disk whose header does not name its cluster may be opened; this needs the
        /// state file.
        is_migrating: bool,
    },
    /// Ask what the node waits for, and print it.
    Status,
}

/// The secrets that are sent to a node.
struct Key {
    kms: ClusterKms,
    /// The measurement salt; empty unless the cluster is migrating.
    measurement_salt: Vec<u8>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let state = State::find(&options.state)?;
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let (policy, endpoint) = (read_policy(&options.policy)?, &options.endpoint);
    let node = match &options.action {
        Action::Status => Node::to_ask(endpoint, options.variant, and_known(policy, known)?)?,
        Action::Push { .. } => Node::to_trust(
            endpoint,
            options.variant,
            policy,
            &options.trust.clone().and(known),
        )?,
    };
    let recovered = recover_at(&node, options)?;
    match (state, recovered) {
        (Some(state), Some(key)) => remember_key(state, key),
        _ => Ok(()),
    }
}

/// Runs the action on the node; returns the attestation key of a recovered node, if it has one.
fn recover_at(node: &Node, options: &Options) -> Result<Option<KeyName>, Error> {
    let deadline = Instant::now() + options.timeout;
    match &options.action {
        Action::Status => print_status(options, node, deadline).map(|()| None),
        Action::Push {
            master_secret,
            is_migrating,
        } => {
            let kms = master_secret.read()?;
            let measurement_salt = match is_migrating {
                true => State::open(&options.state)?.measurement_salt.to_vec(),
                false => Vec::new(),
            };
            push(
                options,
                node,
                &Key {
                    kms,
                    measurement_salt,
                },
                deadline,
            )
        }
    }
}

/// Adds the key to the state file, so that the next recovery accepts the node.
fn remember_key(mut state: State, key: KeyName) -> Result<(), Error> {
    match state.attestation_keys.insert(key) {
        true => state.save().map_err(Error::from),
        false => Ok(()),
    }
}

fn print_status(options: &Options, node: &Node, deadline: Instant) -> Result<(), Error> {
    let progress = Progress::on_stderr();
    let Reached { channel, .. } = node.reach(deadline, &progress)?;
    drop(progress);
    match status(&channel) {
        Ok(status) => {
            for (name, value) in facts(&status) {
                options.output.say(format_args!("{name} {value}"))?;
            }
            options.output.json(&json(&status))
        }
        Err(status) if status.code() == Code::Unimplemented => Err(Error::failed(format!(
            "{}: the node's version does not report what it waits for",
            options.endpoint
        ))),
        Err(status) => Err(failure(options, &status, false)),
    }
}

/// Sends the key. Sending it twice does no harm, so the command reconnects after a lost connection.
fn push(
    options: &Options,
    node: &Node,
    brought: &Key,
    deadline: Instant,
) -> Result<Option<KeyName>, Error> {
    let progress = Progress::on_stderr();
    let mut pause = Pause::new();
    let mut pushed = false;
    loop {
        let Reached { channel, key } = node
            .reach(deadline, &progress)
            .map_err(|failure| remember(failure, pushed))?;
        let before = status(&channel);
        if let Ok(status) = &before {
            progress.line(format!("{}: {}", options.endpoint, summary(status)));
        }
        progress.phase(format!("sending the key to {}", options.endpoint));
        interrupt::means(
            "the node may have the key and continue; `firstlight status` shows its state",
        );
        let answer = bring(&channel, brought, deadline);
        pushed = true;
        match answer {
            Ok(()) => {
                drop(progress);
                let endpoint = options.endpoint.to_string();
                let disk = (before.as_ref().ok())
                    .map(|status| printable(&status.disk_uuid))
                    .filter(|disk| !disk.is_empty());
                options.output.json(&json!({
                    "node": endpoint,
                    "disk": disk,
                    // a Constellation node does not report this
                    "opened": before.is_ok(),
                    "key": key.map(|key| key.to_string()),
                }))?;
                options.output.say(match (&before, disk) {
                    (Ok(_), Some(disk)) => format!("{endpoint} opened its disk {disk}"),
                    (Ok(_), None) => format!("{endpoint} opened its disk"),
                    (Err(_), _) => format!(
                        "{endpoint} received the key; its console shows whether the key opens the disk"
                    ),
                })?;
                return Ok(key);
            }
            Err(status)
                if matches!(status.code(), Code::Unavailable | Code::ResourceExhausted)
                    && pause.take(deadline) =>
            {
                progress.line(format!("{}: {status}", options.endpoint));
            }
            Err(status) => return Err(failure(options, &status, pushed)),
        }
    }
}

/// Asks the node what it waits for.
pub fn status(channel: &Channel) -> Result<StatusResponse, Status> {
    let options = CallOptions {
        timeout: Some(STATUS_TIMEOUT),
        ..CallOptions::default()
    };
    channel.unary(STATUS, &StatusRequest {}, &options)
}

fn bring(channel: &Channel, key: &Key, deadline: Instant) -> Result<(), Status> {
    let timeout = deadline
        .saturating_duration_since(Instant::now())
        .min(RECOVER_TIMEOUT);
    let options = CallOptions {
        timeout: Some(timeout),
        ..CallOptions::default()
    };
    let message = RecoverMessage {
        kms_uri: key.kms.uri().to_string(),
        storage_uri: NO_STORE.into(),
        measurement_salt: key.measurement_salt.clone(),
    };
    channel
        .unary(RECOVER, &message, &options)
        .map(|RecoverResponse {}| ())
}

/// Returns the status as lines for people, with names of the same width.
pub fn facts(status: &StatusResponse) -> Vec<(&'static str, String)> {
    let or = |text: &str, other: &str| printable(if text.is_empty() { other } else { text });
    let mut facts = vec![
        ("Disk:       ", or(&status.disk_uuid, "not known yet")),
        ("State:      ", or(&status.state, "not known")),
        (
            "Since:      ",
            human(Duration::from_secs(status.waiting_seconds)),
        ),
    ];
    facts.extend(
        status
            .waiting_for
            .iter()
            .map(|source| ("Waiting for:", printable(source))),
    );
    facts
}

/// Returns the status for programs.
pub fn json(status: &StatusResponse) -> Value {
    json!({
        "disk": (!status.disk_uuid.is_empty()).then_some(&status.disk_uuid),
        "state": status.state,
        "seconds": status.waiting_seconds,
        "for": status.waiting_for,
    })
}

fn summary(status: &StatusResponse) -> String {
    let disk = if status.disk_uuid.is_empty() {
        "not known yet"
    } else {
        &status.disk_uuid
    };
    let (disk, state) = (printable(disk), printable(&status.state));
    format!(
        "disk {disk}, {state} for {}",
        human(Duration::from_secs(status.waiting_seconds))
    )
}

/// Explains a status other than OK to the operator.
fn failure(options: &Options, status: &Status, pushed: bool) -> Error {
    let endpoint = &options.endpoint;
    let text = status.to_string();
    match status.code() {
        Code::FailedPrecondition | Code::InvalidArgument => Error::Refused(format!(
            "{endpoint}: the node does not open its disk with this master secret, and continues to wait: {text}\n\
             Check that this is the master secret of the node's cluster."
        )),
        Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => remember(
            Error::Unreachable(format!("{endpoint}: no answer: {text}")),
            pushed,
        ),
        _ => Error::Refused(format!("{endpoint}: the node refused: {text}")),
    }
}

/// Adds a hint to the failure: a node that got the key and stopped answering may have continued its
/// boot.
fn remember(failure: Error, pushed: bool) -> Error {
    match failure {
        Error::Unreachable(text) if pushed => Error::Unreachable(format!(
            "{text}\nThe key was sent before: the node may have opened its disk and continued its boot"
        )),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use tempfile::TempDir;

    use super::*;
    use crate::error::UNREACHABLE;
    use crate::master_secret;
    use rpc::grpc::{Call, Limits, Router, Server};
    use verifier::variant;

    const UUID: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22";

    fn waiting() -> StatusResponse {
        StatusResponse {
            disk_uuid: UUID.into(),
            state: "waiting for a key".into(),
            waiting_for: vec!["10.42.1.100:30090: 7 tries: connection refused".into()],
            waiting_seconds: 125,
        }
    }

    fn start(router: Router) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tls = atls::Server::new(None, None);
        Server::start("node", listener, Arc::new(tls), router, Limits::default()).unwrap()
    }

    fn recovering<F>(answer: F) -> Router
    where
        F: Fn(&RecoverMessage) -> Result<RecoverResponse, Status> + Send + Sync + 'static,
    {
        Router::new().unary(RECOVER, move |_: &Call, message: RecoverMessage| {
            answer(&message)
        })
    }

    fn with_status(router: Router) -> Router {
        router.unary(STATUS, |_: &Call, _: StatusRequest| Ok(waiting()))
    }

    fn run_at(node: &Server, action: impl FnOnce(&TempDir) -> Action) -> Result<(), (u8, String)> {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::parse(&node.local_addr().to_string(), 9999).unwrap();
        let timeout = Duration::from_secs(10);
        let (policy, state, trust) = ("none".into(), "none".into(), Trust::AnyTpm);
        let options = Options {
            variant: Variant::named(variant::DEFAULT).unwrap(),
            endpoint: endpoint.clone(),
            policy,
            trust,
            state,
            action: action(&dir),
            output: Output::Text,
            timeout,
        };
        match recover_at(
            &Node {
                endpoint,
                client: atls::Client::new(None, None),
            },
            &options,
        ) {
            Ok(key) => {
                assert_eq!(key, None, "such a node has none");
                Ok(())
            }
            Err(error) => Err((error.exit_code(), error.to_string())),
        }
    }

    fn push_to(node: &Server) -> Result<(), (u8, String)> {
        run_at(node, |dir| {
            let path = dir.path().join("master.json");
            master_secret::open_or_create(&path, &crate::keeping::Wish::default()).unwrap();
            Action::Push {
                master_secret: SecretSource::File(path),
                is_migrating: false,
            }
        })
    }

    #[test]
    fn the_node_gets_the_master_secret_once() {
        let got: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let keep = got.clone();
        let node = start(with_status(recovering(move |message| {
            keep.lock()
                .unwrap()
                .push((message.kms_uri.clone(), message.storage_uri.clone()));
            Ok(RecoverResponse {})
        })));
        push_to(&node).unwrap();
        let got = got.lock().unwrap();
        assert_eq!(got.len(), 1);
        assert!(ClusterKms::from_uris(&got[0].0, &got[0].1).is_ok());
    }

    #[test]
    fn a_node_of_the_old_system_gets_it_too() {
        let node = start(recovering(|_| Ok(RecoverResponse {})));
        assert_eq!(push_to(&node), Ok(()));
    }

    #[test]
    fn a_key_that_does_not_open_the_disk_is_a_failure_that_says_so() {
        for code in [Code::FailedPrecondition, Code::InvalidArgument] {
            let node = start(with_status(recovering(move |_| {
                Err(Status::new(code, "no keyslot opens"))
            })));
            let (exit, text) = push_to(&node).unwrap_err();
            assert!(
                exit == 1
                    && text.contains("does not open its disk")
                    && text.contains("no keyslot opens"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_node_that_is_busy_is_asked_again() {
        let tries = AtomicUsize::new(0);
        let node = start(recovering(move |_| {
            match tries.fetch_add(1, Ordering::SeqCst) {
                0 => Err(Status::new(Code::Unavailable, "busy")),
                _ => Ok(RecoverResponse {}),
            }
        }));
        assert_eq!(push_to(&node), Ok(()));
    }

    #[test]
    fn a_node_that_is_gone_after_the_push_may_have_gone_on() {
        let node = start(recovering(|_| {
            Err(Status::new(Code::DeadlineExceeded, "too long"))
        }));
        let (exit, text) = push_to(&node).unwrap_err();
        assert!(
            exit == UNREACHABLE && text.contains("may have opened its disk"),
            "{text}"
        );
    }

    #[test]
    fn the_status_is_told_in_full_and_cannot_drive_the_terminal() {
        let facts = facts(&StatusResponse {
            state: "waiting\x1b[2J\nforged".into(),
            ..waiting()
        });
        let text: String = facts
            .iter()
            .map(|(name, value)| format!("{name} {value}\n"))
            .collect();
        for part in [
            UUID,
            "waiting\\u001b[2J\\u000aforged",
            "2 min 5 s",
            "10.42.1.100:30090: 7 tries: connection refused",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let node = start(with_status(Router::new()));
        assert_eq!(run_at(&node, |_| Action::Status), Ok(()));
    }

    #[test]
    fn a_node_of_the_old_system_has_no_status_to_tell() {
        let node = start(recovering(|_| Ok(RecoverResponse {})));
        let (exit, text) = run_at(&node, |_| Action::Status).unwrap_err();
        assert!(exit == 1 && text.contains("does not report"), "{text}");
    }
}
