//! Half-open connections: from accept to the end of their handshake.
//!
//! Opening a connection costs a peer nothing. So half-open connections have a limit of their own,
//! lower than the limit of all connections, and so have the threads for their handshakes. A new
//! connection is always accepted: if no place is free, the oldest connection of the network with
//! the most half-open connections is closed.
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
    silent: BTreeMap<u64, WaitingConnection>,
    queued: BTreeMap<u64, WaitingConnection>,
    handshakes: BTreeMap<u64, Handshake>,
}

/// A connection that waits for its first byte, or for a thread.
struct WaitingConnection {
    network: Network,
    socket: TcpStream,
    deadline: Instant,
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
    /// The peer's network.
    pub network: Network,
    /// The connection.
    pub socket: TcpStream,
    /// When the handshake must be complete.
    pub deadline: Instant,
    /// The handshake reports here when it waits for the peer.
    pub turn: Arc<PeersTurn>,
}

impl HalfOpen {
    /// Creates a list with `places` connections, of which `threads` may be in their handshake, at
    /// most half of these from one network. A handshake that has waited for its peer for `patience`
    /// loses its thread when only a quarter of the threads is free or another connection of its
    /// network needs one.
    pub fn new(places: usize, threads: usize, patience: Duration) -> HalfOpen {
        let (silent, queued, handshakes) = Default::default();
        HalfOpen {
            places,
            threads,
            patience,
            silent,
            queued,
            handshakes,
        }
    }

    /// Adds an accepted connection. It is closed if its handshake does not begin before `deadline`.
    pub fn enter(&mut self, id: u64, network: Network, socket: TcpStream, deadline: Instant) {
        self.silent.insert(
            id,
            WaitingConnection {
                network,
                socket,
                deadline,
            },
        );
    }

    /// Returns the number of half-open connections.
    #[expect(clippy::len_without_is_empty, reason = "no caller needs it")]
    pub fn len(&self) -> usize {
        self.silent.len() + self.queued.len() + self.handshakes.len()
    }

    /// Returns the number of half-open connections of a network.
    pub fn len_of(&self, network: Network) -> usize {
        self.networks().filter(|other| *other == network).count()
    }

    fn networks(&self) -> impl Iterator<Item = Network> {
        let callers = self
            .silent
            .values()
            .chain(self.queued.values())
            .map(|caller| caller.network);
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
        let silent = self
            .silent
            .iter()
            .map(|(id, caller)| (caller.network, true, *id));
        let queued = self
            .queued
            .iter()
            .map(|(id, caller)| (caller.network, false, *id));
        let late = self
            .handshakes
            .iter()
            .filter(|(_, handshake)| handshake.turn.waited(now) >= self.patience);
        let late = late.map(|(id, handshake)| (handshake.network, true, *id));
        let may_go = silent
            .chain(queued)
            .chain(late)
            .filter(|(network, ..)| of.is_none_or(|of| of == *network));
        let (.., id) = may_go
            .max_by_key(|(network, is_idle, id)| (counts[network], *is_idle, Reverse(*id)))?;
        self.close(id);
        Some(id)
    }

    fn close(&mut self, id: u64) {
        let _ = (self.silent.remove(&id), self.queued.remove(&id));
        if let Some(Handshake { socket, .. }) = self.handshakes.remove(&id) {
            // The thread of the handshake has another handle of the socket.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Notes that the first byte of a connection has arrived.
    pub fn first_byte_arrived(&mut self, id: u64) {
        self.queued.extend(self.silent.remove_entry(&id));
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
            let may_begin = self.queued.iter().filter(|(_, caller)| {
                self.handshakes.len() < self.threads
                    && running_of(caller) < self.threads.div_ceil(2)
            });
            if let Some((&id, _)) = may_begin.min_by_key(|(id, caller)| (running_of(caller), **id))
            {
                let WaitingConnection {
                    network,
                    socket,
                    deadline,
                } = self.queued.remove(&id)?;
                // If this fails, no file descriptor is free, and the connection is dropped.
                if let Ok(handle) = socket.try_clone() {
                    let turn = Arc::new(PeersTurn::default());
                    let handshake = Handshake {
                        network,
                        socket: handle,
                        turn: turn.clone(),
                        is_outdated: false,
                    };
                    self.handshakes.insert(id, handshake);
                    return Some(NextHandshake {
                        id,
                        network,
                        socket,
                        deadline,
                        turn,
                    });
                }
                continue;
            }
            let is_wanted = |network| {
                self.threads_are_scarce()
                    || self.queued.values().any(|caller| caller.network == network)
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
        !self.queued.is_empty() || self.threads_are_scarce()
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
        self.silent.retain(|_, caller| caller.deadline > now);
        self.queued.retain(|_, caller| caller.deadline > now);
    }

    /// Closes all half-open connections.
    pub fn clear(&mut self) {
        self.silent.clear();
        self.queued.clear();
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
    use std::io::Write;
    use std::net::{IpAddr, Ipv4Addr, TcpListener};

    const PATIENCE: Duration = Duration::from_secs(1);

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
        let (mut all, now) = (HalfOpen::new(4, 2, PATIENCE), Instant::now());
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
    fn networks_take_turns_and_none_has_more_than_half_of_the_threads() {
        let (mut all, now) = (HalfOpen::new(100, 6, PATIENCE), Instant::now());
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
        let (mut all, mut now) = (HalfOpen::new(100, 4, PATIENCE), Instant::now());
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
        assert!((&begun_first[2].socket).write(&[0]).is_err());
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
        let (mut all, now) = (HalfOpen::new(1, 1, PATIENCE), Instant::now());
        speak(&mut all, 1, 1, now);
        assert_eq!(begun(&mut all, now), Some(1));
        assert_eq!(enter(&mut all, 2, 2, now), Some(2));
    }

    #[test]
    fn waiting_connections_end_at_their_deadline_and_all_at_clear() {
        let (mut all, now) = (HalfOpen::new(9, 1, PATIENCE), Instant::now());
        (1..4).for_each(|id| speak(&mut all, id, 1, now));
        let begun = all.next(now).unwrap();
        all.mark_outdated();
        assert_eq!(enter(&mut all, 4, 1, now + PATIENCE), None);
        all.end_late(now + PATIENCE);
        assert_eq!(all.len(), 2);
        all.clear();
        assert!(all.len() == 0 && (&begun.socket).write(&[0]).is_err());
    }
}
