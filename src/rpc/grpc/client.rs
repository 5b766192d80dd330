//! The client: one connection with any number of concurrent calls.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use prost::Message;

use super::header_values::{format_timeout, is_grpc_type};
use super::link::{CallState, Core, Guard, Link, Side, TICK, h2_limits};
use super::message;
use super::metadata::Metadata;
use super::server::Limits;
use super::status::{Code, Status, status_of};
use super::transport::Transport;
use crate::h2::{Connection, ErrorCode, Field, Indexing, SendError};
use crate::share::PeerShare;
use base::crypto::buffer::Bytes;

/// The default of a client. The servers of grpc-go end a connection that gets a PING more often
/// than every five minutes (its `EnforcementPolicy`).
const KEEPALIVE: Keepalive = Keepalive {
    every: Duration::from_secs(310),
    timeout: Duration::from_secs(20),
};
/// How long a server may not read what we send.
const STALL: Duration = Duration::from_secs(60);
/// Longest interval at which the keeper checks a connection that another thread reads.
const LONGEST_TICK: Duration = Duration::from_millis(640);
const USER_AGENT: &[u8] = concat!("firstlight/", env!("CARGO_PKG_VERSION")).as_bytes();

/// How a client with open calls detects that its server is gone.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    /// Time without a byte from the server after which a PING is sent.
    pub every: Duration,
    /// Time without a byte after that PING until the connection and all its calls end with
    /// [`Code::Unavailable`].
    pub timeout: Duration,
}

/// The options of a call.
#[derive(Clone, Debug, Default)]
pub struct CallOptions {
    /// Time limit for the call, sent to the server as `grpc-timeout`. After it, the call ends with
    /// [`Code::DeadlineExceeded`].
    pub timeout: Option<Duration>,
    /// Custom metadata of the request headers.
    pub metadata: Metadata,
}

/// A client connection. Its clones share it; it closes when the last one is dropped.
#[derive(Clone)]
pub struct Channel {
    connection: Arc<ClientConnection>,
    message_bytes: usize,
}

