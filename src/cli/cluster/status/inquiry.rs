//! Asks a node's servers.

use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::answer::{NodeService, SERVICES, ServerAnswer};
use super::report::StatusReport;
use crate::cluster::recover;
use crate::shell::error::Error;
use crate::trust::verify;
use crate::workspace::connect::{Attempt, ClusterMembership, Endpoint, Node, Noted, Reached};
use base::crypto::CLUSTER_ID_LEN;
use proto::node::{self, TimelineRequest, TimelineResponse};
use rpc::grpc::health::{CHECK, HealthCheckRequest, HealthCheckResponse};
use rpc::grpc::{CallOptions, Channel, Status};
use verifier::{Policy, Variant};

/// Time limit of a call, which the node answers from memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to retry a node on which no server answers, and the pause between tries: between two
/// states, for example right after its init, a node has no server for a moment.
const CHANGE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(500);

/// Asks nodes for their state.
pub struct Inquiry<'a> {
    /// How the nodes attest themselves.
    pub variant: &'static Variant,
    /// The policy that they must meet.
    pub policy: &'a Policy,
    /// The ID of the operator's cluster, if it is known.
    pub cluster: Option<[u8; CLUSTER_ID_LEN]>,
    /// When the command ends.
    pub deadline: Instant,
}

/// A server of the node, and what it proves.
struct Asked {
    node: Node,
    noted: Arc<OnceLock<Noted>>,
}

impl Inquiry<'_> {
    /// Asks all servers of a node at once, so that a server that does not answer does not delay the
    /// others.
    pub fn ask(&self, address: &str) -> Result<StatusReport, Error> {
        let asked = |endpoint: &Endpoint| {
            let noted = Arc::default();
            let node = Node::in_any_standing(
                endpoint,
                self.variant,
                self.policy,
                self.cluster.as_ref(),
                &noted,
            )?;
            Ok(Asked { node, noted })
        };
        let endpoints = endpoints(address)?;
        let servers: Vec<Asked> = endpoints.iter().map(asked).collect::<Result<_, Error>>()?;
        let report = |answers| StatusReport {
            address: address.to_owned(),
            answers,
            cluster: self.cluster,
            names_no_keys: self.policy.believes_any_key(),
            exceptions: self.policy.exceptions().to_vec(),
        };
        if let Some(first) = endpoints.first()
            && let Err(why) = first.check_name(self.deadline)
        {
            return Ok(report(vec![(first.clone(), ServerAnswer::Nobody(why))]));
        }
        let started = Instant::now();
        let answers = loop {
            let answers = self.ask_all(&servers);
            let is_silent = answers
                .iter()
                .all(|it| matches!(it, ServerAnswer::Nobody(_)));
            if !is_silent || Instant::now() + PAUSE > self.deadline.min(started + CHANGE) {
                break answers;
            }
            thread::sleep(PAUSE);
        };
        Ok(report(endpoints.into_iter().zip(answers).collect()))
    }

    fn ask_all(&self, servers: &[Asked]) -> Vec<ServerAnswer> {
        thread::scope(|scope| {
            let asking: Vec<_> = servers
                .iter()
                .map(|server| scope.spawn(|| ask(server, self.policy, self.deadline)))
                .collect();
            let lost = |_| ServerAnswer::Nobody("firstlight has a defect".into());
            asking
                .into_iter()
                .map(|asking| asking.join().unwrap_or_else(lost))
                .collect()
        })
    }
}

/// Returns the addresses of the node's servers, or only the one whose port is given.
fn endpoints(address: &str) -> Result<Vec<Endpoint>, Error> {
    let each = SERVICES
        .iter()
        .map(|service| Endpoint::parse(address, service.port))
        .collect::<Result<Vec<_>, _>>();
    let mut endpoints = each?;
    endpoints.dedup();
    Ok(endpoints)
}

