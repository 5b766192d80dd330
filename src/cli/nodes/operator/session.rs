//! A connection to a node, on which the operator has proven to be one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::crypto::SSH_USER_CA_SEED_ID;
use base::machines::Role;
use base::time::seconds;
use clap::Args;
use proto::init;
use proto::operator::Caller;
use rpc::grpc::{CallOptions, Channel, Code, Status};
use ssh::certificate::UserCertificate;
use ssh::signature::{self, SigningKey};
use ssh::{Authority, OPERATOR, OPERATOR_NAMESPACE};
use verifier::Validator;

use crate::secrets::ssh::authority;
use crate::shell::{error::Error, files, progress::Progress};
use crate::workspace::{
    connect::{Endpoint, KeyOptions, Node, read_policy_with},
    master_secret::SecretOptions,
    options::VariantOption,
    sources::{SourceOptions, sources},
    ssh_key,
    state::{ClusterOptions, KnownNode, State},
};

/// How long a certificate is valid that a command makes for itself: one command.
const VALIDITY: Duration = Duration::from_secs(10 * 60);

/// How the node is verified, and what proves the operator to it.
#[derive(Debug, Args)]
pub struct OperatorOptions {
    /// The attestation policy that the node must meet (JSON)
    #[arg(long, value_name = "FILE", default_value = "policy.json")]
    pub policy: PathBuf,
    #[command(flatten)]
    variant: VariantOption,
    #[command(flatten)]
    pub sources: SourceOptions,
    #[command(flatten)]
    keys: KeyOptions,
    #[command(flatten)]
    pub cluster: ClusterOptions,
    #[command(flatten)]
    pub secret: SecretOptions,
    /// In place of --master-secret: a certificate that `firstlight operator certify` made for your SSH key
    #[arg(
        long,
        value_name = "FILE",
        requires = "key",
        conflicts_with_all = ["master_secret", "share"]
    )]
    pub certificate: Option<PathBuf>,
    /// With --certificate: your SSH key; the file of the public key if the key is in an agent. ssh-keygen signs with it,
    /// and asks for a passphrase or a touch
    #[arg(long, value_name = "FILE", requires = "certificate")]
    key: Option<PathBuf>,
}

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
    /// Reads the files that the options name. `timeout` is the limit for each node.
    pub fn of(options: &OperatorOptions, timeout: Duration) -> Result<Operator, Error> {
        let state = State::find(&options.cluster.state)?;
        Ok(Operator {
            credential: options.credential()?,
            validator: options.validator(state.as_ref())?,
            timeout,
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

    /// Returns the nodes that the command line names, else all nodes in the state file.
    pub fn named_or_all(&self, named: &[String]) -> Result<Vec<String>, Error> {
        let nodes = match named {
            [] => self.nodes(),
            named => named.to_vec(),
        };
        if nodes.is_empty() {
            return Err(Error::Usage(
                "the state file has no nodes: give their names or addresses".into(),
            ));
        }
        Ok(nodes)
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
    pub fn connect(&self, node: &str, progress: &Progress) -> Result<NodeSession<'_>, Error> {
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
                    return Ok(NodeSession {
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
                    certificate: UserCertificate::blob_of_line(&line).map_err(Error::content)?,
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

impl OperatorOptions {
    fn credential(&self) -> Result<Credential, Error> {
        let (Some(path), Some(key)) = (&self.certificate, &self.key) else {
            let authority = authority(&self.secret.source().read()?, SSH_USER_CA_SEED_ID)?;
            return Ok(Credential::Authority(Box::new(authority)));
        };
        let text = files::read(path)?;
        let blob = UserCertificate::blob_of_line(&String::from_utf8_lossy(&text));
        let blob = blob.map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
        Ok(Credential::Certificate(blob, key.clone()))
    }

    fn validator(&self, state: Option<&State>) -> Result<Arc<dyn Validator>, Error> {
        let known = state
            .into_iter()
            .flat_map(|state| state.attestation_keys.iter().copied());
        let variant = self.variant.of(Some(&self.policy))?;
        let policy = read_policy_with(variant, &self.policy, &self.keys.attestation_key, known)?;
        let id = self.cluster.cluster_id;
        let id = id
            .or(state.and_then(|state| state.cluster_id))
            .ok_or_else(|| {
                Error::Usage(
                    "the cluster's ID is unknown: give --cluster-id, or a --state file that has it"
                        .into(),
                )
            })?;
        let policy = policy.expecting_cluster(&id);
        endorsement::validator(variant, policy, &sources()).map_err(Error::content)
    }
}

/// Signs `message` with the key of the operator.
fn sign(key: &Path, message: &[u8]) -> Result<Vec<u8>, Error> {
    let armored = ssh_key::sign(key, OPERATOR_NAMESPACE, message)?;
    signature::blob_of_file(&armored).map_err(|error| ssh_key::failed(key, &error.to_string()))
}

/// A connection to a node.
pub struct NodeSession<'a> {
    /// The address of the node.
    pub name: String,
    operator: &'a Operator,
    channel: Channel,
    deadline: Instant,
}

impl NodeSession<'_> {
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
                log::warn!("{name}: check the node's clock, it says {clock_text}");
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
