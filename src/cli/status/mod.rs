//! `firstlight status`: shows the state of a node, or of all nodes of the cluster.
//!
//! A node has a server for each state. Each server except the last proves what the node runs, and by PCR 15 to which cluster it
//! belongs:
//!
//! | port | server | the node's state |
//! |---|---|---|
//! | 9999 | recovery server | a node in its initramfs that waits for the key of its disk |
//! | 9000 | InitServer | a booted node that waits for the operator's init |
//! | 9000 | member | a booted node that belongs to a cluster |
//! | 30090 | join service | a control plane that admits other nodes if they prove what they run |

mod answer;
mod cluster;
pub mod report;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::connect::{Attempt, Endpoint, Node, Reached, Standing, and_known, read_policy};
use super::output::{Output, say, say_all};
use super::progress::printable;
use super::state::State;
use super::{recover, timeline};
use answer::{Answer, SERVICES, Service};
use attest::atls;
use attest::attestation::{Policy, Variant};
use base::crypto::CLUSTER_ID_LEN;
use base::program::Failure;
use proto::node::{self, TimelineRequest, TimelineResponse};
use report::Report;
use rpc::grpc::{CallOptions, Channel, Code, Status};

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// Which nodes are asked.
    pub nodes: Nodes,
    /// The attestation policy that the node must meet.
    pub policy: PathBuf,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// The state file, which has the cluster's ID and its nodes' attestation keys; it may be missing.
    pub state: PathBuf,
    /// The cluster's ID; replaces the one in the state file.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// Whether the record of the node's boot is asked for and drawn.
    pub timeline: bool,
    /// The file for the drawing as a picture.
    pub svg: Option<PathBuf>,
    /// The form of the output; with JSON, the record of the boot is a part of it.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// The nodes that are asked.
#[derive(Debug)]
pub enum Nodes {
    /// One: its host, or the address of one of its servers.
    One(String),
    /// All that the API server lists for whom this kubeconfig is.
    Cluster(PathBuf),
}

/// Time limit of a call, which the node answers from memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A server of the node, and the standing that it proves.
struct Asked {
    node: Node,
    standing: Arc<OnceLock<Standing>>,
}

/// Asks nodes for their state.
struct Inquiry<'a> {
    variant: &'static Variant,
    policy: &'a Policy,
    /// The ID of the operator's cluster, if it is known.
    cluster: Option<[u8; CLUSTER_ID_LEN]>,
    deadline: Instant,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let state = State::find(&options.state).map_err(Failure::failed)?;
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let inquiry = Inquiry {
        variant: options.variant,
        policy: &and_known(read_policy(&options.policy)?, known)?,
        cluster: options
            .cluster_id
            .or(state.as_ref().and_then(|state| state.cluster_id)),
        deadline: Instant::now() + options.timeout,
    };
    match &options.nodes {
        Nodes::One(address) => {
            let report = inquiry.ask(address)?;
            show(&report, options)?;
            report.result()
        }
        Nodes::Cluster(kubeconfig) => cluster::run(&inquiry, kubeconfig, options.output),
    }
}

impl Inquiry<'_> {
    /// Asks all servers of a node at once, so that a server that does not answer does not delay the others.
    fn ask(&self, address: &str) -> Result<Report, Failure> {
        let asked = |endpoint: &Endpoint| {
            let standing = Arc::default();
            let node = Node::in_any_standing(
                endpoint,
                self.variant,
                self.policy,
                self.cluster.as_ref(),
                &standing,
            )?;
            Ok(Asked { node, standing })
        };
        let endpoints = endpoints(address)?;
        let servers: Vec<Asked> = endpoints
            .iter()
            .map(asked)
            .collect::<Result<_, Failure>>()?;
        let answers = thread::scope(|scope| {
            let asking: Vec<_> = servers
                .iter()
                .map(|server| scope.spawn(|| ask(server, self.deadline)))
                .collect();
            let lost = |_| Answer::Nobody("firstlight has a defect".into());
            let answers = asking
                .into_iter()
                .map(|asking| asking.join().unwrap_or_else(lost));
            endpoints.into_iter().zip(answers).collect()
        });
        Ok(Report {
            address: address.to_owned(),
            answers,
            cluster: self.cluster,
            names_no_keys: self.policy.believes_any_key(),
        })
    }
}

/// Prints the state of one node.
fn show(report: &Report, options: &Options) -> Result<(), Failure> {
    match options.output {
        Output::Text => {
            say_all(&report.text())?;
            if options.timeline || options.svg.is_some() {
                show_timeline(report, options.svg.as_deref())?;
            }
            Ok(())
        }
        Output::Json => {
            let record = record_of(report).and_then(Result::ok);
            let shown = record.filter(|_| options.timeline).map(timeline::json);
            options.output.json(&report.json(shown))?;
            if let (Some(record), Some(picture)) = (record, &options.svg) {
                timeline::draw(&timeline::steps(&timeline::events(record)), picture)?;
            }
            Ok(())
        }
    }
}

/// Draws the first record that a server gave. A node that cannot be asked is the verdict's matter.
fn show_timeline(report: &Report, svg: Option<&Path>) -> Result<(), Failure> {
    match record_of(report) {
        None => Ok(()),
        Some(Ok(record)) => {
            timeline::show(&format!("the record of {}", report.address), record, svg)
        }
        Some(Err(status)) if status.code() == Code::Unimplemented => {
            say("Timeline: this node does not keep a record of its boot, or does not give it")
        }
        Some(Err(status)) => say(format_args!("Timeline: {}", printable(&status.to_string()))),
    }
}

/// Returns the first record that a server gave, or else why it gave none; `None` if no server is attested.
fn record_of(report: &Report) -> Option<Result<&str, &Status>> {
    let records = report
        .answers
        .iter()
        .filter_map(|(_, answer)| match answer {
            Answer::Verified { record, .. } => Some(record.as_deref()),
            _ => None,
        });
    records.max_by_key(Result::is_ok)
}

/// Returns the addresses of the node's servers, or the one whose port is given.
fn endpoints(address: &str) -> Result<Vec<Endpoint>, Failure> {
    let each = SERVICES
        .iter()
        .map(|service| Endpoint::parse(address, service.port))
        .collect::<Result<Vec<_>, _>>();
    let mut endpoints = each.map_err(Failure::Usage)?;
    endpoints.dedup();
    Ok(endpoints)
}

fn ask(Asked { node, standing }: &Asked, deadline: Instant) -> Answer {
    match node.attempt(deadline) {
        Ok(Reached { channel, key }) => {
            // a connection exists only after the validator has noted a standing
            let standing = standing.get().copied().unwrap_or(Standing::Other);
            Answer::Verified {
                standing,
                services: services(&channel),
                key,
                waiting: recover::status(&channel).ok(),
                record: record(&channel),
            }
        }
        Err(Attempt::Refused(_)) if is_guarded(node, deadline) => Answer::Guarded,
        Err(Attempt::Refused(why)) => Answer::Refused(why),
        Err(Attempt::Passing(reason)) => Answer::Nobody(reason),
    }
}

/// Returns whether the server closes the connection of a caller that proves nothing. In TLS 1.3 it does so after the handshake.
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

/// Returns the record of the node's boot.
fn record(channel: &Channel) -> Result<String, Status> {
    let options = CallOptions {
        timeout: Some(CALL_TIMEOUT),
        ..CallOptions::default()
    };
    let answer: TimelineResponse = channel.unary(node::TIMELINE, &TimelineRequest {}, &options)?;
    Ok(answer.record)
}

/// Returns the services that the server names; none for nodes of the old system, which have no health service.
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
