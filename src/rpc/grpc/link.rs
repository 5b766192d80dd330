//! A [`Session`] with its socket, its lock and the threads that share it.
//!
//! One lock guards the session ([`Core`]). Only the two halves of the transport are outside of it:
//! a thread takes a half out for as long as it blocks in it. No thread only reads. A thread that
//! must wait for the peer reads if no other thread does, and processes what arrives for all
//! threads. Then it hands the reading half to another thread that waits. So a call that is alone on
//! its connection wakes no other thread, on either side.
//!
//! ```text
//!   send request ─► flush ─► has my answer come? ─ yes ──► hand over ─► return
//!                              ▲     │ no
//!                              │     ├─ reader is free: take it, read, process for all, put it back ─┐
//!                              │     └─ reader is taken: park until woken ──────────────────────────┤
//!                              └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Each release of the lock wakes the threads whose calls have changed meanwhile ([`Guard`]).
//!
//! A connection may have no reader for a while: all its threads run handlers, or no call is open.
//! After a [`TICK`] the server's watcher or the channel's keeper finds a thread for it. This bounds
//! the time to answer a PING, to notice a cancellation, and to resolve a deadlock of two peers that
//! both only write.

use std::any::Any;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::session::{FRAME, OUTPUT_LEAN, Session, Side};
use super::status::{Code, Status};
use base::crypto::buffer::{Bytes, wipe};
use base::network::canonical;
use base::sync::lock;
use transport::Transport;

/// How long a connection may have no reader.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// How long the peer may take to close its side of a connection that we ended, and how often its
/// bytes are read in a row.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_READS: usize = 16;
/// Sizes of the read buffer in bytes: it begins small, grows to one frame when it was full, and
/// then further if memory is not scarce. While the connection is idle, it has only what has arrived
/// of a frame.
const READ_FIRST: usize = 4 << 10;
const READ_MOST: usize = 64 << 10;

/// A connection.
pub(super) struct Link<S: Side> {
    core: Mutex<Core<S>>,
    pub(super) socket: Arc<TcpStream>,
    pub(super) peer: Option<SocketAddr>,
    /// The identity from the transport.
    pub(super) identity: Option<Arc<str>>,
    /// The claims from the transport.
    pub(super) claims: Option<Arc<dyn Any + Send + Sync>>,
    /// The channel binding of the transport.
    pub(super) binding: Option<[u8; 32]>,
    /// Maximum duration of a flush.
    stall: Duration,
    /// The directions that are shut down when the connection is over and its output is written.
    closing: Shutdown,
    /// The owner that finds threads for the connection while ours run handlers; `None` until the
    /// link has one.
    pub(super) owner: Option<Weak<dyn Owner<S>>>,
    /// Counts how often the reading half was taken and put back; odd while a thread has it.
    turns: AtomicU64,
    /// The value of `turns` at the last check of the owner.
    turns_seen: AtomicU64,
}

/// Finds threads for a connection that no thread reads. Its functions run under the lock of the
/// connection.
pub(super) trait Owner<S: Side>: Send + Sync {
    /// Called before a thread reads that waits for its own call.
    fn before_read(self: Arc<Self>);

    /// Called after that thread has read. It does nothing for the calls of others.
    fn after_read(self: Arc<Self>, session: &mut Session<S>);
}

/// The state that the lock guards.
pub(super) struct Core<S: Side> {
    pub(super) session: Session<S>,
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
    waiting: Vec<(WaitReason, Thread)>,
    /// Whether a waiting thread was woken since this flag was last cleared.
    has_woken: bool,
    /// Until when the peer may close its side.
    lingers_until: Option<Instant>,
}

/// What a parked thread waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitReason {
    /// A change of its call.
    Call(u32),
    /// Room in the output.
    Room,
    /// The peer allows another stream.
    Slot,
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
            FRAME.. if is_lean && self.filled < READ_FIRST => self.resize(READ_FIRST),
            _ if self.filled < length => {}
            ..READ_FIRST => self.resize(READ_FIRST),
            READ_FIRST => self.resize(FRAME),
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

/// The locked state. Before it is released, it wakes the threads that wait for what has changed.
pub(super) struct Guard<'a, S: Side>(MutexGuard<'a, Core<S>>);

impl<S: Side> Deref for Guard<'_, S> {
    type Target = Core<S>;

    fn deref(&self) -> &Core<S> {
        &self.0
    }
}

impl<S: Side> DerefMut for Guard<'_, S> {
    fn deref_mut(&mut self) -> &mut Core<S> {
        &mut self.0
    }
}

impl<S: Side> Drop for Guard<'_, S> {
    fn drop(&mut self) {
        self.0.wake_changed();
    }
}

