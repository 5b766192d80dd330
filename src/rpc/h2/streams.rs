//! A map by stream identifier.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Several look-ups a frame: the standard library's hash function would cost a call more than HPACK does. Whoever chooses
/// identifiers that collide slows down a map of no more entries than `Limits::streams`.
pub(crate) type StreamMap<V> = HashMap<u32, V, BuildHasherDefault<StreamHasher>>;

/// Fibonacci hashing: identifiers in a row fall into places of their own.
#[derive(Default)]
pub(crate) struct StreamHasher(u64);

impl Hasher for StreamHasher {
    fn write_u32(&mut self, stream: u32) {
        // 2^64 / the golden ratio
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
