//! The engine of a gRPC connection: calls and their messages, over [`crate::h2`].
//!
//! [`Session`] is a state machine. Received bytes go in through [`Session::receive`]; messages,
//! [`Changes`] and bytes ([`Session::output`]) come out; the caller passes the time in. It has no
//! socket, no clock, no lock and no thread. The state and behaviour that only one end of a
//! connection has are in its [`Side`]: `client` opens calls and reads responses, `server` reads
//! requests and answers them.
//!
//! ```text
//!   bytes ─► receive ─► h2 ─► headers, trailers ─► Side ──────────┬─► server: next_request
//!                        └──► DATA ─► message::Assembler of a call ┴─► changes: a call has a message or its end
//! ```

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::message::Assembler;
use super::status::{Code, Status};
use crate::h2::{self, Connection, ErrorCode, Event, StreamMap};
use crate::share::{Held, PeerShare};
use base::crypto::buffer::{Bytes, reserve, wipe};

mod client;
mod server;

pub(super) use client::{ClientSide, RequestHead};
pub(super) use server::{Request, ServerSide};

/// DATA is framed only while the output is smaller than this, in bytes. The second value applies
/// while memory is scarce.
const OUTPUT: usize = 64 << 10;
pub(super) const OUTPUT_LEAN: usize = 2 << 10;
/// Nothing is received while the output is larger than this multiple of the value above, so that
/// our answers to control frames are bounded, too. It must exceed what DATA alone can reach;
/// otherwise two peers that both send much would block each other.
const OUTPUTS_HELD: usize = 3;
/// Room in bytes for the largest frame that a peer may send.
pub(super) const FRAME: usize = 17 << 10;
/// Bytes of buffers of each connection that do not count against its peer's share.
const BUFFERS_FREE: usize = FRAME + 2 * OUTPUT_LEAN;

/// One end of a gRPC connection.
pub(super) struct Session<S: Side> {
    h2: Connection,
    side: S,
    /// Boxed, because the map keeps the places of calls that ended.
    calls: StreamMap<Box<Call<S>>>,
    /// Set when the connection is over; calls without an answer end with this status.
    ended: Option<Status>,
    changes: Changes,
    last_received: Instant,
    ping_sent: Option<Instant>,
    /// The memory of the buffers of the connection, and its part that the caller has.
    buffers: Held,
    outer_buffers: usize,
}

/// The state and behaviour that only one end of a connection has.
pub(super) trait Side: Sized {
    /// What this end knows of a call.
    type Call;

    /// Handles the headers with which the peer begins a stream, or begins its response.
    fn headers(session: &mut Session<Self>, stream: u32, end: bool, now: Instant);

    /// Puts more into the output than what was sent through [`Session::send`].
    fn fill_output(_session: &mut Session<Self>) {}

    /// Handles trailers.
    fn trailers(session: &mut Session<Self>, stream: u32);

    /// Handles the end of the peer's side without trailers, after a complete message.
    fn stream_ended(session: &mut Session<Self>, stream: u32);

    /// Ends a call that the peer has not ended.
    fn reject(session: &mut Session<Self>, stream: u32, status: Status);

    /// Called when a call has its end.
    fn call_ended(session: &mut Session<Self>, stream: u32);

    /// Handles GOAWAY.
    fn goaway(_session: &mut Session<Self>, _last: u32, _code: ErrorCode, _debug: &[u8]) {}

    /// Called when the peer violated HTTP/2.
    fn violated(&mut self, _error: h2::Error) {}

    /// Says what to do with the next `length` bytes of a call, or why it fails.
    fn accepts(_call: &mut Self::Call, _length: usize) -> Result<Data, Status> {
        Ok(Data::Message)
    }

    /// Called when a message of `length` bytes is taken.
    fn message_taken(_call: &mut Self::Call, _length: usize) {}

    /// Returns what the peer said about the end of the connection, as the end of a sentence.
    fn last_words(&self) -> &str {
        ""
    }
}

/// What becomes of received DATA.
pub(super) enum Data {
    /// It is part of a message.
    Message,
    /// It is dropped, and the peer may send more.
    Discard,
    /// It is dropped, and the stream's window stays as it is.
    Ignore,
}

