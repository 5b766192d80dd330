//! The client's side: it opens calls and reads responses.

use std::time::{Duration, Instant};

use super::{Call, Session, Side, h2_limits};
use crate::grpc::header_values::{format_timeout, is_grpc_type};
use crate::grpc::limits::Limits;
use crate::grpc::metadata::Metadata;
use crate::grpc::status::{Code, Status, status_of};
use crate::h2::{Connection, ErrorCode, Field, Indexing, SendError};
use crate::share::PeerShare;
use base::crypto::buffer::Bytes;

/// Number of bytes of a GOAWAY's debug data that we repeat.
const GOAWAY_TEXT: usize = 100;
const USER_AGENT: &[u8] = concat!("firstlight/", env!("CARGO_PKG_VERSION")).as_bytes();

/// What only a client knows of its connection.
pub(crate) struct ClientSide {
    /// The text of the server's GOAWAY.
    goaway_text: Option<String>,
}

/// What only a client knows of a call.
#[derive(Default)]
pub(crate) struct ClientCall {
    /// The custom metadata of the response's headers, once received.
    headers: Option<Metadata>,
    trailers: Metadata,
}

/// The headers of a request.
pub(crate) struct RequestHead<'a> {
    pub(crate) scheme: &'a str,
    pub(crate) authority: &'a str,
    /// `/package.Service/Method`.
    pub(crate) path: &'a str,
    pub(crate) timeout: Option<Duration>,
    pub(crate) metadata: &'a Metadata,
}

impl Session<ClientSide> {
    /// Starts a connection; the output already has our first bytes.
    pub(crate) fn client(limits: &Limits, now: Instant) -> Session<ClientSide> {
        let h2 = Connection::client(h2_limits(limits.streams, limits.header_bytes));
        let side = ClientSide { goaway_text: None };
        Session::new(h2, side, PeerShare::unlimited(), now)
    }

    /// Returns whether the server's limits are known. No call can begin before.
    pub(crate) fn has_settings(&self) -> bool {
        self.h2.has_settings()
    }

    /// Opens a call with its headers and returns its stream; `None` if the server allows no further
    /// stream now. A response message has at most `message_limit` bytes.
    pub(crate) fn open(
        &mut self,
        head: &RequestHead<'_>,
        message_limit: usize,
        deadline: Option<Instant>,
    ) -> Result<Option<u32>, Status> {
        if let Some(status) = &self.ended {
            return Err(status.clone());
        }
        let fixed: [Field; 7] = [
            (b":method", b"POST", Indexing::Yes),
            (b":scheme", head.scheme.as_bytes(), Indexing::Yes),
            (b":path", head.path.as_bytes(), Indexing::Yes),
            (b":authority", head.authority.as_bytes(), Indexing::Yes),
            (b"te", b"trailers", Indexing::Yes),
            (b"content-type", b"application/grpc", Indexing::Yes),
            (b"user-agent", USER_AGENT, Indexing::Yes),
        ];
        let timeout = head.timeout.map(format_timeout);
        let timeout = timeout
            .iter()
            .map(|text| (&b"grpc-timeout"[..], text.as_bytes(), Indexing::No));
        let fields = fixed
            .into_iter()
            .chain(timeout)
            .chain(head.metadata.fields());
        match self.h2.open(fields, false) {
            Ok(stream) => {
                let mut call = Call::new(message_limit, ClientCall::default());
                call.deadline = deadline;
                self.calls.insert(stream, Box::new(call));
                Ok(Some(stream))
            }
            Err(SendError::TooMany) => Ok(None),
            Err(SendError::TooLarge) => Err(Status::new(
                Code::ResourceExhausted,
                "the metadata exceeds the server's limit",
            )),
            Err(_) => {
                let why = self.side.last_words();
                let text = format!("the server accepts no more calls on this connection{why}");
                Err(Status::new(Code::Unavailable, text).unprocessed())
            }
        }
    }

    /// Returns whether something must still come from the server.
    pub(crate) fn awaits_server(&self) -> bool {
        !self.h2.has_settings() || self.calls.values().any(|call| call.end.is_none())
    }

