//! `firstlight status`: asks a node where it stands.
//!
//! A node has a server for each state that it can be in, each but the last proves what the node runs, and by PCR 15 to which
//! cluster it belongs:
//!
//! | port | server | who answers there |
//! |---|---|---|
//! | 9999 | recovery server | a node in its initramfs that waits for the key of its disk |
//! | 9000 | InitServer | a booted node that waits for the operator's init |
//! | 9000 | member | a booted node that belongs to a cluster |
//! | 30090 | join service | a control plane that lets others in, if they prove what they run |

use std::fmt::Write;
use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::connect::{Attempt, Endpoint, Node, Reached, Standing, and_known, read_policy};
use super::progress::printable;
use super::state::{State, hex};
use super::{ATTESTATION_REFUSED, UNREACHABLE, recover, say, say_all};
use attest::atls;
use base::crypto::CLUSTER_ID_LEN;
use base::program::Failure;
use proto::{init, recoverproto};
use rpc::grpc::{CallOptions, Channel, Status};

/// Exit codes for a node that meets the policy and is no member of the operator's cluster, which is 0.
const WAITS_FOR_KEY: u8 = 5;
const FRESH: u8 = 6;
const OTHER_CLUSTER: u8 = 7;
/// Something answers, and nothing of it proves anything.
const UNPROVEN: u8 = 8;

/// What the command line says.
#[derive(Debug)]
pub struct Options {
    /// The node: a host, or one server of it.
    pub address: String,
    /// The attestation policy that it must meet.
    pub policy: PathBuf,
    /// The operator's state file, which has the cluster's ID, and attestation keys of its nodes; it may be missing.
    pub state: PathBuf,
    /// The cluster's ID, in place of that.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// For everything together.
    pub timeout: Duration,
}

/// A server that a node can have, beside the one of members, which has no service of its own.
#[derive(PartialEq, Eq)]
struct Service {
    /// As `grpc.health.v1` knows it.
    name: &'static str,
    port: u16,
    title: &'static str,
    /// What it means that it answers.
    state: &'static str,
}

const SERVICES: [Service; 3] = [
    Service {
        name: "recoverproto.API",
        port: recoverproto::PORT,
        title: "recovery server",
        state: "in its initramfs, waiting for the key of its disk: from a join service, or by `firstlight recover`",
    },
    Service {
        name: "init.API",
        port: init::PORT,
        title: "InitServer",
        state: "booted, no member of a cluster yet, waiting for `firstlight init`",
    },
    Service {
        name: "join.API",
        port: JOIN_PORT,
        title: "join service",
        state: "a control plane of a cluster, letting others in",
    },
];
/// The NodePort behind which the join services are.
const JOIN_PORT: u16 = 30090;
/// An answer from memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// What came of asking one server.
enum Answer {
    /// Nobody is there, or nobody who speaks attested TLS: why.
    Nobody(String),
    /// It proved to be something else than the policy wants: register, expected and got.
    Refused(String),
    /// It proves nothing, but wants the caller to.
    Guarded,
    /// It meets the policy.
    Verified {
        /// By its PCR 15.
        standing: Standing,
        /// Those that it has, if it says so.
        services: Vec<&'static Service>,
        /// Lines about what it waits for.
        facts: Vec<String>,
    },
}

/// A server of the node, and where it is noted to which cluster it proves to belong.
struct Asked {
    node: Node,
    standing: Arc<OnceLock<Standing>>,
}

/// The command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let state = State::find(&options.state).map_err(Failure::failed)?;
    let cluster = options
        .cluster_id
        .or(state.as_ref().and_then(|state| state.cluster_id));
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let policy = and_known(read_policy(&options.policy)?, known)?;
    let asked = |endpoint: &Endpoint| {
        let standing = Arc::default();
        Asked {
            node: Node::in_any_standing(endpoint, &policy, cluster.as_ref(), &standing),
            standing,
        }
    };
    let servers: Vec<Asked> = endpoints(&options.address)?.iter().map(asked).collect();
    let answers = ask_all(&servers, Instant::now() + options.timeout);
    say_all(&report(&servers, &answers, cluster.as_ref()))?;
    if policy.keys().is_empty() {
        say(
            "Policy: names no attestation keys, so any TPM is believed, also by the services that have this policy",
        )?;
    }
    verdict(&options.address, &answers)
}

