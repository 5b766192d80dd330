//! Half-open connections: from accept to the end of their handshake.
//!
//! Opening a connection costs a peer nothing. So half-open connections have a limit of their own,
//! lower than the limit of all connections, and so have the threads for their handshakes. A new
//! connection is always accepted: if no place is free, the oldest connection of the network with
//! the most half-open connections is closed. A server may tell its peer when to come again
//! (`Accept::turn_away`).
//!
//! ```text
//!   accepted ─► silent ─ first byte ─► queued ─ turn of its network ─► handshake ─► over: no longer here
//!             (no thread)            (no thread)                       (a thread)
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::network::Network;
use base::sync::lock;

/// All half-open connections by connection number; the smallest number is the oldest.
pub struct HalfOpen {
    places: usize,
    threads: usize,
    patience: Duration,
    turn_away: Box<dyn Fn(&TcpStream) + Send>,
    waiting: BTreeMap<u64, WaitingConnection>,
    handshakes: BTreeMap<u64, Handshake>,
}

/// A connection that waits for its first byte, or for a thread: then it is queued.
pub struct WaitingConnection {
    /// The peer's network.
    pub network: Network,
    /// The connection.
    pub socket: TcpStream,
    /// When the handshake must be complete.
    pub deadline: Instant,
    is_queued: bool,
}

struct Handshake {
    network: Network,
    /// A second handle, to interrupt the handshake.
    socket: TcpStream,
    turn: Arc<PeersTurn>,
    is_outdated: bool,
}

/// The next handshake to run, on a thread of its own.
pub struct NextHandshake {
    /// The connection's number.
    pub id: u64,
    /// The connection.
    pub caller: WaitingConnection,
    /// The handshake reports here when it waits for the peer.
    pub turn: Arc<PeersTurn>,
}

impl HalfOpen {
    /// Creates a list with `places` connections, of which `threads` may be in their handshake, at
    /// most half of these from one network. A handshake that has waited for its peer for `patience`
    /// loses its thread when only a quarter of the threads is free or another connection of its
    /// network needs one. `turn_away` tells the peers of connections that are closed when to
    /// come again.
    pub fn new(
        places: usize,
        threads: usize,
        patience: Duration,
        turn_away: Box<dyn Fn(&TcpStream) + Send>,
    ) -> HalfOpen {
        let (waiting, handshakes) = Default::default();
        HalfOpen {
            places,
            threads,
            patience,
            turn_away,
            waiting,
            handshakes,
        }
    }

    /// Adds an accepted connection. It is closed if its handshake does not begin before `deadline`.
    pub fn enter(&mut self, id: u64, network: Network, socket: TcpStream, deadline: Instant) {
        let waiting = WaitingConnection {
            network,
            socket,
            deadline,
            is_queued: false,
        };
        self.waiting.insert(id, waiting);
    }

    /// Returns the number of half-open connections.
    #[expect(clippy::len_without_is_empty, reason = "no caller needs it")]
    pub fn len(&self) -> usize {
        self.waiting.len() + self.handshakes.len()
    }

    /// Returns the number of half-open connections of a network.
    pub fn len_of(&self, network: Network) -> usize {
        self.networks().filter(|other| *other == network).count()
    }

    fn networks(&self) -> impl Iterator<Item = Network> {
        let callers = self.waiting.values().map(|caller| caller.network);
        callers.chain(self.handshakes.values().map(|handshake| handshake.network))
    }

    /// Returns whether there are more connections than places.
    pub fn is_overfull(&self) -> bool {
        self.len() > self.places
    }

