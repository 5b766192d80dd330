//! What the services run: a gRPC server, and beside it a server for health checks and one for metrics. The member controller has only the
//! latter.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use crate::metrics::{Exporter, Registry};
use crate::{probe, shared_metrics};
use rpc::grpc::{Limits, Router, Server};
use transport::Accept;

/// An address on which no server can listen, and why.
pub type CannotListen = (SocketAddr, io::Error);

/// The addresses of a service. The first is open, so a service whose address is taken fails before it starts anything.
pub struct Addresses {
    listen: SocketAddr,
    listener: TcpListener,
    health: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
}

impl Addresses {
    /// Opens the address of the gRPC server.
    pub fn open(
        listen: SocketAddr,
        health: Option<SocketAddr>,
        metrics: Option<SocketAddr>,
    ) -> Result<Addresses, CannotListen> {
        let listener = TcpListener::bind(listen).map_err(|error| (listen, error))?;
        Ok(Addresses {
            listen,
            listener,
            health,
            metrics,
        })
    }
}

/// The methods of a service, and who may call them.
pub struct Api {
    /// Accepts the connections of callers.
    pub accept: Arc<dyn Accept>,
    /// The methods.
    pub router: Router,
    /// The limits of connections and calls.
    pub limits: Limits,
}

/// The servers beside that of a service: for the kubelet's probes, and for metrics.
pub struct Beside {
    health: Option<Server>,
    exporter: Option<Exporter>,
}

impl Beside {
    /// Starts those that have an address. The health is NOT_SERVING until `ready` returns true.
    pub fn start(
        health: Option<SocketAddr>,
        metrics: Option<SocketAddr>,
        ready: impl Fn() -> bool + Send + Sync + 'static,
        registry: &Registry,
    ) -> Result<Beside, CannotListen> {
        let health = health
            .map(|address| probe::serve_health(address, ready).map_err(|error| (address, error)));
        let health = health.transpose()?;
        let exporter = metrics
            .map(|address| Exporter::start(address, registry).map_err(|error| (address, error)));
        let exporter = exporter.transpose()?;
        if let Some(exporter) = &exporter {
            log::info!(
                "serving metrics on http://{}/metrics",
                exporter.local_addr()
            );
        }
        Ok(Beside { health, exporter })
    }

    /// Returns the address of the health server, if there is one.
    pub fn health_addr(&self) -> Option<SocketAddr> {
        self.health.as_ref().map(Server::local_addr)
    }

    /// Returns the address of the metrics server, if there is one.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.exporter.as_ref().map(Exporter::local_addr)
    }
}

/// The running servers of a service.
pub struct Serving {
    /// The gRPC server.
    pub server: Arc<Server>,
    beside: Beside,
}

impl Serving {
    /// Starts the servers, and adds the metrics of the gRPC server and of the process. The health is NOT_SERVING until `ready` returns
    /// true.
    pub fn start(
        name: &'static str,
        addresses: Addresses,
        api: Api,
        ready: impl Fn() -> bool + Clone + Send + Sync + 'static,
        registry: &Registry,
    ) -> Result<Serving, CannotListen> {
        let router = api.router.ready_when(ready.clone());
        let server = Server::start(name, addresses.listener, api.accept, router, api.limits)
            .map_err(|error| (addresses.listen, error))?;
        shared_metrics::server(registry, name, &server);
        registry.add_process();
        let beside = Beside::start(addresses.health, addresses.metrics, ready, registry)?;
        Ok(Serving {
            server: Arc::new(server),
            beside,
        })
    }

    /// Returns the address of the gRPC server.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Returns the address of the separate health server, if there is one.
    pub fn health_addr(&self) -> Option<SocketAddr> {
        self.beside.health_addr()
    }

    /// Returns the address of the metrics server, if there is one.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.beside.metrics_addr()
    }

    /// Accepts no further calls, and waits up to `grace` until the running ones end.
    pub fn stop(&self, grace: Duration) {
        // The health server stops first, so that load balancers send no further calls.
        if let Some(health) = &self.beside.health {
            health.stop(Duration::ZERO);
        }
        self.server.stop(grace);
    }
}
