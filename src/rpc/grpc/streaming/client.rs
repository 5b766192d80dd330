//! How a client makes streaming calls, and sends and receives their messages.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::grpc::client::{CallOptions, Channel, OpenCall};
use crate::grpc::message::{decode, encode};
use crate::grpc::metadata::Metadata;
use crate::grpc::status::{Code, Status};
use base::crypto::buffer::Bytes;
use prost::Message;

impl Channel {
    /// Makes a call with one request and any number of responses.
    pub fn server_streaming<Q: Message, R: Message + Default>(
        &self,
        path: &str,
        request: &Q,
        options: &CallOptions,
    ) -> Result<Responses<R>, Status> {
        let request = encode(request)?;
        let call = self.open(path, options)?;
        call.send(&request, true)?;
        Ok(Responses::new(Arc::new(call)))
    }

    /// Makes a call with any number of requests and responses, in the order that the method
    /// defines. For a client-streaming method, [`Responses::one`] returns the only response.
    pub fn streaming<Q: Message, R: Message + Default>(
        &self,
        path: &str,
        options: &CallOptions,
    ) -> Result<(Requests<Q>, Responses<R>), Status> {
        let call = Arc::new(self.open(path, options)?);
        let requests = Requests {
            call: call.clone(),
            finished: false,
            message: PhantomData,
        };
        Ok((requests, Responses::new(call)))
    }
}

/// The responses of a streaming call as they arrive. The iterator ends after the first error.
/// Dropping it earlier cancels the call once its [`Requests`] are dropped or finished.
pub struct Responses<R> {
    call: Arc<OpenCall>,
    ended: bool,
    spent: Bytes,
    message: PhantomData<fn() -> R>,
}

impl<R> Responses<R> {
    fn new(call: Arc<OpenCall>) -> Responses<R> {
        Responses {
            call,
            ended: false,
            spent: Bytes::default(),
            message: PhantomData,
        }
    }

    /// Waits for the response's headers and returns their custom metadata; `None` if the call ended
    /// without headers.
    pub fn headers(&self) -> Result<Option<Metadata>, Status> {
        self.call.headers()
    }

    /// Returns the custom metadata of the trailers; empty before the end of the call.
    pub fn trailers(&self) -> Metadata {
        self.call.trailers()
    }
}

impl<R: Message + Default> Responses<R> {
    /// Waits for the end of a call that has one response, such as a client-streaming call.
    pub fn one(&mut self) -> Result<R, Status> {
        self.ended = true;
        decode(&self.call.receive_one()?, "response")
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
            let response = decode(&bytes, "response")?;
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
    call: Arc<OpenCall>,
    finished: bool,
    message: PhantomData<fn(&Q)>,
}

impl<Q: Message> Requests<Q> {
    /// Sends one request; blocks while the server reads more slowly than we send. After an error,
    /// [`Responses`] has the reason.
    pub fn send(&mut self, request: &Q) -> Result<(), Status> {
        self.call.send(&encode(request)?, false)
    }

    /// Tells the server that no more requests follow.
    pub fn finish(mut self) -> Result<(), Status> {
        self.finished = true;
        self.call.send(&[], true)
    }
}

impl<Q> Drop for Requests<Q> {
    fn drop(&mut self) {
        if !self.finished {
            let why = "the caller stopped before its last request";
            self.call.cancel(Status::new(Code::Cancelled, why));
        }
    }
}
