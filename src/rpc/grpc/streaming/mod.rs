//! Calls with several requests or responses, as typed streams for client and server. The tests are
//! those of client against server, for all kinds of calls.

mod client;
mod server;

pub use client::{Requests, Responses};
pub use server::{Receiver, Sender};

#[cfg(test)]
mod tests;
