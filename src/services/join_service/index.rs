//! Finds things by keys that are not stored, only their hashes: a map with keys of its own would need
//! several times as much memory.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hash, RandomState};

/// The numbers of things, by the hashes of their keys. The hash is SipHash with a random key, so no
/// caller can choose names that collide.
#[derive(Default)]
pub struct Index {
    hasher: RandomState,
    entries: BTreeSet<(u64, usize)>,
}

impl Index {
    /// Adds a key of the thing with this number.
    pub fn insert(&mut self, key: impl Hash, number: usize) {
        self.entries.insert((self.hasher.hash_one(key), number));
    }

    /// Removes a key of the thing with this number.
    pub fn remove(&mut self, key: impl Hash, number: usize) {
        self.entries.remove(&(self.hasher.hash_one(key), number));
    }

    /// Returns the numbers of all things with this key, in their order. Another key may have the same
    /// hash, so the caller compares it with the thing.
    pub fn with_hash_of(&self, key: impl Hash) -> impl Iterator<Item = usize> {
        let hash = self.hasher.hash_one(key);
        let range = self.entries.range((hash, 0)..=(hash, usize::MAX));
        range.map(|(_, number)| *number)
    }
}
