//! The join service of a control plane: admits machines to the cluster that prove what software
//! they run.
//!
//! The proof is attested TLS ([`atls`]): the caller's certificate carries an attestation document.
//! The connection is refused unless the document meets the [`policy`] in force. In the strong form
//! the service proves its machine too ([`evidence`]). A caller may then ask for a ticket
//! ([`tickets`]):
//!
//! - `/join.API/IssueJoinTicket`: everything that a new node needs to become a member.
//! - `/join.API/IssueRejoinTicket`: the key of its state disk and the measurement secret, for a
//!   node that boots again.
//!
//! | file | work |
//! |---|---|
//! | [`tickets`] | the two requests, step by step |
//! | `node_files`, `admission` | the operator's files for new nodes; the changes of the cluster that admit a node |
//! | `request` | validation of a request |
//! | `claimed_machine`, [`records`], `file_records` | which machine may have which name, role and disk; records without Kubernetes |
//! | `pki`, `tokens` | the parts of a ticket: the cluster's CA, bootstrap tokens |
//! | `admission_queue` | when a caller's turn comes if too many ask at once |
//! | `reservation`, `lease` | control planes join one at a time |
//! | [`cleaner`] | the leftovers of failed tickets are removed |
//! | [`audit`] | a log line, an event and a count for each decision |
//! | [`policy`] | the file of the attestation policy |
//! | [`evidence`] | the proof of this machine for nodes |
//! | `constellation` | the evidence of this machine for every caller, as in Constellation |
//!
//! [`cluster`](crate::cluster) has its view of the cluster, which it shares with the
//! [member controller](crate::member_controller): that works on members that have joined, in another process.
//!
//! docs/join.md lists every refusal, its code, and what to do about it.

mod admission;
pub mod admission_queue;
pub mod audit;
mod claimed_machine;
pub mod cleaner;
pub mod constellation;
pub mod evidence;
pub mod file_records;
mod lease;
mod node_files;
mod pki;
pub mod policy;
pub mod records;
mod request;
mod reservation;
pub mod tickets;
mod tokens;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::cluster::events::Events;
use crate::cluster::instances::Instances;
use crate::cluster::joined::Joined;
use crate::cluster::keys::{self, KeyClient};
use crate::cluster::secrets::Secrets;
use crate::cluster::{Cluster, Watches};
use crate::metrics::Registry;
use crate::policy_file::{self, Loaded};
use crate::policy_operators::PolicyOperators;
use crate::serving::{Addresses, Api, CannotListen, Serving};
use crate::{CONFIG_DIR, shared_metrics};
use admission::ClusterAccess;
use admission_queue::AdmissionQueue;
use audit::Audit;
use base::stop::Stop;
use cleaner::{Cleaner, CleanerThreads};
use cloud_api::Service;
use collateral::Fetching;
use constellation::Verification;
use evidence::{NodeAcceptor, RemoteIssuer};
use file_records::FileRecords;
use kubernetes::client::{self, Client};
use kubernetes::services::migration::Migration;
use kubernetes::wrapping_key;
pub use node_files::DIRECTORY as NODE_FILES_DIR;
use node_files::NodeFiles;
use pki::Pki;
pub use pki::{CONTROL_PLANE_FILES, DIRECTORY as PKI_DIR};
use policy::PolicyFile;
use proto::join::{ISSUE_JOIN_TICKET, ISSUE_REJOIN_TICKET, MAX_REQUEST};
use proto::join::{IssueJoinTicketRequest, IssueRejoinTicketRequest};
use rpc::grpc::{Call, Limits, Router, Server};
use tickets::Tickets;
use verifier::{Policy, Variant};

/// How long the cleanup of failed tickets may take after that.
const CLEANING: Duration = Duration::from_secs(3);

/// How long the evidence of a connection is accepted: as long as a ticket takes, including its
/// retries.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Number of calls at once that is left for other methods while as many callers as possible ask for join
/// tickets: for nodes that boot again.
const OTHER_CALLS: usize = 64;

