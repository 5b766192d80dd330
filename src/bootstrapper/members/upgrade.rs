//! `bootstrapper upgrade`: brings the programs of a node to another version of Kubernetes.
//!
//! ```text
//! kubeadm ─► version: forward, and fit for the cluster? ─► other components ─► kubeadm upgrade ─► kubelet ─► restart
//!                           │no                                                                    │ does not stay up
//!                           ▼                                                                      ▼
//!               nothing runs another version                                          the kubelet of before, restart
//! ```
//!
//! Each step checks what earlier steps have done, so an interrupted upgrade can simply be run
//! again. The kubelet comes last, because no kubelet may be newer than its API server.
//!
//! The systemd unit in which an operator runs the upgrade (docs/day-two/upgrade.md). As its name is fixed,
//! systemd refuses a second run at the same time.
//!
//! Every control plane runs `kubeadm upgrade apply`, not only the first one: kubeadm's `upgrade
//! node` would skip cluster steps that an interrupted `apply` has not done. A second `apply` of the
//! same version changes nothing.

use std::cmp::Ordering;
use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::members::renew;
use crate::steps::{
    error::Error as Step,
    etcd,
    job::Job,
    kubelet,
    setup::{self, Kubeadm},
};
use base::boot::timeline::Timeline;
use base::child_process;
use base::stop::Stop;
use kubernetes::NAMESPACE;
use kubernetes::client::{ApiAccess, CONFIG_MAPS, Client};
use kubernetes::components::{self, KubernetesComponent};
use kubernetes::kubeadm;
use kubernetes::parameters::KubernetesVersion;
use kubernetes::services::kubeadm_bindings;

/// The kubeconfig of the kubelet, which each node has.
const KUBELET_CONFIG: &str = "/etc/kubernetes/kubelet.conf";
/// The kubeconfig of the administrator, which only control planes have.
const ADMIN_CONFIG: &str = "/etc/kubernetes/admin.conf";
/// The API server's manifest, which only control planes have.
const API_SERVER: &str = "/etc/kubernetes/manifests/kube-apiserver.yaml";
/// kubeadm's configuration for an upgrade.
const CONFIGURATION: Kubeadm = Kubeadm("/run/firstlight/kubeadm-upgrade.yaml");
/// Maximum bytes of the list of components.
const MAX_LIST: u64 = 16 << 20;
/// Time limit for kubeadm, which pulls images and has its own time limit for each wait; on a slow
/// machine it is longer.
const KUBEADM: Duration = Duration::from_secs(30 * 60);
/// Time limit for a program that prints its version, and for the API server's answer.
const ANSWER: Duration = Duration::from_secs(60);
/// Time limit until a new kubelet is healthy.
const KUBELET: Duration = Duration::from_secs(4 * 60);
/// How often this program asks the kubelet.
const PAUSE: Duration = Duration::from_millis(500);
/// The URL at which the kubelet reports whether it is healthy (KubeletConfiguration,
/// `healthzPort`).
const HEALTH: ([u8; 4], u16) = ([127, 0, 0, 1], 10248);

/// Reads the list of components, as `firstlight components` writes it, and upgrades this node to
/// its version. `kubeadm_timeout` is for a slow machine. Returns the versions of the kubelet before
/// and after the upgrade.
pub fn run(
    list: impl Read,
    policy: &components::ComponentPolicy,
    settings: &components::InstallSettings,
    kubeadm_timeout: Option<Duration>,
    stop: &Stop,
    timeline: Timeline,
) -> Result<(KubernetesVersion, KubernetesVersion), Error> {
    if !Path::new(KUBELET_CONFIG).exists() {
        return Err(Error::NoNode);
    }
    let list = Components::read(list, policy)?;
    let _alone = renew::lock()?;
    let job = Job::<()>::new(timeline);
    job.begin();
    let upgrade = Upgrade {
        list,
        settings,
        kubeadm_timeout,
        stop,
        job,
    };
    let versions = upgrade.run()?;
    etcd::prioritize_io_under_new_kubelet(stop, &timeline);
    Ok(versions)
}

