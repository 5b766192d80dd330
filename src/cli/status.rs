//! `firstlight status`: asks a node where it stands.
//!
//! A node has a server for each state in which somebody has to do something, each on its own port, and each but the last
//! proves what the node runs:
//!
//! | port | server | who answers there |
//! |---|---|---|
//! | 9999 | recovery server | a node in its initramfs that waits for the key of its disk |
//! | 9000 | InitServer | a booted node that waits for the operator's init |
//! | 30090 | join service | a member of a cluster that lets others in, if they prove what they run |

use std::fmt::Write;
use std::io::Read;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use super::connect::{Attempt, Endpoint, Node};
use super::progress::printable;
use super::{ATTESTATION_REFUSED, UNREACHABLE, recover, say_all};
use crate::atls;
use crate::bootstrapper::init_server;
use crate::grpc::{CallOptions, Channel, Status};
use crate::program::Failure;
use crate::state_disk::recovery;

/// What the command line says.
#[derive(Debug)]
pub struct Options {
    /// The node: a host, or one server of it.
    pub address: String,
    /// The attestation policy that it must meet.
    pub policy: PathBuf,
    /// For everything together.
    pub timeout: Duration,
}

/// A server that a node can have.
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
        port: recovery::PORT,
        title: "recovery server",
        state: "in its initramfs, waiting for the key of its disk: from a join service, or by `firstlight recover`",
    },
    Service {
        name: "init.API",
        port: init_server::PORT,
        title: "InitServer",
        state: "booted, no member of a cluster yet, waiting for `firstlight init`",
    },
    Service {
        name: "join.API",
        port: JOIN_PORT,
        title: "join service",
        state: "a member of a cluster, letting others in",
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
        /// Those that it has, if it says so.
        services: Vec<&'static Service>,
        /// Lines about what it waits for.
        facts: Vec<String>,
    },
}

/// The command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let nodes = endpoints(&options.address)?
        .into_iter()
        .map(|endpoint| Node::new(&endpoint, &options.policy))
        .collect::<Result<Vec<_>, _>>()?;
    let answers = ask_all(&nodes, Instant::now() + options.timeout);
    say_all(&report(&nodes, &answers))?;
    verdict(&options.address, &answers)
}

/// The node's servers, or the one whose port is given.
fn endpoints(address: &str) -> Result<Vec<Endpoint>, Failure> {
    let each = SERVICES.iter().map(|service| Endpoint::parse(address, service.port)).collect::<Result<Vec<_>, _>>();
    let mut endpoints = each.map_err(Failure::Usage)?;
    endpoints.dedup();
    Ok(endpoints)
}

/// All at once: one that does not answer must not take the time of the others.
fn ask_all(nodes: &[Node], deadline: Instant) -> Vec<Answer> {
    thread::scope(|scope| {
        let asking: Vec<_> = nodes.iter().map(|node| scope.spawn(move || ask(node, deadline))).collect();
        let lost = |_| Answer::Nobody("a defect of this program".into());
        asking.into_iter().map(|asking| asking.join().unwrap_or_else(lost)).collect()
    })
}

fn ask(node: &Node, deadline: Instant) -> Answer {
    match node.attempt(deadline) {
        Ok(channel) => {
            let services = services(&channel);
            let facts = match recover::status(&channel) {
                Ok(status) => {
                    recover::facts(&status).into_iter().map(|(name, value)| format!("{name} {value}")).collect()
                }
                Err(_) => vec![],
            };
            Answer::Verified { services, facts }
        }
        Err(Attempt::Refused(_)) if is_guarded(node, deadline) => Answer::Guarded,
        Err(Attempt::Refused(why)) => Answer::Refused(why),
        Err(Attempt::Passing(reason)) => Answer::Nobody(reason),
    }
}

/// Whether it ends the connection of a caller who proves nothing. In TLS 1.3 it does so after the handshake.
fn is_guarded(node: &Node, deadline: Instant) -> bool {
    let Ok(socket) = node.dial(deadline) else { return false };
    let mut transport = match atls::Client::new(None, vec![]).connect(socket, deadline) {
        Ok(transport) => transport,
        Err(error) => return matches!(error, atls::Error::PeerRefused(_)),
    };
    let left = deadline.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(1), CALL_TIMEOUT);
    if transport.socket.set_read_timeout(Some(left)).is_err() {
        return false;
    }
    let error = transport.reader.read(&mut [0]).err();
    let refused = error.as_ref().and_then(|error| error.get_ref()?.downcast_ref());
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
    let options = CallOptions { timeout: Some(CALL_TIMEOUT), ..CallOptions::default() };
    let has = |service: &&Service| {
        let request = HealthCheckRequest { service: service.name.into() };
        let answer: Result<HealthCheckResponse, Status> =
            channel.unary("/grpc.health.v1.Health/Check", &request, &options);
        answer.is_ok()
    };
    SERVICES.iter().filter(has).collect()
}

fn report(nodes: &[Node], answers: &[Answer]) -> String {
    let mut text = String::new();
    // writing to a string does not fail
    for (Node { endpoint, .. }, answer) in nodes.iter().zip(answers) {
        let at_port = SERVICES.iter().find(|service| service.port == endpoint.port());
        let usual = at_port.map_or(String::new(), |service| format!(" ({})", service.title));
        let _ = match answer {
            Answer::Nobody(reason) => writeln!(text, "{endpoint}{usual}: no answer: {}", printable(reason)),
            Answer::Refused(why) => {
                let why = printable(why).replace('\n', "\n  ");
                writeln!(text, "{endpoint}{usual}: attestation refused:\n  {why}")
            }
            Answer::Guarded => writeln!(
                text,
                "{endpoint} (join service): proves nothing itself, and wants proof of callers\n  Node:        it seems, {}",
                SERVICES[2].state
            ),
            Answer::Verified { services, facts } => {
                let found = if services.is_empty() { at_port.into_iter().collect() } else { services.clone() };
                let titles: Vec<&str> = found.iter().map(|service| service.title).collect();
                let _ = writeln!(text, "{endpoint} ({}): attested, meets the policy", titles.join(", "));
                let states: Vec<&str> = found.iter().map(|service| service.state).collect();
                let _ = writeln!(text, "  Node:        {}", states.join("; "));
                facts.iter().try_for_each(|fact| writeln!(text, "  {fact}"))
            }
        };
    }
    text
}

/// The worst of it: a node that is not what it should be, then one that is nowhere.
fn verdict(address: &str, answers: &[Answer]) -> Result<(), Failure> {
    if answers.iter().any(|answer| matches!(answer, Answer::Refused(_))) {
        return Err(Failure::Failed(ATTESTATION_REFUSED, format!("{address}: attestation refused, see above")));
    }
    if answers.iter().all(|answer| matches!(answer, Answer::Nobody(_))) {
        let why = "nobody answers: the node is not on, still booting, or a member that only runs its kubelet";
        return Err(Failure::Failed(UNREACHABLE, format!("{address}: {why}")));
    }
    Ok(())
}
