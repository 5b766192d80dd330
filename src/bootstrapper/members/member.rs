//! The server of a member: on the InitServer's port, over attested TLS, it proves to which cluster
//! the node belongs (PCR 15). Anybody gets the health check, the boot record and the generation of the
//! state disk; an [operator](crate::members::operator) proves to be one, and gets more.
//!
//! Anybody may call, and each answer uses the TPM briefly, so only a few connections are served at
//! once.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use crate::members::operator::OperatorService;
use crate::state::generation::Generations;
use crate::steps::clock;
use attest::Issuer;
use base::boot::timeline::{RECORD_BYTES, Timeline};
use base::stop::Stop;
use node::record;
use proto::operator::MAX_REQUEST;
use rpc::grpc::{Limits, Router, Server};

/// Maximum number of connections.
const CONNECTIONS: usize = 8;
const CONNECTIONS_PER_PEER: usize = 2;
/// Buffered bytes of a connection: the record, and a few calls with their headers and an operator's request.
const CONNECTION_BYTES: usize = RECORD_BYTES + (16 << 10) + MAX_REQUEST;
/// `firstlight status` asks at once and closes the connection.
const IDLE: Duration = Duration::from_secs(10);
/// The length of one wait; a stop interrupts it at once.
const LONG: Duration = Duration::from_secs(3600);

/// Serves on `address` until `stop`. If it cannot listen, it prints an event and does nothing until
/// `stop`: a member works without this server.
pub fn serve(
    address: SocketAddr,
    issuer: Arc<dyn Issuer>,
    generations: &Arc<Generations>,
    operators: &Arc<OperatorService>,
    stop: &Stop,
    timeline: &Timeline,
) {
    let limits = Limits {
        connections: CONNECTIONS,
        connections_per_peer: CONNECTIONS_PER_PEER,
        handlers: CONNECTIONS,
        streams: 4,
        message_bytes: MAX_REQUEST,
        buffered_bytes: CONNECTIONS * CONNECTION_BYTES,
        handshake: IDLE,
        idle: IDLE,
        stall: IDLE,
        ..Limits::default()
    };
    let tls = Arc::new(atls::Server::new(Some(issuer), None));
    let router = generations.serve(record::serve(
        Router::new(),
        *timeline,
        clock::is_synchronized,
    ));
    let router = operators.serve(router);
    let server = TcpListener::bind(address)
        .and_then(|listener| Server::start("member", listener, tls, router, limits));
    match &server {
        Ok(server) => {
            timeline.event(
                "member",
                format_args!("`firstlight status` is answered on {}", server.local_addr()),
            );
        }
        Err(error) => timeline.event(
            "member",
            format_args!("cannot answer `firstlight status` on {address}: {error}"),
        ),
    }
    while !stop.wait(LONG) {
        generations.raise_daily();
    }
}
