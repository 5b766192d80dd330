//! Add-ons: the programs that a cluster needs in addition to our services, such as a network plugin and a cloud controller manager.
//!
//! ```text
//!  read       the list, each chart and manifest with its digest ([`file`]): before the first packet
//!  check      Helm renders each for the cluster's version ([`helm`]): before the first change
//!    ▼
//!  for each   in the order of the list; those `before-services`, then the join service and the key service, then the rest:
//!    save     the custom resources, before the first release that changes ([`save`])
//!    install  unless its release has the same digest
//!    wait     until its workloads are ready, and each node has a network if it is `before-services`
//!             ── refused, or not ready in time ─► undo: as it was before, or removed; end with the reason
//!    ▼
//!  name       the add-ons that the list no longer has: they stay
//! ```

mod file;
mod helm;
mod save;

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kubernetes::client::{self, Client, NODES, Object, PODS, Selector};
use kubernetes::objects::{AnyObject, Workload};
use kubernetes::readiness::{self, WORKLOADS};

use crate::shell::progress::Progress;
use file::Addon;
use helm::{Helm, HelmRelease};

/// How often readiness is checked.
const INTERVAL: Duration = Duration::from_millis(500);

/// A list of add-ons, read and checked.
pub struct Addons {
    path: PathBuf,
    list: Vec<Addon>,
    helm: Helm,
    /// Whether the custom resources were saved.
    is_saved: OnceCell<()>,
}

/// Which of the add-ons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddonStage {
    /// The add-ons that our services need: the network plugin.
    BeforeServices,
    /// All other add-ons.
    AfterServices,
}

/// How to install.
pub struct How<'a> {
    /// The client of the cluster.
    pub client: &'a Client,
    /// Shows what is done.
    pub progress: &'a Progress,
    /// The time limit of each add-on. A chart's hooks run within it, too.
    pub limit: Duration,
    /// Whether to wait until each add-on is ready.
    pub wait: bool,
    /// Whether to change nothing.
    pub is_dry_run: bool,
}

/// Why an add-on was not installed.
#[derive(Debug)]
pub enum Error {
    /// The list, or a file that it names, cannot be used.
    List(file::Error),
    /// Helm failed, or refused an add-on.
    Helm(helm::Error),
    /// The API server refused a request or did not answer.
    Api(client::Error),
    /// The file for the custom resources cannot be written.
    Save(PathBuf, io::Error),
    /// An earlier run of Helm on the add-on was interrupted.
    Unfinished(String, String, HelmRelease),
    /// The add-on did not become ready: its name, what is missing, how long it was waited for.
    NotReady(String, Vec<String>, Duration),
    /// An error after the change began, and the add-on's state after it.
    Undone(Box<Error>, Outcome),
}

/// The state of an add-on after its change failed.
#[derive(Debug)]
pub enum Outcome {
    /// It was new, and has been removed.
    Removed,
    /// It has been restored to this revision.
    Restored(u64),
    /// Helm could not undo the change.
    Left(helm::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::List(error) => error.fmt(f),
            Error::Helm(error) => error.fmt(f),
            Error::Api(error) => error.fmt(f),
            Error::Save(path, error) => write!(
                f,
                "the custom resources cannot be saved in {}: {error}; the add-on was not changed",
                path.display()
            ),
            Error::Unfinished(name, namespace, release) => {
                let first = release.revision == 1 || release.status == "uninstalling";
                let command = if first { "uninstall" } else { "rollback" };
                write!(
                    f,
                    "add-on {name}: another run of Helm was interrupted, or still runs (revision {}, {}): wait for its end, or run \
                     `helm {command} {name} --namespace {namespace}` first; `helm history {name} --namespace {namespace}` lists the revisions",
                    release.revision, release.status
                )
            }
            Error::NotReady(name, missing, after) => write!(
                f,
                "add-on {name} is not ready after {} s: {}",
                after.as_secs(),
                missing.join("; ")
            ),
            Error::Undone(why, Outcome::Removed) => {
                write!(f, "{why}; the add-on was removed again")
            }
            Error::Undone(why, Outcome::Restored(revision)) => {
                write!(f, "{why}; revision {revision} of the add-on was restored")
            }
            Error::Undone(why, Outcome::Left(error)) => {
                write!(f, "{why}; this change could not be undone: {error}")
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<helm::Error> for Error {
    fn from(error: helm::Error) -> Error {
        Error::Helm(error)
    }
}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        Error::Api(error)
    }
}

impl Addons {
    /// Reads the list, verifies its charts and manifests, and looks for Helm. Sends nothing.
    pub fn read(path: &Path, kubeconfigs: &[PathBuf]) -> Result<Addons, Error> {
        let list = file::read(path).map_err(Error::List)?;
        let helm = Helm::find(kubeconfigs)?;
        Ok(Addons {
            path: path.into(),
            list,
            helm,
            is_saved: OnceCell::new(),
        })
    }

