//! Requests a ticket from every join service of the cluster at once, until one answer is
//! sufficient.
//!
//! One thread lists the join services every 15 s; one thread per service requests the ticket. Each
//! thread has its own jittered back-off from 1 s. A dead service therefore delays no other service,
//! and a metadata service that hangs does not delay a ticket that has already arrived. If the
//! requester has a judge, the judge verifies the service's evidence in the strong form of attested
//! TLS; Constellation's services have none. The [`TicketRequester`] checks each answer.
//!
//! ```text
//!   sources ─► load balancer, other control planes ─► one thread each: connect, attest, TicketRequester::request
//!      ▲                    every 15 s                             ▲   back-off, or the pause that the server asks for │
//!      └─────────────────────────────────────────                  └──────────────────────────────────────────────────┘
//! ```
//!
//! The first listing ends at the first [`HostSource`] that names a host, unless the source goes on. Each
//! later one uses all sources, because the hosts known so far gave no ticket. A host that no source
//! names any more is forgotten ([`hosts`](crate::hosts)).

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use prost::Message;

use attest::{Issuer, Judge};
use base::backoff::Backoff;
use base::network::resolver;
use base::stop::{OnStop, Stop};
use proto::join::{MAX_TICKET, NODE_PORT};
use rpc::grpc::{CallOptions, Channel, Code, Status};

use crate::ending::Ending;
use crate::hosts::{Hosts, HostsAnswer, MAX_HOSTS};
use crate::service_trust::TrustSettings;

/// Time limit for the TCP connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the TLS handshake. The server validates our document within it (30 s in
/// Constellation).
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// First pause after a temporary failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Pause before the next request to a service whose answer names an error that an operator must
/// correct.
const LASTING_PAUSE: Duration = Duration::from_secs(60);
/// Pause before the next request to a service whose policy refused this machine's attestation.
const REFUSED_PAUSE: Duration = Duration::from_secs(15);
/// Interval between two listings of the join services: services come and go while a node waits.
const LIST_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum number of threads of forgotten hosts that have not ended yet. They end at once, unless
/// they wait for the TPM.
const MAX_ENDING: usize = MAX_HOSTS;

/// Interval between two checks of this machine's addresses.
const NETWORK_INTERVAL: Duration = Duration::from_millis(50);

/// The request, and what to do with the answers.
pub trait TicketRequester: Send + Sync + 'static {
    /// The longest pause between two requests to one service.
    const MAX_PAUSE: Duration;
    /// Maximum pause that a join service can impose. It is short if the node does not verify the
    /// service: anybody may have answered.
    const MAX_SERVER_PAUSE: Duration;
    /// Returns the stop that ends all requests; it is set when no ticket is needed any more.
    fn finished(&self) -> &Stop;
    /// Returns the issuer that attests this machine.
    fn issuer(&self) -> &Arc<dyn Issuer>;
    /// Returns this machine's requirements for a join service.
    fn demands(&self) -> &TrustSettings;
    /// Requests a ticket from one service. After an error the service is asked again.
    fn request(&self, service: &JoinServicePeer) -> Result<(), TicketFailure>;
    /// Called if no host of the first listing has given a ticket when the next listing begins.
    fn unanswered(&self) {}
    /// Records that the client starts to ask `source`. The answer may take up to a minute.
    fn asked(&self, source: &str);
    /// Records that `source`, which gives no tickets itself, has answered.
    fn answered(&self, source: &str);
    /// Records why `source` gave no ticket this time.
    fn note(&self, source: &str, failure: &TicketFailure);
    /// Forgets what was recorded about the join service `source`, which is not asked any more.
    fn forget(&self, source: &str);
}

/// A source of hosts that may have a join service.
#[derive(Clone)]
pub struct HostSource {
    /// The name of the source, for people.
    pub name: &'static str,
    /// Whether the first listing also asks the next source if this one names a host.
    pub goes_on: bool,
    /// Lists the hosts.
    pub list: Arc<dyn Fn() -> Result<Listing, TicketFailure> + Send + Sync>,
}

/// The hosts that a source lists.
pub struct Listing {
    /// Host names and addresses.
    pub hosts: Vec<String>,
    /// Whether the source knows no further hosts.
    pub is_complete: bool,
}

/// Why a request gave no ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketFailure {
    /// A clause for people.
    pub text: String,
    /// Whether the failure lasts until an operator corrects its cause.
    pub is_lasting: bool,
    /// How long the server asks the node to wait.
    pub retry_after: Option<Duration>,
}

