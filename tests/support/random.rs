//! Pseudo-random numbers for tests, the same in each run.

/// A sequence of pseudo-random numbers (Marsaglia's xorshift64).
pub struct Random(u64);

impl Random {
    /// Starts the sequence of this number.
    pub fn new(seed: u64) -> Random {
        // 2^64 divided by the golden ratio spreads small numbers; a state of 0 would stay 0.
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number.
    #[allow(clippy::should_implement_trait)] // never ends, so it is not an iterator
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound.max(1)
    }
}
