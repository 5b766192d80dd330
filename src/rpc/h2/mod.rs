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
pub use connection::{Connection, Error, Event, H2Limits, SendError};
pub use frame::ErrorCode;
pub use headers::HeaderList;
pub use hpack::{Field, Indexing};
pub(crate) use streams::StreamMap;

#[cfg(test)]
mod tests;