/// Why a node is not upgraded. `Display` is a sentence that says what to do.
#[derive(Debug)]
pub enum Error {
    /// This machine is not a node of a cluster yet.
    NoNode,
    /// Standard input has no usable list of components, for this reason.
    List(String),
    /// A version is unknown, or nodes may not have it now: why.
    Version(String),
    /// A step failed. The node runs the same programs as before.
    Step(Step),
    /// Components were not installed. The node runs the same programs as before.
    Components(Step),
    /// kubeadm failed, and the kubelet still has this version.
    Kubeadm(Step, KubernetesVersion),
    /// The new kubelet exits or is not healthy: the reason, and the version of the previous one,
    /// which runs again, or why it does not.
    Kubelet(Box<Error>, Result<KubernetesVersion, Box<Error>>),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoNode => write!(
                f,
                "there is no {KUBELET_CONFIG}: this machine is not a node of a cluster yet"
            ),
            Error::List(why) | Error::Version(why) => f.write_str(why),
            Error::Step(error) => error.fmt(f),
            Error::Components(error) => write!(
                f,
                "{error}; the node runs as before; correct this, and run the same command again"
            ),
            Error::Kubeadm(error, from) => write!(
                f,
                "{error}\nthe kubelet is still {from}, and kubeadm restores pods of the control plane that do not start; correct the \
                 cause, and run the same command again"
            ),
            Error::Kubelet(why, Ok(before)) => write!(
                f,
                "{why}\nthe kubelet is {before} again; correct the cause, and run the same command again"
            ),
            Error::Kubelet(why, Err(error)) => {
                write!(
                    f,
                    "{why}\nthe previous kubelet does not run either: {error}"
                )
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<Step> for Error {
    fn from(error: Step) -> Error {
        Error::Step(error)
    }
}

/// The components in the order of their installation.
struct Components {
    kubeadm: KubernetesComponent,
    others: Vec<KubernetesComponent>,
    kubelet: KubernetesComponent,
}

impl Components {
    fn read(list: impl Read, policy: &components::ComponentPolicy) -> Result<Components, Error> {
        let mut json = String::new();
        list.take(MAX_LIST)
            .read_to_string(&mut json)
            .map_err(|error| Error::List(format!("the list of components: {error}")))?;
        // editors of Windows write a byte order mark
        let json = json.trim_start_matches('\u{feff}');
        let wire = components::read_list(json).map_err(|error| {
            Error::List(format!(
                "the file has no list of components, as `firstlight components` makes it: {error}"
            ))
        })?;
        let mut others: Vec<KubernetesComponent> = wire
            .iter()
            .map(|wire| KubernetesComponent::parse(wire, policy))
            .collect::<Result<_, _>>()
            .map_err(|error| Error::List(error.to_string()))?;
        let mut take = |name: &str| {
            let place = Path::new(setup::PROGRAMS).join(name);
            let found = others.iter().position(|one| one.place() == place);
            let missing = || format!("the list of components has no {}", place.display());
            found
                .map(|index| others.remove(index))
                .ok_or_else(|| Error::List(missing()))
        };
        Ok(Components {
            kubeadm: take("kubeadm")?,
            kubelet: take("kubelet")?,
            others,
        })
    }
}

struct Upgrade<'a> {
    list: Components,
    settings: &'a components::InstallSettings,
    kubeadm_timeout: Option<Duration>,
    stop: &'a Stop,
    job: Job<()>,
}

impl Upgrade<'_> {
    fn run(&self) -> Result<(KubernetesVersion, KubernetesVersion), Error> {
        self.job.phase("versions");
        let from = self.version("kubelet", &["--version"])?;
        self.install(std::slice::from_ref(&self.list.kubeadm))?;
        let to = self.version("kubeadm", &["version", "--output", "short"])?;
        from.check_upgrade(&to)
            .map_err(|error| Error::Version(format!("this node stays at {from}: {error}")))?;
        let is_control_plane = Path::new(API_SERVER).exists();
        self.check_cluster(is_control_plane, &to)?;
        self.job.line(&format!("{from} -> {to}"));

        self.job.phase("components");
        self.install(&self.list.others)?;
        self.job.phase("kubeadm upgrade");
        self.kubeadm(is_control_plane, &to)
            .map_err(|error| Error::Kubeadm(error, from))?;
        self.job.phase("kubelet");
        self.replace_kubelet(&to)?;
        Ok((from, to))
    }

    fn install(&self, components: &[KubernetesComponent]) -> Result<(), Error> {
        setup::install_components(components, self.settings, self.stop, &self.job)
            .map_err(Error::Components)
    }

