//! The connection's state machine. Section numbers refer to RFC 9113.

use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

use super::budget::{Allowance, Budget};
use super::frame::ErrorCode as Code;
use super::frame::{
    self, ErrorCode, HEAD, Head, MAX_31_BITS, MAX_FRAME, PREFACE, flag, kind, setting,
};
use super::headers::{FIELD_OVERHEAD, HeaderList};
use super::hpack::{Decoder, Encoder, Field};
use super::streams::StreamMap;
use transport::strangers;

/// Initial size of all flow-control windows, before any SETTINGS or WINDOW_UPDATE (§6.9.2).
const DEFAULT_WINDOW: u32 = 65_535;
/// Number of closed streams whose end is remembered, to tell a late frame from a protocol error
/// (§5.1).
const CLOSED_REMEMBERED: usize = 256;
/// Maximum number of CONTINUATION frames for one header block. We send at most 4, for the largest
/// block that peers accept by default.
const CONTINUATIONS: u32 = 16;
/// How many bytes a header block may exceed the limit of the header list. Within this margin, only
/// the stream is refused; a larger block ends the connection as an attack (CVE-2024-24549 and
/// similar).
const BLOCK_SLACK: usize = 64 << 10;
/// Payloads of our PINGs, to tell their acknowledgements apart.
const PING_KEEPALIVE: [u8; 8] = *b"keepaliv";
const PING_DRAIN: [u8; 8] = *b"draining";

/// What a connection allows its peer.
#[derive(Clone, Copy, Debug)]
pub struct H2Limits {
    /// Maximum number of streams that the peer may have open at once
    /// (SETTINGS_MAX_CONCURRENT_STREAMS); further ones are refused.
    pub streams: u32,
    /// Maximum size in bytes of a header list as §6.5.2 counts it, and of a header block on the
    /// wire.
    pub header_list: u32,
    /// Maximum number of received bytes of one stream that are not released yet
    /// (SETTINGS_INITIAL_WINDOW_SIZE); at least 65 535.
    pub stream_window: u32,
    /// Maximum number of received bytes of all streams that are not released yet; at least 65 535.
    pub connection_window: u32,
    /// Streams that the peer opens only to reset them or to make us reset them (CVE-2023-44487,
    /// CVE-2025-8671), and requests that are refused.
    pub resets: Allowance,
    /// Frames that cost work and carry no request data: SETTINGS, PING, PRIORITY, empty DATA,
    /// unknown types, and more WINDOW_UPDATE than our own DATA explains.
    pub control: Allowance,
}

impl Default for H2Limits {
    fn default() -> H2Limits {
        H2Limits {
            streams: 100,
            header_list: 16 << 10,
            stream_window: 256 << 10,
            connection_window: 1 << 20,
            // The defaults of nghttp2 against the same attack.
            resets: Allowance {
                burst: 1000,
                per_second: 33,
            },
            control: Allowance {
                burst: 1000,
                per_second: 100,
            },
        }
    }
}

/// The peer broke a rule that ends the connection (§5.4.1), or exceeded a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    /// The error code of our GOAWAY.
    pub code: ErrorCode,
    /// The rule that was broken.
    pub reason: &'static str,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.reason)
    }
}

impl std::error::Error for Error {}

fn error<T, E: From<Error>>(code: ErrorCode, reason: &'static str) -> Result<T, E> {
    Err(Error { code, reason }.into())
}

/// Returns PROTOCOL_ERROR, the code of most rules, if the rule is broken.
fn forbid(is_broken: bool, reason: &'static str) -> Result<(), Error> {
    forbid_as(Code::PROTOCOL_ERROR, is_broken, reason)
}

/// Returns `code` if the rule is broken.
fn forbid_as(code: ErrorCode, is_broken: bool, reason: &'static str) -> Result<(), Error> {
    if is_broken {
        error(code, reason)
    } else {
        Ok(())
    }
}

/// Returns the payload of a frame type that has a fixed length of `N` bytes.
fn exactly<const N: usize>(payload: &[u8], reason: &'static str) -> Result<[u8; N], Error> {
    payload
        .try_into()
        .or_else(|_| error(Code::FRAME_SIZE_ERROR, reason))
}

/// Returns a stream error with `code` if a rule of the stream is broken.
fn forbid_on(stream: u32, is_broken: bool, code: ErrorCode) -> Result<(), Fault> {
    if is_broken {
        Err(Fault::Stream(stream, code))
    } else {
        Ok(())
    }
}

/// What a received frame means to the layer above.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A request, or the final response. [`Connection::headers`] has the fields until the next call
    /// of [`Connection::receive`].
    Headers {
        /// The stream; on a server, a new one.
        stream: u32,
        /// Whether the message has neither body nor trailers.
        end: bool,
    },
    /// The trailers; [`Connection::headers`] has the fields. They end the peer's side of the
    /// stream.
    Trailers {
        /// The stream.
        stream: u32,
    },
    /// A part of the body. It counts against the stream's window until [`Connection::release`].
    Data {
        /// The stream.
        stream: u32,
        /// The bytes without padding.
        data: &'a [u8],
        /// Whether this is the last part and no trailers follow.
        end: bool,
    },
    /// The stream was reset before its end.
    Reset {
        /// The stream.
        stream: u32,
        /// The code of RST_STREAM.
        code: ErrorCode,
        /// Whether the peer reset the stream. Otherwise we did, because the peer broke a rule of
        /// the stream.
        by_peer: bool,
    },
    /// The send window may have grown: of one stream, or of all streams.
    Window {
        /// The stream, or 0 for all streams.
        stream: u32,
    },
    /// The peer accepts no new streams and does not process our streams above `last`.
    GoAway {
        /// The last stream that the peer may have processed.
        last: u32,
        /// The reason.
        code: ErrorCode,
        /// The reason as text for people; arbitrary bytes, often empty.
        debug: &'a [u8],
    },
    /// The peer acknowledged our keepalive PING.
    Pong,
}

