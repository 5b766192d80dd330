//! The server: threads under limits.
//!
//! ```text
//!   watcher ── a socket that speaks ──────────► pool: handshake, then attend ◄── watcher: a parked connection can be read; or
//!                                                     │                         nobody reads one for a tick, since its
//!                                                     ▼                         thread is busy with a handler
//!        attend: read ─► a request is complete ─► run its handler right here ─► write ─► read …
//!                  └─► nothing comes ─► park: the poller has the socket, the thread goes back to the pool
//! ```
//!
//! So the common call is served by one thread without a hand-over, a slow handler costs the other calls of its connection at
//! most two ticks, and an idle connection costs no thread.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::health;
use super::link::{CallState, Core, Guard, Link, Side, TICK, TurnedAway, h2_limits};
use super::message::parse_timeout;
use super::metadata::{Metadata, encode_bin, is_grpc_type};
use super::router::{Call, Method, Router};
use super::status::{Code, Status, percent_encode};
use super::transport::Accept;
use crate::h2::{Connection, ErrorCode, Field, Indexing, SendError};
use crate::half_open::{Begin, HalfOpen};
use crate::share::{Held, PeerShare, Pot, Share};
use base::crypto::buffer::Bytes;
use base::network::Network;
use base::pool::Pool;
use sys::net::limit_send_buffer;
use sys::poll::Poller;

/// How often a connection on which something is due is looked at; also how precise its time-outs are.
const UPKEEP: Duration = Duration::from_secs(1);
/// How long a thread waits for the next bytes of a connection before it parks it: after a call (another may follow at once,
/// and then costs no hand-over between threads), and else.
const PATIENCE: Duration = Duration::from_millis(50);
const PATIENCE_FIRST: Duration = Duration::from_millis(1);
/// The listening socket's number for the poller; those of connections are above.
const LISTENER: u64 = 0;
/// What a call takes beside its metadata and its message, as it counts against [`Limits::buffered_bytes`].
const CALL_BYTES: usize = 1 << 10;
/// Bytes of a status' message that are sent.
const MESSAGE_MOST: usize = 2 << 10;
/// When a call that was shed should come again.
const BUSY_PAUSE: Duration = Duration::from_secs(2);
/// Connections accepted before the others are looked at again.
const ACCEPTS: usize = 64;
/// The part of all connections whose peers may let us wait while so much is to be written that we read no further. Each holds a
/// thread, and buffers that nobody counts; of more, those end whose peers have been silent for the longest.
const UNREAD_PART: usize = 4;
/// What the kernel holds for a peer that does not read; without a limit it is 4 MiB (tcp(7), tcp_wmem).
const SOCKET_BYTES: u32 = 64 << 10;
/// How long to wait before the next accept when the system had no descriptor for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a server spends on its peers at most. Over a limit it sheds, and says so in the log.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at once; a further one takes the place of a half-open one, or is closed at once.
    pub connections: usize,
    /// Connections at once from one peer (an IPv4 address, an IPv6 network of 64 bits); a further one takes the place of a
    /// half-open one of this peer, or is closed at once.
    pub connections_per_peer: usize,
    /// Of the connections, those whose handshake is not over; a further one takes the place of the oldest one of the peer that
    /// has the most. At most half of the connections, so that the others keep theirs.
    pub half_open: usize,
    /// Of those, the ones in their handshake, each with a thread, half of them of one peer; the others wait, peers in turn.
    pub handshakes: usize,
    /// A handshake whose peer lets us wait for so long loses its thread when few are free.
    pub handshake_patience: Duration,
    /// From accept to the end of the peer's HTTP/2 preface, TLS included.
    pub handshake: Duration,
    /// A connection without a call is closed (GOAWAY) after this long.
    pub idle: Duration,
    /// A connection takes no further calls (GOAWAY) after this long, whatever runs on it (grpc-go's `MaxConnectionAge`): what
    /// its handshake proved must be proved again.
    pub max_age: Option<Duration>,
    /// How long the calls that run on a connection may go on after that GOAWAY (grpc-go's `MaxConnectionAgeGrace`).
    pub max_age_grace: Duration,
    /// Without a byte from the peer for this long, a PING is sent (grpc-go's keepalive `Time`).
    pub keepalive: Duration,
    /// The connection is closed when such a PING is not answered within this time (grpc-go's keepalive `Timeout`).
    pub keepalive_timeout: Duration,
    /// From a call's headers to the end of its request, for methods that take one message; also the longest time without
    /// progress while a peer does not take what we send.
    pub stall: Duration,
    /// Calls at once on one connection (SETTINGS_MAX_CONCURRENT_STREAMS).
    pub streams: u32,
    /// Handlers at once in the whole server; a further call ends with RESOURCE_EXHAUSTED. One peer (an IPv4 address, an IPv6
    /// network of 64 bits) leaves the last quarter to others.
    pub handlers: usize,
    /// Bytes of one request's headers (SETTINGS_MAX_HEADER_LIST_SIZE, RFC 9113 §6.5.2).
    pub header_bytes: u32,
    /// Bytes of one request message; a larger one ends with RESOURCE_EXHAUSTED.
    pub message_bytes: usize,
    /// Bytes in the whole server of requests until their handlers are done, of answers that a peer does not take, and of
    /// buffers beyond what each connection has; one peer leaves the last quarter to others. Over it a call ends with
    /// RESOURCE_EXHAUSTED, and less is taken in while a peer does not read.
    pub buffered_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            connections_per_peer: 256,
            half_open: 512,
            handshakes: 256,
            // a peer that attests itself has to ask its TPM meanwhile
            handshake_patience: Duration::from_secs(3),
            // the reference server's (grpc-go) is 120 s; an attested handshake takes under one
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
            // gRPC's usual default
            message_bytes: 4 << 20,
            buffered_bytes: 8 << 20,
        }
    }
}

