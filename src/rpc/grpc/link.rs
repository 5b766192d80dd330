//! One connection that several threads share for their calls.
//!
//! One lock guards the state of the connection ([`Core`]). Only the two halves of the transport are
//! outside of it: a thread takes a half out for as long as it blocks in it. No thread only reads. A
//! thread that must wait for the peer reads if no other thread does, and processes what arrives for
//! all threads. Then it hands the reading half to another thread that waits. So a call that is
//! alone on its connection wakes no other thread, on either side.
//!
//! ```text
//!   send request ─► flush ─► has my answer come? ─ yes ──► hand over ─► return
//!                              ▲     │ no
//!                              │     ├─ reader is free: take it, read, process for all, put it back ─┐
//!                              │     └─ reader is taken: park until woken ──────────────────────────┤
//!                              └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A connection may have no reader for a while: all its threads run handlers, or no call is open.
//! After a [`TICK`] the watcher (server) or the channel's keeper (client) reads it. This bounds the
//! time to answer a PING, to notice a cancellation, and to resolve a deadlock of two peers that
//! both only write. On the server, a connection without received bytes is parked: it uses no thread
//! until its socket is readable.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::message::Assembler;
use super::metadata::Metadata;
use super::server::{Request, Shared, Upkeep, short_of_memory};
use super::status::{Code, Status};
use super::transport::Transport;
use crate::h2::{self, Connection, ErrorCode, Event, StreamMap};
use crate::share::{Held, PeerShare};
use base::crypto::buffer::{Bytes, reserve, wipe};

/// How long a connection may have no reader.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// DATA is framed only while the output is smaller than this, in bytes. The second value applies
/// while memory is scarce.
const OUTPUT: usize = 64 << 10;
const OUTPUT_LEAN: usize = 2 << 10;
/// Nothing is received while the output is larger than this multiple of the value above, so that
/// our answers to control frames are bounded, too. It must exceed what DATA alone can reach;
/// otherwise two peers that both send much would block each other.
const OUTPUTS_HELD: usize = 3;
/// How long the peer may take to close its side of a connection that we ended, and how often its
/// bytes are read in a row.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_READS: usize = 16;
/// Number of bytes of a GOAWAY's debug data that we repeat.
const GOAWAY_TEXT: usize = 100;
/// Sizes of the read buffer in bytes: it begins small, grows to one frame when it was full, and
/// then further if memory is not scarce. It becomes small again when the connection is idle.
const READ_FIRST: usize = 4 << 10;
const READ_FRAME: usize = 17 << 10;
const READ_MOST: usize = 64 << 10;
/// Bytes of buffers of each connection that do not count against its peer's share.
const BUFFERS_FREE: usize = READ_FRAME + 2 * OUTPUT_LEAN;

/// A connection.
pub(super) struct Link {
    core: Mutex<Core>,
    pub(super) socket: Arc<TcpStream>,
    pub(super) peer: Option<SocketAddr>,
    /// The identity from the transport.
    pub(super) identity: Option<Arc<str>>,
    /// The resources that all connections of this peer use together.
    pub(super) share: Arc<PeerShare>,
    me: Weak<Link>,
    /// Maximum duration of a flush.
    stall: Duration,
    /// Counts how often the reading half was taken and put back; odd while a thread has it.
    turns: AtomicU64,
    /// The value of `turns` at the last check of the watcher or keeper.
    turns_seen: AtomicU64,
    /// Server: number of pool jobs for this connection that have not begun.
    pub(super) pending_jobs: AtomicUsize,
}

/// The state that the lock guards.
pub(super) struct Core {
    pub(super) h2: Connection,
    pub(super) side: Side,
    /// Boxed, because the map keeps the places of calls that ended.
    pub(super) calls: StreamMap<Box<CallState>>,
    /// Server: streams of calls whose handler can start.
    pub(super) ready: VecDeque<u32>,
    /// Server: streams of calls whose handler is done and whose response is not completely sent.
    outbound: VecDeque<u32>,
    reader: Option<Reader>,
    /// `None` while a thread writes, and after the connection is closed.
    writer: Option<Box<dyn Write + Send>>,
    pub(super) is_writing: bool,
    /// The second output buffer: one is filled while the other is written.
    spare: Vec<u8>,
    /// Sizes in bytes of the buffers that threads have taken out: one for reading and one for
    /// writing.
    read_room: usize,
    written_room: usize,
    /// The memory of all these buffers.
    pub(super) buffers: Held,
    waiting: Vec<(WaitReason, Thread)>,
    /// Whether a waiting thread was woken since this flag was last cleared.
    has_woken: bool,
    /// Set when the connection is over; calls without an answer end with this status.
    pub(super) ended: Option<Status>,
    /// Until when the peer may close its side.
    pub(super) lingers_until: Option<Instant>,
    /// Client: the text of the server's GOAWAY.
    pub(super) goaway_text: Option<String>,
    pub(super) last_read: Instant,
    ping_sent: Option<Instant>,
    /// Server: whether the poller waits for bytes instead of a thread.
    pub(super) is_parked: bool,
    /// Server: the timers of the connection.
    pub(super) upkeep: Upkeep,
}

