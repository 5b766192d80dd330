//! Byte buffers for messages, which may carry keys: they are wiped, at the speed of a plain buffer.

/// Overwrites the bytes of a message, which may carry keys.
pub fn wipe(bytes: &mut [u8]) {
    bytes.fill(0);
    // This barrier keeps the compiler from removing the fill as a dead store. Unlike volatile
    // writes of single bytes, it costs nothing.
    zeroize::optimization_barrier(bytes);
}

/// Makes room for `more` bytes. Unlike a vector that grows by itself, it leaves no unwiped copy
/// behind.
pub fn reserve(buffer: &mut Vec<u8>, more: usize) {
    if buffer.capacity() - buffer.len() < more {
        let mut grown = Vec::with_capacity((2 * buffer.capacity()).max(buffer.len() + more));
        grown.extend_from_slice(buffer);
        wipe(buffer);
        *buffer = grown;
    }
}

/// The bytes of a message; wiped on drop.
#[derive(Default)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    /// Creates an empty buffer with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Bytes {
        Bytes(Vec::with_capacity(capacity))
    }

    /// Appends bytes without leaving an unwiped copy in a moved allocation. The capacity stays
    /// within `expected` bytes as long as the content does.
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

    /// Wipes the content and keeps the memory for another message. New memory from the system costs
    /// more time than the copy into it.
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
