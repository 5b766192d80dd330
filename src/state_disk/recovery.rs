//! Recovery: the operator brings the master secret to a node that nobody in the cluster can help.
//!
//! A gRPC server on TCP 9999 of the initramfs, over attested TLS: the operator verifies the node before it sends anything.
//! The node derives its key itself, tries it, and answers OK only when the disk opened; a wrong one costs nothing. Anybody
//! may call, so the answers tell nothing but that, and what the node waits for; and who brought a wrong one has to wait
//! before the next, since a try may take seconds and much memory.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::waiting::{Candidate, Refused, Waiting};
use crate::atls;
use crate::attestation::Issuer;
use crate::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID};
use crate::grpc::{Call, Code, Limits, Router, Server, Status};
use crate::kms::{self, ClusterKms};
use crate::penalty::Penalties;
use crate::proto::recoverproto::{RecoverMessage, RecoverResponse, StatusRequest, StatusResponse};

/// TCP port of the recovery server.
pub const PORT: u16 = 9999;
/// How long an answer may still be on its way when the disk is open.
const GRACE: Duration = Duration::from_secs(2);
/// Bytes of a request: two URIs of at most 4 KiB each. Anybody may send one, to a machine in its initramfs.
const MAX_REQUEST: usize = 16 << 10;
/// Bytes of all requests that are under way.
const MAX_BUFFERED: usize = 1 << 20;

/// A running recovery server; stops when dropped.
pub struct RecoveryServer(Server);

impl RecoveryServer {
    /// Serves on `address` until dropped.
    pub fn start(address: SocketAddr, issuer: Arc<dyn Issuer>, waiting: Arc<Waiting>) -> std::io::Result<Self> {
        let (disk, penalties) = (waiting.clone(), Penalties::default());
        let recover = move |call: &Call, message: RecoverMessage| recover(call, &message, &disk, &penalties);
        let router = Router::new().unary("/recoverproto.API/Recover", recover);
        let router = router.unary("/recoverproto.API/Status", move |_: &Call, _: StatusRequest| Ok(status(&waiting)));
        let transport = Arc::new(atls::Server::new(Some(issuer), vec![]));
        let listener = TcpListener::bind(address)?;
        let limits = Limits { message_bytes: MAX_REQUEST, buffered_bytes: MAX_BUFFERED, ..Limits::default() };
        Server::start("recovery", listener, transport, router, limits).map(RecoveryServer)
    }
}

impl Drop for RecoveryServer {
    fn drop(&mut self) {
        self.0.stop(GRACE);
    }
}

fn recover(
    call: &Call,
    message: &RecoverMessage,
    waiting: &Waiting,
    penalties: &Penalties,
) -> Result<RecoverResponse, Status> {
    let (peer, name) = match call.peer() {
        Some(address) => (address.ip(), address.to_string()),
        None => (IpAddr::V4(Ipv4Addr::UNSPECIFIED), "an unknown address".to_owned()),
    };
    let candidate = candidate(message, &waiting.uuid(), format!("the operator at {name}"))?;
    let is_wrong = |refused: &Refused| matches!(refused, Refused::WrongKey);
    let tried = penalties.attempt(peer, Instant::now(), is_wrong, || waiting.offer(candidate)).map_err(|time| {
        let seconds = time.as_secs() + 1;
        Status::new(Code::ResourceExhausted, format!("too many wrong master secrets: try again in {seconds} s"))
    })?;
    tried.map(|()| RecoverResponse {}).map_err(|refused| match refused {
        Refused::WrongKey => {
            let uuid = waiting.uuid();
            Status::new(Code::FailedPrecondition, format!("this master secret does not open disk {uuid}"))
        }
        Refused::TooLate => Status::new(Code::Unavailable, refused.to_string()),
        Refused::Disk(_) => Status::new(Code::Internal, "the node could not read its disk; its console says why"),
    })
}

fn candidate(message: &RecoverMessage, uuid: &str, from: String) -> Result<Candidate, Status> {
    let invalid = |error: kms::Error| Status::new(Code::InvalidArgument, error.to_string());
    let kms = ClusterKms::from_uris(&message.kms_uri, &message.storage_uri).map_err(invalid)?;
    Ok(Candidate {
        disk_key: kms.dek(&Dek::disk(uuid), KEY_LEN).map_err(invalid)?,
        measurement_secret: kms.dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN).map_err(invalid)?,
        from,
    })
}

fn status(waiting: &Waiting) -> StatusResponse {
    let (since, notes) = waiting.report();
    StatusResponse {
        disk_uuid: waiting.uuid(),
        state: "waiting for the key of the state disk".into(),
        waiting_for: notes
            .into_iter()
            .map(|(name, note)| format!("{name}: {} (try {})", note.text, note.tries))
            .collect(),
        waiting_seconds: since.as_secs(),
    }
}
