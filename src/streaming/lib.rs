//! Calls of gRPC with several requests or responses. The crate `rpc` has calls with one of each, and
//! sends and receives the messages of these streams.
//!
//! A client makes such a call by [`StreamingCalls`], a server adds such a method by
//! [`StreamingMethods`]. The tests here are those of client against server: they need all kinds of
//! calls.

#![forbid(unsafe_code)]

mod client;
mod server;

pub use client::{Requests, Responses, StreamingCalls};
pub use server::{Receiver, Sender, StreamingMethods};

#[cfg(test)]
mod tests;
