//! The init secret's guard: bcrypt against the hash from the metadata service, with growing delays after wrong ones.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// After the first wrong secret of a peer; doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// Peers remembered; beyond that, unknown ones wait until entries have expired.
const MAX_PEERS: usize = 1024;
/// bcrypt looks at no more of a secret (its specification); the old system's are 32 characters.
const MAX_SECRET: usize = 72;
/// Highest cost of a hash, a power of two: about 5 s a check. The old system's is 10; the metadata service could ask for 31,
/// with which one check takes days.
const MAX_COST: u32 = 15;

/// Guards one hash.
pub struct SecretGuard {
    hash: String,
    failures: Mutex<HashMap<IpAddr, Failures>>,
}

struct Failures {
    count: u32,
    until: Instant,
}

/// How a check ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The secret is right.
    Right,
    /// It is not.
    Wrong,
    /// Not looked at: the peer has to wait this long after its last wrong one.
    Wait(Duration),
}

impl SecretGuard {
    /// A guard for a bcrypt hash as the metadata service gives it. Refuses what no secret could ever match.
    pub fn new(hash: &str) -> Result<SecretGuard, String> {
        let hash = hash.trim();
        // an HTTP error page is no hash: the old system took one for it and then refused everybody
        let parts = hash
            .parse::<bcrypt::HashParts>()
            .map_err(|_| format!("the init secret's hash in the metadata is no bcrypt hash ({} bytes)", hash.len()))?;
        if parts.get_cost() > MAX_COST {
            let cost = parts.get_cost();
            return Err(format!("the init secret's hash in the metadata has cost {cost}, expected at most {MAX_COST}"));
        }
        Ok(SecretGuard { hash: hash.into(), failures: Mutex::default() })
    }

    /// Checks a secret that came from `peer` at `now`. One check at a time: each costs about 100 ms of CPU.
    pub fn check(&self, peer: IpAddr, secret: &[u8], now: Instant) -> Verdict {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|_, failure| now < failure.until + LONGEST_DELAY);
        let count = match failures.get(&peer) {
            Some(failure) if now < failure.until => return Verdict::Wait(failure.until - now),
            Some(failure) => failure.count,
            None if failures.len() >= MAX_PEERS => return Verdict::Wait(LONGEST_DELAY),
            None => 0,
        };
        if secret.len() <= MAX_SECRET && bcrypt::verify(secret, &self.hash).unwrap_or(false) {
            failures.remove(&peer);
            return Verdict::Right;
        }
        let delay = FIRST_DELAY.saturating_mul(1 << count.min(10)).min(LONGEST_DELAY);
        failures.insert(peer, Failures { count: count + 1, until: now + delay });
        Verdict::Wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn guard() -> SecretGuard {
        SecretGuard::new(&bcrypt::hash("correct", 4).unwrap()).unwrap()
    }

    #[test]
    fn the_right_secret_passes_and_a_wrong_one_does_not() {
        let (guard, now) = (guard(), Instant::now());
        assert_eq!(guard.check(PEER, b"correct", now), Verdict::Right);
        assert_eq!(guard.check(PEER, b"wrong", now), Verdict::Wrong);
    }

    #[test]
    fn delays_grow_and_even_the_right_secret_has_to_wait() {
        let guard = guard();
        let mut now = Instant::now();
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(guard.check(PEER, b"wrong", now), Verdict::Wrong);
            assert_eq!(guard.check(PEER, b"correct", now), Verdict::Wait(Duration::from_secs(seconds)));
            now += Duration::from_secs(seconds);
        }
        assert_eq!(guard.check(PEER, b"correct", now), Verdict::Right);
    }

    #[test]
    fn one_peer_does_not_delay_another() {
        let (guard, now) = (guard(), Instant::now());
        assert_eq!(guard.check(PEER, b"wrong", now), Verdict::Wrong);
        assert_eq!(guard.check("::1".parse().unwrap(), b"correct", now), Verdict::Right);
    }

    #[test]
    fn what_is_no_bcrypt_hash_is_refused_at_start() {
        assert!(SecretGuard::new("<html>404</html>").is_err());
        assert!(SecretGuard::new("").is_err());
        assert!(SecretGuard::new("$2a$10$WxJIGsXcJCZqGjVxOqXOSeJ5cOUVUWzzNGnZ8B4JCyYcnzdtYJuVm\n").is_ok());
    }

    #[test]
    fn a_hash_whose_check_would_take_for_ever_is_refused_at_start() {
        let hash = |cost| format!("$2a${cost}$WxJIGsXcJCZqGjVxOqXOSeJ5cOUVUWzzNGnZ8B4JCyYcnzdtYJuVm");
        assert!(SecretGuard::new(&hash(15)).is_ok());
        for cost in [16, 31] {
            assert!(SecretGuard::new(&hash(cost)).err().unwrap().contains("expected at most 15"));
        }
    }
}
