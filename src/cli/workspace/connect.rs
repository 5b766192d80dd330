//! Connects to a node over attested TLS, and waits for a node that is still booting.

use std::net::{IpAddr, TcpStream};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use crate::shell::{
    error::Error,
    files,
    progress::{Progress, human},
};
use crate::workspace::sources::sources;
use base::backoff::Backoff;
use base::crypto::CLUSTER_ID_LEN;
use clap::Args;
use rpc::grpc::Channel;
use transport::dial::{self, DialError};
use verifier::sources::offline;
use verifier::stage::validator_at_any_stage;
use verifier::{
    CredentialChallenge, Evidence, Form, Identified, KeyName, MachineIdentity, Policy, Properties,
    Refusal, Stage, Validator, Variant,
};

/// Time limit of one connection attempt. A lost SYN is sent again after 1, 3 and 7 seconds (RFC
/// 6298 §2.1).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(8);
/// Time limit of the TLS handshake: a TPM under load takes seconds to sign a quote.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);

/// The help text of `--trust-any-tpm`, which is also printed as a warning at each use.
pub const ANY_TPM_MEANS: &str = "Accept any attestation key: any program that answers at that address gets the master secret, even one that has no TPM and imitates one";

/// The sources of attestation keys besides the policy, as refusals name them.
const BY_OPTION: &str = "--attestation-key";
const IN_STATE: &str = "the state file";

/// A node's address: `host:port`, where the host is a name or an address (IPv6 in brackets).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

