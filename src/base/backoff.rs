//! Pauses between tries: doubling, with jitter so that a fleet that lost power together does not ask together.

use std::time::Duration;

use crate::crypto::random;

/// The pauses of one retried action.
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    /// Starts at `first`, doubles up to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff {
            next: first,
            longest,
        }
    }

    /// The next pause: between half of the current length and all of it.
    pub fn pause(&mut self) -> Duration {
        let full = self.next;
        self.next = (full * 2).min(self.longest);
        let share = f64::from(u16::from_le_bytes(random())) / f64::from(u16::MAX);
        full.mul_f64(0.5 + share / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_stay_within_half_and_whole() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        for full in [1, 2, 4, 5, 5] {
            let pause = backoff.pause();
            assert!(
                pause >= Duration::from_millis(full * 500) && pause <= Duration::from_secs(full),
                "{pause:?}"
            );
        }
    }
}
