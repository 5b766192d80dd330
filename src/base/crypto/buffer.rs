//! Buffers of bytes that may be secret, as those of messages that carry keys: wiped, at the speed of a plain buffer.

/// Overwrites bytes that may have been part of a message: messages carry keys.
pub fn wipe(bytes: &mut [u8]) {
    bytes.fill(0);
    // keeps the compiler from dropping the fill as a dead store, and costs nothing, unlike volatile writes byte by byte
    zeroize::optimization_barrier(bytes);
}

/// Makes room for `more` bytes without leaving an unwiped copy behind, as a vector does that grows by itself.
pub fn reserve(buffer: &mut Vec<u8>, more: usize) {
    if buffer.capacity() - buffer.len() < more {
        let mut grown = Vec::with_capacity((2 * buffer.capacity()).max(buffer.len() + more));
        grown.extend_from_slice(buffer);
        wipe(buffer);
        *buffer = grown;
    }
}

/// Message bytes, wiped on drop.
#[derive(Default)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    /// Empty.
    pub fn with_capacity(capacity: usize) -> Bytes {
        Bytes(Vec::with_capacity(capacity))
    }

    /// Appends without leaving an unwiped copy behind in a moved allocation; it never grows beyond `expected` bytes before it must.
    pub fn extend(&mut self, more: &[u8], expected: usize) {
        let needed = self.0.len() + more.len();
        if needed > self.0.capacity() {
            let mut grown = Bytes::with_capacity(
                (2 * self.0.capacity())
                    .max(needed)
                    .min(expected.max(needed)),
            );
            grown.0.extend_from_slice(&self.0);
            std::mem::swap(self, &mut grown);
        }
        self.0.extend_from_slice(more);
    }

    /// Wipes the content; the room remains for another message. Room that comes anew from the system costs more time than
    /// the copying into it.
    pub fn clear(&mut self) {
        wipe(&mut self.0);
        self.0.clear();
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        wipe(&mut self.0);
    }
}