impl Endpoint {
    /// Parses `HOST` or `HOST:PORT`.
    pub fn parse(text: &str, default_port: u16) -> Result<Endpoint, Error> {
        let wrong = || {
            let text = format!("{text:?} is not an endpoint: expected HOST or HOST:PORT");
            Error::Usage(text)
        };
        let (host, port) = match text.rsplit_once(':') {
            // an IPv6 address without a port has colons of its own
            _ if text.parse::<IpAddr>().is_ok() => (text, None),
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, Some(port)),
            None => (text, None),
            Some(_) if text.ends_with(']') => (text, None),
            Some(_) => return Err(wrong()),
        };
        let host = host
            .strip_prefix('[')
            .map_or(Some(host), |host| host.strip_suffix(']'))
            .ok_or_else(wrong)?;
        let port = port
            .map_or(Ok(default_port), u16::from_str)
            .map_err(|_| wrong())?;
        if host.is_empty()
            || port == 0
            || host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/')
        {
            return Err(wrong());
        }
        Ok(Endpoint {
            host: host.to_owned(),
            port,
        })
    }

    /// Returns the address with another port.
    pub fn at(mut self, port: u16) -> Endpoint {
        self.port = port;
        self
    }

    /// Returns the TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the host: a name, or an address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Opens a TCP connection.
    pub fn dial(&self, deadline: Instant) -> Result<TcpStream, Unreached> {
        dial::dial(&self.host, self.port, deadline, CONNECT_TIMEOUT).map_err(|error| Unreached {
            is_closed: error.is_refused(),
            is_nameless: matches!(error, DialError::Name(_)),
            text: error.to_string(),
        })
    }

    /// Checks that the host has an address.
    pub fn check_name(&self, deadline: Instant) -> Result<(), Unreached> {
        dial::check(&self.host, deadline).map_err(|error| Unreached {
            text: error.to_string(),
            is_closed: false,
            is_nameless: true,
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Endpoint { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

/// The node, as the operand or by the option.
#[derive(Debug, Args)]
pub struct NodeOption {
    /// The node, in place of --endpoint
    #[arg(value_name = "HOST[:PORT]", conflicts_with = "endpoint")]
    host: Option<String>,
    /// The same as the operand, in the form of init and recover
    #[arg(long, value_name = "HOST[:PORT]")]
    endpoint: Option<String>,
}

impl NodeOption {
    /// Returns the node, if it is named.
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref().or(self.endpoint.as_deref())
    }

    /// Returns the address of the node, which is required.
    pub fn endpoint(&self, default_port: u16) -> Result<Endpoint, Error> {
        let host = self.host().ok_or_else(|| {
            Error::Usage("--endpoint is missing: name the node, HOST[:PORT]".into())
        })?;
        Endpoint::parse(host, default_port)
    }
}

/// Attestation keys besides those of the policy.
#[derive(Debug, Args)]
pub struct KeyOptions {
    /// Also accept the attestation key with this name, which the node's console shows: 000b and 64 hex digits; may be
    /// repeated; if the policy names no keys, only the keys given here are accepted
    #[arg(long, value_name = "NAME")]
    pub attestation_key: Vec<KeyName>,
}

/// The TPMs that may get the master secret.
#[derive(Debug, Args)]
pub struct TrustOptions {
    #[command(flatten)]
    keys: KeyOptions,
    #[arg(long, conflicts_with = "attestation_key", help = ANY_TPM_MEANS)]
    trust_any_tpm: bool,
}

impl TrustOptions {
    /// Returns the TPMs; warns if it is any.
    pub fn trust(self) -> TpmTrust {
        if self.trust_any_tpm {
            log::warn!("--trust-any-tpm: {}", ANY_TPM_MEANS);
            return TpmTrust::AnyTpm;
        }
        TpmTrust::Named {
            by_option: self.keys.attestation_key,
            in_state: vec![],
        }
    }
}

/// A node, and the policy that it must meet before the client sends anything to it.
pub struct Node {
    /// The node's address.
    pub endpoint: Endpoint,
    /// The client of attested TLS, which validates the node.
    pub client: atls::Client,
}

/// A connection to a node that meets the policy.
pub struct Reached {
    /// The channel for calls.
    pub channel: Channel,
    /// The node's attestation key, if its attestation has one.
    pub key: Option<KeyName>,
    /// Whether the server has only the form of attested TLS that Constellation has.
    pub is_constellation: bool,
}

/// The TPMs that may get the master secret. Register values alone prove nothing: a program without
/// a TPM can imitate them.
#[derive(Debug, Clone)]
pub enum TpmTrust {
    /// TPMs with an attestation key that the policy or one of these lists names.
    Named {
        /// The keys that `--attestation-key` names.
        by_option: Vec<KeyName>,
        /// The keys in the state file.
        in_state: Vec<KeyName>,
    },
    /// Any TPM.
    AnyTpm,
}

impl TpmTrust {
    /// Adds the keys in the state file.
    pub fn and_known(self, keys: impl IntoIterator<Item = KeyName>) -> TpmTrust {
        match self {
            TpmTrust::Named { by_option, .. } => TpmTrust::Named {
                by_option,
                in_state: keys.into_iter().collect(),
            },
            TpmTrust::AnyTpm => TpmTrust::AnyTpm,
        }
    }

    /// Returns the validator of a node that will get the master secret.
    pub fn validator(
        &self,
        variant: &Variant,
        policy: Policy,
    ) -> Result<Arc<dyn Validator>, Error> {
        let policy = match self {
            TpmTrust::Named {
                by_option,
                in_state,
            } => policy
                .believing_those_of(BY_OPTION, by_option.iter().copied())
                .and_then(|policy| policy.believing_those_of(IN_STATE, in_state.iter().copied()))
                .map_err(Error::content)?
                .only_named_keys(),
            TpmTrust::AnyTpm => policy.believing_any(),
        };
        endorsement::validator(variant, policy, &sources()).map_err(Error::content)
    }
}

impl Node {
    /// Creates a fresh node in its initramfs, to ask it for its status; it gets no secret.
    pub fn to_ask(endpoint: &Endpoint, variant: &Variant, policy: Policy) -> Result<Node, Error> {
        let policy = policy.at(Stage::Initramfs).expecting_fresh();
        let validator =
            endorsement::validator(variant, policy, &sources()).map_err(Error::content)?;
        Ok(Node::judged_by(endpoint, validator))
    }

    /// Describes a node in its initramfs, which will get the master secret.
    pub fn to_trust(
        endpoint: &Endpoint,
        variant: &Variant,
        policy: Policy,
        trust: &TpmTrust,
    ) -> Result<Node, Error> {
        let validator = trust.validator(variant, policy.at(Stage::Initramfs).expecting_fresh())?;
        Ok(Node::judged_by(endpoint, validator))
    }

    /// Creates a node that will get the master secret for its init: a fresh one, or one whose init
    /// for this cluster has begun. If the cluster has no ID yet, only a fresh one.
    pub fn to_initialize(
        endpoint: &Endpoint,
        variant: &Variant,
        policy: Policy,
        trust: &TpmTrust,
        cluster_id: Option<&[u8; CLUSTER_ID_LEN]>,
    ) -> Result<Node, Error> {
        let policy = policy.at(Stage::Booted);
        let fresh = trust.validator(variant, policy.clone().expecting_fresh())?;
        let Some(cluster_id) = cluster_id else {
            return Ok(Node::judged_by(endpoint, fresh));
        };
        let member = trust.validator(variant, policy.expecting_cluster(cluster_id))?;
        Ok(Node::judged_by(
            endpoint,
            Arc::new(FreshOrMember { fresh, member }),
        ))
    }

    /// Creates a node that this validator judges.
    pub fn judged_by(endpoint: &Endpoint, validator: Arc<dyn Validator>) -> Node {
        Node {
            endpoint: endpoint.clone(),
            client: atls::Client::new(None, Some(verifier::judge(validator))),
        }
    }

    /// Creates a node of any standing; `noted` receives what the node proves. `cluster` is the ID of
    /// the operator's cluster, if it is known.
    pub fn in_any_standing(
        endpoint: &Endpoint,
        variant: &Variant,
        policy: &Policy,
        cluster: Option<&[u8; CLUSTER_ID_LEN]>,
        noted: &Arc<OnceLock<Noted>>,
    ) -> Result<Node, Error> {
        let sources = sources();
        let judge =
            |policy| validator_at_any_stage(variant, policy, &sources).map_err(Error::content);
        let judged: Arc<dyn Validator> = Arc::new(AnyStanding {
            fresh: judge(policy.clone().expecting_fresh())?,
            member: cluster
                .map(|id| judge(policy.clone().expecting_cluster(id)))
                .transpose()?,
            any: judge(policy.clone().of_any_cluster())?,
            noted: noted.clone(),
        });
        let validator =
            endorsement::certifying(judged, policy, &sources).map_err(Error::content)?;
        Ok(Node::judged_by(endpoint, validator))
    }

    /// Connects to the node, with repeated tries until `deadline`. Stops at once if the node does
    /// not meet the policy.
    pub fn reach(&self, deadline: Instant, progress: &Progress) -> Result<Reached, Error> {
        let started = Instant::now();
        let mut pause = Pause::new();
        progress.phase(format!("waiting for {}", self.endpoint));
        loop {
            let reason = match self.attempt(deadline) {
                Ok(reached) => return Ok(reached),
                Err(Attempt::Refused(why)) => {
                    let about = format!("{}: attestation refused", self.endpoint);
                    return Err(Error::attestation(why, about));
                }
                Err(Attempt::Passing(reason)) => reason.text,
            };
            if !pause.take(deadline) {
                let waited = human(started.elapsed());
                let text = format!("{}: gave up after {waited}: {reason}", self.endpoint);
                return Err(Error::Unreachable(text));
            }
            progress.line(format!("{}: {reason}", self.endpoint));
        }
    }

    /// Tries once to connect to the node, until `deadline` at most.
    pub fn attempt(&self, deadline: Instant) -> Result<Reached, Attempt> {
        let passing = |error: &dyn fmt::Display| Attempt::Passing(error.to_string().into());
        let socket = self.endpoint.dial(deadline).map_err(Attempt::Passing)?;
        let handshake = deadline.min(Instant::now() + HANDSHAKE_TIMEOUT);
        let connected = self.client.connect_by_form(socket, handshake);
        let (transport, form) = connected.map_err(|error| match error {
            atls::Error::Refused(why) => Attempt::Refused(verifier::refusal_of(why)),
            other => passing(&other),
        })?;
        let key = transport
            .identity
            .as_ref()
            .and_then(|machine| machine.parse().ok());
        let channel = Channel::new(transport, &self.endpoint.to_string())
            .map_err(|status| passing(&status))?;
        Ok(Reached {
            channel,
            key,
            is_constellation: form == Form::Old,
        })
    }
}

/// Reads the policy in a file.
pub fn read_policy(path: &Path) -> Result<Policy, Error> {
    let text = files::read(path)?;
    Policy::from_json(&String::from_utf8_lossy(&text))
        .map_err(|error| Error::content(format!("{}: {error}", path.display())))
}

/// Reads the policy in a file, and refuses one that cannot judge machines of this variant.
pub fn read_policy_of(variant: &Variant, path: &Path) -> Result<Policy, Error> {
    let policy = read_policy(path)?;
    endorsement::validator(variant, policy.clone(), &offline())
        .map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
    Ok(policy)
}

/// Adds the attestation keys in the state file to a policy that lists keys; a policy without keys accepts any key
/// and stays unchanged.
pub fn and_known(
    policy: Policy,
    known: impl IntoIterator<Item = KeyName>,
) -> Result<Policy, Error> {
    if policy.believes_any_key() {
        Ok(policy)
    } else {
        policy
            .believing_those_of(IN_STATE, known)
            .map_err(Error::content)
    }
}

/// Reads a policy for machines of this variant and adds known attestation keys, and the keys that the
/// operator names. If the operator names keys, only these and the known ones are accepted.
pub fn read_policy_with(
    variant: &Variant,
    path: &Path,
    named: &[KeyName],
    known: impl IntoIterator<Item = KeyName>,
) -> Result<Policy, Error> {
    let policy = read_policy_of(variant, path)?;
    let policy = match named {
        [] => policy,
        named => policy
            .believing_those_of(BY_OPTION, named.iter().copied())
            .map_err(Error::content)?,
    };
    and_known(policy, known)
}

/// Accepts a machine that meets either policy. The error is that of the policy for fresh nodes.
struct FreshOrMember {
    fresh: Arc<dyn Validator>,
    member: Arc<dyn Validator>,
}

impl Validator for FreshOrMember {
    fn properties(&self) -> Properties {
        self.fresh.properties()
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.fresh.challenge(peer)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.fresh
            .judge(evidence)
            .or_else(|why| self.member.judge(evidence).map_err(|_| why))
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

/// The cluster of a node, as PCR 15 shows it; all other registers meet the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClusterMembership {
    /// The node has joined no cluster since it started.
    Fresh,
    /// The node belongs to the operator's cluster.
    Member,
    /// The node belongs to another cluster, or the ID of the operator's cluster is unknown.
    Other,
}

/// What a node of any standing proves.
pub struct Noted {
    /// Its standing.
    pub standing: ClusterMembership,
    /// Its attestation document, which the validator has accepted.
    pub document: Vec<u8>,
}

/// Accepts a machine whose registers meet the policy, whatever the value of PCR 15, and notes its
/// standing.
struct AnyStanding {
    fresh: Arc<dyn Validator>,
    member: Option<Arc<dyn Validator>>,
    any: Arc<dyn Validator>,
    noted: Arc<OnceLock<Noted>>,
}

impl Validator for AnyStanding {
    fn properties(&self) -> Properties {
        self.any.properties()
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.any.challenge(peer)
    }

    /// Returns the result of the validator for any standing, and notes the standing.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let identified = self.any.judge(evidence)?;
        let meets = |validator: &Arc<dyn Validator>| validator.judge(evidence).is_ok();
        let standing = match &self.member {
            _ if meets(&self.fresh) => ClusterMembership::Fresh,
            Some(member) if meets(member) => ClusterMembership::Member,
            _ => ClusterMembership::Other,
        };
        // there is only one connection, so this value is set only once
        let _ = self.noted.set(Noted {
            standing,
            document: evidence.document.into(),
        });
        Ok(identified)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

/// Why a try failed.
pub enum Attempt {
    /// The node does not meet the policy, for this reason.
    Refused(Refusal),
    /// The node could not be reached, for this reason; a later try may succeed.
    Passing(Unreached),
}

/// Why a server could not be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreached {
    /// The reason, as a clause.
    pub text: String,
    /// Whether its machine answered that no program listens on the port.
    pub is_closed: bool,
    /// Whether its name has no address.
    pub is_nameless: bool,
}

impl<T: Into<String>> From<T> for Unreached {
    fn from(text: T) -> Unreached {
        Unreached {
            text: text.into(),
            is_closed: false,
            is_nameless: false,
        }
    }
}

impl fmt::Display for Unreached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The time that is reserved for the last try before a deadline.
const LAST_TRY: Duration = Duration::from_secs(1);

/// The pauses between tries. The tries end at the deadline, and not before.
pub struct Pause {
    lengths: Backoff,
}

impl Pause {
    /// Creates pauses that grow from one second to ten.
    pub fn new() -> Pause {
        Pause {
            lengths: Backoff::new(Duration::from_secs(1), Duration::from_secs(10)),
        }
    }

    /// Sleeps until the next try, and returns whether there is one. A pause that would last beyond
    /// the deadline ends [`LAST_TRY`] before the deadline. After that try, it sleeps until the
    /// deadline, and no try follows.
    pub fn take(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let before_last = left.saturating_sub(LAST_TRY);
        let (pause, goes_on) = if before_last.is_zero() {
            (left, false)
        } else {
            (self.lengths.pause().min(before_last), true)
        };
        thread::sleep(pause);
        goes_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_in_every_usual_form() {
        for (text, expected) in [
            ("node", "node:9000"),
            ("node:1", "node:1"),
            ("10.0.0.1", "10.0.0.1:9000"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("::1", "[::1]:9000"),
            ("[::1]", "[::1]:9000"),
            ("[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(Endpoint::parse(text, 9000).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn what_is_no_endpoint_is_refused() {
        for text in [
            "",
            ":",
            ":80",
            "node:",
            "node:0",
            "node:65536",
            "node:x",
            "a:b:c",
            "[::1",
            "http://node",
            "a b",
        ] {
            assert!(Endpoint::parse(text, 9000).is_err(), "{text}");
        }
    }

    #[test]
    fn a_port_where_no_program_listens_is_told_from_other_failures() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let deadline = Instant::now() + Duration::from_secs(60);
        let dial = |host| Endpoint::parse(host, port).unwrap().dial(deadline);
        assert!(dial("127.0.0.1").is_ok());
        drop(listener);
        assert!(dial("127.0.0.1").unwrap_err().is_closed);
        assert!(!dial("no-such-name.invalid").unwrap_err().is_closed);
    }

    #[test]
    fn tries_end_with_the_deadline_and_not_before() {
        let started = Instant::now();
        let deadline = started + LAST_TRY + Duration::from_millis(200);
        let mut pause = Pause::new();
        assert!(pause.take(deadline), "a last try fits");
        assert!(!pause.take(deadline));
        assert!(Instant::now() >= deadline);
        assert!(!pause.take(deadline), "the deadline has passed");
    }
}
