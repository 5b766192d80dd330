//! The server: threads within limits.
//!
//! ```text
//!   watcher ── first byte on a socket ────────► pool: handshake, then attend ◄── watcher: a parked connection is readable,
//!                                                     │                         or a connection had no reader for a tick,
//!                                                     ▼                         because its thread runs a handler
//!        attend: read ─► a request is complete ─► run its handler in this thread ─► write ─► read …
//!                  └─► nothing arrives ─► park: the poller has the socket, the thread goes back to the pool
//! ```
//!
//! So one thread serves the usual call without a switch. A slow handler delays the other calls of
//! its connection by at most two ticks. An idle connection uses no thread.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::header_values::{encode_bin, is_grpc_type, parse_timeout, percent_encode};
use super::health;
use super::link::{CallState, Core, Guard, HttpResponse, Link, Side, TICK, h2_limits};
use super::metadata::Metadata;
use super::router::{Call, Method, Router};
use super::status::{Code, Status};
use super::transport::Accept;
use crate::h2::{Connection, ErrorCode, Field, Indexing, SendError};
use crate::half_open::{HalfOpen, NextHandshake};
use crate::share::{Held, PeerShare, Share, SharedLimit};
use base::crypto::buffer::Bytes;
use base::network::Network;
use base::pool::Pool;
use sys::net::limit_send_buffer;
use sys::poll::Poller;

/// Interval between checks of a connection's timers; also the precision of its time-outs.
const UPKEEP: Duration = Duration::from_secs(1);
/// How long a thread waits for the next bytes of a connection before it parks the connection. The
/// first value applies after a call, because another call may follow at once and then needs no
/// switch between threads.
const PATIENCE: Duration = Duration::from_millis(50);
const PATIENCE_FIRST: Duration = Duration::from_millis(1);
/// The poller's number for the listening socket; the numbers of connections are higher.
const LISTENER: u64 = 0;
/// Bytes of a call in addition to its metadata and its message, as they count against
/// [`Limits::buffered_bytes`].
const CALL_BYTES: usize = 1 << 10;
/// Maximum number of bytes of a status message that are sent.
const MESSAGE_MOST: usize = 2 << 10;
/// The retry hint for a call that was shed.
const BUSY_PAUSE: Duration = Duration::from_secs(2);
/// Maximum number of connections accepted in a row before the open ones are served again.
const ACCEPTS: usize = 64;
/// At most one in `UNREAD_PART` connections may have so much output that nothing more is received.
/// Each one holds a thread, and kernel buffers that no limit counts. Beyond this part, the
/// connections whose peers have been silent for the longest are ended.
const UNREAD_PART: usize = 4;
/// Size in bytes of the kernel's send buffer; without a limit it grows to 4 MiB (tcp(7), tcp_wmem).
const SOCKET_BYTES: u32 = 64 << 10;
/// Pause before the next accept when no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The resources that a server spends on its peers at most. Beyond a limit it refuses connections
/// or calls, and says so in the log.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of connections. A further one takes the place of a half-open one, or is
    /// closed at once.
    pub connections: usize,
    /// Maximum number of connections of one peer (an IPv4 address, or an IPv6 network of 64 bits).
    /// A further one takes the place of a half-open one of this peer, or is closed at once.
    pub connections_per_peer: usize,
    /// Maximum number of connections whose handshake is not complete. A further one takes the place
    /// of the oldest one of the peer that has the most. At most half of all connections, so that
    /// established connections keep their places.
    pub half_open: usize,
    /// Maximum number of handshakes that run at once, each with a thread; at most half of them of
    /// one peer. The other connections wait, and peers take turns.
    pub handshakes: usize,
    /// A handshake that has waited for its peer for this long loses its thread when few threads are
    /// free.
    pub handshake_patience: Duration,
    /// Time from accept to the end of the peer's HTTP/2 preface, including TLS.
    pub handshake: Duration,
    /// Time without a call after which a connection is closed (GOAWAY).
    pub idle: Duration,
    /// Time after which a connection accepts no further calls (GOAWAY), as grpc-go's
    /// `MaxConnectionAge`. The client must then repeat what it proved in the handshake.
    pub max_age: Option<Duration>,
    /// How long the running calls of a connection may continue after that GOAWAY (grpc-go's
    /// `MaxConnectionAgeGrace`).
    pub max_age_grace: Duration,
    /// Time without a byte from the peer after which a PING is sent (grpc-go's keepalive `Time`).
    pub keepalive: Duration,
    /// Time without an answer to that PING after which the connection is closed (grpc-go's
    /// keepalive `Timeout`).
    pub keepalive_timeout: Duration,
    /// Maximum time from a call's headers to the end of its request, for methods that take one
    /// message. Also the maximum time without progress while a peer does not read what we send.
    pub stall: Duration,
    /// Maximum number of calls at once on one connection (SETTINGS_MAX_CONCURRENT_STREAMS).
    pub streams: u32,
    /// Maximum number of handlers that run at once in the whole server; a further call ends with
    /// RESOURCE_EXHAUSTED. One peer (an IPv4 address, or an IPv6 network of 64 bits) leaves the
    /// last quarter to others.
    pub handlers: usize,
    /// Maximum size in bytes of a request's headers (SETTINGS_MAX_HEADER_LIST_SIZE, RFC 9113
    /// §6.5.2).
    pub header_bytes: u32,
    /// Maximum size in bytes of a request message; a call with a larger one ends with
    /// RESOURCE_EXHAUSTED.
    pub message_bytes: usize,
    /// Maximum number of bytes in the whole server for requests until their handlers return,
    /// responses that a peer does not read, and buffers beyond what each connection has. One peer
    /// leaves the last quarter to others. Beyond the limit a call ends with RESOURCE_EXHAUSTED, and
    /// less is received from a peer that does not read.
    pub buffered_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            connections_per_peer: 256,
            half_open: 512,
            handshakes: 256,
            // A peer that attests itself waits for its TPM during the handshake.
            handshake_patience: Duration::from_secs(3),
            // grpc-go has 120 s; an attested handshake takes less than one second.
            handshake: Duration::from_secs(20),
            idle: Duration::from_secs(600),
            max_age: None,
            max_age_grace: Duration::from_secs(20),
            keepalive: Duration::from_secs(15),
            keepalive_timeout: Duration::from_secs(20),
            stall: Duration::from_secs(60),
            streams: 100,
            handlers: 128,
            header_bytes: 16 << 10,
            // The usual default of gRPC.
            message_bytes: 4 << 20,
            buffered_bytes: 8 << 20,
        }
    }
}