    /// Asks Helm whether it can render each add-on for this version of Kubernetes. Sends nothing.
    pub fn check(&self, kubernetes_version: &str) -> Result<(), Error> {
        let mut addons = self.list.iter();
        addons.try_for_each(|addon| Ok(self.helm.check(addon, kubernetes_version)?))
    }

    /// Installs the add-ons of a stage, one after the other. Returns those that are new or changed.
    pub fn install(&self, stage: AddonStage, how: &How) -> Result<Vec<String>, Error> {
        let is_of = |addon: &&Addon| addon.before_services == (stage == AddonStage::BeforeServices);
        let mut changed = Vec::new();
        for addon in self.list.iter().filter(is_of) {
            let before = self.present(addon)?;
            let is_there =
                |it: &HelmRelease| it.description == addon.digest && it.status == "deployed";
            let is_new = !before.as_ref().is_some_and(is_there);
            if is_new {
                changed.push(format!("add-on {}", addon.name));
            }
            if how.is_dry_run {
                continue;
            }
            if is_new && before.is_some() {
                self.save(how)?;
            }
            let state = if is_new {
                let brought = self.bring(addon, how);
                brought.or_else(|why| self.undo(addon, before, why, how.progress))?;
                "new or changed"
            } else {
                self.wait(addon, how)?;
                "stays as it is"
            };
            how.progress.line(format!("add-on {}: {state}", addon.name));
        }
        Ok(changed)
    }

    /// Saves the custom resources of the cluster, once.
    fn save(&self, how: &How) -> Result<(), Error> {
        if self.is_saved.set(()).is_err() {
            return Ok(());
        }
        how.progress.phase("saving the custom resources");
        match save::custom_resources(how.client) {
            Ok(Some(path)) => how.progress.line(format!(
                "the custom resources are saved in {}: it may contain credentials",
                path.display()
            )),
            Ok(None) => {}
            Err(save::Error::Api(error)) => return Err(Error::Api(error)),
            Err(save::Error::Io(path, error)) => return Err(Error::Save(path, error)),
        }
        Ok(())
    }

    /// Returns the release of an add-on; an error if a run of Helm has not ended.
    fn present(&self, addon: &Addon) -> Result<Option<HelmRelease>, Error> {
        match self.helm.release(addon)? {
            Some(it) if it.status.starts_with("pending-") || it.status == "uninstalling" => {
                let (name, namespace) = (addon.name.clone(), addon.namespace.clone());
                Err(Error::Unfinished(name, namespace, it))
            }
            release => Ok(release),
        }
    }

    fn bring(&self, addon: &Addon, how: &How) -> Result<(), Error> {
        how.progress
            .phase(format!("installing add-on {}", addon.name));
        self.helm.install(addon, how.limit)?;
        self.wait(addon, how)
    }

    fn wait(&self, addon: &Addon, how: &How) -> Result<(), Error> {
        if !how.wait {
            return Ok(());
        }
        // what comes before the last of them, such as definitions, need not bring the network
        let brings_network = (self.list.iter())
            .rfind(|addon| addon.before_services)
            .is_some_and(|last| std::ptr::eq(last, addon));
        wait_ready(addon, brings_network, &workloads(addon, how.client)?, how)
    }

