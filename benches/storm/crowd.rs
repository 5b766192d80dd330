//! Nodes that ask for a ticket until they have one. Thousands of them run in one thread, as a loop over non-blocking sockets, so
//! that the measurement shows the service and not the threads of the nodes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use base::backoff::Backoff;
use base::crypto::random;
use base64::Engine;
use base64::prelude::BASE64_STANDARD_NO_PAD;
use kubernetes::certificate_request::kubelet_request::KubeletRequest;
use kubernetes::parameters::NodeName;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use prost::Message;
use proto::join::ISSUE_JOIN_TICKET;
use proto::join::{IssueJoinTicketRequest, IssueJoinTicketResponse};
use rpc::grpc::{Code, Status};
use rpc::h2::{Connection, Event, Field, H2Limits, HeaderList, Indexing, SendError};
use rustls::{AlertDescription, ClientConnection};
use socket2::{Domain, Socket, Type};
use verifier::Issuer;

/// The time limits of a node, as in its JoinClient: from the first byte to the end of the handshake, and for the call.
const CONNECT: Duration = Duration::from_secs(20);
const CALL: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause that a node accepts from a service.
const LONGEST_TOLD: Duration = Duration::from_secs(600);
/// Maximum number of sockets that one poll reports.
const EVENTS: usize = 1024;

/// The time of a node from its arrival to its ticket, and the number of its attempts.
pub struct Joined {
    pub wait: Duration,
    pub tries: usize,
}

/// Makes all nodes ask at once, until each has its ticket or `end` has come. `joined` gets the
/// index of each node with a ticket. Errors on a permanent refusal.
pub fn storm(
    nodes: &mut [JoiningNode],
    services: &[SocketAddr],
    end: Instant,
    joined: &Sender<usize>,
) -> Result<Vec<Joined>, String> {
    let mut crowd = Crowd {
        nodes,
        services,
        poll: Poll::new().map_err(text)?,
        timers: BinaryHeap::new(),
    };
    let arrived = Instant::now();
    for index in 0..crowd.nodes.len() {
        crowd.wake_at(index, arrived);
    }
    let mut done = Vec::new();
    let mut events = Events::with_capacity(EVENTS);
    while done.len() < crowd.nodes.len() && Instant::now() < end {
        let mut ready = crowd.due();
        let first = crowd.timers.peek().map_or(end, |Reverse((at, _))| *at);
        let pause = if ready.is_empty() {
            first.min(end).saturating_duration_since(Instant::now())
        } else {
            Duration::ZERO
        };
        match crowd.poll.poll(&mut events, Some(pause)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => result.map_err(text)?,
        }
        ready.extend(events.iter().map(|event| event.token().0));
        for index in ready {
            if crowd.go_on(index)? {
                let node = &crowd.nodes[index];
                done.push(Joined {
                    wait: arrived.elapsed(),
                    tries: node.tries,
                });
                let _ = joined.send(node.number);
            }
        }
    }
    Ok(done)
}

fn text(error: impl Display) -> String {
    error.to_string()
}

struct Crowd<'a> {
    nodes: &'a mut [JoiningNode],
    /// The replicas behind one address: each connection goes to any of them, as with a load balancer.
    services: &'a [SocketAddr],
    poll: Poll,
    /// Wakes a node at this time. The timer counts only if the node still has the same time.
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
}

impl Crowd<'_> {
    fn wake_at(&mut self, index: usize, at: Instant) {
        self.nodes[index].wakes_at = Some(at);
        self.timers.push(Reverse((at, index)));
    }

    /// Returns the nodes whose time has come.
    fn due(&mut self) -> Vec<usize> {
        let now = Instant::now();
        let mut due = Vec::new();
        while let Some(Reverse((at, index))) = self.timers.peek().copied()
            && at <= now
        {
            self.timers.pop();
            if self.nodes[index].wakes_at == Some(at) {
                due.push(index);
            }
        }
        due
    }

    /// Advances a node; returns whether it has its ticket.
    fn go_on(&mut self, index: usize) -> Result<bool, String> {
        let now = Instant::now();
        let node = &mut self.nodes[index];
        let is_late = node.wakes_at.is_some_and(|at| at <= now);
        let result = match &mut node.attempt {
            // The socket of the previous attempt may still be reported.
            None if !is_late => return Ok(false),
            None => {
                node.tries += 1;
                Attempt::begin(
                    node.tls.begin().map_err(text)?,
                    node.own,
                    self.services[usize::from(random::<1>()[0]) % self.services.len()],
                    &self.poll,
                    index,
                )
                .map(|attempt| _ = node.attempt.insert(attempt))
                .map(|()| Step::Waits(now + CONNECT))
            }
            Some(_) if is_late => Err(Status::new(
                Code::DeadlineExceeded,
                "the time of this attempt is over",
            )),
            Some(attempt) => attempt.advance(&node.request, now),
        };
        match result {
            Ok(Step::Waits(until)) => {
                if node.wakes_at != Some(until) {
                    self.wake_at(index, until);
                }
                Ok(false)
            }
            Ok(Step::Ended(ticket)) => {
                (node.attempt, node.wakes_at) = (None, None);
                if ticket.token.is_empty() || ticket.kubelet_cert.is_empty() {
                    return Err(format!(
                        "node {} has a ticket without a token or a certificate",
                        node.number
                    ));
                }
                Ok(true)
            }
            Err(status) => {
                node.attempt = None;
                let pause = node.pause(&status)?;
                self.wake_at(index, now + pause);
                Ok(false)
            }
        }
    }
}

