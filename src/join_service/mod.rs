//! The join service of a control plane: lets machines in that prove what they run.
//!
//! Attested TLS ([`crate::atls`]) does the proving: a caller's certificate carries an attestation document that meets the
//! [`policy`] in force, or there is no connection. What a caller may have then:
//!
//! - `/join.API/IssueRejoinTicket`: the key of the disk that it names and the measurement secret, for a node that boots
//!   again. Both come from the key service ([`keys`]).
//! - `/join.API/IssueJoinTicket`: not in this version.
//!
//! A caller learns from the code whether to come again: `INVALID_ARGUMENT` and `INTERNAL` are lasting, `UNAVAILABLE` passes.
//! What went wrong inside is for this service's log only.

pub mod keys;
pub mod policy;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::atls;
use crate::attestation::{Policy, Validator, qemu_vtpm};
use crate::crypto::{KEY_LEN, MEASUREMENT_SECRET_ID, Secret};
use crate::grpc::{Call, Code, Limits, Router, Server, Status, Transport};
use crate::kms::Uuid;
use crate::logger::peer;
use crate::proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest, IssueRejoinTicketResponse,
};
use keys::KeyClient;

/// The gRPC method for nodes that boot again.
pub const ISSUE_REJOIN_TICKET: &str = "/join.API/IssueRejoinTicket";
/// The gRPC method for new nodes.
pub const ISSUE_JOIN_TICKET: &str = "/join.API/IssueJoinTicket";

/// Where the pod listens; the node's port 30090 leads here.
pub const PORT: u16 = 9090;
/// Where the cluster's `join-config` ConfigMap is mounted.
pub const CONFIG_DIR: &str = "/var/config";
/// How long callers may still take when the service stops: a ticket waits for two keys.
pub const GRACE: Duration = Duration::from_secs(10);

/// In the configuration directory: the attestation policy, JSON.
const POLICY_FILE: &str = "attestationConfig";
/// A join request with all its names and keys has a few KiB.
const MAX_REQUEST: usize = 64 << 10;
/// The name of a service.
const MAX_HEALTH_REQUEST: usize = 256;
/// Two probes of one kubelet, and somebody who looks.
const MAX_HEALTH_CONNECTIONS: usize = 16;

/// What the service is started with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Port 0 takes a free one.
    pub listen: SocketAddr,
    /// The key service, `host:port`.
    pub key_service: String,
    /// How it and we know each other.
    pub key_auth: keys::Auth,
    /// Where [`CONFIG_DIR`]'s files are.
    pub config_dir: PathBuf,
    /// Where `grpc.health.v1` alone is served in plaintext, for a kubelet, which cannot prove itself as nodes do.
    pub health: Option<SocketAddr>,
    /// The attestation variant of the cluster's nodes; this version has [`qemu_vtpm::VARIANT`] alone.
    pub variant: String,
}

/// The service while it runs.
pub struct JoinService {
    server: Server,
    health: Option<Server>,
    /// After the server, which uses what it follows.
    _policy: policy::Watch,
}