    /// Restores the release as it was before, and returns why. Changes nothing if the client was stopped, or if Helm refused the
    /// add-on before it changed anything.
    fn undo(
        &self,
        addon: &Addon,
        before: Option<HelmRelease>,
        why: Error,
        progress: &Progress,
    ) -> Result<(), Error> {
        let is_stopped = matches!(why, Error::Api(client::Error::Stopped));
        if is_stopped || self.helm.release(addon).is_ok_and(|now| now == before) {
            return Err(why);
        }
        progress.phase(format!("undoing the change of add-on {}", addon.name));
        let outcome = match (self.helm.undo(addon, before.as_ref()), before) {
            (Err(error), _) => Outcome::Left(error),
            (Ok(()), None) => Outcome::Removed,
            (Ok(()), Some(before)) => Outcome::Restored(before.revision),
        };
        Err(Error::Undone(Box::new(why), outcome))
    }

    /// Returns a sentence for each add-on of an earlier list that this list no longer has.
    pub fn no_longer_listed(&self) -> Result<Vec<String>, Error> {
        let is_listed = |(name, namespace): &(String, String)| {
            self.list
                .iter()
                .any(|addon| (&addon.name, &addon.namespace) == (name, namespace))
        };
        let releases = self
            .helm
            .releases()?
            .into_iter()
            .filter(|release| !is_listed(release));
        let sentence = |(name, namespace)| {
            format!(
                "add-on {name} is not in {} any more, and stays: `helm uninstall {name} --namespace {namespace}` removes it",
                self.path.display()
            )
        };
        Ok(releases.map(sentence).collect())
    }
}

/// Returns the workloads of an add-on. Helm annotates each object of a release with its name and namespace.
fn workloads(addon: &Addon, client: &Client) -> Result<Vec<Object>, Error> {
    let selector = Selector::labels("app.kubernetes.io/managed-by=Helm");
    let mut found = Vec::new();
    for kind in WORKLOADS {
        for AnyObject { metadata } in client.list_as(&kind.all(), &selector)?.items {
            let is_of = |name: &str, value: &str| {
                metadata.annotation(&format!("meta.helm.sh/{name}")) == Some(value)
            };
            if is_of("release-name", &addon.name) && is_of("release-namespace", &addon.namespace) {
                let namespace = kind.in_namespace(&metadata.namespace);
                found.push(namespace.named(&metadata.name));
            }
        }
    }
    Ok(found)
}

/// Waits until each workload is ready, and for a network on each node if this add-on brings it.
fn wait_ready(
    addon: &Addon,
    brings_network: bool,
    workloads: &[Object],
    how: &How,
) -> Result<(), Error> {
    let How {
        client,
        progress,
        limit,
        ..
    } = how;
    let started = Instant::now();
    let mut said = BTreeSet::new();
    let mut shown = String::new();
    loop {
        let (mut missing, mut troubles) = (Vec::new(), Vec::new());
        for at in workloads {
            let workload: Workload = client.get_as(at)?;
            let Some(what) = readiness::missing_of(&workload) else {
                continue;
            };
            missing.push(what);
            let selector = Selector::labels(&readiness::labels_of(&workload));
            let namespace = &workload.metadata.namespace;
            let pods = client.list_as(&PODS.in_namespace(namespace), &selector)?;
            troubles.extend(pods.items.iter().flat_map(readiness::troubles_of));
        }
        let nodes = client.list_as(&NODES.all(), &Selector::default())?;
        let networks = readiness::without_network(&nodes.items);
        if brings_network && missing.is_empty() {
            missing.extend(networks.clone());
        }
        if missing.is_empty() {
            return Ok(());
        }
        if started.elapsed() >= readiness::NETWORK_GRACE {
            troubles.extend(networks);
        }
        for trouble in &troubles {
            if said.insert(trouble.clone()) {
                progress.line(trouble.clone());
            }
        }
        if started.elapsed() >= *limit {
            missing.extend(troubles);
            missing.dedup();
            return Err(Error::NotReady(
                addon.name.clone(),
                missing,
                started.elapsed(),
            ));
        }
        let phase = format!("waiting for add-on {}: {}", addon.name, missing.join(", "));
        if phase != shown {
            progress.phase(phase.clone());
            shown = phase;
        }
        if client.stopped_within(INTERVAL) {
            return Err(client::Error::Stopped.into());
        }
    }
}