/// Our side of the connection.
pub(super) enum Side {
    Client,
    Server(Arc<Shared>),
}

/// What a parked thread waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitReason {
    /// An event of its stream.
    Call(u32),
    /// Room in the output.
    Room,
    /// The peer allows another stream.
    Slot,
}

/// A response that its handler has returned. It waits for the peer without a thread.
pub(super) struct Outbound {
    /// Empty if the handler has sent all messages itself.
    pub(super) message: Bytes,
    sent: usize,
    /// Custom metadata of the headers and of the trailers.
    custom: (Metadata, Metadata),
    /// When the peer last accepted bytes.
    pub(super) moved: Option<Instant>,
}

/// The connection's state of a call.
pub(super) struct CallState {
    pub(super) inbound: Assembler,
    pub(super) message_limit: usize,
    /// Number of received bytes that are released when a message is taken.
    unreleased: u32,
    /// Client: the custom metadata of the response's headers, once received.
    pub(super) headers: Option<Metadata>,
    pub(super) trailers: Metadata,
    /// How the peer's side ended. `Ok`: complete. `Err`: the call failed or was cancelled.
    pub(super) end: Option<Result<(), Status>>,
    /// Server: the request until its handler starts.
    pub(super) request: Option<Request>,
    /// Server: memory that counts against the limit of buffered bytes.
    pub(super) held: Option<Held>,
    /// Server: the response that the handler returned.
    pub(super) outbound: Option<Outbound>,
    /// Server: the HTTP response to a request that is not gRPC; no handler runs.
    pub(super) http_response: Option<HttpResponse>,
    /// Server: whether the response's headers were sent.
    pub(super) has_answered: bool,
    /// Whether the client named a compression.
    pub(super) has_encoding: bool,
    pub(super) started: Instant,
    /// Client: when the caller stops waiting.
    pub(super) deadline: Option<Instant>,
}

/// The HTTP response to a request that is not gRPC.
#[derive(Clone, Copy)]
pub(super) struct HttpResponse {
    pub(super) status: &'static [u8],
    /// A header field that says what gRPC expects.
    pub(super) hint: (&'static [u8], &'static [u8]),
    /// The body, for a person with a browser.
    pub(super) text: &'static [u8],
}

impl CallState {
    /// Server: returns whether a handler has the call; the handler then ends it.
    pub(super) fn has_handler(&self) -> bool {
        self.request.is_none() && self.outbound.is_none() && self.http_response.is_none()
    }

    pub(super) fn new(
        message_limit: usize,
        started: Instant,
        deadline: Option<Instant>,
    ) -> Box<CallState> {
        Box::new(CallState {
            inbound: Assembler::default(),
            message_limit,
            unreleased: 0,
            headers: None,
            trailers: Metadata::new(),
            end: None,
            request: None,
            held: None,
            outbound: None,
            http_response: None,
            has_answered: false,
            has_encoding: false,
            started,
            deadline,
        })
    }
}

struct Reader {
    source: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    filled: usize,
    /// Whether the buffer may have complete frames that are not processed because the output was
    /// full.
    has_unprocessed: bool,
    timeout: Option<Duration>,
}

impl Reader {
    fn read(&mut self, socket: &TcpStream, timeout: Option<Duration>) -> io::Result<usize> {
        // A zero time-out would mean no time-out at all.
        let timeout = timeout.map(|timeout| timeout.max(Duration::from_millis(1)));
        if timeout != self.timeout {
            socket.set_read_timeout(timeout)?;
            self.timeout = timeout;
        }
        self.source.read(&mut self.buffer[self.filled..])
    }

    fn make_room(&mut self, is_lean: bool) {
        let length = self.buffer.len();
        match length {
            READ_FRAME.. if is_lean && self.filled < READ_FIRST => self.resize(READ_FIRST),
            _ if self.filled < length => {}
            0 => self.resize(READ_FIRST),
            READ_FIRST => self.resize(READ_FRAME),
            _ if !is_lean => self.resize(READ_MOST),
            // A complete frame fits already.
            _ => {}
        }
    }

