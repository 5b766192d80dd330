//! How a node asks for a ticket: every join service of its cluster at once, until one has given it what it needs.
//!
//! One thread lists the services again and again, one thread a service asks it, each with its own jittered back-off from one
//! second, so that one dead service delays no other, and neither does a metadata service that hangs once there is a ticket.
//! The join service itself is not attested (the old protocol): what it sends is for the [`Asker`] to judge.
//!
//! ```text
//!   metadata ─► load balancer, control planes without this machine ─► a thread each: connect, prove, call ─► Asker::ask
//!      ▲                    every 15 s                                        ▲     pause, or the server's own hint │
//!      └────────────────────────────────────────────────────────              └────────────────────────────────────┘
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use prost::Message;

use attest::atls;
use attest::attestation::Issuer;
use base::backoff::Backoff;
use base::stop::{Held, Stop};
use cloud::{Instance, Metadata, Role};
use proto::join::{NODE_PORT, RETRY_AFTER};
use rpc::grpc::{CallOptions, Channel, Code, Metadata as Trailers, Status};

/// A connection that takes longer goes nowhere.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Covers the server's time for validating our document (30 s in the old system).
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);
const CALL_TIME: Duration = Duration::from_secs(30);
/// A ticket with the keys of a control plane and a list of components has about 30 KiB.
const MAX_TICKET: usize = 1 << 20;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Between two tries at a service that says what must be mended first.
const LASTING_PAUSE: Duration = Duration::from_secs(60);
/// Between two tries at a service whose policy refused this machine's attestation.
const REFUSED_PAUSE: Duration = Duration::from_secs(15);
/// No server makes a node wait for longer.
const LONGEST_HINT: Duration = Duration::from_secs(10 * 60);
/// Services come and go while a node waits: look again this often.
const LIST_EVERY: Duration = Duration::from_secs(15);
/// More control planes than any cluster has; a hostile metadata service does not get more threads than this.
const MAX_SERVICES: usize = 64;

/// How long a node waits for these threads once it has its ticket. What may take longer is a request to a metadata service
/// that is slow (10 s each) or a name that is looked up: they end by themselves, and nobody uses what they find.
const GRACE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Who wants a ticket.
pub trait Asker: Send + Sync + 'static {
    /// The longest pause between two tries at one service.
    const LONGEST_PAUSE: Duration;
    /// Stopped when no ticket is wanted any more.
    fn over(&self) -> &Stop;
    /// Proves what this machine runs.
    fn issuer(&self) -> &Arc<dyn Issuer>;
    /// What the metadata service says; before the first service is asked, and again as long as it is asked.
    fn know(&self, _known: Known) {}
    /// Asks one service; it is asked again unless this is well.
    fn ask(&self, service: &JoinService) -> Result<(), Failure>;
    /// Why `source` did not help this time.
    fn note(&self, source: &str, failure: &Failure);
}

/// What the metadata service says, as far as it says something.
pub struct Known {
    /// This machine.
    pub own: Option<Instance>,
    /// The host under which all control planes are reached.
    pub load_balancer: Option<String>,
}

/// Why a try came to nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// A clause for people.
    pub text: String,
    /// It stays like that until somebody mends something.
    pub is_lasting: bool,
    /// When the server wants to be asked again.
    pub retry_after: Option<Duration>,
}

impl From<String> for Failure {
    /// One that may pass by itself.
    fn from(text: String) -> Failure {
        Failure {
            text,
            is_lasting: false,
            retry_after: None,
        }
    }
}

impl Failure {
    /// One that stays until somebody mends something.
    pub fn lasting(text: String) -> Failure {
        Failure {
            is_lasting: true,
            ..Failure::from(text)
        }
    }

    /// Of a connection that was not made, or broke. A policy may follow a new image at any moment.
    fn of_connection(text: String) -> Failure {
        let is_lasting = text.contains(atls::ATTESTATION_REFUSED);
        Failure {
            text,
            is_lasting,
            retry_after: is_lasting.then_some(REFUSED_PAUSE),
        }
    }

    fn of(status: &Status, trailers: &Trailers) -> Failure {
        use Code::{FailedPrecondition, InvalidArgument, PermissionDenied, Unauthenticated};
        // with TLS 1.3 a refusal comes after the handshake
        if status.code() == Code::Unavailable
            && status.message().contains(atls::ATTESTATION_REFUSED)
        {
            return Failure::of_connection(status.message().to_owned());
        }
        Failure {
            text: format!("gave no ticket: {status}"),
            is_lasting: matches!(
                status.code(),
                InvalidArgument | PermissionDenied | Unauthenticated | FailedPrecondition
            ),
            retry_after: retry_after(status, trailers),
        }
    }