/// A listening server; dropping it stops it without grace.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// What the server's threads share.
pub(super) struct Shared {
    name: &'static str,
    router: Router,
    limits: Limits,
    accept: Arc<dyn Accept>,
    pool: Arc<Pool>,
    /// Those whose handshake is over, by number.
    connections: Mutex<HashMap<u64, (Network, Arc<Link>)>>,
    /// The others. Locked after `connections`.
    half_open: Mutex<HalfOpen>,
    /// A connection ended.
    changed: Condvar,
    stopping: AtomicBool,
    watcher_sleeps: AtomicBool,
    poller: Poller,
    /// Connections that are not parked, by number.
    active: Mutex<HashMap<u64, Arc<Link>>>,
    handlers: Arc<Pot>,
    memory: Arc<Pot>,
    /// Of the peers that have connections.
    shares: Mutex<HashMap<Network, Weak<PeerShare>>>,
    shed: Mutex<Shed>,
    shed_ever: AtomicU64,
}

/// What was shed since the last line in the log.
#[derive(Default)]
struct Shed {
    count: u64,
    told: Option<Instant>,
}

/// What a server does at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Connections, those in their handshake included.
    pub connections: usize,
    /// Calls whose handlers run.
    pub calls_in_flight: usize,
    /// Connections and calls that a limit turned away, since the start.
    pub shed: u64,
}

impl Server {
    /// Serves `router` and `grpc.health.v1` on `listener` until [`Server::stop`]. `name` names its threads and log lines.
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
            handlers: Pot::new(limits.handlers),
            memory: Pot::new(limits.buffered_bytes),
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
            shed_ever: AtomicU64::new(0),
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

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// What this server does at the moment of a call; nothing when it is gone, which this does not prevent.
    pub fn statistics(&self) -> impl Fn() -> Option<Statistics> + Clone + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move || {
            shared.upgrade().map(|shared| Statistics {
                connections: lock(&shared.connections).len() + lock(&shared.half_open).len(),
                calls_in_flight: shared.handlers.used(),
                shed: shared.shed_ever.load(Ordering::Relaxed),
            })
        }
    }

    /// Connections that hold a thread, or may.
    #[cfg(test)]
    pub(super) fn attended(&self) -> usize {
        lock(&self.shared.active).len()
    }

    /// Ends all connections that there are, those in their handshake included, for a change of what handshakes must prove:
    /// they take no further calls (GOAWAY), and close when their calls have ended, at the latest after
    /// [`Limits::max_age_grace`]. The server goes on, and clients connect again.
    pub fn close_connections(&self, why: &str) {
        lock(&self.shared.half_open).outdate();
        for link in self.shared.links() {
            self.shared.retire(&link, why);
            self.shared.attend_later(&link, 1);
        }
    }

    /// Takes no further connections and calls (GOAWAY), gives running calls `grace` to end, closes what is left and joins
    /// all threads, so it waits for handlers that do not look at [`Call::is_cancelled`]. Further calls of it do nothing.
    /// Not to be called from a handler.
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
            core.h2.shutdown("the server stops");
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
        // it runs no code of others
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
        "the server is short of memory for requests",
    )
}

