//! A connection to a node, on which the operator has proven to be one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::child_output;
use base::crypto::{CLUSTER_ID_LEN, SSH_USER_CA_SEED_ID};
use base::machines::Role;
use base::options::Opt;
use base::time::seconds;
use proto::init;
use proto::operator::Caller;
use rpc::grpc::{CallOptions, Channel, Code, Status};
use ssh::certificate::UserCertificate;
use ssh::signature::{self, SigningKey};
use ssh::{Authority, OPERATOR, OPERATOR_NAMESPACE};
use verifier::Validator;

use crate::secrets::ssh::authority;
use crate::shell::{error::Error, files, progress::Progress, usage::Given};
use crate::workspace::{
    connect::{Endpoint, Node, keys_of, read_policy_with},
    master_secret::master_secret_of,
    options::{time, variant_of},
    sources::sources,
    state::{KnownNode, State, cluster_id},
};

/// How long a certificate is valid that a command makes for itself: one command.
const VALIDITY: Duration = Duration::from_secs(10 * 60);

/// The policy, which has a default here: these commands name no other file.
pub const POLICY: Opt = Opt::value(
    "policy",
    "FILE",
    "the attestation policy that the node must meet (JSON)",
)
.or("policy.json");
/// A certificate in place of the master secret.
pub const CERTIFICATE: Opt = Opt::value(
    "certificate",
    "FILE",
    "in place of --master-secret: a certificate that `firstlight operator certify` made for your SSH key",
);
/// The key of the certificate.
pub const KEY: Opt = Opt::value(
    "key",
    "FILE",
    "with --certificate: your SSH key; the file of the public key if the key is in an agent. ssh-keygen signs with it, and asks for a \
     passphrase or a touch",
);
/// What proves the operator.
enum Credential {
    /// The authority, which certifies a new key for each command.
    Authority(Box<Authority>),
    /// A certificate, and the file of its key.
    Certificate(Vec<u8>, PathBuf),
}

/// How the operator reaches nodes.
pub struct Operator {
    credential: Credential,
    validator: Arc<dyn Validator>,
    state: Option<State>,
    timeout: Duration,
}

impl Operator {
    /// Reads the files that the options name.
    pub fn of(given: &Given) -> Result<Operator, Error> {
        let state = State::find(&given.path("state"))?;
        Ok(Operator {
            credential: credential(given)?,
            validator: validator(given, state.as_ref())?,
            timeout: given.parsed("timeout", time)?,
            state,
        })
    }

    /// Gives a node no more than this time to answer.
    pub fn within(mut self, limit: Duration) -> Operator {
        self.timeout = self.timeout.min(limit);
        self
    }

    /// Returns the addresses of a node: of the one with this name in the state file, or `HOST[:PORT]`.
    fn endpoints(&self, node: &str) -> Result<Vec<Endpoint>, Error> {
        match self.known().find(|known| known.name == node) {
            Some(known) => known
                .addresses
                .iter()
                .map(|address| Endpoint::parse(address, init::PORT))
                .collect(),
            None => Ok(vec![Endpoint::parse(node, init::PORT)?]),
        }
    }

    /// Returns the names of all nodes in the state file.
    pub fn nodes(&self) -> Vec<String> {
        self.known().map(|node| node.name.clone()).collect()
    }

    /// Returns the names of the control planes in the state file.
    pub fn control_planes(&self) -> Vec<String> {
        self.known()
            .filter(|node| node.role == Role::ControlPlane)
            .map(|node| node.name.clone())
            .collect()
    }

    fn known(&self) -> impl Iterator<Item = &KnownNode> {
        self.state.iter().flat_map(|state| &state.nodes)
    }

    /// Connects to a node and verifies it. Tries its addresses one after the other.
    pub fn connect(&self, node: &str, progress: &Progress) -> Result<Session<'_>, Error> {
        let deadline = Instant::now() + self.timeout;
        let endpoints = self.endpoints(node)?;
        let mut last = None;
        for (index, endpoint) in endpoints.iter().enumerate() {
            let left = deadline.saturating_duration_since(Instant::now());
            let share = left / u32::try_from(endpoints.len() - index).unwrap_or(1);
            let client = atls::Client::new(None, None)
                .verify_strong(Some(verifier::judge(self.validator.clone())))
                .to_any_server()
                .require_strong();
            let target = Node {
                endpoint: endpoint.clone(),
                client,
            };
            match target.reach(Instant::now() + share, progress) {
                Ok(reached) => {
                    progress.phase(format!("asking {endpoint}"));
                    return Ok(Session {
                        name: endpoint.to_string(),
                        operator: self,
                        channel: reached.channel,
                        deadline,
                    });
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| {
            Error::content(format!("the state file has no address of the node {node}"))
        }))
    }

    /// Makes the proof for this connection, by a certificate that is valid at `now`.
    fn prove(&self, channel: &Channel, now: SystemTime) -> Result<Caller, Error> {
        let binding = channel
            .binding()
            .ok_or_else(|| Error::failed("the connection is not TLS 1.3"))?;
        match &self.credential {
            Credential::Authority(authority) => {
                let key = SigningKey::generate();
                let line = authority.operator_certificate(key.public(), &[OPERATOR], VALIDITY, now);
                Ok(Caller {
                    certificate: UserCertificate::blob_of_line(&line).map_err(Error::failed)?,
                    signature: key.sign(OPERATOR_NAMESPACE, binding),
                })
            }
            Credential::Certificate(certificate, key) => Ok(Caller {
                certificate: certificate.clone(),
                signature: sign(key, binding)?,
            }),
        }
    }
}

