//! gRPC over HTTP/2 (the "gRPC over HTTP2" protocol document, on top of [`crate::h2`]): a blocking
//! client and server.
//!
//! - [`transport`](Transport): the connection below, plain TCP or TLS.
//! - `message`: the 5-byte prefix and size limits.
//! - `header_values`, `status`, `metadata`: what surrounds the messages.
//! - `link`: one connection that several threads share. No thread only reads: a thread that waits
//!   for the peer takes the reading half for as long as it waits. So a call needs no switch between
//!   threads.
//! - [`client`](Channel), [`server`](Server) with its [`Router`], [`Limits`] and `health`.

// A handler that panics must not end the calls of other clients.
#[cfg(panic = "abort")]
compile_error!("the server survives a panicking handler only if panics unwind");

mod client;
mod header_values;
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