    fn resize(&mut self, length: usize) {
        let mut buffer = vec![0; length];
        buffer[..self.filled].copy_from_slice(&self.buffer[..self.filled]);
        wipe(&mut self.buffer[..self.filled]);
        self.buffer = buffer;
    }

    fn consume(&mut self, length: usize) {
        self.buffer.copy_within(length..self.filled, 0);
        let rest = self.filled - length;
        wipe(&mut self.buffer[rest..self.filled]);
        self.filled = rest;
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        wipe(&mut self.buffer);
    }
}

pub(super) type Guard<'a> = MutexGuard<'a, Core>;

impl Link {
    pub(super) fn new(
        transport: Transport,
        h2: Connection,
        side: Side,
        stall: Duration,
        share: Arc<PeerShare>,
    ) -> io::Result<Arc<Link>> {
        let Transport {
            reader,
            writer,
            socket,
            identity,
            ..
        } = transport;
        let now = Instant::now();
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(Some(stall))?;
        let reader = Reader {
            source: reader,
            buffer: Vec::new(),
            filled: 0,
            has_unprocessed: false,
            timeout: None,
        };
        let core = Core {
            h2,
            side,
            calls: StreamMap::default(),
            ready: VecDeque::new(),
            outbound: VecDeque::new(),
            reader: Some(reader),
            writer: Some(writer),
            is_writing: false,
            spare: Vec::new(),
            read_room: 0,
            written_room: 0,
            buffers: Held::new(share.clone()),
            waiting: Vec::new(),
            has_woken: false,
            ended: None,
            lingers_until: None,
            goaway_text: None,
            last_read: now,
            ping_sent: None,
            is_parked: false,
            upkeep: Upkeep::new(now),
        };
        Ok(Arc::new_cyclic(|me| Link {
            core: Mutex::new(core),
            peer: socket.peer_addr().ok(),
            identity,
            share,
            socket,
            me: me.clone(),
            stall,
            turns: AtomicU64::new(0),
            turns_seen: AtomicU64::new(u64::MAX),
            pending_jobs: AtomicUsize::new(0),
        }))
    }

    pub(super) fn lock(&self) -> Guard<'_> {
        // A panic under the lock would be a bug of ours. The state of the connection is still
        // better than none.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a thread has the reading half.
    pub(super) fn is_attended(&self) -> bool {
        self.turns.load(Ordering::SeqCst) % 2 == 1
    }

    /// Returns whether no thread has read since the last call of this function.
    pub(super) fn is_neglected(&self) -> bool {
        let turns = self.turns.load(Ordering::SeqCst);
        self.turns_seen.swap(turns, Ordering::Relaxed) == turns && turns.is_multiple_of(2)
    }

