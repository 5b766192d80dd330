//! Rejoin: the node proves to a join service of its cluster what it runs, and gets the key of its disk back.
//!
//! One thread lists the endpoints again and again, one thread an endpoint asks for a ticket; all at once, each with its own
//! jittered back-off from one second, so that one dead endpoint delays no other, and neither does a metadata service that
//! hangs once the disk is open. The join service itself is not attested (the old protocol): a key counts only when it
//! opened the disk.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::waiting::{Candidate, Refused, Waiting};
use crate::attestation::Issuer;
use crate::backoff::Backoff;
use crate::crypto::{KEY_LEN, Secret};
use crate::grpc::{CallOptions, Channel, Status};
use crate::metadata::{Metadata, Role};
use crate::proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use crate::timeline::Timeline;
use crate::{atls, sys};

/// NodePort of the join service on each control plane and on the load balancer.
pub const PORT: u16 = 30090;
/// A connection that takes longer goes nowhere.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Covers the server's time for validating our document (30 s in the old system).
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);
const CALL_TIME: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// Endpoints come and go while a node waits: look again this often.
const LIST_EVERY: Duration = Duration::from_secs(15);
/// More control planes than any cluster has; a hostile metadata service does not get more threads than this.
const MAX_ENDPOINTS: usize = 64;

/// How long the boot waits for these threads once a key opened the disk. What may take longer is a request to a metadata
/// service that is slow (10 s each) or a name that is looked up: they end by themselves, and nobody uses what they find.
const GRACE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The threads that look for a ticket; they stop with the wait that they serve, and are joined on drop.
pub struct Rejoin(Option<JoinHandle<()>>);

struct Asking {
    waiting: Arc<Waiting>,
    issuer: Arc<dyn Issuer>,
    timeline: Timeline,
}

impl Rejoin {
    /// Starts asking every join service that `metadata` leads to.
    pub fn start(
        metadata: Arc<Metadata>,
        issuer: Arc<dyn Issuer>,
        waiting: Arc<Waiting>,
        timeline: Timeline,
    ) -> std::io::Result<Rejoin> {
        let asking = Arc::new(Asking { waiting, issuer, timeline });
        let lister = thread::Builder::new().name("rejoin".into());
        lister.spawn(move || ask_all(&metadata, &asking)).map(|thread| Rejoin(Some(thread)))
    }
}

impl Drop for Rejoin {
    fn drop(&mut self) {
        let Some(thread) = self.0.take() else { return };
        let end = Instant::now() + GRACE;
        while !thread.is_finished() && Instant::now() < end {
            thread::sleep(LOOK_EVERY);
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            log::debug!("a request that no longer matters is left to end by itself");
        }
    }
}

fn ask_all(metadata: &Metadata, asking: &Arc<Asking>) {
    let over = asking.waiting.over();
    let mut threads = BTreeMap::new();
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    while !over.is_stopped() {
        let listed = endpoints(metadata);
        for error in &listed.errors {
            asking.waiting.note("metadata", error.as_str());
        }
        for host in listed.hosts.into_iter().take(MAX_ENDPOINTS) {
            if threads.len() < MAX_ENDPOINTS && !threads.contains_key(&host) {
                let (asking, address) = (asking.clone(), host);
                let spawned = thread::Builder::new().name("rejoin-ask".into()).spawn(move || ask(address, &asking));
                match spawned {
                    Ok(thread) => drop(threads.insert(host, thread)),
                    Err(error) => log::warn!("no thread for join service {host}: {error}"),
                }
            }
        }
        if threads.is_empty() && listed.errors.is_empty() {
            asking.waiting.note("metadata", "no other control plane is known");
        }
        over.wait(if threads.is_empty() { backoff.pause() } else { LIST_EVERY });
    }
    for (_, thread) in threads {
        let _ = thread.join();
    }
}

struct Listed {
    hosts: Vec<IpAddr>,
    errors: Vec<String>,
}

