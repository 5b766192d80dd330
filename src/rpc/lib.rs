//! gRPC over HTTP/2 without an asynchronous runtime.
//!
//! - `bounded`: limits what the fields of a decoded message take in memory.
//! - [`h2`]: HTTP/2 as a state machine over bytes.
//! - [`grpc`]: sockets, threads and calls.
//! - [`half_open`]: limits for connections whose handshake is not complete.
//! - [`share`]: how much of a server's resources each peer may use.
//! - [`strangers`]: peers that speak other protocols.

mod bounded;
pub mod grpc;
pub mod h2;
pub mod half_open;
pub mod share;
pub mod strangers;