/// Why nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The number of open streams has reached the peer's limit.
    TooMany,
    /// The peer sent GOAWAY, or all stream identifiers are used: the caller needs another
    /// connection.
    GoingAway,
    /// The fields exceed the peer's SETTINGS_MAX_HEADER_LIST_SIZE.
    TooLarge,
    /// The stream is closed, at least for sending.
    Closed,
}

struct Stream {
    local_open: bool,
    remote_open: bool,
    /// Client: the headers of the final response were received; further headers are trailers.
    has_headers: bool,
    /// May be negative after SETTINGS (§6.9.2).
    send_window: i64,
    receive_window: i64,
    /// Bytes that were released but not yet announced to the peer by WINDOW_UPDATE.
    unannounced: u32,
    /// Remaining bytes of the body according to `content-length` (§8.1.1).
    length_left: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Closed {
    Ended,
    ResetByPeer,
    ResetByUs,
}

/// A header block that is not complete yet.
struct Block {
    stream: u32,
    end_stream: bool,
    depends_on_itself: bool,
    fragments: Vec<u8>,
    continuations: u32,
}

/// A stream error (§5.4.2) or a connection error (§5.4.1).
enum Fault {
    Stream(u32, ErrorCode),
    Connection(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Connection(error)
    }
}

type Outcome<'a> = Result<Option<Event<'a>>, Fault>;

/// One side of an HTTP/2 connection.
pub struct Connection {
    is_server: bool,
    limits: H2Limits,
    out: Vec<u8>,

    preface_left: &'static [u8],
    has_settings: bool,
    settings_acknowledged: bool,
    block: Option<Block>,
    headers: HeaderList,
    decoder: Decoder,
    encoder: Encoder,

    streams: StreamMap<Stream>,
    closed: VecDeque<(u32, Closed)>,
    /// The highest stream identifier that the peer has opened.
    last_peer_stream: u32,
    next_own_stream: u32,

    send_window: i64,
    receive_window: i64,
    unannounced: u32,
    peer_stream_window: u32,
    peer_streams: u32,
    peer_header_list: usize,

    is_draining: bool,
    /// The last stream identifier in our GOAWAY; higher streams are ignored (§6.8).
    promised_last: u32,
    peer_goes_away: bool,
    /// The error by which the peer ended the connection.
    dead: Option<Error>,

    resets: Budget,
    control: Budget,
    /// When the last bytes were received.
    now: Option<Instant>,
}

impl Connection {
    /// Creates the client's side. The output already has its preface and SETTINGS.
    pub fn client(limits: H2Limits) -> Connection {
        let mut connection = Connection::new(false, limits);
        connection.out.extend_from_slice(PREFACE);
        connection.send_settings(&[(setting::ENABLE_PUSH, 0)]);
        connection
    }

    /// Creates the server's side. The output already has its SETTINGS.
    pub fn server(limits: H2Limits) -> Connection {
        let mut connection = Connection::new(true, limits);
        connection.send_settings(&[(setting::MAX_CONCURRENT_STREAMS, limits.streams)]);
        connection
    }

    fn new(is_server: bool, limits: H2Limits) -> Connection {
        Connection {
            is_server,
            limits,
            out: Vec::new(),
            preface_left: if is_server { PREFACE } else { &[] },
            has_settings: false,
            settings_acknowledged: false,
            block: None,
            headers: HeaderList::new(limits.header_list as usize),
            decoder: Decoder::new(),
            encoder: Encoder::new(),
            streams: StreamMap::default(),
            closed: VecDeque::new(),
            last_peer_stream: 0,
            next_own_stream: if is_server { 2 } else { 1 },
            send_window: i64::from(DEFAULT_WINDOW),
            receive_window: i64::from(limits.connection_window),
            unannounced: 0,
            peer_stream_window: DEFAULT_WINDOW,
            // There are no limits until the peer sets them (§6.5.2).
            peer_streams: u32::MAX,
            peer_header_list: usize::MAX,
            is_draining: false,
            promised_last: MAX_31_BITS,
            peer_goes_away: false,
            dead: None,
            resets: Budget::new(limits.resets),
            control: Budget::new(limits.control),
            now: None,
        }
    }

    fn send_settings(&mut self, own: &[(u16, u32)]) {
        let common = [
            (setting::INITIAL_WINDOW_SIZE, self.limits.stream_window),
            (setting::MAX_HEADER_LIST_SIZE, self.limits.header_list),
        ];
        frame::settings(&mut self.out, &[own, &common].concat());
        let grown = self.limits.connection_window.saturating_sub(DEFAULT_WINDOW);
        if grown > 0 {
            frame::window_update(&mut self.out, 0, grown);
        }
    }

