//! Pauses between retries. They double, with jitter, so that many nodes that lost power together do
//! not retry together.

use std::time::Duration;

use crate::crypto::random;

/// The pauses of one action that is retried.
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    /// Creates pauses that begin at `first` and double up to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff {
            next: first,
            longest,
        }
    }

    /// Returns the next pause: a random duration between half of the current length and the whole
    /// of it.
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