    /// Returns the version that a program prints as its last word.
    fn version(&self, name: &str, arguments: &[&str]) -> Result<KubernetesVersion, Error> {
        let mut command = setup::program(name);
        let said = child_process::output(command.args(arguments), ANSWER, self.stop, &mut |line| {
            self.job.line(line);
        });
        let said = said.map_err(Step::Command)?;
        let said = String::from_utf8_lossy(said.expose());
        let version = said.split_whitespace().last().unwrap_or_default();
        version
            .parse()
            .map_err(|error| Error::Version(format!("{name} of this node: {error}")))
    }

    /// Refuses a version that does not fit the cluster's: on a control plane an older one, which
    /// kubeadm would accept; on a worker a newer one.
    fn check_cluster(&self, is_control_plane: bool, to: &KubernetesVersion) -> Result<(), Error> {
        let unknown = |error: &dyn fmt::Display| {
            Error::Version(format!(
                "the cluster's version, in the ConfigMap {NAMESPACE}/{}, is unknown: {error}",
                kubeadm::CONFIG_MAP
            ))
        };
        let map = CONFIG_MAPS
            .in_namespace(NAMESPACE)
            .named(kubeadm::CONFIG_MAP);
        let map = ApiAccess::from_kubeconfig_file(Path::new(KUBELET_CONFIG))
            .and_then(|config| {
                let client = Client::new(config, self.stop).within(ANSWER);
                // an interrupted upgrade may have just replaced the API server
                client.wait_ready(&mut |why| self.job.line(why))?;
                client.get(&map)
            })
            .map_err(|error| unknown(&error))?;
        let present = kubeadm::recorded_version(&map).map_err(|error| unknown(&error))?;
        let hint = match (is_control_plane, to.cmp(&present)) {
            (true, Ordering::Less) => "use its list of components, or a later one",
            (false, Ordering::Greater) => {
                "no kubelet may be newer than its API server, so upgrade the control planes first"
            }
            _ => return Ok(()),
        };
        Err(Error::Version(format!(
            "{to} does not fit the cluster, which is at {present}: {hint}"
        )))
    }

    fn kubeadm(&self, is_control_plane: bool, to: &KubernetesVersion) -> Result<(), Step> {
        let to = to.to_string();
        let words: &[&str] = if is_control_plane {
            &["upgrade", "apply", &to, "--yes"]
        } else {
            &["upgrade", "node"]
        };
        if is_control_plane {
            self.deny_external_ips()?;
        }
        CONFIGURATION.configure(&kubeadm::upgrade_configuration(self.kubeadm_timeout))?;
        let limit = KUBEADM + self.kubeadm_timeout.unwrap_or_default();
        CONFIGURATION.run(words, &[], limit, self.stop, &self.job)?;
        if is_control_plane {
            self.delete_bindings()
        } else {
            Ok(())
        }
    }

    /// Deletes the bindings that kubeadm has made again, by which kube-controller-manager approves certificates of
    /// kubelets without a look at their records.
    fn delete_bindings(&self) -> Result<(), Step> {
        let config = ApiAccess::from_kubeconfig_file(Path::new(ADMIN_CONFIG))?;
        let client = Client::new(config, self.stop).within(ANSWER);
        // kubeadm has just replaced the API server
        client.wait_ready(&mut |why| self.job.line(why))?;
        for binding in kubeadm_bindings::delete(&client)? {
            self.job.line(&format!("{binding}: deleted"));
        }
        Ok(())
    }

    /// Writes the admission plugin into kubeadm's configuration, from which `kubeadm upgrade apply` makes the API server's manifest.
    fn deny_external_ips(&self) -> Result<(), Step> {
        let admin = Path::new(renew::KUBERNETES).join("admin.conf");
        let change = || {
            let config = ApiAccess::from_kubeconfig_file(&admin)?;
            kubeadm::deny_external_ips(&Client::new(config, self.stop).within(ANSWER))
        };
        if change().map_err(Step::Api)? {
            let plugin = kubeadm::DENY_EXTERNAL_IPS;
            self.job
                .line(&format!("kubeadm's configuration now enables {plugin}"));
        }
        Ok(())
    }