    // ---- receiving ----

    /// Processes at most one frame from the start of `input`. Returns the number of bytes to skip
    /// and the event. 0 bytes mean that the frame is not complete; a frame has at most 16 393
    /// bytes. After an error, the output ends with GOAWAY, and the connection neither receives nor
    /// sends anything.
    pub fn receive<'a>(
        &mut self,
        input: &'a [u8],
        now: Instant,
    ) -> Result<(usize, Option<Event<'a>>), Error> {
        self.now = Some(now);
        match self.dead {
            Some(error) => Err(error),
            None => self
                .receive_frame(input, now)
                .inspect_err(|error| self.die(*error)),
        }
    }

    /// Ends the connection with GOAWAY (§5.4.1).
    fn die(&mut self, error: Error) {
        self.goaway(error.code, error.reason);
        self.dead = Some(error);
        self.streams.clear();
        self.block = None;
    }

    fn receive_frame<'a>(
        &mut self,
        input: &'a [u8],
        now: Instant,
    ) -> Result<(usize, Option<Event<'a>>), Error> {
        if !self.preface_left.is_empty() {
            let length = input.len().min(self.preface_left.len());
            let (expected, rest) = self.preface_left.split_at(length);
            forbid(
                input[..length] != *expected,
                strangers::protocol(input).unwrap_or("not the HTTP/2 preface (§3.4)"),
            )?;
            self.preface_left = rest;
            return Ok((length, None));
        }
        let Some(head) = Head::parse(input) else {
            return Ok((0, None));
        };
        forbid_as(
            Code::FRAME_SIZE_ERROR,
            head.length > MAX_FRAME,
            "a frame larger than SETTINGS_MAX_FRAME_SIZE (§4.2)",
        )?;
        let Some(payload) = input.get(HEAD..HEAD + head.length) else {
            return Ok((0, None));
        };
        let event = match self.frame(head, payload, now) {
            Ok(event) => event,
            Err(Fault::Stream(stream, code)) => self.stream_error(stream, code, now)?,
            Err(Fault::Connection(error)) => return Err(error),
        };
        Ok((HEAD + head.length, event))
    }

    /// Returns the fields of the last [`Event::Headers`] or [`Event::Trailers`].
    pub fn headers(&self) -> &HeaderList {
        &self.headers
    }

    /// Clears the fields and frees the memory of large ones.
    pub fn forget_headers(&mut self) {
        self.headers.clear();
    }

    /// Returns the bytes of memory that an incomplete header block uses.
    pub fn block_room(&self) -> usize {
        self.block
            .as_ref()
            .map_or(0, |block| block.fragments.capacity())
    }

    /// Ends the connection because its incomplete header block uses too much memory.
    pub fn refuse_block(&mut self, reason: &'static str) {
        self.die(Error {
            code: Code::ENHANCE_YOUR_CALM,
            reason,
        });
    }

    fn frame<'a>(&mut self, head: Head, payload: &'a [u8], now: Instant) -> Outcome<'a> {
        forbid(
            !self.has_settings && (head.kind != kind::SETTINGS || head.has(flag::ACK)),
            "the first frame is not SETTINGS (§3.4)",
        )?;
        let continues_block =
            |block: &Block| head.kind == kind::CONTINUATION && head.stream == block.stream;
        let interrupts = !self.block.as_ref().is_none_or(continues_block);
        forbid(interrupts, "a frame within a header block (§4.3)")?;
        let is_connection_frame = matches!(head.kind, kind::SETTINGS | kind::PING | kind::GOAWAY);
        forbid(
            is_connection_frame && head.stream != 0,
            "a connection frame on a stream (§6)",
        )?;
        let is_stream_frame = matches!(
            head.kind,
            kind::DATA | kind::HEADERS | kind::PRIORITY | kind::RST_STREAM
        );
        forbid(
            is_stream_frame && head.stream == 0,
            "a stream frame on stream 0 (§6)",
        )?;
        if is_connection_frame
            || matches!(head.kind, kind::PRIORITY | kind::WINDOW_UPDATE)
            || head.kind > kind::CONTINUATION
        {
            self.charge_control(now)?;
        }
        match head.kind {
            kind::DATA => self.data(head, payload, now),
            kind::HEADERS => self.headers_frame(head, payload, now),
            kind::CONTINUATION => self.continuation(head, payload, now),
            kind::RST_STREAM => self.rst_stream(head, payload, now),
            kind::WINDOW_UPDATE => self.window_update(head, payload),
            kind::SETTINGS => self.settings(head, payload),
            kind::PING => self.ping_frame(head, payload),
            kind::GOAWAY => self.goaway_frame(payload),
            kind::PRIORITY => priority(head, payload),
            kind::PUSH_PROMISE => error(
                Code::PROTOCOL_ERROR,
                "PUSH_PROMISE, which is disabled (§8.4)",
            ),
            // Unknown frame types are ignored (§5.5).
            _ => Ok(None),
        }
    }

    /// Counts a frame that carries no request data against its limit.
    fn charge_control(&mut self, now: Instant) -> Result<(), Fault> {
        Ok(forbid_as(
            Code::ENHANCE_YOUR_CALM,
            !self.control.spend(now),
            "too many frames without request data",
        )?)
    }

    /// Handles DATA (§6.1).
    fn data<'a>(&mut self, head: Head, payload: &'a [u8], now: Instant) -> Outcome<'a> {
        let data = unpad(head, payload)?;
        let end = head.has(flag::END_STREAM);
        if data.is_empty() && !end {
            self.charge_control(now)?;
        }
        self.receive_window -= payload.len() as i64;
        forbid_as(
            Code::FLOW_CONTROL_ERROR,
            self.receive_window < 0,
            "more DATA than the connection's window (§6.9)",
        )?;
        // The connection's window opens again at once. The windows and the number of the streams
        // bound the memory, and a stream that nobody reads must not block the others.
        self.unannounced += payload.len() as u32;
        if self.unannounced >= self.limits.connection_window / 2 {
            frame::window_update(&mut self.out, 0, self.unannounced);
            self.receive_window += i64::from(self.unannounced);
            self.unannounced = 0;
        }
        let Some(stream) = self.streams.get_mut(&head.stream) else {
            return self.frame_on_closed_stream(head.stream, now).map(|()| None);
        };
        forbid_on(head.stream, !stream.remote_open, Code::STREAM_CLOSED)?;
        // DATA is not allowed before the response's headers.
        forbid_on(head.stream, !stream.has_headers, Code::PROTOCOL_ERROR)?;
        stream.receive_window -= payload.len() as i64;
        forbid_on(
            head.stream,
            stream.receive_window < 0,
            Code::FLOW_CONTROL_ERROR,
        )?;
        if let Some(left) = &mut stream.length_left {
            match left.checked_sub(data.len() as u64) {
                Some(rest) => *left = rest,
                None => return Err(Fault::Stream(head.stream, Code::PROTOCOL_ERROR)),
            }
        }
        if end {
            self.end_remote(head.stream)?;
        } else {
            self.release(head.stream, (payload.len() - data.len()) as u32);
        }
        Ok(Some(Event::Data {
            stream: head.stream,
            data,
            end,
        }))
    }

    /// Handles a frame on a stream that is not open (§5.1). An idle stream is an error of the peer;
    /// on a closed stream the frame may only be late.
    fn frame_on_closed_stream(&mut self, stream: u32, now: Instant) -> Result<(), Fault> {
        forbid(self.is_idle(stream), "a frame on an idle stream (§5.1)")?;
        match self.how_closed(stream) {
            Some(Closed::Ended) => error(Code::STREAM_CLOSED, "a frame on an ended stream (§5.1)"),
            Some(Closed::ResetByPeer) => Err(Fault::Stream(stream, Code::STREAM_CLOSED)),
            Some(Closed::ResetByUs) | None => self.charge_control(now),
        }
    }

    fn is_idle(&self, stream: u32) -> bool {
        let is_own = stream.is_multiple_of(2) == self.is_server;
        if is_own {
            stream >= self.next_own_stream
        } else {
            stream > self.last_peer_stream
        }
    }

    fn how_closed(&self, stream: u32) -> Option<Closed> {
        self.closed
            .iter()
            .rev()
            .find(|(id, _)| *id == stream)
            .map(|(_, how)| *how)
    }

    /// Handles the peer's END_STREAM.
    fn end_remote(&mut self, id: u32) -> Result<(), Fault> {
        let Some(stream) = self.streams.get_mut(&id) else {
            return Ok(());
        };
        forbid_on(
            id,
            stream.length_left.is_some_and(|left| left > 0),
            Code::PROTOCOL_ERROR,
        )?;
        stream.remote_open = false;
        if !stream.local_open {
            self.close(id, Closed::Ended);
        }
        Ok(())
    }

    fn close(&mut self, stream: u32, how: Closed) {
        self.streams.remove(&stream);
        if self.closed.len() == CLOSED_REMEMBERED {
            self.closed.pop_front();
        }
        self.closed.push_back((stream, how));
    }

    /// Handles HEADERS (§6.2).
    fn headers_frame<'a>(&mut self, head: Head, payload: &'a [u8], now: Instant) -> Outcome<'a> {
        let mut fragment = unpad(head, payload)?;
        let mut depends_on_itself = false;
        if head.has(flag::PRIORITY) {
            let Some((priority, rest)) = fragment.split_first_chunk::<5>() else {
                return error(
                    Code::FRAME_SIZE_ERROR,
                    "HEADERS too short for its priority (§6.2)",
                );
            };
            depends_on_itself = dependency(priority) == head.stream;
            fragment = rest;
        }
        let mut block = Block {
            stream: head.stream,
            end_stream: head.has(flag::END_STREAM),
            depends_on_itself,
            fragments: Vec::new(),
            continuations: 0,
        };
        if head.has(flag::END_HEADERS) {
            return self.header_block(&block, fragment, now);
        }
        block.fragments.extend_from_slice(fragment);
        self.block = Some(block);
        Ok(None)
    }

    /// Handles CONTINUATION (§6.10).
    fn continuation<'a>(&mut self, head: Head, payload: &'a [u8], now: Instant) -> Outcome<'a> {
        let Some(mut block) = self.block.take() else {
            return error(Code::PROTOCOL_ERROR, "CONTINUATION without HEADERS (§6.10)");
        };
        block.fragments.extend_from_slice(payload);
        block.continuations += 1;
        forbid_as(
            Code::ENHANCE_YOUR_CALM,
            block.continuations > CONTINUATIONS
                || block.fragments.len() > self.limits.header_list as usize + BLOCK_SLACK,
            "a header block that is too large",
        )?;
        if head.has(flag::END_HEADERS) {
            let fragments = std::mem::take(&mut block.fragments);
            return self.header_block(&block, &fragments, now);
        }
        self.block = Some(block);
        Ok(None)
    }

    /// Handles a complete header block. It is always decoded, because the dynamic table depends on
    /// it (§4.3).
    fn header_block<'a>(&mut self, block: &Block, fragments: &[u8], now: Instant) -> Outcome<'a> {
        self.headers.clear();
        if let Err(broken) = self.decoder.decode(fragments, &mut self.headers) {
            return error(Code::COMPRESSION_ERROR, broken.0);
        }
        if self.streams.contains_key(&block.stream) {
            self.headers_on_open_stream(block, now)
        } else if self.is_server {
            self.request(block, now)
        } else {
            self.frame_on_closed_stream(block.stream, now)
                .map(|()| None)
        }
    }

    fn request<'a>(&mut self, block: &Block, now: Instant) -> Outcome<'a> {
        let id = block.stream;
        forbid(id.is_multiple_of(2), "a request on an even stream (§5.1.1)")?;
        if id <= self.last_peer_stream {
            forbid(
                self.how_closed(id).is_none(),
                "a stream identifier that is not above the last (§5.1.1)",
            )?;
            return self.frame_on_closed_stream(id, now).map(|()| None);
        }
        self.last_peer_stream = id;
        if id > self.promised_last {
            self.close(id, Closed::ResetByUs);
            return Ok(None);
        }
        forbid_on(
            id,
            self.streams.len() >= self.limits.streams as usize,
            Code::REFUSED_STREAM,
        )?;
        forbid_on(id, self.headers.is_too_large(), Code::ENHANCE_YOUR_CALM)?;
        let length_left = self.headers.content_length();
        let lacks_body = block.end_stream && length_left.flatten() > Some(0);
        forbid_on(
            id,
            block.depends_on_itself
                || !self.headers.is_request()
                || length_left == Some(None)
                || lacks_body,
            Code::PROTOCOL_ERROR,
        )?;
        self.streams
            .insert(id, self.new_stream(length_left.flatten()));
        self.finish_headers(
            block,
            Event::Headers {
                stream: id,
                end: block.end_stream,
            },
        )
    }

    fn new_stream(&self, length_left: Option<u64>) -> Stream {
        Stream {
            local_open: true,
            remote_open: true,
            has_headers: self.is_server,
            send_window: i64::from(self.peer_stream_window),
            receive_window: i64::from(self.limits.stream_window),
            unannounced: 0,
            length_left,
        }
    }

    /// Handles response headers or trailers (§8.1).
    fn headers_on_open_stream<'a>(&mut self, block: &Block, now: Instant) -> Outcome<'a> {
        let id = block.stream;
        let Some(stream) = self.streams.get_mut(&id) else {
            return Ok(None);
        };
        forbid_on(id, !stream.remote_open, Code::STREAM_CLOSED)?;
        forbid_on(id, self.headers.is_too_large(), Code::ENHANCE_YOUR_CALM)?;
        let malformed = Err(Fault::Stream(id, Code::PROTOCOL_ERROR));
        if block.depends_on_itself {
            return malformed;
        }
        if stream.has_headers {
            if !block.end_stream || !self.headers.are_trailers() {
                return malformed;
            }
            return self.finish_headers(block, Event::Trailers { stream: id });
        }
        if !self.headers.is_response() {
            return malformed;
        }
        if self.headers.is_interim() {
            self.charge_control(now)?;
            return if block.end_stream {
                malformed
            } else {
                Ok(None)
            };
        }
        match self.headers.content_length() {
            Some(None) => return malformed,
            length => stream.length_left = length.flatten(),
        }
        stream.has_headers = true;
        self.finish_headers(
            block,
            Event::Headers {
                stream: id,
                end: block.end_stream,
            },
        )
    }

    fn finish_headers<'a>(&mut self, block: &Block, event: Event<'a>) -> Outcome<'a> {
        if block.end_stream {
            self.end_remote(block.stream)?;
        }
        Ok(Some(event))
    }

    /// Sends RST_STREAM (§5.4.2). Returns an event if the layer above knows the stream.
    fn stream_error<'a>(
        &mut self,
        id: u32,
        code: ErrorCode,
        now: Instant,
    ) -> Result<Option<Event<'a>>, Error> {
        // RST_STREAM is not allowed on idle streams (§6.4). PRIORITY may come on an idle stream, so
        // a broken one ends the connection.
        forbid_as(
            code,
            self.is_idle(id),
            "a broken frame on an idle stream (§5.4)",
        )?;
        forbid_as(
            Code::ENHANCE_YOUR_CALM,
            !self.resets.spend(now),
            "too many stream errors",
        )?;
        let existed = self.streams.contains_key(&id);
        frame::rst_stream(&mut self.out, id, code);
        if existed || self.how_closed(id).is_none() {
            self.close(id, Closed::ResetByUs);
        }
        Ok(existed.then_some(Event::Reset {
            stream: id,
            code,
            by_peer: false,
        }))
    }

    /// Handles RST_STREAM (§6.4).
    fn rst_stream<'a>(&mut self, head: Head, payload: &[u8], now: Instant) -> Outcome<'a> {
        let code = exactly(payload, "RST_STREAM without exactly 4 bytes (§6.4)")?;
        forbid(
            self.is_idle(head.stream),
            "RST_STREAM on an idle stream (§6.4)",
        )?;
        forbid_as(
            Code::ENHANCE_YOUR_CALM,
            !self.resets.spend(now),
            "too many RST_STREAM frames",
        )?;
        if !self.streams.contains_key(&head.stream) {
            return Ok(None);
        }
        self.close(head.stream, Closed::ResetByPeer);
        let code = ErrorCode(u32::from_be_bytes(code));
        Ok(Some(Event::Reset {
            stream: head.stream,
            code,
            by_peer: true,
        }))
    }

    /// Handles SETTINGS (§6.5).
    fn settings<'a>(&mut self, head: Head, payload: &[u8]) -> Outcome<'a> {
        forbid_as(
            Code::FRAME_SIZE_ERROR,
            head.has(flag::ACK) && !payload.is_empty() || !payload.len().is_multiple_of(6),
            "SETTINGS with a wrong length (§6.5)",
        )?;
        if head.has(flag::ACK) {
            self.settings_acknowledged = true;
            return Ok(None);
        }
        for &[i0, i1, v0, v1, v2, v3] in payload.as_chunks::<6>().0 {
            self.setting(
                u16::from_be_bytes([i0, i1]),
                u32::from_be_bytes([v0, v1, v2, v3]),
            )?;
        }
        self.has_settings = true;
        frame::head(&mut self.out, 0, kind::SETTINGS, flag::ACK, 0);
        Ok(Some(Event::Window { stream: 0 }))
    }

    /// Applies one setting (§6.5.2).
    fn setting(&mut self, id: u16, value: u32) -> Result<(), Error> {
        match id {
            setting::HEADER_TABLE_SIZE => self.encoder.resize(value),
            setting::ENABLE_PUSH if value > 1 || value == 1 && !self.is_server => {
                return error(
                    Code::PROTOCOL_ERROR,
                    "SETTINGS_ENABLE_PUSH with an illegal value (§6.5.2)",
                );
            }
            setting::MAX_CONCURRENT_STREAMS => self.peer_streams = value,
            setting::MAX_HEADER_LIST_SIZE => self.peer_header_list = value as usize,
            setting::INITIAL_WINDOW_SIZE => {
                forbid_as(
                    Code::FLOW_CONTROL_ERROR,
                    value > MAX_31_BITS,
                    "SETTINGS_INITIAL_WINDOW_SIZE above 2^31-1 (§6.5.2)",
                )?;
                let change = i64::from(value) - i64::from(self.peer_stream_window);
                self.peer_stream_window = value;
                for stream in self.streams.values_mut() {
                    stream.send_window += change;
                    forbid_as(
                        Code::FLOW_CONTROL_ERROR,
                        stream.send_window > i64::from(MAX_31_BITS),
                        "a stream's window above 2^31-1 (§6.9.2)",
                    )?;
                }
            }
            // Our frames never exceed the smallest legal value.
            setting::MAX_FRAME_SIZE if !(1 << 14..1 << 24).contains(&value) => {
                return error(
                    Code::PROTOCOL_ERROR,
                    "SETTINGS_MAX_FRAME_SIZE with an illegal value (§6.5.2)",
                );
            }
            _ => {}
        }
        Ok(())
    }

    /// Handles PING (§6.7).
    fn ping_frame<'a>(&mut self, head: Head, payload: &[u8]) -> Outcome<'a> {
        let data = exactly(payload, "PING without exactly 8 bytes (§6.7)")?;
        if !head.has(flag::ACK) {
            frame::ping(&mut self.out, flag::ACK, &data);
            return Ok(None);
        }
        if data == PING_DRAIN && self.is_draining && self.promised_last == MAX_31_BITS {
            self.promised_last = self.last_peer_stream;
            frame::goaway(&mut self.out, self.last_peer_stream, Code::NO_ERROR, "");
        }
        Ok((data == PING_KEEPALIVE).then_some(Event::Pong))
    }

    /// Handles GOAWAY (§6.8).
    fn goaway_frame<'a>(&mut self, payload: &'a [u8]) -> Outcome<'a> {
        let Some((&[l0, l1, l2, l3, c0, c1, c2, c3], debug)) = payload.split_first_chunk::<8>()
        else {
            return error(Code::FRAME_SIZE_ERROR, "GOAWAY shorter than 8 bytes (§6.8)");
        };
        let last = u32::from_be_bytes([l0, l1, l2, l3]) & MAX_31_BITS;
        self.peer_goes_away = true;
        if !self.is_server {
            self.streams.retain(|&id, _| id <= last);
        }
        Ok(Some(Event::GoAway {
            last,
            code: ErrorCode(u32::from_be_bytes([c0, c1, c2, c3])),
            debug,
        }))
    }

    /// Handles WINDOW_UPDATE (§6.9).
    fn window_update<'a>(&mut self, head: Head, payload: &[u8]) -> Outcome<'a> {
        let increment = exactly(payload, "WINDOW_UPDATE without exactly 4 bytes (§6.9)")?;
        let increment = i64::from(u32::from_be_bytes(increment) & MAX_31_BITS);
        if head.stream == 0 {
            self.send_window += increment;
            forbid(
                increment == 0,
                "WINDOW_UPDATE with an increment of 0 (§6.9)",
            )?;
            forbid_as(
                Code::FLOW_CONTROL_ERROR,
                self.send_window > i64::from(MAX_31_BITS),
                "the connection's window above 2^31-1 (§6.9.1)",
            )?;
        } else {
            let Some(stream) = self.streams.get_mut(&head.stream) else {
                forbid(
                    self.is_idle(head.stream),
                    "WINDOW_UPDATE on an idle stream (§5.1)",
                )?;
                return Ok(None);
            };
            stream.send_window += increment;
            forbid_on(head.stream, increment == 0, Code::PROTOCOL_ERROR)?;
            forbid_on(
                head.stream,
                stream.send_window > i64::from(MAX_31_BITS),
                Code::FLOW_CONTROL_ERROR,
            )?;
        }
        Ok(Some(Event::Window {
            stream: head.stream,
        }))
    }

    /// Releases `bytes` received bytes of a stream: the layer above has processed them, so the
    /// window opens again. The peer gets WINDOW_UPDATE in steps of half a window.
    pub fn release(&mut self, stream: u32, bytes: u32) {
        let threshold = self.limits.stream_window / 2;
        let Some(state) = self
            .streams
            .get_mut(&stream)
            .filter(|state| state.remote_open)
        else {
            return;
        };
        state.unannounced += bytes;
        if state.unannounced >= threshold {
            frame::window_update(&mut self.out, stream, state.unannounced);
            state.receive_window += i64::from(state.unannounced);
            state.unannounced = 0;
        }
    }

    // ---- sending ----

    /// Returns the bytes to send to the peer, in order. The caller removes bytes from the front, or
    /// all of them.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Client: opens a stream with a request; `end` if it has no body. Returns the stream.
    pub fn open<'f>(
        &mut self,
        fields: impl Iterator<Item = Field<'f>> + Clone,
        end: bool,
    ) -> Result<u32, SendError> {
        let id = self.next_own_stream;
        if self.peer_goes_away || self.dead.is_some() || id > MAX_31_BITS {
            return Err(SendError::GoingAway);
        }
        if self.streams.len() >= self.peer_streams as usize {
            return Err(SendError::TooMany);
        }
        self.streams.insert(id, self.new_stream(None));
        let sent = self.send_headers(id, fields, end);
        match sent {
            Ok(()) => self.next_own_stream += 2,
            Err(_) => _ = self.streams.remove(&id),
        }
        sent.map(|()| id)
    }

    /// Sends a response's headers, or trailers (with `end`).
    pub fn send_headers<'f>(
        &mut self,
        stream: u32,
        fields: impl Iterator<Item = Field<'f>> + Clone,
        end: bool,
    ) -> Result<(), SendError> {
        if !self
            .streams
            .get(&stream)
            .is_some_and(|stream| stream.local_open)
        {
            return Err(SendError::Closed);
        }
        let size = |(name, value, _): Field| name.len() + value.len() + FIELD_OVERHEAD;
        if fields.clone().map(size).sum::<usize>() > self.peer_header_list {
            return Err(SendError::TooLarge);
        }
        let start = self.out.len();
        frame::head(&mut self.out, 0, 0, 0, 0);
        self.encoder.begin(&mut self.out);
        for (name, value, indexing) in fields {
            self.encoder.field(name, value, indexing, &mut self.out);
        }
        self.frame_block(start, stream, end);
        self.control.earn(1);
        if end {
            self.end_local(stream);
        }
        Ok(())
    }

    /// Adds frame heads to the header block that follows `start` and an empty head in the output.
    fn frame_block(&mut self, start: usize, stream: u32, end: bool) {
        let length = self.out.len() - start - HEAD;
        let end_stream = if end { flag::END_STREAM } else { 0 };
        if length <= MAX_FRAME {
            let head = frame::head_bytes(
                length,
                kind::HEADERS,
                end_stream | flag::END_HEADERS,
                stream,
            );
            self.out[start..start + HEAD].copy_from_slice(&head);
            return;
        }
        let block = self.out.split_off(start + HEAD);
        self.out.truncate(start);
        let last = block.len().div_ceil(MAX_FRAME) - 1;
        for (index, fragment) in block.chunks(MAX_FRAME).enumerate() {
            let end_headers = if index == last { flag::END_HEADERS } else { 0 };
            let (kind, flags) = if index == 0 {
                (kind::HEADERS, end_stream)
            } else {
                (kind::CONTINUATION, 0)
            };
            frame::head(
                &mut self.out,
                fragment.len(),
                kind,
                flags | end_headers,
                stream,
            );
            self.out.extend_from_slice(fragment);
        }
    }

    /// Frames as much of `data` as both windows allow and returns the number of bytes. `end` takes
    /// effect once all of `data` is framed.
    pub fn send_data(&mut self, stream: u32, data: &[u8], end: bool) -> Result<usize, SendError> {
        let state = self
            .streams
            .get_mut(&stream)
            .filter(|stream| stream.local_open)
            .ok_or(SendError::Closed)?;
        let window = usize::try_from(state.send_window.min(self.send_window)).unwrap_or(0);
        let length = data.len().min(window);
        state.send_window -= length as i64;
        self.send_window -= length as i64;
        let end = end && length == data.len();
        let mut rest = &data[..length];
        loop {
            let (piece, behind) = rest.split_at(rest.len().min(MAX_FRAME));
            if piece.is_empty() && !end {
                break;
            }
            let flags = if end && behind.is_empty() {
                flag::END_STREAM
            } else {
                0
            };
            frame::head(&mut self.out, piece.len(), kind::DATA, flags, stream);
            self.out.extend_from_slice(piece);
            // The peer may answer each frame with a WINDOW_UPDATE for the stream, one for the
            // connection, and a PING to measure the bandwidth.
            self.control.earn(3);
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        if end {
            self.end_local(stream);
        }
        Ok(length)
    }

    /// Returns whether [`Connection::send_data`] would take bytes now, or fail because the stream
    /// is closed.
    pub fn may_send(&self, stream: u32) -> bool {
        self.streams.get(&stream).is_none_or(|stream| {
            !stream.local_open || stream.send_window > 0 && self.send_window > 0
        })
    }

    fn end_local(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.local_open = false;
        if !stream.remote_open {
            self.close(id, Closed::Ended);
        }
    }

    /// Ends a stream with RST_STREAM; does nothing if it is closed. On a server the peer causes
    /// these resets, so too many of them end the connection (CVE-2025-8671).
    pub fn reset(&mut self, stream: u32, code: ErrorCode) {
        if !self.streams.contains_key(&stream) {
            return;
        }
        frame::rst_stream(&mut self.out, stream, code);
        self.close(stream, Closed::ResetByUs);
        self.charge_reset();
    }

    /// Counts a stream that we had to reset, or whose request was refused. On a server, too many
    /// end the connection.
    pub fn charge_reset(&mut self) {
        if self.is_server && self.now.is_some_and(|now| !self.resets.spend(now)) {
            self.die(Error {
                code: Code::ENHANCE_YOUR_CALM,
                reason: "too many streams that we had to reset or refuse",
            });
        }
    }

    /// Sends a keepalive PING; the acknowledgement becomes [`Event::Pong`].
    pub fn ping(&mut self) {
        if self.dead.is_none() {
            frame::ping(&mut self.out, 0, &PING_KEEPALIVE);
        }
    }

    /// Server: starts the graceful shutdown (§6.8). New requests are accepted until the peer
    /// acknowledges the PING behind the GOAWAY. Later requests are ignored, so that the peer can
    /// retry them on another connection. `reason` is text for people.
    pub fn shutdown(&mut self, reason: &str) {
        if !self.is_draining && self.dead.is_none() {
            self.is_draining = true;
            frame::goaway(&mut self.out, MAX_31_BITS, Code::NO_ERROR, reason);
            frame::ping(&mut self.out, 0, &PING_DRAIN);
        }
    }

    /// Ends the connection from our side with GOAWAY. The caller writes the output and closes the
    /// socket.
    pub fn goaway(&mut self, code: ErrorCode, reason: &str) {
        if self.dead.is_some() {
            return;
        }
        self.is_draining = true;
        // The last stream must not be above that of an earlier GOAWAY (§6.8).
        self.promised_last = self.promised_last.min(self.last_peer_stream);
        frame::goaway(&mut self.out, self.promised_last, code, reason);
    }

    /// Server: returns whether the peer knows that it must open no further streams.
    pub fn is_drained(&self) -> bool {
        self.promised_last != MAX_31_BITS
    }

    /// Returns whether the peer's preface and SETTINGS were received and the peer acknowledged our
    /// SETTINGS (§6.5.3; otherwise SETTINGS_TIMEOUT).
    pub fn is_established(&self) -> bool {
        self.has_settings && self.settings_acknowledged
    }

    /// Returns whether the peer's SETTINGS were received. Its limits are unknown before.
    pub fn has_settings(&self) -> bool {
        self.has_settings
    }

    /// Returns whether a header block is incomplete.
    pub fn is_within_headers(&self) -> bool {
        self.block.is_some()
    }
}

