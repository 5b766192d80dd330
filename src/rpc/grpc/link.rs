//! One connection, shared by the threads that have calls on it.
//!
//! Everything is under one lock ([`Core`]) but the two halves of the transport, which threads take out of it for as long as
//! they block in them. There is no thread for reading: whoever must wait for the peer reads, if nobody does so already, and
//! works for all while it waits; then it hands the reading half to another thread that waits. So a call on a connection of
//! its own wakes no other thread, on either side.
//!
//! ```text
//!   send request ─► flush ─► is my answer there? ── yes ──► hand over ─► return
//!                              ▲     │ no
//!                              │     ├─ reader is free: take it, read, process for all, put it back ─┐
//!                              │     └─ it is taken: park until woken ──────────────────────────────┤
//!                              └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A connection that nobody reads although there is no hurry (all its threads run handlers, or no call is under way) is
//! taken care of after a [`TICK`]: on the server by its watcher, on the client by the channel's keeper. That bounds the time
//! to answer a PING, to notice a cancellation, and to resolve two peers that both only write. On the server a connection
//! from which nothing comes is parked: it costs no thread until its socket can be read.

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

/// How long a connection may have nobody who reads it.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// DATA is framed only while less than this waits to be written; while memory is scarce, the other.
const OUTPUT: usize = 64 << 10;
const OUTPUT_LEAN: usize = 2 << 10;
/// Nothing is taken in while so many times as much waits: what we answer is then bounded, too. It must be more than DATA alone
/// may be, or two peers that both send much would wait for each other.
const OUTPUTS_HELD: usize = 3;
/// How long the peer may take to close its side of a connection that we ended, and how often its bytes are read in a row.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_READS: usize = 16;
/// What is told of a GOAWAY's debug data, bytes.
const FAREWELL: usize = 100;
/// The read buffer: small until it was full once, one frame then, more while memory is not scarce;
/// small again when idle.
const READ_FIRST: usize = 4 << 10;
const READ_FRAME: usize = 17 << 10;
const READ_MOST: usize = 64 << 10;
/// Buffers of a connection that are not counted.
const BUFFERS_FREE: usize = READ_FRAME + 2 * OUTPUT_LEAN;

/// A connection.
pub(super) struct Link {
    core: Mutex<Core>,
    pub(super) socket: Arc<TcpStream>,
    pub(super) peer: Option<SocketAddr>,
    /// The transport's.
    pub(super) identity: Option<Arc<str>>,
    /// What the connections of this peer take together.
    pub(super) share: Arc<PeerShare>,
    me: Weak<Link>,
    /// The longest that one flush may take.
    stall: Duration,
    /// Counts each time that the reading half is taken and put back: odd while a thread has it.
    turns: AtomicU64,
    /// `turns` as the watcher or keeper last saw it.
    seen: AtomicU64,
    /// Server: jobs of the pool that will attend the connection but have not begun.
    pub(super) awaited: AtomicUsize,
}

/// What the lock guards.
pub(super) struct Core {
    pub(super) h2: Connection,
    pub(super) side: Side,
    /// Boxed, as the map keeps the places of calls that ended.
    pub(super) calls: StreamMap<Box<CallState>>,
    /// Server: calls whose handler can start.
    pub(super) ready: VecDeque<u32>,
    /// Server: calls whose handlers are done, and whose answers did not go out whole.
    outbound: VecDeque<u32>,
    reader: Option<Reader>,
    /// Absent while a thread writes, and for good once the connection is closed.
    writer: Option<Box<dyn Write + Send>>,
    pub(super) is_writing: bool,
    /// The output's other buffer, while one is filled and one written.
    spare: Vec<u8>,
    /// Bytes of the buffers that threads have taken out: one to read to, one to write from.
    read_room: usize,
    written_room: usize,
    /// What all these buffers take.
    pub(super) buffers: Held,
    waiting: Vec<(For, Thread)>,
    /// Some waiting thread was woken since the flag was last cleared.
    has_woken: bool,
    /// The connection is over, and calls without an answer end with this.
    pub(super) ended: Option<Status>,
    /// How long a peer may take to close its side, too.
    pub(super) lingers_until: Option<Instant>,
    /// Client: what the server's GOAWAY said.
    pub(super) farewell: Option<String>,
    pub(super) last_read: Instant,
    ping_sent: Option<Instant>,
    /// Server: the poller looks for bytes to read, and no thread does.
    pub(super) is_parked: bool,
    /// Server: the timers.
    pub(super) upkeep: Upkeep,
}

/// Which side of the connection we are.
pub(super) enum Side {
    Client,
    Server(Arc<Shared>),
}

