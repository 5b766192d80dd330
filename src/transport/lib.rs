//! Connections. What attested TLS and gRPC share: one whose two directions can be used from two
//! threads at once.
//!
//! - [`dial`]: connects to a host.
//! - [`half_open`]: limits for connections whose handshake is not complete.
//! - [`message`]: limits what the fields of a decoded message take in memory.
//! - [`plain`]: connections without TLS.
//! - [`strangers`]: peers that speak other protocols.
//! - [`timed`]: one time limit for a whole exchange.

pub mod dial;
pub mod half_open;
pub mod message;
pub mod plain;
pub mod strangers;
pub mod timed;

use std::any::Any;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use crate::half_open::PeersTurn;

/// An established connection: plain TCP, or TLS over TCP.
pub struct Transport {
    /// Bytes from the peer. One thread may block in it.
    pub reader: Box<dyn Read + Send>,
    /// Bytes to the peer. It can be used while another thread blocks in `reader`.
    pub writer: Box<dyn Write + Send>,
    /// The socket below: for time-outs, the peer's address, and `shutdown`, which wakes both
    /// halves.
    pub socket: Arc<TcpStream>,
    /// The `:scheme` of requests: `http` or `https`.
    pub scheme: &'static str,
    /// The identity that the peer proved below gRPC, as a name to compare with others of the same
    /// kind; `None` if it proved nothing.
    pub identity: Option<Arc<str>>,
    /// What else the peer proved below gRPC, for handlers that know its type.
    pub claims: Option<Arc<dyn Any + Send + Sync>>,
    /// The channel binding `tls-exporter` of a TLS connection (RFC 9266): only its two ends know it, and another connection has
    /// another one.
    pub binding: Option<[u8; 32]>,
}

/// Makes a [`Transport`] from an accepted socket, on the connection's own thread.
pub trait Accept: Send + Sync {
    /// Completes before `deadline`, or fails; the error's text goes to the server's log. Notes in
    /// `turn` whenever it waits for the peer, because a handshake that waits for long may lose its
    /// place to another.
    fn accept(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> io::Result<Transport>;

    /// Called before the server closes a connection whose handshake has not begun, because it has
    /// too many. May tell the peer when to come again, without waiting for it.
    fn turn_away(&self, _: &TcpStream) {}
}

impl<F> Accept for F
where
    F: Fn(TcpStream, Instant) -> io::Result<Transport> + Send + Sync,
{
    fn accept(&self, socket: TcpStream, deadline: Instant, _: &PeersTurn) -> io::Result<Transport> {
        self(socket, deadline)
    }
}