impl From<String> for TicketFailure {
    /// Makes a failure that may end without an operator.
    fn from(text: String) -> TicketFailure {
        TicketFailure {
            text,
            is_lasting: false,
            retry_after: None,
        }
    }
}

impl From<base::machines::Error> for TicketFailure {
    fn from(error: base::machines::Error) -> TicketFailure {
        TicketFailure::from(error.to_string())
    }
}

impl From<&atls::Error> for TicketFailure {
    /// A refused attestation is permanent, but the cluster's policy may accept a new image at any
    /// moment, and a join service may get a new image.
    fn from(error: &atls::Error) -> TicketFailure {
        let is_refused = error.refused().is_some() || error.is_other_form();
        let is_lasting = is_refused || error.is_attestation_refused_by_peer();
        TicketFailure {
            text: error.to_string(),
            is_lasting,
            retry_after: is_lasting.then_some(REFUSED_PAUSE).or(error.retry_after()),
        }
    }
}

impl TicketFailure {
    /// Makes a failure that lasts until an operator corrects its cause.
    pub fn lasting(text: String) -> TicketFailure {
        TicketFailure {
            is_lasting: true,
            ..TicketFailure::from(text)
        }
    }

    fn from_status(status: &Status) -> TicketFailure {
        use Code::{FailedPrecondition, InvalidArgument, PermissionDenied, Unauthenticated};
        // in TLS 1.3 the server's refusal arrives after the client's handshake is complete
        if let Some(error) = tls_error(status)
            && error.is_attestation_refused_by_peer()
        {
            return TicketFailure {
                text: status.message().to_owned(),
                ..TicketFailure::from(error)
            };
        }
        TicketFailure {
            text: format!("gave no ticket: {status}"),
            is_lasting: matches!(
                status.code(),
                InvalidArgument | PermissionDenied | Unauthenticated | FailedPrecondition
            ),
            retry_after: status.retry_after(),
        }
    }

    fn pause(&self, backoff: &mut Backoff, most: Duration) -> Duration {
        let usual = backoff.pause();
        let hint = self.retry_after.map(|hint| hint.clamp(FIRST_PAUSE, most));
        match (hint, self.is_lasting) {
            // jitter, because the server may have given the same pause to many nodes
            (Some(hint), _) => hint + Backoff::new(hint / 4, hint).pause(),
            (None, true) => Backoff::new(LASTING_PAUSE, LASTING_PAUSE).pause(),
            (None, false) => usual,
        }
    }
}

/// Returns the TLS error that ended the connection of `status`; `None` if the call ended for
/// another reason.
fn tls_error(status: &Status) -> Option<&atls::Error> {
    status.cause()?.get_ref()?.downcast_ref()
}

/// One join service, or a load balancer in front of several.
pub struct JoinServicePeer {
    address: SocketAddr,
    /// Set when no ticket is needed any more, or no source names the service.
    over: Stop,
}

impl fmt::Display for JoinServicePeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "join service {}", self.address)
    }
}

impl JoinServicePeer {
    /// Connects and attests this machine. The judge judges the evidence of a service in the
    /// strong form of attested TLS; without a judge this machine only proves itself.
    /// [`TicketRequester::finished`] ends the attempt, and later the connection, at once; so does the
    /// time when no source names the service any more.
    pub fn connect(
        &self,
        requester: &impl TicketRequester,
        judge: Option<Arc<dyn Judge>>,
    ) -> Result<TicketConnection, TicketFailure> {
        let socket = sys::net::connect(self.address, Instant::now() + CONNECT_TIMEOUT, &|| {
            self.over.is_stopped()
        })
        .map_err(|error| format!("cannot connect: {error}"))?;
        let held = self.over.hold(&socket).map_err(|error| error.to_string())?;
        let (demands, issuer) = (requester.demands(), requester.issuer().clone());
        let mut client = atls::Client::new(Some(issuer), None)
            .verify_strong(judge)
            .to_join_service();
        if demands.require_strong {
            client = client.require_strong();
        }
        let transport = client.connect(socket, Instant::now() + HANDSHAKE_TIMEOUT);
        let transport = transport.map_err(|error| {
            let mut failure = TicketFailure::from(&error);
            if error.is_other_form() && demands.require_strong {
                failure.text += "; the setting require=strong refuses such a service";
            }
            failure
        })?;
        let channel = Channel::new(transport, &self.address.to_string())
            .map_err(|status| TicketFailure::from_status(&status))?
            .with_message_bytes(MAX_TICKET);
        Ok(TicketConnection {
            channel,
            _held: held,
        })
    }
}

