//! The init secret's guard: bcrypt against the hash from the metadata service, with growing delays after wrong ones.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::penalty::Penalties;

/// bcrypt looks at no more of a secret (its specification); the old system's are 32 characters.
const MAX_SECRET: usize = 72;
/// Highest cost of a hash, a power of two: about 5 s a check. The old system's is 10; the metadata service could ask for 31,
/// with which one check takes days.
const MAX_COST: u32 = 15;

/// Guards one hash.
pub struct SecretGuard {
    hash: String,
    penalties: Penalties,
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
        Ok(SecretGuard { hash: hash.into(), penalties: Penalties::default() })
    }

    /// Checks a secret that came from `peer` at `now`. One check at a time: each costs about 100 ms of CPU.
    pub fn check(&self, peer: IpAddr, secret: &[u8], now: Instant) -> Verdict {
        let is_right = || secret.len() <= MAX_SECRET && bcrypt::verify(secret, &self.hash).unwrap_or(false);
        match self.penalties.attempt(peer, now, |()| true, || is_right().then_some(()).ok_or(())) {
            Ok(Ok(())) => Verdict::Right,
            Ok(Err(())) => Verdict::Wrong,
            Err(time) => Verdict::Wait(time),
        }
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
    fn after_a_wrong_secret_even_the_right_one_has_to_wait() {
        let (guard, now) = (guard(), Instant::now());
        assert_eq!(guard.check(PEER, b"wrong", now), Verdict::Wrong);
        assert_eq!(guard.check(PEER, b"correct", now), Verdict::Wait(Duration::from_secs(1)));
        assert_eq!(guard.check(PEER, b"correct", now + Duration::from_secs(1)), Verdict::Right);
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
