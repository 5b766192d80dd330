//! The InitServer: waits on TCP 9000, over attested TLS, for the operator who makes this node the first of a cluster.
//!
//! The operator verifies the node before sending anything; the node knows the operator by the init secret, whose hash the
//! metadata service holds. The set-up belongs to the node and not to the connection: it goes on when the operator is cut
//! off, and the same request asked again gets the same answer.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cluster;
use super::node_lock::{Locking, NodeLock};
use super::secret_guard::{SecretGuard, Verdict};
use crate::attestation::Issuer;
use crate::crypto::{CLUSTER_ID_LEN, Dek, KEY_LEN, MEASUREMENT_SECRET_ID, cluster_id};
use crate::grpc::{Call, Code, Limits, Router, Sender, Server, Status};
use crate::kms::ClusterKms;
use crate::metadata::Role;
use crate::proto::init::init_response::Kind;
use crate::proto::init::{InitFailureResponse, InitRequest, InitResponse, InitSuccessResponse};
use crate::state_disk::{NewDisk, NodeState, SALT_LEN, mark_complete};
use crate::stop::Stop;
use crate::timeline::Timeline;
use crate::{atls, state_disk};

/// TCP port of the InitServer.
pub const PORT: u16 = 9000;
/// Time for the last answer to reach the operator.
const GRACE: Duration = Duration::from_secs(5);

/// What an init needs of the node.
pub struct Node {
    /// Guards the operator's secret.
    pub guard: SecretGuard,
    /// The way into a cluster, taken once.
    pub lock: Arc<NodeLock>,
    /// Where the state disk is mounted.
    pub root: PathBuf,
    /// Which disk, and the passphrase of this boot.
    pub disk: state_disk::Handover,
    /// Tells the console.
    pub timeline: Timeline,
    /// Stopped when the work is done.
    pub done: Stop,
}

/// A running InitServer.
pub struct InitServer {
    server: Server,
    outcome: Arc<Mutex<Outcome>>,
}

/// How far the one init of this node is.
#[derive(Clone, Default)]
pub enum Outcome {
    /// Nobody has come yet.
    #[default]
    None,
    /// Done, for this cluster.
    Done([u8; CLUSTER_ID_LEN]),
    /// It failed after the lock: the node must reboot, which resets it.
    Failed(String),
}

impl InitServer {
    /// Serves on `listener`.
    pub fn start(listener: TcpListener, issuer: Arc<dyn Issuer>, node: Node) -> std::io::Result<InitServer> {
        let outcome = Arc::new(Mutex::new(Outcome::None));
        let shared = outcome.clone();
        let router = Router::new().server_streaming(
            "/init.API/Init",
            move |call: &Call, request: InitRequest, answer: &mut Sender<InitResponse>| {
                let result = init(call, &request, &node, &shared);
                // an answer that finds no operator any more is kept: the same request asked again gets it
                let sent = answer.send(&response(result));
                if !matches!(*lock(&shared), Outcome::None) {
                    node.done.stop();
                }
                sent
            },
        );
        let transport = Arc::new(atls::Server::new(Some(issuer), vec![]));
        let server = Server::start("init", listener, transport, router, Limits::default())?;
        Ok(InitServer { server, outcome })
    }

    /// Stops serving and says what came of it.
    pub fn stop(self) -> Outcome {
        self.server.stop(GRACE);
        lock(&self.outcome).clone()
    }
}

/// The steps of an init, in order.
fn init(call: &Call, request: &InitRequest, node: &Node, outcome: &Mutex<Outcome>) -> Result<Done, Status> {
    check_secret(call, request, node)?;
    let (kms, salt) = parse(request)?;
    let measurement_secret = derive(&kms, &Dek::named(MEASUREMENT_SECRET_ID))?;
    let cluster = cluster_id(&measurement_secret, &salt);

    // one init at a time; the second one finds what the first has left
    let mut outcome = lock(outcome);
    match node.lock.lock(cluster) {
        Locking::Taken => node.timeline.event("locked", "this node belongs to a cluster from here on"),
        Locking::Already(id) if id == cluster => return repeat(&outcome, cluster),
        Locking::Already(_) => {
            return Err(Status::new(Code::FailedPrecondition, "node is already being activated"));
        }
        Locking::Failed(why) => {
            *outcome = Outcome::Failed(why.clone());
            return Err(Status::new(Code::Internal, format!("locking the node: {why}")));
        }
    }
    match set_up(&kms, salt, cluster, request, node) {
        Ok(done) => {
            *outcome = Outcome::Done(cluster);
            Ok(done)
        }
        Err(error) => {
            *outcome = Outcome::Failed(error.message().into());
            Err(error)
        }
    }
}