/// What a parked thread waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum For {
    /// Something on its stream.
    Call(u32),
    /// The output has room.
    Room,
    /// The peer allows another stream.
    Slot,
}

/// An answer that a handler returned, on its way: it waits for the peer without a thread.
pub(super) struct Outbound {
    /// Empty where the handler sent all itself.
    pub(super) message: Bytes,
    sent: usize,
    /// Custom headers and trailers.
    custom: (Metadata, Metadata),
    /// When the peer last took something.
    pub(super) moved: Option<Instant>,
}

/// A call as the connection sees it.
pub(super) struct CallState {
    pub(super) inbound: Assembler,
    pub(super) message_limit: usize,
    /// Received bytes whose window opens when a message is taken.
    unreleased: u32,
    /// Client: the response's headers, once there.
    pub(super) headers: Option<Metadata>,
    pub(super) trailers: Metadata,
    /// `Ok`: the peer said all it had to say. `Err`: the call failed, or was cancelled.
    pub(super) end: Option<Result<(), Status>>,
    /// Server: what the handler needs, until it starts.
    pub(super) request: Option<Request>,
    /// Server: what is counted against the limit of buffered bytes.
    pub(super) held: Option<Held>,
    /// Server: what the handler returned.
    pub(super) outbound: Option<Outbound>,
    /// Server: the request is not gRPC, and is answered with this HTTP status, without a handler.
    pub(super) turned_away: Option<TurnedAway>,
    /// Server: the response's headers went out.
    pub(super) has_answered: bool,
    /// The client named a compression.
    pub(super) has_encoding: bool,
    pub(super) started: Instant,
    /// Client: when the caller stops waiting.
    pub(super) deadline: Option<Instant>,
}

/// The answer to a request that is not gRPC.
#[derive(Clone, Copy)]
pub(super) struct TurnedAway {
    pub(super) status: &'static [u8],
    /// The field that says what would be gRPC.
    pub(super) hint: (&'static [u8], &'static [u8]),
    /// For who looks with a browser.
    pub(super) text: &'static [u8],
}