    /// Ends the connection and wakes all threads that wait on it.
    pub(super) fn end(&self, core: &mut Core, status: Status) {
        core.end(status);
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Ends the connection after the output is written and the transport has sent its closing
    /// message. If another thread is writing, that thread does this.
    pub(super) fn end_after_flush<'a>(&'a self, mut core: Guard<'a>, status: Status) -> Guard<'a> {
        core.end(status);
        self.flush(core)
    }

    /// Server: after the end of a connection, discards what the peer still sends, without waiting.
    /// The kernel answers unread bytes with a TCP reset, which can overtake our GOAWAY. Returns
    /// whether the caller should call again later.
    pub(super) fn discard_unread(&self, core: &Core) -> bool {
        let mut unread = [0; 4 << 10];
        let is_late = core
            .lingers_until
            .is_none_or(|until| until <= Instant::now());
        if is_late || self.socket.set_nonblocking(true).is_err() {
            return false;
        }
        for _ in 0..LINGER_READS {
            match (&*self.socket).read(&mut unread) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) => return is_timeout(&error),
            }
        }
        true
    }

    /// Reads once, for at most `timeout`, and processes the received bytes. Returns at once if
    /// another thread reads or the output is full.
    pub(super) fn read_turn<'a>(
        &'a self,
        mut core: Guard<'a>,
        timeout: Option<Duration>,
    ) -> Guard<'a> {
        if core.is_output_full() {
            return core;
        }
        let Some(mut reader) = core.reader.take() else {
            return core;
        };
        if reader.has_unprocessed {
            core.process(&mut reader, Instant::now());
            core.reader = Some(reader);
            return core;
        }
        reader.make_room(core.memory_is_scarce());
        core.read_room = reader.buffer.len();
        // From now on the transport may hold bytes that the poller cannot see at the socket.
        self.unpark(&mut core);
        self.turns.fetch_add(1, Ordering::SeqCst);
        drop(core);
        let result = reader.read(&self.socket, timeout);
        let mut core = self.lock();
        let now = Instant::now();
        let was_over = core.ended.is_some();
        match result {
            Ok(0) => {
                let why = format!(
                    "the peer closed the connection{}",
                    core.goaway_text.as_deref().unwrap_or_default()
                );
                core.end(Status::new(Code::Unavailable, why));
            }
            Ok(length) => {
                reader.filled += length;
                core.process(&mut reader, now);
            }
            Err(error) if is_timeout(&error) => {}
            Err(error) => core.end(Status::broken(error)),
        }
        core.reader = Some(reader);
        self.turns.fetch_add(1, Ordering::SeqCst);
        if core.ended.is_some() && !was_over {
            core = self.flush(core);
            if core.is_writing {
                // The peer is gone, silent or faulty: another thread's write to it is useless.
                let _ = self.socket.shutdown(Shutdown::Both);
            }
        }
        core
    }

    /// Server: takes a connection back from the poller.
    pub(super) fn unpark(&self, core: &mut Core) {
        if std::mem::take(&mut core.is_parked)
            && let (Side::Server(shared), Some(link)) = (&core.side, self.me.upgrade())
        {
            shared.activate(core.upkeep.id, link);
        }
    }

    /// Writes the output. If another thread is writing, that thread also writes our part. Closes a
    /// connection that is over.
    pub(super) fn flush<'a>(&'a self, mut core: Guard<'a>) -> Guard<'a> {
        while core.has_output()
            && let Some(mut writer) = core.writer.take()
        {
            let spare = std::mem::take(&mut core.spare);
            let mut bytes = std::mem::replace(core.h2.output(), spare);
            core.is_writing = true;
            core.written_room = bytes.capacity();
            core.count_buffers();
            drop(core);
            let result = write(&mut *writer, &bytes, self.stall);
            wipe(&mut bytes);
            bytes.clear();
            core = self.lock();
            core.is_writing = false;
            core.writer = Some(writer);
            core.written_room = 0;
            if bytes.capacity() <= OUTPUT_LEAN || !core.memory_is_scarce() {
                core.spare = bytes;
            }
            if let Err(error) = result {
                wipe(core.h2.output());
                core.h2.output().clear();
                self.end(&mut core, Status::broken(error));
            }
            core.wake(WaitReason::Room);
        }
        if core.ended.is_some()
            && let Some(writer) = core.writer.take()
        {
            core.is_writing = true;
            let side = if matches!(core.side, Side::Server(_)) {
                Shutdown::Write
            } else {
                Shutdown::Both
            };
            drop(core);
            drop(writer);
            let _ = self.socket.shutdown(side);
            core = self.lock();
            core.is_writing = false;
            core.lingers_until = Some(Instant::now() + LINGER);
            core.wake(WaitReason::Room);
        }
        core
    }

    /// Waits on behalf of the call on `stream` until `check` returns an answer, the deadline passes
    /// or the connection ends.
    pub(super) fn wait<'a, T>(
        &'a self,
        mut core: Guard<'a>,
        stream: u32,
        deadline: Option<Instant>,
        mut check: impl FnMut(&mut Core) -> Option<T>,
    ) -> (Guard<'a>, Result<T, Status>) {
        let result = loop {
            core = self.flush(core);
            if let Some(found) = check(&mut core) {
                break Ok(found);
            }
            if let Some(status) = &core.ended {
                break Err(status.clone());
            }
            let left = match time_left(deadline) {
                Ok(left) => left,
                Err(status) => break Err(status),
            };
            core = match (core.is_free(), core.is_output_full()) {
                (true, true) => self.park(core, WaitReason::Room, left),
                (true, false) => self.read_for_all(core, left),
                (false, _) => self.park(core, WaitReason::Call(stream), left),
            };
        };
        core.hand_over();
        (core, result)
    }

    /// Reads on behalf of a thread that has a handler to run; newly received requests go to other
    /// threads.
    fn read_for_all<'a>(&'a self, core: Guard<'a>, timeout: Option<Duration>) -> Guard<'a> {
        let core = self.read_turn(core, timeout);
        if let Side::Server(shared) = &core.side
            && let Some(link) = self.me.upgrade()
        {
            shared.attend_later(&link, core.ready.len());
        }
        core
    }

    fn park<'a>(
        &'a self,
        mut core: Guard<'a>,
        what: WaitReason,
        timeout: Option<Duration>,
    ) -> Guard<'a> {
        let me = thread::current();
        let id = me.id();
        core.waiting.push((what, me));
        drop(core);
        match timeout {
            Some(timeout) => thread::park_timeout(timeout),
            None => thread::park(),
        }
        let mut core = self.lock();
        core.waiting.retain(|(_, thread)| thread.id() != id);
        core
    }

    /// Sends a framed message as the windows open. On return, the last frames may be only in the
    /// output.
    pub(super) fn send<'a>(
        &'a self,
        mut core: Guard<'a>,
        stream: u32,
        mut message: &[u8],
        end: bool,
        deadline: Option<Instant>,
    ) -> (Guard<'a>, Result<(), Status>) {
        loop {
            if core.h2.output().len() >= core.output_limit() {
                core = self.flush(core);
            }
            if core.ended.is_some() {
                let status = core.why_closed(stream);
                return (core, Err(status));
            }
            while core.h2.output().len() >= core.output_limit() && core.ended.is_none() {
                match time_left(deadline) {
                    Ok(left) => core = self.park(core, WaitReason::Room, left),
                    Err(status) => return (core, Err(status)),
                }
            }
            let piece = &message[..message.len().min(core.output_limit())];
            let is_last = piece.len() == message.len();
            // Room for the piece and its frame heads.
            reserve(core.h2.output(), piece.len() + 64);
            let Ok(sent) = core.h2.send_data(stream, piece, end && is_last) else {
                let status = core.why_closed(stream);
                return (core, Err(status));
            };
            message = &message[sent..];
            if message.is_empty() {
                return (core, Ok(()));
            }
            if sent < piece.len() {
                let stalled = Instant::now() + self.stall;
                let limit = deadline.map_or(stalled, |deadline| deadline.min(stalled));
                let open = |core: &mut Core| core.h2.may_send(stream).then_some(());
                let result;
                (core, result) = self.wait(core, stream, Some(limit), open);
                if let Err(status) = result {
                    let is_stall = limit == stalled && core.ended.is_none();
                    let stall =
                        || Status::new(Code::Unavailable, "the peer does not read what we send");
                    return (core, Err(if is_stall { stall() } else { status }));
                }
            }
        }
    }

    /// Waits for the next message on a stream; `None` after the peer's side ended without an error.
    pub(super) fn receive<'a>(
        &'a self,
        core: Guard<'a>,
        stream: u32,
        deadline: Option<Instant>,
    ) -> (Guard<'a>, Result<Option<Bytes>, Status>) {
        let (core, result) = self.wait(core, stream, deadline, |core| core.next_message(stream));
        (core, result.and_then(|message| message))
    }

    /// Waits until the peer allows another stream. The caller must try again.
    pub(super) fn wait_for_slot<'a>(
        &'a self,
        core: Guard<'a>,
        deadline: Option<Instant>,
    ) -> Result<Guard<'a>, Status> {
        let left = time_left(deadline)?;
        Ok(self.park(core, WaitReason::Slot, left))
    }
}

