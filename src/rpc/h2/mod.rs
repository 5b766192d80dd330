//! HTTP/2 (RFC 9113) with HPACK (RFC 7541), as far as gRPC needs it: client and server, no push, priorities ignored.
//!
//! [`Connection`] is a state machine: bytes in ([`Connection::receive`]), events and bytes out ([`Connection::output`]),
//! time passed in. It has no socket, no clock and no thread, and it keeps no bodies: an [`Event::Data`] borrows from the
//! bytes that came in, and what is sent is framed at once into the output as far as the peer's windows allow.
//!
//! - `connection`: frames in and out, streams, flow control, settings, the end of the connection.
//! - `frame`: the wire format and its numbers. `headers`: lists of fields, and which are malformed.
//! - `hpack`, `huffman`: compression of fields.
//! - `streams`: what is kept by stream. `budget`: how many frames without use a peer may send.
//!
//! The life of a stream (§5.1), here for the server; the client's is the mirror image. PUSH_PROMISE does not exist for us.
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
//! The life of a connection: what each state expects next.
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
    /// xorshift64: the same mutations in each run.
    pub(crate) struct Random(u64);

    impl Random {
        pub(crate) fn new(seed: u64) -> Random {
            Random(seed)
        }

        /// Below `bound`, which is not 0.
        pub(crate) fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % bound as u64) as usize
        }

        /// `seed` with up to four bytes changed, inserted or removed, or cut short.
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
