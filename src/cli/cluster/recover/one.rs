//! `firstlight recover` for one node.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::calls::{RecoverySecrets, bring, facts, json, status, summary};
use crate::shell::{
    error::Error,
    interrupt,
    output::Output,
    progress::{Progress, printable},
};
use crate::workspace::{
    connect::{Endpoint, Node, Pause, Reached, TpmTrust, and_known, read_policy_of},
    master_secret::SecretSource,
    state::State,
};
use rpc::grpc::{Code, Status};
use serde_json::json;
use verifier::{KeyName, Variant};

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
    pub trust: TpmTrust,
    /// The state file, which has the keys of known nodes; it may be missing.
    pub state: PathBuf,
    /// What to do with the node.
    pub action: RecoverAction,
    /// The form of the output.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// What to do with a node.
#[derive(Debug)]
pub enum RecoverAction {
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

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let state = State::find(&options.state)?;
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let policy = read_policy_of(options.variant, &options.policy)?;
    let endpoint = &options.endpoint;
    let node = match &options.action {
        RecoverAction::Status => {
            Node::to_ask(endpoint, options.variant, and_known(policy, known)?)?
        }
        RecoverAction::Push { .. } => Node::to_trust(
            endpoint,
            options.variant,
            policy,
            &options.trust.clone().and_known(known),
        )?,
    };
    let recovered = recover_at(&node, options)?;
    match (state, recovered) {
        // so that the next recovery accepts the node
        (Some(state), Some(key)) if !state.attestation_keys.contains(&key) => {
            let add = |state: &mut State| state.attestation_keys.extend([key]);
            State::change(&options.state, add).map_err(Error::from)
        }
        _ => Ok(()),
    }
}

/// Runs the action on the node; returns the attestation key of a recovered node, if it has one.
fn recover_at(node: &Node, options: &Options) -> Result<Option<KeyName>, Error> {
    let deadline = Instant::now() + options.timeout;
    match &options.action {
        RecoverAction::Status => print_status(options, node, deadline).map(|()| None),
        RecoverAction::Push {
            master_secret,
            is_migrating,
        } => {
            let kms = master_secret.read()?;
            let measurement_salt = match is_migrating {
                true => State::open(&options.state)?.measurement_salt.to_vec(),
                false => Vec::new(),
            };
            let key = RecoverySecrets {
                kms,
                measurement_salt,
            };
            push(options, node, &key, deadline)
        }
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
        Err(status) if status.code() == Code::Unimplemented => Err(Error::refused(format!(
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
    brought: &RecoverySecrets,
    deadline: Instant,
) -> Result<Option<KeyName>, Error> {
    let progress = Progress::on_stderr();
    let mut pause = Pause::new();
    let mut pushed = false;
    loop {
        let Reached { channel, key, .. } = node
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
    use crate::shell::error::UNREACHABLE;
    use crate::workspace::master_secret;
    use base::master_secret::MasterSecret;
    use proto::recoverproto::{
        RECOVER, RecoverMessage, RecoverResponse, STATUS, StatusRequest, StatusResponse,
    };
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

    fn run_at(
        node: &Server,
        action: impl FnOnce(&TempDir) -> RecoverAction,
    ) -> Result<(), (u8, String)> {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::parse(&node.local_addr().to_string(), 9999).unwrap();
        let timeout = Duration::from_secs(10);
        let (policy, state, trust) = ("none".into(), "none".into(), TpmTrust::AnyTpm);
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
            master_secret::open_or_create(&path, &crate::workspace::keeping::Wish::default())
                .unwrap();
            RecoverAction::Push {
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
        assert!(MasterSecret::from_uris(&got[0].0, &got[0].1).is_ok());
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
        assert_eq!(run_at(&node, |_| RecoverAction::Status), Ok(()));
    }

    #[test]
    fn a_node_of_the_old_system_has_no_status_to_tell() {
        let node = start(recovering(|_| Ok(RecoverResponse {})));
        let (exit, text) = run_at(&node, |_| RecoverAction::Status).unwrap_err();
        assert!(exit == 1 && text.contains("does not report"), "{text}");
    }
}