struct ClientConnection {
    link: Arc<Link>,
    scheme: &'static str,
    authority: String,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Channel {
    /// Starts HTTP/2 on an established connection. `authority` is the `:authority` of the requests
    /// (`host:port`).
    pub fn new(transport: Transport, authority: &str) -> Result<Channel, Status> {
        Channel::with_keepalive(transport, authority, KEEPALIVE)
    }

    /// Starts HTTP/2 with custom PING times.
    pub fn with_keepalive(
        transport: Transport,
        authority: &str,
        keepalive: Keepalive,
    ) -> Result<Channel, Status> {
        let broken = |error| {
            Status::new(
                Code::Unavailable,
                format!("the connection cannot be used: {error}"),
            )
        };
        let limits = Limits::default();
        let h2 = Connection::client(h2_limits(limits.streams, limits.header_bytes));
        let scheme = transport.scheme;
        let link = Link::new(transport, h2, Side::Client, STALL, PeerShare::unlimited())
            .map_err(broken)?;
        drop(link.flush(link.lock()));
        let kept = link.clone();
        let keep = move || keep(&kept, keepalive);
        let keeper = thread::Builder::new()
            .name("grpc-keeper".into())
            .spawn(keep)
            .map_err(broken)?;
        let connection = ClientConnection {
            link,
            scheme,
            authority: authority.to_owned(),
            keeper: Mutex::new(Some(keeper)),
        };
        Ok(Channel {
            connection: Arc::new(connection),
            message_bytes: limits.message_bytes,
        })
    }

    /// Sets the maximum size of a response message in bytes; the default is 4 MiB.
    pub fn with_message_bytes(mut self, message_bytes: usize) -> Channel {
        self.message_bytes = message_bytes;
        self
    }

    /// Makes a call with one request and one response. `path` is `/package.Service/Method`.
    pub fn unary<Q: Message, R: Message + Default>(
        &self,
        path: &str,
        request: &Q,
        options: &CallOptions,
    ) -> Result<R, Status> {
        let request = message::encode(request)?;
        let (call, core) = self.start(path, options)?;
        let (core, sent) =
            call.connection
                .link
                .send(core, call.stream, &request, true, call.deadline);
        sent?;
        message::decode(&call.receive_one(core)?, "response")
    }

    /// Makes a call with one request and any number of responses.
    pub fn server_streaming<Q: Message, R: Message + Default>(
        &self,
        path: &str,
        request: &Q,
        options: &CallOptions,
    ) -> Result<Responses<R>, Status> {
        let request = message::encode(request)?;
        let (call, core) = self.start(path, options)?;
        call.send(core, &request, true)?;
        Ok(Responses {
            call: Arc::new(call),
            ended: false,
            spent: Bytes::default(),
            message: PhantomData,
        })
    }

    /// Makes a call with any number of requests and responses, in the order that the method
    /// defines. For a client-streaming method, [`Responses::one`] returns the only response.
    pub fn streaming<Q: Message, R: Message + Default>(
        &self,
        path: &str,
        options: &CallOptions,
    ) -> Result<(Requests<Q>, Responses<R>), Status> {
        let (call, core) = self.start(path, options)?;
        drop(call.connection.link.flush(core));
        let call = Arc::new(call);
        let requests = Requests {
            call: call.clone(),
            finished: false,
            message: PhantomData,
        };
        Ok((
            requests,
            Responses {
                call,
                ended: false,
                spent: Bytes::default(),
                message: PhantomData,
            },
        ))
    }

    /// Closes the connection now; waiting calls of other threads end with [`Code::Unavailable`].
    pub fn close(&self) {
        self.connection.close();
    }

    /// Opens a stream for a call and puts its headers into the output. The connection stays locked.
    fn start<'a>(
        &'a self,
        path: &str,
        options: &CallOptions,
    ) -> Result<(ClientCall, Guard<'a>), Status> {
        let started = Instant::now();
        let deadline = options
            .timeout
            .and_then(|timeout| started.checked_add(timeout));
        let timeout = options.timeout.map(format_timeout);
        let connection = &self.connection;
        let fields = || {
            let fixed: [Field; 7] = [
                (b":method", b"POST", Indexing::Yes),
                (b":scheme", connection.scheme.as_bytes(), Indexing::Yes),
                (b":path", path.as_bytes(), Indexing::Yes),
                (
                    b":authority",
                    connection.authority.as_bytes(),
                    Indexing::Yes,
                ),
                (b"te", b"trailers", Indexing::Yes),
                (b"content-type", b"application/grpc", Indexing::Yes),
                (b"user-agent", USER_AGENT, Indexing::Yes),
            ];
            let timeout = timeout
                .iter()
                .map(|text| (&b"grpc-timeout"[..], text.as_bytes(), Indexing::No));
            fixed
                .into_iter()
                .chain(timeout)
                .chain(options.metadata.fields())
        };
        // The server's limits are in its SETTINGS.
        let limit = deadline.or_else(|| started.checked_add(STALL));
        let has_settings = |core: &mut Core| core.h2.has_settings().then_some(());
        let (mut core, begun) =
            connection
                .link
                .wait(connection.link.lock(), 0, limit, has_settings);
        begun?;
        let stream = loop {
            if let Some(status) = &core.ended {
                return Err(status.clone());
            }
            match core.h2.open(fields(), false) {
                Ok(stream) => break stream,
                Err(SendError::TooMany) => core = connection.link.wait_for_slot(core, deadline)?,
                Err(SendError::TooLarge) => {
                    return Err(Status::new(
                        Code::ResourceExhausted,
                        "the metadata exceeds the server's limit",
                    ));
                }
                Err(_) => {
                    let why = core.goaway_text.as_deref().unwrap_or_default();
                    let text = format!("the server accepts no more calls on this connection{why}");
                    return Err(Status::new(Code::Unavailable, text).unprocessed());
                }
            }
        };
        core.calls.insert(
            stream,
            CallState::new(self.message_bytes, started, deadline),
        );
        Ok((
            ClientCall {
                connection: connection.clone(),
                stream,
                deadline,
            },
            core,
        ))
    }
}

impl ClientConnection {
    fn close(&self) {
        let mut core = self.link.lock();
        if core.ended.is_none() {
            core.h2.goaway(ErrorCode::NO_ERROR, "");
            drop(self.link.end_after_flush(
                core,
                Status::new(Code::Unavailable, "the channel was closed"),
            ));
        }
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        self.close();
        let keeper = self
            .keeper
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(keeper) = keeper {
            keeper.thread().unpark();
            // The keeper runs nothing that can panic or block now.
            let _ = keeper.join();
        }
    }
}

