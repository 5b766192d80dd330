//! The join service of a control plane: lets machines in that prove what they run.
//!
//! Attested TLS ([`attest::atls`]) does the proving: a caller's certificate carries an attestation document that meets the
//! [`policy`] in force, or there is no connection. What a caller may have then ([`tickets`]):
//!
//! - `/join.API/IssueJoinTicket`: all that a new node needs to become a member.
//! - `/join.API/IssueRejoinTicket`: the key of its disk and the measurement secret, for a node that boots again.
//!
//! Beside that it approves the certificates that kubelets ask of the cluster itself: to be known as their node by the token of
//! their ticket, and to serve.
//!
//! | file | work |
//! |---|---|
//! | [`tickets`] | the two requests, step by step |
//! | `request`, [`refusal`] | the form of a request; why there is no ticket |
//! | `instances`, [`records`], [`migration`] | which machine may have which name, role and disk; disks from before |
//! | [`keys`], `pki`, `tokens` | what a ticket is made of: keys of the key service, the CA on this node's disk, bootstrap tokens |
//! | [`cluster`] | what is known of the cluster, by watches |
//! | `reservation`, [`cleaner`] | control planes one at a time; what is left to be taken back |
//! | [`approver`] | certificates of kubelets, for what their machine joined as |
//! | [`audit`] | each decision: log, event, count |
//! | [`policy`] | the attestation policy's file |
//!
//! docs/join.md has every refusal, its code, and what to do about it.

pub mod approver;
pub mod audit;
pub mod cleaner;
pub mod cluster;
mod instances;
pub mod keys;
mod pki;
pub mod policy;
pub mod records;
pub mod refusal;
mod request;
mod reservation;
pub mod tickets;
mod tokens;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::observed;
use approver::Approver;
use attest::atls;
use attest::attestation::{Policy, Validator, qemu_vtpm};
use audit::{Audit, Sending};
use base::stop::Stop;
use cleaner::{Cleaner, Running};
use cloud::Metadata;
use cluster::{Cluster, Watches};
use instances::Instances;
use keys::KeyClient;
use kubernetes::client::{self, Client};
use kubernetes::services::migration::Migration;
use metrics::{Exporter, Registry};
pub use pki::DIRECTORY as PKI_DIR;
use pki::Pki;
use proto::join::{ISSUE_JOIN_TICKET, ISSUE_REJOIN_TICKET};
use proto::join::{IssueJoinTicketRequest, IssueRejoinTicketRequest};
use rpc::grpc::{self, Call, Limits, Router, Server};
use tickets::{Attached, Tickets};

/// Where the cluster's `join-config` ConfigMap is mounted.
pub const CONFIG_DIR: &str = "/var/config";
/// How long callers may still take when the service stops: a ticket waits for two keys.
pub const GRACE: Duration = Duration::from_secs(10);
/// How long what a ticket left behind may take to be undone after that.
const CLEANING: Duration = Duration::from_secs(3);

/// In the configuration directory: the attestation policy, JSON.
const POLICY_FILE: &str = "attestationConfig";
/// How long a connection stands for what its machine proved: as long as a ticket takes, with its retries.
const MAX_AGE: Duration = Duration::from_secs(60);
/// A join request with all its names and keys has a few KiB.
const MAX_REQUEST: usize = 64 << 10;

/// What the service is started with.
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
    /// Where metrics are served over HTTP.
    pub metrics: Option<SocketAddr>,
    /// The attestation variant of the cluster's nodes; this version has [`qemu_vtpm::VARIANT`] alone.
    pub variant: String,
    /// The cluster's API. Without it there are rejoin tickets only.
    pub kubernetes: Option<client::Config>,
    /// What says which machines there are. Without it every name is taken, but no control plane.
    pub metadata: Option<Metadata>,
    /// Where the cluster's CA and the files of control planes are, usually [`PKI_DIR`].
    pub pki_dir: PathBuf,
    /// Until when disks of before are taken.
    pub migration: Migration,
}

/// The service while it runs.
pub struct JoinService {
    server: Arc<Server>,
    health: Option<Server>,
    cluster: Option<Background>,
    registry: Registry,
    exporter: Option<Exporter>,
    /// After the server, which uses what it follows.
    _policy: policy::Watch,
}

/// What runs beside the server.
struct Background {
    stop: Stop,
    cleaner: Arc<Cleaner>,
    // after the stop, which ends them
    _watches: Watches,
    _approving: approver::Running,
    _cleaning: Running,
    _sending: Sending,
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

impl JoinService {
    /// Reads the policy and serves until [`JoinService::stop`].
    pub fn start(config: Config) -> Result<JoinService, Error> {
        if config.variant != qemu_vtpm::VARIANT {
            return Err(Error::Variant(config.variant));
        }
        let file = config.config_dir.join(POLICY_FILE);
        let (policy, watch) = policy::follow(&file, qemu_vtpm_validator).map_err(Error::Policy)?;
        let (listen, health) = (config.listen, config.health);
        let listen_error = |error| Error::Listen(listen, error);
        let listener = TcpListener::bind(listen).map_err(listen_error)?;
        // the service itself proves nothing, as callers of the old system expect
        let (registry, metrics) = (Registry::new(), config.metrics);
        policy.add_metrics(&registry);
        let tls = Arc::new(atls::Server::new(None, vec![policy.clone()]));
        let (tickets, cluster) = tickets(config, &registry)?;
        let router = router(Arc::new(tickets.judged_by(policy.clone())));
        let limits = Limits {
            message_bytes: MAX_REQUEST,
            max_age: Some(MAX_AGE),
            ..Limits::default()
        };
        let server =
            Server::start("join-service", listener, tls, router, limits).map_err(listen_error)?;
        let server = Arc::new(server);
        let served = Arc::downgrade(&server);
        policy.on_change(move || {
            if let Some(server) = served.upgrade() {
                server.close_connections("the attestation policy changed");
            }
        });
        observed::server(&registry, "join-service", &server);
        registry.add_process();
        let health = health.map(serve_health).transpose()?;
        let exporter = metrics.map(|address| {
            Exporter::start(address, &registry).map_err(|e| Error::Listen(address, e))
        });
        let exporter = exporter.transpose()?;
        if let Some(exporter) = &exporter {
            log::info!("metrics on http://{}/metrics", exporter.local_addr());
        }
        log::info!(
            "letting nodes in on {} that meet {}",
            server.local_addr(),
            file.display()
        );
        Ok(JoinService {
            server,
            health,
            cluster,
            registry,
            exporter,
            _policy: watch,
        })
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
        if let Some(cluster) = &self.cluster {
            cluster.cleaner.finish(CLEANING);
            cluster.stop.stop();
        }
    }

