//! A semaphore for expensive work, such as deriving keys from a peer's input, or a quote of the TPM. It gives
//! few permits at once, and to one network after the other. After a wrong attempt a network must wait before
//! its next one, longer each time. The mistakes of one network never delay another.
//!
//! ```text
//!   take ─► a place ─► the network's delay is over, and it is its turn ─► Permit ─► wrong: longer delay
//!              │ all places taken: the network with most wrong attempts, or most places, loses its newest
//!              └─► Busy
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::network::Network;
use crate::sync::{lock, wait_timeout};

/// Delay after a network's first wrong attempt; it doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// The longest delay.
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// Time without an attempt after which a network's wrong attempts are forgotten. To hold all
/// places, an attacker needs as many networks as can be wrong within this time: about
/// [`MAX_DELAYS`].
const FORGET_AFTER: Duration = Duration::from_secs(3600);
/// Number of networks whose delays are remembered. The one with the fewest wrong attempts is
/// dropped for a new one.
const MAX_DELAYS: usize = 1024;
/// Interval at which a waiting call checks whether its caller is gone.
const TICK: Duration = Duration::from_millis(100);

/// Limits how many callers do one kind of work at the same time.
pub struct Semaphore {
    at_once: usize,
    places: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    running: usize,
    /// The waiting networks in the order of their places.
    waiting: BTreeMap<Place, Network>,
    delays: HashMap<Network, Delay>,
    /// The highest round in which a turn was given.
    round: u64,
    last: u64,
}

/// A place in the queue. A network's first place is in the current round and its second in the
/// next: each round has one turn for each network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    round: u64,
    number: u64,
}

struct Delay {
    wrong: u32,
    until: Instant,
}

/// There was no turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy {
    /// Time after which a retry may succeed; not before the network's delay is over.
    pub retry_after: Duration,
}