/// A server that listens; dropping it stops it without grace.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// The state that the threads of a server share.
pub(super) struct Shared {
    name: &'static str,
    router: Router,
    limits: Limits,
    accept: Arc<dyn Accept>,
    pool: Arc<Pool>,
    /// Connections whose handshake is complete, by number.
    connections: Mutex<HashMap<u64, (Network, Arc<Link>)>>,
    /// The other connections. This lock is taken after that of `connections`.
    half_open: Mutex<HalfOpen>,
    /// Notified when a connection ends.
    changed: Condvar,
    stopping: AtomicBool,
    watcher_sleeps: AtomicBool,
    poller: Poller,
    /// Connections that are not parked, by number.
    active: Mutex<HashMap<u64, Arc<Link>>>,
    handlers: Arc<SharedLimit>,
    memory: Arc<SharedLimit>,
    /// The shares of all peers that have connections.
    shares: Mutex<HashMap<Network, Weak<PeerShare>>>,
    shed: Mutex<Shed>,
    shed_total: AtomicU64,
}

/// The number of refusals since the last log line about them.
#[derive(Default)]
struct Shed {
    count: u64,
    logged_at: Option<Instant>,
}

/// A snapshot of what a server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Number of connections, including those in their handshake.
    pub connections: usize,
    /// Number of running handlers.
    pub calls_in_flight: usize,
    /// Number of connections and calls that a limit has refused since the start.
    pub shed: u64,
}

