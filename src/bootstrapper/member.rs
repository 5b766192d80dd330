//! What a member answers: on the InitServer's port, over attested TLS, it proves which cluster it belongs to (PCR 15), and
//! that is all. There is no method but health, so nobody can ask it to do anything.
//!
//! Anybody may ask, and each answer takes the TPM a moment: so only a few are answered at once.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use attest::atls;
use attest::attestation::Issuer;
use base::stop::Stop;
use base::timeline::Timeline;
use rpc::grpc::{Limits, Router, Server};

/// Operators who look at the same time.
const CONNECTIONS: usize = 8;
const CONNECTIONS_PER_PEER: usize = 2;
/// The name of a service, for health.
const MAX_REQUEST: usize = 256;
/// A few calls with their headers.
const CONNECTION_BYTES: usize = 16 << 10;
/// `firstlight status` asks at once, and is done.
const IDLE: Duration = Duration::from_secs(10);
/// How often the stop is looked for; it wakes this at once.
const LONG: Duration = Duration::from_secs(3600);

/// Answers on `address` until `stop`. A member does its work without it, so where it cannot listen it only says so.
pub fn serve(address: SocketAddr, issuer: Arc<dyn Issuer>, stop: &Stop, timeline: &Timeline) {
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
    let tls = Arc::new(atls::Server::new(Some(issuer), vec![]));
    let server = TcpListener::bind(address)
        .and_then(|listener| Server::start("member", listener, tls, Router::new(), limits));
    match server {
        Ok(server) => {
            timeline.event(
                "member",
                format_args!("`firstlight status` is answered on {}", server.local_addr()),
            );
            while !stop.wait(LONG) {}
        }
        Err(error) => timeline.event(
            "member",
            format_args!("`firstlight status` gets no answer: {address}: {error}"),
        ),
    }
}
