//! The client: one connection, any number of calls on it at once.

use std::marker::PhantomData;
use std::time::Duration;

use prost::Message;

use super::metadata::Metadata;
use super::status::{Code, Status};
use super::transport::Transport;

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
pub struct Channel {}

impl Channel {
    /// Opens HTTP/2 on an established connection. `authority` is the `:authority` of the requests (`host:port`).
    pub fn new(transport: Transport, authority: &str) -> Result<Channel, Status> {
        let _ = (transport, authority);
        Err(todo())
    }

    /// One request, one response. `path` is `/package.Service/Method`.
    pub fn unary<Q: Message, R: Message + Default>(
        &self,
        path: &str,
        request: &Q,
        options: &CallOptions,
    ) -> Result<R, Status> {
        let _ = (path, request, options);
        Err(todo())
    }

    /// One request, any number of responses.
    pub fn server_streaming<Q: Message, R: Message + Default>(
        &self,
        path: &str,
        request: &Q,
        options: &CallOptions,
    ) -> Result<Responses<R>, Status> {
        let _ = (path, request, options);
        Err(todo())
    }

    /// Closes the connection now; calls that wait on it in other threads end with [`Code::Unavailable`].
    pub fn close(&self) {}
}

/// The responses of a streaming call as they arrive; ends after the first error. Dropping it earlier cancels the call.
pub struct Responses<R> {
    message: PhantomData<fn() -> R>,
}

impl<R: Message + Default> Iterator for Responses<R> {
    type Item = Result<R, Status>;

    fn next(&mut self) -> Option<Result<R, Status>> {
        Some(Err(todo()))
    }
}

fn todo() -> Status {
    Status::new(Code::Unimplemented, "the client is not there yet")
}