fn stopped() -> Status {
    Status::new(Code::Unavailable, "the server stops")
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

    /// Accepts connections that wait, some at a time: between, those that there are may speak.
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
                    // no descriptor is free: there may be soon
                    log::warn!("{}: a connection could not be accepted: {error}", self.name);
                    return thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Lets a connection in, in the place of a half-open one if need be; or sheds it.
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
        // where that fails, it ends at its deadline
        let _ = self.poller.watch_once(&socket, id);
        half_open.enter(id, network, socket, now + self.limits.handshake);
        let (why, of) = if own >= self.limits.connections_per_peer {
            (
                "the limit of connections from one address is reached",
                Some(network),
            )
        } else if all >= self.limits.connections {
            ("the limit of connections is reached", None)
        } else if half_open.is_over() {
            ("the limit of half-open connections is reached", None)
        } else {
            return;
        };
        half_open.displace(of, now);
        drop(half_open);
        self.shed(why, ip);
    }

    /// Begins handshakes, as far as there are threads for them.
    fn begin_handshakes(self: &Arc<Self>) {
        loop {
            let Some(begin) = lock(&self.half_open).next(Instant::now()) else {
                return;
            };
            let shared = self.clone();
            self.submit(move || shared.connect(begin));
        }
    }

    /// Logs what was shed, at most one line a second.
    fn shed(&self, why: &str, ip: IpAddr) {
        self.shed_ever.fetch_add(1, Ordering::Relaxed);
        let mut shed = lock(&self.shed);
        shed.count += 1;
        if shed
            .told
            .is_none_or(|told| told.elapsed() >= Duration::from_secs(1))
        {
            log::warn!(
                "{}: {why}; turned away {} since the last such line, now {ip}",
                self.name,
                shed.count
            );
            *shed = Shed {
                count: 0,
                told: Some(Instant::now()),
            };
        }
    }

    /// A connection's first thread: the handshake, then its calls.
    fn connect(self: Arc<Self>, begin: Begin) {
        let Begin {
            id,
            network,
            socket,
            deadline,
            turn,
        } = begin;
        let peer = socket.peer_addr();
        let opened = panic::catch_unwind(AssertUnwindSafe(|| {
            self.accept.accept(socket, deadline, &turn)
        }))
        .unwrap_or_else(|_| Err(io::Error::other("a panic in the handshake")))
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
                    self.retire(&link, "the handshake is outdated");
                }
                if !self.is_stopping() {
                    self.attend(&link);
                }
                // stop() may not have seen it
                if self.is_stopping() {
                    let mut core = link.lock();
                    core.h2.shutdown("the server stops");
                    drop(link.flush(core));
                    self.attend(&link);
                }
            }
            // closed for another, or by stop()
            (Ok(_), None) => {}
            (Err(error), _) => {
                let peer = peer.map_or("an unknown address".into(), |peer| peer.to_string());
                log::info!("{}: no connection with {peer}: {error}", self.name);
            }
        }
    }

    /// What the connections of this peer take together.
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

    /// Has a connection take no further calls; what it has ends within the grace. Who attends to it next sends the GOAWAY: a peer
    /// that does not read must not hold up the caller.
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
            // the watcher ends with the last connection
            self.poller.wake();
        }
    }

    /// Serves a connection until it ends, another thread does so, or nothing comes: runs the handlers of complete requests,
    /// else reads.
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
                    self.rouse_watcher();
                    self.run(link, stream, request);
                    patience = PATIENCE;
                }
                core = link.lock();
                continue;
            }
            // who writes comes back here, or leaves it to the watcher
            if core.is_parked || !core.is_free() || core.is_held() {
                return;
            }
            let before = core.last_read;
            core = link.read_turn(core, Some(patience));
            if core.last_read == before && core.ready.is_empty() && core.ended.is_none() {
                return self.park(link, core);
            }
        }
    }

    /// Lets go of a connection that is over and written to the end, once the peer has closed it too or had time for that; the
    /// poller waits for it meanwhile.
    fn close(&self, link: &Link, mut core: Guard<'_>) {
        if core.is_writing {
            // that thread comes back here, or leaves it to the watcher
        } else if link.lingers(&core)
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

    /// Leaves a connection from which nothing comes to the poller. Where that fails, the watcher has it read as before.
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

    /// The watcher is to look after a connection.
    pub(super) fn activate(&self, id: u64, link: Arc<Link>) {
        lock(&self.active).insert(id, link);
    }

    /// Has `calls` calls of a connection, which are ready, run by other threads.
    pub(super) fn attend_later(self: &Arc<Self>, link: &Arc<Link>, calls: usize) {
        for _ in 0..calls {
            let (shared, link) = (self.clone(), link.clone());
            link.awaited.fetch_add(1, Ordering::SeqCst);
            self.submit(move || {
                link.awaited.fetch_sub(1, Ordering::SeqCst);
                shared.attend(&link)
            });
        }
    }

    /// The watcher's life: accepts connections, gives a thread to those that can be read or that nobody reads, and does what
    /// is due by the clock.
    fn watch(self: Arc<Self>, listener: TcpListener) {
        let (mut listener, mut last_id) = (Some(listener), LISTENER);
        let mut ready = Vec::new();
        let (mut tick, mut upkeep) = (Instant::now(), Instant::now() + UPKEEP);
        while !self.is_stopping() || !lock(&self.connections).is_empty() {
            if let Err(error) = self
                .poller
                .wait(&mut ready, tick.saturating_duration_since(Instant::now()))
            {
                log::error!("{}: the poller failed: {error}", self.name);
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
                // some may have let us wait for too long by now
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

    /// Starts threads for jobs and connections that lack one; returns whether none does.
    fn all_have_threads(self: &Arc<Self>) -> bool {
        let active: Vec<_> = lock(&self.active).values().cloned().collect();
        let mut unread = Vec::new();
        for link in active.iter().filter(|link| link.is_neglected()) {
            let mut core = link.lock();
            if core.is_writing && (core.ended.is_some() || core.is_held()) {
                // there is nothing to do until that is written, or fails
                unread.push((core.last_read, link));
                continue;
            }
            let ready = core.ready.len();
            drop(core);
            // in a burst the jobs of an earlier tick may still wait: each tick would add as many again
            self.attend_later(
                link,
                ready
                    .max(1)
                    .saturating_sub(link.awaited.load(Ordering::SeqCst)),
            );
        }
        unread.sort_by_key(|(last_read, _)| *last_read);
        for (_, link) in &unread[..unread
            .len()
            .saturating_sub(self.limits.connections / UNREAD_PART)]
        {
            let why = "too many peers do not take what is sent to them";
            self.shed(why, link.peer.map_or([0; 4].into(), |peer| peer.ip()));
            link.end(&mut link.lock(), Status::new(Code::Unavailable, why));
        }
        !self.pool.grow()
            && active.iter().all(|link| link.is_attended())
            && !lock(&self.half_open).is_busy()
    }

    fn listen(&self, listener: &TcpListener) {
        if let Err(error) = self.poller.watch_once(listener, LISTENER) {
            log::error!(
                "{}: no further connections are accepted: {error}",
                self.name
            );
        }
    }

    /// A connection that is silent, or parked, can be read.
    fn resume(self: &Arc<Self>, id: u64) {
        let link = lock(&self.connections)
            .get(&id)
            .map(|(_, link)| link.clone());
        let Some(link) = link else {
            lock(&self.half_open).heard(id);
            return self.begin_handshakes();
        };
        link.unpark(&mut link.lock());
        self.attend_later(&link, 1);
    }

    fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if self.pool.submit(job) {
            self.rouse_watcher();
        }
    }

    /// To be called before a handler runs: its connection has nobody who reads it for now.
    fn rouse_watcher(&self) {
        if self.watcher_sleeps.swap(false, Ordering::SeqCst) {
            self.poller.wake();
        }
    }

    // ---- calls ----

    /// Runs a handler and answers with its result.
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

/// What a handler needs to start.
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
    /// It was told to go away, and is closed then at the latest.
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
    /// Server: does what is due by the clock. Returns whether there is something to write, or to end.
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
                Err((ErrorCode::SETTINGS_TIMEOUT, "it did not begin in time"))
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
                "a header block did not end in time",
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
            match self.calls.get(&stream).and_then(|call| call.turned_away) {
                Some(answer) => self.answer_turned_away(stream, answer),
                None => self.refuse(
                    stream,
                    &Status::new(Code::DeadlineExceeded, "the request did not end in time"),
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
                return Err((
                    ErrorCode::NO_ERROR,
                    "its calls did not end within the grace",
                ));
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

    /// A request's headers.
    pub(super) fn request(&mut self, shared: &Arc<Shared>, stream: u32, end: bool, now: Instant) {
        self.upkeep.last_call = now;
        let headers = self.h2.headers();
        let kind = headers.get(b"content-type").unwrap_or_default();
        if headers.get(b":method") != Some(b"POST") || !is_grpc_type(kind) {
            return self.turn_away(stream, end, now);
        }
        let mut call = CallState::new(shared.limits.message_bytes, now, None);
        call.has_encoding = headers
            .get(b"grpc-encoding")
            .is_some_and(|encoding| encoding != b"identity");
        let malformed = || Status::new(Code::Internal, "a malformed grpc-timeout");
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

    /// A request that is not gRPC gets an HTTP status when it is complete, and a field that says what would be gRPC (gRPC over
    /// HTTP2: "servers SHOULD respond with HTTP status of 415" to another content-type).
    fn turn_away(&mut self, stream: u32, end: bool, now: Instant) {
        let text: &[u8] = b"This is a gRPC server.\n";
        let answer = match self.h2.headers().get(b":method") {
            Some(b"POST") => TurnedAway {
                status: b"415",
                hint: (b"accept", b"application/grpc"),
                text,
            },
            Some(b"HEAD") => TurnedAway {
                status: b"405",
                hint: (b"allow", b"POST"),
                text: b"",
            },
            _ => TurnedAway {
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
        call.turned_away = Some(answer);
        call.held = Some(held);
        self.calls.insert(stream, call);
        if end {
            self.end_inbound(stream);
        }
    }

    fn answer_turned_away(&mut self, stream: u32, TurnedAway { status, hint, text }: TurnedAway) {
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
            self.respond_with(stream, Bytes(text.to_vec()), Default::default())
        }
    }

    /// A method that takes one message can start.
    pub(super) fn request_is_complete(&mut self, stream: u32) {
        if let Some(answer) = self.calls.get(&stream).and_then(|call| call.turned_away) {
            return self.answer_turned_away(stream, answer);
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

    /// A call that ended badly before its handler started needs none, and after it no answer.
    pub(super) fn drop_if_unstarted(&mut self, stream: u32) {
        let is_over = |call: &CallState| !call.has_handler() && matches!(call.end, Some(Err(_)));
        if self.calls.get(&stream).is_some_and(|call| is_over(call)) {
            self.calls.remove(&stream);
        }
    }

    /// Answers a call without its handler, which is told if it runs already.
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

    /// Sends the response's headers unless they went out before.
    pub(super) fn answer_headers(&mut self, stream: u32, custom: &Metadata) {
        let Some(call) = self.calls.get_mut(&stream) else {
            return;
        };
        if !std::mem::replace(&mut call.has_answered, true) {
            let fields = RESPONSE.into_iter().chain(custom.fields());
            // a closed stream will be noticed by who sends the message
            if self.h2.send_headers(stream, fields, false) == Err(SendError::TooLarge) {
                call.has_answered = false;
                let status = Status::new(
                    Code::ResourceExhausted,
                    "the metadata are more than the client takes",
                );
                self.refuse(stream, &status);
            }
        }
    }

    /// Sends the trailers, with the headers if these did not go out before ("Trailers-Only").
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
            // "Compression": a refusal says what would be accepted
            (code == Code::Unimplemented).then_some((
                b"grpc-accept-encoding",
                b"identity",
                Indexing::Yes,
            )),
        ];
        let fields = headers
            .chain(trailers.into_iter().flatten())
            .chain(custom.1.fields());
        // a stream that is closed by now needs no answer
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

/// What every gRPC response begins with.
const RESPONSE: [Field; 2] = [
    (b":status", b"200", Indexing::Yes),
    (b"content-type", b"application/grpc", Indexing::Yes),
];