    fn pause(&self, backoff: &mut Backoff) -> Duration {
        let usual = backoff.pause();
        let hint = self
            .retry_after
            .map(|hint| hint.clamp(FIRST_PAUSE, LONGEST_HINT));
        match (hint, self.is_lasting) {
            // with jitter, since the server may have told all of a fleet the same
            (Some(hint), _) => hint + Backoff::new(hint / 8, hint).pause(),
            (None, true) => Backoff::new(LASTING_PAUSE, LASTING_PAUSE).pause(),
            (None, false) => usual,
        }
    }
}

/// A server's wish, as google.rpc.RetryInfo among the status' details, or as a trailer.
fn retry_after(status: &Status, trailers: &Trailers) -> Option<Duration> {
    let millis = || trailers.get(RETRY_AFTER)?.parse().ok();
    status
        .retry_after()
        .or_else(|| millis().map(Duration::from_millis))
}

/// One join service, or what stands before several.
#[derive(Debug, Clone, Copy)]
pub struct JoinService(SocketAddr);

impl fmt::Display for JoinService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "join service {}", self.0)
    }
}

impl JoinService {
    /// Connects, and proves what this machine runs. The stop of the asker ends it at once, and all that is done with the
    /// connection.
    pub fn connect<'a>(&self, asker: &'a impl Asker) -> Result<Connection<'a>, Failure> {
        let over = asker.over();
        let socket =
            sys::net::connect(self.0, Instant::now() + CONNECT_TIME, &|| over.is_stopped())
                .map_err(|error| format!("cannot connect: {error}"))?;
        let held = over.hold(&socket).map_err(|error| error.to_string())?;
        let client = atls::Client::new(Some(asker.issuer().clone()), vec![]);
        let transport = client.connect(socket, Instant::now() + HANDSHAKE_TIME);
        let transport = transport.map_err(|error| Failure::of_connection(error.to_string()))?;
        let channel = Channel::new(transport, &self.0.to_string())
            .map_err(|status| Failure::of(&status, &Trailers::new()))?
            .with_message_bytes(MAX_TICKET);
        Ok(Connection {
            channel,
            _held: held,
        })
    }
}

/// One to a join service.
pub struct Connection<'a> {
    channel: Channel,
    _held: Held<'a>,
}

impl Connection<'_> {
    /// Asks for a ticket.
    pub fn call<Q: Message, R: Message + Default>(
        &self,
        method: &str,
        request: &Q,
    ) -> Result<R, Failure> {
        let options = CallOptions {
            timeout: Some(CALL_TIME),
            ..CallOptions::default()
        };
        // as a stream of one, which shows the trailers, too
        let answer = self.channel.server_streaming(method, request, &options);
        let mut answer = answer.map_err(|status| Failure::of(&status, &Trailers::new()))?;
        answer
            .one()
            .map_err(|status| Failure::of(&status, &answer.trailers()))
    }
}

/// The threads that ask; they stop with [`Asker::over`], and are joined on drop.
pub struct Asking(Option<JoinHandle<()>>);

impl Asking {
    /// Starts asking every join service that `metadata` leads to.
    pub fn start<A: Asker>(metadata: Arc<Metadata>, asker: Arc<A>) -> std::io::Result<Asking> {
        let lister = thread::Builder::new().name("tickets".into());
        lister
            .spawn(move || ask_all(&metadata, &asker))
            .map(|thread| Asking(Some(thread)))
    }
}

