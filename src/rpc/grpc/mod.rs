//! gRPC over HTTP/2 (the "gRPC over HTTP2" protocol document, on top of [`crate::h2`]): a blocking
//! client and server.
//!
//! A `link` reads bytes from the socket, its `session` makes a request of them, the `server` starts
//! the handler that the `router` has for it, and the handler answers through its `call`. A file
//! knows only files above it in this list:
//!
//! - `header_values`, `status`, `metadata`: what surrounds the messages.
//! - `message`: the 5-byte prefix and size limits.
//! - `limits`, `methods`: what a server allows, and the paths that it knows.
//! - `session`: the engine of a connection, with a side for the client and one for the server. It
//!   has no socket, no lock and no thread.
//! - `link`: a session with its socket, which several threads share. No thread only reads: a thread
//!   that waits for the peer takes the reading half for as long as it waits. So a call needs no
//!   switch between threads.
//! - `client`: a [`Channel`] makes calls.
//! - `call`, `router`, `health`, `server`: a [`Server`] answers them.
//! - `streaming`: typed calls with several messages.

// A handler that panics must not end the calls of other clients.
#[cfg(panic = "abort")]
compile_error!("the server survives a panicking handler only if panics unwind");

mod call;
mod client;
mod header_values;
pub mod health;
mod limits;
mod link;
mod message;
mod metadata;
mod methods;
mod router;
mod server;
mod session;
mod status;
mod streaming;

pub use call::Call;
pub use client::{CallOptions, Channel, Keepalive};
pub use limits::Limits;
pub use message::{decode, encode};
pub use metadata::Metadata;
pub use router::Router;
pub use server::{Server, Statistics};
pub use status::{Code, Status};
pub use streaming::{Receiver, Requests, Responses, Sender};

#[cfg(test)]
mod testing;