/// A connection to a join service.
pub struct TicketConnection {
    channel: Channel,
    _held: OnStop,
}

impl TicketConnection {
    /// Calls `method` of the join service.
    pub fn call<Q: Message, R: Message + Default>(
        &self,
        method: &str,
        request: &Q,
    ) -> Result<R, TicketFailure> {
        let options = CallOptions {
            timeout: Some(CALL_TIMEOUT),
            ..CallOptions::default()
        };
        let answer = self.channel.unary(method, request, &options);
        answer.map_err(|status| TicketFailure::from_status(&status))
    }
}

/// Requests a ticket from every join service that the sources list, which are asked in this order,
/// until [`TicketRequester::finished`].
///
/// # Errors
/// If no thread can be created.
pub fn start<R: TicketRequester>(
    sources: Vec<HostSource>,
    requester: Arc<R>,
) -> std::io::Result<Ending> {
    Ending::start("tickets", move || request_from_all(&sources, &requester))
}

fn request_from_all<R: TicketRequester>(sources: &[HostSource], requester: &Arc<R>) {
    let finished = requester.finished();
    let mut answers: Vec<_> = sources.iter().map(|_| HostsAnswer::default()).collect();
    let mut requests = Requests::new(requester);
    let mut backoff = Backoff::new(FIRST_PAUSE, LIST_INTERVAL);
    let mut is_first = true;
    while !finished.is_stopped() {
        let (mut is_complete, listing) = (true, Instant::now());
        for (source, answer) in sources.iter().zip(&mut answers) {
            is_complete &= resolve_all(source, answer, &**requester);
            requests.start(answer, listing);
            let is_enough = is_first && !requests.hosts.is_empty() && !source.goes_on;
            if finished.is_stopped() || is_enough {
                break;
            }
        }
        requests.forget();
        let has_none = requests.hosts.is_empty();
        if !has_none {
            requester.answered("metadata");
        } else if is_complete {
            let alone = TicketFailure::from("no other control plane is known".to_owned());
            requester.note("metadata", &alone);
        }
        if has_none {
            requester.unanswered();
            wait_for_network(finished, backoff.pause());
        } else if !finished.wait(LIST_INTERVAL) {
            requester.unanswered();
        }
        is_first &= has_none;
    }
    requests.end();
}

/// The threads that request tickets, one for each host.
struct Requests<'a, R> {
    requester: &'a Arc<R>,
    hosts: Hosts<Request>,
    /// Those of forgotten hosts.
    ending: Vec<JoinHandle<()>>,
}

/// The thread of one host, and what stops it.
struct Request {
    thread: JoinHandle<()>,
    over: Stop,
}