/// The configuration of the service.
pub struct Config {
    /// The address to listen on. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The addresses of the key service, `host:port[,host:port]..`.
    pub key_service: String,
    /// How this service and the key service authenticate each other.
    pub key_auth: keys::Auth,
    /// The directory with the files of [`CONFIG_DIR`].
    pub config_dir: PathBuf,
    /// The address of a plaintext server with `grpc.health.v1` only. A kubelet uses it, because it
    /// cannot attest itself.
    pub health: Option<SocketAddr>,
    /// The address of the HTTP server for metrics.
    pub metrics: Option<SocketAddr>,
    /// The attestation variant of the cluster's nodes.
    pub variant: &'static Variant,
    /// The unix socket at which the host proves this machine, usually [`evidence::SOCKET`]. Without
    /// it, the service proves nothing to nodes.
    pub evidence: Option<PathBuf>,
    /// The address of Constellation's verification service, gRPC without TLS. It needs `evidence`.
    pub verification: Option<SocketAddr>,
    /// The address of that service over HTTP.
    pub verification_http: Option<SocketAddr>,
    /// Whether nodes of the old form of attested TLS are refused.
    pub require_strong: bool,
    /// Access to the Kubernetes API. Without it, the service issues rejoin tickets only.
    pub kubernetes: Option<client::ApiAccess>,
    /// The folder of the records of disks, for a service without Kubernetes, and until when disks
    /// without a record are recorded for the machine that asks first.
    pub records: Option<(PathBuf, Migration)>,
    /// The cloud's metadata service, which lists the machines. Without it, a worker may have any
    /// name, and no control plane can join.
    pub metadata: Option<Arc<dyn Service>>,
    /// The directory with the cluster's CA and the files for control planes, usually [`PKI_DIR`].
    pub pki_dir: PathBuf,
    /// The directory of the wrapping key.
    pub wrapping_key_dir: PathBuf,
    /// The directory of the operator's files for new nodes, usually [`NODE_FILES_DIR`]. It need not exist.
    pub node_files_dir: PathBuf,
    /// Until when disks without a record are accepted.
    pub migration: Migration,
    /// Where the certificates of chips and the collateral of platforms come from; `None` if
    /// machines must send them.
    pub collateral: Option<Arc<Fetching>>,
}

/// The running service.
pub struct JoinService {
    serving: Serving,
    verification: Option<Server>,
    _verification_http: Option<http::server::HttpServer>,
    cluster: Option<Background>,
    registry: Registry,
    /// Dropped after the server, which uses the policy that this watch keeps up to date.
    _policy: policy::PolicyWatch,
}

/// The background threads of the service.
struct Background {
    stop: Stop,
    cleaner: Arc<Cleaner>,
    // Dropped after `stop` was called: it ends their threads.
    _watches: Watches,
    _cleaning: CleanerThreads,
    _sending: Joined,
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

impl JoinService {
    /// Reads the policy and serves until [`JoinService::stop`]. Fails if the policy is not valid,
    /// an address cannot be listened on, or a thread cannot be started.
    pub fn start(config: Config) -> Result<JoinService, Error> {
        let file = config.config_dir.join(policy_file::NAME);
        let (variant, sources) = (config.variant, shared_metrics::sources(&config.collateral));
        let parse = move |text: &str| {
            // a member of another cluster must not get keys of this cluster
            let policy = Policy::from_json(text)?.expecting_fresh();
            Ok(endorsement::validator(variant, policy, &sources)?)
        };
        let operators = PolicyOperators::keeping(&config.wrapping_key_dir);
        let loaded =
            Loaded::open(&file, Some(operators), Box::new(parse)).map_err(Error::Policy)?;
        let (policy, watch) = policy::follow(loaded).map_err(Error::Thread)?;
        let addresses = Addresses::open(config.listen, config.health, config.metrics)?;
        let registry = Registry::new();
        policy.add_metrics(&registry);
        shared_metrics::collateral(&registry, config.collateral.as_ref());
        let queue = Arc::<AdmissionQueue>::default();
        let accept = acceptor(&config, &policy, &queue, &registry);
        let (verification, verification_http) = verification(&config)?;
        let (tickets, cluster) = tickets(config, &registry)?;
        let secrets = tickets.secrets();
        let api = Api {
            accept,
            router: router(Arc::new(
                tickets.with_policy(policy.clone()).with_queue(queue),
            )),
            limits: Limits {
                message_bytes: MAX_REQUEST,
                max_age: Some(MAX_AGE),
                // the calls of one address, such as a load balancer's, get three quarters of these
                handlers: (admission_queue::CALLERS + OTHER_CALLS) * 4 / 3,
                ..Limits::default()
            },
        };
        // until then, an upgrade keeps the pod of the earlier version, which has its keys
        let ready = move || secrets.are_served();
        let serving = Serving::start("join-service", addresses, api, ready, &registry)?;
        let served = Arc::downgrade(&serving.server);
        policy.on_change(move || {
            if let Some(server) = served.upgrade() {
                server.close_connections("the attestation policy changed");
            }
        });
        log::info!(
            "serving join requests on {} under the policy {}",
            serving.local_addr(),
            file.display()
        );
        Ok(JoinService {
            serving,
            verification,
            _verification_http: verification_http,
            cluster,
            registry,
            _policy: watch,
        })
    }

