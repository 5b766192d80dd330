//! The member controller of a control plane: works on members after they have joined. It hands out no
//! keys, and admits no node: the [join service](crate::join_service) does that, in another process with
//! another account.
//!
//! | file | work |
//! |---|---|
//! | [`approver`] | approval of kubelets' certificates |
//! | [`watch`] | asks members for fresh evidence, and shows the result at their Nodes |
//! | [`deleted_machines`] | the records of machines that no longer exist are deleted |
//! | [`audit`] | a log line, an event and a count for each decision |
//!
//! A replica runs on each control plane. All approve certificates and delete records, of which the API
//! server accepts the first change; one of them asks the members.

pub mod approver;
pub mod audit;
pub mod deleted_machines;
pub mod watch;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::cluster::events::Events;
use crate::cluster::instances::Instances;
use crate::cluster::joined::Joined;
use crate::cluster::{Cluster, Watches};
use crate::metrics::Registry;
use crate::serving::{Beside, CannotListen};
use crate::shared_metrics;
use approver::{Approver, ApproverThreads};
use audit::MemberAudit;
use base::stop::Stop;
use cloud_api::Service;
use collateral::Fetching;
use kubernetes::client::{self, Client};
use kubernetes::services::migration::Migration;
use watch::{Judging, Watching};

/// What the operator wants.
pub struct Options {
    /// The address of a plaintext gRPC server for the kubelet's probes.
    pub health: Option<SocketAddr>,
    /// The address of the HTTP server for metrics.
    pub metrics: Option<SocketAddr>,
    /// Access to the Kubernetes API.
    pub kubernetes: client::ApiAccess,
    /// The cloud's metadata service, which lists the machines.
    pub metadata: Option<Arc<dyn Service>>,
    /// Until when nodes without a record renew their certificates.
    pub migration: Migration,
    /// When the records of deleted machines are deleted: the program uses the default.
    pub deleted_machines: deleted_machines::Times,
    /// Where collateral comes from; only for its metrics.
    pub collateral: Option<Arc<Fetching>>,
    /// How members are asked for fresh evidence, and what judges it; `None`: they are not.
    pub watch: Option<(watch::Options, Judging)>,
}

/// The running controllers.
pub struct MemberController {
    stop: Stop,
    registry: Registry,
    beside: Beside,
    watching: Option<Watching>,
    /// The HTTP server for attestation results.
    results: Option<http::server::HttpServer>,
    // Dropped after `stop` was called: it ends their threads.
    _watches: Watches,
    _approving: ApproverThreads,
    _deleting: Joined,
    _sending: Joined,
}

impl Drop for MemberController {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

impl MemberController {
    /// Works until [`MemberController::stop`]. Fails if an address cannot be listened on, or a thread
    /// cannot be started.
    pub fn start(options: Options) -> Result<MemberController, Error> {
        let registry = Registry::new();
        registry.add_process();
        shared_metrics::collateral(&registry, options.collateral.as_ref());
        let stop = Stop::new();
        let client = Client::new(options.kubernetes, &stop);
        let (cluster, watches) = Cluster::follow(&client, |_| {})?;
        let (events, sending) = Events::start(&client, "member-controller")?;
        let audit = Arc::new(MemberAudit::new(&registry, events));
        let instances = Arc::new(Instances::new(options.metadata));
        let (migration, times) = (options.migration, options.deleted_machines);
        let deleting =
            deleted_machines::start(&client, &cluster, &instances, migration, times, &registry)?;
        let approving = Approver::start(&cluster, &instances, &audit, migration)?;
        let watch = |(options, judging)| {
            Watching::start(options, judging, (&client, &cluster), &audit, &registry)
        };
        let watching = options.watch.map(watch).transpose()?;
        let results = watching.as_ref().map(Watching::serve_results);
        let results = results.transpose()?.flatten();
        let ready = approving.ready();
        let beside = Beside::start(options.health, options.metrics, ready, &registry)?;
        log::info!("managing the members of this cluster");
        Ok(MemberController {
            stop,
            registry,
            beside,
            watching,
            results,
            _watches: watches,
            _approving: approving,
            _deleting: deleting,
            _sending: sending,
        })
    }

    /// Gives the turn to ask members to another replica.
    pub fn stop(&self) {
        if let Some(watching) = &self.watching {
            watching.finish();
        }
        self.stop.stop();
    }

    /// Returns the registry of the metrics.
    pub fn metrics(&self) -> &Registry {
        &self.registry
    }

    /// Returns the address of the health server, if there is one.
    pub fn health_addr(&self) -> Option<SocketAddr> {
        self.beside.health_addr()
    }

    /// Returns the address of the metrics server, if there is one.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.beside.metrics_addr()
    }

    /// Returns the address of the server for attestation results, if there is one.
    pub fn results_addr(&self) -> Option<SocketAddr> {
        self.results
            .as_ref()
            .map(http::server::HttpServer::local_addr)
    }
}

/// Why the controllers cannot start.
#[derive(Debug)]
pub enum Error {
    /// The program cannot listen on this address.
    Listen(SocketAddr, io::Error),
    /// A thread cannot be started.
    Thread(io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            Error::Thread(error) => write!(f, "cannot start a thread: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Thread(error)
    }
}

impl From<CannotListen> for Error {
    fn from((address, error): CannotListen) -> Error {
        Error::Listen(address, error)
    }
}
