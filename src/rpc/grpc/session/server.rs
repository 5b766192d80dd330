//! The server's side: it reads requests and answers them, within [`Limits`].

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Call, Data, Session, Side, h2_limits};
use crate::grpc::header_values::{encode_bin, is_grpc_type, parse_timeout, percent_encode};
use crate::grpc::limits::Limits;
use crate::grpc::metadata::Metadata;
use crate::grpc::methods::{Method, Methods};
use crate::grpc::status::{Code, Status};
use crate::h2::{self, Connection, ErrorCode, Field, Indexing, SendError};
use crate::share::{Held, PeerShare};
use base::crypto::buffer::Bytes;

/// Bytes of a call in addition to its metadata and its message, as they count against
/// [`Limits::buffered_bytes`].
const CALL_BYTES: usize = 1 << 10;
/// Maximum number of bytes of a status message that are sent.
const MESSAGE_MOST: usize = 2 << 10;
/// The first fields of each gRPC response.
const RESPONSE: [Field; 2] = [
    (b":status", b"200", Indexing::Yes),
    (b"content-type", b"application/grpc", Indexing::Yes),
];

/// What only a server knows of a connection.
pub(crate) struct ServerSide {
    limits: Arc<Limits>,
    methods: Arc<Methods>,
    /// Streams of calls whose handler can start.
    ready: VecDeque<u32>,
    /// Streams of calls whose handler is done and whose response is not completely sent.
    outbound: VecDeque<u32>,
    opened: Instant,
    // The times that `check_timers` compares. Where an event has no time of its own, it counts from
    // the next check.
    /// When HTTP/2 must have started.
    established_by: Instant,
    within_headers_since: Option<Instant>,
    idle_since: Instant,
    /// Whether a call has come since the last check.
    had_call: bool,
    /// When the connection is closed after a GOAWAY.
    closes_by: Option<Instant>,
    /// How the peer violated HTTP/2, until this is logged.
    violation: Option<h2::Error>,
}

/// What only a server knows of a call.
pub(crate) struct ServerCall {
    stage: Stage,
    started: Instant,
    /// Memory that counts against the limit of buffered bytes.
    held: Held,
    /// Whether the response's headers were sent.
    has_answered: bool,
}

/// How far a call has come.
enum Stage {
    /// The request waits for its end or for a handler.
    Request(Request),
    /// The request is not gRPC. It waits for its end; no handler runs.
    Http(HttpResponse),
    /// A handler has the call, and ends it.
    Handler,
    /// The response waits for the peer, without a thread.
    Response(Response),
}

/// A request as its handler needs it.
pub(crate) struct Request {
    pub(crate) method: Method,
    pub(crate) metadata: Metadata,
    pub(crate) deadline: Option<Instant>,
}

/// A response that its handler has returned.
struct Response {
    /// Empty if the handler has sent all messages itself.
    message: Bytes,
    sent: usize,
    /// Custom metadata of the headers and of the trailers; `None` if the response is not gRPC and
    /// has no trailers.
    custom: Option<(Metadata, Metadata)>,
    /// Whether the peer has accepted bytes since the last check of the timers.
    has_moved: bool,
    /// The last check before which the peer had accepted bytes; `None` before the first check.
    moved: Option<Instant>,
}

/// The HTTP response to a request that is not gRPC.
#[derive(Clone, Copy)]
struct HttpResponse {
    status: &'static [u8],
    /// A header field that says what gRPC expects.
    hint: (&'static [u8], &'static [u8]),
    /// The body, for a person with a browser.
    text: &'static [u8],
}

impl Session<ServerSide> {
    /// Starts a connection for `methods`. HTTP/2 must have started by `established_by`.
    pub(crate) fn server(
        limits: Arc<Limits>,
        methods: Arc<Methods>,
        share: Arc<PeerShare>,
        established_by: Instant,
        now: Instant,
    ) -> Session<ServerSide> {
        let h2 = Connection::server(h2::H2Limits {
            resets: limits.resets,
            ..h2_limits(limits.streams, limits.header_bytes)
        });
        let side = ServerSide {
            limits,
            methods,
            ready: VecDeque::new(),
            outbound: VecDeque::new(),
            opened: now,
            established_by,
            within_headers_since: None,
            idle_since: now,
            had_call: false,
            closes_by: None,
            violation: None,
        };
        Session::new(h2, side, share, now)
    }

    /// Returns when the session began.
    pub(crate) fn opened(&self) -> Instant {
        self.side.opened
    }
}

