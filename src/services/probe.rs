//! A server for the probes of a kubelet: only the health service, in plaintext. And such a probe.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc::grpc::health::{CHECK, HealthCheckRequest, HealthCheckResponse, SERVING};
use rpc::grpc::{CallOptions, Channel, Code, Limits, Router, Server, Status};

/// Maximum size of a request in bytes; it has only the name of a service.
const MAX_REQUEST: usize = 256;
/// Enough for two probes of one kubelet and an operator. One peer cannot take all connections.
const CONNECTIONS: usize = 16;
const CONNECTIONS_PER_PEER: usize = 4;

/// Starts a plaintext server with only the health service. It is for a kubelet; the other methods
/// are for peers that attest themselves.
///
/// The server is NOT_SERVING until `ready` returns true.
pub fn serve_health(
    address: SocketAddr,
    ready: impl Fn() -> bool + Send + Sync + 'static,
) -> io::Result<Server> {
    let limits = Limits {
        message_bytes: MAX_REQUEST,
        connections: CONNECTIONS,
        connections_per_peer: CONNECTIONS_PER_PEER,
        ..Limits::default()
    };
    serve_plain("health", address, Router::new().ready_when(ready), limits)
}

/// Starts a plaintext server.
pub fn serve_plain(
    name: &'static str,
    address: SocketAddr,
    router: Router,
    limits: Limits,
) -> io::Result<Server> {
    let plain = |socket: TcpStream, _: Instant| transport::plain::transport(socket);
    let listener = TcpListener::bind(address)?;
    Server::start(name, listener, Arc::new(plain), router, limits)
}

/// Asks the server at `address` in plaintext whether it is healthy, within `timeout` for the
/// connection and for the answer.
pub fn check_health(address: SocketAddr, timeout: Duration) -> Result<(), Status> {
    let failed = |error: io::Error| Status::new(Code::Unavailable, error.to_string());
    let socket = TcpStream::connect_timeout(&address, timeout).map_err(failed)?;
    let transport = transport::plain::transport(socket).map_err(failed)?;
    let channel = Channel::new(transport, &address.to_string())?;
    let options = CallOptions {
        timeout: Some(timeout),
        ..CallOptions::default()
    };
    let of_the_server = HealthCheckRequest::default();
    let answer: HealthCheckResponse = channel.unary(CHECK, &of_the_server, &options)?;
    match answer.status {
        SERVING => Ok(()),
        other => Err(Status::new(
            Code::Unavailable,
            format!("the server's health is {other}, not {SERVING} (SERVING)"),
        )),
    }
}