/// A call.
struct Call<S: Side> {
    inbound: Assembler,
    message_limit: usize,
    /// Whether the client named a compression.
    has_encoding: bool,
    /// Number of received bytes that are released when a message is taken.
    unreleased: u32,
    /// How the peer's side ended. `Ok`: complete. `Err`: the call failed or was cancelled.
    end: Option<Result<(), Status>>,
    /// When the caller stops waiting. A server leaves that to the handler.
    deadline: Option<Instant>,
    side: S::Call,
}

impl<S: Side> Call<S> {
    fn new(message_limit: usize, side: S::Call) -> Call<S> {
        Call {
            inbound: Assembler::default(),
            message_limit,
            has_encoding: false,
            unreleased: 0,
            end: None,
            deadline: None,
            side,
        }
    }
}

/// What has changed since [`Changes::clear`], for who waits for it.
#[derive(Default)]
pub(super) struct Changes {
    /// Streams of calls with a message, an end, or room to send.
    pub(super) calls: Vec<u32>,
    /// The peer may allow another stream.
    pub(super) slot: bool,
    /// Everything may have changed.
    pub(super) all: bool,
}

impl Changes {
    pub(super) fn clear(&mut self) {
        self.calls.clear();
        (self.slot, self.all) = (false, false);
    }
}

impl<S: Side> Session<S> {
    fn new(h2: Connection, side: S, share: Arc<PeerShare>, now: Instant) -> Session<S> {
        Session {
            h2,
            side,
            calls: StreamMap::default(),
            ended: None,
            changes: Changes::default(),
            last_received: now,
            ping_sent: None,
            buffers: Held::new(share),
            outer_buffers: 0,
        }
    }

    // ---- bytes ----

    /// Processes received bytes. Returns how many it has taken; the caller passes the rest again,
    /// together with more, or once the output is no longer full.
    pub(super) fn receive(&mut self, bytes: &[u8], now: Instant) -> usize {
        self.last_received = now;
        let mut taken = 0;
        while self.ended.is_none() && !self.is_output_full() {
            match self.h2.receive(&bytes[taken..], now) {
                Ok((0, _)) => break,
                Ok((length, event)) => {
                    taken += length;
                    if let Some(event) = event {
                        self.event(event, now);
                    }
                }
                Err(error) => {
                    self.side.violated(error);
                    self.end(Status::new(
                        Code::Unavailable,
                        format!("the peer violated HTTP/2: {error}"),
                    ));
                }
            }
        }
        self.h2.forget_headers();
        self.count_buffers();
        if self.h2.block_room() > 0 && self.is_memory_scarce() {
            let why = "not enough memory for a header block of more than one frame";
            self.h2.refuse_block(why);
            self.end(Status::new(Code::ResourceExhausted, why));
            self.count_buffers();
        }
        taken
    }

    /// Handles the end of the peer's bytes.
    pub(super) fn receive_end(&mut self) {
        let why = format!("the peer closed the connection{}", self.side.last_words());
        self.end(Status::new(Code::Unavailable, why));
    }

    /// Returns the bytes to send. The caller takes them all.
    pub(super) fn output(&mut self) -> &mut Vec<u8> {
        self.h2.output()
    }

    /// Drops the bytes to send, because the peer takes none.
    pub(super) fn discard_output(&mut self) {
        wipe(self.h2.output());
        self.h2.output().clear();
    }

    /// Puts into the output what waits for room in it. Returns whether there is anything to send.
    pub(super) fn fill_output(&mut self) -> bool {
        S::fill_output(self);
        !self.h2.output().is_empty()
    }

    /// Returns whether the output has room for DATA.
    pub(super) fn has_room(&mut self) -> bool {
        self.h2.output().len() < self.output_limit()
    }

    /// Returns whether the output is so large that nothing more is received, because the peer does
    /// not read.
    pub(super) fn is_output_full(&mut self) -> bool {
        self.h2.output().len() >= OUTPUTS_HELD * OUTPUT_LEAN
            && self.h2.output().len() >= OUTPUTS_HELD * self.output_limit()
    }

    /// Returns the size of the output in bytes at which no more DATA is framed.
    fn output_limit(&self) -> usize {
        if self.is_memory_scarce() {
            OUTPUT_LEAN
        } else {
            OUTPUT
        }
    }

    /// Returns whether buffers should be small.
    pub(super) fn is_memory_scarce(&self) -> bool {
        self.buffers.share.memory.is_scarce()
    }

    /// Sets how many bytes of buffers the caller has for this connection.
    pub(super) fn set_outer_buffers(&mut self, bytes: usize) {
        self.outer_buffers = bytes;
        self.count_buffers();
    }