impl Semaphore {
    /// Gives at most `at_once` permits at the same time; `places` callers may wait for one.
    pub fn new(at_once: usize, places: usize) -> Semaphore {
        Semaphore {
            at_once,
            places,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits for a turn until `deadline`, as long as `is_over` returns false; otherwise errors with
    /// [`Busy`]. If `places` callers already wait, one of them gets [`Busy`]: from the network with
    /// the most wrong attempts, or else with the most waiting callers.
    pub fn take(
        &self,
        network: Network,
        deadline: Instant,
        is_over: impl Fn() -> bool,
    ) -> Result<Permit<'_>, Busy> {
        let mut state = self.lock();
        let place = state.enter(network);
        if state.waiting.len() > self.places {
            state.displace(Instant::now());
            self.changed.notify_all();
        }
        loop {
            let now = Instant::now();
            let is_displaced = !state.waiting.contains_key(&place);
            if is_displaced || now >= deadline || is_over() {
                state.waiting.remove(&place);
                self.changed.notify_all();
                return Err(Busy {
                    retry_after: state.delay(network, now).max(FIRST_DELAY),
                });
            }
            if state.running < self.at_once && state.next(now) == Some(place) {
                state.give(place);
                return Ok(Permit {
                    semaphore: self,
                    network,
                });
            }
            let left = match state.delay(network, now) {
                Duration::ZERO => TICK,
                delay => delay.min(TICK),
            };
            state = wait_timeout(&self.changed, state, left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn enter(&mut self, network: Network) -> Place {
        self.last += 1;
        let last_round = self
            .waiting
            .iter()
            .rev()
            .find(|(_, other)| **other == network)
            .map(|(place, _)| place.round);
        let place = Place {
            round: last_round.map_or(self.round, |round| self.round.max(round + 1)),
            number: self.last,
        };
        self.waiting.insert(place, network);
        place
    }

    /// Turns a place into a turn.
    fn give(&mut self, place: Place) {
        self.waiting.remove(&place);
        self.running += 1;
        // A network with a long delay has a place in an old round; that must not move the current
        // round back.
        self.round = self.round.max(place.round);
    }

    /// Returns the place whose turn is next.
    fn next(&self, now: Instant) -> Option<Place> {
        let mut waiting = self.waiting.iter();
        waiting
            .find(|(_, network)| self.delay(**network, now).is_zero())
            .map(|(place, _)| *place)
    }

    /// Removes the newest place of the network with the most wrong attempts; among equals, of the
    /// one with the most places.
    fn displace(&mut self, now: Instant) {
        let mut counts: HashMap<Network, usize> = HashMap::new();
        self.waiting
            .values()
            .for_each(|network| *counts.entry(*network).or_default() += 1);
        let weight = |(place, network): &(&Place, &Network)| {
            (self.wrong(**network, now), counts[*network], place.number)
        };
        let greediest = self
            .waiting
            .iter()
            .max_by_key(weight)
            .map(|(place, _)| *place);
        greediest.map(|place| self.waiting.remove(&place));
    }

    fn wrong(&self, network: Network, now: Instant) -> u32 {
        self.delays
            .get(&network)
            .filter(|delay| !delay.is_forgotten(now))
            .map_or(0, |delay| delay.wrong)
    }

    /// Returns how long a network must still wait.
    fn delay(&self, network: Network, now: Instant) -> Duration {
        self.delays.get(&network).map_or(Duration::ZERO, |delay| {
            delay.until.saturating_duration_since(now)
        })
    }

    fn lengthen_delay(&mut self, network: Network, now: Instant) {
        let wrong = self.wrong(network, now);
        if self.delays.len() >= MAX_DELAYS && !self.delays.contains_key(&network) {
            self.delays.retain(|_, delay| !delay.is_forgotten(now));
        }
        if self.delays.len() >= MAX_DELAYS && !self.delays.contains_key(&network) {
            let least = self
                .delays
                .iter()
                .min_by_key(|(_, delay)| (delay.wrong, delay.until))
                .map(|(least, _)| *least);
            least.map(|least| self.delays.remove(&least));
        }
        let delay = FIRST_DELAY
            .saturating_mul(1 << wrong.min(10))
            .min(LONGEST_DELAY);
        self.delays.insert(
            network,
            Delay {
                wrong: wrong.saturating_add(1),
                until: now + delay,
            },
        );
    }
}

impl Delay {
    fn is_forgotten(&self, now: Instant) -> bool {
        now >= self.until + FORGET_AFTER
    }
}

/// A turn; it ends when it is dropped.
pub struct Permit<'a> {
    semaphore: &'a Semaphore,
    network: Network,
}

impl Permit<'_> {
    /// Notes a wrong attempt: the next one of this network must wait.
    pub fn wrong(self) {
        self.semaphore
            .lock()
            .lengthen_delay(self.network, Instant::now());
    }

    /// Notes a right attempt: all earlier wrong attempts of this network are forgotten.
    pub fn right(self) {
        self.semaphore.lock().delays.remove(&self.network);
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.semaphore.lock().running -= 1;
        self.semaphore.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
    use std::sync::mpsc;
    use std::thread;

    fn network(number: u32) -> Network {
        IpAddr::V4(Ipv4Addr::from_bits(number)).into()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn wait_for(condition: impl Fn() -> bool) {
        let deadline = soon();
        while !condition() {
            assert!(Instant::now() < deadline, "it does not happen in time");
            thread::yield_now();
        }
    }

    #[test]
    fn delays_grow_to_a_minute_and_are_forgotten_after_an_hour() {
        let (mut state, mut now, peer) = (State::default(), Instant::now(), network(1));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            state.lengthen_delay(peer, now);
            assert_eq!(state.delay(peer, now), Duration::from_secs(seconds));
            assert_eq!(state.delay(network(2), now), Duration::ZERO);
            now += Duration::from_secs(seconds);
        }
        assert_eq!(
            (state.delay(peer, now), state.wrong(peer, now)),
            (Duration::ZERO, 8)
        );
        now += FORGET_AFTER;
        assert_eq!(state.wrong(peer, now), 0);
        state.lengthen_delay(peer, now);
        assert_eq!(state.delay(peer, now), FIRST_DELAY);
    }

    #[test]
    fn a_right_attempt_after_a_wrong_one_waits_and_succeeds() {
        let semaphore = Semaphore::new(1, 4);
        let started = Instant::now();
        semaphore
            .take(network(1), soon(), || false)
            .unwrap()
            .wrong();
        semaphore
            .take(network(1), soon(), || false)
            .unwrap()
            .right();
        assert!(started.elapsed() >= FIRST_DELAY);
        let wrong = semaphore.lock().wrong(network(1), Instant::now());
        assert_eq!(wrong, 0, "all is forgiven");
    }

    #[test]
    fn a_caller_that_gives_up_learns_when_to_retry() {
        let semaphore = Semaphore::new(1, 4);
        for _ in 0..3 {
            semaphore.lock().lengthen_delay(network(1), Instant::now());
        }
        let busy = semaphore
            .take(network(1), Instant::now() + TICK, || false)
            .err()
            .unwrap();
        assert!((3..=4).contains(&busy.retry_after.as_secs()), "{busy:?}");
        assert!(
            semaphore.take(network(1), soon(), || true).is_err(),
            "its caller is gone"
        );
        assert_eq!(semaphore.lock().waiting.len(), 0);
    }

    #[test]
    fn wrong_attempts_of_many_networks_do_not_delay_another() {
        let semaphore = Semaphore::new(1, 8);
        for number in 0..3 * MAX_DELAYS as u32 {
            semaphore
                .take(network(number), soon(), || false)
                .unwrap()
                .wrong();
        }
        assert!(semaphore.lock().delays.len() <= MAX_DELAYS);
        // All addresses of one IPv6 /64 count as one network.
        let neighbour = |number: u64| {
            IpAddr::V6(Ipv6Addr::from_bits(
                (0x2001_0db8 << 96) + u128::from(number),
            ))
            .into()
        };
        semaphore
            .take(neighbour(1), soon(), || false)
            .unwrap()
            .wrong();
        assert!(
            semaphore
                .take(neighbour(2), Instant::now() + TICK, || false)
                .is_err()
        );
        let other = "2001:db9::1".parse::<IpAddr>().unwrap().into();
        let delay = semaphore.lock().delay(other, Instant::now());
        assert_eq!(delay, Duration::ZERO);
    }

    #[test]
    fn a_full_table_drops_the_network_with_the_fewest_wrong_attempts() {
        let (mut state, now) = (State::default(), Instant::now());
        (0..3).for_each(|_| state.lengthen_delay(network(0), now));
        (1..5000).for_each(|number| state.lengthen_delay(network(number), now));
        assert_eq!(
            (state.delays.len(), state.wrong(network(0), now)),
            (MAX_DELAYS, 3)
        );
    }

    #[test]
    fn networks_take_turns() {
        let semaphore = Semaphore::new(1, 100);
        let (done, order) = mpsc::channel();
        let first = semaphore.take(network(9), soon(), || false).unwrap();
        thread::scope(|scope| {
            for (number, who) in [1, 1, 1, 1, 2, 3].into_iter().enumerate() {
                let (semaphore, done) = (&semaphore, done.clone());
                scope.spawn(move || {
                    let _turn = semaphore.take(network(who), soon(), || false).unwrap();
                    done.send(who).unwrap();
                });
                wait_for(|| semaphore.lock().waiting.len() == number + 1);
            }
            drop(first);
            let order: Vec<u32> = (0..6).map(|_| order.recv().unwrap()).collect();
            assert_eq!(order, [1, 2, 3, 1, 1, 1]);
        });
    }

    #[test]
    fn new_callers_wait_behind_older_ones_even_after_a_delayed_network_was_served() {
        let now = Instant::now();
        let mut state = State::default();
        let delayed = state.enter(network(1));
        state.round = 7;
        let waiting = state.enter(network(2));
        state.give(delayed);
        state.enter(network(3));
        assert_eq!(state.next(now), Some(waiting));
    }

    #[test]
    fn when_all_places_are_taken_the_greediest_network_loses_one() {
        let semaphore = Semaphore::new(1, 4);
        let first = semaphore.take(network(9), soon(), || false).unwrap();
        let (ended, ends) = mpsc::channel();
        thread::scope(|scope| {
            for (number, who) in [1, 1, 1, 2].into_iter().enumerate() {
                let (semaphore, ended) = (&semaphore, ended.clone());
                scope.spawn(move || {
                    ended
                        .send((who, semaphore.take(network(who), soon(), || false).is_ok()))
                        .unwrap()
                });
                wait_for(|| semaphore.lock().waiting.len() == number + 1);
            }
            scope.spawn(|| {
                ended
                    .send((3, semaphore.take(network(3), soon(), || false).is_ok()))
                    .unwrap()
            });
            assert_eq!(ends.recv().unwrap(), (1, false));
            assert!(
                semaphore.take(network(1), soon(), || false).is_err(),
                "it still has the most"
            );
            semaphore.lock().lengthen_delay(network(3), Instant::now());
            scope.spawn(|| {
                ended
                    .send((4, semaphore.take(network(4), soon(), || false).is_ok()))
                    .unwrap()
            });
            assert_eq!(ends.recv().unwrap(), (3, false), "it was wrong");
            drop(first);
            let mut ends: Vec<_> = (0..4).map(|_| ends.recv().unwrap()).collect();
            ends.sort();
            assert_eq!(ends, [(1, true), (1, true), (2, true), (4, true)]);
        });
    }

    #[test]
    fn a_turn_holds_no_lock_and_ends_at_a_panic() {
        let semaphore = Semaphore::new(2, 4);
        let first = semaphore.take(network(1), soon(), || false).unwrap();
        semaphore
            .take(network(2), soon(), || false)
            .unwrap()
            .wrong();
        assert!(semaphore.take(network(3), soon(), || false).is_ok());
        drop(first);
        let panic = thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _turn = semaphore.take(network(1), soon(), || false).unwrap();
                panic!("on purpose")
            });
            panics.join().is_err()
        });
        assert!(panic && semaphore.lock().running == 0);
    }
}