/// The load balancer and every control plane but this node itself. What one source does not tell, the other may.
fn endpoints(metadata: &Metadata) -> Listed {
    let mut listed = Listed { hosts: vec![], errors: vec![] };
    match metadata.load_balancer_endpoint() {
        Ok(host) => match sys::net::resolve(&host) {
            Ok(addresses) => listed.hosts.extend(addresses),
            Err(error) => listed.errors.push(format!("load balancer {host}: {error}")),
        },
        Err(error) => listed.errors.push(error.to_string()),
    }
    match metadata.peers() {
        Ok(peers) => {
            let planes = peers.iter().filter(|peer| peer.role == Role::ControlPlane);
            listed.hosts.extend(planes.filter_map(|peer| peer.vpc_ip));
        }
        Err(error) => listed.errors.push(error.to_string()),
    }
    match metadata.self_() {
        // its own join service is not up while it waits here
        Ok(own) => listed.hosts.retain(|host| Some(*host) != own.vpc_ip),
        Err(error) => listed.errors.push(error.to_string()),
    }
    listed.hosts.sort();
    listed.hosts.dedup();
    listed
}

/// Asks one join service until the wait is over.
fn ask(host: IpAddr, asking: &Asking) {
    let name = format!("join service {}", std::net::SocketAddr::new(host, PORT));
    let over = asking.waiting.over();
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    while !over.is_stopped() {
        match ticket(host, asking).and_then(|ticket| candidate(ticket, &name)) {
            Ok(candidate) => {
                asking.timeline.event("ticket", format_args!("from {name}"));
                match asking.waiting.offer(candidate) {
                    Ok(()) | Err(Refused::TooLate) => return,
                    Err(refused) => asking.waiting.note(&name, format!("sent a key, but {refused}")),
                }
            }
            Err(error) if !over.is_stopped() => asking.waiting.note(&name, error),
            Err(_) => return,
        }
        over.wait(backoff.pause());
    }
}

fn ticket(host: IpAddr, asking: &Asking) -> Result<IssueRejoinTicketResponse, String> {
    let over = asking.waiting.over();
    let address = std::net::SocketAddr::new(host, PORT);
    let socket = sys::net::connect(address, Instant::now() + CONNECT_TIME, &|| over.is_stopped())
        .map_err(|error| format!("cannot connect: {error}"))?;
    let _held = over.hold(&socket).map_err(|error| error.to_string())?;
    let client = atls::Client::new(Some(asking.issuer.clone()), vec![]);
    let transport = client.connect(socket, Instant::now() + HANDSHAKE_TIME).map_err(|error| error.to_string())?;
    let call = || -> Result<IssueRejoinTicketResponse, Status> {
        let request = IssueRejoinTicketRequest { disk_uuid: asking.waiting.uuid() };
        let options = CallOptions { timeout: Some(CALL_TIME), ..CallOptions::default() };
        Channel::new(transport, &address.to_string())?.unary("/join.API/IssueRejoinTicket", &request, &options)
    };
    call().map_err(|status| format!("gave no ticket: {status}"))
}

/// The keys of a ticket. Their lengths count: the disk does not tell whether the measurement secret is right, and the cluster
/// ID would come out of a missing one as well.
fn candidate(mut ticket: IssueRejoinTicketResponse, name: &str) -> Result<Candidate, String> {
    let candidate = Candidate {
        disk_key: Secret::new(std::mem::take(&mut ticket.state_disk_key)),
        measurement_secret: Secret::new(std::mem::take(&mut ticket.measurement_secret)),
        from: name.into(),
    };
    match (candidate.disk_key.len(), candidate.measurement_secret.len()) {
        (KEY_LEN, KEY_LEN) => Ok(candidate),
        (key, secret) => {
            Err(format!("sent a disk key of {key} bytes and a measurement secret of {secret}, expected {KEY_LEN} each"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_counts_only_with_both_keys_in_full() {
        let ticket = |key, secret| {
            let mut ticket = IssueRejoinTicketResponse::default();
            (ticket.state_disk_key, ticket.measurement_secret) = (vec![1; key], vec![2; secret]);
            candidate(ticket, "join service")
        };
        assert!(ticket(32, 32).is_ok());
        for (key, secret) in [(0, 0), (32, 0), (32, 31), (0, 32), (33, 32)] {
            assert!(ticket(key, secret).err().unwrap().contains("expected 32 each"));
        }
    }
}