impl Side for ServerSide {
    type Call = ServerCall;

    /// Handles the headers of a request.
    fn headers(session: &mut Session<Self>, stream: u32, end: bool, now: Instant) {
        session.side.had_call = true;
        let headers = session.h2.headers();
        let kind = headers.get(b"content-type").unwrap_or_default();
        if headers.get(b":method") != Some(b"POST") || !is_grpc_type(kind) {
            return session.http_request(stream, end, now);
        }
        let has_encoding = headers
            .get(b"grpc-encoding")
            .is_some_and(|encoding| encoding != b"identity");
        let malformed = || Status::new(Code::Internal, "grpc-timeout is malformed");
        let timeout = headers
            .get(b"grpc-timeout")
            .map(|value| parse_timeout(value).ok_or_else(malformed))
            .transpose();
        let path = headers.get(b":path").unwrap_or_default();
        let method = session.side.methods.find(path);
        let metadata = Metadata::of(headers);
        let mut held = Held::new(session.buffers.share.clone());
        let fits = held.grow(CALL_BYTES + metadata.size());
        let (method, timeout) = match (method, timeout) {
            (Err(status), _) | (_, Err(status)) => return session.refuse(stream, status),
            _ if !fits => return session.refuse(stream, short_of_memory()),
            (Ok(method), Ok(timeout)) => (method, timeout),
        };
        let request = Request {
            method,
            metadata,
            deadline: timeout.and_then(|timeout| now.checked_add(timeout)),
        };
        let limit = session.side.limits.message_bytes;
        let mut call = new_call(Stage::Request(request), held, now, limit);
        call.has_encoding = has_encoding;
        session.calls.insert(stream, call);
        if !method.takes_one {
            session.side.ready.push_back(stream);
        }
        if end {
            session.end_inbound(stream);
        }
    }

    /// Takes trailers for the end of the request: gRPC defines none for requests.
    fn trailers(session: &mut Session<Self>, stream: u32) {
        session.end_inbound(stream);
    }

    fn stream_ended(session: &mut Session<Self>, stream: u32) {
        session.finish(stream, Ok(()));
        session.request_ended(stream);
    }

    fn reject(session: &mut Session<Self>, stream: u32, status: Status) {
        session.refuse(stream, status);
    }

    /// Drops a failed call that no handler has; it needs neither a handler nor a response.
    fn call_ended(session: &mut Session<Self>, stream: u32) {
        let is_over =
            |call: &Call<ServerSide>| !call.side.has_handler() && matches!(call.end, Some(Err(_)));
        if session.calls.get(&stream).is_some_and(|call| is_over(call)) {
            session.calls.remove(&stream);
        }
    }

    fn violated(&mut self, error: h2::Error) {
        self.violation = Some(error);
    }

    fn accepts(call: &mut ServerCall, length: usize) -> Result<Data, Status> {
        match call.stage {
            // The handler has returned and needs no more of the request.
            Stage::Response(_) => Ok(Data::Ignore),
            Stage::Http(_) => Ok(Data::Discard),
            _ if call.held.grow(length) => Ok(Data::Message),
            _ => Err(short_of_memory()),
        }
    }

    fn message_taken(call: &mut ServerCall, length: usize) {
        call.held.take(length);
    }

    /// Continues the responses that wait for room.
    fn fill_output(session: &mut Session<Self>) {
        for _ in 0..session.side.outbound.len() {
            if !session.has_room() {
                break;
            }
            if let Some(stream) = session.side.outbound.pop_front() {
                session.continue_response(stream);
            }
        }
    }
}

impl Session<ServerSide> {
    // ---- requests ----

    /// Handles a request that is not gRPC. Once it is complete, it gets an HTTP status and a field
    /// that says what gRPC expects (gRPC over HTTP2: "servers SHOULD respond with HTTP status of
    /// 415" to another content-type).
    fn http_request(&mut self, stream: u32, end: bool, now: Instant) {
        let method = self.h2.headers().get(b":method");
        let (status, hint): (&[u8], (&[u8], &[u8])) = match method {
            Some(b"POST") => (b"415", (b"accept", b"application/grpc")),
            _ => (b"405", (b"allow", b"POST")),
        };
        let text: &[u8] = match method {
            Some(b"HEAD") => b"",
            _ => b"This is a gRPC server.\n",
        };
        let mut held = Held::new(self.buffers.share.clone());
        if !held.grow(CALL_BYTES) {
            return self.h2.reset(stream, ErrorCode::REFUSED_STREAM);
        }
        let response = HttpResponse { status, hint, text };
        let call = new_call(Stage::Http(response), held, now, 0);
        self.calls.insert(stream, call);
        if end {
            self.end_inbound(stream);
        }
    }