impl<S: Side> Link<S> {
    /// Makes a link whose flushes take at most `stall`. At the end of the connection, the socket is
    /// shut down in the directions of `closing`.
    pub(super) fn new(
        transport: Transport,
        session: Session<S>,
        stall: Duration,
        closing: Shutdown,
    ) -> io::Result<Link<S>> {
        let Transport {
            reader,
            writer,
            socket,
            identity,
            claims,
            binding,
            scheme: _,
        } = transport;
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
            session,
            reader: Some(reader),
            writer: Some(writer),
            is_writing: false,
            spare: Vec::new(),
            read_room: 0,
            written_room: 0,
            waiting: Vec::new(),
            has_woken: false,
            lingers_until: None,
        };
        Ok(Link {
            core: Mutex::new(core),
            peer: socket.peer_addr().ok().map(canonical),
            identity,
            claims,
            binding,
            socket,
            stall,
            closing,
            owner: None,
            turns: AtomicU64::new(0),
            turns_seen: AtomicU64::new(u64::MAX),
        })
    }

    pub(super) fn lock(&self) -> Guard<'_, S> {
        // A panic under the lock would be a bug of ours. The state of the connection is still
        // better than none.
        Guard(lock(&self.core))
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
    pub(super) fn end(&self, core: &mut Core<S>, status: Status) {
        core.session.end(status);
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Ends the connection after the output is written and the transport has sent its closing
    /// message. If another thread is writing, that thread does this.
    pub(super) fn end_after_flush<'a>(
        &'a self,
        mut core: Guard<'a, S>,
        status: Status,
    ) -> Guard<'a, S> {
        core.session.end(status);
        self.flush(core)
    }

    /// Discards what the peer still sends after the end of the connection, without waiting. The
    /// kernel answers unread bytes with a TCP reset, which can overtake our GOAWAY. Returns whether
    /// the caller should call again later.
    pub(super) fn discard_unread(&self, core: &Core<S>) -> bool {
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
        mut core: Guard<'a, S>,
        timeout: Option<Duration>,
    ) -> Guard<'a, S> {
        if core.session.is_output_full() {
            return core;
        }
        let Some(mut reader) = core.reader.take() else {
            return core;
        };
        if reader.has_unprocessed {
            core.process(&mut reader);
            core.reader = Some(reader);
            return core;
        }
        reader.make_room(core.session.is_memory_scarce());
        core.read_room = reader.buffer.len();
        self.turns.fetch_add(1, Ordering::SeqCst);
        drop(core);
        let result = reader.read(&self.socket, timeout);
        let mut core = self.lock();
        let was_over = core.session.ended().is_some();
        match result {
            Ok(0) => core.session.receive_end(),
            Ok(length) => {
                reader.filled += length;
                core.process(&mut reader);
            }
            Err(error) if is_timeout(&error) => {}
            Err(error) => core.session.end(Status::broken(error)),
        }
        core.reader = Some(reader);
        self.turns.fetch_add(1, Ordering::SeqCst);
        if core.session.ended().is_some() && !was_over {
            core = self.flush(core);
            if core.is_writing {
                // The peer is gone, silent or faulty: another thread's write to it is useless.
                let _ = self.socket.shutdown(Shutdown::Both);
            }
        }
        core
    }

    /// Writes the output. If another thread is writing, that thread also writes our part. Closes a
    /// connection that is over.
    pub(super) fn flush<'a>(&'a self, mut core: Guard<'a, S>) -> Guard<'a, S> {
        while core.session.fill_output()
            && let Some(mut writer) = core.writer.take()
        {
            let spare = std::mem::take(&mut core.spare);
            let mut bytes = std::mem::replace(core.session.output(), spare);
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
            if bytes.capacity() <= OUTPUT_LEAN || !core.session.is_memory_scarce() {
                core.spare = bytes;
            }
            if let Err(error) = result {
                core.session.discard_output();
                self.end(&mut core, Status::broken(error));
            }
            core.wake_senders();
        }
        if core.session.ended().is_some()
            && let Some(writer) = core.writer.take()
        {
            core.is_writing = true;
            drop(core);
            drop(writer);
            let _ = self.socket.shutdown(self.closing);
            core = self.lock();
            core.is_writing = false;
            core.lingers_until = Some(Instant::now() + LINGER);
            core.wake_senders();
        }
        core
    }

    /// Waits on behalf of the call on `stream` until `check` returns an answer, the deadline passes
    /// or the connection ends.
    pub(super) fn wait<'a, T>(
        &'a self,
        mut core: Guard<'a, S>,
        stream: u32,
        deadline: Option<Instant>,
        mut check: impl FnMut(&mut Session<S>) -> Option<T>,
    ) -> (Guard<'a, S>, Result<T, Status>) {
        let result = loop {
            core = self.flush(core);
            if let Some(found) = check(&mut core.session) {
                break Ok(found);
            }
            if let Some(status) = core.session.ended() {
                break Err(status.clone());
            }
            let left = match time_left(deadline) {
                Ok(left) => left,
                Err(status) => break Err(status),
            };
            core = match (core.is_free(), core.session.is_output_full()) {
                (true, true) => self.park(core, WaitReason::Room, left),
                (true, false) => self.read_for_all(core, left),
                (false, _) => self.park(core, WaitReason::Call(stream), left),
            };
        };
        core.hand_over();
        (core, result)
    }

    /// Reads on behalf of a thread that has a call of its own.
    fn read_for_all<'a>(&'a self, core: Guard<'a, S>, timeout: Option<Duration>) -> Guard<'a, S> {
        let owner = self.owner.as_ref().and_then(Weak::upgrade);
        if let Some(owner) = &owner {
            owner.clone().before_read();
        }
        let mut core = self.read_turn(core, timeout);
        if let Some(owner) = owner {
            owner.after_read(&mut core.session);
        }
        core
    }

    fn park<'a>(
        &'a self,
        mut core: Guard<'a, S>,
        reason: WaitReason,
        timeout: Option<Duration>,
    ) -> Guard<'a, S> {
        let me = thread::current();
        let id = me.id();
        // What has changed so far is known to this thread.
        core.wake_changed();
        core.waiting.push((reason, me));
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
        mut core: Guard<'a, S>,
        stream: u32,
        mut message: &[u8],
        end: bool,
        deadline: Option<Instant>,
    ) -> (Guard<'a, S>, Result<(), Status>) {
        loop {
            if !core.session.has_room() {
                core = self.flush(core);
            }
            while !core.session.has_room() && core.session.ended().is_none() {
                match time_left(deadline) {
                    Ok(left) => core = self.park(core, WaitReason::Room, left),
                    Err(status) => return (core, Err(status)),
                }
            }
            match core.session.send(stream, message, end) {
                Ok(sent) if sent == message.len() => return (core, Ok(())),
                Ok(sent) => message = &message[sent..],
                Err(status) => return (core, Err(status)),
            }
            if !core.session.may_send(stream) {
                let stalled = Instant::now() + self.stall;
                let limit = deadline.map_or(stalled, |deadline| deadline.min(stalled));
                let open = |session: &mut Session<S>| session.may_send(stream).then_some(());
                let result;
                (core, result) = self.wait(core, stream, Some(limit), open);
                if let Err(status) = result {
                    let is_stall = limit == stalled && core.session.ended().is_none();
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
        core: Guard<'a, S>,
        stream: u32,
        deadline: Option<Instant>,
    ) -> (Guard<'a, S>, Result<Option<Bytes>, Status>) {
        let next = |session: &mut Session<S>| session.next_message(stream);
        let (core, result) = self.wait(core, stream, deadline, next);
        (core, result.and_then(|message| message))
    }

    /// Waits until the peer allows another stream. The caller must try again.
    pub(super) fn wait_for_slot<'a>(
        &'a self,
        core: Guard<'a, S>,
        deadline: Option<Instant>,
    ) -> Result<Guard<'a, S>, Status> {
        let left = time_left(deadline)?;
        Ok(self.park(core, WaitReason::Slot, left))
    }
}