/// What follows the lock: each step survives power loss, and the mark of completion is the last.
fn set_up(
    kms: &ClusterKms,
    salt: [u8; SALT_LEN],
    cluster: [u8; CLUSTER_ID_LEN],
    request: &InitRequest,
    node: &Node,
) -> Result<Done, Status> {
    let failed = |what: &str, error: &dyn std::fmt::Display| Status::new(Code::Internal, format!("{what}: {error}"));
    let disk = NewDisk::open(&node.disk).map_err(|error| failed("opening the state disk", &error))?;
    let key = derive(kms, &Dek::disk(&disk.uuid()))?;
    let state = NodeState { role: Role::ControlPlane, measurement_salt: salt };
    disk.commit(&node.root, &state, &key).map_err(|error| failed("setting up the state disk", &error))?;
    node.timeline.event("committed", "the state disk has its permanent key");
    let kubeconfig = cluster::set_up(request).map_err(|error| failed("initializing the cluster", &error))?;
    mark_complete(&node.root).map_err(|error| failed("finishing", &error))?;
    node.timeline.event("complete", "this node comes back by itself after a reboot");
    Ok(Done { cluster, kubeconfig })
}

struct Done {
    cluster: [u8; CLUSTER_ID_LEN],
    kubeconfig: Vec<u8>,
}

fn repeat(outcome: &Outcome, cluster: [u8; CLUSTER_ID_LEN]) -> Result<Done, Status> {
    match outcome {
        Outcome::Done(id) if *id == cluster => Ok(Done { cluster, kubeconfig: vec![] }),
        Outcome::Failed(why) => Err(Status::new(Code::FailedPrecondition, format!("an earlier init failed: {why}"))),
        _ => Err(Status::new(Code::FailedPrecondition, "node is already being activated")),
    }
}

fn check_secret(call: &Call, request: &InitRequest, node: &Node) -> Result<(), Status> {
    let peer = call.peer().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
    match node.guard.check(peer, &request.init_secret, Instant::now()) {
        Verdict::Right => Ok(()),
        Verdict::Wrong => {
            log::warn!("init from {peer} with a wrong secret: refused");
            Err(Status::new(Code::PermissionDenied, "invalid init secret"))
        }
        Verdict::Wait(time) => {
            let seconds = time.as_secs() + 1;
            Err(Status::new(Code::ResourceExhausted, format!("too many wrong init secrets: try again in {seconds} s")))
        }
    }
}

fn parse(request: &InitRequest) -> Result<(ClusterKms, [u8; SALT_LEN]), Status> {
    let kms = ClusterKms::from_uris(&request.kms_uri, &request.storage_uri)
        .map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?;
    let salt = request.measurement_salt.as_slice().try_into().map_err(|_| {
        let length = request.measurement_salt.len();
        Status::new(Code::InvalidArgument, format!("measurement_salt has {length} bytes, expected {SALT_LEN}"))
    })?;
    Ok((kms, salt))
}

fn derive(kms: &ClusterKms, name: &Dek) -> Result<crate::crypto::Secret, Status> {
    kms.dek(name, KEY_LEN).map_err(|error| Status::new(Code::Internal, error.to_string()))
}

/// A failure travels inside the stream, which itself ends well: so the old operator's tool shows its text.
fn response(result: Result<Done, Status>) -> InitResponse {
    let kind = match result {
        Ok(Done { cluster, kubeconfig }) => {
            Kind::InitSuccess(InitSuccessResponse { kubeconfig, owner_id: vec![], cluster_id: cluster.to_vec() })
        }
        Err(status) => Kind::InitFailure(InitFailureResponse { error: status.to_string() }),
    };
    InitResponse { kind: Some(kind) }
}

fn lock(outcome: &Mutex<Outcome>) -> std::sync::MutexGuard<'_, Outcome> {
    outcome.lock().unwrap_or_else(PoisonError::into_inner)
}
