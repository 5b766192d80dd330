//! HTTP/2 (RFC 9113) with HPACK (RFC 7541), to the extent that gRPC needs it: client and server, no
//! server push, priorities are ignored.
//!
//! [`Connection`] is a state machine. Bytes go in through [`Connection::receive`]; events and bytes
//! come out ([`Connection::output`]); the caller passes the time in. It has no socket, no clock and
//! no thread. It stores no bodies: an [`Event::Data`] borrows from the received bytes, and data to
//! be sent is framed at once into the output as far as the peer's flow-control windows allow.
//!
//! - `connection`: received and sent frames, streams, flow control, settings, the end of the
//!   connection.
//! - `frame`: the wire format and its numbers.
//! - `headers`: lists of header fields, and the rules for malformed ones.
//! - `hpack`, `huffman`: compression of header fields.
//! - `streams`: the map from stream identifier to state.
//! - `budget`: limits for frames that cost work and carry no data.
//!
//! The life of a stream (§5.1), here for the server; the client's is the mirror image. PUSH_PROMISE
//! is not supported.
//!
//! ```text
//!             HEADERS                    peer: END_STREAM
//!   idle ───────────────► open ───────────────────────────► half-closed (remote)
//!                           │                                      │
//!                           │ us: END_STREAM                       │ us: END_STREAM
//!                           ▼                peer: END_STREAM      ▼
//!                 half-closed (local) ─────────────────────────► closed (Ended)
//!
//!   any but idle ── RST_STREAM from the peer ──► closed (ResetByPeer): more frames are a stream error
//!                ── RST_STREAM from us ────────► closed (ResetByUs): frames on their way are ignored
//! ```
//!
//! The life of a connection, with what each state expects next:
//!
//! ```text
//!   preface (server only) ──► SETTINGS ──► running ── shutdown() ──► draining ── PING answered ──► drained
//!        │                        │           │      GOAWAY(2^31-1), PING          GOAWAY(last)
//!        └────────────────────────┴───────────┴──── a broken rule ──► GOAWAY(code), dead
//! ```

mod budget;
mod connection;
mod frame;
mod headers;
mod hpack;
mod huffman;
mod streams;

pub use budget::Allowance;
pub use connection::{Connection, Error, Event, Limits, SendError};
pub use frame::ErrorCode;
pub use headers::HeaderList;
pub use hpack::{Field, Indexing};
pub(crate) use streams::StreamMap;

#[cfg(test)]
pub(crate) mod testing {
    /// Random numbers by xorshift64, so that each run makes the same mutations.
    pub(crate) struct Random(u64);

    impl Random {
        pub(crate) fn new(seed: u64) -> Random {
            Random(seed)
        }

        /// Returns a number below `bound`, which must not be 0.
        pub(crate) fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % bound as u64) as usize
        }

        /// Returns `seed` with up to four changes: bytes are changed, inserted or removed, or the
        /// end is cut off.
        pub(crate) fn mutate(&mut self, seed: &[u8]) -> Vec<u8> {
            let mut bytes = seed.to_vec();
            for _ in 0..=self.below(4) {
                let at = self.below(bytes.len().max(1)).min(bytes.len());
                match self.below(8) {
                    0 => bytes.truncate(at),
                    1 if at < bytes.len() => drop(bytes.remove(at)),
                    2 => bytes.insert(at, self.below(256) as u8),
                    3 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                    _ if at < bytes.len() => bytes[at] = self.below(256) as u8,
                    _ => {}
                }
            }
            bytes
        }
    }

    pub(crate) fn unhex(text: &str) -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    }
}

#[cfg(test)]
mod tests;
