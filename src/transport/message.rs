//! Messages that somebody else has sent: prost reads a limited number of pieces of their bytes.
//!
//! Prost takes at least two pieces for each field: its key, and its value or its length. So the
//! number of pieces bounds what the fields of any message take in memory, also those of messages
//! within it.

use std::fmt;

use prost::Message;
use prost::bytes::Buf;

/// Maximum number of pieces. The largest message of ours is a ticket with 64 components of
/// Kubernetes, which has 900 pieces; one of a real cluster has 200.
const PIECES: usize = 2048;
/// What is read instead of the bytes beyond them: no key, length or number of a field begins so.
const INVALID: [u8; 64] = [0xff; 64];

/// The bytes of a message that are not yet read.
pub struct Bounded<'a> {
    rest: &'a [u8],
    pieces: usize,
}

impl Bounded<'_> {
    /// Limits what is read of these bytes.
    pub fn new(rest: &[u8]) -> Bounded<'_> {
        Bounded { rest, pieces: 0 }
    }

    /// Returns whether the message has too many pieces. Then what was decoded is wrong.
    pub fn is_exceeded(&self) -> bool {
        self.pieces > PIECES
    }
}

impl Buf for Bounded<'_> {
    fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Returns the rest of the message, or as many invalid bytes. An empty rest would end the
    /// decoding sooner, but [`Buf`] does not allow that the length changes by itself.
    fn chunk(&self) -> &[u8] {
        if self.is_exceeded() {
            &INVALID[..self.rest.len().min(INVALID.len())]
        } else {
            self.rest
        }
    }

    fn advance(&mut self, count: usize) {
        self.rest = &self.rest[count..];
        self.pieces += 1;
    }
}

/// Why a message cannot be decoded, as a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undecodable {
    /// It has more pieces than any message of ours.
    TooManyFields,
    /// Its bytes are not those of such a message.
    Malformed(prost::DecodeError),
}

impl fmt::Display for Undecodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Undecodable::TooManyFields => f.write_str("it has too many fields"),
            Undecodable::Malformed(error) => error.fmt(f),
        }
    }
}

/// Decodes a message that somebody else has sent. A message of too many fields is refused: a field
/// of 2 bytes on the wire can take 100 bytes of memory.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, Undecodable> {
    let mut bounded = Bounded::new(bytes);
    let decoded = M::decode(&mut bounded);
    if bounded.is_exceeded() {
        Err(Undecodable::TooManyFields)
    } else {
        decoded.map_err(Undecodable::Malformed)
    }
}