impl Core {
    fn process(&mut self, reader: &mut Reader, now: Instant) {
        self.last_read = now;
        let mut taken = 0;
        while self.ended.is_none() && !self.is_output_full() {
            match self.h2.receive(&reader.buffer[taken..reader.filled], now) {
                Ok((0, _)) => break,
                Ok((length, event)) => {
                    taken += length;
                    if let Some(event) = event {
                        self.event(event, now);
                    }
                }
                Err(error) => {
                    if matches!(self.side, Side::Server(_)) {
                        log::info!(
                            "closing a connection, because its peer violated HTTP/2: {error}"
                        );
                    }
                    self.end(Status::new(
                        Code::Unavailable,
                        format!("the peer violated HTTP/2: {error}"),
                    ));
                }
            }
        }
        reader.has_unprocessed = self.is_output_full();
        reader.consume(taken);
        self.h2.forget_headers();
        self.count_buffers();
        if self.h2.block_room() > 0 && self.memory_is_scarce() {
            let why = "not enough memory for a header block of more than one frame";
            self.h2.refuse_block(why);
            self.end(Status::new(Code::ResourceExhausted, why));
            self.count_buffers();
        }
    }

    /// Returns the size of the output in bytes at which no more DATA is framed.
    fn output_limit(&self) -> usize {
        if self.memory_is_scarce() {
            OUTPUT_LEAN
        } else {
            OUTPUT
        }
    }