    /// Handles the end of a request: a method that takes one message can start.
    fn request_ended(&mut self, stream: u32) {
        let call = self.calls.get(&stream);
        match call.map(|call| &call.side.stage) {
            Some(Stage::Http(response)) => self.send_http_response(stream, *response),
            Some(Stage::Request(request)) if request.method.takes_one => {
                self.side.ready.push_back(stream);
            }
            _ => {}
        }
    }

    /// Returns the number of calls whose handler can start.
    pub(crate) fn requests(&self) -> usize {
        self.side.ready.len()
    }

    /// Removes and returns the next request whose handler can start, with its stream. The handler's
    /// result goes to [`Session::answer`].
    pub(crate) fn next_request(&mut self) -> Option<(u32, Request)> {
        while let Some(stream) = self.side.ready.pop_front() {
            // The call is absent if it was cancelled.
            if let Some(call) = self.calls.get_mut(&stream)
                && matches!(call.side.stage, Stage::Request(_))
                && let Stage::Request(request) = mem::replace(&mut call.side.stage, Stage::Handler)
            {
                return Some((stream, request));
            }
        }
        None
    }

    /// Returns whether the peer has no more interest in the call.
    pub(crate) fn is_cancelled(&self, stream: u32) -> bool {
        let call = self.calls.get(&stream);
        self.ended.is_some() || call.is_none_or(|call| matches!(call.end, Some(Err(_))))
    }

    // ---- responses ----

    /// Answers a call with the result of its handler: a framed message, or nothing if the handler
    /// has sent all messages; custom metadata for the headers and for the trailers.
    pub(crate) fn answer(
        &mut self,
        stream: u32,
        result: Result<Bytes, Status>,
        custom: (Metadata, Metadata),
    ) {
        match result {
            _ if self.is_cancelled(stream) => self.forget(stream),
            Ok(message) => {
                if !message.is_empty() {
                    self.send_response_headers(stream, &custom.0);
                }
                self.respond(stream, message, Some(custom));
            }
            Err(status) => {
                self.send_trailers(stream, Some(&status), &custom);
                self.forget(stream);
                // The request could not be decoded, or it makes no sense.
                if matches!(status.code(), Code::Internal | Code::InvalidArgument) {
                    self.h2.charge_reset();
                }
            }
        }
    }

    /// Ends a call with `status` instead of its handler's result. A running handler sees the call
    /// as cancelled.
    fn refuse(&mut self, stream: u32, status: Status) {
        self.send_trailers(stream, Some(&status), &Default::default());
        self.h2.charge_reset();
        self.side.had_call = true;
        match self.calls.get(&stream) {
            Some(call) if call.side.has_handler() => self.finish(stream, Err(status)),
            _ => self.forget(stream),
        }
    }

