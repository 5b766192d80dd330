//! The metrics over plain HTTP: `GET /metrics`.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use http::server::{ServedResponse, ServerLimits};

use super::Registry;

/// Enough for two collectors and a person.
const LIMITS: ServerLimits = ServerLimits {
    connections: 8,
    of_peer: 4,
    // Prometheus itself gives up after 10 s
    time: Duration::from_secs(5),
};
/// The media type of the text format, as Prometheus expects it.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A running server; dropping it stops it.
pub struct Exporter(http::server::HttpServer);

impl Exporter {
    /// Serves the metrics at this address; port 0 picks a free port. The answer has no secrets, so
    /// anyone may ask.
    pub fn start(listen: SocketAddr, registry: &Registry) -> io::Result<Exporter> {
        let registry = registry.clone();
        let pages = move |target: &str, _| match target.split('?').next() {
            Some("/metrics") => ServedResponse::ok(TEXT_FORMAT, registry.render()),
            _ => ServedResponse::status("404 Not Found"),
        };
        http::server::HttpServer::start("metrics", listen, LIMITS, pages).map(Exporter)
    }

    /// Returns the address of the listening socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests of `http::server` show that a server keeps its limits.
    #[test]
    fn the_server_has_the_promised_limits() {
        assert_eq!(
            (LIMITS.connections, LIMITS.time),
            (8, Duration::from_secs(5))
        );
        assert_eq!(http::server::MAX_HEAD, 8 << 10);
    }
}