/// Runs the keeper. It reads the connection while no caller does, so that PINGs are answered and a
/// lost server is noticed. It leaves the reading half to the next caller that waits.
fn keep(link: &Link, keepalive: Keepalive) {
    let mut tick = TICK;
    loop {
        thread::park_timeout(tick);
        let was_attended = link.is_attended();
        let is_neglected = link.is_neglected();
        tick = if was_attended {
            (2 * tick).min(LONGEST_TICK)
        } else {
            TICK
        };
        let mut core = link.lock();
        if is_neglected {
            tick = TICK;
            if core.calls.is_empty() {
                core.trim();
            }
            core.yield_reader();
        }
        loop {
            let has_calls =
                !core.h2.has_settings() || core.calls.values().any(|call| call.end.is_none());
            if has_calls && core.keepalive(keepalive.every, keepalive.timeout, Instant::now()) {
                link.end(
                    &mut core,
                    Status::new(
                        Code::Unavailable,
                        "the server did not answer a PING in time",
                    ),
                );
            }
            core = link.flush(core);
            if core.ended.is_some() {
                return;
            }
            if !is_neglected || !core.is_free() || core.is_output_full() {
                break;
            }
            core = link.read_turn(core, Some(keepalive.every.min(keepalive.timeout)));
            if core.yield_reader() {
                break;
            }
        }
    }
}

/// An open call; dropping it before its end cancels it.
struct ClientCall {
    connection: Arc<ClientConnection>,
    stream: u32,
    deadline: Option<Instant>,
}

impl ClientCall {
    fn send(&self, core: Guard<'_>, message: &[u8], end: bool) -> Result<(), Status> {
        let link = &self.connection.link;
        let (core, result) = link.send(core, self.stream, message, end, self.deadline);
        drop(link.flush(core));
        result
    }

    /// Waits for the next message. The buffer of `spent` is reused for a later one.
    fn receive(&self, spent: Bytes) -> Result<Option<Bytes>, Status> {
        let link = &self.connection.link;
        let mut core = link.lock();
        if let Some(call) = core.calls.get_mut(&self.stream) {
            call.inbound.reuse(spent);
        }
        link.receive(core, self.stream, self.deadline).1
    }

    /// Waits for the successful end of the call and returns its only response.
    fn receive_one(&self, core: Guard<'_>) -> Result<Bytes, Status> {
        let (mut core, ended) =
            self.connection
                .link
                .wait(core, self.stream, self.deadline, |core| {
                    let call = core.calls.get_mut(&self.stream)?;
                    (call.inbound.waiting() > 1)
                        .then_some(Ok(()))
                        .or_else(|| call.end.clone())
                });
        ended??;
        let inbound = &mut core
            .calls
            .get_mut(&self.stream)
            .ok_or_else(unknown_call)?
            .inbound;
        match (inbound.pop(), inbound.pop()) {
            (Some(response), None) => Ok(response),
            (None, _) => Err(Status::new(
                Code::Internal,
                "the server ended the call with OK but sent no message",
            )),
            _ => Err(Status::new(
                Code::Internal,
                "the server sent several messages for a call with one response",
            )),
        }
    }
}

fn unknown_call() -> Status {
    Status::new(Code::Internal, "the connection does not know the call")
}

impl Drop for ClientCall {
    fn drop(&mut self) {
        let link = &self.connection.link;
        let mut core = link.lock();
        core.calls.remove(&self.stream);
        // Does nothing if the stream is closed, as it is after a complete call.
        core.h2.reset(self.stream, ErrorCode::CANCEL);
        drop(link.flush(core));
    }
}

/// The responses of a streaming call as they arrive. The iterator ends after the first error.
/// Dropping it earlier cancels the call once its [`Requests`] are dropped or finished.
pub struct Responses<R> {
    call: Arc<ClientCall>,
    ended: bool,
    spent: Bytes,
    message: PhantomData<fn() -> R>,
}