    /// Closes one connection to make room, and returns its number. It is the oldest one of `of`, or
    /// else of the network that has the most. Connections that have sent no byte go first. A
    /// handshake is closed only if it waits for its peer.
    pub fn displace(&mut self, of: Option<Network>, now: Instant) -> Option<u64> {
        let mut counts: HashMap<Network, usize> = HashMap::new();
        self.networks()
            .for_each(|network| *counts.entry(network).or_default() += 1);
        let waiting = self.waiting.iter();
        let waiting = waiting.map(|(id, caller)| (caller.network, !caller.is_queued, *id));
        let late = self
            .handshakes
            .iter()
            .filter(|(_, handshake)| handshake.turn.waited(now) >= self.patience);
        let late = late.map(|(id, handshake)| (handshake.network, true, *id));
        let may_go = waiting
            .chain(late)
            .filter(|(network, ..)| of.is_none_or(|of| of == *network));
        let (.., id) = may_go
            .max_by_key(|(network, is_idle, id)| (counts[network], *is_idle, Reverse(*id)))?;
        self.close(id);
        Some(id)
    }

    fn close(&mut self, id: u64) {
        if let Some(caller) = self.waiting.remove(&id) {
            (self.turn_away)(&caller.socket);
        }
        if let Some(Handshake { socket, .. }) = self.handshakes.remove(&id) {
            // The thread of the handshake has another handle of the socket.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Notes that the first byte of a connection has arrived.
    pub fn first_byte_arrived(&mut self, id: u64) {
        if let Some(caller) = self.waiting.get_mut(&id) {
            caller.is_queued = true;
        }
    }

    /// Returns the next handshake to run; the caller repeats this until `None`. Closes handshakes
    /// that hold their thread for too long.
    pub fn next(&mut self, now: Instant) -> Option<NextHandshake> {
        while self.is_busy() {
            let mut running: HashMap<Network, usize> = HashMap::new();
            self.handshakes
                .values()
                .for_each(|other| *running.entry(other.network).or_default() += 1);
            let running_of =
                |caller: &WaitingConnection| running.get(&caller.network).copied().unwrap_or(0);
            let may_begin = self.waiting.iter().filter(|(_, caller)| {
                caller.is_queued
                    && self.handshakes.len() < self.threads
                    && running_of(caller) < self.threads.div_ceil(2)
            });
            if let Some((&id, _)) = may_begin.min_by_key(|(id, caller)| (running_of(caller), **id))
            {
                let caller = self.waiting.remove(&id)?;
                // If this fails, no file descriptor is free, and the connection is dropped.
                if let Ok(socket) = caller.socket.try_clone() {
                    let turn = Arc::new(PeersTurn::default());
                    let handshake = Handshake {
                        network: caller.network,
                        socket,
                        turn: turn.clone(),
                        is_outdated: false,
                    };
                    self.handshakes.insert(id, handshake);
                    return Some(NextHandshake { id, caller, turn });
                }
                continue;
            }
            let is_wanted = |network| {
                let mut queued = self.waiting.values().filter(|caller| caller.is_queued);
                self.threads_are_scarce() || queued.any(|caller| caller.network == network)
            };
            let waiting = self
                .handshakes
                .iter()
                .map(|(id, other)| (other.turn.waited(now), *id, other.network));
            let may_go = waiting
                .filter(|(waited, _, network)| *waited >= self.patience && is_wanted(*network));
            let (_, longest, _) = may_go.max()?;
            self.close(longest);
        }
        None
    }

    /// Returns whether fewer than a quarter of the threads are free.
    fn threads_are_scarce(&self) -> bool {
        4 * self.handshakes.len() >= 3 * self.threads
    }

    /// Returns whether the caller should call [`HalfOpen::next`] again soon, even without a new
    /// event.
    pub fn is_busy(&self) -> bool {
        self.waiting.values().any(|caller| caller.is_queued) || self.threads_are_scarce()
    }

    /// Removes a connection whose handshake is complete. Returns whether
    /// [`HalfOpen::mark_outdated`] was called during the handshake; `None` if the connection was
    /// closed.
    pub fn leave(&mut self, id: u64) -> Option<bool> {
        self.handshakes
            .remove(&id)
            .map(|handshake| handshake.is_outdated)
    }

    /// Marks the running handshakes as outdated: the requirements on peers have changed.
    pub fn mark_outdated(&mut self) {
        self.handshakes
            .values_mut()
            .for_each(|handshake| handshake.is_outdated = true);
    }

    /// Closes connections whose first byte or thread did not come before their deadline.
    pub fn end_late(&mut self, now: Instant) {
        self.waiting.retain(|_, caller| {
            let is_late = caller.deadline <= now;
            if is_late {
                (self.turn_away)(&caller.socket);
            }
            !is_late
        });
    }

    /// Closes all half-open connections.
    pub fn clear(&mut self) {
        self.waiting.clear();
        while let Some(&id) = self.handshakes.keys().next() {
            self.close(id);
        }
    }
}

/// Records whether a handshake waits for the peer, and since when.
#[derive(Debug, Default)]
pub struct PeersTurn(Mutex<Option<Instant>>);

impl PeersTurn {
    /// Notes that we wait for the peer from now on.
    pub fn begin(&self) {
        *lock(&self.0) = Some(Instant::now());
    }

    /// Notes that it is our turn.
    pub fn end(&self) {
        *lock(&self.0) = None;
    }

    /// Returns how long we have been waiting for the peer.
    fn waited(&self, now: Instant) -> Duration {
        let since = *lock(&self.0);
        since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{IpAddr, Ipv4Addr, TcpListener};

    const PATIENCE: Duration = Duration::from_secs(1);

    fn half_open(places: usize, threads: usize) -> HalfOpen {
        let tell = |mut socket: &TcpStream| socket.write_all(b"!").unwrap();
        HalfOpen::new(places, threads, PATIENCE, Box::new(tell))
    }

    fn network(number: u32) -> Network {
        IpAddr::V4(Ipv4Addr::from_bits(number)).into()
    }

    fn enter(all: &mut HalfOpen, id: u64, who: u32, now: Instant) -> Option<u64> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        listener.accept().unwrap();
        all.enter(id, network(who), socket, now + PATIENCE);
        if all.is_overfull() {
            all.displace(None, now)
        } else {
            None
        }
    }

    fn speak(all: &mut HalfOpen, id: u64, who: u32, now: Instant) {
        assert_eq!(enter(all, id, who, now), None);
        all.first_byte_arrived(id);
    }

    fn begun(all: &mut HalfOpen, now: Instant) -> Option<u64> {
        all.next(now).map(|begin| begin.id)
    }

    #[test]
    fn a_new_connection_displaces_the_oldest_of_the_largest_network() {
        let (mut all, now) = (half_open(4, 2), Instant::now());
        for (id, who) in [(1, 7), (2, 8), (3, 7), (4, 9)] {
            assert_eq!(enter(&mut all, id, who, now), None);
        }
        assert_eq!(enter(&mut all, 5, 6, now), Some(1));
        // Each network has one: the oldest connection is closed, but not one that has sent a byte.
        all.first_byte_arrived(2);
        assert_eq!(enter(&mut all, 6, 5, now), Some(3));
        // A network that opens many connections takes places only from itself.
        for id in 7..1000 {
            let expected = if id == 7 { 4 } else { id - 1 };
            assert_eq!(enter(&mut all, id, 4, now), Some(expected));
        }
        // When one network has all places, one of its connections goes.
        assert_eq!((all.len_of(network(8)), all.len()), (1, 4));
        assert_eq!(all.displace(Some(network(8)), now), Some(2));
        assert_eq!(all.displace(Some(network(8)), now), None);
    }

    #[test]
    fn the_peer_of_a_connection_that_is_closed_is_told_unless_its_handshake_has_begun() {
        let (mut all, now) = (half_open(9, 1), Instant::now());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peers: Vec<TcpStream> = (1..=4)
            .map(|id| {
                let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                let (socket, _) = listener.accept().unwrap();
                peer.write_all(b"hello").unwrap();
                all.enter(id, network(1), socket, now + PATIENCE);
                peer
            })
            .collect();
        all.first_byte_arrived(1);
        let begun = all.next(now).unwrap();
        begun.turn.begin();
        all.first_byte_arrived(3);
        assert_eq!(all.displace(None, now), Some(2));
        assert_eq!(all.displace(None, now + 2 * PATIENCE), Some(1));
        all.end_late(now + PATIENCE);
        drop(begun);
        for (peer, expected) in peers.iter_mut().zip([&b""[..], b"!", b"!", b"!"]) {
            let mut told = Vec::new();
            // the close of a connection with unread bytes is a reset
            let _ = peer.read_to_end(&mut told);
            assert_eq!(told, expected);
        }
    }

    #[test]
    fn networks_take_turns_and_none_has_more_than_half_of_the_threads() {
        let (mut all, now) = (half_open(100, 6), Instant::now());
        for (id, who) in [(1, 7), (2, 7), (3, 7), (4, 7), (5, 8), (6, 9)] {
            speak(&mut all, id, who, now);
        }
        let order: Vec<_> = (0..5).map(|_| begun(&mut all, now).unwrap()).collect();
        assert_eq!(order, [1, 5, 6, 2, 3]);
        assert!(
            begun(&mut all, now).is_none() && all.is_busy(),
            "three are half of the threads"
        );
        assert_eq!(all.leave(2), Some(false));
        assert_eq!(begun(&mut all, now), Some(4));
    }

    #[test]
    fn a_handshake_loses_its_thread_only_while_it_waits_for_its_peer() {
        let (mut all, mut now) = (half_open(100, 4), Instant::now());
        for (id, who) in [(1, 7), (2, 7), (3, 7), (4, 8)] {
            speak(&mut all, id, who, now);
        }
        let begun_first: Vec<_> = (0..3).map(|_| all.next(now).unwrap()).collect();
        assert_eq!(
            begun_first.iter().map(|begin| begin.id).collect::<Vec<_>>(),
            [1, 4, 2]
        );
        // Three of four threads are in use. One connection is queued, because its network has half
        // of the threads.
        begun_first[2].turn.begin();
        now += PATIENCE / 2;
        assert_eq!(begun(&mut all, now), None);
        now += PATIENCE;
        assert_eq!(begun(&mut all, now), Some(3), "threads are scarce");
        assert_eq!(all.leave(2), None, "it was closed");
        assert!((&begun_first[2].caller.socket).write(&[0]).is_err());
        assert_eq!(begun(&mut all, now), None, "we are at work for all");
        all.leave(4);
        begun_first[0].turn.begin();
        now += 10 * PATIENCE;
        assert!(
            begun(&mut all, now).is_none() && !all.is_busy(),
            "no other connection needs its thread"
        );
        speak(&mut all, 5, 7, now);
        assert_eq!(begun(&mut all, now), Some(5), "one of its network does");
        assert_eq!(all.leave(1), None);
    }

    #[test]
    fn a_handshake_keeps_its_place_while_it_is_our_turn() {
        let (mut all, now) = (half_open(1, 1), Instant::now());
        speak(&mut all, 1, 1, now);
        assert_eq!(begun(&mut all, now), Some(1));
        assert_eq!(enter(&mut all, 2, 2, now), Some(2));
    }

    #[test]
    fn waiting_connections_end_at_their_deadline_and_all_at_clear() {
        let (mut all, now) = (half_open(9, 1), Instant::now());
        (1..4).for_each(|id| speak(&mut all, id, 1, now));
        let begun = all.next(now).unwrap();
        all.mark_outdated();
        assert_eq!(enter(&mut all, 4, 1, now + PATIENCE), None);
        all.end_late(now + PATIENCE);
        assert_eq!(all.len(), 2);
        all.clear();
        assert!(all.len() == 0 && (&begun.caller.socket).write(&[0]).is_err());
    }
}