impl JoinService {
    /// Reads the policy and serves until [`JoinService::stop`].
    pub fn start(config: &Config) -> Result<JoinService, Error> {
        if config.variant != qemu_vtpm::VARIANT {
            return Err(Error::Variant(config.variant.clone()));
        }
        let file = config.config_dir.join(POLICY_FILE);
        let (policy, watch) = policy::follow(&file, qemu_vtpm_validator).map_err(Error::Policy)?;
        let listen_error = |error| Error::Listen(config.listen, error);
        let listener = TcpListener::bind(config.listen).map_err(listen_error)?;
        // the service itself proves nothing, as callers of the old system expect
        let tls = Arc::new(atls::Server::new(None, vec![policy]));
        let router = router(Arc::new(KeyClient::new(&config.key_service, config.key_auth.clone())));
        let limits = Limits { message_bytes: MAX_REQUEST, ..Limits::default() };
        let server = Server::start("join-service", listener, tls, router, limits).map_err(listen_error)?;
        let health = config.health.map(serve_health).transpose()?;
        log::info!("letting nodes in on {} that meet {}", server.local_addr(), file.display());
        Ok(JoinService { server, health, _policy: watch })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Where it tells its health.
    pub fn health_addr(&self) -> Option<SocketAddr> {
        self.health.as_ref().map(Server::local_addr)
    }

    /// Takes no further callers, gives the present ones `grace`.
    pub fn stop(&self, grace: Duration) {
        // first, so that whoever asks sends no further callers
        if let Some(health) = &self.health {
            health.stop(Duration::ZERO);
        }
        self.server.stop(grace);
    }
}

/// Only health: the service's methods are for those who prove themselves.
fn serve_health(address: SocketAddr) -> Result<Server, Error> {
    let listen_error = |error| Error::Listen(address, error);
    let listener = TcpListener::bind(address).map_err(listen_error)?;
    let plain = |socket: TcpStream, _: Instant| Transport::plain(socket);
    let limits = Limits { message_bytes: MAX_HEALTH_REQUEST, connections: MAX_HEALTH_CONNECTIONS, ..Limits::default() };
    Server::start("health", listener, Arc::new(plain), Router::new(), limits).map_err(listen_error)
}

fn qemu_vtpm_validator(policy: &str) -> Result<Arc<dyn Validator>, String> {
    let policy = Policy::from_json(policy).map_err(|error| error.to_string())?;
    if !policy.demands_fresh() {
        log::warn!(
            "the attestation policy does not demand that PCR 15 is zero: whoever takes over a machine that has started can ask \
             for the key of any disk"
        );
    }
    Ok(Arc::new(qemu_vtpm::Validator::new(Arc::new(policy))))
}

/// Why the service does not start.
#[derive(Debug)]
pub enum Error {
    /// An attestation variant that this version does not judge.
    Variant(String),
    /// There is no good policy: what is wrong, and in which file.
    Policy(String),
    /// The address cannot be listened on.
    Listen(SocketAddr, io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Variant(variant) => {
                let expected = qemu_vtpm::VARIANT;
                write!(f, "attestation variant {variant:?} is not supported by this version; expected {expected}")
            }
            Error::Policy(error) => f.write_str(error),
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
        }
    }
}

impl std::error::Error for Error {}

/// Its methods.
pub fn router(keys: Arc<KeyClient>) -> Router {
    Router::new()
        .unary(ISSUE_REJOIN_TICKET, move |call: &Call, request: IssueRejoinTicketRequest| {
            rejoin_ticket(&keys, call, &request)
        })
        .unary(ISSUE_JOIN_TICKET, |call: &Call, _: IssueJoinTicketRequest| {
            log::warn!("{}: asked for a join ticket", peer(call.peer()));
            Err::<IssueJoinTicketResponse, _>(Status::new(
                Code::Unimplemented,
                "this version of the join service lets known nodes in again, but no new ones",
            ))
        })
}

fn rejoin_ticket(
    keys: &KeyClient,
    call: &Call,
    request: &IssueRejoinTicketRequest,
) -> Result<IssueRejoinTicketResponse, Status> {
    let peer = peer(call.peer());
    let uuid = Uuid::parse(&request.disk_uuid).ok_or_else(|| {
        log::warn!("{peer}: refused a rejoin ticket: the disk's UUID is none: {:.40?}", request.disk_uuid);
        Status::new(Code::InvalidArgument, "disk_uuid: expected a UUID of 8-4-4-4-12 hexadecimal digits")
    })?;
    let key = |id: &str| -> Result<Secret, Status> {
        keys.data_key(id, KEY_LEN, call.deadline()).map_err(|error| refusal(&peer, &uuid, &error))
    };
    let measurement_secret = key(MEASUREMENT_SECRET_ID)?;
    let state_disk_key = key(uuid.as_str())?;
    log::info!("{peer}: rejoin ticket for disk {uuid}");
    Ok(IssueRejoinTicketResponse {
        state_disk_key: state_disk_key.expose().to_vec(),
        measurement_secret: measurement_secret.expose().to_vec(),
    })
}

/// Tells the log what happened and the caller whether to come again.
fn refusal(peer: &str, uuid: &Uuid, error: &keys::Error) -> Status {
    match error {
        keys::Error::Passing(text) => {
            log::warn!("{peer}: no rejoin ticket for disk {uuid} now: {text}");
            Status::new(Code::Unavailable, "keys are not to be had at the moment: try again")
        }
        keys::Error::Lasting(text) => {
            log::error!("{peer}: no rejoin ticket for disk {uuid}: {text}");
            Status::new(Code::Internal, "the join service could not make a ticket: its log says why")
        }
    }
}