    /// Returns whether the output is so large that nothing more is received: a thread is writing,
    /// and the peer does not read.
    pub(super) fn is_output_full(&mut self) -> bool {
        self.h2.output().len() >= OUTPUTS_HELD * OUTPUT_LEAN
            && self.h2.output().len() >= OUTPUTS_HELD * self.output_limit()
    }

    fn memory_is_scarce(&self) -> bool {
        self.buffers.share.memory.is_scarce()
    }

    fn count_buffers(&mut self) {
        let room = self.h2.output().capacity()
            + self.spare.capacity()
            + self.read_room
            + self.written_room;
        self.buffers
            .set(room.saturating_sub(BUFFERS_FREE) + self.h2.block_room());
    }

    /// Frames the waiting responses as far as there is room. Returns whether the output has bytes.
    fn has_output(&mut self) -> bool {
        for _ in 0..self.outbound.len() {
            if self.h2.output().len() >= self.output_limit() {
                break;
            }
            if let Some(stream) = self.outbound.pop_front() {
                self.send_outbound(stream);
            }
        }
        !self.h2.output().is_empty()
    }

    /// Sends a response that a handler returned.
    pub(super) fn respond(&mut self, stream: u32, message: Bytes, custom: (Metadata, Metadata)) {
        if !message.is_empty() {
            self.answer_headers(stream, &custom.0);
        }
        self.respond_after_headers(stream, message, custom);
    }

    /// Sends a response whose headers were sent before.
    pub(super) fn respond_after_headers(
        &mut self,
        stream: u32,
        message: Bytes,
        custom: (Metadata, Metadata),
    ) {
        if let Some(call) = self.calls.get_mut(&stream) {
            call.outbound = Some(Outbound {
                message,
                sent: 0,
                custom,
                moved: None,
            });
            self.outbound.push_back(stream);
        }
    }

    fn send_outbound(&mut self, stream: u32) {
        let most = self.output_limit();
        // The call is absent if it was cancelled.
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        let Some(outbound) = &mut call.outbound else {
            return;
        };
        let rest = &outbound.message[outbound.sent..];
        let piece = &rest[..rest.len().min(most)];
        // Room for the piece and its frame heads.
        reserve(self.h2.output(), piece.len() + 64);
        // A response that is not gRPC has no trailers.
        let ends = call.http_response.is_some();
        let Ok(sent) = self
            .h2
            .send_data(stream, piece, ends && piece.len() == rest.len())
        else {
            return self.forget(stream);
        };
        outbound.sent += sent;
        if outbound.sent == outbound.message.len() && ends {
            return self.forget(stream);
        }
        if outbound.sent == outbound.message.len() {
            let custom = std::mem::take(&mut outbound.custom);
            self.answer(stream, &Ok(()), &custom);
            return self.forget(stream);
        }
        if sent > 0 || outbound.moved.is_none() {
            outbound.moved = Some(Instant::now());
        }
        // The request is no longer needed, so only the response counts.
        if call
            .held
            .as_mut()
            .is_none_or(|held| held.set(outbound.message.len()))
        {
            self.outbound.push_back(stream);
        } else {
            let status = Status::new(
                Code::ResourceExhausted,
                "the client does not read its responses",
            );
            self.answer(stream, &Err(status), &Default::default());
            self.forget(stream);
        }
    }

    /// Server: removes a call that is over.
    pub(super) fn forget(&mut self, stream: u32) {
        self.calls.remove(&stream);
        if self.calls.is_empty() {
            self.upkeep.last_call = Instant::now();
        }
    }