/// Removes the padding of DATA and HEADERS (§6.1).
fn unpad(head: Head, payload: &[u8]) -> Result<&[u8], Error> {
    if !head.has(flag::PADDED) {
        return Ok(payload);
    }
    match payload.split_first() {
        Some((&padding, rest)) if usize::from(padding) <= rest.len() => {
            Ok(&rest[..rest.len() - usize::from(padding)])
        }
        Some(_) => error(Code::PROTOCOL_ERROR, "padding longer than its frame (§6.1)"),
        None => error(
            Code::FRAME_SIZE_ERROR,
            "a padded frame without a padding length (§6.1)",
        ),
    }
}

/// Checks PRIORITY and ignores it (§5.3.2, §6.3).
fn priority<'a>(head: Head, payload: &[u8]) -> Outcome<'a> {
    let Ok(priority) = payload.try_into() else {
        return Err(Fault::Stream(head.stream, Code::FRAME_SIZE_ERROR));
    };
    forbid_on(
        head.stream,
        dependency(priority) == head.stream,
        Code::PROTOCOL_ERROR,
    )?;
    Ok(None)
}

/// Returns the stream dependency of a priority (RFC 7540 §6.3).
fn dependency(&[s0, s1, s2, s3, _]: &[u8; 5]) -> u32 {
    u32::from_be_bytes([s0, s1, s2, s3]) & MAX_31_BITS
}
