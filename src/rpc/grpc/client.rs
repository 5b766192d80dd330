//! The client: one connection with any number of concurrent calls.

use std::net::Shutdown;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use prost::Message;

use super::limits::Limits;
use super::link::{Guard, Link, TICK};
use super::message;
use super::metadata::Metadata;
use super::session::{ClientSide, RequestHead, Session};
use super::status::{Code, Status};
use base::crypto::buffer::Bytes;
use base::sync::lock;
use transport::Transport;

/// The default of a client. The servers of grpc-go end a connection that gets a PING more often
/// than every five minutes (its `EnforcementPolicy`).
const KEEPALIVE: Keepalive = Keepalive {
    every: Duration::from_secs(310),
    timeout: Duration::from_secs(20),
};
/// How long a server may not read what we send.
const STALL: Duration = Duration::from_secs(60);
/// The longest interval between two checks by the keeper of a connection that another thread reads.
const LONGEST_TICK: Duration = Duration::from_millis(640);

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
    link: Arc<Link<ClientSide>>,
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
        let session = Session::client(&limits, Instant::now());
        let scheme = transport.scheme;
        let link = Link::new(transport, session, STALL, Shutdown::Both).map_err(broken)?;
        let link = Arc::new(link);
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

    /// Returns the channel binding of the TLS connection
    /// ([`Transport::binding`](transport::Transport::binding)).
    pub fn binding(&self) -> Option<&[u8; 32]> {
        self.connection.link.binding.as_ref()
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
        let link = &call.connection.link;
        let (core, sent) = link.send(core, call.stream, &request, true, call.deadline);
        sent?;
        message::decode(&call.wait_for_one(core)?, "response")
    }

    /// Opens a call with any number of requests and responses. [`Channel::streaming`] makes typed
    /// streams of it.
    pub(super) fn open(&self, path: &str, options: &CallOptions) -> Result<OpenCall, Status> {
        let (call, core) = self.start(path, options)?;
        drop(call.connection.link.flush(core));
        Ok(call)
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
    ) -> Result<(OpenCall, Guard<'a, ClientSide>), Status> {
        let started = Instant::now();
        let deadline = options
            .timeout
            .and_then(|timeout| started.checked_add(timeout));
        let connection = &self.connection;
        let link = &connection.link;
        let head = RequestHead {
            scheme: connection.scheme,
            authority: &connection.authority,
            path,
            timeout: options.timeout,
            metadata: &options.metadata,
        };
        // The server's limits are in its SETTINGS.
        let limit = deadline.or_else(|| started.checked_add(STALL));
        let has_settings = |session: &mut Session<_>| session.has_settings().then_some(());
        let (mut core, begun) = link.wait(link.lock(), 0, limit, has_settings);
        begun?;
        let stream = loop {
            match core.session.open(&head, self.message_bytes, deadline)? {
                Some(stream) => break stream,
                None => core = link.wait_for_slot(core, deadline)?,
            }
        };
        Ok((
            OpenCall {
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
        if core.session.ended().is_none() {
            core.session.goaway("");
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
        let keeper = lock(&self.keeper).take();
        if let Some(keeper) = keeper {
            keeper.thread().unpark();
            // The keeper runs nothing that can panic or block now.
            let _ = keeper.join();
        }
    }
}

/// Runs the keeper. It reads the connection while no caller does, so that PINGs are answered and a
/// lost server is noticed. It leaves the reading half to the next caller that waits.
fn keep(link: &Link<ClientSide>, keepalive: Keepalive) {
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
            if core.session.is_idle() {
                core.trim();
            }
            core.yield_reader();
        }
        loop {
            let Keepalive { every, timeout } = keepalive;
            let session = &mut core.session;
            if session.awaits_server() && session.keepalive(every, timeout, Instant::now()) {
                link.end(
                    &mut core,
                    Status::new(
                        Code::Unavailable,
                        "the server did not answer a PING in time",
                    ),
                );
            }
            core = link.flush(core);
            if core.session.ended().is_some() {
                return;
            }
            if !is_neglected || !core.is_free() || core.session.is_output_full() {
                break;
            }
            core = link.read_turn(core, Some(every.min(timeout)));
            if core.yield_reader() {
                break;
            }
        }
    }
}

/// An open call; dropping it before its end cancels it.
pub(super) struct OpenCall {
    connection: Arc<ClientConnection>,
    stream: u32,
    deadline: Option<Instant>,
}

impl OpenCall {
    /// Sends an encoded request; blocks while the server reads more slowly than we send. `end` says
    /// that no more follow.
    pub fn send(&self, message: &[u8], end: bool) -> Result<(), Status> {
        let link = &self.connection.link;
        let (core, result) = link.send(link.lock(), self.stream, message, end, self.deadline);
        drop(link.flush(core));
        result
    }

    /// Waits for the next message. The buffer of `spent` is reused for a later one.
    pub fn receive(&self, spent: Bytes) -> Result<Option<Bytes>, Status> {
        let link = &self.connection.link;
        let mut core = link.lock();
        core.session.reuse(self.stream, spent);
        link.receive(core, self.stream, self.deadline).1
    }

    /// Waits for the successful end of the call and returns its only response.
    pub fn receive_one(&self) -> Result<Bytes, Status> {
        self.wait_for_one(self.connection.link.lock())
    }

    fn wait_for_one(&self, core: Guard<'_, ClientSide>) -> Result<Bytes, Status> {
        let only = |session: &mut Session<_>| session.only_message(self.stream);
        let link = &self.connection.link;
        link.wait(core, self.stream, self.deadline, only).1?
    }

    /// Waits for the response's headers and returns their custom metadata; `None` if the call ended
    /// without headers.
    pub fn headers(&self) -> Result<Option<Metadata>, Status> {
        let link = &self.connection.link;
        let found = |session: &mut Session<_>| session.response_headers(self.stream);
        link.wait(link.lock(), self.stream, self.deadline, found).1
    }

    /// Returns the custom metadata of the trailers; empty before the end of the call.
    pub fn trailers(&self) -> Metadata {
        let core = self.connection.link.lock();
        core.session.response_trailers(self.stream)
    }

    /// Ends the call with this status.
    pub fn cancel(&self, why: Status) {
        let link = &self.connection.link;
        let mut core = link.lock();
        core.session.finish(self.stream, Err(why));
        drop(link.flush(core));
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let link = &self.connection.link;
        let mut core = link.lock();
        core.session.close_call(self.stream);
        drop(link.flush(core));
    }
}