impl Drop for Asking {
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

fn ask_all<A: Asker>(metadata: &Metadata, asker: &Arc<A>) {
    let over = asker.over();
    let mut threads = BTreeMap::new();
    let mut backoff = Backoff::new(FIRST_PAUSE, LIST_EVERY);
    while !over.is_stopped() {
        let listed = list(metadata);
        for (source, error) in &listed.errors {
            asker.note(source, &Failure::from(error.clone()));
        }
        asker.know(listed.known);
        for host in listed.hosts {
            if threads.len() < MAX_SERVICES && !threads.contains_key(&host) {
                let (asker, service) =
                    (asker.clone(), JoinService(SocketAddr::new(host, NODE_PORT)));
                let thread = thread::Builder::new().name("ticket-ask".into());
                match thread.spawn(move || ask(&service, &*asker)) {
                    Ok(thread) => drop(threads.insert(host, thread)),
                    Err(error) => log::warn!("no thread for join service {host}: {error}"),
                }
            }
        }
        if threads.is_empty() && listed.errors.is_empty() {
            asker.note(
                "metadata",
                &Failure::from("no other control plane is known".to_owned()),
            );
        }
        over.wait(if threads.is_empty() {
            backoff.pause()
        } else {
            LIST_EVERY
        });
    }
    for (_, thread) in threads {
        let _ = thread.join();
    }
}

/// Asks one join service until no ticket is wanted any more.
fn ask<A: Asker>(service: &JoinService, asker: &A) {
    let (name, over) = (service.to_string(), asker.over());
    let mut backoff = Backoff::new(FIRST_PAUSE, A::LONGEST_PAUSE);
    while !over.is_stopped() {
        let Err(failure) = asker.ask(service) else {
            return;
        };
        if over.is_stopped() {
            return;
        }
        asker.note(&name, &failure);
        over.wait(failure.pause(&mut backoff));
    }
}

struct Listed {
    known: Known,
    hosts: Vec<IpAddr>,
    errors: Vec<(&'static str, String)>,
}

/// The load balancer and every control plane but this node itself. What one source does not tell, the other may.
fn list(metadata: &Metadata) -> Listed {
    let mut listed = Listed {
        known: Known {
            own: None,
            load_balancer: None,
        },
        hosts: vec![],
        errors: vec![],
    };
    match metadata.load_balancer_endpoint() {
        Ok(host) => {
            match sys::net::resolve(&host) {
                Ok(addresses) => listed.hosts.extend(addresses),
                Err(error) => listed
                    .errors
                    .push(("load balancer", format!("{host}: {error}"))),
            }
            listed.known.load_balancer = Some(host);
        }
        Err(error) => listed.errors.push(("load balancer", error.to_string())),
    }
    match metadata.peers() {
        Ok(peers) => {
            let planes = peers.iter().filter(|peer| peer.role == Role::ControlPlane);
            listed.hosts.extend(planes.filter_map(|peer| peer.vpc_ip));
        }
        Err(error) => listed.errors.push(("control planes", error.to_string())),
    }
    match metadata.self_() {
        Ok(own) => {
            // its own join service is not up while it waits here
            listed.hosts.retain(|host| Some(*host) != own.vpc_ip);
            listed.known.own = Some(own);
        }
        Err(error) => listed.errors.push(("this machine", error.to_string())),
    }
    listed.hosts.sort();
    listed.hosts.dedup();
    listed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trailers(hint: &str) -> Trailers {
        let mut trailers = Trailers::new();
        trailers.insert(RETRY_AFTER, hint).unwrap();
        trailers
    }

    #[test]
    fn the_code_tells_what_lasts_from_what_passes() {
        for (code, is_lasting) in [
            (Code::InvalidArgument, true),
            (Code::PermissionDenied, true),
            (Code::Unauthenticated, true),
            (Code::FailedPrecondition, true),
            (Code::Unavailable, false),
            (Code::ResourceExhausted, false),
            // all that the old system ever says
            (Code::Internal, false),
        ] {
            let failure = Failure::of(&Status::new(code, "why"), &Trailers::new());
            assert_eq!(
                (failure.is_lasting, failure.retry_after),
                (is_lasting, None),
                "{code}"
            );
            assert!(failure.text.contains("why"));
        }
    }

    #[test]
    fn a_servers_hint_is_honoured_in_either_form_and_no_server_stops_a_node_for_ever() {
        let busy = Status::new(Code::ResourceExhausted, "busy");
        let pause = |failure: Failure| {
            failure
                .pause(&mut Backoff::new(FIRST_PAUSE, FIRST_PAUSE))
                .as_millis()
        };
        assert!((2500..3000).contains(&pause(Failure::of(&busy, &trailers("2500")))));
        let with_info = busy.clone().with_retry_after(Duration::from_millis(2500));
        assert!((2500..3000).contains(&pause(Failure::of(&with_info, &Trailers::new()))));
        assert!(
            pause(Failure::of(&busy, &trailers("18446744073709551615")))
                < LONGEST_HINT.as_millis() * 9 / 8 + 1
        );
        assert!((1000..1200).contains(&pause(Failure::of(&busy, &trailers("0")))));
        assert!(pause(Failure::of(&busy, &trailers("soon"))) <= 1000);
        assert!((30_000..=60_000).contains(&pause(Failure::lasting("mend it".into()))));
    }
}
