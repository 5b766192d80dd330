//! gRPC over HTTP/2 without an asynchronous runtime.
//!
//! - [`h2`]: HTTP/2 as a state machine over bytes.
//! - [`grpc`]: sockets, threads and calls.
//! - [`share`]: how much of a server's resources each peer may use.

pub mod grpc;
pub mod h2;
pub mod share;