/// A node that wants to join.
pub struct JoiningNode {
    number: usize,
    /// The address from which it calls.
    own: IpAddr,
    tls: atls::Client,
    /// The request on the wire: one byte for the compression, four for the length (gRPC over HTTP/2), and the message.
    request: Vec<u8>,
    backoff: Backoff,
    tries: usize,
    attempt: Option<Attempt>,
    wakes_at: Option<Instant>,
}

impl JoiningNode {
    pub fn new(number: usize, name: &str, address: IpAddr, tpm: Arc<dyn Issuer>) -> JoiningNode {
        let request = KubeletRequest::new(&NodeName::from_machine(name).unwrap(), address).unwrap();
        let request = IssueJoinTicketRequest {
            disk_uuid: format!("0f5b7c1e-93a4-4d2b-8c6d-{number:012x}"),
            certificate_request: request.der().to_vec(),
            is_control_plane: false,
            // RFC 4253 §6.6: two strings, each with its length.
            host_public_key: [&[0, 0, 0, 11][..], b"ssh-ed25519", &[0, 0, 0, 32], &[9; 32]]
                .concat(),
            host_certificate_principals: vec![address.to_string()],
            accepts_cluster_ca: true,
            has_client_key: false,
        }
        .encode_to_vec();
        let length = (request.len() as u32).to_be_bytes();
        // as different machines have: the service has limits for each address
        let own = Ipv4Addr::from_bits(0x7f40_0001 + number as u32).into();
        JoiningNode {
            number,
            own,
            tls: atls::Client::new(Some(tpm), None),
            request: [&[0][..], &length, &request].concat(),
            backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
            tries: 0,
            attempt: None,
            wakes_at: None,
        }
    }

    /// Returns how long to wait before the next attempt. Errors on a permanent refusal.
    fn pause(&mut self, status: &Status) -> Result<Duration, String> {
        let passes = [
            Code::Unavailable,
            Code::ResourceExhausted,
            Code::DeadlineExceeded,
            Code::Cancelled,
        ];
        if !passes.contains(&status.code()) {
            return Err(format!(
                "node {} is refused after {} attempts: {status}",
                self.number, self.tries
            ));
        }
        let pause = self.backoff.pause();
        let told = (status.retry_after()).map(|told| told.clamp(FIRST_PAUSE, LONGEST_TOLD));
        Ok(told.map_or(pause, |told| told + Backoff::new(told / 4, told).pause()))
    }
}

/// One connection with one call.
struct Attempt {
    socket: TcpStream,
    tls: ClientConnection,
    call: Option<Call>,
    until: Instant,
}

enum Step {
    /// The attempt waits for its socket until this time.
    Waits(Instant),
    Ended(Box<IssueJoinTicketResponse>),
}

struct Call {
    h2: Connection,
    is_sent: bool,
    /// The received part of the current frame.
    input: Vec<u8>,
    answer: Vec<u8>,
}

fn lost(error: &dyn Display) -> Status {
    Status::new(Code::Unavailable, error.to_string())
}

/// A server that refuses the machine itself will not change its decision.
fn broken(error: &rustls::Error) -> Status {
    match error {
        rustls::Error::AlertReceived(AlertDescription::AccessDenied) => {
            Status::new(Code::PermissionDenied, error.to_string())
        }
        rustls::Error::AlertReceived(alert) => match atls::pause_of(*alert) {
            Some(pause) => lost(error).with_retry_after(pause),
            None => lost(error),
        },
        _ => lost(error),
    }
}

impl Attempt {
    fn begin(
        tls: ClientConnection,
        own: IpAddr,
        service: SocketAddr,
        poll: &Poll,
        index: usize,
    ) -> Result<Attempt, Status> {
        let mut socket = connect(own, service).map_err(|error| lost(&error))?;
        let all = Interest::READABLE | Interest::WRITABLE;
        poll.registry()
            .register(&mut socket, Token(index), all)
            .map_err(|error| lost(&error))?;
        Ok(Attempt {
            socket,
            tls,
            call: None,
            until: Instant::now() + CONNECT,
        })
    }

