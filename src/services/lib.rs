//! The services of a control plane: [`join_service`] admits nodes to the cluster, and
//! [`key_service`] derives keys. [`member_controller`] works on members that have joined. Both it and the join service use the view of
//! the cluster in [`cluster`]. [`check`] asks services for their health, by a [`probe`].

pub mod check;
pub mod cluster;
pub mod join_service;
pub mod key_service;
pub mod member_controller;
pub mod metrics;
mod policy_file;
pub mod policy_operators;
pub mod probe;
mod serving;
mod shared_metrics;

use std::env;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::logger;
use base::machines::Cloud;
use base::options::Opt;
use base::program::{self, Failure};
use base::stop::Stop;
use collateral::Fetching;
use kubernetes::client;
use log::LevelFilter;
use sys::process;
use sys::signal::StopSignals;

/// The directory where the cluster's `join-config` ConfigMap is mounted.
pub const CONFIG_DIR: &str = "/var/config";
/// How long a running call may still take when a program stops. A ticket waits for two keys.
pub const GRACE: Duration = Duration::from_secs(10);
/// The variable of a pod that says where the API server is.
const SERVICE_HOST: &str = "KUBERNETES_SERVICE_HOST";
/// The option about the form of the log.
pub const LOG_FORMAT: Opt = Opt::value(
    "log-format",
    "FORMAT",
    "text, or json: one object a line with ts, level, logger, msg, uptime",
)
.one_of(&["text", "json"])
.or("text");
/// The option about the amount of the log; see [`level_of_verbosity`].
pub const VERBOSITY: Opt = Opt::value(
    "verbosity",
    "LEVEL",
    "-1 debug, 0 info, 1 warnings, 2 errors",
)
.short('v')
.or("0");

/// Parses the option `name`: `ADDRESS:PORT`, or `*:PORT`.
pub fn listen(name: &str, value: OsString) -> Result<SocketAddr, Failure> {
    let text = program::text(value)?;
    http::server::parse_listen(&text)
        .map_err(|error| Failure::Usage(format!("--{name} {text:?}: {error}")))
}

/// Returns whether the program works for a cluster: with a kubeconfig, or as a pod.
pub fn has_cluster(kubeconfig: Option<&Path>) -> bool {
    kubeconfig.is_some() || env::var_os(SERVICE_HOST).is_some()
}

/// Returns the access to the Kubernetes API: by this file, else that of the pod; `None` if there is none.
pub fn kubernetes(kubeconfig: Option<&Path>) -> Result<Option<client::ApiAccess>, Failure> {
    let config = match kubeconfig {
        Some(file) => client::ApiAccess::from_kubeconfig_file(file),
        None if has_cluster(None) => client::ApiAccess::in_cluster(),
        None => return Ok(None),
    };
    config.map(Some).map_err(Failure::failed)
}

/// The metadata service of a cloud; `None` if the options name no cloud.
pub type Metadata = Option<Arc<dyn cloud_api::Service>>;

/// Returns the metadata service of this cloud, and where certificates of chips and collateral come from. The chart passes an empty
/// cloud and URL if the option is not set.
pub fn metadata_and_collateral(
    (cloud, url): (&str, &str),
    collateral: collateral::Flags,
    kubeconfig: Option<&Path>,
) -> Result<(Metadata, Arc<Fetching>), Failure> {
    let url = Some(url).filter(|url| !url.is_empty());
    let metadata = (!cloud.is_empty())
        .then(|| cloud_api::metadata(Cloud::named(cloud)?, url))
        .transpose()
        .map_err(Failure::failed)?;
    let mut settings = collateral.finish(|| {
        let config = kubernetes(kubeconfig).ok()??;
        Some(client::Client::new(config, &Stop::new()))
    })?;
    // the places are the same for what the service asks about itself and about others
    if let Some(ec2) = &mut settings.ec2 {
        ec2.take_place(cloud, url);
    }
    Ok((metadata, Fetching::new(settings).map_err(Failure::failed)?))
}

/// Returns the level for `-v` of Constellation's programs: -1 and below is debug, 0 info, 1
/// warnings, 2 and above errors.
pub fn level_of_verbosity(v: i32) -> LevelFilter {
    match v {
        ..=-1 => LevelFilter::Debug,
        0 => LevelFilter::Info,
        1 => LevelFilter::Warn,
        2.. => LevelFilter::Error,
    }
}

/// Returns the text for the caller of a service in its log.
fn peer(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "an unknown caller".into(), |address| address.to_string())
}

/// Prepares the `main` of a service before it starts a thread: starts the log at `level` in this
/// format, protects the memory of the process, and blocks the signals that stop the service until
/// it waits for them.
pub fn prepare_service(level: LevelFilter, format: logger::Format) -> Result<StopSignals, Failure> {
    logger::init(level, format);
    process::keep_memory_private().map_err(|error| {
        Failure::failed(format!("cannot keep memory out of core dumps: {error}"))
    })?;
    StopSignals::block().map_err(|error| Failure::failed(format!("cannot block signals: {error}")))
}

/// Waits for a signal to stop and writes it to the log.
pub fn wait_until_stopped(signals: &StopSignals, grace: Duration) -> Result<(), Failure> {
    let signal = signals
        .wait()
        .map_err(|error| Failure::failed(format!("cannot wait for signals: {error}")))?;
    log::info!(
        "{signal}: stopping; running calls have {} s to finish",
        grace.as_secs()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbosity_matches_constellation() {
        let levels = [-2, -1, 0, 1, 2, 3].map(level_of_verbosity);
        use LevelFilter::*;
        assert_eq!(levels, [Debug, Debug, Info, Warn, Error, Error]);
    }
}
