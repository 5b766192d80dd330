//! `firstlight upgrade`: publishes the components of a newer version of Kubernetes in a cluster,
//! and says which nodes are not upgraded yet.
//!
//! The command changes no node, and needs neither the master secret nor the policy. An operator
//! upgrades each node, in any order and at any time (docs/day-two/upgrade.md). New nodes install the
//! control plane's version by themselves.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use kubernetes::client::{CONFIG_MAPS, Client, NODES};
use kubernetes::constellation::node_version::{
    self, CLUSTER_VERSION, COMPONENTS, COMPONENTS_ANNOTATION, IMAGE_VERSION, NodeVersion,
};
use kubernetes::control_planes::{ControlPlane, StaticPod};
use kubernetes::objects::ObjectMeta;
use kubernetes::parameters::KubernetesVersion;
use kubernetes::{NAMESPACE, kubeadm};
use serde_json::{Value, json};

use crate::cluster::status::listed::{Listed, listed};
use crate::migrate::{self, IMAGE_OF_FIRSTLIGHT, moves_nodes};
use crate::shell::{
    error::Error,
    interrupt,
    output::Output,
    progress::{Progress, printable},
};
use crate::trust::components::{self, ListExceptions, Servers, check};
use crate::workspace::{
    kubeconfig::{self, KubeconfigOption},
    options::time,
};
use clap::Args;

/// kubeadm does not upgrade a cluster if a kubelet is older by more than this number of minor
/// versions (its MaximumAllowedMinorVersionKubeletSkew).
const KUBELET_SKEW: u32 = 3;

/// The first minor version of Kubernetes whose kubeadm installs etcd 3.6.
const WITH_ETCD_3_6: u32 = 34;
/// The first version of etcd from which 3.6 may follow: with an earlier one a member that was removed
/// can come back (etcd's documentation, "Upgrade etcd from v3.5 to v3.6").
const BEFORE_ETCD_3_6: [u32; 3] = [3, 5, 26];

/// Bring the components of a newer version of Kubernetes into a cluster
///
/// Puts the list of components into the cluster, for nodes that join later, and lists the nodes that have another
/// version. It changes no node: `firstlight rollout start --kubernetes` does both, or run `bootstrapper upgrade` as
/// root on each node, with the same list. Run the command again to see which nodes are left. docs/day-two/upgrade.md
/// has the steps.
///
/// It refuses what kubeadm does not upgrade: a cluster of a later version, a skipped minor version, and kubelets that
/// are older by more than three. New nodes join with the present version until kubeadm has upgraded the first control
/// plane.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight upgrade v1.34.5 --components components.json --dry-run
  firstlight upgrade v1.34.5 --components components.json")]
