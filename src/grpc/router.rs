//! Which handler answers which path, and what a handler is given.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::time::Instant;

use prost::Message;

use super::metadata::Metadata;
use super::status::{Code, Status};

/// One call, as its handler sees it.
pub struct Call {
    peer: Option<SocketAddr>,
    metadata: Metadata,
    deadline: Option<Instant>,
}

impl Call {
    /// The address at the other end of the connection.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// The custom headers of the request.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// When the caller stops waiting, if it said so.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether nobody waits for the answer any more: cancelled, past its deadline, or the connection is gone. A handler
    /// that works for long looks from time to time.
    pub fn is_cancelled(&self) -> bool {
        false
    }
}

/// Where a streaming handler puts its responses.
pub struct Sender<R> {
    message: PhantomData<fn(&R)>,
}

impl<R: Message> Sender<R> {
    /// Sends one response; blocks while the caller reads slower than we send. Errors once the caller is gone or the
    /// deadline has passed: the handler should then return.
    pub fn send(&mut self, response: &R) -> Result<(), Status> {
        let _ = response;
        Err(Status::new(Code::Unimplemented, "the server is not there yet"))
    }
}

type Handler = Box<dyn Fn(&Call) -> Result<(), Status> + Send + Sync>;

/// The methods of a server.
#[derive(Default)]
pub struct Router {
    handlers: HashMap<String, Handler>,
}

impl Router {
    /// A router that answers every call with [`Code::Unimplemented`].
    pub fn new() -> Router {
        Router::default()
    }

    /// Adds a method with one request and one response. `path` is `/package.Service/Method`.
    pub fn unary<Q, R, F>(mut self, path: &str, handler: F) -> Router
    where
        Q: Message + Default,
        R: Message,
        F: Fn(&Call, Q) -> Result<R, Status> + Send + Sync + 'static,
    {
        self.handlers.insert(path.to_owned(), Box::new(move |call| handler(call, Q::default()).map(|_| ())));
        self
    }

    /// Adds a method with one request and any number of responses, which the handler sends before it returns.
    pub fn server_streaming<Q, R, F>(mut self, path: &str, handler: F) -> Router
    where
        Q: Message + Default,
        R: Message,
        F: Fn(&Call, Q, &mut Sender<R>) -> Result<(), Status> + Send + Sync + 'static,
    {
        let run = move |call: &Call| handler(call, Q::default(), &mut Sender { message: PhantomData });
        self.handlers.insert(path.to_owned(), Box::new(run));
        self
    }
}
