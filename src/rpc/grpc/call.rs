//! What a handler uses: its call.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use prost::Message;

use super::link::Link;
use super::message;
use super::metadata::Metadata;
use super::session::{Request, ServerSide};
use super::status::{Code, Status};
use base::network::Network;
use base::sync::lock;

/// A call as its handler sees it.
pub struct Call {
    link: Arc<Link<ServerSide>>,
    stream: u32,
    metadata: Metadata,
    deadline: Option<Instant>,
    /// Custom metadata that the handler adds to the response's headers and trailers.
    custom: Mutex<(Metadata, Metadata)>,
}

impl Call {
    pub(super) fn new(link: Arc<Link<ServerSide>>, stream: u32, request: Request) -> Call {
        Call {
            link,
            stream,
            metadata: request.metadata,
            deadline: request.deadline,
            custom: Mutex::default(),
        }
    }

    /// Returns the custom metadata for the response's headers and trailers.
    pub(super) fn into_custom(self) -> (Metadata, Metadata) {
        std::mem::take(&mut *lock(&self.custom))
    }

    /// Returns the address of the peer.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.link.peer
    }

    /// Returns the network by which the peer is counted when peers take turns.
    pub fn network(&self) -> Network {
        self.peer()
            .map_or(Network::UNKNOWN, |peer| peer.ip().into())
    }

    /// Returns other facts that the peer proved below gRPC
    /// ([`Transport::claims`](transport::Transport::claims)), if they have this type.
    pub fn claims<T: 'static>(&self) -> Option<&T> {
        self.link.claims.as_ref()?.downcast_ref()
    }

    /// Returns the identity that the peer proved below gRPC
    /// ([`Transport::identity`](transport::Transport::identity)).
    pub fn identity(&self) -> Option<&Arc<str>> {
        self.link.identity.as_ref()
    }

    /// Returns the channel binding of the TLS connection
    /// ([`Transport::binding`](transport::Transport::binding)).
    pub fn binding(&self) -> Option<&[u8; 32]> {
        self.link.binding.as_ref()
    }

    /// Returns when the connection's handshake was complete.
    pub fn connected_at(&self) -> Instant {
        self.link.lock().session.opened()
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
            || self.link.lock().session.is_cancelled(self.stream)
    }

    /// Sets the custom metadata of the response's headers. This has no effect after the first
    /// response.
    pub fn set_headers(&self, headers: Metadata) {
        lock(&self.custom).0 = headers;
    }

    /// Sets the custom metadata of the response's trailers.
    pub fn set_trailers(&self, trailers: Metadata) {
        lock(&self.custom).1 = trailers;
    }

    /// Waits for the next request message; `None` at the end of the client's side.
    pub fn receive<Q: Message + Default>(&self) -> Result<Option<Q>, Status> {
        let received = self
            .link
            .receive(self.link.lock(), self.stream, self.deadline)
            .1?;
        received
            .map(|bytes| message::decode(&bytes, "request"))
            .transpose()
    }

    /// Waits for the only request message of a method that takes one.
    pub fn receive_one<Q: Message + Default>(&self) -> Result<Q, Status> {
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

    /// Sends an encoded response; blocks while the caller reads more slowly than we send. Errors if
    /// the caller is gone or the deadline has passed; the handler should then return.
    pub fn send(&self, response: &[u8]) -> Result<(), Status> {
        let mut core = self.link.lock();
        core.session
            .send_response_headers(self.stream, &lock(&self.custom).0);
        let (core, result) = self
            .link
            .send(core, self.stream, response, false, self.deadline);
        drop(self.link.flush(core));
        result
    }
}
