//! `firstlight verify`: says what a node or a join service proves about its machine.
//!
//! The strong form of attested TLS is tried first, and the old one if the peer does not know it. A join service proves itself and then
//! refuses a caller without a proof of its own. In the strong form this is a success: the proof is complete before the refusal.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::connect::{Attempt, Endpoint, Node, and_known, read_policy};
use super::progress::printable;
use super::state::{State, hex};
use super::{ATTESTATION_REFUSED, UNREACHABLE, say_all};
use attest::atls;
use attest::attestation::stage::validator_at_any_stage;
use attest::attestation::{
    Composite, Evidence, Form, Identified, KeyName, Policy, Stage, ValidateError, Validator,
    Variant,
};
use base::crypto::CLUSTER_ID_LEN;
use base::program::Failure;

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The server.
    pub endpoint: Endpoint,
    /// The attestation policy that the machine must meet.
    pub policy: PathBuf,
    /// The attestation variant of the machine.
    pub variant: &'static Variant,
    /// The state file, which has the cluster's ID and its nodes' attestation keys; it may be missing.
    pub state: PathBuf,
    /// The cluster's ID; replaces the one in the state file.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// Whether the machine must belong to no cluster.
    pub is_fresh: bool,
    /// Whether the output is for a program.
    pub is_json: bool,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let state = State::find(&options.state).map_err(Failure::failed)?;
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let policy = and_known(read_policy(&options.policy)?, known)?;
    let cluster = match options.is_fresh {
        true => None,
        false => {
            let of_state = state.as_ref().and_then(|state| state.cluster_id);
            let id = options.cluster_id.or(of_state);
            Some(id.ok_or_else(|| {
                Failure::Usage(
                    "the cluster's ID is unknown: give --cluster-id, a --state file that has it, or --fresh".into(),
                )
            })?)
        }
    };
    let expected = match &cluster {
        Some(id) => policy.clone().expecting_cluster(id),
        None => policy.clone().expecting_fresh(),
    };
    let judge = validator_at_any_stage(options.variant, expected, &collateral::online())
        .map_err(Failure::failed)?;
    let judge = endorsement::certifying(judge, &policy).map_err(Failure::failed)?;
    let (identified, form) = prove(options, judge)?;
    let key = identified
        .machine
        .as_deref()
        .and_then(|name| name.parse::<KeyName>().ok());
    let facts = [
        ("endpoint", options.endpoint.to_string()),
        ("verdict", "proven".into()),
        ("form", form_name(form).into()),
        ("stage", stage_name(identified.stage).into()),
        ("cluster", cluster.map_or("none".into(), |id| hex(&id))),
        ("key", key.map_or("none".into(), |key| key.to_string())),
        ("believed", belief(&policy, key.as_ref()).into()),
    ];
    say_all(&match options.is_json {
        true => json(&facts),
        false => facts
            .iter()
            .map(|(name, value)| format!("{:<10} {value}\n", format!("{name}:")))
            .collect(),
    })
}

/// Returns what the server proves, and in which form.
fn prove(options: &Options, judge: Arc<dyn Validator>) -> Result<(Identified, Form), Failure> {
    let deadline = Instant::now() + options.timeout;
    let observer = Arc::new(Observer {
        judge,
        accepted: OnceLock::new(),
    });
    // only the exchange of the strong form asks the observer: a certificate alone is not a proof
    let strong = atls::Client::new(None, vec![])
        .verify_strong(vec![observer.clone()])
        .to_any_server()
        .require_strong();
    let (result, form) = match connect(options, strong, deadline)? {
        Err(error) if error.is_other_form() => {
            let old = atls::Client::new(None, vec![observer.clone()]).only_old();
            (connect(options, old, deadline)?, Form::Old)
        }
        result => (result, Form::Strong),
    };
    let is_complete = match (&result, form) {
        (Ok(()), _) => true,
        // the exchange refuses first what is for another connection, so what the observer accepted is proven
        (Err(atls::Error::PeerRefused(_)), Form::Strong) => true,
        (Err(_), _) => false,
    };
    let endpoint = &options.endpoint;
    match (observer.accepted.get(), result) {
        (Some(identified), _) if is_complete => Ok((identified.clone(), form)),
        (_, Err(atls::Error::Refused(why))) => {
            let why = why.to_string();
            let text = format!("{endpoint}: attestation refused: {}", printable(&why));
            Err(Failure::Failed(ATTESTATION_REFUSED, text))
        }
        (_, Err(error)) => Err(unreachable(endpoint, &error.to_string())),
        (_, Ok(())) => {
            let text = format!("{endpoint}: it proves nothing");
            Err(Failure::Failed(ATTESTATION_REFUSED, text))
        }
    }
}

/// Makes one connection, and closes it.
fn connect(
    options: &Options,
    client: atls::Client,
    deadline: Instant,
) -> Result<Result<(), atls::Error>, Failure> {
    let node = Node {
        endpoint: options.endpoint.clone(),
        client,
    };
    match node.dial(deadline) {
        Ok(socket) => Ok(node.client.connect(socket, deadline).map(drop)),
        Err(Attempt::Refused(why) | Attempt::Passing(why)) => {
            Err(unreachable(&options.endpoint, &why))
        }
    }
}

fn unreachable(endpoint: &Endpoint, why: &str) -> Failure {
    Failure::Failed(UNREACHABLE, format!("{endpoint}: {}", printable(why)))
}

fn form_name(form: Form) -> &'static str {
    match form {
        Form::Strong => "strong",
        Form::Old => "old",
    }
}

fn stage_name(stage: Option<Stage>) -> &'static str {
    match stage {
        Some(Stage::Initramfs) => "initramfs",
        Some(Stage::Booted) => "booted",
        None => "unknown",
    }
}

/// Returns why the policy believes the attestation key.
fn belief(policy: &Policy, key: Option<&KeyName>) -> &'static str {
    match key {
        _ if policy.believes_any_key() => "any key",
        Some(key) if policy.keys().contains(key) => "named",
        _ => "certified",
    }
}

fn json(facts: &[(&str, String)]) -> String {
    let object: serde_json::Map<_, _> = facts
        .iter()
        .map(|(name, value)| (name.to_string(), value.as_str().into()))
        .collect();
    format!("{:#}\n", serde_json::Value::from(object))
}

/// Keeps the content of the document that the judge accepts.
struct Observer {
    judge: Arc<dyn Validator>,
    accepted: OnceLock<Identified>,
}

impl Composite for Observer {
    fn lead(&self) -> Arc<dyn Validator> {
        self.judge.clone()
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        let identified = self.judge.judge(evidence)?;
        // only one form asks the observer, and once
        self.accepted.get_or_init(|| identified.clone());
        Ok(identified)
    }
}
