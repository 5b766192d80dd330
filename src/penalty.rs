//! Growing delays for peers that were wrong: what costs this machine work, or lets a peer guess, it may not repeat at will.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// After a peer's first wrong attempt; doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// Peers remembered; beyond that, unknown ones wait until entries have expired.
const MAX_PEERS: usize = 1024;

/// Who was wrong, how often, and until when it waits.
#[derive(Default)]
pub struct Penalties(Mutex<HashMap<IpAddr, Penalty>>);

struct Penalty {
    count: u32,
    until: Instant,
}

impl Penalties {
    /// Makes an attempt for `peer` at `now`, one at a time. An error for which `is_wrong` holds delays the peer's next one,
    /// success forgives all. The outer error: not attempted, because the peer has to wait this long.
    pub fn attempt<T, E>(
        &self,
        peer: IpAddr,
        now: Instant,
        is_wrong: impl FnOnce(&E) -> bool,
        attempt: impl FnOnce() -> Result<T, E>,
    ) -> Result<Result<T, E>, Duration> {
        let mut penalties = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        penalties.retain(|_, penalty| now < penalty.until + LONGEST_DELAY);
        let count = match penalties.get(&peer) {
            Some(penalty) if now < penalty.until => return Err(penalty.until - now),
            Some(penalty) => penalty.count,
            None if penalties.len() >= MAX_PEERS => return Err(LONGEST_DELAY),
            None => 0,
        };
        let result = attempt();
        match &result {
            Ok(_) => drop(penalties.remove(&peer)),
            Err(error) if is_wrong(error) => {
                let delay = FIRST_DELAY.saturating_mul(1 << count.min(10)).min(LONGEST_DELAY);
                penalties.insert(peer, Penalty { count: count + 1, until: now + delay });
            }
            Err(_) => {}
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const RIGHT: Result<(), &str> = Ok(());
    const WRONG: Result<(), &str> = Err("wrong");

    fn attempt(
        all: &Penalties,
        peer: IpAddr,
        now: Instant,
        result: Result<(), &'static str>,
    ) -> Result<Result<(), &'static str>, Duration> {
        all.attempt(peer, now, |error| *error == "wrong", || result)
    }

    #[test]
    fn delays_grow_and_even_a_right_attempt_has_to_wait() {
        let (all, mut now) = (Penalties::default(), Instant::now());
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(attempt(&all, PEER, now, WRONG), Ok(WRONG));
            assert_eq!(attempt(&all, PEER, now, RIGHT), Err(Duration::from_secs(seconds)));
            now += Duration::from_secs(seconds);
        }
        assert_eq!(attempt(&all, PEER, now, RIGHT), Ok(RIGHT));
        assert_eq!(attempt(&all, PEER, now, WRONG), Ok(WRONG));
        assert_eq!(attempt(&all, PEER, now, RIGHT), Err(Duration::from_secs(1)));
    }

    #[test]
    fn one_peer_does_not_delay_another() {
        let (all, now) = (Penalties::default(), Instant::now());
        assert_eq!(attempt(&all, PEER, now, WRONG), Ok(WRONG));
        assert_eq!(attempt(&all, "::1".parse().unwrap(), now, RIGHT), Ok(RIGHT));
    }

    #[test]
    fn an_error_that_is_not_the_peers_costs_it_nothing() {
        let (all, now) = (Penalties::default(), Instant::now());
        assert_eq!(attempt(&all, PEER, now, Err("the disk broke")), Ok(Err("the disk broke")));
        assert_eq!(attempt(&all, PEER, now, RIGHT), Ok(RIGHT));
    }

    #[test]
    fn only_so_many_peers_are_remembered_and_they_are_forgotten_again() {
        let (all, now) = (Penalties::default(), Instant::now());
        for number in 0..1024u32 {
            assert_eq!(attempt(&all, IpAddr::V4(number.into()), now, WRONG), Ok(WRONG));
        }
        assert_eq!(attempt(&all, PEER, now, WRONG), Err(LONGEST_DELAY));
        assert_eq!(attempt(&all, PEER, now + FIRST_DELAY + LONGEST_DELAY, WRONG), Ok(WRONG));
    }
}