    /// Returns the custom metadata of the response's headers, `None` if the call ended without
    /// them; nothing if neither has arrived.
    pub(crate) fn response_headers(&self, stream: u32) -> Option<Option<Metadata>> {
        let call = self.calls.get(&stream)?;
        let headers = &call.side.headers;
        (headers.is_some() || call.end.is_some()).then(|| headers.clone())
    }

    /// Returns the custom metadata of the trailers; empty before the end of the call.
    pub(crate) fn response_trailers(&self, stream: u32) -> Metadata {
        let call = self.calls.get(&stream);
        call.map(|call| call.side.trailers.clone())
            .unwrap_or_default()
    }

    /// Returns the only message of a call that has ended with success, or the error; nothing if the
    /// call has not ended.
    pub(crate) fn only_message(&mut self, stream: u32) -> Option<Result<Bytes, Status>> {
        let call = self.calls.get_mut(&stream)?;
        if call.inbound.waiting() < 2
            && let Err(status) = call.end.as_ref()?
        {
            return Some(Err(status.clone()));
        }
        let internal = |text| Err(Status::new(Code::Internal, text));
        Some(match (call.inbound.pop(), call.inbound.pop()) {
            (Some(response), None) => Ok(response),
            (None, _) => internal("the server ended the call with OK but sent no message"),
            _ => internal("the server sent several messages for a call with one response"),
        })
    }

    /// Forgets a call; cancels it if it has not ended.
    pub(crate) fn close_call(&mut self, stream: u32) {
        self.calls.remove(&stream);
        // Does nothing if the stream is closed, as it is after a complete call.
        self.h2.reset(stream, ErrorCode::CANCEL);
    }
}

impl Side for ClientSide {
    type Call = ClientCall;

    /// Handles the response's headers; with `end`, they are also its trailers.
    fn headers(session: &mut Session<Self>, stream: u32, end: bool, _: Instant) {
        let Some(call) = session.calls.get_mut(&stream) else {
            return;
        };
        let headers = session.h2.headers();
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
            return session.finish(stream, status);
        }
        if end {
            return Self::trailers(session, stream);
        }
        call.side.headers = Some(Metadata::of(headers));
    }

    fn trailers(session: &mut Session<Self>, stream: u32) {
        let Some(call) = session.calls.get_mut(&stream) else {
            return;
        };
        let headers = session.h2.headers();
        call.side.trailers = Metadata::of(headers);
        let error = |code, text| Err(Status::new(code, text));
        let missing = "the server ended the call without a status";
        let truncated = "the server ended the call in the middle of a message";
        let status = status_of(headers).unwrap_or_else(|| error(Code::Unknown, missing));
        let end = if status.is_ok() && !call.inbound.is_between_messages() {
            error(Code::Internal, truncated)
        } else {
            status
        };
        session.finish(stream, end);
    }

    fn stream_ended(session: &mut Session<Self>, stream: u32) {
        let status = Status::new(Code::Internal, "the server ended the call without a status");
        session.finish(stream, Err(status));
    }

    fn reject(session: &mut Session<Self>, stream: u32, status: Status) {
        session.h2.reset(stream, ErrorCode::CANCEL);
        session.finish(stream, Err(status));
    }

    /// Resets the stream: the server may answer before it has received the whole request.
    fn call_ended(session: &mut Session<Self>, stream: u32) {
        session.h2.reset(stream, ErrorCode::CANCEL);
    }

    /// Ends the calls that the server will not process, so that the caller can retry them on
    /// another connection.
    fn goaway(session: &mut Session<Self>, last: u32, code: ErrorCode, debug: &[u8]) {
        let words = debug[..debug.len().min(GOAWAY_TEXT)].escape_ascii();
        let said = if debug.is_empty() {
            code.to_string()
        } else {
            format!("{code}, \"{words}\"")
        };
        session.side.goaway_text = Some(format!(" after GOAWAY ({said})"));
        let unprocessed: Vec<u32> = session
            .calls
            .iter()
            .filter(|(stream, call)| **stream > last && call.end.is_none())
            .map(|(&stream, _)| stream)
            .collect();
        for stream in unprocessed {
            let text =
                format!("the server ended the connection before it processed the call ({said})");
            let status = Status::new(Code::Unavailable, text).unprocessed();
            session.finish(stream, Err(status));
        }
        session.changes.slot = true;
    }

    fn last_words(&self) -> &str {
        self.goaway_text.as_deref().unwrap_or_default()
    }
}
