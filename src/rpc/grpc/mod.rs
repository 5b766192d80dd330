//! gRPC over HTTP/2 (the "gRPC over HTTP2" protocol document; [`crate::h2`] beneath): a blocking client and server.
//!
//! - [`transport`](Transport): the connection that it runs over, plain TCP or TLS.
//! - `status`, `metadata`: what surrounds messages. `message`: the 5-byte prefix, limits, timeouts.
//! - `link`: one connection shared by threads. There is no thread that only reads: whoever has to wait for the peer takes
//!   the reading half for as long as it waits, so that a call costs no hand-over between threads.
//! - [`client`](Channel), [`server`](Server) with its [`Router`], [`Limits`] and `health`.

// a handler that panics must not take the other callers down with it
#[cfg(panic = "abort")]
compile_error!("the server survives a panicking handler only where panics unwind");

mod client;
mod health;
mod link;
mod message;
mod metadata;
mod router;
mod server;
mod status;
mod transport;

pub use client::{CallOptions, Channel, Keepalive, Requests, Responses};
pub use health::serve as serve_health;
pub use metadata::Metadata;
pub use router::{Call, Receiver, Router, Sender};
pub use server::{Limits, Server, Statistics};
pub use status::{Code, Status};
pub use transport::{Accept, Transport};

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