    /// Replaces the kubelet, and restarts it. If the new kubelet does not stay up, the previous one
    /// is restored.
    fn replace_kubelet(&self, to: &KubernetesVersion) -> Result<(), Error> {
        let place = self.list.kubelet.place();
        let before = before(place);
        let failed = |error| Step::Io(before.clone(), error);
        // if a kubelet is kept, an earlier try was interrupted: the installed one may never have run
        if !self.list.kubelet.is_present() && !before.exists() {
            fs::hard_link(place, &before).map_err(failed)?;
        }
        self.install(std::slice::from_ref(&self.list.kubelet))?;
        let Err(why) = self.start_new_kubelet(to) else {
            return Ok(remove(&before).map_err(failed)?);
        };
        let restore = || {
            fs::rename(&before, place).map_err(failed)?;
            self.start_kubelet()?;
            self.version("kubelet", &["--version"])
        };
        Err(Error::Kubelet(Box::new(why), restore().map_err(Box::new)))
    }

    /// Starts the installed kubelet, if it has this version.
    fn start_new_kubelet(&self, expected: &KubernetesVersion) -> Result<(), Error> {
        let got = self.version("kubelet", &["--version"])?;
        if got != *expected {
            let why = format!("the list of components has kubelet {got}, but kubeadm {expected}");
            return Err(Error::Version(why));
        }
        self.start_kubelet()
    }

    /// Starts the installed kubelet, and waits until it is healthy.
    fn start_kubelet(&self) -> Result<(), Error> {
        kubelet::restart(self.stop, &self.job)?;
        let limit = KUBELET.max(self.kubeadm_timeout.unwrap_or_default());
        let healthy = |stop: &Stop| wait_until_healthy(limit, stop);
        Ok(kubelet::watched(self.stop, &self.job, healthy)?)
    }
}

/// Returns the path, in the same folder, where the previous kubelet is kept.
fn before(place: &Path) -> PathBuf {
    place.with_extension("before-upgrade")
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn wait_until_healthy(limit: Duration, stop: &Stop) -> Result<(), Step> {
    let end = Instant::now() + limit;
    while !is_healthy().unwrap_or_default() {
        if stop.wait(PAUSE) {
            return Err(Step::Stopped);
        }
        if Instant::now() > end {
            return Err(Step::Kubelet(vec![format!(
                "not healthy after {} s",
                limit.as_secs()
            )]));
        }
    }
    Ok(())
}

/// Returns whether the kubelet says that it is healthy.
pub fn is_healthy() -> io::Result<bool> {
    let mut socket = TcpStream::connect_timeout(&SocketAddr::from(HEALTH), PAUSE)?;
    socket.set_read_timeout(Some(PAUSE * 4))?;
    socket.write_all(b"GET /healthz HTTP/1.0\r\n\r\n")?;
    let mut status = [0; b"HTTP/1.0 200".len()];
    socket.read_exact(&mut status)?;
    Ok(status == *b"HTTP/1.0 200")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_needs_the_two_programs_that_are_installed_in_turn() {
        let read = |names: &[&str]| {
            let entries: Vec<_> = names
                .iter()
                .map(|name| {
                    format!(r#"{{"url": "data:,{name}", "install_path": "/run/state/bin/{name}"}}"#)
                })
                .collect();
            let list = format!("\u{feff}[{}]", entries.join(","));
            Components::read(list.as_bytes(), &components::ComponentPolicy::default())
        };
        let list = read(&["kubelet", "kubectl", "kubeadm"]).unwrap();
        assert_eq!(list.kubelet.place(), Path::new("/run/state/bin/kubelet"));
        assert_eq!(list.kubeadm.place(), Path::new("/run/state/bin/kubeadm"));
        assert_eq!(list.others.len(), 1);
        for (names, says) in [
            (vec!["kubelet"], "no /run/state/bin/kubeadm"),
            (vec!["kubeadm", "kubectl"], "no /run/state/bin/kubelet"),
            (vec!["../kubelet"], "not an absolute path"),
        ] {
            let Some(Error::List(why)) = read(&names).err() else {
                panic!("{names:?}");
            };
            assert!(why.contains(says), "{why}");
        }
        let read = Components::read(&b"kubelet"[..], &components::ComponentPolicy::default());
        assert!(matches!(read, Err(Error::List(why)) if why.contains("`firstlight components`")));
    }
}