/// The node's servers, or the one whose port is given.
fn endpoints(address: &str) -> Result<Vec<Endpoint>, Failure> {
    let each = SERVICES
        .iter()
        .map(|service| Endpoint::parse(address, service.port))
        .collect::<Result<Vec<_>, _>>();
    let mut endpoints = each.map_err(Failure::Usage)?;
    endpoints.dedup();
    Ok(endpoints)
}

/// All at once: one that does not answer must not take the time of the others.
fn ask_all(servers: &[Asked], deadline: Instant) -> Vec<Answer> {
    thread::scope(|scope| {
        let asking: Vec<_> = servers
            .iter()
            .map(|server| scope.spawn(move || ask(server, deadline)))
            .collect();
        let lost = |_| Answer::Nobody("a defect of this program".into());
        asking
            .into_iter()
            .map(|asking| asking.join().unwrap_or_else(lost))
            .collect()
    })
}

fn ask(Asked { node, standing }: &Asked, deadline: Instant) -> Answer {
    match node.attempt(deadline) {
        Ok(Reached { channel, key }) => {
            let services = services(&channel);
            let mut facts: Vec<String> = key
                .iter()
                .map(|key| format!("Key:         {key}"))
                .collect();
            if let Ok(status) = recover::status(&channel) {
                facts.extend(
                    recover::facts(&status)
                        .into_iter()
                        .map(|(name, value)| format!("{name} {value}")),
                );
            }
            // there is no connection without a verdict
            let standing = standing.get().copied().unwrap_or(Standing::Other);
            Answer::Verified {
                standing,
                services,
                facts,
            }
        }
        Err(Attempt::Refused(_)) if is_guarded(node, deadline) => Answer::Guarded,
        Err(Attempt::Refused(why)) => Answer::Refused(why),
        Err(Attempt::Passing(reason)) => Answer::Nobody(reason),
    }
}

/// Whether it ends the connection of a caller who proves nothing. In TLS 1.3 it does so after the handshake.
fn is_guarded(node: &Node, deadline: Instant) -> bool {
    let Ok(socket) = node.dial(deadline) else {
        return false;
    };
    let mut transport = match atls::Client::new(None, vec![]).connect(socket, deadline) {
        Ok(transport) => transport,
        Err(error) => return matches!(error, atls::Error::PeerRefused(_)),
    };
    let left = deadline
        .saturating_duration_since(Instant::now())
        .clamp(Duration::from_millis(1), CALL_TIMEOUT);
    if transport.socket.set_read_timeout(Some(left)).is_err() {
        return false;
    }
    let error = transport.reader.read(&mut [0]).err();
    let refused = error
        .as_ref()
        .and_then(|error| error.get_ref()?.downcast_ref());
    matches!(refused, Some(atls::Error::PeerRefused(_)))
}

/// Those of ours that it says it has; none where it says nothing, as nodes of the old system do.
fn services(channel: &Channel) -> Vec<&'static Service> {
    #[derive(Clone, PartialEq, prost::Message)]
    struct HealthCheckRequest {
        #[prost(string, tag = "1")]
        service: String,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    struct HealthCheckResponse {
        #[prost(int32, tag = "1")]
        status: i32,
    }
    let options = CallOptions {
        timeout: Some(CALL_TIMEOUT),
        ..CallOptions::default()
    };
    let has = |service: &&Service| {
        let request = HealthCheckRequest {
            service: service.name.into(),
        };
        let answer: Result<HealthCheckResponse, Status> =
            channel.unary("/grpc.health.v1.Health/Check", &request, &options);
        answer.is_ok()
    };
    SERVICES.iter().filter(has).collect()
}