    /// Returns the address of the gRPC server.
    pub fn local_addr(&self) -> SocketAddr {
        self.serving.local_addr()
    }

    /// Returns the address of the health server, if there is one.
    pub fn health_addr(&self) -> Option<SocketAddr> {
        self.serving.health_addr()
    }

    /// Accepts no further calls, and waits up to `grace` until the running ones end.
    pub fn stop(&self, grace: Duration) {
        if let Some(verification) = &self.verification {
            verification.stop(Duration::ZERO);
        }
        self.serving.stop(grace);
        if let Some(cluster) = &self.cluster {
            cluster.cleaner.finish(CLEANING);
            cluster.stop.stop();
        }
    }

    /// Returns the registry of the service's metrics.
    pub fn metrics(&self) -> &Registry {
        &self.registry
    }

    /// Returns the address of the metrics server, if there is one.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.serving.metrics_addr()
    }
}

/// Creates the attested TLS in which nodes prove themselves, and this machine if the host gives evidence.
fn acceptor(
    config: &Config,
    policy: &Arc<PolicyFile>,
    queue: &Arc<AdmissionQueue>,
    registry: &Registry,
) -> Arc<NodeAcceptor> {
    let issuer = config.evidence.clone().map(|socket| {
        let issuer = RemoteIssuer::new(config.variant, socket);
        match &config.collateral {
            Some(fetching) => issuer.with_collateral(fetching),
            None => issuer,
        }
    });
    let acceptor = NodeAcceptor::new(policy, issuer, config.require_strong, registry);
    let acceptor = Arc::new(acceptor.with_queue(queue.clone()));
    // the log says at the start whether the host gives evidence
    acceptor.can_prove();
    if config.evidence.is_some() {
        let acceptor = acceptor.clone();
        registry.gauge_of(
            "firstlight_join_proves_itself",
            "1 while the host gives evidence, so that nodes can verify this service, else 0; absent without --evidence.",
            &[],
            move || Some(f64::from(u8::from(acceptor.can_prove()))),
        );
    }
    acceptor
}

/// Starts the servers that show evidence of this machine to every caller: by gRPC, and over HTTP.
fn verification(
    config: &Config,
) -> Result<(Option<Server>, Option<http::server::HttpServer>), Error> {
    let Some(socket) = config.evidence.clone() else {
        return Ok((None, None));
    };
    let documents = Arc::new(Verification::new(config.variant, socket));
    let refused = |address| move |error| Error::Listen(address, error);
    let grpc = config
        .verification
        .map(|address| constellation::serve(address, documents.clone()).map_err(refused(address)));
    let http = config.verification_http.map(|address| {
        constellation::serve_http(address, documents.clone()).map_err(refused(address))
    });
    Ok((grpc.transpose()?, http.transpose()?))
}