    fn event(&mut self, event: Event<'_>, now: Instant) {
        match event {
            Event::Headers { stream, end } => match &self.side {
                Side::Client => self.response(stream, end),
                Side::Server(shared) => self.request(&shared.clone(), stream, end, now),
            },
            Event::Data { stream, data, end } => self.data(stream, data, end),
            Event::Trailers { stream } => self.trailers(stream),
            Event::Reset {
                stream,
                code,
                by_peer,
            } => {
                let deadline = self.calls.get(&stream).and_then(|call| call.deadline);
                let is_late = deadline.is_some_and(|deadline| deadline <= now);
                self.finish(stream, Err(reset_status(code, by_peer, is_late)));
            }
            Event::Window { stream: 0 } => {
                // Each stream may have waited for this.
                self.has_woken |= !self.waiting.is_empty();
                self.waiting.iter().for_each(|(_, thread)| thread.unpark());
            }
            Event::Window { stream } => self.wake(WaitReason::Call(stream)),
            Event::GoAway { last, code, debug } => self.goaway(last, code, debug),
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
        if call.outbound.is_some() {
            // The handler has returned and needs no more of the request.
            return;
        }
        if call.http_response.is_some() {
            self.h2.release(stream, data.len() as u32);
            if end {
                self.end_inbound(stream);
            }
            return;
        }
        // A message that the handler waits for must arrive whatever its size, so its bytes are
        // released at once. The bytes of later messages are released when they are taken.
        if call.inbound.waiting() == 0 {
            self.h2.release(stream, data.len() as u32);
        } else {
            call.unreleased += data.len() as u32;
        }
        if let Some(held) = &mut call.held
            && !held.grow(data.len())
        {
            return self.reject(stream, short_of_memory());
        }
        if let Err(status) = call
            .inbound
            .feed(data, call.message_limit, call.has_encoding)
        {
            return self.reject(stream, status);
        }
        let has_message = call.inbound.waiting() > 0;
        if end {
            self.end_inbound(stream);
        } else if has_message {
            self.wake(WaitReason::Call(stream));
        }
    }

    /// Handles the end of the peer's side in its last DATA frame: a request is complete, but a
    /// response lacks its status.
    pub(super) fn end_inbound(&mut self, stream: u32) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        if !call.inbound.is_between_messages() {
            return self.reject(
                stream,
                Status::new(
                    Code::Internal,
                    "the stream ended in the middle of a message",
                ),
            );
        }
        match self.side {
            Side::Client => {
                let status =
                    Status::new(Code::Internal, "the server ended the call without a status");
                self.finish(stream, Err(status));
            }
            Side::Server(_) => {
                self.finish(stream, Ok(()));
                self.request_is_complete(stream);
            }
        }
    }

    fn trailers(&mut self, stream: u32) {
        match self.side {
            Side::Client => self.response_trailers(stream),
            // gRPC defines no trailers for requests; they are ignored.
            Side::Server(_) => self.end_inbound(stream),
        }
    }

    /// Ends a call that the peer has not ended.
    pub(super) fn reject(&mut self, stream: u32, status: Status) {
        match self.side {
            Side::Client => {
                self.h2.reset(stream, ErrorCode::CANCEL);
                self.finish(stream, Err(status));
            }
            Side::Server(_) => self.refuse(stream, &status),
        }
    }

    /// Stores how a call ended and wakes the threads that wait for it. Only the first end counts.
    pub(super) fn finish(&mut self, stream: u32, end: Result<(), Status>) {
        if let Some(call) = self.calls.get_mut(&stream) {
            if call.end.as_ref().is_none_or(|before| before.is_ok()) {
                call.end = Some(end);
            }
            match self.side {
                // The server may answer before it has received the whole request.
                Side::Client => self.h2.reset(stream, ErrorCode::CANCEL),
                Side::Server(_) => self.drop_if_unstarted(stream),
            }
        }
        self.wake(WaitReason::Call(stream));
        self.wake(WaitReason::Slot);
    }

    /// Handles GOAWAY: ends the calls that the peer will not process, so that the caller can retry
    /// them on another connection.
    fn goaway(&mut self, last: u32, code: ErrorCode, debug: &[u8]) {
        if matches!(self.side, Side::Server(_)) {
            return;
        }
        let words = debug[..debug.len().min(GOAWAY_TEXT)].escape_ascii();
        let said = if debug.is_empty() {
            code.to_string()
        } else {
            format!("{code}, \"{words}\"")
        };
        self.goaway_text = Some(format!(" after GOAWAY ({said})"));
        let is_unheard = |stream: u32, call: &CallState| stream > last && call.end.is_none();
        let unheard = self
            .calls
            .iter()
            .filter(|(stream, call)| is_unheard(**stream, call))
            .map(|(&stream, _)| stream);
        let unheard: Vec<u32> = unheard.collect();
        for stream in unheard {
            let text =
                format!("the server ended the connection before it processed the call ({said})");
            self.finish(
                stream,
                Err(Status::new(Code::Unavailable, text).unprocessed()),
            );
        }
        self.wake(WaitReason::Slot);
    }