    /// What it counts and measures.
    pub fn metrics(&self) -> &Registry {
        &self.registry
    }

    /// Where that is served.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.exporter.as_ref().map(Exporter::local_addr)
    }
}

/// What makes tickets, and what runs beside it where there is a cluster.
fn tickets(config: Config, registry: &Registry) -> Result<(Tickets, Option<Background>), Error> {
    if config.metadata.is_none() {
        log::warn!(
            "no metadata service says which machines there are: every name is taken, and no control plane is let in"
        );
    }
    let (keys, instances) = (
        Arc::new(KeyClient::new(&config.key_service, config.key_auth)),
        Arc::new(Instances::new(config.metadata)),
    );
    let pki = Pki::new(&config.pki_dir);
    let migration = config.migration;
    migration.announce(SystemTime::now());
    let help = "1 while disks without a record are opened (--migrate-until), else 0.";
    registry.gauge_of("firstlight_join_migrating", help, &[], move || {
        Some(f64::from(u8::from(migration.is_on(SystemTime::now()))))
    });
    let Some(kubernetes) = config.kubernetes else {
        log::warn!(
            "no access to a cluster's API: no new node is let in, and any machine that meets the policy gets the key of any \
             disk, since nobody knows which machine has which"
        );
        let tickets = Tickets::new(
            keys,
            config.config_dir,
            pki,
            instances,
            None,
            Audit::new(registry).into(),
            migration,
        );
        return Ok((tickets, None));
    };
    let stop = Stop::new();
    let client = Client::new(kubernetes, &stop);
    let (cleaner, cleaning) = Cleaner::start(&client).map_err(Error::Thread)?;
    let (cluster, watches) = Cluster::follow(&client, &cleaner).map_err(Error::Thread)?;
    let (audit, sending) = Audit::start(&client, registry).map_err(Error::Thread)?;
    let counted = Arc::downgrade(&cleaner);
    registry.gauge_of(
        "firstlight_join_tokens",
        "Bootstrap tokens of this service that wait for their nodes.",
        &[],
        move || counted.upgrade().map(|cleaner| cleaner.tokens() as f64),
    );
    let audit = Arc::new(audit);
    let approving = Approver::start(&cluster, &instances, &audit).map_err(Error::Thread)?;
    let attached = Attached {
        cluster,
        cleaner: cleaner.clone(),
    };
    let tickets = Tickets::new(
        keys,
        config.config_dir,
        pki,
        instances,
        Some(attached),
        audit,
        migration,
    );
    let background = Background {
        stop,
        cleaner,
        _watches: watches,
        _approving: approving,
        _cleaning: cleaning,
        _sending: sending,
    };
    Ok((tickets, Some(background)))
}

fn serve_health(address: SocketAddr) -> Result<Server, Error> {
    grpc::serve_health(address).map_err(|error| Error::Listen(address, error))
}

/// Whoever gets a ticket must have joined no cluster since it started, or machines of other clusters would get keys of this one.
fn qemu_vtpm_validator(policy: &str) -> Result<Arc<dyn Validator>, String> {
    let policy = Policy::from_json(policy)
        .map_err(|error| error.to_string())?
        .expecting_fresh();
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
    /// A thread cannot be started.
    Thread(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Variant(variant) => {
                let expected = qemu_vtpm::VARIANT;
                write!(
                    f,
                    "attestation variant {variant:?} is not supported by this version; expected {expected}"
                )
            }
            Error::Policy(error) => f.write_str(error),
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            Error::Thread(error) => write!(f, "cannot start a thread: {error}"),
        }
    }
}

impl std::error::Error for Error {}

/// Its methods.
pub fn router(tickets: Arc<Tickets>) -> Router {
    let rejoin = tickets.clone();
    Router::new()
        .unary(
            ISSUE_REJOIN_TICKET,
            move |call: &Call, request: IssueRejoinTicketRequest| rejoin.rejoin(call, &request),
        )
        .unary(
            ISSUE_JOIN_TICKET,
            move |call: &Call, request: IssueJoinTicketRequest| tickets.join(call, &request),
        )
}

/// Makes rejoin tickets with keys of this service, and nothing else.
pub fn rejoin_only(keys: KeyClient) -> Arc<Tickets> {
    let (pki, instances) = (Pki::new(PKI_DIR.as_ref()), Arc::new(Instances::new(None)));
    let audit = Arc::new(Audit::new(&Registry::new()));
    Arc::new(Tickets::new(
        Arc::new(keys),
        CONFIG_DIR.into(),
        pki,
        instances,
        None,
        audit,
        Migration::default(),
    ))
}