/// Creates the ticket issuer, and the background threads if there is a cluster.
fn tickets(config: Config, registry: &Registry) -> Result<(Tickets, Option<Background>), Error> {
    if config.metadata.is_none() && config.records.is_none() {
        log::warn!(
            "no metadata service is configured (--cloud-provider): workers may have any name, and no control plane can join"
        );
    }
    let keys = KeyClient::new(&config.key_service, config.key_auth);
    let secrets = Arc::new(Secrets::new(keys, config.config_dir));
    let (pki, instances) = (
        Pki::new(&config.pki_dir, &config.wrapping_key_dir),
        Arc::new(Instances::new(config.metadata)),
    );
    let migration = config.migration;
    migration.announce(SystemTime::now());
    let help = "1 while disks without a record are opened (--migrate-until), else 0.";
    registry.gauge_of("firstlight_join_migrating", help, &[], move || {
        Some(f64::from(u8::from(migration.is_on(SystemTime::now()))))
    });
    let Some(kubernetes) = config.kubernetes else {
        let files = without_cluster(config.records)?;
        let audit = Arc::new(Audit::new(registry, None));
        let tickets = Tickets::new(secrets, pki, instances, None, audit, migration);
        return Ok((tickets.with_files(files), None));
    };
    let stop = Stop::new();
    let client = Client::new(kubernetes, &stop);
    let (cleaner, cleaning) = Cleaner::start(&client).map_err(Error::Thread)?;
    let told = cleaner.clone();
    let follow = Cluster::follow(&client, move |change| told.on(change));
    let (cluster, watches) = follow.map_err(Error::Thread)?;
    let (events, sending) = Events::start(&client, "join-service").map_err(Error::Thread)?;
    let counted = Arc::downgrade(&cleaner);
    registry.gauge_of(
        "firstlight_join_tokens",
        "Bootstrap tokens of this service that wait for their nodes.",
        &[],
        move || {
            counted
                .upgrade()
                .map(|cleaner| cleaner.count_own_tokens() as f64)
        },
    );
    let audit = Arc::new(Audit::new(registry, Some(events)));
    let access = ClusterAccess::new(cluster, cleaner.clone());
    let tickets = Tickets::new(secrets, pki, instances, Some(access), audit, migration)
        .with_node_files(NodeFiles::new(&config.node_files_dir));
    let background = Background {
        stop,
        cleaner,
        _watches: watches,
        _cleaning: cleaning,
        _sending: sending,
    };
    Ok((tickets, Some(background)))
}

/// Opens the folder of the records of disks for a service without Kubernetes, if there is one.
fn without_cluster(records: Option<(PathBuf, Migration)>) -> Result<Option<FileRecords>, Error> {
    if records.is_none() {
        log::warn!(
            "no access to the Kubernetes API: no new node can join, and any machine that meets the policy gets the key of \
             any disk, because there is no record of which machine has which disk"
        );
    }
    records.map(|it| open_records(&it)).transpose()
}

/// Opens the folder of the records of disks.
fn open_records((dir, enrolling): &(PathBuf, Migration)) -> Result<FileRecords, Error> {
    let files =
        FileRecords::open(dir, *enrolling).map_err(|error| Error::Records(dir.clone(), error))?;
    let place = dir.display();
    if enrolling.is_on(SystemTime::now()) {
        log::warn!(
            "until the end of {enrolling} (--enroll-until), this service gives a disk without a record in {place} to the first machine that asks for its key"
        )
    } else {
        log::info!("this service opens only disks with a record in {place}")
    }
    Ok(files)
}

/// Why the service cannot start.
#[derive(Debug)]
pub enum Error {
    /// The policy file cannot be used.
    Policy(policy_file::Error),
    /// The service cannot listen on this address.
    Listen(SocketAddr, io::Error),
    /// The folder of the records of disks cannot be used.
    Records(PathBuf, io::Error),
    /// A thread cannot be started.
    Thread(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Policy(error) => error.fmt(f),
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            Error::Records(dir, error) => {
                write!(
                    f,
                    "cannot open the records of disks in {}: {error}",
                    dir.display()
                )
            }
            Error::Thread(error) => write!(f, "cannot start a thread: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<CannotListen> for Error {
    fn from((address, error): CannotListen) -> Error {
        Error::Listen(address, error)
    }
}

/// Registers the methods of the service.
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

/// Creates an issuer of rejoin tickets only. It takes the keys from `keys` and has no access to a
/// cluster.
pub fn rejoin_only(keys: KeyClient) -> Arc<Tickets> {
    let (pki, instances) = (
        Pki::new(PKI_DIR.as_ref(), wrapping_key::DIRECTORY.as_ref()),
        Arc::new(Instances::new(None)),
    );
    let audit = Arc::new(Audit::new(&Registry::new(), None));
    let secrets = Arc::new(Secrets::new(keys, CONFIG_DIR.into()));
    let migration = Migration::default();
    Arc::new(Tickets::new(
        secrets, pki, instances, None, audit, migration,
    ))
}
