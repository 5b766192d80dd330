//! The router, which finds the handler for a path, and the types that a handler uses.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prost::Message;

use super::link::{Core, Link};
use super::message;
use super::metadata::Metadata;
use super::status::{Code, Status};
use base::crypto::buffer::Bytes;
use base::network::Network;

/// A call as its handler sees it.
pub struct Call {
    pub(super) link: Arc<Link>,
    pub(super) stream: u32,
    pub(super) metadata: Metadata,
    pub(super) deadline: Option<Instant>,
    /// Custom metadata that the handler adds to the response's headers and trailers.
    pub(super) answer: Mutex<(Metadata, Metadata)>,
}

impl Call {
    /// Returns the address of the peer.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.link.peer
    }

    /// Returns the network by which the peer is counted when peers take turns.
    pub fn network(&self) -> Network {
        self.peer()
            .map_or(Network::UNKNOWN, |peer| peer.ip().into())
    }

    /// Returns the identity that the peer proved below gRPC
    /// ([`Transport::identity`](super::Transport::identity)).
    pub fn identity(&self) -> Option<&Arc<str>> {
        self.link.identity.as_ref()
    }

    /// Returns when the connection's handshake was complete.
    pub fn connected_at(&self) -> Instant {
        self.link.lock().upkeep.opened
    }

    /// Returns the custom metadata of the request's headers.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the caller's deadline, if it sent one.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns whether the caller no longer waits for the answer: the call is cancelled, past its
    /// deadline, or its connection is gone. A handler that works for a long time checks this from
    /// time to time.
    pub fn is_cancelled(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline <= Instant::now())
            || self.link.lock().is_cancelled(self.stream)
    }

    /// Waits for `time` or until [`Call::is_cancelled`], whose result it returns.
    pub fn wait_cancelled(&self, time: Duration) -> bool {
        let until = Instant::now()
            .checked_add(time)
            .into_iter()
            .chain(self.deadline)
            .min();
        let is_over = |core: &mut Core| core.is_cancelled(self.stream).then_some(());
        drop(
            self.link
                .wait(self.link.lock(), self.stream, until, is_over)
                .0,
        );
        self.is_cancelled()
    }

    /// Sets the custom metadata of the response's headers. This has no effect after the first
    /// response.
    pub fn set_headers(&self, headers: Metadata) {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).0 = headers;
    }

    /// Sets the custom metadata of the response's trailers.
    pub fn set_trailers(&self, trailers: Metadata) {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).1 = trailers;
    }

    /// Waits for the next request message; `None` at the end of the client's side.
    fn receive<Q: Message + Default>(&self) -> Result<Option<Q>, Status> {
        let received = self
            .link
            .receive(self.link.lock(), self.stream, self.deadline)
            .1?;
        received
            .map(|bytes| message::decode(&bytes, "request"))
            .transpose()
    }

    /// Waits for the only request message of a method that takes one.
    fn receive_one<Q: Message + Default>(&self) -> Result<Q, Status> {
        let missing = || Status::new(Code::Internal, "the request has no message");
        let request = self.receive()?.ok_or_else(missing)?;
        match self.receive::<Q>()? {
            None => Ok(request),
            Some(_) => Err(Status::new(
                Code::Internal,
                "the request has several messages, but the method takes one",
            )),
        }
    }

    /// Sends an encoded response.
    fn send(&self, response: &[u8]) -> Result<(), Status> {
        let mut core = self.link.lock();
        core.answer_headers(
            self.stream,
            &self.answer.lock().unwrap_or_else(PoisonError::into_inner).0,
        );
        let (core, result) = self
            .link
            .send(core, self.stream, response, false, self.deadline);
        drop(self.link.flush(core));
        result
    }
}

/// Sends the responses of a streaming handler.
pub struct Sender<'a, R> {
    call: &'a Call,
    /// Buffer for the encoded response.
    encoded: Bytes,
    message: PhantomData<fn(&R)>,
}

impl<R: Message> Sender<'_, R> {
    fn new(call: &Call) -> Sender<'_, R> {
        Sender {
            call,
            encoded: Bytes::default(),
            message: PhantomData,
        }
    }

    /// Sends one response; blocks while the caller reads more slowly than we send. Errors if the
    /// caller is gone or the deadline has passed; the handler should then return.
    pub fn send(&mut self, response: &R) -> Result<(), Status> {
        message::encode_into(response, &mut self.encoded)?;
        let sent = self.call.send(&self.encoded);
        self.encoded.clear();
        sent
    }
}

