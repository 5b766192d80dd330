//! How a server adds streaming methods, and receives and sends their messages.

use std::marker::PhantomData;

use crate::grpc::call::Call;
use crate::grpc::message::{encode, encode_into};
use crate::grpc::router::Router;
use crate::grpc::status::Status;
use base::crypto::buffer::Bytes;
use prost::Message;

impl Router {
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
            encode(&handler(call, &mut Receiver::new(call))?)
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
        encode_into(response, &mut self.encoded)?;
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