pub(crate) struct CommandLine {
    /// The version of Kubernetes, as v1.36.4; v1.36 is the patch of the list
    version: String,
    /// The list of programs of this version, as `firstlight components` makes it
    #[arg(long, value_name = "FILE")]
    components: PathBuf,
    #[command(flatten)]
    exceptions: ListExceptions,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    /// Check all of it, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "2m")]
    timeout: Duration,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let (list, servers) = (Some(&*self.components), Servers::default());
        Ok(Options {
            version: components::version(&self.version, list, &servers, self.timeout)?,
            components: self.components,
            exceptions: self.exceptions,
            kubeconfig: self.kubeconfig.paths(),
            dry_run: self.dry_run,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The version of Kubernetes.
    pub version: KubernetesVersion,
    /// The list of components.
    pub components: PathBuf,
    /// The faults that the list may have.
    pub exceptions: ListExceptions,
    /// The administrator's kubeconfigs; `$KUBECONFIG` may name several.
    pub kubeconfig: Vec<PathBuf>,
    /// Whether nothing is changed.
    pub dry_run: bool,
    /// The form of the output.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let client = kubeconfig::client(&options.kubeconfig)?.within(options.timeout);
    let progress = Progress::on_stderr();
    let upgrade = publish(options, &client, &progress)?;
    drop(progress);
    options.output.json(&upgrade.json())?;
    options.output.say(upgrade.text())
}

/// Puts the list of components into the cluster, after the checks.
pub fn publish(options: &Options, client: &Client, progress: &Progress) -> Result<Upgrade, Error> {
    let to = options.version;
    check(&options.components, None, &options.exceptions)?;
    let list = components::read(&options.components).map_err(Error::content)?;
    if let Some(warning) = to.warning(SystemTime::now()) {
        log::warn!("{warning}");
    }
    if let Some(other) = kubernetes::components::version_in(&list)
        && other != to.to_string()
    {
        return Err(Error::content(format!(
            "{}: expected the components of {to}, got kubeadm {other}",
            options.components.display()
        )));
    }

    progress.phase(format!("waiting for the API server {}", client.server()));
    client.wait_ready(&mut |why| progress.line(why))?;
    let from = version_of(client)?;
    from.check_upgrade(&to).map_err(Error::blocked)?;
    let mut nodes = listed(client)?;
    check_kubelets(&nodes, &to)?;
    check_etcd(client, &nodes, &to)?;
    let driver = Driver::of(client, from == to)?;

    let map = kubernetes::components::config_map(&to, &list);
    let metadata = ObjectMeta::of(&map);
    let name = metadata.name.as_str();
    let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
    let present = client.find(&maps.named(name))?;
    match &present {
        Some(present) if present["data"] != map["data"] => {
            return Err(Error::blocked(format!(
                "the ConfigMap {NAMESPACE}/{name} has the same programs with other places, sources or patches: delete it, and run \
                 the command again"
            )));
        }
        None if !options.dry_run => {
            progress.phase(format!("making the ConfigMap {NAMESPACE}/{name}"));
            interrupt::means(
                "the cluster may already have the new list of components; run the same command again",
            );
            client.create(&maps, &map)?;
        }
        _ => {}
    }
    if !options.dry_run {
        driver.drive(client, name, &to, &nodes)?;
    }

    nodes.retain(|node| node.version != to.to_string());
    nodes.sort_by(|one, other| {
        let key = |node: &Listed| (!node.is_control_plane, node.name.clone());
        key(one).cmp(&key(other))
    });
    Ok(Upgrade {
        from,
        to,
        name: name.to_owned(),
        is_new: present.is_none(),
        dry_run: options.dry_run,
        driver,
        nodes,
    })
}

/// What brings the version to the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Driver {
    /// The operator, node by node: the cluster has no NodeVersion.
    Hand,
    /// Constellation's node operator: its upgrade agents upgrade the control plane, and it replaces the nodes.
    Agents,
    /// As before, but nodes of Firstlight have no upgrade agent: the operator upgrades the control planes first.
    Planes,
    /// They are upgraded: NodeVersion names the new version, for the node operator and for nodes that join.
    Rest,
}

impl Driver {
    /// Returns the driver of this cluster. `is_upgraded` says whether the first control plane has the version.
    fn of(client: &Client, is_upgraded: bool) -> Result<Driver, Error> {
        let Some(version) = NodeVersion::find(client)? else {
            return Ok(Driver::Hand);
        };
        let is_moved = match migrate::progress(client)? {
            None => version.field(IMAGE_VERSION) == IMAGE_OF_FIRSTLIGHT,
            Some((Some(migrate::Step::End), false)) => true,
            Some(_) => {
                return Err(Error::blocked(
                    "a move from Constellation is not complete: an upgrade now would make it impossible to undo. Nothing was changed. First \
                     run `firstlight migrate apply --end` or `firstlight migrate undo`",
                ));
            }
        };
        let has_agents = !is_moved && moves_nodes(client)?;
        match (has_agents, is_upgraded) {
            // without agents the node operator tries in vain, and says so in the status
            (true, _) if version.is_upgrading || version.is_outdated => {
                Err(Error::blocked(format!(
                    "{}: Constellation's node operator {}: wait until it is done",
                    node_version::place(),
                    if version.is_upgrading {
                        "upgrades Kubernetes"
                    } else {
                        "replaces nodes"
                    }
                )))
            }
            (true, _) => Ok(Driver::Agents),
            (false, false) => Ok(Driver::Planes),
            (false, true) => Ok(Driver::Rest),
        }
    }