impl CallState {
    /// Server: a handler has it, and ends it.
    pub(super) fn has_handler(&self) -> bool {
        self.request.is_none() && self.outbound.is_none() && self.turned_away.is_none()
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
            turned_away: None,
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
    /// Frames may be among what is filled, since we took nothing in any more.
    is_behind: bool,
    timeout: Option<Duration>,
}

impl Reader {
    fn read(&mut self, socket: &TcpStream, timeout: Option<Duration>) -> io::Result<usize> {
        // zero would mean no time-out at all
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
            // a frame that was complete has been taken out
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
            is_behind: false,
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
            farewell: None,
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
            seen: AtomicU64::new(u64::MAX),
            awaited: AtomicUsize::new(0),
        }))
    }

    pub(super) fn lock(&self) -> Guard<'_> {
        // a panic under the lock would be a bug of ours; the connection's state is still better than none
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a thread has the reading half, or puts it back just now.
    pub(super) fn is_attended(&self) -> bool {
        self.turns.load(Ordering::SeqCst) % 2 == 1
    }

    /// Whether nobody read since the last call of this.
    pub(super) fn is_neglected(&self) -> bool {
        let turns = self.turns.load(Ordering::SeqCst);
        self.seen.swap(turns, Ordering::Relaxed) == turns && turns.is_multiple_of(2)
    }

    /// Ends the connection: all that wait on it wake up.
    pub(super) fn end(&self, core: &mut Core, status: Status) {
        core.end(status);
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Ends it politely: what is to be written goes out, then whatever the transport says at its end. If another thread is
    /// writing, that one does it.
    pub(super) fn end_after_flush<'a>(&'a self, mut core: Guard<'a>, status: Status) -> Guard<'a> {
        core.end(status);
        self.flush(core)
    }

    /// Server, on a connection that is over: takes in what the peer still sends until it closes too, without waiting for it.
    /// Bytes that nobody read would make the system answer with a reset, which may overtake our GOAWAY. Returns whether
    /// there may be more.
    pub(super) fn lingers(&self, core: &Core) -> bool {
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

    /// Reads once, for at most `timeout`, and processes what came. Returns at once if another thread reads, or nothing more may
    /// be taken in.
    pub(super) fn read_turn<'a>(
        &'a self,
        mut core: Guard<'a>,
        timeout: Option<Duration>,
    ) -> Guard<'a> {
        if core.is_held() {
            return core;
        }
        let Some(mut reader) = core.reader.take() else {
            return core;
        };
        if reader.is_behind {
            core.process(&mut reader, Instant::now());
            core.reader = Some(reader);
            return core;
        }
        reader.make_room(core.memory_is_scarce());
        core.read_room = reader.buffer.len();
        // from now on there may be bytes in the transport, behind the socket where the poller looks
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
                    core.farewell.as_deref().unwrap_or_default()
                );
                core.end(Status::new(Code::Unavailable, why));
            }
            Ok(length) => {
                reader.filled += length;
                core.process(&mut reader, now);
            }
            Err(error) if is_timeout(&error) => {}
            Err(error) => core.end(Status::new(
                Code::Unavailable,
                format!("the connection broke: {error}"),
            )),
        }
        core.reader = Some(reader);
        self.turns.fetch_add(1, Ordering::SeqCst);
        if core.ended.is_some() && !was_over {
            core = self.flush(core);
            if core.is_writing {
                // the peer is gone, silent or broken: there is no use in what another thread is still writing to it
                let _ = self.socket.shutdown(Shutdown::Both);
            }
        }
        core
    }

    /// Server: the connection is to be attended by threads again.
    pub(super) fn unpark(&self, core: &mut Core) {
        if std::mem::take(&mut core.is_parked)
            && let (Side::Server(shared), Some(link)) = (&core.side, self.me.upgrade())
        {
            shared.activate(core.upkeep.id, link);
        }
    }

    /// Writes what is to be written, unless another thread is at it: that one then also writes ours. Closes a connection
    /// that is over.
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
                self.end(
                    &mut core,
                    Status::new(Code::Unavailable, format!("the connection broke: {error}")),
                );
            }
            core.wake(For::Room);
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
            core.wake(For::Room);
        }
        core
    }

    /// Waits on behalf of the call on `stream` until `check` has an answer, its deadline, or the connection's end.
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
            core = match (core.is_free(), core.is_held()) {
                (true, true) => self.park(core, For::Room, left),
                (true, false) => self.read_for_all(core, left),
                (false, _) => self.park(core, For::Call(stream), left),
            };
        };
        core.hand_over();
        (core, result)
    }

    /// A turn by a thread that has a handler to run: requests that came in are for other threads.
    fn read_for_all<'a>(&'a self, core: Guard<'a>, timeout: Option<Duration>) -> Guard<'a> {
        let core = self.read_turn(core, timeout);
        if let Side::Server(shared) = &core.side
            && let Some(link) = self.me.upgrade()
        {
            shared.attend_later(&link, core.ready.len());
        }
        core
    }

    fn park<'a>(&'a self, mut core: Guard<'a>, what: For, timeout: Option<Duration>) -> Guard<'a> {
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

    /// Sends the pieces of a framed message as the windows open. What it framed may not be written yet on return.
    pub(super) fn send<'a>(
        &'a self,
        mut core: Guard<'a>,
        stream: u32,
        mut message: &[u8],
        end: bool,
        deadline: Option<Instant>,
    ) -> (Guard<'a>, Result<(), Status>) {
        loop {
            if core.h2.output().len() >= core.most_output() {
                core = self.flush(core);
            }
            if core.ended.is_some() {
                let status = core.why_closed(stream);
                return (core, Err(status));
            }
            while core.h2.output().len() >= core.most_output() && core.ended.is_none() {
                match time_left(deadline) {
                    Ok(left) => core = self.park(core, For::Room, left),
                    Err(status) => return (core, Err(status)),
                }
            }
            let piece = &message[..message.len().min(core.most_output())];
            let is_last = piece.len() == message.len();
            // and the heads of its frames
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
                    let stall = || {
                        Status::new(
                            Code::Unavailable,
                            "the peer does not take what is sent to it",
                        )
                    };
                    return (core, Err(if is_stall { stall() } else { status }));
                }
            }
        }
    }

    /// Waits for the next message on a stream; `None` when the peer ended its side well.
    pub(super) fn receive<'a>(
        &'a self,
        core: Guard<'a>,
        stream: u32,
        deadline: Option<Instant>,
    ) -> (Guard<'a>, Result<Option<Bytes>, Status>) {
        let (core, result) = self.wait(core, stream, deadline, |core| core.next_message(stream));
        (core, result.and_then(|message| message))
    }

    /// Waits until the peer allows another stream; the caller tries again.
    pub(super) fn wait_for_slot<'a>(
        &'a self,
        core: Guard<'a>,
        deadline: Option<Instant>,
    ) -> Result<Guard<'a>, Status> {
        let left = time_left(deadline)?;
        Ok(self.park(core, For::Slot, left))
    }
}