impl<S: Side> Core<S> {
    fn process(&mut self, reader: &mut Reader) {
        self.count_buffers();
        let bytes = &reader.buffer[..reader.filled];
        let taken = self.session.receive(bytes, Instant::now());
        reader.has_unprocessed = self.session.is_output_full();
        // musl's memmove to the same place copies byte by byte
        if taken > 0 {
            reader.consume(taken);
        }
    }

    fn count_buffers(&mut self) {
        let room = self.spare.capacity() + self.read_room + self.written_room;
        self.session.set_outer_buffers(room);
    }

    /// Wakes the threads that wait for what has changed in the session.
    fn wake_changed(&mut self) {
        let changes = self.session.changes();
        for (reason, thread) in &self.waiting {
            let concerns = match reason {
                _ if changes.all => true,
                WaitReason::Call(stream) => changes.calls.contains(stream),
                WaitReason::Slot => changes.slot,
                WaitReason::Room => false,
            };
            if concerns {
                self.has_woken = true;
                thread.unpark();
            }
        }
        changes.clear();
    }

    /// Wakes the threads that wait for room in the output.
    fn wake_senders(&mut self) {
        for (reason, thread) in &self.waiting {
            if *reason == WaitReason::Room {
                self.has_woken = true;
                thread.unpark();
            }
        }
    }

    /// Wakes a thread that waits for the peer, so that it takes the reading half.
    pub(super) fn hand_over(&self) {
        if self.reader.is_some()
            && let Some((_, thread)) = self.waits_for_peer()
        {
            thread.unpark();
        }
    }

    /// Hands the reading half over. Returns whether the last turn concerned a thread that waits,
    /// which should then read for itself.
    pub(super) fn yield_reader(&mut self) -> bool {
        self.wake_changed();
        self.hand_over();
        std::mem::take(&mut self.has_woken) || self.waits_for_peer().is_some()
    }

    fn waits_for_peer(&self) -> Option<&(WaitReason, Thread)> {
        self.waiting
            .iter()
            .find(|(reason, _)| matches!(reason, WaitReason::Call(_)))
    }

    /// Frees memory that an idle connection does not need.
    pub(super) fn trim(&mut self) {
        self.spare = Vec::new();
        if self.session.output().is_empty() {
            *self.session.output() = Vec::new();
        }
        if let Some(reader) = &mut self.reader
            && reader.filled <= READ_FIRST
        {
            reader.resize(reader.filled);
            self.read_room = reader.filled;
        }
        self.count_buffers();
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