    fn count_buffers(&mut self) {
        let room = self.h2.output().capacity() + self.outer_buffers;
        self.buffers
            .set(room.saturating_sub(BUFFERS_FREE) + self.h2.block_room());
    }

    // ---- events ----

    fn event(&mut self, event: Event<'_>, now: Instant) {
        match event {
            Event::Headers { stream, end } => S::headers(self, stream, end, now),
            Event::Data { stream, data, end } => self.data(stream, data, end),
            Event::Trailers { stream } => S::trailers(self, stream),
            Event::Reset {
                stream,
                code,
                by_peer,
            } => {
                let deadline = self.calls.get(&stream).and_then(|call| call.deadline);
                let is_late = deadline.is_some_and(|deadline| deadline <= now);
                self.finish(stream, Err(reset_status(code, by_peer, is_late)));
            }
            // Each stream may have waited for this.
            Event::Window { stream: 0 } => self.changes.all = true,
            Event::Window { stream } => self.changed(stream),
            Event::GoAway { last, code, debug } => S::goaway(self, last, code, debug),
            Event::Pong => {}
        }
    }

    fn data(&mut self, stream: u32, data: &[u8], end: bool) {
        let Some(call) = self
            .calls
            .get_mut(&stream)
            .filter(|call| call.end.is_none())
        else {
            // Our response was complete before the request (RFC 9113 §8.1). We reset the stream
            // only now that more data arrives, because some clients drop the response if RST_STREAM
            // follows it closely.
            return self.h2.reset(stream, ErrorCode::NO_ERROR);
        };
        let accepted = S::accepts(&mut call.side, data.len());
        if matches!(accepted, Ok(Data::Ignore)) {
            return;
        }
        // A message that is waited for must arrive whatever its size, so its bytes are released at
        // once. The bytes of later messages are released when they are taken.
        if call.inbound.waiting() == 0 {
            self.h2.release(stream, data.len() as u32);
        } else {
            call.unreleased += data.len() as u32;
        }
        let fed = match accepted {
            Ok(Data::Message) => call
                .inbound
                .feed(data, call.message_limit, call.has_encoding),
            Ok(_) => Ok(()),
            Err(status) => Err(status),
        };
        let has_message = call.inbound.waiting() > 0;
        match fed {
            Err(status) => S::reject(self, stream, status),
            Ok(()) if end => self.end_inbound(stream),
            Ok(()) if has_message => self.changed(stream),
            Ok(()) => {}
        }
    }

