//! A map by stream identifier.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from stream identifier to `V`. Each frame needs several look-ups, and with the standard
/// library's hash function they would cost more than HPACK. A peer that chooses colliding
/// identifiers slows down a map of at most `H2Limits::streams` entries.
pub(crate) type StreamMap<V> = HashMap<u32, V, BuildHasherDefault<StreamHasher>>;

/// Fibonacci hashing: consecutive identifiers get different places.
#[derive(Default)]
pub(crate) struct StreamHasher(u64);

impl Hasher for StreamHasher {
    fn write_u32(&mut self, stream: u32) {
        // 2^64 divided by the golden ratio.
        self.0 = u64::from(stream).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