    /// Sends the response's headers unless they were sent before.
    pub(crate) fn send_response_headers(&mut self, stream: u32, custom: &Metadata) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        if !mem::replace(&mut call.side.has_answered, true) {
            let fields = RESPONSE.into_iter().chain(custom.fields());
            // If the stream is closed, the sender of the message notices it.
            if self.h2.send_headers(stream, fields, false) == Err(SendError::TooLarge) {
                call.side.has_answered = false;
                let status = Status::new(
                    Code::ResourceExhausted,
                    "the metadata exceeds the client's limit",
                );
                self.refuse(stream, status);
            }
        }
    }

    /// Sends the trailers: OK, or an error's `status`. If the headers were not sent before, both
    /// are one block ("Trailers-Only").
    fn send_trailers(
        &mut self,
        stream: u32,
        status: Option<&Status>,
        custom: &(Metadata, Metadata),
    ) {
        let call = self.calls.get(&stream);
        let mut has_answered = call.is_some_and(|call| call.side.has_answered);
        if status.is_none() && !has_answered {
            self.send_response_headers(stream, &custom.0);
            has_answered = true;
        }
        let code = status.map_or(Code::Ok, Status::code);
        let message = status
            .map(|status| percent_encode(beginning(status.message(), MESSAGE_MOST)))
            .unwrap_or_default();
        let details = status
            .map(|status| encode_bin(status.details()))
            .unwrap_or_default();
        let headers = RESPONSE
            .into_iter()
            .chain(custom.0.fields())
            .filter(|_| !has_answered);
        let trailers: [Option<Field>; 4] = [
            Some((b"grpc-status", code.as_header(), Indexing::Yes)),
            (!message.is_empty()).then_some((b"grpc-message", &message, Indexing::No)),
            (!details.is_empty()).then_some((
                b"grpc-status-details-bin",
                details.as_bytes(),
                Indexing::No,
            )),
            // A refusal names the encodings that would be accepted (section "Compression").
            (code == Code::Unimplemented).then_some((
                b"grpc-accept-encoding",
                b"identity",
                Indexing::Yes,
            )),
        ];
        let fields = headers
            .chain(trailers.into_iter().flatten())
            .chain(custom.1.fields());
        // A stream that is closed by now needs no response.
        if self.h2.send_headers(stream, fields, true) == Err(SendError::TooLarge) {
            let bare: [Field; 1] = [(
                b"grpc-status",
                Code::ResourceExhausted.as_header(),
                Indexing::Yes,
            )];
            let fields = RESPONSE.into_iter().filter(|_| !has_answered).chain(bare);
            if self.h2.send_headers(stream, fields, true).is_err() {
                self.h2.reset(stream, ErrorCode::INTERNAL_ERROR);
            }
        }
    }

    fn send_http_response(
        &mut self,
        stream: u32,
        HttpResponse { status, hint, text }: HttpResponse,
    ) {
        let fields: [Field; 2] = [
            (b":status", status, Indexing::Yes),
            (hint.0, hint.1, Indexing::Yes),
        ];
        let sent = self
            .h2
            .send_headers(stream, fields.into_iter(), text.is_empty());
        if sent.is_err() {
            self.h2.reset(stream, ErrorCode::INTERNAL_ERROR);
            self.forget(stream);
        } else if text.is_empty() {
            self.forget(stream);
        } else {
            self.respond(stream, Bytes(text.to_vec()), None);
        }
        self.h2.charge_reset();
    }

    /// Sends what there is room for, and leaves the rest of a response to [`Side::fill_output`].
    fn respond(&mut self, stream: u32, message: Bytes, custom: Option<(Metadata, Metadata)>) {
        if let Some(call) = self.calls.get_mut(&stream) {
            call.side.stage = Stage::Response(Response {
                message,
                sent: 0,
                custom,
                has_moved: false,
                moved: None,
            });
            self.continue_response(stream);
        }
    }

    /// Frames as much of a response as the peer and the output have room for.
    fn continue_response(&mut self, stream: u32) {
        let most = self.output_limit().saturating_sub(self.h2.output().len());
        // The call is absent if it was cancelled.
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        let Stage::Response(response) = &mut call.side.stage else {
            return;
        };
        let rest = &response.message[response.sent..];
        let piece = &rest[..rest.len().min(most)];
        let is_last = piece.len() == rest.len() && response.custom.is_none();
        let Some(sent) = super::frame(&mut self.h2, stream, piece, is_last) else {
            return self.forget(stream);
        };
        response.sent += sent;
        if response.sent == response.message.len() {
            if let Some(custom) = response.custom.take() {
                self.send_trailers(stream, None, &custom);
            }
            return self.forget(stream);
        }
        response.has_moved |= sent > 0 || response.moved.is_none();
        // The request is no longer needed, so only the response counts.
        let length = response.message.len();
        if call.side.held.set(length) {
            self.side.outbound.push_back(stream);
        } else {
            self.send_trailers(stream, Some(&short_of_memory()), &Default::default());
            self.forget(stream);
        }
    }

    /// Removes a call that is over.
    fn forget(&mut self, stream: u32) {
        self.calls.remove(&stream);
        self.side.had_call = true;
    }

    // ---- the connection ----

    /// Starts the graceful shutdown: the peer learns that it must open no further calls.
    pub(crate) fn shutdown(&mut self, why: &str) {
        self.h2.shutdown(why);
    }

    /// Returns whether no call is open, and the peer knows that it must open no further ones.
    pub(crate) fn is_drained(&self) -> bool {
        self.calls.is_empty() && self.h2.is_drained()
    }

    /// Accepts no further calls; the open ones must end by `by`.
    pub(crate) fn retire(&mut self, why: &str, by: Instant) {
        self.goaway(why);
        self.side.closes_by.get_or_insert(by);
    }

    /// Drops the calls that no handler has. Their connection is over.
    pub(crate) fn drop_calls(&mut self) {
        self.side.ready.clear();
        self.calls.retain(|_, call| call.side.has_handler());
    }

    /// Takes the description of the peer's violation of HTTP/2.
    pub(crate) fn take_violation(&mut self) -> Option<h2::Error> {
        self.side.violation.take()
    }

    /// Checks the timers; the interval between checks is their precision. Returns why the
    /// connection ends, if this check ends it.
    pub(crate) fn check_timers(&mut self, now: Instant) -> Option<&'static str> {
        if self.ended.is_some() {
            return None;
        }
        let (code, why) = self.check_or_end(now).err()?;
        self.h2.goaway(code, why);
        self.end(Status::new(Code::Unavailable, why));
        Some(why)
    }

    fn check_or_end(&mut self, now: Instant) -> Result<(), (ErrorCode, &'static str)> {
        let limits = self.side.limits.clone();
        let is_over =
            |since: Instant, limit: Duration| now.saturating_duration_since(since) >= limit;
        let side = &mut self.side;
        if !self.h2.is_established() {
            return if now >= side.established_by {
                Err((ErrorCode::SETTINGS_TIMEOUT, "HTTP/2 did not start in time"))
            } else {
                Ok(())
            };
        }
        if !self.h2.is_within_headers() {
            side.within_headers_since = None;
        } else if is_over(*side.within_headers_since.get_or_insert(now), limits.stall) {
            return Err((
                ErrorCode::ENHANCE_YOUR_CALM,
                "a header block was not complete in time",
            ));
        }
        if mem::take(&mut side.had_call) || !self.calls.is_empty() {
            side.idle_since = now;
        }
        self.end_late_calls(|since| is_over(since, limits.stall), now);
        let side = &mut self.side;
        if self.calls.is_empty() && is_over(side.idle_since, limits.idle) {
            return Err((ErrorCode::NO_ERROR, "it was idle"));
        }
        match side.closes_by {
            Some(by) if now >= by => {
                return Err((ErrorCode::NO_ERROR, "its calls did not end in time"));
            }
            None if limits.max_age.is_some_and(|age| is_over(side.opened, age)) => {
                side.closes_by = Some(now + limits.max_age_grace);
                self.h2.shutdown("max_age");
            }
            _ => {}
        }
        if self.keepalive(limits.keepalive, limits.keepalive_timeout, now) {
            return Err((ErrorCode::NO_ERROR, "a PING was not answered in time"));
        }
        Ok(())
    }

    /// Ends calls whose request is not complete in time, and calls whose response the peer does not
    /// read.
    fn end_late_calls(&mut self, is_late: impl Fn(Instant) -> bool, now: Instant) {
        let mut late = Vec::new();
        for (&stream, call) in &mut self.calls {
            let since = match &mut call.side.stage {
                Stage::Request(_) | Stage::Http(_) if call.end.is_none() => Some(call.side.started),
                Stage::Response(response) => {
                    if mem::take(&mut response.has_moved) {
                        response.moved = Some(now);
                    }
                    response.moved
                }
                _ => None,
            };
            if since.is_some_and(&is_late) {
                late.push(stream);
            }
        }
        for stream in late {
            match self.calls.get(&stream).map(|call| &call.side.stage) {
                Some(Stage::Http(response)) => self.send_http_response(stream, *response),
                Some(Stage::Request(_)) => {
                    let why = "the request was not complete in time";
                    self.refuse(stream, Status::new(Code::DeadlineExceeded, why));
                }
                _ => {
                    self.h2.reset(stream, ErrorCode::CANCEL);
                    self.forget(stream);
                }
            }
        }
    }
}

impl ServerCall {
    /// Returns whether a handler has the call; the handler then ends it.
    fn has_handler(&self) -> bool {
        matches!(self.stage, Stage::Handler)
    }
}

fn new_call(
    stage: Stage,
    held: Held,
    started: Instant,
    message_limit: usize,
) -> Box<Call<ServerSide>> {
    let call = ServerCall {
        stage,
        started,
        held,
        has_answered: false,
    };
    Box::new(Call::new(message_limit, call))
}

fn short_of_memory() -> Status {
    Status::new(
        Code::ResourceExhausted,
        "the server has no memory left for this call",
    )
}

/// Returns the beginning of a text, of at most `most` bytes.
fn beginning(text: &str, most: usize) -> &str {
    let end = (0..=text.len().min(most))
        .rev()
        .find(|&at| text.is_char_boundary(at));
    &text[..end.unwrap_or(0)]
}