/// The requests of a streaming call as they arrive. The iterator ends after the first error.
pub struct Receiver<'a, Q> {
    call: &'a Call,
    ended: bool,
    message: PhantomData<fn() -> Q>,
}

impl<Q> Receiver<'_, Q> {
    fn new(call: &Call) -> Receiver<'_, Q> {
        Receiver {
            call,
            ended: false,
            message: PhantomData,
        }
    }
}

impl<Q: Message + Default> Iterator for Receiver<'_, Q> {
    type Item = Result<Q, Status>;

    fn next(&mut self) -> Option<Result<Q, Status>> {
        if self.ended {
            return None;
        }
        let received = self.call.receive();
        self.ended = !matches!(received, Ok(Some(_)));
        received.transpose()
    }
}

pub(super) struct Method {
    /// Whether the handler starts when the whole request was received; otherwise it starts after
    /// the headers.
    pub(super) takes_one: bool,
    /// Returns the encoded response, or nothing once all responses are sent.
    #[allow(clippy::type_complexity)]
    pub(super) run: Box<dyn Fn(&Call) -> Result<Bytes, Status> + Send + Sync>,
}

/// The methods of a server. Paths are `/package.Service/Method`.
#[derive(Default)]
pub struct Router {
    methods: HashMap<String, Arc<Method>>,
}

impl Router {
    /// Creates a router that answers each call with [`Code::Unimplemented`].
    pub fn new() -> Router {
        Router::default()
    }

    /// Adds a method with one request and one response.
    pub fn unary<Q, R, F>(self, path: &str, handler: F) -> Router
    where
        Q: Message + Default,
        R: Message,
        F: Fn(&Call, Q) -> Result<R, Status> + Send + Sync + 'static,
    {
        self.add(path, true, move |call| {
            message::encode(&handler(call, call.receive_one()?)?)
        })
    }

    /// Adds a method with one request and any number of responses, which the handler sends before
    /// it returns.
    pub fn server_streaming<Q, R, F>(self, path: &str, handler: F) -> Router
    where
        Q: Message + Default,
        R: Message,
        F: Fn(&Call, Q, &mut Sender<R>) -> Result<(), Status> + Send + Sync + 'static,
    {
        self.add(path, true, move |call| {
            handler(call, call.receive_one()?, &mut Sender::new(call)).map(|()| Bytes::default())
        })
    }

    /// Adds a method with any number of requests and one response.
    pub fn client_streaming<Q, R, F>(self, path: &str, handler: F) -> Router
    where
        Q: Message + Default,
        R: Message,
        F: Fn(&Call, &mut Receiver<Q>) -> Result<R, Status> + Send + Sync + 'static,
    {
        self.add(path, false, move |call| {
            message::encode(&handler(call, &mut Receiver::new(call))?)
        })
    }

    /// Adds a method with any number of requests and of responses.
    pub fn streaming<Q, R, F>(self, path: &str, handler: F) -> Router
    where
        Q: Message + Default,
        R: Message,
        F: Fn(&Call, &mut Receiver<Q>, &mut Sender<R>) -> Result<(), Status>
            + Send
            + Sync
            + 'static,
    {
        self.add(path, false, move |call| {
            handler(call, &mut Receiver::new(call), &mut Sender::new(call))
                .map(|()| Bytes::default())
        })
    }

    fn add(
        mut self,
        path: &str,
        takes_one: bool,
        run: impl Fn(&Call) -> Result<Bytes, Status> + Send + Sync + 'static,
    ) -> Router {
        self.methods.insert(
            path.to_owned(),
            Arc::new(Method {
                takes_one,
                run: Box::new(run),
            }),
        );
        self
    }

    /// Returns the service name of each method, so names repeat.
    pub(super) fn services(&self) -> impl Iterator<Item = &str> {
        self.methods.keys().filter_map(|path| service_of(path))
    }

    /// Returns the method at `path`, or the status for an unknown one.
    pub(super) fn find(&self, path: &[u8]) -> Result<Arc<Method>, Status> {
        let text = std::str::from_utf8(path).unwrap_or_default();
        if let Some(method) = self.methods.get(text) {
            return Ok(method.clone());
        }
        let is_known = self.services().any(|known| service_of(text) == Some(known));
        let what = if is_known { "method" } else { "service" };
        // The answer must not be larger than the request.
        let shown: String = path.escape_ascii().take(64).map(char::from).collect();
        Err(Status::new(
            Code::Unimplemented,
            format!("unknown {what} {shown}"),
        ))
    }
}

/// Returns the service of a path `/service/method`.
fn service_of(path: &str) -> Option<&str> {
    Some(path.strip_prefix('/')?.rsplit_once('/')?.0)
}
