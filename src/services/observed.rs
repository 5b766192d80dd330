//! What the metrics say of parts that know nothing of metrics.

use std::sync::Arc;

use attest::attestation::Validator;
use metrics::Registry;
use rpc::grpc::{Server, Statistics};

/// Has `registry` tell what this server does: connections, calls in flight, what was shed; each with `name`.
pub fn server(registry: &Registry, name: &str, server: &Server) {
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

/// Says in the log, and from now on in a metric, whether `validator` believes any TPM.
pub fn any_tpm<V: Validator + 'static>(registry: &Registry, validator: &Arc<V>) {
    if validator.believes_any_tpm() {
        log::warn!(
            "the attestation policy names no attestation keys: any TPM is believed, and so is a program that has none and says \
             what one would; name the machines' keys in attestationKeys"
        );
    }
    let validator = Arc::downgrade(validator);
    let help =
        "1 while the attestation policy names no attestation keys, so that any TPM is believed.";
    registry.gauge_of("firstlight_attestation_any_tpm", help, &[], move || {
        validator
            .upgrade()
            .map(|validator| f64::from(u8::from(validator.believes_any_tpm())))
    });
}
