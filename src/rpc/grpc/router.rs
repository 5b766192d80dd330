//! The router: the methods of a server with their handlers.

use prost::Message;

use super::call::Call;
use super::message;
use super::methods::{Method, Methods};
use super::status::Status;
use base::crypto::buffer::Bytes;

/// Returns the encoded response, or nothing once all responses are sent.
pub(super) type Handler = Box<dyn Fn(&Call) -> Result<Bytes, Status> + Send + Sync>;

/// Returns whether the server can do its work.
pub(super) type Ready = Box<dyn Fn() -> bool + Send + Sync>;

/// The methods of a server. Paths are `/package.Service/Method`.
#[derive(Default)]
pub struct Router {
    pub(super) methods: Methods,
    /// The places of [`Method::handler`].
    pub(super) handlers: Vec<Handler>,
    /// Whether the server serves, for its health; if `None`, it always does.
    pub(super) ready: Option<Ready>,
}

impl Router {
    /// Creates a router that answers each call with
    /// [`Code::Unimplemented`](super::Code::Unimplemented).
    pub fn new() -> Router {
        Router::default()
    }

    /// Sets what the health service asks: until `ready` returns true, the server is NOT_SERVING.
    /// Its methods are called all the same.
    pub fn ready_when(self, ready: impl Fn() -> bool + Send + Sync + 'static) -> Router {
        Router {
            ready: Some(Box::new(ready)),
            ..self
        }
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

    /// Adds a method whose handler returns the encoded response, or nothing once all responses are
    /// sent. `takes_one` says that it has one request.
    pub fn add(
        mut self,
        path: &str,
        takes_one: bool,
        handler: impl Fn(&Call) -> Result<Bytes, Status> + Send + Sync + 'static,
    ) -> Router {
        let method = Method {
            handler: self.handlers.len(),
            takes_one,
        };
        self.methods.add(path, method);
        self.handlers.push(Box::new(handler));
        self
    }
}