impl Core {
    fn process(&mut self, reader: &mut Reader, now: Instant) {
        self.last_read = now;
        let mut taken = 0;
        while self.ended.is_none() && !self.is_held() {
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
                        log::info!("a connection is closed because its peer broke HTTP/2: {error}");
                    }
                    self.end(Status::new(
                        Code::Unavailable,
                        format!("the peer broke HTTP/2: {error}"),
                    ));
                }
            }
        }
        reader.is_behind = self.is_held();
        reader.consume(taken);
        self.h2.forget_headers();
        self.count_buffers();
        if self.h2.block_room() > 0 && self.memory_is_scarce() {
            let why = "memory is too scarce for a header block of more than one frame";
            self.h2.refuse_block(why);
            self.end(Status::new(Code::ResourceExhausted, why));
            self.count_buffers();
        }
    }

    /// How much may wait to be written before no more DATA is framed.
    fn most_output(&self) -> usize {
        if self.memory_is_scarce() {
            OUTPUT_LEAN
        } else {
            OUTPUT
        }
    }

    /// Whether so much waits to be written that nothing more may be taken in: a thread is writing, and the peer does not read.
    pub(super) fn is_held(&mut self) -> bool {
        self.h2.output().len() >= OUTPUTS_HELD * OUTPUT_LEAN
            && self.h2.output().len() >= OUTPUTS_HELD * self.most_output()
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

    /// Whether there is something to write; frames what answers that wait have, as far as there is room.
    fn has_output(&mut self) -> bool {
        for _ in 0..self.outbound.len() {
            if self.h2.output().len() >= self.most_output() {
                break;
            }
            if let Some(stream) = self.outbound.pop_front() {
                self.go_on_answering(stream);
            }
        }
        !self.h2.output().is_empty()
    }

    /// Answers with what a handler returned.
    pub(super) fn respond(&mut self, stream: u32, message: Bytes, custom: (Metadata, Metadata)) {
        if !message.is_empty() {
            self.answer_headers(stream, &custom.0);
        }
        self.respond_with(stream, message, custom);
    }

    /// The same where the headers went out.
    pub(super) fn respond_with(
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

    fn go_on_answering(&mut self, stream: u32) {
        let most = self.most_output();
        // it was cancelled if it is not there
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        let Some(outbound) = &mut call.outbound else {
            return;
        };
        let rest = &outbound.message[outbound.sent..];
        let piece = &rest[..rest.len().min(most)];
        // and the heads of its frames
        reserve(self.h2.output(), piece.len() + 64);
        // what is not gRPC has no trailers
        let ends = call.turned_away.is_some();
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
        // the request is of no more use
        if call
            .held
            .as_mut()
            .is_none_or(|held| held.set(outbound.message.len()))
        {
            self.outbound.push_back(stream);
        } else {
            let status = Status::new(
                Code::ResourceExhausted,
                "the client does not take its answers",
            );
            self.answer(stream, &Err(status), &Default::default());
            self.forget(stream);
        }
    }

    /// Server: a call is over.
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
                // every stream may have waited for this
                self.has_woken |= !self.waiting.is_empty();
                self.waiting.iter().for_each(|(_, thread)| thread.unpark());
            }
            Event::Window { stream } => self.wake(For::Call(stream)),
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
            // RFC 9113 §8.1: our answer was complete before the request. Only now that more comes do we cut it off: some
            // clients forget the answer when RST_STREAM follows it closely.
            return self.h2.reset(stream, ErrorCode::NO_ERROR);
        };
        if call.outbound.is_some() {
            // the handler wants no more of it
            return;
        }
        if call.turned_away.is_some() {
            self.h2.release(stream, data.len() as u32);
            if end {
                self.end_inbound(stream);
            }
            return;
        }
        // a message that is awaited must get through whatever its size; what comes behind one that waits must wait too
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
            self.wake(For::Call(stream));
        }
    }

    /// The peer's side ended with its last DATA frame: a request is complete, a response lacks its status.
    pub(super) fn end_inbound(&mut self, stream: u32) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        if !call.inbound.is_between_messages() {
            return self.reject(
                stream,
                Status::new(Code::Internal, "the stream ended within a message"),
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
            // a request has none in gRPC; they are harmless
            Side::Server(_) => self.end_inbound(stream),
        }
    }

    /// We end a call that the peer has not ended.
    pub(super) fn reject(&mut self, stream: u32, status: Status) {
        match self.side {
            Side::Client => {
                self.h2.reset(stream, ErrorCode::CANCEL);
                self.finish(stream, Err(status));
            }
            Side::Server(_) => self.refuse(stream, &status),
        }
    }

    /// Notes how a call ended and wakes who waits for it. The first end counts.
    pub(super) fn finish(&mut self, stream: u32, end: Result<(), Status>) {
        if let Some(call) = self.calls.get_mut(&stream) {
            if call.end.as_ref().is_none_or(|before| before.is_ok()) {
                call.end = Some(end);
            }
            match self.side {
                // the server may answer before it heard all of the request
                Side::Client => self.h2.reset(stream, ErrorCode::CANCEL),
                Side::Server(_) => self.drop_if_unstarted(stream),
            }
        }
        self.wake(For::Call(stream));
        self.wake(For::Slot);
    }

    /// The peer goes away: calls that it will not act on end now, so that the caller can repeat them elsewhere.
    fn goaway(&mut self, last: u32, code: ErrorCode, debug: &[u8]) {
        if matches!(self.side, Side::Server(_)) {
            return;
        }
        let words = debug[..debug.len().min(FAREWELL)].escape_ascii();
        let said = if debug.is_empty() {
            code.to_string()
        } else {
            format!("{code}, \"{words}\"")
        };
        self.farewell = Some(format!(" after GOAWAY ({said})"));
        let is_unheard = |stream: u32, call: &CallState| stream > last && call.end.is_none();
        let unheard = self
            .calls
            .iter()
            .filter(|(stream, call)| is_unheard(**stream, call))
            .map(|(&stream, _)| stream);
        let unheard: Vec<u32> = unheard.collect();
        for stream in unheard {
            let text = format!("the server went away before it saw the call ({said})");
            self.finish(
                stream,
                Err(Status::new(Code::Unavailable, text).unprocessed()),
            );
        }
        self.wake(For::Slot);
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

    /// Why nothing can be sent on a stream any more.
    pub(super) fn why_closed(&self, stream: u32) -> Status {
        let end = self.calls.get(&stream).and_then(|call| call.end.clone());
        match (end, &self.ended) {
            (Some(Err(status)), _) => status,
            (_, Some(status)) => status.clone(),
            _ => Status::new(Code::Cancelled, "the stream is closed"),
        }
    }

    /// Whether the call is over for the peer.
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

    fn wake(&mut self, what: For) {
        for (waits_for, thread) in &self.waiting {
            if *waits_for == what {
                self.has_woken = true;
                thread.unpark();
            }
        }
    }

    /// Gives the reading half to a thread that waits for the peer.
    pub(super) fn hand_over(&self) {
        if self.reader.is_some()
            && let Some((_, thread)) = self
                .waiting
                .iter()
                .find(|(what, _)| matches!(what, For::Call(_)))
        {
            thread.unpark();
        }
    }

    /// Lets the keeper know whether the last turn concerned a thread that waits (it should then read for itself), and
    /// hands over.
    pub(super) fn is_wanted(&mut self) -> bool {
        self.hand_over();
        std::mem::take(&mut self.has_woken)
            || self
                .waiting
                .iter()
                .any(|(what, _)| matches!(what, For::Call(_)))
    }

    /// Gives back memory that an idle connection does not need.
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

    /// Sends a PING after `every` without a byte from the peer; returns whether one was not answered within `timeout`.
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

    /// Whether a thread may take the reading half.
    pub(super) fn is_free(&self) -> bool {
        self.reader.is_some()
    }
}

