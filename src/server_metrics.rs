//! What a gRPC server does, as metrics.

use crate::grpc::{Server, Statistics};
use crate::metrics::Registry;

/// Has `registry` tell what this server does: connections, calls in flight, what was shed; each with `name`.
pub fn add(registry: &Registry, name: &str, server: &Server) {
    let of = [("server", name)];
    let value = |read: fn(&Statistics) -> f64| {
        let statistics = server.statistics();
        move || statistics().as_ref().map(read)
    };
    registry.gauge_of(
        "firstlight_grpc_connections",
        "Connections, those in their handshake included.",
        &of,
        value(|now| now.connections as f64),
    );
    registry.gauge_of(
        "firstlight_grpc_calls_in_flight",
        "Calls whose handlers run.",
        &of,
        value(|now| now.calls_in_flight as f64),
    );
    registry.counter_of(
        "firstlight_grpc_shed_total",
        "Connections and calls turned away by a limit.",
        &of,
        value(|now| now.shed as f64),
    );
}
