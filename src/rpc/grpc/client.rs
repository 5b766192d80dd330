//! The client: one connection, any number of calls on it at once.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use prost::Message;

use super::link::{CallState, Core, Guard, Link, Side, TICK, h2_limits};
use super::message;
use super::metadata::{Metadata, is_grpc_type};
use super::server::Limits;
use super::status::{Code, Status, status_of};
use super::transport::Transport;
use crate::h2::{Connection, ErrorCode, Field, Indexing, SendError};
use crate::share::PeerShare;
use base::crypto::buffer::Bytes;

/// PING of a client that has not set another: grpc-go's servers end a connection that is asked more often than every five
/// minutes (its `EnforcementPolicy`).
const KEEPALIVE: Keepalive = Keepalive {
    every: Duration::from_secs(310),
    timeout: Duration::from_secs(20),
};
/// How long a server may refuse to take what we send.
const STALL: Duration = Duration::from_secs(60);
/// The keeper looks at a connection that a thread reads at most this rarely.
const LONGEST_TICK: Duration = Duration::from_millis(640);
const USER_AGENT: &[u8] = concat!("firstlight/", env!("CARGO_PKG_VERSION")).as_bytes();

/// How a client finds out that its server is gone, while it has calls there.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    /// Without a byte from the server for this long, a PING is sent.
    pub every: Duration,
    /// The connection ends, and all calls with [`Code::Unavailable`], when no byte comes within this time after it.
    pub timeout: Duration,
}

/// What a call may carry besides its message.
#[derive(Clone, Debug, Default)]
pub struct CallOptions {
    /// Ends the call with [`Code::DeadlineExceeded`] and tells the server (`grpc-timeout`).
    pub timeout: Option<Duration>,
    /// Custom headers of the request.
    pub metadata: Metadata,
}

/// One client connection; clones share it, and it closes when the last one drops.
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
    /// Opens HTTP/2 on an established connection. `authority` is the `:authority` of the requests (`host:port`).
    pub fn new(transport: Transport, authority: &str) -> Result<Channel, Status> {
        Channel::with_keepalive(transport, authority, KEEPALIVE)
    }

    /// The same with PINGs of one's own timing.
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

    /// Sets the largest response message that is accepted (4 MiB if not set).
    pub fn with_message_bytes(mut self, message_bytes: usize) -> Channel {
        self.message_bytes = message_bytes;
        self
    }

    /// One request, one response. `path` is `/package.Service/Method`.
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

    /// One request, any number of responses.
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

    /// Any number of requests and of responses, in the order that the method defines; one response where that is all that
    /// the method gives ([`Responses::one`]).
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

    /// Closes the connection now; calls that wait on it in other threads end with [`Code::Unavailable`].
    pub fn close(&self) {
        self.connection.close();
    }

    /// Opens a stream for a call: its headers are in the output. The connection stays locked.
    fn start<'a>(
        &'a self,
        path: &str,
        options: &CallOptions,
    ) -> Result<(ClientCall, Guard<'a>), Status> {
        let started = Instant::now();
        let deadline = options
            .timeout
            .and_then(|timeout| started.checked_add(timeout));
        let timeout = options.timeout.map(message::format_timeout);
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
        // what the server takes is in its SETTINGS
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
                        "the metadata are more than the server takes",
                    ));
                }
                Err(_) => {
                    let why = core.farewell.as_deref().unwrap_or_default();
                    let text = format!("the server takes no more calls on this connection{why}");
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
            // it runs nothing that could panic or block any more
            let _ = keeper.join();
        }
    }
}

/// The keeper's life: it reads the connection while no caller does, so that PINGs are answered and a lost server is
/// noticed; and it leaves the reading to the next caller that waits.
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
            core.is_wanted();
        }
        loop {
            let has_calls =
                !core.h2.has_settings() || core.calls.values().any(|call| call.end.is_none());
            if has_calls && core.keepalive(keepalive.every, keepalive.timeout, Instant::now()) {
                link.end(
                    &mut core,
                    Status::new(Code::Unavailable, "the server answered no PING in time"),
                );
            }
            core = link.flush(core);
            if core.ended.is_some() {
                return;
            }
            if !is_neglected || !core.is_free() || core.is_held() {
                break;
            }
            core = link.read_turn(core, Some(keepalive.every.min(keepalive.timeout)));
            if core.is_wanted() {
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

    /// The next message; the room of the `spent` one is for a later one.
    fn receive(&self, spent: Bytes) -> Result<Option<Bytes>, Status> {
        let link = &self.connection.link;
        let mut core = link.lock();
        if let Some(call) = core.calls.get_mut(&self.stream) {
            call.inbound.reuse(spent);
        }
        link.receive(core, self.stream, self.deadline).1
    }

    /// The only response, once the call has ended well.
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
        let inbound = &mut core.calls.get_mut(&self.stream).ok_or_else(lost)?.inbound;
        match (inbound.pop(), inbound.pop()) {
            (Some(response), None) => Ok(response),
            (None, _) => Err(Status::new(
                Code::Internal,
                "the server answered OK without a message",
            )),
            _ => Err(Status::new(
                Code::Internal,
                "the server answered the call with several messages",
            )),
        }
    }
}

fn lost() -> Status {
    Status::new(Code::Internal, "the call is not known to its connection")
}

impl Drop for ClientCall {
    fn drop(&mut self) {
        let link = &self.connection.link;
        let mut core = link.lock();
        core.calls.remove(&self.stream);
        // nothing happens if the stream is closed, as it is after a complete call
        core.h2.reset(self.stream, ErrorCode::CANCEL);
        drop(link.flush(core));
    }
}

/// The responses of a streaming call as they arrive; ends after the first error. Dropping it earlier cancels the call, once
/// its [`Requests`] are dropped or finished too.
pub struct Responses<R> {
    call: Arc<ClientCall>,
    ended: bool,
    spent: Bytes,
    message: PhantomData<fn() -> R>,
}

impl<R> Responses<R> {
    /// Waits for the response's headers, and returns their custom metadata; `None` if the call ended without.
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

    /// The custom metadata behind the last response; none before the call has ended.
    pub fn trailers(&self) -> Metadata {
        let core = self.call.connection.link.lock();
        core.calls
            .get(&self.call.stream)
            .map(|state| state.trailers.clone())
            .unwrap_or_default()
    }
}

impl<R: Message + Default> Responses<R> {
    /// Waits for the end of a call that has one response, as client-streaming ones have.
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

/// Where a client puts the requests of a streaming call. Dropping it before [`Requests::finish`] cancels the call.
pub struct Requests<Q> {
    call: Arc<ClientCall>,
    finished: bool,
    message: PhantomData<fn(&Q)>,
}

impl<Q: Message> Requests<Q> {
    /// Sends one request; blocks while the server reads slower than we send. After an error, the responses say why.
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
                    "the requests were not finished",
                )),
            );
            drop(link.flush(core));
        }
    }
}

impl Core {
    /// The response's headers; with `end` they are its trailers as well.
    pub(super) fn response(&mut self, stream: u32, end: bool) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        let headers = self.h2.headers();
        let http = headers.get(b":status").unwrap_or_default();
        let kind = headers.get(b"content-type").unwrap_or_default();
        if http != b"200" || !is_grpc_type(kind) {
            // no gRPC server; unless it says how the call ended all the same
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let strange = format!(
                "not a gRPC answer: HTTP status {}, content-type {:?}",
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
                "the server ended the call within a message",
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
