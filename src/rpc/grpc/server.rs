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
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::call::Call;
use super::health;
use super::limits::Limits;
use super::link::{Guard, Link, Owner, TICK};
use super::methods::Methods;
use super::router::{Handler, Router};
use super::session::{Request, ServerSide, Session};
use super::status::{Code, Status};
use crate::share::{LimitShare, PeerShare, SharedLimit};
use base::network::{Network, canonical};
use base::sync::pool::Pool;
use base::sync::{lock, wait_timeout};
use sys::net::limit_send_buffer;
use sys::poll::Poller;
use transport::Accept;
use transport::half_open::{HalfOpen, NextHandshake};
use transport::strangers::{self, Tally};

/// Interval between checks of a connection's timers; also the precision of its time-outs.
const UPKEEP: Duration = Duration::from_secs(1);
/// How long a thread waits for the next bytes of a connection before it parks the connection. The
/// first value applies after a call, because another call may follow at once and then needs no
/// switch between threads.
const PATIENCE: Duration = Duration::from_millis(50);
const PATIENCE_FIRST: Duration = Duration::from_millis(1);
/// The poller's number for the listening socket; the numbers of connections are higher.
const LISTENER: u64 = 0;
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

/// A server that listens; dropping it stops it without grace.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// The state that the threads of a server share.
struct Shared {
    name: &'static str,
    methods: Arc<Methods>,
    handlers: Vec<Handler>,
    limits: Arc<Limits>,
    accept: Arc<dyn Accept>,
    pool: Arc<Pool>,
    /// Connections whose handshake is complete, by number.
    connections: Mutex<HashMap<u64, Arc<ServerConnection>>>,
    /// The other connections. This lock is taken after that of `connections`.
    half_open: Mutex<HalfOpen>,
    /// Notified when a connection ends.
    changed: Condvar,
    stopping: AtomicBool,
    watcher_sleeps: AtomicBool,
    poller: Poller,
    /// Connections that are not parked, by number.
    active: Mutex<HashMap<u64, Arc<ServerConnection>>>,
    handler_limit: Arc<SharedLimit>,
    memory: Arc<SharedLimit>,
    /// The shares of all peers that have connections.
    shares: Mutex<HashMap<Network, Weak<PeerShare>>>,
    shed: Mutex<Tally>,
    shed_total: AtomicU64,
    /// Connections that a fault or a limit ended.
    ended: Mutex<Tally>,
}

/// A connection whose handshake is complete.
struct ServerConnection {
    id: u64,
    network: Network,
    /// The resources that all connections of this peer use together.
    share: Arc<PeerShare>,
    link: Arc<Link<ServerSide>>,
    server: Arc<Shared>,
    /// Whether the poller waits for bytes instead of a thread. Changed only under the link's lock.
    is_parked: AtomicBool,
    /// Number of pool jobs for this connection that have not begun.
    pending_jobs: AtomicUsize,
}

