//! What the peers of a server have in common, as handlers and memory. One peer may take three quarters of it while nobody
//! else wants any. Of the last quarter a peer takes only while more is free than it has itself: so however many take all they
//! can get, some is left for one who comes with little.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What all peers have together.
pub struct Pot {
    most: usize,
    used: AtomicUsize,
}

/// One peer's part of a [`Pot`].
pub struct Share {
    pot: Arc<Pot>,
    used: AtomicUsize,
}

impl Pot {
    /// So many, of whatever it is.
    pub fn new(most: usize) -> Arc<Pot> {
        Arc::new(Pot {
            most,
            used: AtomicUsize::new(0),
        })
    }

    /// What is taken by all.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

impl Share {
    /// A peer's, of which nothing is taken yet.
    pub fn of(pot: &Arc<Pot>) -> Share {
        Share {
            pot: pot.clone(),
            used: AtomicUsize::new(0),
        }
    }

    /// Takes `amount`, or nothing and returns `false` if that is more than the peer may have now.
    pub fn take(&self, amount: usize) -> bool {
        let fits = self.force(amount);
        if !fits {
            self.give_back(amount);
        }
        fits
    }

    /// Takes `amount` in any case, and returns whether the peer may have it.
    pub fn force(&self, amount: usize) -> bool {
        let all = self.pot.used.fetch_add(amount, Ordering::Relaxed) + amount;
        self.fits(all, self.used.fetch_add(amount, Ordering::Relaxed) + amount)
    }

    /// Gives back what was taken.
    pub fn give_back(&self, amount: usize) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
        self.pot.used.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Whether only the last quarter is left, and nothing should be taken that one can do without.
    pub fn is_scarce(&self) -> bool {
        self.pot.used() >= self.pot.most - self.pot.most / 4
    }

    fn fits(&self, all: usize, own: usize) -> bool {
        let free = self.pot.most.saturating_sub(all);
        all <= self.pot.most - if own > free { self.pot.most / 4 } else { 0 }
    }
}

/// What the connections of one peer take together.
pub struct PeerShare {
    pub(crate) handlers: Share,
    pub(crate) memory: Share,
}

impl PeerShare {
    /// Of what has no limit.
    pub(crate) fn unlimited() -> Arc<PeerShare> {
        let share = || Share::of(&Pot::new(usize::MAX));
        Arc::new(PeerShare {
            handlers: share(),
            memory: share(),
        })
    }
}

/// Bytes that a call holds of its peer's memory.
pub struct Held {
    pub(crate) share: Arc<PeerShare>,
    bytes: usize,
    taken: usize,
}

impl Held {
    /// Nothing yet.
    pub(crate) fn new(share: Arc<PeerShare>) -> Held {
        Held {
            share,
            bytes: 0,
            taken: 0,
        }
    }

    /// Whether `bytes` more are within the limit.
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        self.set(self.bytes + bytes)
    }

    /// Whether this many are within the limit, if they are more than before.
    pub(crate) fn set(&mut self, bytes: usize) -> bool {
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes < before {
            self.share.memory.give_back(before - bytes);
        }
        bytes <= before || self.share.memory.force(bytes - before)
    }

    /// A handler takes a message of `bytes`, and has it until it takes the next.
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
    fn a_peer_leaves_the_last_quarter_to_the_others_and_all_have_no_more_than_there_is() {
        let pot = Pot::new(128);
        let greedy = Share::of(&pot);
        assert_eq!((0..200).filter(|_| greedy.take(1)).count(), 96);
        assert!(greedy.is_scarce());
        let modest = Share::of(&pot);
        assert!(modest.take(15) && modest.take(1));
        assert!(!modest.take(1) && Share::of(&pot).take(1));
        assert_eq!(pot.used(), 113);
        greedy.give_back(96);
        assert!(!greedy.is_scarce());
        assert!(modest.take(79) && !modest.take(1));
        assert!(!modest.force(40), "it says so");
        assert_eq!(pot.used(), 136);
    }

    #[test]
    fn however_many_are_greedy_something_is_left_for_another() {
        let pot = Pot::new(1 << 20);
        for peers in 1..20 {
            let greedy: Vec<Share> = (0..peers).map(|_| Share::of(&pot)).collect();
            while greedy.iter().filter(|share| share.take(1 << 10)).count() > 0 {}
            let left = (1 << 20) - pot.used();
            assert!(left >= (1 << 20) / (peers + 2).max(4), "{peers}: {left}");
            assert!(Share::of(&pot).take(1 << 10));
            pot.used.store(0, Ordering::Relaxed);
        }
    }

    #[test]
    fn of_too_little_to_be_divided_one_peer_may_have_all() {
        let share = Share::of(&Pot::new(2));
        assert!(share.take(1) && share.take(1) && !share.take(1));
    }
}
