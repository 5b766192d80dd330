//! A server for the probes of a kubelet: only the health service, in plaintext.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use super::limits::Limits;
use super::router::Router;
use super::server::Server;
use super::transport::Transport;

/// Maximum size of a request in bytes; it has only the name of a service.
const MAX_REQUEST: usize = 256;
/// Enough for two probes of one kubelet and an operator. One peer cannot take all connections.
const CONNECTIONS: usize = 16;
const CONNECTIONS_PER_PEER: usize = 4;

/// Starts a plaintext server with only the health service. It is for a kubelet; the other methods
/// are for peers that attest themselves.
pub fn serve_health(address: SocketAddr) -> io::Result<Server> {
    let plain = |socket: TcpStream, _: Instant| Transport::plain(socket);
    let limits = Limits {
        message_bytes: MAX_REQUEST,
        connections: CONNECTIONS,
        connections_per_peer: CONNECTIONS_PER_PEER,
        ..Limits::default()
    };
    Server::start(
        "health",
        TcpListener::bind(address)?,
        Arc::new(plain),
        Router::new(),
        limits,
    )
}
