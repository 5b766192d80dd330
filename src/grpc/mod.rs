//! gRPC over HTTP/2 ([`crate::h2`]).

mod transport;

pub use transport::{Accept, Transport};