    /// Advances as far as the socket allows, because the kernel reports each readiness only once.
    fn advance(&mut self, request: &[u8], now: Instant) -> Result<Step, Status> {
        loop {
            while self.tls.wants_write() {
                match self.tls.write_tls(&mut self.socket) {
                    Err(error) if is_not_yet(&error) => break,
                    result => result.map_err(|error| lost(&error))?,
                };
            }
            match self.tls.read_tls(&mut self.socket) {
                Ok(0) => return Err(lost(&"the server closed the connection")),
                Ok(_) => {}
                Err(error) if is_not_yet(&error) => return Ok(Step::Waits(self.until)),
                Err(error) => return Err(lost(&error)),
            }
            self.tls
                .process_new_packets()
                .map_err(|error| broken(&error))?;
            if self.tls.is_handshaking() {
                continue;
            }
            let call = self.call.get_or_insert_with(|| {
                self.until = now + CALL;
                Call {
                    h2: Connection::client(H2Limits::default()),
                    is_sent: false,
                    input: vec![],
                    answer: vec![],
                }
            });
            match self.tls.reader().read_to_end(&mut call.input) {
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(lost(&error)),
                _ => {}
            }
            let ended = call.receive(now)?;
            call.send(request)?;
            self.tls
                .writer()
                .write_all(&std::mem::take(call.h2.output()))
                .map_err(|error| lost(&error))?;
            if let Some(ticket) = ended {
                return Ok(Step::Ended(Box::new(ticket)));
            }
        }
    }
}

/// Begins to connect from an address of this machine.
fn connect(own: IpAddr, service: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None)?;
    socket.bind(&SocketAddr::new(own, 0).into())?;
    match socket.connect(&service.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(TcpStream::from_std(socket.into())),
    }
}

/// ENOTCONN means that the socket is not connected yet.
fn is_not_yet(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::NotConnected
    )
}

impl Call {
    /// Sends the request once the server's SETTINGS have arrived.
    fn send(&mut self, request: &[u8]) -> Result<(), Status> {
        if self.is_sent || !self.h2.is_established() {
            return Ok(());
        }
        let timeout = format!("{}S", CALL.as_secs());
        let fields: [Field; 7] = [
            (b":method", b"POST", Indexing::Yes),
            (b":scheme", b"https", Indexing::Yes),
            (b":path", ISSUE_JOIN_TICKET.as_bytes(), Indexing::Yes),
            (b":authority", b"join-service", Indexing::Yes),
            (b"te", b"trailers", Indexing::Yes),
            (b"content-type", b"application/grpc", Indexing::Yes),
            (b"grpc-timeout", timeout.as_bytes(), Indexing::No),
        ];
        let refused = |error: SendError| lost(&format!("the server accepts no call: {error:?}"));
        let stream = self.h2.open(fields.into_iter(), false).map_err(refused)?;
        match self.h2.send_data(stream, request, true).map_err(refused)? {
            sent if sent == request.len() => self.is_sent = true,
            sent => {
                return Err(lost(&format!(
                    "the server accepts only {sent} bytes of a request"
                )));
            }
        }
        Ok(())
    }

    /// Processes received frames. Returns the ticket, or the refusal, at the end of the call.
    fn receive(&mut self, now: Instant) -> Result<Option<IssueJoinTicketResponse>, Status> {
        let mut taken = 0;
        let ended = loop {
            let (length, event) = self
                .h2
                .receive(&self.input[taken..], now)
                .map_err(|error| lost(&error))?;
            taken += length;
            match event {
                Some(Event::Headers { end: true, .. } | Event::Trailers { .. }) => break true,
                Some(Event::Data { stream, data, .. }) => {
                    self.answer.extend_from_slice(data);
                    let length = data.len() as u32;
                    self.h2.release(stream, length);
                }
                Some(Event::Reset { code, .. }) => {
                    return Err(lost(&format!("the call was reset: {code}")));
                }
                Some(Event::GoAway { code, .. }) => {
                    return Err(lost(&format!("the server ends the connection: {code}")));
                }
                _ if length == 0 => break false,
                _ => {}
            }
        };
        self.input.drain(..taken);
        if !ended {
            return Ok(None);
        }
        status(self.h2.headers())?;
        let message = self.answer.get(5..).unwrap_or_default();
        let ticket = IssueJoinTicketResponse::decode(message);
        ticket
            .map(Some)
            .map_err(|error| Status::new(Code::Internal, error.to_string()))
    }
}

/// Reads `grpc-status` and the related fields.
fn status(fields: &HeaderList) -> Result<(), Status> {
    let text = |name: &[u8]| {
        fields
            .get(name)
            .map(|value| String::from_utf8_lossy(value).into_owned())
            .unwrap_or_default()
    };
    let code = match &*text(b"grpc-status") {
        "0" => return Ok(()),
        "1" => Code::Cancelled,
        "4" => Code::DeadlineExceeded,
        "8" => Code::ResourceExhausted,
        "14" => Code::Unavailable,
        _ => Code::Unknown,
    };
    let details =
        BASE64_STANDARD_NO_PAD.decode(text(b"grpc-status-details-bin").trim_end_matches('='));
    let message = format!(
        "{} (grpc-status {})",
        text(b"grpc-message"),
        text(b"grpc-status")
    );
    Err(Status::new(code, message).with_details(details.unwrap_or_default()))
}
