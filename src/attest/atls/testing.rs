//! Mutation of valid inputs, for the tests of parsers.

/// A pseudo-random sequence (Marsaglia's xorshift64) that is the same in every run.
pub struct Xorshift(u64);

impl Xorshift {
    pub fn new(seed: u64) -> Self {
        Xorshift(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number from 0 to `end` - 1.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() >> 11) as usize % end
    }

    /// Returns `bytes` with one to four changes: a flipped bit, a random or special byte, a truncation, a copied or removed part.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..1 + self.below(4) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len());
            let end = at + self.below((bytes.len() - at).min(16)) + 1;
            match self.below(6) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.next() as u8,
                2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                3 => bytes.truncate(at),
                4 => {
                    let part = bytes[at..end].to_vec();
                    bytes.splice(at..at, part);
                }
                _ => drop(bytes.drain(at..end)),
            }
        }
    }
}
