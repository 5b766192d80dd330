//! The verification service of the old system: an attestation document of this machine for whoever asks, without TLS. It is off unless
//! the service gets an address for it.
//!
//! A quote keeps the TPM busy, and the callers prove nothing. So one quote is made at a time, the networks of the callers take turns, and
//! a pause follows each quote that is as long as the quote took: callers have at most half of the time of the TPM.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use attest::attestation::Variant;
use base::network::Network;
use base::turns::Turns;
use proto::verify::{GET_ATTESTATION, GetAttestationRequest, GetAttestationResponse};
use rpc::grpc::{Call, Code, Limits, Router, Server, Status, Transport};

use super::evidence::RemoteIssuer;

/// Length of a nonce in bytes: the host makes documents only for these.
const NONCE: std::ops::RangeInclusive<usize> = 16..=32;
/// Maximum number of callers that wait for their turn.
const WAITING: usize = 16;
/// How long a caller waits at most.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum size of a request in bytes.
const MAX_REQUEST: usize = 256;
/// Maximum number of connections, and of one peer.
const CONNECTIONS: usize = 64;
const CONNECTIONS_PER_PEER: usize = 4;

struct Verification {
    issuer: RemoteIssuer,
    turns: Turns,
}

/// Serves at this address by the evidence of the host at this socket.
pub fn serve(address: SocketAddr, variant: &Variant, socket: PathBuf) -> io::Result<Server> {
    let verification = Verification {
        issuer: RemoteIssuer::new(variant, socket),
        turns: Turns::new(1, WAITING),
    };
    let router = Router::new().unary(
        GET_ATTESTATION,
        move |call: &Call, request: GetAttestationRequest| verification.attest(call, &request),
    );
    let plain = |socket: TcpStream, _: Instant| Transport::plain(socket);
    let limits = Limits {
        message_bytes: MAX_REQUEST,
        connections: CONNECTIONS,
        connections_per_peer: CONNECTIONS_PER_PEER,
        ..Limits::default()
    };
    let listener = TcpListener::bind(address)?;
    Server::start("verification", listener, Arc::new(plain), router, limits)
}

impl Verification {
    fn attest(
        &self,
        call: &Call,
        request: &GetAttestationRequest,
    ) -> Result<GetAttestationResponse, Status> {
        let (nonce, least, most) = (&request.nonce, NONCE.start(), NONCE.end());
        let wrong = |text: String| Err(Status::new(Code::InvalidArgument, text));
        if nonce.is_empty() {
            return wrong("nonce is required to issue attestation".into());
        }
        if !NONCE.contains(&nonce.len()) {
            let len = nonce.len();
            return wrong(format!(
                "the nonce has {len} bytes, expected {least} to {most}"
            ));
        }
        let network = call
            .peer()
            .map_or(Network::UNKNOWN, |peer| peer.ip().into());
        let deadline = Instant::now() + PATIENCE;
        let deadline = call.deadline().map_or(deadline, |end| end.min(deadline));
        let turn = self.turns.take(network, deadline, || call.is_cancelled());
        let _turn = turn.map_err(|busy| {
            let status = Status::new(Code::ResourceExhausted, "too many callers want evidence");
            status.with_retry_after(busy.retry_after)
        })?;
        let begun = Instant::now();
        let attestation = self.issuer.verification(nonce).map_err(|error| {
            log::warn!("no evidence for a caller of the verification service: {error}");
            Status::new(Code::Internal, "this machine gives no evidence")
        })?;
        thread::sleep(begun.elapsed().min(PATIENCE));
        Ok(GetAttestationResponse { attestation })
    }
}