fn report(servers: &[Asked], answers: &[Answer], cluster: Option<&[u8; CLUSTER_ID_LEN]>) -> String {
    let mut text = String::new();
    // writing to a string does not fail
    for (
        Asked {
            node: Node { endpoint, .. },
            ..
        },
        answer,
    ) in servers.iter().zip(answers)
    {
        let at_port = SERVICES
            .iter()
            .find(|service| service.port == endpoint.port());
        let usual = at_port.map_or(String::new(), |service| format!(" ({})", service.title));
        let _ = match answer {
            Answer::Nobody(reason) => {
                writeln!(text, "{endpoint}{usual}: no answer: {}", printable(reason))
            }
            Answer::Refused(why) => {
                let why = printable(why).replace('\n', "\n  ");
                writeln!(text, "{endpoint}{usual}: attestation refused:\n  {why}")
            }
            Answer::Guarded => writeln!(
                text,
                "{endpoint} (join service): proves nothing itself, and wants proof of callers\n  Node:        it seems, {}",
                SERVICES[2].state
            ),
            Answer::Verified {
                standing,
                services,
                facts,
            } => {
                // nodes of the old system do not say what they have
                let is_old = services.is_empty() && *standing == Standing::Fresh;
                let found = if is_old {
                    at_port.into_iter().collect()
                } else {
                    services.clone()
                };
                let titles: Vec<&str> = found.iter().map(|service| service.title).collect();
                let title = if titles.is_empty() {
                    "member".into()
                } else {
                    titles.join(", ")
                };
                let _ = writeln!(text, "{endpoint} ({title}): attested, meets the policy");
                let states: Vec<&str> = found.iter().map(|service| service.state).collect();
                let state = match (standing, cluster) {
                    (Standing::Fresh, _) => states.join("; "),
                    (Standing::Member, Some(id)) => format!("a member of this cluster, {}", hex(id)),
                    (_, Some(id)) => format!("a member of another cluster than {}", hex(id)),
                    (_, None) => {
                        "a member of a cluster; to learn whether it is yours, give --state or --cluster-id".into()
                    }
                };
                let _ = writeln!(text, "  Node:        {state}");
                if *standing != Standing::Fresh
                    && services.iter().any(|service| service.port == init::PORT)
                {
                    let _ = writeln!(
                        text,
                        "  Init:        it has begun, and its result waits for the operator"
                    );
                }
                facts.iter().try_for_each(|fact| writeln!(text, "  {fact}"))
            }
        };
    }
    text
}

/// The worst of it: a node that is not what it should be, then what it waits for, then one that is nowhere.
fn verdict(address: &str, answers: &[Answer]) -> Result<(), Failure> {
    if answers
        .iter()
        .any(|answer| matches!(answer, Answer::Refused(_)))
    {
        return Err(Failure::Failed(
            ATTESTATION_REFUSED,
            format!("{address}: attestation refused, see above"),
        ));
    }
    let of = |wanted: Standing| {
        answers.iter().find_map(|answer| match answer {
            Answer::Verified {
                standing, services, ..
            } if *standing == wanted => Some(services),
            _ => None,
        })
    };
    let waits_for_key = |services: &Vec<&'static Service>| {
        services
            .iter()
            .any(|service| service.port == recoverproto::PORT)
    };
    let (code, what) = match (
        of(Standing::Other),
        of(Standing::Member),
        of(Standing::Fresh),
    ) {
        (Some(_), _, _) => (
            OTHER_CLUSTER,
            "it belongs to another cluster, or to one that is not known here",
        ),
        (None, Some(_), _) => return Ok(()),
        (None, None, Some(services)) if waits_for_key(services) => {
            (WAITS_FOR_KEY, "it waits for the key of its disk")
        }
        (None, None, Some(_)) => (FRESH, "it belongs to no cluster yet"),
        (None, None, None)
            if answers
                .iter()
                .any(|answer| matches!(answer, Answer::Guarded)) =>
        {
            (
                UNPROVEN,
                "only the join service answers, which proves nothing of its node",
            )
        }
        (None, None, None) => (
            UNREACHABLE,
            "nobody answers: the node is not on, still booting, or cannot be reached",
        ),
    };
    Err(Failure::Failed(code, format!("{address}: {what}")))
}
