//! Metrics of components that do not use the module `metrics`.

use std::sync::Arc;

use crate::metrics::Registry;
use collateral::{FetchStatistics as Fetches, Fetching};
use rpc::grpc::{Server, Statistics};
use verifier::Validator;
use verifier::sources::{Sources, offline};

/// Adds the metrics of a server: connections, running calls, and refusals by a limit. Each has the
/// label `server` with the value `name`.
pub fn server(registry: &Registry, name: &str, server: &Server) {
    let of = [("server", name)];
    let value = |read: fn(&Statistics) -> f64| {
        let statistics = server.statistics();
        move || statistics().as_ref().map(read)
    };
    registry.gauge_of(
        "firstlight_grpc_connections",
        "Number of connections, including those in their handshake.",
        &of,
        value(|now| now.connections as f64),
    );
    registry.gauge_of(
        "firstlight_grpc_calls_in_flight",
        "Number of calls whose handler is running.",
        &of,
        value(|now| now.calls_in_flight as f64),
    );
    registry.counter_of(
        "firstlight_grpc_shed_total",
        "Number of connections and calls refused by a limit.",
        &of,
        value(|now| now.shed as f64),
    );
}

/// Adds the metric that shows whether `validator` accepts any TPM. If it does, also logs a warning
/// now.
pub fn any_tpm<V: Validator + 'static>(registry: &Registry, validator: &Arc<V>) {
    if validator.properties().believes_any_tpm {
        log::warn!(
            "the attestation policy contains no attestation keys: any TPM is accepted, and so is a program that only simulates \
             one; list the keys of the machines' TPMs in attestationKeys, set endorsementRoots, or pin the firmware"
        );
    }
    let validator = Arc::downgrade(validator);
    let help = "1 while the attestation policy contains no attestation keys, and the platform endorses none, so that any TPM is accepted.";
    registry.gauge_of("firstlight_attestation_any_tpm", help, &[], move || {
        validator
            .upgrade()
            .map(|validator| f64::from(u8::from(validator.properties().believes_any_tpm)))
    });
}

/// Returns the sources for validators.
pub fn sources(collateral: &Option<Arc<Fetching>>) -> Arc<dyn Sources> {
    match collateral {
        Some(fetching) => fetching.clone(),
        None => offline(),
    }
}

/// Adds the metrics of what validators fetch.
pub fn collateral(registry: &Registry, collateral: Option<&Arc<Fetching>>) {
    let Some(collateral) = collateral else {
        return;
    };
    let value = |read: fn(&Fetches) -> Option<f64>| {
        let collateral = Arc::downgrade(collateral);
        move || read(&collateral.upgrade()?.statistics())
    };
    for (result, read) in [
        (
            "fetched",
            (|it| Some(it.fetched as f64)) as fn(&Fetches) -> _,
        ),
        ("failed", |it| Some(it.failed as f64)),
        ("kept", |it| Some(it.loaded as f64)),
        ("cached", |it| Some(it.hits as f64)),
    ] {
        registry.counter_of(
            "firstlight_collateral_total",
            "Certificates, lists and collateral that validations needed: fetched from a server, failed to be fetched, kept by an \
             earlier program, or cached in memory.",
            &[("result", result)],
            value(read),
        );
    }
    registry.gauge_of(
        "firstlight_collateral_oldest_seconds",
        "Age of the oldest revocation list or collateral in use; it is renewed after a day, and used until it ends.",
        &[],
        value(|it| it.oldest.map(|seconds| seconds as f64)),
    );
}