fn credential(given: &Given) -> Result<Credential, Error> {
    match (given.has("certificate"), given.has("key")) {
        (true, true) if given.has("master-secret") || given.has("share") => Err(Error::Usage(
            "--certificate and the master secret: give one of the two".into(),
        )),
        (true, true) => {
            let path = given.path("certificate");
            let text = files::read(&path)?;
            let blob = UserCertificate::blob_of_line(&String::from_utf8_lossy(&text));
            let blob =
                blob.map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
            Ok(Credential::Certificate(blob, given.path("key")))
        }
        (false, false) => {
            let kms = master_secret_of(given)?.read()?;
            let authority = authority(&kms, SSH_USER_CA_SEED_ID)?;
            Ok(Credential::Authority(Box::new(authority)))
        }
        _ => Err(Error::Usage(
            "--certificate and --key: give both or none".into(),
        )),
    }
}

fn validator(given: &Given, state: Option<&State>) -> Result<Arc<dyn Validator>, Error> {
    let known = state
        .into_iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let policy = read_policy_with(&given.path("policy"), &keys_of(given)?, known)?;
    let id: [u8; CLUSTER_ID_LEN] = if given.has("cluster-id") {
        given.parsed("cluster-id", cluster_id)?
    } else {
        state.and_then(|state| state.cluster_id).ok_or_else(|| {
            Error::Usage(
                "the cluster's ID is unknown: give --cluster-id, or a --state file that has it"
                    .into(),
            )
        })?
    };
    let policy = policy.expecting_cluster(&id);
    endorsement::validator(variant_of(given)?, policy, &sources()).map_err(Error::failed)
}

/// Signs `message` with the key in this file, or with that of an agent whose public key is in this file.
fn sign(key: &Path, message: &[u8]) -> Result<Vec<u8>, Error> {
    let mut command = Command::new("ssh-keygen");
    command
        .args(["-q", "-Y", "sign", "-n", OPERATOR_NAMESPACE, "-f"])
        .arg(key);
    let failed = |why: String| Error::failed(format!("no signature by {}: {why}", key.display()));
    let output = child_output::in_foreground(&mut command, message)
        .map_err(|error| failed(error.to_string()))?;
    signature::blob_of_file(&String::from_utf8_lossy(&output))
        .map_err(|error| failed(error.to_string()))
}

/// A connection to a node.
pub struct Session<'a> {
    /// The address of the node.
    pub name: String,
    operator: &'a Operator,
    channel: Channel,
    deadline: Instant,
}

impl Session<'_> {
    /// Makes a call. `make` gets the channel, the proof of the operator, and the options of a call that ends with the time limit of the
    /// command. If the node refuses the certificate because of its clock, makes it again with a certificate for that time.
    pub fn call<T>(
        &self,
        mut make: impl FnMut(&Channel, Caller, &CallOptions) -> Result<T, Status>,
    ) -> Result<T, Error> {
        let mut try_at = |now| {
            let caller = self.operator.prove(&self.channel, now)?;
            let options = CallOptions {
                timeout: Some(self.deadline.saturating_duration_since(Instant::now())),
                ..CallOptions::default()
            };
            Ok::<_, Error>(make(&self.channel, caller, &options))
        };
        let refused = match try_at(SystemTime::now())? {
            Ok(done) => return Ok(done),
            Err(status) => status,
        };
        match clock_of(&refused) {
            Some(clock) if matches!(self.operator.credential, Credential::Authority(_)) => {
                let (name, clock_text) = (&self.name, seconds(clock));
                log::warn!("{name}: the clock of the node says {clock_text}");
                try_at(clock)?.map_err(|status| self.refused(&status))
            }
            _ => Err(self.refused(&refused)),
        }
    }

    /// Returns the error for a call that the node refused.
    fn refused(&self, status: &Status) -> Error {
        let name = &self.name;
        match status.code() {
            Code::Unimplemented => Error::Refused(format!(
                "{name}: this node does not know the call: its Firstlight is older than {}",
                env!("CARGO_PKG_VERSION")
            )),
            Code::Unavailable | Code::DeadlineExceeded => {
                Error::Unreachable(format!("{name}: {}", status.message()))
            }
            Code::Unauthenticated if clock_of(status).is_none() => Error::Refused(format!(
                "{name}: {}: give the master secret of this cluster, or a certificate by it; the node's log has the reason",
                status.message()
            )),
            _ => Error::Refused(format!("{name}: {}", status.message())),
        }
    }
}

/// Returns the clock of a node that refused a certificate because of its time.
fn clock_of(status: &Status) -> Option<SystemTime> {
    let clock = u64::from_be_bytes(status.details().try_into().ok()?);
    match status.code() {
        Code::Unauthenticated => UNIX_EPOCH.checked_add(Duration::from_secs(clock)),
        _ => None,
    }
}