impl<'a, R: TicketRequester> Requests<'a, R> {
    fn new(requester: &'a Arc<R>) -> Requests<'a, R> {
        Requests {
            requester,
            hosts: Hosts::new(),
            ending: vec![],
        }
    }

    /// Starts threads for the hosts of a source that have none, except for this machine.
    fn start(&mut self, answer: &HostsAnswer, listing: Instant) {
        // this machine runs no join service before it has its ticket
        let own = sys::interfaces::addresses().unwrap_or_default();
        for host in answer.addresses() {
            if !host.is_loopback() && own.contains(&host) {
                continue;
            }
            let can_start = self.ending.len() < MAX_ENDING;
            let start = || start_one(host, self.requester).filter(|_| can_start);
            if let Some(displaced) = self.hosts.add(host, listing, start) {
                self.stop(displaced);
            }
        }
    }

    /// Stops the threads of the hosts that no source names any more.
    fn forget(&mut self) {
        while let Some(old) = self.hosts.forget(Instant::now()) {
            self.stop(old);
        }
        self.ending.retain(|thread| !thread.is_finished());
    }

    fn stop(&mut self, (host, Request { thread, over }): (IpAddr, Request)) {
        log::debug!("stopped asking join service {host}: no list of addresses has it any more");
        over.stop();
        self.ending.push(thread);
    }

    /// Waits for all threads, when no ticket is needed any more.
    fn end(self) {
        let threads = self.hosts.into_work().map(|request| request.thread);
        for thread in threads.chain(self.ending) {
            let _ = thread.join();
        }
    }
}

/// Starts the thread that requests tickets from the join service of a host.
fn start_one<R: TicketRequester>(host: IpAddr, requester: &Arc<R>) -> Option<Request> {
    let (requester, over) = (requester.clone(), Stop::new());
    let service = JoinServicePeer {
        address: SocketAddr::new(host, NODE_PORT),
        over: over.clone(),
    };
    let thread = thread::Builder::new().name("ticket-ask".into());
    let thread = thread
        .spawn(move || request_from(&service, &*requester))
        .inspect_err(|error| log::warn!("cannot create a thread for join service {host}: {error}"))
        .ok()?;
    Some(Request { thread, over })
}

/// Returns whether this machine has an address.
fn has_network() -> bool {
    let addresses = sys::interfaces::addresses().unwrap_or_default();
    addresses.iter().any(|address| !address.is_loopback())
}

/// Waits for `pause`, or until this machine gets an address, because then the network has just come
/// up.
fn wait_for_network(finished: &Stop, pause: Duration) {
    let addresses = || sys::interfaces::addresses().unwrap_or_default();
    let (before, end) = (addresses(), Instant::now() + pause);
    while Instant::now() < end && !finished.wait(NETWORK_INTERVAL) {
        if addresses() != before {
            // the route follows the address
            finished.wait(NETWORK_INTERVAL);
            return;
        }
    }
}

/// Requests tickets from one join service until one is accepted, no ticket is needed any more, or no
/// source names the service.
fn request_from<R: TicketRequester>(service: &JoinServicePeer, requester: &R) {
    let (name, over) = (service.to_string(), &service.over);
    let _finished = requester.finished().on_stop({
        let over = over.clone();
        move || over.stop()
    });
    let mut backoff = Backoff::new(FIRST_PAUSE, R::MAX_PAUSE);
    while !over.is_stopped() {
        requester.asked(&name);
        let Err(failure) = requester.request(service) else {
            return;
        };
        if over.is_stopped() {
            break;
        }
        requester.note(&name, &failure);
        let pause = failure.pause(&mut backoff, R::MAX_SERVER_PAUSE);
        if has_network() {
            over.wait(pause);
        } else {
            wait_for_network(over, pause);
        }
    }
    if !requester.finished().is_stopped() {
        requester.forget(&name);
    }
}

/// Asks a source for its hosts, and returns whether they are all. A name that cannot be resolved does
/// not hide the others.
fn resolve_all(
    source: &HostSource,
    answer: &mut HostsAnswer,
    requester: &impl TicketRequester,
) -> bool {
    let is_complete = ask(requester, source.name, || {
        let listing = (source.list)()?;
        let mut failed = None;
        answer.replace(listing.hosts, listing.is_complete, |host| {
            let addresses = resolve(host);
            addresses.map_err(|error| failed = Some(error)).ok()
        });
        failed.map_or(Ok(listing.is_complete), Err)
    });
    is_complete.unwrap_or_default()
}

/// Returns the addresses of a host name.
pub fn resolve(host: &str) -> Result<Vec<IpAddr>, TicketFailure> {
    let addresses = resolver::resolve(host, Instant::now() + LIST_INTERVAL);
    addresses.map_err(|error| error.to_string().into())
}

/// Asks one source, and records the wait and the result; `None` after an error.
pub fn ask<T>(
    requester: &impl TicketRequester,
    source: &str,
    question: impl FnOnce() -> Result<T, TicketFailure>,
) -> Option<T> {
    requester.asked(source);
    match question() {
        Ok(answer) => {
            requester.answered(source);
            Some(answer)
        }
        Err(failure) => {
            requester.note(source, &failure);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Mutex;

    use attest::{IssueError, MachineIdentity, Oid};
    use rpc::grpc::{Limits, Router, Server};
    use verifier::refusal::Kind;
    use verifier::{CredentialChallenge, Evidence, Identified, Properties, Refusal, Validator};

    use super::*;

    #[test]
    fn the_status_code_decides_whether_a_failure_lasts() {
        for (code, is_lasting) in [
            (Code::InvalidArgument, true),
            (Code::PermissionDenied, true),
            (Code::Unauthenticated, true),
            (Code::FailedPrecondition, true),
            (Code::Unavailable, false),
            (Code::ResourceExhausted, false),
            // the only code that Constellation sends
            (Code::Internal, false),
        ] {
            let failure = TicketFailure::from_status(&Status::new(code, "why"));
            assert_eq!(
                (failure.is_lasting, failure.retry_after),
                (is_lasting, None),
                "{code}"
            );
            assert!(failure.text.contains("why"));
        }
    }

    #[test]
    fn the_pause_that_a_server_asks_for_is_used_and_limited() {
        const MOST: Duration = Duration::from_secs(60);
        let busy = Status::new(Code::ResourceExhausted, "busy");
        let pause = |failure: TicketFailure| {
            failure
                .pause(&mut Backoff::new(FIRST_PAUSE, FIRST_PAUSE), MOST)
                .as_millis()
        };
        let asked = |hint| {
            pause(TicketFailure::from_status(
                &busy.clone().with_retry_after(hint),
            ))
        };
        assert!((2812..=3125).contains(&asked(Duration::from_millis(2500))));
        assert!(asked(Duration::from_secs(86_400)) < MOST.as_millis() * 5 / 4 + 1);
        assert!((1000..=1250).contains(&asked(Duration::ZERO)));
        assert!(pause(TicketFailure::from_status(&busy)) <= 1000);
        assert!((30_000..=60_000).contains(&pause(TicketFailure::lasting("mend it".into()))));
    }

    /// Attests with a document that anyone can make.
    struct AnyDocument;

    impl Issuer for AnyDocument {
        fn oid(&self) -> Oid {
            TEST_OID
        }

        fn issue(&self, _user_data: &[u8], _nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
            Ok(b"document".to_vec())
        }
    }

    /// Refuses every document.
    struct RefuseAll;

    impl Validator for RefuseAll {
        fn properties(&self) -> Properties {
            Properties {
                oid: TEST_OID,
                challenges: false,
                takes_collateral: false,
                requires_strong: false,
                believes_any_tpm: false,
            }
        }

        fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
            Ok(None)
        }

        fn judge(&self, _: &Evidence<'_>) -> Result<Identified, Refusal> {
            Err(Kind::Unproven.because("PCR 4 differs"))
        }

        fn of_connection(&self) -> Option<Arc<dyn Validator>> {
            None
        }
    }

    /// 1.3.9900.1.1, Constellation's dummy variant.
    const TEST_OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x01, 0x01];

    struct Requester(Stop, Arc<dyn Issuer>, TrustSettings);

    /// Records one listing, and makes no connection.
    #[derive(Default)]
    struct Asking {
        finished: Stop,
        settings: TrustSettings,
        asked: Mutex<Vec<String>>,
        notes: Mutex<Vec<String>>,
    }

    impl TicketRequester for Asking {
        const MAX_PAUSE: Duration = FIRST_PAUSE;
        const MAX_SERVER_PAUSE: Duration = FIRST_PAUSE;

        fn finished(&self) -> &Stop {
            &self.finished
        }

        fn issuer(&self) -> &Arc<dyn Issuer> {
            unreachable!("no connection is made")
        }

        fn demands(&self) -> &TrustSettings {
            &self.settings
        }

        fn request(&self, _: &JoinServicePeer) -> Result<(), TicketFailure> {
            Ok(())
        }

        fn unanswered(&self) {
            self.finished.stop();
        }

        fn asked(&self, source: &str) {
            if !source.starts_with("join service") {
                self.asked.lock().unwrap().push(source.into());
            }
        }

        fn answered(&self, source: &str) {
            if source == "metadata" {
                self.finished.stop();
            }
        }

        fn note(&self, source: &str, failure: &TicketFailure) {
            let note = format!("{source}: {}", failure.text);
            self.notes.lock().unwrap().push(note);
        }

        fn forget(&self, _: &str) {}
    }

    /// A name, whether the first listing goes on, and the hosts or an error.
    type TestSource = (&'static str, bool, Result<&'static str, &'static str>);

    /// Asks these sources in one listing, and returns the names of those that were asked, and the
    /// notes.
    fn list_once(sources: &[TestSource]) -> (Vec<String>, Vec<String>) {
        let source = |&(name, goes_on, answer): &TestSource| {
            let list = move || {
                let hosts = answer.map_err(|why| TicketFailure::from(why.to_owned()))?;
                let hosts = hosts.split_whitespace().map(str::to_owned).collect();
                let is_complete = true;
                Ok(Listing { hosts, is_complete })
            };
            HostSource {
                name,
                goes_on,
                list: Arc::new(list),
            }
        };
        let asking = Arc::new(Asking::default());
        request_from_all(&sources.iter().map(source).collect::<Vec<_>>(), &asking);
        let take = |list: &Mutex<Vec<String>>| std::mem::take(&mut *list.lock().unwrap());
        (take(&asking.asked), take(&asking.notes))
    }

    #[test]
    fn no_other_control_plane_is_known_only_if_every_source_has_answered() {
        let (asked, notes) = list_once(&[("a", false, Ok("")), ("b", false, Ok(""))]);
        assert_eq!(asked, ["a", "b"]);
        assert_eq!(notes, ["metadata: no other control plane is known"]);
        for (one, other, expected) in [
            (Ok(""), Err("down"), "b: down"),
            (Err("down"), Ok(""), "a: down"),
        ] {
            let (_, notes) = list_once(&[("a", false, one), ("b", false, other)]);
            assert_eq!(notes, [expected]);
        }
    }

    #[test]
    fn the_first_listing_ends_at_a_host_unless_the_source_goes_on() {
        const HOST: Result<&str, &str> = Ok("127.0.0.1");
        for (goes_on, expected) in [(true, &["a", "b"][..]), (false, &["a"])] {
            let sources = [("a", goes_on, HOST), ("b", false, HOST), ("c", false, HOST)];
            assert_eq!(list_once(&sources).0, expected);
        }
    }

    impl TicketRequester for Requester {
        const MAX_PAUSE: Duration = FIRST_PAUSE;
        const MAX_SERVER_PAUSE: Duration = FIRST_PAUSE;

        fn finished(&self) -> &Stop {
            &self.0
        }

        fn issuer(&self) -> &Arc<dyn Issuer> {
            &self.1
        }

        fn demands(&self) -> &TrustSettings {
            &self.2
        }

        fn request(&self, service: &JoinServicePeer) -> Result<(), TicketFailure> {
            service.connect(self, None)?.call("/test.Test/Ticket", &())
        }

        fn asked(&self, _source: &str) {}

        fn answered(&self, _source: &str) {}

        fn note(&self, _source: &str, _failure: &TicketFailure) {}

        fn forget(&self, _source: &str) {}
    }

    fn service_at(address: SocketAddr) -> JoinServicePeer {
        let over = Stop::new();
        JoinServicePeer { address, over }
    }

    #[test]
    fn a_server_with_too_many_connections_says_by_a_tls_alert_when_to_come_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let service = service_at(listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            // a record of TLS with a fatal alert of the number 234 (docs/protocol.md)
            std::io::Write::write_all(&mut socket, &[21, 3, 3, 0, 2, 2, 234]).unwrap();
            // the client closes the connection
            let _ = std::io::copy(&mut socket, &mut std::io::sink());
        });
        let failure = Requester(Stop::new(), Arc::new(AnyDocument), TrustSettings::default())
            .request(&service)
            .unwrap_err();
        let asked = failure.retry_after.map(|pause| pause.as_millis());
        assert_eq!((asked, failure.is_lasting), (Some(12_989), false));
        assert!(
            failure.text.contains("is busy with other peers"),
            "{}",
            failure.text
        );
        server.join().unwrap();
    }