impl Server {
    /// Starts a server for `router` and `grpc.health.v1` on `listener`. It runs until
    /// [`Server::stop`]. `name` is in its thread names and log lines.
    pub fn start(
        name: &'static str,
        listener: TcpListener,
        accept: Arc<dyn Accept>,
        router: Router,
        limits: Limits,
    ) -> io::Result<Server> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        limit_send_buffer(&listener, SOCKET_BYTES)?;
        let shared = Arc::new(Shared {
            name,
            router: health::add(router),
            accept,
            pool: Arc::new(Pool::new(name, limits.connections + limits.handlers)),
            handlers: SharedLimit::new(limits.handlers),
            memory: SharedLimit::new(limits.buffered_bytes),
            shares: Mutex::default(),
            half_open: Mutex::new(HalfOpen::new(
                limits.half_open.min(limits.connections / 2),
                limits.handshakes,
                limits.handshake_patience,
            )),
            limits,
            connections: Mutex::default(),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            watcher_sleeps: AtomicBool::new(false),
            poller: Poller::new()?,
            active: Mutex::default(),
            shed: Mutex::default(),
            shed_total: AtomicU64::new(0),
        });
        shared.listen(&listener);
        let watching = shared.clone();
        let watcher = thread::Builder::new()
            .name(format!("{name}-watch"))
            .spawn(move || watching.watch(listener))?;
        Ok(Server {
            address,
            shared,
            watcher: Mutex::new(Some(watcher)),
        })
    }

    /// Returns the address of the listening socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns a function that takes a snapshot of the server, or returns `None` once the server is
    /// dropped. The function does not keep the server alive.
    pub fn statistics(&self) -> impl Fn() -> Option<Statistics> + Clone + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move || {
            shared.upgrade().map(|shared| Statistics {
                connections: lock(&shared.connections).len() + lock(&shared.half_open).len(),
                calls_in_flight: shared.handlers.used(),
                shed: shared.shed_total.load(Ordering::Relaxed),
            })
        }
    }

    /// Returns the number of connections that hold a thread or may get one.
    #[cfg(test)]
    pub(super) fn attended(&self) -> usize {
        lock(&self.shared.active).len()
    }

    /// Ends all connections, including those in their handshake, because peers must now prove
    /// something else in the handshake. The connections accept no further calls (GOAWAY). They
    /// close when their calls have ended, at the latest after [`Limits::max_age_grace`]. The server
    /// continues, and clients connect again.
    pub fn close_connections(&self, why: &str) {
        lock(&self.shared.half_open).mark_outdated();
        for link in self.shared.links() {
            self.shared.retire(&link, why);
            self.shared.attend_later(&link, 1);
        }
    }

    /// Stops the server: it accepts no further connections and calls (GOAWAY), gives running calls
    /// the time `grace` to end, closes the remaining connections and joins all threads. So it waits
    /// for handlers that ignore [`Call::is_cancelled`]. Further calls of `stop` do nothing. A
    /// handler must not call it.
    pub fn stop(&self, grace: Duration) {
        let Some(watcher) = lock(&self.watcher).take() else {
            return;
        };
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::SeqCst);
        lock(&shared.half_open).clear();
        shared.poller.wake();
        for link in shared.links() {
            let mut core = link.lock();
            core.h2.shutdown("the server is stopping");
            drop(link.flush(core));
        }
        let deadline = Instant::now() + grace;
        let mut connections = lock(&shared.connections);
        while !connections.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            connections = shared
                .changed
                .wait_timeout(connections, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        for (_, link) in connections.values() {
            link.end(&mut link.lock(), stopped());
        }
        drop(connections);
        shared.poller.wake();
        // The watcher runs no foreign code, so it cannot panic there.
        let _ = watcher.join();
        shared.pool.stop();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

pub(super) fn short_of_memory() -> Status {
    Status::new(
        Code::ResourceExhausted,
        "the server has no memory left for this request",
    )
}

fn stopped() -> Status {
    Status::new(Code::Unavailable, "the server is stopping")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---- connections ----

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn links(&self) -> Vec<Arc<Link>> {
        lock(&self.connections)
            .values()
            .map(|(_, link)| link.clone())
            .collect()
    }

    /// Accepts waiting connections, a limited number at a time so that the open ones are served in
    /// between.
    fn accept_some(&self, listener: &TcpListener, last_id: &mut u64) {
        for _ in 0..ACCEPTS {
            match listener.accept() {
                Ok((socket, address)) => {
                    *last_id += 1;
                    self.admit(*last_id, socket, address.ip());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // No file descriptor is free at the moment.
                    log::warn!("{}: cannot accept a connection: {error}", self.name);
                    return thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Adds a new connection. If a limit is reached, a half-open connection makes room or the new
    /// one is closed.
    fn admit(&self, id: u64, socket: TcpStream, ip: IpAddr) {
        let (network, now) = (Network::from(ip), Instant::now());
        let connections = lock(&self.connections);
        let mut half_open = lock(&self.half_open);
        if self.is_stopping() {
            return;
        }
        let own = connections
            .values()
            .filter(|(other, _)| *other == network)
            .count()
            + half_open.len_of(network);
        let all = connections.len() + half_open.len();
        drop(connections);
        // If this fails, the connection ends at its deadline.
        let _ = self.poller.watch_once(&socket, id);
        half_open.enter(id, network, socket, now + self.limits.handshake);
        let (why, of) = if own >= self.limits.connections_per_peer {
            (
                "the limit of connections from one address is reached",
                Some(network),
            )
        } else if all >= self.limits.connections {
            ("the limit of connections is reached", None)
        } else if half_open.is_overfull() {
            ("the limit of half-open connections is reached", None)
        } else {
            return;
        };
        half_open.displace(of, now);
        drop(half_open);
        self.shed(why, ip);
    }

    /// Starts handshakes as long as threads are free for them.
    fn begin_handshakes(self: &Arc<Self>) {
        loop {
            let Some(next) = lock(&self.half_open).next(Instant::now()) else {
                return;
            };
            let shared = self.clone();
            self.submit(move || shared.connect(next));
        }
    }

    /// Counts a refusal and logs it, with at most one line per second.
    fn shed(&self, why: &str, ip: IpAddr) {
        self.shed_total.fetch_add(1, Ordering::Relaxed);
        let mut shed = lock(&self.shed);
        shed.count += 1;
        if shed
            .logged_at
            .is_none_or(|logged_at| logged_at.elapsed() >= Duration::from_secs(1))
        {
            log::warn!(
                "{}: {why}; {} refused since the last such line, the latest from {ip}",
                self.name,
                shed.count
            );
            *shed = Shed {
                count: 0,
                logged_at: Some(Instant::now()),
            };
        }
    }

    /// Runs a connection's first thread: the handshake, then its calls.
    fn connect(self: Arc<Self>, next: NextHandshake) {
        let NextHandshake {
            id,
            network,
            socket,
            deadline,
            turn,
        } = next;
        let peer = socket.peer_addr();
        let opened = panic::catch_unwind(AssertUnwindSafe(|| {
            self.accept.accept(socket, deadline, &turn)
        }))
        .unwrap_or_else(|_| Err(io::Error::other("the handshake panicked")))
        .and_then(|transport| {
            let h2 = Connection::server(h2_limits(self.limits.streams, self.limits.header_bytes));
            let share = self.share_of(network);
            let link = Link::new(
                transport,
                h2,
                Side::Server(self.clone()),
                self.limits.stall,
                share,
            )?;
            let mut core = link.lock();
            core.upkeep.id = id;
            core.upkeep.established_by = deadline;
            drop(core);
            Ok(link)
        });
        let mut connections = lock(&self.connections);
        let is_outdated = lock(&self.half_open).leave(id);
        if let (Ok(link), Some(_)) = (&opened, is_outdated) {
            connections.insert(id, (network, link.clone()));
            self.activate(id, link.clone());
        }
        drop(connections);
        self.begin_handshakes();
        match (opened, is_outdated) {
            (Ok(link), Some(is_outdated)) => {
                if is_outdated {
                    self.retire(&link, "the requirements of the handshake have changed");
                }
                if !self.is_stopping() {
                    self.attend(&link);
                }
                // `stop()` may have missed this new connection.
                if self.is_stopping() {
                    let mut core = link.lock();
                    core.h2.shutdown("the server is stopping");
                    drop(link.flush(core));
                    self.attend(&link);
                }
            }
            // The connection was closed to make room for another, or by `stop()`.
            (Ok(_), None) => {}
            (Err(error), _) => {
                let peer = peer.map_or("an unknown address".into(), |peer| peer.to_string());
                log::info!("{}: the connection with {peer} failed: {error}", self.name);
            }
        }
    }

    /// Returns the share of a peer, which all its connections use together.
    fn share_of(&self, peer: Network) -> Arc<PeerShare> {
        let mut shares = lock(&self.shares);
        shares.retain(|_, share| share.strong_count() > 0);
        let share = shares.entry(peer).or_default();
        share.upgrade().unwrap_or_else(|| {
            let new = PeerShare {
                handlers: Share::of(&self.handlers),
                memory: Share::of(&self.memory),
            };
            let new = Arc::new(new);
            *share = Arc::downgrade(&new);
            new
        })
    }

    /// Stops further calls on a connection; its running calls must end within the grace. The next
    /// thread that serves the connection sends the GOAWAY, so that a peer that does not read cannot
    /// block the caller.
    fn retire(&self, link: &Link, why: &str) {
        let mut core = link.lock();
        core.h2.goaway(ErrorCode::NO_ERROR, why);
        core.upkeep
            .closes_by
            .get_or_insert(Instant::now() + self.limits.max_age_grace);
    }

    fn forget(&self, id: u64) {
        lock(&self.connections).remove(&id);
        lock(&self.active).remove(&id);
        self.changed.notify_all();
        if self.is_stopping() {
            // The watcher ends after the last connection.
            self.poller.wake();
        }
    }

    /// Serves a connection: runs the handlers of complete requests, otherwise reads. Returns when
    /// the connection has ended, another thread serves it, or nothing arrives.
    fn attend(self: &Arc<Self>, link: &Arc<Link>) {
        let mut patience = PATIENCE_FIRST;
        let mut core = link.lock();
        loop {
            core = link.flush(core);
            if core.ended.is_none() && core.calls.is_empty() && core.h2.is_drained() {
                core = link.end_after_flush(core, stopped());
            }
            if core.ended.is_some() {
                core.ready.clear();
                core.calls.retain(|_, call| call.has_handler());
                return self.close(link, core);
            }
            if let Some(stream) = core.ready.pop_front() {
                let request = core
                    .calls
                    .get_mut(&stream)
                    .and_then(|call| call.request.take());
                drop(core);
                if let Some(request) = request {
                    self.wake_watcher();
                    self.run(link, stream, request);
                    patience = PATIENCE;
                }
                core = link.lock();
                continue;
            }
            // The thread that writes serves the connection afterwards, or the watcher does.
            if core.is_parked || !core.is_free() || core.is_output_full() {
                return;
            }
            let before = core.last_read;
            core = link.read_turn(core, Some(patience));
            if core.last_read == before && core.ready.is_empty() && core.ended.is_none() {
                return self.park(link, core);
            }
        }
    }

    /// Removes a connection that is over and completely written. It waits for the peer to close its
    /// side, for a limited time and in the poller, without a thread.
    fn close(&self, link: &Link, mut core: Guard<'_>) {
        if core.is_writing {
            // That thread comes back here, or leaves it to the watcher.
        } else if link.discard_unread(&core)
            && self
                .poller
                .watch_once(&*link.socket, core.upkeep.id)
                .is_ok()
        {
            core.is_parked = true;
            lock(&self.active).remove(&core.upkeep.id);
        } else {
            let _ = link.socket.shutdown(Shutdown::Both);
            let id = core.upkeep.id;
            drop(core);
            self.forget(id);
        }
    }

    /// Leaves an idle connection to the poller. If that fails, the watcher makes threads read it as
    /// before.
    fn park(&self, link: &Link, mut core: Guard<'_>) {
        if core.calls.is_empty() {
            core.trim();
        }
        if self
            .poller
            .watch_once(&*link.socket, core.upkeep.id)
            .is_ok()
        {
            core.is_parked = true;
            lock(&self.active).remove(&core.upkeep.id);
        }
        core.hand_over();
    }

    /// Puts a connection under the care of the watcher.
    pub(super) fn activate(&self, id: u64, link: Arc<Link>) {
        lock(&self.active).insert(id, link);
    }

    /// Lets other threads run `calls` ready calls of a connection.
    pub(super) fn attend_later(self: &Arc<Self>, link: &Arc<Link>, calls: usize) {
        for _ in 0..calls {
            let (shared, link) = (self.clone(), link.clone());
            link.pending_jobs.fetch_add(1, Ordering::SeqCst);
            self.submit(move || {
                link.pending_jobs.fetch_sub(1, Ordering::SeqCst);
                shared.attend(&link)
            });
        }
    }

    /// Runs the watcher. It accepts connections, gives a thread to connections that are readable or
    /// have no reader, and checks the timers.
    fn watch(self: Arc<Self>, listener: TcpListener) {
        let (mut listener, mut last_id) = (Some(listener), LISTENER);
        let mut ready = Vec::new();
        let (mut tick, mut upkeep) = (Instant::now(), Instant::now() + UPKEEP);
        while !self.is_stopping() || !lock(&self.connections).is_empty() {
            if let Err(error) = self
                .poller
                .wait(&mut ready, tick.saturating_duration_since(Instant::now()))
            {
                log::error!("{}: cannot wait for events: {error}", self.name);
                thread::sleep(TICK);
            }
            listener = listener.filter(|_| !self.is_stopping());
            for id in &ready {
                match &listener {
                    Some(listener) if *id == LISTENER => {
                        self.accept_some(listener, &mut last_id);
                        self.listen(listener);
                    }
                    _ => self.resume(*id),
                }
            }
            let now = Instant::now();
            if !self.watcher_sleeps.load(Ordering::SeqCst) {
                tick = tick.min(now + TICK);
            }
            if lock(&self.half_open).is_busy() {
                // Some handshakes may have waited too long for their peers by now.
                self.begin_handshakes();
            }
            if now >= upkeep {
                upkeep = now + UPKEEP;
                lock(&self.half_open).end_late(now);
                let is_due =
                    |link: &Arc<Link>| link.lock().upkeep(self.name, &self.limits, link.peer, now);
                self.links()
                    .iter()
                    .filter(|link| is_due(link))
                    .for_each(|link| self.attend_later(link, 1));
            }
            if now >= tick {
                self.watcher_sleeps.store(true, Ordering::SeqCst);
                tick = now
                    + if self.all_have_threads() {
                        UPKEEP
                    } else {
                        TICK
                    };
            }
        }
    }

    /// Starts threads for jobs and connections that lack one. Returns whether all of them have a
    /// thread.
    fn all_have_threads(self: &Arc<Self>) -> bool {
        let active: Vec<_> = lock(&self.active).values().cloned().collect();
        let mut unread = Vec::new();
        for link in active.iter().filter(|link| link.is_neglected()) {
            let mut core = link.lock();
            if core.is_writing && (core.ended.is_some() || core.is_output_full()) {
                // The connection waits until the output is written or the write fails.
                unread.push((core.last_read, link));
                continue;
            }
            let ready = core.ready.len();
            drop(core);
            // In a burst, the jobs of an earlier tick may still wait; without this, each tick would
            // add the same number again.
            self.attend_later(
                link,
                ready
                    .max(1)
                    .saturating_sub(link.pending_jobs.load(Ordering::SeqCst)),
            );
        }
        unread.sort_by_key(|(last_read, _)| *last_read);
        for (_, link) in &unread[..unread
            .len()
            .saturating_sub(self.limits.connections / UNREAD_PART)]
        {
            let why = "too many peers do not read what is sent to them";
            self.shed(why, link.peer.map_or([0; 4].into(), |peer| peer.ip()));
            link.end(&mut link.lock(), Status::new(Code::Unavailable, why));
        }
        !self.pool.grow()
            && active.iter().all(|link| link.is_attended())
            && !lock(&self.half_open).is_busy()
    }

    fn listen(&self, listener: &TcpListener) {
        if let Err(error) = self.poller.watch_once(listener, LISTENER) {
            log::error!("{}: cannot accept further connections: {error}", self.name);
        }
    }

    /// Handles a readable connection that was parked or had not sent a byte.
    fn resume(self: &Arc<Self>, id: u64) {
        let link = lock(&self.connections)
            .get(&id)
            .map(|(_, link)| link.clone());
        let Some(link) = link else {
            lock(&self.half_open).first_byte_arrived(id);
            return self.begin_handshakes();
        };
        link.unpark(&mut link.lock());
        self.attend_later(&link, 1);
    }

    fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if self.pool.submit(job) {
            self.wake_watcher();
        }
    }

    /// Wakes the watcher before a handler runs, because its connection has no reader then.
    fn wake_watcher(&self) {
        if self.watcher_sleeps.swap(false, Ordering::SeqCst) {
            self.poller.wake();
        }
    }

    // ---- calls ----

    /// Runs a handler and sends its result.
    fn run(self: &Arc<Self>, link: &Arc<Link>, stream: u32, request: Request) {
        let Request {
            method,
            metadata,
            deadline,
        } = request;
        let call = Call {
            link: link.clone(),
            stream,
            metadata,
            deadline,
            answer: Mutex::default(),
        };
        let result = if link.share.handlers.take(1) {
            let result = panic::catch_unwind(AssertUnwindSafe(|| (method.run)(&call)))
                .unwrap_or_else(|_| {
                    log::error!("{}: a handler panicked", self.name);
                    Err(Status::new(Code::Internal, "the handler failed"))
                });
            link.share.handlers.give_back(1);
            result
        } else {
            self.shed(
                "the limit of running calls is reached",
                link.peer.map_or([0; 4].into(), |peer| peer.ip()),
            );
            Err(Status::new(Code::ResourceExhausted, "the server is busy")
                .with_retry_after(BUSY_PAUSE))
        };
        let is_late = deadline.is_some_and(|deadline| deadline <= Instant::now());
        let result = if is_late {
            Err(Status::new(Code::DeadlineExceeded, "the deadline passed"))
        } else {
            result
        };
        let custom = call
            .answer
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let mut core = link.lock();
        match result {
            _ if core.is_cancelled(stream) => core.forget(stream),
            Ok(message) => core.respond(stream, message, custom),
            Err(status) => {
                core.answer(stream, &Err(status), &custom);
                core.forget(stream);
            }
        }
    }
}

/// The request as its handler needs it.
pub(super) struct Request {
    method: Arc<Method>,
    metadata: Metadata,
    deadline: Option<Instant>,
}

/// The timers of a connection.
pub(super) struct Upkeep {
    /// The connection's number in the server.
    pub(super) id: u64,
    established_by: Instant,
    pub(super) last_call: Instant,
    within_headers_since: Option<Instant>,
    pub(super) opened: Instant,
    /// When the connection is closed after a GOAWAY.
    closes_by: Option<Instant>,
}

impl Upkeep {
    pub(super) fn new(now: Instant) -> Upkeep {
        Upkeep {
            id: 0,
            established_by: now,
            last_call: now,
            within_headers_since: None,
            opened: now,
            closes_by: None,
        }
    }
}

impl Core {
    /// Server: checks the timers. Returns whether the connection has output, or is over.
    fn upkeep(
        &mut self,
        name: &str,
        limits: &Limits,
        peer: Option<SocketAddr>,
        now: Instant,
    ) -> bool {
        if self.ended.is_none()
            && let Err((code, why)) = self.upkeep_or_end(limits, now)
        {
            let peer = peer.map_or("an unknown address".into(), |peer| peer.to_string());
            log::info!("{name}: the connection with {peer} is closed: {why}");
            self.h2.goaway(code, why);
            self.end(Status::new(Code::Unavailable, why));
        }
        self.ended.is_some() || !self.h2.output().is_empty()
    }

    fn upkeep_or_end(
        &mut self,
        limits: &Limits,
        now: Instant,
    ) -> Result<(), (ErrorCode, &'static str)> {
        let is_over =
            |since: Instant, limit: Duration| now.saturating_duration_since(since) >= limit;
        if !self.h2.is_established() {
            let is_late = now >= self.upkeep.established_by;
            return if is_late {
                Err((ErrorCode::SETTINGS_TIMEOUT, "HTTP/2 did not start in time"))
            } else {
                Ok(())
            };
        }
        if !self.h2.is_within_headers() {
            self.upkeep.within_headers_since = None;
        } else if is_over(
            *self.upkeep.within_headers_since.get_or_insert(now),
            limits.stall,
        ) {
            return Err((
                ErrorCode::ENHANCE_YOUR_CALM,
                "a header block was not complete in time",
            ));
        }
        let awaits_more = |call: &CallState| !call.has_handler() && call.outbound.is_none();
        let is_late = |call: &CallState| {
            call.end.is_none() && awaits_more(call) && is_over(call.started, limits.stall)
        };
        let late: Vec<u32> = self
            .calls
            .iter()
            .filter(|(_, call)| is_late(call))
            .map(|(&stream, _)| stream)
            .collect();
        for stream in late {
            match self.calls.get(&stream).and_then(|call| call.http_response) {
                Some(answer) => self.send_http_response(stream, answer),
                None => self.refuse(
                    stream,
                    &Status::new(
                        Code::DeadlineExceeded,
                        "the request was not complete in time",
                    ),
                ),
            }
        }
        let is_stuck = |call: &CallState| {
            call.outbound.as_ref().is_some_and(|outbound| {
                outbound
                    .moved
                    .is_some_and(|moved| is_over(moved, limits.stall))
            })
        };
        let stuck: Vec<u32> = self
            .calls
            .iter()
            .filter(|(_, call)| is_stuck(call))
            .map(|(&stream, _)| stream)
            .collect();
        for stream in stuck {
            self.h2.reset(stream, ErrorCode::CANCEL);
            self.forget(stream);
        }
        if self.calls.is_empty() && is_over(self.upkeep.last_call, limits.idle) {
            return Err((ErrorCode::NO_ERROR, "it was idle"));
        }
        match self.upkeep.closes_by {
            Some(by) if now >= by => {
                return Err((ErrorCode::NO_ERROR, "its calls did not end in time"));
            }
            None if limits
                .max_age
                .is_some_and(|age| is_over(self.upkeep.opened, age)) =>
            {
                self.h2.shutdown("max_age");
                self.upkeep.closes_by = Some(now + limits.max_age_grace);
            }
            _ => {}
        }
        if self.keepalive(limits.keepalive, limits.keepalive_timeout, now) {
            return Err((ErrorCode::NO_ERROR, "a PING was not answered in time"));
        }
        Ok(())
    }

    /// Handles the headers of a request.
    pub(super) fn request(&mut self, shared: &Arc<Shared>, stream: u32, end: bool, now: Instant) {
        self.upkeep.last_call = now;
        let headers = self.h2.headers();
        let kind = headers.get(b"content-type").unwrap_or_default();
        if headers.get(b":method") != Some(b"POST") || !is_grpc_type(kind) {
            return self.answer_with_http(stream, end, now);
        }
        let mut call = CallState::new(shared.limits.message_bytes, now, None);
        call.has_encoding = headers
            .get(b"grpc-encoding")
            .is_some_and(|encoding| encoding != b"identity");
        let malformed = || Status::new(Code::Internal, "grpc-timeout is malformed");
        let timeout = headers
            .get(b"grpc-timeout")
            .map(|value| parse_timeout(value).ok_or_else(malformed))
            .transpose();
        let method = shared
            .router
            .find(headers.get(b":path").unwrap_or_default());
        let metadata = Metadata::of(headers);
        let mut held = Held::new(self.buffers.share.clone());
        let is_short = !held.grow(CALL_BYTES + metadata.size());
        let (method, timeout) = match (method, timeout) {
            (Ok(method), Ok(timeout)) if !is_short => (method, timeout),
            (Err(status), _) | (_, Err(status)) => {
                self.calls.insert(stream, call);
                return self.refuse(stream, &status);
            }
            _ => {
                self.calls.insert(stream, call);
                return self.refuse(stream, &short_of_memory());
            }
        };
        let takes_one = method.takes_one;
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        call.request = Some(Request {
            method,
            metadata,
            deadline,
        });
        call.held = Some(held);
        self.calls.insert(stream, call);
        if !takes_one {
            self.ready.push_back(stream);
        }
        if end {
            self.end_inbound(stream);
        }
    }

    /// Handles a request that is not gRPC. Once it is complete, it gets an HTTP status and a field
    /// that says what gRPC expects (gRPC over HTTP2: "servers SHOULD respond with HTTP status of
    /// 415" to another content-type).
    fn answer_with_http(&mut self, stream: u32, end: bool, now: Instant) {
        let text: &[u8] = b"This is a gRPC server.\n";
        let answer = match self.h2.headers().get(b":method") {
            Some(b"POST") => HttpResponse {
                status: b"415",
                hint: (b"accept", b"application/grpc"),
                text,
            },
            Some(b"HEAD") => HttpResponse {
                status: b"405",
                hint: (b"allow", b"POST"),
                text: b"",
            },
            _ => HttpResponse {
                status: b"405",
                hint: (b"allow", b"POST"),
                text,
            },
        };
        let mut held = Held::new(self.buffers.share.clone());
        if !held.grow(CALL_BYTES) {
            return self.h2.reset(stream, ErrorCode::REFUSED_STREAM);
        }
        let mut call = CallState::new(0, now, None);
        call.http_response = Some(answer);
        call.held = Some(held);
        self.calls.insert(stream, call);
        if end {
            self.end_inbound(stream);
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
        if self
            .h2
            .send_headers(stream, fields.into_iter(), text.is_empty())
            .is_err()
        {
            self.h2.reset(stream, ErrorCode::INTERNAL_ERROR);
            return self.forget(stream);
        }
        if text.is_empty() {
            self.forget(stream)
        } else {
            self.respond_after_headers(stream, Bytes(text.to_vec()), Default::default())
        }
    }

    /// Handles the end of a request: a method that takes one message can start.
    pub(super) fn request_is_complete(&mut self, stream: u32) {
        if let Some(answer) = self.calls.get(&stream).and_then(|call| call.http_response) {
            return self.send_http_response(stream, answer);
        }
        let takes_one = |call: &CallState| {
            call.request
                .as_ref()
                .is_some_and(|request| request.method.takes_one)
        };
        if self.calls.get(&stream).is_some_and(|call| takes_one(call)) {
            self.ready.push_back(stream);
        }
    }

    /// Drops a failed call whose handler has not started; it needs neither a handler nor a
    /// response.
    pub(super) fn drop_if_unstarted(&mut self, stream: u32) {
        let is_over = |call: &CallState| !call.has_handler() && matches!(call.end, Some(Err(_)));
        if self.calls.get(&stream).is_some_and(|call| is_over(call)) {
            self.calls.remove(&stream);
        }
    }

    /// Ends a call with `status` instead of its handler's result. A running handler sees the call
    /// as cancelled.
    pub(super) fn refuse(&mut self, stream: u32, status: &Status) {
        self.answer(stream, &Err(status.clone()), &Default::default());
        self.upkeep.last_call = Instant::now();
        match self.calls.get(&stream) {
            Some(call) if call.request.is_none() && call.held.is_some() => {
                self.finish(stream, Err(status.clone()))
            }
            _ => drop(self.calls.remove(&stream)),
        }
    }

    /// Sends the response's headers unless they were sent before.
    pub(super) fn answer_headers(&mut self, stream: u32, custom: &Metadata) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        if !std::mem::replace(&mut call.has_answered, true) {
            let fields = RESPONSE.into_iter().chain(custom.fields());
            // If the stream is closed, the thread that sends the message notices it.
            if self.h2.send_headers(stream, fields, false) == Err(SendError::TooLarge) {
                call.has_answered = false;
                let status = Status::new(
                    Code::ResourceExhausted,
                    "the metadata exceeds the client's limit",
                );
                self.refuse(stream, &status);
            }
        }
    }

    /// Sends the trailers; if the headers were not sent before, both in one block
    /// ("Trailers-Only").
    pub(super) fn answer(
        &mut self,
        stream: u32,
        result: &Result<(), Status>,
        custom: &(Metadata, Metadata),
    ) {
        let mut has_answered = self
            .calls
            .get(&stream)
            .is_some_and(|call| call.has_answered);
        if result.is_ok() && !has_answered {
            self.answer_headers(stream, &custom.0);
            has_answered = true;
        }
        let status = result.as_ref().err();
        let code = status.map_or(Code::Ok, Status::code);
        let end = |text: &str| {
            (0..=text.len().min(MESSAGE_MOST))
                .rev()
                .find(|&at| text.is_char_boundary(at))
                .unwrap_or(0)
        };
        let cut = |text: &str| percent_encode(&text[..end(text)]);
        let message = status
            .map(|status| cut(status.message()))
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
}

/// The first fields of each gRPC response.
const RESPONSE: [Field; 2] = [
    (b":status", b"200", Indexing::Yes),
    (b"content-type", b"application/grpc", Indexing::Yes),
];