impl<R> Responses<R> {
    /// Waits for the response's headers and returns their custom metadata; `None` if the call ended
    /// without headers.
    pub fn headers(&self) -> Result<Option<Metadata>, Status> {
        let call = &self.call;
        let link = &call.connection.link;
        let (core, found) = link.wait(link.lock(), call.stream, call.deadline, |core| {
            let state = core.calls.get(&call.stream)?;
            (state.headers.is_some() || state.end.is_some()).then(|| state.headers.clone())
        });
        drop(core);
        found
    }

    /// Returns the custom metadata of the trailers; empty before the end of the call.
    pub fn trailers(&self) -> Metadata {
        let core = self.call.connection.link.lock();
        core.calls
            .get(&self.call.stream)
            .map(|state| state.trailers.clone())
            .unwrap_or_default()
    }
}

impl<R: Message + Default> Responses<R> {
    /// Waits for the end of a call that has one response, such as a client-streaming call.
    pub fn one(&mut self) -> Result<R, Status> {
        self.ended = true;
        message::decode(
            &self.call.receive_one(self.call.connection.link.lock())?,
            "response",
        )
    }
}

impl<R: Message + Default> Iterator for Responses<R> {
    type Item = Result<R, Status>;

    fn next(&mut self) -> Option<Result<R, Status>> {
        if self.ended {
            return None;
        }
        let received = self.call.receive(std::mem::take(&mut self.spent));
        let item = received.and_then(|bytes| {
            let Some(bytes) = bytes else { return Ok(None) };
            let response = message::decode(&bytes, "response")?;
            self.spent = bytes;
            Ok(Some(response))
        });
        self.ended = !matches!(item, Ok(Some(_)));
        item.transpose()
    }
}

/// Sends the requests of a streaming call. Dropping it before [`Requests::finish`] cancels the
/// call.
pub struct Requests<Q> {
    call: Arc<ClientCall>,
    finished: bool,
    message: PhantomData<fn(&Q)>,
}

impl<Q: Message> Requests<Q> {
    /// Sends one request; blocks while the server reads more slowly than we send. After an error,
    /// [`Responses`] has the reason.
    pub fn send(&mut self, request: &Q) -> Result<(), Status> {
        let request = message::encode(request)?;
        self.call
            .send(self.call.connection.link.lock(), &request, false)
    }

    /// Tells the server that no more requests follow.
    pub fn finish(mut self) -> Result<(), Status> {
        self.finished = true;
        self.call.send(self.call.connection.link.lock(), &[], true)
    }
}

impl<Q> Drop for Requests<Q> {
    fn drop(&mut self) {
        if !self.finished {
            let link = &self.call.connection.link;
            let mut core = link.lock();
            core.finish(
                self.call.stream,
                Err(Status::new(
                    Code::Cancelled,
                    "the caller stopped before its last request",
                )),
            );
            drop(link.flush(core));
        }
    }
}

impl Core {
    /// Handles the response's headers; with `end`, they are also its trailers.
    pub(super) fn response(&mut self, stream: u32, end: bool) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        let headers = self.h2.headers();
        let http = headers.get(b":status").unwrap_or_default();
        let kind = headers.get(b"content-type").unwrap_or_default();
        if http != b"200" || !is_grpc_type(kind) {
            // The peer is no gRPC server, unless the headers have a `grpc-status`.
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let strange = format!(
                "not a gRPC response: HTTP status {}, content-type {:?}",
                text(http),
                text(kind)
            );
            let status = status_of(headers)
                .unwrap_or_else(|| Err(Status::new(Code::from_http(http), strange)));
            return self.finish(stream, status);
        }
        if end {
            return self.response_trailers(stream);
        }
        call.headers = Some(Metadata::of(headers));
    }

    pub(super) fn response_trailers(&mut self, stream: u32) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        let headers = self.h2.headers();
        call.trailers = Metadata::of(headers);
        let truncated = || {
            Err(Status::new(
                Code::Internal,
                "the server ended the call in the middle of a message",
            ))
        };
        let missing = || {
            Err(Status::new(
                Code::Unknown,
                "the server ended the call without a status",
            ))
        };
        let status = status_of(headers).unwrap_or_else(missing);
        let end = if status.is_ok() && !call.inbound.is_between_messages() {
            truncated()
        } else {
            status
        };
        self.finish(stream, end);
    }
}