    #[test]
    fn a_server_that_refuses_the_attestation_is_recognized_by_its_tls_alert() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let service = service_at(listener.local_addr().unwrap());
        let server = atls::Server::new(None, Some(verifier::judge(Arc::new(RefuseAll))));
        // Constellation's services send no evidence themselves
        let transport = Arc::new(server.only_old());
        let (router, limits) = (Router::new(), Limits::default());
        let server = Server::start("test", listener, transport, router, limits).unwrap();
        let failure = Requester(Stop::new(), Arc::new(AnyDocument), TrustSettings::default())
            .request(&service)
            .unwrap_err();
        server.stop(Duration::ZERO);
        assert!(failure.is_lasting, "{failure:?}");
        assert_eq!(failure.retry_after, Some(REFUSED_PAUSE));
        assert!(
            failure.text.contains("refused this machine's attestation"),
            "{failure:?}"
        );
    }

    #[test]
    fn the_words_of_a_server_do_not_make_a_failure_a_refused_attestation() {
        // the end of our own error text for such an alert
        let words = "alert AccessDenied: it refused this machine's attestation (its log says why)";
        let status = Status::new(Code::Unavailable, words);
        let failure = TicketFailure::from_status(&status);
        assert!(!failure.is_lasting, "{failure:?}");
        assert_eq!(failure.retry_after, None);
    }
}