    fn next_message(&mut self, stream: u32) -> Option<Result<Option<Bytes>, Status>> {
        let gone = || Some(Err(Status::new(Code::Cancelled, "the call is over")));
        let Some(call) = self.calls.get_mut(&stream) else {
            return gone();
        };
        if let Some(message) = call.inbound.pop() {
            if call.inbound.waiting() == 0 {
                self.h2
                    .release(stream, std::mem::take(&mut call.unreleased));
            }
            if let Some(held) = &mut call.held {
                held.take(message.len());
            }
            return Some(Ok(Some(message)));
        }
        call.end.clone().map(|end| end.map(|()| None))
    }

    /// Returns why nothing more can be sent on a stream.
    pub(super) fn why_closed(&self, stream: u32) -> Status {
        let end = self.calls.get(&stream).and_then(|call| call.end.clone());
        match (end, &self.ended) {
            (Some(Err(status)), _) => status,
            (_, Some(status)) => status.clone(),
            _ => Status::new(Code::Cancelled, "the stream is closed"),
        }
    }

    /// Returns whether the peer has no more interest in the call.
    pub(super) fn is_cancelled(&self, stream: u32) -> bool {
        self.ended.is_some()
            || self
                .calls
                .get(&stream)
                .is_none_or(|call| matches!(call.end, Some(Err(_))))
    }

    pub(super) fn end(&mut self, status: Status) {
        if self.ended.is_none() {
            self.ended = Some(status);
        }
        self.has_woken = true;
        self.waiting.iter().for_each(|(_, thread)| thread.unpark());
    }

    fn wake(&mut self, what: WaitReason) {
        for (waits_for, thread) in &self.waiting {
            if *waits_for == what {
                self.has_woken = true;
                thread.unpark();
            }
        }
    }

    /// Wakes a thread that waits for the peer, so that it takes the reading half.
    pub(super) fn hand_over(&self) {
        if self.reader.is_some()
            && let Some((_, thread)) = self
                .waiting
                .iter()
                .find(|(what, _)| matches!(what, WaitReason::Call(_)))
        {
            thread.unpark();
        }
    }

    /// Hands the reading half over. Returns whether the last turn concerned a thread that waits,
    /// which should then read for itself.
    pub(super) fn yield_reader(&mut self) -> bool {
        self.hand_over();
        std::mem::take(&mut self.has_woken)
            || self
                .waiting
                .iter()
                .any(|(what, _)| matches!(what, WaitReason::Call(_)))
    }

    /// Frees memory that an idle connection does not need.
    pub(super) fn trim(&mut self) {
        self.spare = Vec::new();
        if self.h2.output().is_empty() {
            *self.h2.output() = Vec::new();
        }
        if let Some(reader) = &mut self.reader
            && reader.filled <= READ_FIRST
            && reader.buffer.len() > READ_FIRST
        {
            reader.resize(READ_FIRST);
            self.read_room = READ_FIRST;
        }
        self.count_buffers();
    }

    /// Sends a PING after the time `every` without a byte from the peer. Returns whether a PING was
    /// not answered within `timeout`.
    pub(super) fn keepalive(&mut self, every: Duration, timeout: Duration, now: Instant) -> bool {
        match self.ping_sent {
            Some(sent) if self.last_read > sent => self.ping_sent = None,
            Some(sent) => return now.duration_since(sent) >= timeout,
            None if now.duration_since(self.last_read) >= every => {
                self.h2.ping();
                self.ping_sent = Some(now);
            }
            None => {}
        }
        false
    }

    /// Returns whether a thread may take the reading half.
    pub(super) fn is_free(&self) -> bool {
        self.reader.is_some()
    }
}

/// Returns the time until `deadline`, or DEADLINE_EXCEEDED if it has passed.
fn time_left(deadline: Option<Instant>) -> Result<Option<Duration>, Status> {
    let Some(deadline) = deadline else {
        return Ok(None);
    };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Status::new(Code::DeadlineExceeded, "the deadline passed"));
    }
    Ok(Some(left))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// Writes all bytes within `limit`. The time-out of the socket bounds each single write.
fn write(writer: &mut dyn Write, mut bytes: &[u8], limit: Duration) -> io::Result<()> {
    let mut started = None;
    while !bytes.is_empty() {
        match writer.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(length) => bytes = &bytes[length..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if !bytes.is_empty() && started.get_or_insert_with(Instant::now).elapsed() > limit {
            return Err(io::Error::new(
                ErrorKind::TimedOut,
                "the peer does not read what we send",
            ));
        }
    }
    writer.flush()
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
pub(super) fn h2_limits(streams: u32, header_bytes: u32) -> h2::Limits {
    h2::Limits {
        streams,
        header_list: header_bytes,
        ..h2::Limits::default()
    }
}
