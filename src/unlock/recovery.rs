//! Recovery: the operator brings the master secret to a node that nobody in the cluster can help.
//!
//! A gRPC server on TCP 9999 of the initramfs, over attested TLS: the operator verifies the node before it sends anything.
//! The node derives its key itself, tries it, and answers OK only when the disk opened; a wrong one costs nothing. Anybody
//! may call, so the answers tell nothing but that, and what the node waits for; and after a wrong one the next of the same
//! network waits for its turn ([`Turns`]), since a try may take seconds and much memory.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rejoin::migration_salt;
use super::waiting::{Candidate, Refused, Waiting};
use attest::atls;
use attest::attestation::Issuer;
use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID};
use base::turns::Turns;
use kms::ClusterKms;
use proto::recoverproto::{
    RECOVER, RecoverMessage, RecoverResponse, STATUS, StatusRequest, StatusResponse,
};
use rpc::grpc::{Call, Code, Limits, Router, Server, Status};

/// How long an answer may still be on its way when the disk is open.
const GRACE: Duration = Duration::from_secs(2);
/// Bytes of a request: two URIs of at most 4 KiB each. Anybody may send one, to a machine in its initramfs.
const MAX_REQUEST: usize = 16 << 10;
/// Bytes of all requests that are under way.
const MAX_BUFFERED: usize = 1 << 20;
/// A try takes as much memory as the disk's keyslot asks for, so one at a time; this many callers, each with a thread, wait
/// for theirs.
const PLACES: usize = 8;
/// A caller waits at most this long: a network's longest delay, and some tries of others.
const LONGEST_WAIT: Duration = Duration::from_secs(90);

/// What anybody may take of a machine that waits in its initramfs: 16 MiB at most, where all use all of it.
pub fn limits() -> Limits {
    Limits {
        connections: 128,
        connections_per_peer: 32,
        half_open: 64,
        // most of the time of one is the TPM's, which makes one quote after the other
        handshakes: 16,
        // an operator's tool answers at once
        handshake_patience: Duration::from_secs(1),
        handlers: 16,
        header_bytes: 8 << 10,
        message_bytes: MAX_REQUEST,
        buffered_bytes: MAX_BUFFERED,
        ..Limits::default()
    }
}

/// A running recovery server; stops when dropped.
pub struct RecoveryServer(Server);

impl RecoveryServer {
    /// Serves on `address` until dropped.
    pub fn start(
        address: SocketAddr,
        issuer: Arc<dyn Issuer>,
        waiting: Arc<Waiting>,
    ) -> std::io::Result<Self> {
        let (disk, turns) = (waiting.clone(), Turns::new(1, PLACES));
        let recover =
            move |call: &Call, message: RecoverMessage| recover(call, &message, &disk, &turns);
        let router = Router::new().unary(RECOVER, recover);
        let router = router.unary(STATUS, move |_: &Call, _: StatusRequest| {
            Ok(status(&waiting))
        });
        let transport = Arc::new(atls::Server::new(Some(issuer), vec![]));
        let listener = TcpListener::bind(address)?;
        Server::start("recovery", listener, transport, router, limits()).map(RecoveryServer)
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
    turns: &Turns,
) -> Result<RecoverResponse, Status> {
    let name = call
        .peer()
        .map_or("an unknown address".into(), |address| address.to_string());
    let candidate = candidate(message, &waiting.uuid(), format!("the operator at {name}"))?;
    let is_over = || call.is_cancelled() || waiting.over().is_stopped();
    let turn = turns
        .take(call.network(), Instant::now() + LONGEST_WAIT, is_over)
        .map_err(|busy| Status::busy(busy.retry_after))?;
    match waiting.offer(candidate) {
        Ok(()) => Ok(RecoverResponse {}),
        Err(Refused::WrongKey) => {
            turn.wrong();
            let uuid = waiting.uuid();
            Err(Status::new(
                Code::FailedPrecondition,
                format!("this master secret does not open disk {uuid}"),
            ))
        }
        Err(Refused::TooLate) => Err(Status::new(Code::Unavailable, Refused::TooLate.to_string())),
        Err(refused @ (Refused::OtherCluster | Refused::NoCluster)) => {
            Err(Status::new(Code::FailedPrecondition, refused.to_string()))
        }
        Err(Refused::Disk(_)) => Err(Status::new(
            Code::Internal,
            "the node could not read its disk; its console says why",
        )),
    }
}

fn candidate(message: &RecoverMessage, uuid: &str, from: String) -> Result<Candidate, Status> {
    let invalid = |error: kms::Error| Status::new(Code::InvalidArgument, error.to_string());
    let kms = ClusterKms::from_uris(&message.kms_uri, &message.storage_uri).map_err(invalid)?;
    Ok(Candidate {
        disk_key: kms.dek(&Dek::disk(uuid), KEY_LEN).map_err(invalid)?,
        measurement_secret: kms
            .dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN)
            .map_err(invalid)?,
        // the next rejoin brings one
        host_certificate: Vec::new(),
        migration_salt: migration_salt(&message.measurement_salt)
            .map_err(|why| Status::new(Code::InvalidArgument, why))?,
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