    /// Makes NodeVersion name the version, unless that is too early.
    fn drive(
        self,
        client: &Client,
        name: &str,
        to: &KubernetesVersion,
        nodes: &[Listed],
    ) -> Result<(), Error> {
        if matches!(self, Driver::Hand | Driver::Planes) {
            return Ok(());
        }
        let to = to.to_string();
        // the node operator replaces a node whose annotation names other components
        let upgraded = nodes.iter().filter(|node| node.version == to);
        for node in upgraded.filter(|_| self == Driver::Rest) {
            client.annotate(&NODES.named(&node.name), &[(COMPONENTS_ANNOTATION, name)])?;
        }
        let set = [(COMPONENTS, name), (CLUSTER_VERSION, to.as_str())];
        let new = node_version::set(client, &set)?;
        match set.iter().find(|(field, value)| new.field(field) != *value) {
            None => Ok(()),
            Some((field, value)) => Err(Error::Refused(format!(
                "{}: expected {field} {value}, got {}: another program changes it",
                node_version::place(),
                new.field(field)
            ))),
        }
    }

    /// Returns what happens to NodeVersion, a sentence; empty if there is none.
    fn text(self, to: &KubernetesVersion, dry_run: bool) -> String {
        let has = if dry_run { "would have" } else { "has" };
        match self {
            Driver::Hand => String::new(),
            Driver::Agents => format!(
                "NodeVersion {has} {to}: Constellation's node operator upgrades the control plane and replaces the nodes. Run the command \
                 again to see which nodes are left.\n"
            ),
            Driver::Planes => format!(
                "NodeVersion stays as it is until the first control plane has {to}, because nodes of Firstlight have no upgrade agent: \
                 upgrade it by hand, and run the command again.\n"
            ),
            Driver::Rest => format!(
                "NodeVersion {has} {to}: new nodes join with it. Where Constellation's node operator replaces nodes, it replaces those that \
                 are left.\n"
            ),
        }
    }

    /// Returns the name for programs.
    fn name(self) -> Option<&'static str> {
        match self {
            Driver::Hand => None,
            Driver::Planes => Some("waits"),
            Driver::Agents | Driver::Rest => Some("set"),
        }
    }
}

/// Returns the version of the control plane, as kubeadm has recorded it.
fn version_of(client: &Client) -> Result<KubernetesVersion, Error> {
    let map = CONFIG_MAPS
        .in_namespace(NAMESPACE)
        .named(kubeadm::CONFIG_MAP);
    kubeadm::recorded_version(&client.get(&map)?).map_err(|error| {
        Error::content(format!(
            "ConfigMap {NAMESPACE}/{}: {error}",
            kubeadm::CONFIG_MAP
        ))
    })
}

fn check_kubelets(nodes: &[Listed], to: &KubernetesVersion) -> Result<(), Error> {
    let is_old = |node: &&Listed| match node.version.parse::<KubernetesVersion>() {
        Ok(version) => version.minor + KUBELET_SKEW < to.minor,
        // an unsupported version
        Err(_) => true,
    };
    let old: Vec<String> = nodes
        .iter()
        .filter(is_old)
        .map(|node| printable(&format!("{} ({})", node.name, node.version)))
        .collect();
    if old.is_empty() {
        Ok(())
    } else {
        Err(Error::blocked(format!(
            "with a control plane of {to} no kubelet may be older than v1.{}: upgrade or remove these nodes first: {}",
            to.minor.saturating_sub(KUBELET_SKEW),
            old.join(", ")
        )))
    }
}

/// Refuses an upgrade from a version of etcd that must not be followed by etcd 3.6. A version that the
/// tag of the image does not tell, and an etcd outside of the cluster, are not checked.
fn check_etcd(client: &Client, nodes: &[Listed], to: &KubernetesVersion) -> Result<(), Error> {
    if to.minor < WITH_ETCD_3_6 {
        return Ok(());
    }
    let mut old = vec![];
    for node in nodes.iter().filter(|node| node.is_control_plane) {
        let plane = ControlPlane {
            name: node.name.clone(),
            uid: node.uid.clone(),
            ..ControlPlane::default()
        };
        if let StaticPod::Real(pod, _) = plane.static_pod(client, "etcd")? {
            let container = pod.spec.containers.first();
            let tag = container.and_then(|it| tag(&it.image)).unwrap_or_default();
            if is_before_etcd_3_6(tag) {
                old.push(printable(&format!("{} ({tag})", node.name)));
            }
        }
    }
    if old.is_empty() {
        Ok(())
    } else {
        Err(Error::blocked(format!(
            "Kubernetes {to} brings etcd 3.6, which may follow only etcd {ETCD_STEP} or later: {}. Nothing was changed; {ETCD_ADVICE}",
            old.join(", ")
        )))
    }
}