    /// Handles the end of the peer's side without trailers.
    fn end_inbound(&mut self, stream: u32) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        if call.inbound.is_between_messages() {
            return S::stream_ended(self, stream);
        }
        let cut = "the stream ended in the middle of a message";
        S::reject(self, stream, Status::new(Code::Internal, cut));
    }

    /// Stores how a call ended. Only the first end counts.
    pub(super) fn finish(&mut self, stream: u32, end: Result<(), Status>) {
        if let Some(call) = self.calls.get_mut(&stream) {
            if call.end.as_ref().is_none_or(|before| before.is_ok()) {
                call.end = Some(end);
            }
            S::call_ended(self, stream);
        }
        self.changed(stream);
        self.changes.slot = true;
    }

    /// Notes that a call has changed. Nobody waits for a call that is not in the map.
    fn changed(&mut self, stream: u32) {
        if self.calls.contains_key(&stream) && !self.changes.calls.contains(&stream) {
            self.changes.calls.push(stream);
        }
    }

    /// Returns what has changed; the caller clears it.
    pub(super) fn changes(&mut self) -> &mut Changes {
        &mut self.changes
    }

    // ---- calls ----

    /// Frames a part of a message, as far as the peer's windows and the output have room; with
    /// `end`, its last part ends our side. Returns the number of bytes, or why nothing more can be
    /// sent.
    pub(super) fn send(&mut self, stream: u32, message: &[u8], end: bool) -> Result<usize, Status> {
        if self.ended.is_some() {
            return Err(self.why_closed(stream));
        }
        let piece = &message[..message.len().min(self.output_limit())];
        let is_last = piece.len() == message.len();
        frame(&mut self.h2, stream, piece, end && is_last).ok_or_else(|| self.why_closed(stream))
    }

    /// Returns whether the peer's windows are open, or [`Session::send`] would fail.
    pub(super) fn may_send(&self, stream: u32) -> bool {
        self.h2.may_send(stream)
    }

    /// Removes and returns the next message of a call. Its result is `None` after the peer's side
    /// ended without an error. Returns `None` if none of these has arrived.
    pub(super) fn next_message(&mut self, stream: u32) -> Option<Result<Option<Bytes>, Status>> {
        let Some(call) = self.calls.get_mut(&stream) else {
            return Some(Err(Status::new(Code::Cancelled, "the call is over")));
        };
        if let Some(message) = call.inbound.pop() {
            if call.inbound.waiting() == 0 {
                self.h2.release(stream, mem::take(&mut call.unreleased));
            }
            S::message_taken(&mut call.side, message.len());
            return Some(Ok(Some(message)));
        }
        call.end.clone().map(|end| end.map(|()| None))
    }

    /// Takes back the buffer of a message for a later message of the call.
    pub(super) fn reuse(&mut self, stream: u32, spent: Bytes) {
        if let Some(call) = self.calls.get_mut(&stream) {
            call.inbound.reuse(spent);
        }
    }

    /// Returns why nothing more can be sent on a stream.
    fn why_closed(&self, stream: u32) -> Status {
        let end = self.calls.get(&stream).and_then(|call| call.end.clone());
        match (end, &self.ended) {
            (Some(Err(status)), _) => status,
            (_, Some(status)) => status.clone(),
            _ => Status::new(Code::Cancelled, "the stream is closed"),
        }
    }

    /// Returns whether no call is open.
    pub(super) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    // ---- the connection ----

    /// Sends GOAWAY: the connection accepts no further streams. `why` is text for people.
    pub(super) fn goaway(&mut self, why: &str) {
        self.h2.goaway(ErrorCode::NO_ERROR, why);
    }

    /// Ends the connection. Only the first end counts.
    pub(super) fn end(&mut self, status: Status) {
        self.ended.get_or_insert(status);
        self.changes.all = true;
    }

    /// Returns why the connection is over, if it is.
    pub(super) fn ended(&self) -> Option<&Status> {
        self.ended.as_ref()
    }

    /// Returns when the last bytes were received.
    pub(super) fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Sends a PING after the time `every` without a byte from the peer. Returns whether a PING was
    /// not answered within `timeout`.
    pub(super) fn keepalive(&mut self, every: Duration, timeout: Duration, now: Instant) -> bool {
        match self.ping_sent {
            Some(sent) if self.last_received >= sent => self.ping_sent = None,
            Some(sent) => return now.duration_since(sent) >= timeout,
            None if now.duration_since(self.last_received) >= every => {
                self.h2.ping();
                self.ping_sent = Some(now);
            }
            None => {}
        }
        false
    }
}

/// Frames as much of a piece as the peer's windows allow; `None` if the stream is closed.
fn frame(h2: &mut Connection, stream: u32, piece: &[u8], end: bool) -> Option<usize> {
    // Room for the piece and its frame heads.
    reserve(h2.output(), piece.len() + 64);
    h2.send_data(stream, piece, end).ok()
}

/// Returns the status of a call that RST_STREAM ended ("gRPC over HTTP2", section "Errors").
fn reset_status(code: ErrorCode, by_peer: bool, is_late: bool) -> Status {
    let status = match code {
        ErrorCode::REFUSED_STREAM => Code::Unavailable,
        // A server that enforces the deadline itself, such as grpc-go's, ends the call this way.
        ErrorCode::CANCEL if is_late => Code::DeadlineExceeded,
        ErrorCode::CANCEL => Code::Cancelled,
        ErrorCode::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
        ErrorCode::INADEQUATE_SECURITY => Code::PermissionDenied,
        _ => Code::Internal,
    };
    let who = if by_peer {
        "the peer reset the stream"
    } else {
        "the stream was reset because the peer violated the protocol"
    };
    let status = Status::new(status, format!("{who} ({code})"));
    if by_peer && code == ErrorCode::REFUSED_STREAM {
        status.unprocessed()
    } else {
        status
    }
}

/// Returns the HTTP/2 limits for `streams` concurrent calls with headers of at most `header_bytes`.
fn h2_limits(streams: u32, header_bytes: u32) -> h2::H2Limits {
    h2::H2Limits {
        streams,
        header_list: header_bytes,
        ..h2::H2Limits::default()
    }
}

#[cfg(test)]
mod tests;
