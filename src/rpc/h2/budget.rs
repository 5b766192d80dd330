//! Limits for frames that make us work and carry no request data.

use std::time::Instant;

/// The size of a token bucket.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Maximum number of events in one burst.
    pub burst: u32,
    /// Number of events per second in the long run; at least 1.
    pub per_second: u32,
}

pub(super) struct Budget {
    allowance: Allowance,
    left: u32,
    filled: Option<Instant>,
}

impl Budget {
    pub(super) fn new(allowance: Allowance) -> Budget {
        Budget {
            allowance,
            left: allowance.burst,
            filled: None,
        }
    }

    /// Takes one token; returns `false` if none is left.
    pub(super) fn spend(&mut self, now: Instant) -> bool {
        let filled = *self.filled.get_or_insert(now);
        if self.left == 0 {
            self.fill(now, filled);
        }
        let enough = self.left > 0;
        self.left = self.left.saturating_sub(1);
        enough
    }

    /// Adds tokens that the peer earned by useful work.
    pub(super) fn earn(&mut self, amount: u32) {
        self.left = self.left.saturating_add(amount).min(self.allowance.burst);
    }

    fn fill(&mut self, now: Instant, filled: Instant) {
        let due = now.saturating_duration_since(filled).as_millis()
            * u128::from(self.allowance.per_second)
            / 1000;
        if due > 0 {
            self.earn(u32::try_from(due).unwrap_or(u32::MAX));
            self.filled = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_burst_is_followed_by_the_steady_rate() {
        let start = Instant::now();
        let mut budget = Budget::new(Allowance {
            burst: 10,
            per_second: 5,
        });
        let mut spend = |at: u64| {
            (0..100)
                .filter(|_| budget.spend(start + Duration::from_millis(at)))
                .count()
        };
        assert_eq!(spend(0), 10);
        assert_eq!(spend(100), 0);
        assert_eq!(spend(1000), 5);
        assert_eq!(spend(1400), 2);
        assert_eq!(spend(3_600_000), 10, "never more than the burst");
    }

    #[test]
    fn useful_work_earns() {
        let now = Instant::now();
        let mut budget = Budget::new(Allowance {
            burst: 2,
            per_second: 1,
        });
        assert!(budget.spend(now) && budget.spend(now) && !budget.spend(now));
        budget.earn(1);
        assert!(budget.spend(now) && !budget.spend(now));
    }
}