fn ask(Asked { node, noted }: &Asked, policy: &Policy, deadline: Instant) -> ServerAnswer {
    match node.attempt(deadline) {
        Ok(Reached { channel, key, .. }) => {
            // a connection exists only if the validator has noted something
            let noted = noted.get();
            let boot = boot(&channel, deadline);
            ServerAnswer::Verified {
                standing: noted.map_or(ClusterMembership::Other, |noted| noted.standing),
                image: noted.and_then(|noted| verify::image_of(policy, &noted.document)),
                services: services(&channel, deadline),
                key,
                waiting: recover::status(&channel).ok(),
                has_set_clock: boot.as_ref().ok().and_then(|it| it.clock_synchronized),
                record: boot.map(|it| it.record),
            }
        }
        Err(Attempt::Refused(_)) if is_guarded(node, deadline) => ServerAnswer::Guarded,
        Err(Attempt::Refused(why)) => ServerAnswer::Refused(why),
        Err(Attempt::Passing(reason)) => ServerAnswer::Nobody(reason),
    }
}

/// Returns the time limit of a call that must end by the deadline.
fn limit(deadline: Instant) -> Duration {
    deadline
        .saturating_duration_since(Instant::now())
        .clamp(Duration::from_millis(1), CALL_TIMEOUT)
}

/// Returns whether the server closes the connection of a caller that sends no evidence. In TLS 1.3
/// it does so after the handshake.
fn is_guarded(node: &Node, deadline: Instant) -> bool {
    let Ok(socket) = node.endpoint.dial(deadline) else {
        return false;
    };
    let mut transport = match atls::Client::new(None, None).connect(socket, deadline) {
        Ok(transport) => transport,
        Err(error) => return matches!(error, atls::Error::PeerRefused(_)),
    };
    let socket = transport.socket.clone();
    // nobody has vouched for this peer: it may send a record byte by byte, which no time limit of a read ends
    let read = until(&socket, limit(deadline), || transport.reader.read(&mut [0]));
    let error = read.err();
    let refused = error
        .as_ref()
        .and_then(|error| error.get_ref()?.downcast_ref());
    matches!(refused, Some(atls::Error::PeerRefused(_)))
}

/// Runs `work`, which waits for this socket, and shuts the socket down after this time.
fn until<T>(socket: &TcpStream, time: Duration, work: impl FnOnce() -> T) -> T {
    let (running, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        // dropped also if the work panics, or the scope would wait for the whole time
        let _running = running;
        scope.spawn(move || {
            if ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                // the peer may have closed it
                let _ = socket.shutdown(Shutdown::Both);
            }
        });
        work()
    })
}

/// Returns the record of the node's boot, and the state of its clock.
fn boot(channel: &Channel, deadline: Instant) -> Result<TimelineResponse, Status> {
    let options = CallOptions {
        timeout: Some(limit(deadline)),
        ..CallOptions::default()
    };
    channel.unary(node::TIMELINE, &TimelineRequest {}, &options)
}

/// Returns the services that the server lists; none for Constellation's nodes, which have no health
/// service.
fn services(channel: &Channel, deadline: Instant) -> Vec<&'static NodeService> {
    let has = |service: &&NodeService| {
        let options = CallOptions {
            timeout: Some(limit(deadline)),
            ..CallOptions::default()
        };
        let request = HealthCheckRequest {
            service: service.name.into(),
        };
        let answer: Result<HealthCheckResponse, Status> = channel.unary(CHECK, &request, &options);
        answer.is_ok()
    };
    SERVICES.iter().filter(has).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_peer_that_sends_byte_by_byte_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            while socket.write_all(&[0]).is_ok() {
                thread::sleep(Duration::from_millis(10));
            }
        });
        let started = Instant::now();
        let shared = socket.try_clone().unwrap();
        let read = until(&shared, Duration::from_millis(300), || {
            socket.read_exact(&mut vec![0; 100_000])
        });
        assert!(read.is_err());
        // work that ends before the deadline ends at once
        assert_eq!(until(&shared, Duration::from_secs(600), || 7), 7);
        // all of it would take a quarter of an hour
        support::promptly::assert_no_wait(started, Duration::from_secs(3));
    }
}