/// The time until `deadline`, or the status of a call that missed it.
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

/// Writes all within `limit`; the socket's own time-out bounds each single write.
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
                "the peer does not take what is sent to it",
            ));
        }
    }
    writer.flush()
}

/// gRPC over HTTP2, "Errors": the status of a call that RST_STREAM ended.
fn reset_status(code: ErrorCode, by_peer: bool, is_late: bool) -> Status {
    let status = match code {
        ErrorCode::REFUSED_STREAM => Code::Unavailable,
        // a server that keeps the deadline, too, as grpc-go's, ends the call by this
        ErrorCode::CANCEL if is_late => Code::DeadlineExceeded,
        ErrorCode::CANCEL => Code::Cancelled,
        ErrorCode::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
        ErrorCode::INADEQUATE_SECURITY => Code::PermissionDenied,
        _ => Code::Internal,
    };
    let who = if by_peer {
        "the peer reset the stream"
    } else {
        "the stream was reset because the peer broke a rule"
    };
    let status = Status::new(status, format!("{who} ({code})"));
    if by_peer && code == ErrorCode::REFUSED_STREAM {
        status.unprocessed()
    } else {
        status
    }
}

/// The limits of a connection for `streams` calls with headers of at most `header_bytes`.
pub(super) fn h2_limits(streams: u32, header_bytes: u32) -> h2::Limits {
    h2::Limits {
        streams,
        header_list: header_bytes,
        ..h2::Limits::default()
    }
}
