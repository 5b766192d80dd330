//! Constellation's verification service: an attestation document of this machine for every caller,
//! without TLS, over gRPC or HTTP. It is off unless the service gets an address for it.
//!
//! ```text
//! GET /?nonce=BASE64URL  ->  {"data":"BASE64"}
//! ```
//!
//! A quote occupies the TPM, and the callers are not authenticated. So only one quote is made at a
//! time, the networks of the callers take turns, and after each quote follows a pause of the same
//! length: callers use at most half of the TPM's time.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use base::network::Network;
use base::network::semaphore::Semaphore;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use http::server::ServedResponse;
use proto::verify::{GET_ATTESTATION, GetAttestationRequest, GetAttestationResponse, MAX_REQUEST};
use rpc::grpc::{Call, Code, Limits, Router, Server, Status};
use serde_json::json;
use verifier::Variant;

use super::evidence::RemoteIssuer;
use crate::probe;

/// Length of a nonce in bytes: the host makes documents only for these.
const NONCE: std::ops::RangeInclusive<usize> = 16..=32;
/// Maximum number of callers that wait for their turn.
const WAITING: usize = 16;
/// Maximum time that a caller waits.
const PATIENCE: Duration = Duration::from_secs(15);
/// Maximum number of connections: in total, and from one peer.
const CONNECTIONS: usize = 64;
const CONNECTIONS_PER_PEER: usize = 4;

/// Makes documents with the host's evidence.
pub struct Verification {
    issuer: RemoteIssuer,
    turns: Semaphore,
}

/// Why there is no document.
enum Refusal {
    /// The nonce is wrong.
    Nonce(String),
    /// Too many callers are waiting.
    Busy(Duration),
    /// The host gives no evidence.
    Failed,
}

/// Serves gRPC at this address.
pub fn serve(address: SocketAddr, verification: Arc<Verification>) -> io::Result<Server> {
    let router = Router::new().unary(
        GET_ATTESTATION,
        move |call: &Call, request: GetAttestationRequest| verification.attest(call, &request),
    );
    let limits = Limits {
        message_bytes: MAX_REQUEST,
        connections: CONNECTIONS,
        connections_per_peer: CONNECTIONS_PER_PEER,
        ..Limits::default()
    };
    probe::serve_plain("verification", address, router, limits)
}

/// Serves HTTP at this address.
pub fn serve_http(
    address: SocketAddr,
    verification: Arc<Verification>,
) -> io::Result<http::server::HttpServer> {
    let get = move |target: &str, peer: IpAddr| verification.get(target, peer);
    let limits = http::server::ServerLimits {
        connections: CONNECTIONS,
        of_peer: CONNECTIONS_PER_PEER,
        time: PATIENCE + Duration::from_secs(30),
    };
    http::server::HttpServer::start("verification", address, limits, get)
}

impl Verification {
    /// Makes documents of this variant with the evidence of the host at this socket.
    pub fn new(variant: &'static Variant, socket: PathBuf) -> Verification {
        Verification {
            issuer: RemoteIssuer::new(variant, socket),
            turns: Semaphore::new(1, WAITING),
        }
    }

    fn get(&self, target: &str, peer: IpAddr) -> ServedResponse {
        let Some(nonce) = nonce_of(target) else {
            return ServedResponse::status("400 Bad Request");
        };
        match self.document(&nonce, peer.into(), Instant::now() + PATIENCE, || false) {
            Ok(document) => {
                let body = json!({"data": STANDARD.encode(document)});
                ServedResponse::ok("application/json", format!("{body}\n"))
            }
            Err(Refusal::Nonce(_)) => ServedResponse::status("400 Bad Request"),
            Err(Refusal::Busy(_)) => ServedResponse::status("503 Service Unavailable"),
            Err(Refusal::Failed) => ServedResponse::status("500 Internal Server Error"),
        }
    }

    fn attest(
        &self,
        call: &Call,
        request: &GetAttestationRequest,
    ) -> Result<GetAttestationResponse, Status> {
        let network = call
            .peer()
            .map_or(Network::UNKNOWN, |peer| peer.ip().into());
        let deadline = Instant::now() + PATIENCE;
        let deadline = call.deadline().map_or(deadline, |end| end.min(deadline));
        let document = self.document(&request.nonce, network, deadline, || call.is_cancelled());
        let attestation = document.map_err(|refusal| match refusal {
            Refusal::Nonce(why) => Status::new(Code::InvalidArgument, why),
            Refusal::Busy(retry_after) => {
                let status = Status::new(Code::ResourceExhausted, "too many callers want evidence");
                status.with_retry_after(retry_after)
            }
            Refusal::Failed => Status::new(Code::Internal, "this machine gives no evidence"),
        })?;
        Ok(GetAttestationResponse { attestation })
    }

    /// Returns a document for this nonce when it is the turn of the caller's network.
    fn document(
        &self,
        nonce: &[u8],
        network: Network,
        deadline: Instant,
        is_over: impl Fn() -> bool,
    ) -> Result<Vec<u8>, Refusal> {
        let (len, least, most) = (nonce.len(), NONCE.start(), NONCE.end());
        if nonce.is_empty() {
            let text = "nonce is required to issue attestation";
            return Err(Refusal::Nonce(text.into()));
        }
        if !NONCE.contains(&len) {
            let text = format!("the nonce has {len} bytes, expected {least} to {most}");
            return Err(Refusal::Nonce(text));
        }
        let turn = self.turns.take(network, deadline, is_over);
        let _turn = turn.map_err(|busy| Refusal::Busy(busy.retry_after))?;
        let begun = Instant::now();
        let document = self.issuer.verification(nonce).map_err(|error| {
            log::warn!("cannot give evidence to a caller of the verification service: {error}");
            Refusal::Failed
        })?;
        thread::sleep(begun.elapsed().min(PATIENCE));
        Ok(document)
    }
}

/// Returns the nonce of a target: the parameter `nonce`, which occurs once, in base64url with
/// padding. `=` may be percent-encoded, as Go does.
pub fn nonce_of(target: &str) -> Option<Vec<u8>> {
    let (_, query) = target.split_once('?')?;
    let mut nonces = query
        .split('&')
        .filter_map(|part| part.strip_prefix("nonce="));
    let (nonce, None) = (nonces.next()?, nonces.next()) else {
        return None;
    };
    let text = nonce.replace("%3D", "=").replace("%3d", "=");
    URL_SAFE.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn the_nonce_of_a_target_is_read_as_go_and_curl_write_it() {
        let nonce = [0xfb; 16];
        let text = URL_SAFE.encode(nonce);
        assert!(text.starts_with("-_v7") && text.ends_with("=="));
        let encoded = text.replace('=', "%3D");
        for target in [
            format!("/?nonce={text}"),
            format!("/any?x=y&nonce={encoded}"),
        ] {
            assert_eq!(nonce_of(&target).unwrap(), nonce, "{target}");
        }
        for target in [
            "/".into(),
            "/?nonce".into(),
            format!("/?nonce={}", text.trim_end_matches('=')),
            format!("/?nonce={text}&nonce={text}"),
            format!("/?nonce={}", text.replace('-', "+")),
        ] {
            assert!(nonce_of(&target).is_none(), "{target}");
        }
        for target in mutations(format!("/?nonce={text}").as_bytes(), 2000) {
            nonce_of(&String::from_utf8_lossy(&target));
        }
    }
}