/// The version in [`BEFORE_ETCD_3_6`].
pub const ETCD_STEP: &str = "3.5.26";
/// How the operator gets this version of etcd.
pub const ETCD_ADVICE: &str = "first upgrade to a patch of the present minor version with etcd 3.5.26: firstlight components VERSION --etcd 3.5.26-0 (docs/day-two/upgrade.md)";

fn tag(image: &str) -> Option<&str> {
    let name = image.split('@').next()?.rsplit('/').next()?;
    Some(name.split_once(':')?.1)
}

/// Returns whether the tag of etcd's image, such as `3.5.21-0`, names a version that etcd 3.6 must not
/// follow.
pub fn is_before_etcd_3_6(tag: &str) -> bool {
    let version = tag.trim_start_matches('v').split(['-', '+']).next();
    let numbers = version.unwrap_or_default().split('.').map(str::parse);
    let numbers: Result<Vec<u32>, _> = numbers.collect();
    numbers.is_ok_and(|numbers| {
        numbers.len() == 3 && numbers[0] == 3 && numbers[..] < BEFORE_ETCD_3_6[..]
    })
}

/// The result of the command.
pub struct Upgrade {
    /// The version of the control plane.
    pub from: KubernetesVersion,
    to: KubernetesVersion,
    /// The name of the ConfigMap.
    pub name: String,
    is_new: bool,
    dry_run: bool,
    driver: Driver,
    /// The nodes that have another version, in the order of their upgrade.
    nodes: Vec<Listed>,
}

impl Upgrade {
    fn text(&self) -> String {
        let Upgrade {
            from,
            to,
            name,
            nodes,
            ..
        } = self;
        let made = match (self.is_new, self.dry_run) {
            (true, true) => "would be made",
            (true, false) => "new",
            (false, _) => "in place already",
        };
        let mut text = format!("{from} -> {to}\nConfigMap {NAMESPACE}/{name}: {made}\n");
        // writing to a string does not fail
        let _ = match from < to {
            true if self.driver == Driver::Agents => {
                writeln!(text, "New nodes join with {to} at once.")
            }
            true => writeln!(
                text,
                "New nodes join with {from} until the first control plane has {to}."
            ),
            false => writeln!(text, "New nodes join with {to}."),
        };
        text += &self.driver.text(to, self.dry_run);
        if nodes.is_empty() {
            let _ = write!(text, "Every node has {to}.");
            return text;
        }
        if self.driver == Driver::Agents {
            text.push_str("Left:");
            self.list(&mut text);
            return text;
        }
        let _ = write!(
            text,
            "Next, as root on one node after the other, with the same list: bootstrapper upgrade < components.json"
        );
        self.list(&mut text);
        text
    }

    /// Adds the nodes that are left.
    fn list(&self, text: &mut String) {
        let widths = self.nodes.iter().map(|node| node.name.chars().count());
        let width = widths.max().unwrap_or_default();
        for node in &self.nodes {
            let (name, version) = (printable(&node.name), printable(&node.version));
            // writing to a string does not fail
            let _ = write!(text, "\n  {name:width$}  {:13}  {version}", node.role());
        }
    }

    fn json(&self) -> Value {
        let nodes = self
            .nodes
            .iter()
            .map(|node| json!({"name": node.name, "role": node.role(), "kubelet": node.version}));
        json!({
            "from": self.from.to_string(),
            "to": self.to.to_string(),
            "components": self.name,
            "isNew": self.is_new,
            "nodeVersion": self.driver.name(),
            "left": nodes.collect::<Vec<Value>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_3_6_may_follow_3_5_26_and_later() {
        for (tag, is_old) in [
            ("3.5.21-0", true),
            ("3.5.25-0", true),
            ("3.5.26-0", false),
            ("v3.5.27", false),
            ("3.6.4-0", false),
            ("3.4.13-0", true),
            ("1.34.0", false),
            ("latest", false),
            ("3.5", false),
            ("", false),
        ] {
            assert_eq!(is_before_etcd_3_6(tag), is_old, "{tag}");
        }
        let digest = format!("mirror:5000/etcd:3.5.21-0@sha256:{}", "0".repeat(64));
        assert_eq!(tag(&digest), Some("3.5.21-0"));
        assert_eq!(tag("mirror:5000/etcd"), None);
        let step = BEFORE_ETCD_3_6.map(|number| number.to_string());
        assert_eq!(step.join("."), ETCD_STEP);
    }
}
