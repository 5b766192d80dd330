//! The options of `bootstrapper`.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use base::options::{Opt, Table, put};
use base::program::{Failure, parsed, text};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kubernetes::components;
use lexopt::Parser;
use node::options;
use ssh::key::PublicKey;
use verifier::Policy;

use crate::steps::clock::TimeServers;
use crate::trust::service_trust::read_policy;

/// The values of the options.
#[derive(Default)]
pub struct Settings {
    /// The options that the program shares with `unlock`.
    pub shared: options::Options,
    /// The images of join services that are accepted in addition to the node's own.
    pub services: Option<Policy>,
    /// Which components are installed.
    pub policy: components::ComponentPolicy,
    /// Where the components are.
    pub components: components::InstallSettings,
    /// Whether a cloud controller manager initializes the node; `None`: the default of the cloud.
    pub cloud_controller: Option<bool>,
    /// How long kubeadm waits for each part of Kubernetes; `None`: as long as kubeadm does by default.
    pub kubeadm_timeout: Option<Duration>,
    /// The time servers; `None`: those of the list of machines or of the cloud.
    pub time_servers: Option<TimeServers>,
    /// The keys that may sign updates of the image.
    pub update_keys: Vec<PublicKey>,
    /// Where releases of the image are.
    pub update_url: Option<String>,
    /// How long a new version of the image must be healthy to be kept, and how long it may take until then; `None`: the defaults.
    pub trial_healthy: Option<Duration>,
    /// As [`Settings::trial_healthy`].
    pub trial_limit: Option<Duration>,
    /// Whether the settings of the image are read as well.
    pub read: bool,
    /// Whether the program only proves this machine.
    pub serve_evidence: bool,
}

/// The options that only this program has.
pub const OPTIONS: &Table<Settings> = &[
    (Opt::value("components", "DIR", "a folder of the image with components, named by the last part of their URL; a component with the right hash is taken from here instead of the network").setting(),
     |it, _, value| put(&mut it.components.image, Ok(Some(value.into())))),
    (Opt::flag("allow-unverified-components", "installs components without a hash too").setting(),
     |it, _, _| put(&mut it.policy.allow_unverified, Ok(true))),
    (Opt::value("service-policy", "FILE", "measurement policy, JSON: accepted images of join services in addition to this machine's own").setting(),
     |it, _, value| put(&mut it.services, read_policy(Path::new(&value)).map(Some).map_err(|why| Failure::Usage(why.to_string())))),
    (Opt::value("cloud-controller-manager", "WORD", "whether a cloud controller manager initializes the nodes of this cluster (the kubelet's --cloud-provider=external); by default yes in aws, azure and gcp, otherwise no").one_of(&["yes", "no"]).setting(),
     |it, name, value| put(&mut it.cloud_controller, yes_or_no(name, value).map(Some))),
    (Opt::value("kubeadm-timeout", "SECONDS", "how long kubeadm waits for the kubelet, each component of the control plane, the API and etcd, on a slow machine, 240 to 86400; by default as long as kubeadm itself does, such as 240 for the API server").setting(),
     |it, name, value| put(&mut it.kubeadm_timeout, kubeadm_timeout(name, value).map(Some))),
    (Opt::value("time-servers", "LIST", "the time servers of the image's chrony, up to 8, separated by commas: HOST, nts:HOST, or /dev/ptp.. for a clock of the host; by default the list's timeServers, then those of the cloud, then public servers with NTS").setting(),
     |it, name, value| put(&mut it.time_servers, parsed(name, value).map(Some))),
    (Opt::value("update-key", "KEY", "SSH keys that sign updates of the image, separated by commas: only the key's base64 from the .pub file; without a key the image accepts no update").setting(),
     |it, name, value| put(&mut it.update_keys, update_keys(name, value))),
    (Opt::value("update-url", "URL", "the folder of a web server with the newest release of the image, https://.., for `bootstrapper update` without a URL").setting(),
     |it, _, value| put(&mut it.update_url, text(value).map(Some))),
    (Opt::value("trial-healthy", "SECONDS", "how long a new version of the image must run as a healthy member to be kept, 1 to 86400").or("300").setting(),
     |it, name, value| put(&mut it.trial_healthy, trial(name, value).map(Some))),
    (Opt::value("trial-limit", "SECONDS", "how long a new version of the image may take until then; after this time the machine restarts, and goes back to the old version when the tries are over").or("1800").setting(),
     |it, name, value| put(&mut it.trial_limit, trial(name, value).map(Some))),
    (Opt::flag("settings", "also takes settings from /etc/firstlight/node.conf and the kernel command line (firstlight.NAME=VALUE)"),
     |it, _, _| put(&mut it.read, Ok(true))),
    (Opt::flag("serve-evidence", "only makes evidence of this machine with its TPM, for the join service in a pod, on the socket that systemd passes (firstlight-evidence.socket); ends after a minute without a call"),
     |it, _, _| put(&mut it.serve_evidence, Ok(true))),
];

/// Parses keys in base64. The name of its kind is also inside of the key.
fn update_keys(name: &str, value: OsString) -> Result<Vec<PublicKey>, Failure> {
    let wrong = |key: &str, why: String| Failure::Usage(format!("--{name} {key}: {why}"));
    let text = text(value)?;
    let one = |key: &str| {
        let blob = STANDARD
            .decode(key)
            .map_err(|error| wrong(key, error.to_string()))?;
        let public = PublicKey::from_blob(&blob).map_err(|error| wrong(key, error.to_string()))?;
        ssh::signature::check_kind(&public).map_err(|error| wrong(key, error.to_string()))?;
        Ok(public)
    };
    text.split(',').map(one).collect()
}

/// Parses a time of at most a day.
fn trial(name: &str, value: OsString) -> Result<Duration, Failure> {
    match parsed(name, value)? {
        seconds @ 1..=86_400 => Ok(Duration::from_secs(seconds)),
        other => Err(Failure::Usage(format!(
            "--{name} {other}: expected 1 to 86400 seconds"
        ))),
    }
}

/// Parses a time that is not shorter than kubeadm's own for the API server, and at most a day.
fn kubeadm_timeout(name: &str, value: OsString) -> Result<Duration, Failure> {
    match parsed(name, value)? {
        seconds @ 240..=86_400 => Ok(Duration::from_secs(seconds)),
        other => Err(Failure::Usage(format!(
            "--{name} {other}: expected 240 to 86400 seconds"
        ))),
    }
}

fn yes_or_no(name: &str, value: OsString) -> Result<bool, Failure> {
    match text(value)?.as_str() {
        "yes" => Ok(true),
        "no" => Ok(false),
        other => Err(Failure::Usage(format!(
            "--{name} {other:?}: expected yes or no"
        ))),
    }
}

impl Settings {
    /// Parses the arguments that `source` gave.
    pub fn parse(&mut self, arguments: Parser, source: &'static str) -> Result<(), Failure> {
        options::parse(OPTIONS, arguments, source, self, |it| &mut it.shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubeadm_waits_no_shorter_than_by_default_and_at_most_a_day() {
        let of = |text: &str| kubeadm_timeout("kubeadm-timeout", text.into());
        assert_eq!(of("1200").unwrap(), Duration::from_secs(1200));
        for wrong in ["239", "0", "86401", "18446744073709551615", "4m", ""] {
            assert!(matches!(of(wrong), Err(Failure::Usage(_))), "{wrong}");
        }
    }
}
