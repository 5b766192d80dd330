//! Checks init secrets: bcrypt against the hash from the metadata service, with growing delays
//! after wrong secrets.

use std::fmt;
use std::time::{Duration, Instant};

use base::network::Network;
use base::network::semaphore::{Busy, Semaphore};

/// Maximum bytes of a secret: bcrypt ignores the rest (its specification). Constellation's secrets
/// have 32 characters.
const MAX_SECRET: usize = 72;
/// Highest accepted cost of a hash, as a power of two: about 5 s for a check. Constellation uses
/// the cost 10. The metadata service could demand a cost of 31, with which one check takes days.
const MAX_COST: u32 = 15;
/// A check uses a processor for about 100 ms, so only one runs at a time. Up to this many callers,
/// each with a thread, may wait.
const PLACES: usize = 16;
/// Longest wait of a caller: the longest delay of a network, plus some checks of other callers.
const LONGEST_WAIT: Duration = Duration::from_secs(90);

/// Checks secrets against one hash.
pub struct SecretGuard {
    hash: String,
    turns: Semaphore,
}

/// How a check ended.
#[derive(Debug, PartialEq, Eq)]
pub enum GuardOutcome {
    /// The secret is right.
    Right,
    /// The secret is wrong.
    Wrong,
    /// The secret was not checked: too many callers wait, or the caller has disconnected.
    Busy(Busy),
}

/// Why a hash cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub enum BadHash {
    /// It is not a bcrypt hash. The field is its length in bytes.
    Form(usize),
    /// A check of a secret would take too long. The field is the cost in the hash.
    Cost(u32),
}

impl fmt::Display for BadHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the init secret's hash in the metadata ")?;
        match self {
            BadHash::Form(length) => write!(f, "is not a bcrypt hash ({length} bytes)"),
            BadHash::Cost(cost) => write!(f, "has cost {cost}, expected at most {MAX_COST}"),
        }
    }
}

impl std::error::Error for BadHash {}

impl SecretGuard {
    /// Creates a guard for a bcrypt hash from the metadata service. Refuses a hash that no secret
    /// can match, and a hash whose check takes too long.
    pub fn new(hash: &str) -> Result<SecretGuard, BadHash> {
        let hash = hash.trim();
        // an HTTP error page is not a hash: Constellation accepted such a page and then refused
        // every secret
        let parts = hash.parse::<bcrypt::HashParts>();
        let parts = parts.map_err(|_| BadHash::Form(hash.len()))?;
        if parts.get_cost() > MAX_COST {
            return Err(BadHash::Cost(parts.get_cost()));
        }
        Ok(SecretGuard {
            hash: hash.into(),
            turns: Semaphore::new(1, PLACES),
        })
    }

    /// Checks a secret that came from `network`. While `is_over` returns false, waits for the delay
    /// of the caller's network after its last wrong secret, and for the checks of other callers. So
    /// a right secret is accepted even if it comes soon after a wrong one.
    pub fn check(
        &self,
        network: Network,
        secret: &[u8],
        is_over: impl Fn() -> bool,
    ) -> GuardOutcome {
        let turn = match self
            .turns
            .take(network, Instant::now() + LONGEST_WAIT, is_over)
        {
            Ok(turn) => turn,
            Err(busy) => return GuardOutcome::Busy(busy),
        };
        if secret.len() <= MAX_SECRET && bcrypt::verify(secret, &self.hash).unwrap_or(false) {
            turn.right();
            GuardOutcome::Right
        } else {
            turn.wrong();
            GuardOutcome::Wrong
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Network = Network::UNKNOWN;

    fn guard() -> SecretGuard {
        SecretGuard::new(&bcrypt::hash("correct", 4).unwrap()).unwrap()
    }

    #[test]
    fn the_right_secret_passes_and_a_wrong_one_does_not() {
        let guard = guard();
        assert_eq!(guard.check(PEER, b"correct", || false), GuardOutcome::Right);
        assert_eq!(guard.check(PEER, b"wrong", || false), GuardOutcome::Wrong);
    }

    #[test]
    fn the_right_secret_passes_a_moment_after_a_wrong_one_and_not_before_the_delay_is_over() {
        let (guard, started) = (guard(), Instant::now());
        assert_eq!(guard.check(PEER, b"wrong", || false), GuardOutcome::Wrong);
        let gone = Instant::now() + Duration::from_millis(200);
        assert!(matches!(
            guard.check(PEER, b"correct", || Instant::now() > gone),
            GuardOutcome::Busy(_)
        ));
        assert_eq!(guard.check(PEER, b"correct", || false), GuardOutcome::Right);
        assert!(started.elapsed() >= Duration::from_secs(1));
    }

    #[test]
    fn what_is_no_bcrypt_hash_is_refused_at_start() {
        for (bad, length) in [("<html>404</html>", 16), ("", 0)] {
            assert_eq!(SecretGuard::new(bad).err(), Some(BadHash::Form(length)));
        }
        assert!(
            SecretGuard::new("$2a$10$WxJIGsXcJCZqGjVxOqXOSeJ5cOUVUWzzNGnZ8B4JCyYcnzdtYJuVm\n")
                .is_ok()
        );
    }

    #[test]
    fn a_hash_whose_check_would_take_for_ever_is_refused_at_start() {
        let hash =
            |cost| format!("$2a${cost}$WxJIGsXcJCZqGjVxOqXOSeJ5cOUVUWzzNGnZ8B4JCyYcnzdtYJuVm");
        assert!(SecretGuard::new(&hash(15)).is_ok());
        for cost in [16, 31] {
            let bad = SecretGuard::new(&hash(cost)).err();
            assert_eq!(bad, Some(BadHash::Cost(cost)));
        }
    }
}
