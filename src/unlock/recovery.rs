//! Recovery: the operator sends the master secret to a node when no join service can give the node
//! its key.
//!
//! This is a gRPC server on TCP port 9999 of the initramfs, over attested TLS. The operator
//! verifies the node before the operator sends anything. The node derives the disk key from the
//! master secret, tries it, and answers OK only if the key opens the disk. A wrong secret changes
//! nothing on the disk. Anybody may call, so an answer says only whether the key opened the disk,
//! or what the node waits for. One try may take seconds and much memory: after a wrong secret,
//! further callers of the same network are delayed ([`Semaphore`]).

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rejoin::{migration_salt, wrong_salt};
use super::waiting::{Candidate, KeyRefused, Waiting};
use attest::{ClusterRegister, Issuer};
use base::boot::timeline::Timeline;
use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID};
use base::master_secret::MasterSecret;
use base::network::semaphore::Semaphore;
use node::record;
use proto::recoverproto::{
    MAX_REQUEST, RECOVER, RecoverMessage, RecoverResponse, STATUS, StatusRequest, StatusResponse,
};
use rpc::grpc::{Call, Code, Limits, Router, Server, Status};

/// How long the server still sends answers after the disk is open.
const GRACE: Duration = Duration::from_secs(2);
/// Maximum size in bytes of all requests that are being received.
const MAX_BUFFERED: usize = 1 << 20;
/// Maximum number of callers that wait, each in a thread. Only one key is tried at a time, because
/// a try takes as much memory as the header's keyslot requires.
const PLACES: usize = 8;
/// Maximum time that a caller waits: the longest delay of a network plus a few tries of other
/// callers.
const MAX_WAIT: Duration = Duration::from_secs(90);

/// Returns the limits of the server. All callers together can use at most 16 MiB of memory.
pub fn limits() -> Limits {
    Limits {
        connections: 128,
        connections_per_peer: 32,
        half_open: 64,
        // a handshake mostly waits for the TPM, which makes one quote at a time
        handshakes: 16,
        // the operator's tool answers without delay
        handshake_patience: Duration::from_secs(1),
        handlers: 16,
        header_bytes: 8 << 10,
        message_bytes: MAX_REQUEST,
        buffered_bytes: MAX_BUFFERED,
        ..Limits::default()
    }
}

/// A running recovery server. It stops when it is dropped.
pub struct RecoveryServer(Server);

impl RecoveryServer {
    /// Serves on `address` until it is dropped.
    ///
    /// # Errors
    /// If the address cannot be bound or a thread cannot be created.
    pub fn start(
        address: SocketAddr,
        issuer: Arc<dyn Issuer>,
        cluster: Option<ClusterRegister>,
        waiting: Arc<Waiting>,
        timeline: Timeline,
    ) -> std::io::Result<Self> {
        let (disk, turns) = (waiting.clone(), Semaphore::new(1, PLACES));
        let recover = move |call: &Call, message: RecoverMessage| {
            recover(call, &message, cluster.as_ref(), &disk, &turns)
        };
        let router = Router::new().unary(RECOVER, recover);
        let router = router.unary(STATUS, move |_: &Call, _: StatusRequest| {
            Ok(status(&waiting))
        });
        let router = record::serve(router, timeline, || None);
        let transport = Arc::new(atls::Server::new(Some(issuer), None));
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
    cluster: Option<&ClusterRegister>,
    waiting: &Waiting,
    turns: &Semaphore,
) -> Result<RecoverResponse, Status> {
    let name = call
        .peer()
        .map_or("an unknown address".into(), |address| address.to_string());
    let from = format!("the operator at {name}");
    let candidate = candidate(message, cluster, &waiting.uuid(), from)?;
    let is_finished = || call.is_cancelled() || waiting.finished().is_stopped();
    let turn = turns
        .take(call.network(), Instant::now() + MAX_WAIT, is_finished)
        .map_err(|busy| Status::busy(busy.retry_after))?;
    match waiting.offer(candidate) {
        Ok(()) => Ok(RecoverResponse {}),
        Err(KeyRefused::WrongKey) => {
            turn.wrong();
            let uuid = waiting.uuid();
            Err(Status::new(
                Code::FailedPrecondition,
                format!("this master secret does not open disk {uuid}"),
            ))
        }
        Err(KeyRefused::TooLate) => Err(Status::new(
            Code::Unavailable,
            KeyRefused::TooLate.to_string(),
        )),
        Err(
            refused @ (KeyRefused::OtherCluster | KeyRefused::OtherMember | KeyRefused::NoCluster),
        ) => Err(Status::new(Code::FailedPrecondition, refused.to_string())),
        Err(KeyRefused::Disk(_)) => Err(Status::new(
            Code::Internal,
            "the node could not read its disk; its console gives the reason",
        )),
    }
}

fn candidate(
    message: &RecoverMessage,
    cluster: Option<&ClusterRegister>,
    uuid: &str,
    from: String,
) -> Result<Candidate, Status> {
    let invalid =
        |error: base::master_secret::Error| Status::new(Code::InvalidArgument, error.to_string());
    let kms = MasterSecret::from_uris(&message.kms_uri, &message.storage_uri).map_err(invalid)?;
    Ok(Candidate {
        disk_key: kms.dek(&Dek::disk(uuid), KEY_LEN).map_err(invalid)?,
        measurement_secret: kms
            .dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN)
            .map_err(invalid)?,
        // the next rejoin renews the host certificate
        host_certificate: Vec::new(),
        migration_salt: migration_salt(&message.measurement_salt)
            .map_err(|got| Status::new(Code::InvalidArgument, wrong_salt(got)))?,
        from,
        // anybody may call this server
        cluster: cluster.cloned(),
    })
}

fn status(waiting: &Waiting) -> StatusResponse {
    let (since, notes) = waiting.report();
    StatusResponse {
        disk_uuid: waiting.uuid(),
        state: "waiting for the key of the state disk".into(),
        waiting_for: notes
            .into_iter()
            .map(|(name, note)| format!("{name}: {note}"))
            .collect(),
        waiting_seconds: since.as_secs(),
    }
}
