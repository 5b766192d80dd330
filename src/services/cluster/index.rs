//! Finds the items of a list by their keys. Stores only the hashes of the keys: a map with copies of the
//! keys needs several times as much memory.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hash, RandomState};

/// The numbers of items, by the hashes of their keys. An item may have several keys, and items may share
/// one. The hash is SipHash with a random key, so no
/// caller can choose names that collide.
#[derive(Default)]
pub struct Index {
    hasher: RandomState,
    entries: BTreeSet<(u64, usize)>,
}

impl Index {
    /// Adds a key of the item with this number.
    pub fn insert(&mut self, key: impl Hash, number: usize) {
        self.entries.insert((self.hasher.hash_one(key), number));
    }

    /// Removes a key of the item with this number.
    pub fn remove(&mut self, key: impl Hash, number: usize) {
        self.entries.remove(&(self.hasher.hash_one(key), number));
    }

    /// Returns the numbers of all items with this key, in ascending order. Two keys may have the same
    /// hash, so the caller has to check that each item really has this key.
    pub fn with_hash_of(&self, key: impl Hash) -> impl Iterator<Item = usize> {
        let hash = self.hasher.hash_one(key);
        let range = self.entries.range((hash, 0)..=(hash, usize::MAX));
        range.map(|(_, number)| *number)
    }
}