/// A snapshot of what a server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Number of connections, including those in their handshake.
    pub connections: usize,
    /// Number of connections that hold a thread or may get one.
    pub attended: usize,
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
        let Router {
            methods, handlers, ..
        } = health::add(router);
        let shared = Arc::new(Shared {
            name,
            methods: Arc::new(methods),
            handlers,
            accept: accept.clone(),
            pool: Arc::new(Pool::new(name, limits.connections + limits.handlers)),
            handler_limit: SharedLimit::new(limits.handlers, 0),
            memory: SharedLimit::new(
                limits.buffered_bytes,
                limits.buffered_bytes / limits.connections.max(1),
            ),
            shares: Mutex::default(),
            half_open: Mutex::new(HalfOpen::new(
                limits.half_open.min(limits.connections / 2),
                limits.handshakes,
                limits.handshake_patience,
                Box::new(move |socket| accept.turn_away(socket)),
            )),
            limits: Arc::new(limits),
            connections: Mutex::default(),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            watcher_sleeps: AtomicBool::new(false),
            poller: Poller::new()?,
            active: Mutex::default(),
            shed: Mutex::default(),
            shed_total: AtomicU64::new(0),
            ended: Mutex::default(),
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
                attended: lock(&shared.active).len(),
                calls_in_flight: shared.handler_limit.used(),
                shed: shared.shed_total.load(Ordering::Relaxed),
            })
        }
    }

    /// Ends all connections, including those in their handshake, because peers must now prove
    /// something else in the handshake. The connections accept no further calls (GOAWAY). They
    /// close when their calls have ended, at the latest after [`Limits::max_age_grace`]. The server
    /// continues, and clients connect again.
    pub fn close_connections(&self, why: &str) {
        lock(&self.shared.half_open).mark_outdated();
        for connection in self.shared.all_connections() {
            connection.retire(why);
            connection.attend_later(1);
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
        for connection in shared.all_connections() {
            connection.shut_down();
        }
        let deadline = Instant::now() + grace;
        let mut connections = lock(&shared.connections);
        while !connections.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            connections = wait_timeout(&shared.changed, connections, left);
        }
        for connection in connections.values() {
            connection.link.end(&mut connection.link.lock(), stopped());
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

fn stopped() -> Status {
    Status::new(Code::Unavailable, "the server is stopping")
}

// ---- from a socket to a connection ----

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn all_connections(&self) -> Vec<Arc<ServerConnection>> {
        lock(&self.connections).values().cloned().collect()
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
            .filter(|other| other.network == network)
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

    /// Counts a refusal and logs it, with at most one line a minute and peer.
    fn shed(&self, why: &str, ip: IpAddr) {
        self.shed_total.fetch_add(1, Ordering::Relaxed);
        if let Some(count) = lock(&self.shed).count(ip.into(), Instant::now()) {
            let name = self.name;
            log::warn!(
                "{name}: {why}; {count} refused since the last such line, the latest from {ip}"
            );
        }
    }

    /// Counts a connection that a fault or a limit ended, and logs it, with at most one line a
    /// minute and peer.
    fn ended(&self, peer: Option<SocketAddr>, why: impl Display) {
        let network = peer.map_or(Network::UNKNOWN, |peer| peer.ip().into());
        if let Some(count) = lock(&self.ended).count(network, Instant::now()) {
            let peer = peer.map_or("an unknown address".into(), |peer| peer.to_string());
            let more = strangers::since_last_line(count);
            log::info!(
                "{}: the connection with {peer} ended: {why}{more}",
                self.name
            );
        }
    }

    /// Runs a connection's first thread: the handshake, then its calls.
    fn connect(self: Arc<Self>, next: NextHandshake) {
        let (id, peer) = (next.id, next.caller.socket.peer_addr().map(canonical));
        let opened = panic::catch_unwind(AssertUnwindSafe(|| self.open(next)))
            .unwrap_or_else(|_| Err(io::Error::other("the handshake panicked")));
        let mut connections = lock(&self.connections);
        let is_outdated = lock(&self.half_open).leave(id);
        if let (Ok(connection), Some(_)) = (&opened, is_outdated) {
            connections.insert(id, connection.clone());
            lock(&self.active).insert(id, connection.clone());
        }
        drop(connections);
        self.begin_handshakes();
        match (opened, is_outdated) {
            (Ok(connection), Some(is_outdated)) => {
                if is_outdated {
                    connection.retire("the requirements of the handshake have changed");
                }
                if !self.is_stopping() {
                    connection.attend();
                }
                // `stop()` may have missed this new connection.
                if self.is_stopping() {
                    connection.shut_down();
                    connection.attend();
                }
            }
            // The connection was closed to make room for another, or by `stop()`.
            (Ok(_), None) => {}
            (Err(error), _) => self.ended(peer.ok(), error),
        }
    }

    /// Completes the handshake and starts HTTP/2.
    fn open(self: &Arc<Self>, next: NextHandshake) -> io::Result<Arc<ServerConnection>> {
        let NextHandshake { id, caller, turn } = next;
        let (network, deadline) = (caller.network, caller.deadline);
        let transport = self.accept.accept(caller.socket, deadline, &turn)?;
        let share = self.share_of(network);
        let session = Session::server(
            self.limits.clone(),
            self.methods.clone(),
            share.clone(),
            deadline,
            Instant::now(),
        );
        // The peer closes its side once it has read everything; `close` waits for that.
        let mut link = Link::new(transport, session, self.limits.stall, Shutdown::Write)?;
        Ok(Arc::new_cyclic(|me: &Weak<ServerConnection>| {
            link.owner = Some(me.clone());
            ServerConnection {
                id,
                network,
                share,
                link: Arc::new(link),
                server: self.clone(),
                is_parked: AtomicBool::new(false),
                pending_jobs: AtomicUsize::new(0),
            }
        }))
    }

    /// Returns the share of a peer, which all its connections use together.
    fn share_of(&self, peer: Network) -> Arc<PeerShare> {
        let mut shares = lock(&self.shares);
        shares.retain(|_, share| share.strong_count() > 0);
        let share = shares.entry(peer).or_default();
        share.upgrade().unwrap_or_else(|| {
            let new = PeerShare {
                handlers: LimitShare::of(&self.handler_limit),
                memory: LimitShare::of(&self.memory),
            };
            let new = Arc::new(new);
            *share = Arc::downgrade(&new);
            new
        })
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
                for connection in self.all_connections() {
                    if connection.check_timers(now) {
                        connection.attend_later(1);
                    }
                }
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
        for connection in active.iter().filter(|other| other.link.is_neglected()) {
            let mut core = connection.link.lock();
            let is_over = core.session.ended().is_some();
            if core.is_writing && (is_over || core.session.is_output_full()) {
                // The connection waits until the output is written or the write fails.
                unread.push((core.session.last_received(), connection));
                continue;
            }
            let requests = core.session.requests();
            drop(core);
            // In a burst, the jobs of an earlier tick may still wait; without this, each tick would
            // add the same number again.
            let pending = connection.pending_jobs.load(Ordering::SeqCst);
            connection.attend_later(requests.max(1).saturating_sub(pending));
        }
        unread.sort_by_key(|(last_received, _)| *last_received);
        let too_many = unread
            .len()
            .saturating_sub(self.limits.connections / UNREAD_PART);
        for (_, connection) in &unread[..too_many] {
            let why = "too many peers do not read what is sent to them";
            connection.shed(why);
            let status = Status::new(Code::Unavailable, why);
            connection.link.end(&mut connection.link.lock(), status);
        }
        !self.pool.grow()
            && active
                .iter()
                .all(|connection| connection.link.is_attended())
            && !lock(&self.half_open).is_busy()
    }

    fn listen(&self, listener: &TcpListener) {
        if let Err(error) = self.poller.watch_once(listener, LISTENER) {
            log::error!("{}: cannot accept further connections: {error}", self.name);
        }
    }

    /// Handles a readable connection that was parked or had not sent a byte.
    fn resume(self: &Arc<Self>, id: u64) {
        let connection = lock(&self.connections).get(&id).cloned();
        let Some(connection) = connection else {
            lock(&self.half_open).first_byte_arrived(id);
            return self.begin_handshakes();
        };
        let core = connection.link.lock();
        connection.unpark();
        drop(core);
        connection.attend_later(1);
    }

    fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if self.pool.submit(job) {
            self.wake_watcher();
        }
    }

    /// Wakes the watcher before a handler runs or continues, because its connection has no reader
    /// then.
    fn wake_watcher(&self) {
        if self.watcher_sleeps.swap(false, Ordering::SeqCst) {
            self.poller.wake();
        }
    }
}

// ---- from a connection to a handler ----

impl ServerConnection {
    /// Serves the connection: runs the handlers of complete requests, otherwise reads. Returns when
    /// the connection has ended, another thread serves it, or nothing arrives.
    fn attend(self: &Arc<Self>) {
        let link = &self.link;
        let mut patience = PATIENCE_FIRST;
        let mut core = link.lock();
        loop {
            core = link.flush(core);
            if core.session.ended().is_none() && core.session.is_drained() {
                core = link.end_after_flush(core, stopped());
            }
            if core.session.ended().is_some() {
                core.session.drop_calls();
                return self.close(core);
            }
            if let Some((stream, request)) = core.session.next_request() {
                drop(core);
                self.server.wake_watcher();
                self.run(stream, request);
                patience = PATIENCE;
                core = link.lock();
                continue;
            }
            // The thread that writes serves the connection afterwards, or the watcher does.
            let is_parked = self.is_parked.load(Ordering::Relaxed);
            if is_parked || !core.is_free() || core.session.is_output_full() {
                return;
            }
            let before = core.session.last_received();
            core = link.read_turn(core, Some(patience));
            let session = &core.session;
            if session.last_received() == before
                && session.requests() == 0
                && session.ended().is_none()
            {
                return self.park(core);
            }
        }
    }

    /// Runs a handler and sends its result.
    fn run(&self, stream: u32, request: Request) {
        let handler = &self.server.handlers[request.method.handler];
        let deadline = request.deadline;
        let call = Call::new(self.link.clone(), stream, request);
        // A handler may return a response of any size. While memory is in demand, it counts as
        // several, so that only 8 run at once.
        let count = if self.share.memory.is_in_demand() {
            self.server.limits.handlers.div_ceil(8)
        } else {
            1
        };
        let result = if self.share.handlers.take(count) {
            let result =
                panic::catch_unwind(AssertUnwindSafe(|| handler(&call))).unwrap_or_else(|_| {
                    log::error!("{}: a handler panicked", self.server.name);
                    Err(Status::new(Code::Internal, "the handler failed"))
                });
            self.share.handlers.give_back(count);
            result
        } else {
            self.shed("the limit of running calls is reached");
            Err(Status::new(Code::ResourceExhausted, "the server is busy")
                .with_retry_after(BUSY_PAUSE))
        };
        let is_late = deadline.is_some_and(|deadline| deadline <= Instant::now());
        let result = if is_late {
            Err(Status::new(Code::DeadlineExceeded, "the deadline passed"))
        } else {
            result
        };
        let custom = call.into_custom();
        self.link.lock().session.answer(stream, result, custom);
    }

    /// Lets other threads run `calls` ready calls.
    fn attend_later(self: &Arc<Self>, calls: usize) {
        for _ in 0..calls {
            let connection = self.clone();
            connection.pending_jobs.fetch_add(1, Ordering::SeqCst);
            self.server.submit(move || {
                connection.pending_jobs.fetch_sub(1, Ordering::SeqCst);
                connection.attend()
            });
        }
    }

    /// Leaves an idle connection to the poller. If that fails, the watcher makes threads read it as
    /// before.
    fn park(&self, mut core: Guard<'_, ServerSide>) {
        if core.session.is_idle() {
            core.trim();
        }
        self.leave_to_poller();
        core.hand_over();
    }

    /// Returns whether the poller now waits for bytes. The caller holds the link's lock.
    fn leave_to_poller(&self) -> bool {
        let poller = &self.server.poller;
        let is_watched = poller.watch_once(&*self.link.socket, self.id).is_ok();
        if is_watched {
            self.is_parked.store(true, Ordering::Relaxed);
            lock(&self.server.active).remove(&self.id);
        }
        is_watched
    }

    /// Takes the connection back from the poller. The caller holds the link's lock.
    fn unpark(self: &Arc<Self>) {
        if self.is_parked.swap(false, Ordering::Relaxed) {
            lock(&self.server.active).insert(self.id, self.clone());
        }
    }

    /// Checks the timers. Returns whether the connection needs a thread, because it has output or
    /// is over.
    fn check_timers(&self, now: Instant) -> bool {
        let mut core = self.link.lock();
        if let Some(why) = core.session.check_timers(now) {
            self.server.ended(self.link.peer, why);
        }
        core.session.ended().is_some() || !core.session.output().is_empty()
    }

    /// Stops further calls; the running ones must end within the grace. The next thread that serves
    /// the connection sends the GOAWAY, so that a peer that does not read cannot block the caller.
    fn retire(&self, why: &str) {
        let by = Instant::now() + self.server.limits.max_age_grace;
        self.link.lock().session.retire(why, by);
    }

    /// Tells the peer that the server is stopping.
    fn shut_down(&self) {
        let mut core = self.link.lock();
        core.session.shutdown("the server is stopping");
        drop(self.link.flush(core));
    }

    /// Counts and logs a refusal.
    fn shed(&self, why: &str) {
        let ip = self.link.peer.map_or([0; 4].into(), |peer| peer.ip());
        self.server.shed(why, ip);
    }

    /// Removes a connection that is over and completely written. It waits for the peer to close its
    /// side, for a limited time and in the poller, without a thread.
    fn close(&self, mut core: Guard<'_, ServerSide>) {
        if let Some(error) = core.session.take_violation() {
            self.server
                .ended(self.link.peer, format!("it violated HTTP/2: {error}"));
        }
        if core.is_writing {
            // That thread comes back here, or leaves it to the watcher.
        } else if !self.link.discard_unread(&core) || !self.leave_to_poller() {
            let _ = self.link.socket.shutdown(Shutdown::Both);
            drop(core);
            self.server.forget(self.id);
        }
    }
}

impl Owner<ServerSide> for ServerConnection {
    /// Takes the connection back from the poller: from now on the transport may hold bytes that the
    /// poller cannot see at the socket.
    fn before_read(self: Arc<Self>) {
        self.unpark();
    }

    /// Gives newly received requests to other threads. The handler may now work without a read.
    fn after_read(self: Arc<Self>, session: &mut Session<ServerSide>) {
        self.attend_later(session.requests());
        self.server.wake_watcher();
    }
}
