//! Fair shares of resources that all peers of a server use, such as handlers and memory. One peer
//! may take three quarters while no other peer wants any. It may take from the last quarter only
//! while more is free than it already has. So there is always something left for a peer that needs
//! little, even if many peers take all they can. Where some of it cannot be refused, such as
//! buffers that are full already, a peer with little gets its part beyond the limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A resource with a limit for all peers together.
pub struct SharedLimit {
    most: usize,
    /// What one peer may have in any case.
    least: usize,
    used: AtomicUsize,
}

/// The part of a [`SharedLimit`] that one peer has taken.
pub struct LimitShare {
    limit: Arc<SharedLimit>,
    used: AtomicUsize,
}

impl SharedLimit {
    /// Creates a resource of `most` units; the caller defines the unit. One peer may have `least`
    /// units even if the others have taken more than all.
    pub fn new(most: usize, least: usize) -> Arc<SharedLimit> {
        Arc::new(SharedLimit {
            most,
            least,
            used: AtomicUsize::new(0),
        })
    }

    /// Returns how much all peers have taken.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

impl LimitShare {
    /// Creates the share of a peer that has taken nothing yet.
    pub fn of(limit: &Arc<SharedLimit>) -> LimitShare {
        LimitShare {
            limit: limit.clone(),
            used: AtomicUsize::new(0),
        }
    }

    /// Takes `amount` units. Takes nothing and returns `false` if that is more than the peer may
    /// have now.
    pub fn take(&self, amount: usize) -> bool {
        let fits = self.force(amount);
        if !fits {
            self.give_back(amount);
        }
        fits
    }

    /// Takes `amount` units in any case, and returns whether the peer may have them.
    pub fn force(&self, amount: usize) -> bool {
        let all = self.limit.used.fetch_add(amount, Ordering::Relaxed) + amount;
        self.fits(all, self.used.fetch_add(amount, Ordering::Relaxed) + amount)
    }

    /// Gives back `amount` units.
    pub fn give_back(&self, amount: usize) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
        self.limit.used.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Returns whether only the last quarter is free; then a caller should take nothing that it can
    /// do without.
    pub fn is_scarce(&self) -> bool {
        self.limit.used() >= self.limit.most - self.limit.most / 4
    }

    /// Returns whether more than a third is taken. One peer that takes equal parts for as long as
    /// they fit has more than that, however large they are.
    pub fn is_in_demand(&self) -> bool {
        self.limit.used() > self.limit.most / 3
    }

    fn fits(&self, all: usize, own: usize) -> bool {
        let free = self.limit.most.saturating_sub(all);
        own <= self.limit.least
            || all <= self.limit.most - if own > free { self.limit.most / 4 } else { 0 }
    }
}

/// The resources that the connections of one peer use together.
pub struct PeerShare {
    pub(crate) handlers: LimitShare,
    pub(crate) memory: LimitShare,
}

impl PeerShare {
    /// Creates a share without limits.
    pub(crate) fn unlimited() -> Arc<PeerShare> {
        let share = || LimitShare::of(&SharedLimit::new(usize::MAX, 0));
        Arc::new(PeerShare {
            handlers: share(),
            memory: share(),
        })
    }
}

/// Bytes of its peer's memory that a call holds.
pub struct Held {
    pub(crate) share: Arc<PeerShare>,
    bytes: usize,
    taken: usize,
}

impl Held {
    /// Creates an empty holding.
    pub(crate) fn new(share: Arc<PeerShare>) -> Held {
        Held {
            share,
            bytes: 0,
            taken: 0,
        }
    }

    /// Adds `bytes`; returns whether that is within the limit.
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        self.set(self.bytes + bytes)
    }

    /// Sets the number of bytes; returns whether that is within the limit. A smaller number is
    /// always allowed.
    pub(crate) fn set(&mut self, bytes: usize) -> bool {
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes < before {
            self.share.memory.give_back(before - bytes);
        }
        bytes <= before || self.share.memory.force(bytes - before)
    }

    /// Notes that a handler takes a message of `bytes`, which counts until the handler takes the
    /// next one.
    pub(crate) fn take(&mut self, bytes: usize) {
        let before = std::mem::replace(&mut self.taken, bytes);
        self.set(self.bytes.saturating_sub(before));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_leaves_the_last_quarter_to_others_and_the_limit_holds_for_all() {
        let limit = SharedLimit::new(128, 0);
        let greedy = LimitShare::of(&limit);
        assert_eq!((0..200).filter(|_| greedy.take(1)).count(), 96);
        assert!(greedy.is_scarce());
        let modest = LimitShare::of(&limit);
        assert!(modest.take(15) && modest.take(1));
        assert!(!modest.take(1) && LimitShare::of(&limit).take(1));
        assert_eq!(limit.used(), 113);
        greedy.give_back(96);
        assert!(!greedy.is_scarce());
        assert!(modest.take(79) && !modest.take(1));
        assert!(!modest.force(40), "it says so");
        assert_eq!(limit.used(), 136);
    }

    #[test]
    fn many_greedy_peers_leave_something_for_another() {
        let limit = SharedLimit::new(1 << 20, 0);
        for peers in 1..20 {
            let greedy: Vec<LimitShare> = (0..peers).map(|_| LimitShare::of(&limit)).collect();
            while greedy.iter().filter(|share| share.take(1 << 10)).count() > 0 {}
            let left = (1 << 20) - limit.used();
            assert!(left >= (1 << 20) / (peers + 2).max(4), "{peers}: {left}");
            assert!(LimitShare::of(&limit).take(1 << 10));
            limit.used.store(0, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_peer_gets_its_least_part_when_others_have_taken_more_than_all() {
        let limit = SharedLimit::new(64, 4);
        assert!(!LimitShare::of(&limit).force(100));
        let modest = LimitShare::of(&limit);
        assert!(modest.take(4) && !modest.take(1));
        modest.give_back(4);
        assert!(modest.take(1));
    }

    #[test]
    fn one_peer_may_take_all_of_a_tiny_limit() {
        let share = LimitShare::of(&SharedLimit::new(2, 0));
        assert!(share.take(1) && share.take(1) && !share.take(1));
    }
}
