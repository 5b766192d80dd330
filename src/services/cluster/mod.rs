//! What the join service and the member controller know of the cluster. Watches keep its state up to
//! date, so that a ticket needs no read from the API server.
//!
//! ```text
//! nodes         ─► which nodes exist and are Ready      ConfigMaps of kube-system ─► kubeadm-config: endpoint, names
//! NodeVersions  ─► which components nodes install                                    k8s-components-*: the components
//! (of Constellation, optional)                                                       join-*: which machine has which disk,
//!                                                                                    which nodes were removed
//! ```
//!
//! | file | work |
//! |---|---|
//! | `node_status`, `known_records`, `index` | nodes and records, as the watches deliver them |
//! | [`instances`], [`known_machines`] | the machines that the cloud lists |
//! | [`joining_node`] | objects of Constellation about nodes that join |
//! | [`keys`], [`secrets`] | the client of the key service; the keys and the salt that it is asked for |
//! | [`refusal`] | why a request of a node is refused |
//! | [`events`] | Kubernetes Events about nodes |
//! | [`own_node`] | whether this pod runs on a control plane |
//! | [`joined`] | threads that end before their owner |

pub mod constellation;
pub mod events;
mod index;
pub mod instances;
pub mod joined;
pub mod keys;
pub mod known_machines;
mod known_records;
pub mod node_status;
pub mod own_node;
pub mod refusal;
pub mod secrets;

use base::sync::{lock, wait_timeout};
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};
use std::{fmt, io};

use serde_json::Value;

use known_records::KnownRecords;
use kubernetes::client::{
    self, CONFIG_MAPS, Client, Collection, CollectionEvent, NODE_VERSIONS, NODES, ObjectKind,
    Selector,
};
use kubernetes::components::{self, CONFIG_MAP_PREFIX};
use kubernetes::constellation::node_version::NAME as NODE_VERSION;
use kubernetes::kubeadm::CONFIG_MAP as KUBEADM_CONFIG;
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::objects::{ConfigMap, NodeObject, NodeVersionObject};
use kubernetes::parameters::{self, KubernetesVersion as Release, Subnet};
use kubernetes::removed_nodes::{self, RemovedNode, RemovedNodes};
use kubernetes::{NAMESPACE, yaml};
use node_status::NodeStatus;
use proto::components::Component;
use refusal::TicketRefusal;

/// How long the bootstrap token of a join ticket is valid, as in Constellation.
pub const TOKEN_VALIDITY: Duration = Duration::from_secs(15 * 60);
/// The pause before a refused watch is tried again: the resource or the permission may be created
/// later.
const RETRY_PAUSE: Duration = Duration::from_secs(10);
/// The port of kube-apiserver if an endpoint has none.
const API_PORT: u16 = 6443;

/// The known state of the cluster, shared by all threads.
pub struct Cluster {
    client: Client,
    state: Mutex<Objects>,
    changed: Condvar,
    listener: OnceLock<OnNode>,
}

/// A change of the cluster's state.
pub enum Change<'a> {
    /// A node of this name is new, or has changed.
    Node(&'a str, &'a NodeStatus),
    /// A record is new, or has changed. Its node, if that exists.
    Record(&'a MachineRecord, Option<&'a NodeStatus>),
}

/// Is called with each node that is new or has changed, or with `None` if it was deleted.
type OnNode = Box<dyn Fn(&str, Option<&NodeStatus>) + Send + Sync>;

/// The threads that keep the state up to date. They end when the client is stopped.
pub struct Watches(Vec<JoinHandle<()>>);

/// What the watches have delivered.
#[derive(Default)]
struct Objects {
    has_nodes: bool,
    has_config_maps: bool,
    version: Version,
    has_joining_nodes: bool,
    nodes: HashMap<String, NodeStatus>,
    components: BTreeMap<String, Arc<Components>>,
    kubeadm: Option<Arc<Result<KubeadmSettings, TicketRefusal>>>,
    records: KnownRecords,
    removed: RemovedNodes,
}

/// The version of the components that nodes install.
#[derive(Default, PartialEq)]
enum Version {
    #[default]
    Unknown,
    /// The cluster has no NodeVersion resource, or no such object.
    Absent,
    /// The name of the ConfigMap with the components.
    Is(String),
}

/// What is used of a ConfigMap.
enum KnownMap {
    Kubeadm(Result<KubeadmSettings, TicketRefusal>),
    Components(Components),
    Record(Box<MachineRecord>),
    Removed(RemovedNodes),
    Other,
}

/// The components of one Kubernetes version.
pub struct Components {
    /// The creation time of the ConfigMap, in the API's format.
    created: String,
    /// The name of the ConfigMap.
    pub name: String,
    /// The Kubernetes version, such as `v1.34.4`.
    pub version: String,
    /// The components, or the refusal of nodes because they cannot be read.
    pub list: Result<Vec<Component>, TicketRefusal>,
}

/// The fields of kubeadm's ClusterConfiguration that a ticket needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeadmSettings {
    /// The address of the API server, `host:port`.
    pub endpoint: String,
    /// Further names of the API server's certificate.
    pub names: Vec<String>,
    /// The networks of Services: pods reach the API server at the first address.
    pub services: Vec<Subnet>,
    /// The version of the control plane, which kubeadm writes at the end of an upgrade.
    pub version: Option<Release>,
}

impl Cluster {
    /// Starts the watches, which call `told` after each change of a node or a record.
    pub fn follow(
        client: &Client,
        told: impl Fn(Change<'_>) + Clone + Send + 'static,
    ) -> io::Result<(Arc<Cluster>, Watches)> {
        let cluster = Arc::new(Cluster {
            client: client.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
            listener: OnceLock::new(),
        });
        let mut watches = Watches(Vec::new());
        let (nodes, tell) = (cluster.clone(), told.clone());
        watches.start("watch-nodes", move || {
            let selector = Selector::default();
            let read = |node: NodeObject| (node.metadata.name.clone(), NodeStatus::read(&node));
            nodes.watch(&NODES.all(), &selector, read, |event| {
                nodes.node_event(event, &tell)
            });
        })?;
        let maps = cluster.clone();
        watches.start("watch-maps", move || {
            let collection = CONFIG_MAPS.in_namespace(NAMESPACE);
            maps.watch(&collection, &Selector::default(), KnownMap::read, |event| {
                maps.map_event(event, &told)
            });
        })?;
        let versions = cluster.clone();
        watches.start("watch-versions", move || {
            let selector = Selector::fields(&format!("metadata.name={NODE_VERSION}"));
            versions.watch(&NODE_VERSIONS.all(), &selector, Version::read, |event| {
                versions.version_event(event)
            });
        })?;
        Ok((cluster, watches))
    }

    /// Returns the client of the Kubernetes API.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Follows a collection until the client is stopped, and reduces its objects by `keep`. Calls
    /// `on` with each event, and with `None` if the resource does not exist or may not be read.
    pub fn watch<K: ObjectKind, T>(
        &self,
        collection: &Collection,
        selector: &Selector,
        keep: fn(K) -> T,
        mut on: impl FnMut(Option<CollectionEvent<T>>),
    ) {
        let mut watch = self.client.watch(collection, selector).keeping(keep);
        let mut logged = String::new();
        loop {
            match watch.next() {
                Ok(event) => {
                    logged.clear();
                    on(Some(event));
                }
                Err(client::Error::Stopped) => return,
                Err(error) => {
                    // A resource that does not exist is not logged. The API server answers 403 if
                    // no account may read it.
                    let is_absent = error.is_not_found();
                    if is_absent || error.code() == Some(403) {
                        on(None);
                    }
                    if !is_absent && error.to_string() != logged {
                        logged = error.to_string();
                        log::error!(
                            "{logged}: the state of {collection} is unknown until this request succeeds"
                        );
                    }
                    if self.client.stopped_within(RETRY_PAUSE) {
                        return;
                    }
                }
            }
        }
    }

    fn node_event(
        &self,
        event: Option<CollectionEvent<(String, NodeStatus)>>,
        told: &dyn Fn(Change<'_>),
    ) {
        let Some(event) = event else { return };
        let mut seen = Vec::new();
        let mut state = self.lock();
        match event {
            CollectionEvent::Listed(nodes) => {
                state.nodes = nodes.iter().cloned().collect();
                state.has_nodes = true;
                seen = nodes;
            }
            CollectionEvent::Added((name, node)) | CollectionEvent::Modified((name, node)) => {
                // Heartbeats change nothing that is kept here.
                if state.nodes.get(&name) != Some(&node) {
                    seen.push((name.clone(), node.clone()));
                    state.nodes.insert(name, node);
                }
            }
            CollectionEvent::Deleted((name, _)) => {
                state.nodes.remove(&name);
                drop(state);
                self.tell(&name, None);
                return self.changed.notify_all();
            }
        }
        drop(state);
        self.changed.notify_all();
        for (name, node) in seen {
            told(Change::Node(&name, &node));
            self.tell(&name, Some(&node));
        }
    }

    fn tell(&self, name: &str, node: Option<&NodeStatus>) {
        if let Some(listener) = self.listener.get() {
            listener(name, node);
        }
    }

    /// Sets the one function that is called for each change of a node, on the thread of the watch.
    pub fn on_node(&self, listener: impl Fn(&str, Option<&NodeStatus>) + Send + Sync + 'static) {
        // a second one would be an error of this program
        let _ = self.listener.set(Box::new(listener));
    }

    fn map_event(
        &self,
        event: Option<CollectionEvent<(String, KnownMap)>>,
        told: &dyn Fn(Change<'_>),
    ) {
        let Some(event) = event else { return };
        let mut state = self.lock();
        let mut records = Vec::new();
        match event {
            CollectionEvent::Listed(maps) => {
                state.components.clear();
                state.kubeadm = None;
                state.records = KnownRecords::default();
                state.removed = RemovedNodes::default();
                for map in maps {
                    records.extend(state.store_map(map));
                }
                state.has_config_maps = true;
            }
            CollectionEvent::Added(map) | CollectionEvent::Modified(map) => {
                records.extend(state.store_map(map))
            }
            CollectionEvent::Deleted((name, _)) => state.remove_map(&name),
        }
        drop(state);
        self.changed.notify_all();
        for record in records {
            told(Change::Record(&record, self.node(&record.node).as_ref()));
        }
    }

    fn version_event(&self, event: Option<CollectionEvent<Version>>) {
        let has_joining_nodes = event.is_some();
        let version = match event {
            None | Some(CollectionEvent::Deleted(_)) => Version::Absent,
            Some(CollectionEvent::Listed(versions)) => {
                versions.into_iter().next().unwrap_or(Version::Absent)
            }
            Some(CollectionEvent::Added(version) | CollectionEvent::Modified(version)) => version,
        };
        let mut state = self.lock();
        (state.version, state.has_joining_nodes) = (version, has_joining_nodes);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits up to `time` until every watch has delivered its list. Returns whether that is so.
    pub fn is_known_within(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut state = self.lock();
        loop {
            if state.is_complete() {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.client.is_stopped() {
                return false;
            }
            state = wait_timeout(&self.changed, state, left);
        }
    }

    /// Returns whether Constellation's resources exist. If so, its operator and join services may
    /// be running.
    pub fn has_joining_nodes(&self) -> bool {
        self.lock().has_joining_nodes
    }

    /// Returns a node, if it exists.
    pub fn node(&self, name: &str) -> Option<NodeStatus> {
        self.lock().nodes.get(name).cloned()
    }

    /// Returns all nodes.
    pub fn nodes(&self) -> Vec<(String, NodeStatus)> {
        let state = self.lock();
        let nodes = state.nodes.iter();
        nodes
            .map(|(name, node)| (name.clone(), node.clone()))
            .collect()
    }

    /// Returns a record by its name.
    pub fn record(&self, name: &str) -> Option<Arc<MachineRecord>> {
        self.lock().records.get(name).cloned()
    }

    /// Returns the node of this name that an operator has removed.
    pub fn removed(&self, node: &str) -> Option<RemovedNode> {
        self.lock().removed.of_name(node).cloned()
    }

    /// Returns the name of a node that an operator has removed, and whose machine this was.
    pub fn removed_of_machine(&self, machine: &str) -> Option<String> {
        self.lock().removed.of_machine(machine).map(str::to_owned)
    }

    /// Returns the records of nodes that do not exist and whose tickets have expired.
    pub fn records_without_node(&self, now: SystemTime) -> Vec<Arc<MachineRecord>> {
        let state = self.lock();
        let has_expired = |record: &MachineRecord| {
            let age = record.issued.map(|issued| now.duration_since(issued));
            // a time in the future is another replica's, or wrong: the ticket may be new
            age.is_none_or(|age| age.is_ok_and(|age| age > TOKEN_VALIDITY))
        };
        let records = state.records.all().filter(|record| {
            record.name == machine_record::name_of_node(&record.node)
                && !state.nodes.contains_key(&record.node)
                && has_expired(record)
        });
        records.cloned().collect()
    }

    /// Returns a node whose record has this address. An IPv4 address also has a form as an IPv6 address.
    pub fn node_of_address(&self, address: IpAddr) -> Option<String> {
        self.node_with(address, |_| true)
    }

    /// Returns a control plane whose record has this address.
    pub fn control_plane_of_address(&self, address: IpAddr) -> Option<String> {
        self.node_with(address, |record| record.control_plane)
    }

    fn node_with(
        &self,
        address: IpAddr,
        is_one: impl Fn(&MachineRecord) -> bool,
    ) -> Option<String> {
        let state = self.lock();
        let mut records = state.records.of_address(address);
        let record = records.find(|record| !record.node.is_empty() && is_one(record))?;
        Some(record.node.clone())
    }

    /// Returns the records that contain this disk.
    pub fn records_of_disk(&self, disk: &str) -> Vec<Arc<MachineRecord>> {
        self.lock().records.of_disk(disk).cloned().collect()
    }

    /// Returns the node whose join ticket has the token of this identifier.
    pub fn node_of_token(&self, id: &str) -> Option<String> {
        let state = self.lock();
        let record = state.records.of_token(id)?;
        Some(record.node.clone())
    }

    /// Returns a record of this machine that is closed, because its evidence was refused.
    pub fn closed_record_of(&self, machine: &str) -> Option<Arc<MachineRecord>> {
        let state = self.lock();
        let mut own = state.records.of_machine(machine);
        own.find(|record| record.refused.is_some()).cloned()
    }

    /// Counts the records of this machine whose name starts with `prefix`.
    pub fn count_of_machine(&self, prefix: &str, machine: &str) -> usize {
        let state = self.lock();
        let own = state.records.of_machine(machine);
        own.filter(|record| record.name.starts_with(prefix)).count()
    }

    /// Counts the records of disks.
    pub fn count_of_disks(&self) -> usize {
        self.lock().records.count_of_disks()
    }

    /// Stores a record that was just written or read, before the watch delivers it.
    pub fn store_record(&self, record: MachineRecord) {
        self.lock().records.insert(record);
    }

    /// Stores the record of a disk that is about to be written, unless another machine has that
    /// disk by now.
    pub fn store_record_of_disk(&self, record: &MachineRecord) {
        let mut state = self.lock();
        let mut others = state.records.of_disk(&record.disk);
        if others.all(|other| other.machine.is_empty()) {
            drop(others);
            state.records.insert(record.clone());
        }
    }

    /// Returns the components that nodes install.
    pub fn components(&self) -> Result<Arc<Components>, TicketRefusal> {
        let state = self.lock();
        let found = match &state.version {
            Version::Is(name) => state.components.get(name),
            _ => state.newest_components(),
        };
        let missing = || {
            let details = match &state.version {
                Version::Is(name) => {
                    format!("there is no ConfigMap {NAMESPACE}/{name}, which {NODE_VERSION} names")
                }
                _ => format!("there is no ConfigMap {NAMESPACE}/{CONFIG_MAP_PREFIX}*"),
            };
            TicketRefusal::missing(
                "components",
                "the cluster does not specify the Kubernetes version of new nodes",
            )
            .with_details(details)
        };
        let found = found.cloned().ok_or_else(missing)?;
        match &found.list {
            Ok(_) => Ok(found),
            Err(refusal) => Err(refusal.clone()),
        }
    }

    /// Returns the endpoint and the names of the API server.
    pub fn kubeadm(&self) -> Result<KubeadmSettings, TicketRefusal> {
        let missing = "the cluster does not specify the endpoint of its API server";
        match self.lock().kubeadm.as_deref() {
            Some(kubeadm) => kubeadm.clone(),
            None => {
                let details = format!("there is no ConfigMap {NAMESPACE}/{KUBEADM_CONFIG}");
                Err(TicketRefusal::missing("kubeadm-config", missing).with_details(details))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        lock(&self.state)
    }
}

impl Objects {
    fn is_complete(&self) -> bool {
        self.has_nodes && self.has_config_maps && self.version != Version::Unknown
    }

    /// Returns the newest components that nodes may have with this control plane. A list of a later
    /// version is not used until kubeadm has upgraded a control plane, because no kubelet may be
    /// newer than its API server.
    fn newest_components(&self) -> Option<&Arc<Components>> {
        let age = |one: &&Arc<Components>| (one.created.clone(), one.name.clone());
        let present = match self.kubeadm.as_deref() {
            Some(Ok(kubeadm)) => kubeadm.version,
            _ => None,
        };
        let is_early = |one: &&Arc<Components>| {
            let of_list = one.version.parse::<Release>().ok();
            present.is_some() && of_list > present
        };
        let all = || self.components.values();
        let usable = all().filter(|one| !is_early(one)).max_by_key(age);
        // if kubeadm's record has an invalid version, nodes can still join
        usable.or_else(|| all().max_by_key(age))
    }

    /// Stores a ConfigMap. Returns the record in it, if it is one.
    fn store_map(&mut self, (name, map): (String, KnownMap)) -> Option<MachineRecord> {
        match map {
            KnownMap::Kubeadm(settings) => self.kubeadm = Some(Arc::new(settings)),
            KnownMap::Components(components) => {
                self.components.insert(name, Arc::new(components));
            }
            KnownMap::Record(record) => {
                self.records.insert(MachineRecord::clone(&record));
                return Some(*record);
            }
            KnownMap::Removed(removed) => self.removed = removed,
            KnownMap::Other => {}
        }
        None
    }

    fn remove_map(&mut self, name: &str) {
        self.components.remove(name);
        if name == KUBEADM_CONFIG {
            self.kubeadm = None;
        } else if name == removed_nodes::CONFIG_MAP {
            self.removed = RemovedNodes::default();
        }
        self.records.remove(name);
    }
}

impl Watches {
    fn start(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.0
            .push(thread::Builder::new().name(name.into()).spawn(run)?);
        Ok(())
    }
}

impl Drop for Watches {
    /// Waits for the threads. The client must have been stopped before.
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            // A panic of the thread is already in the log.
            let _ = thread.join();
        }
    }
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

impl KnownMap {
    /// Reads a ConfigMap. Returns its name, too.
    fn read(map: ConfigMap) -> (String, KnownMap) {
        let name = map.metadata.name.clone();
        let known = if name == KUBEADM_CONFIG {
            KnownMap::Kubeadm(KubeadmSettings::read(&map))
        } else if name.starts_with(CONFIG_MAP_PREFIX) {
            KnownMap::Components(Components::read(map))
        } else if name == removed_nodes::CONFIG_MAP {
            KnownMap::Removed(RemovedNodes::read(&map))
        } else {
            let record = MachineRecord::read(&map).map(Box::new);
            record.map_or(KnownMap::Other, KnownMap::Record)
        };
        (name, known)
    }
}

impl Version {
    fn read(object: NodeVersionObject) -> Version {
        match object.spec.kubernetes_components_reference {
            name if name.is_empty() => Version::Absent,
            name => Version::Is(name),
        }
    }
}

impl Components {
    fn read(map: ConfigMap) -> Components {
        let unreadable = |error| {
            let details = format!("ConfigMap {NAMESPACE}/{}: {error}", map.metadata.name);
            TicketRefusal::internal("components", details)
        };
        Components {
            version: map.text("cluster-version").to_owned(),
            list: components::read_list(map.text("components")).map_err(unreadable),
            created: map.metadata.creation_timestamp.unwrap_or_default(),
            name: map.metadata.name,
        }
    }
}

impl KubeadmSettings {
    /// Reads the ConfigMap that kubeadm writes.
    fn read(map: &ConfigMap) -> Result<KubeadmSettings, TicketRefusal> {
        let configuration = yaml::document(map.text("ClusterConfiguration")).map_err(unusable)?;
        let endpoint = endpoint(text(&configuration, "/controlPlaneEndpoint"))?;
        let names = configuration
            .pointer("/apiServer/certSANs")
            .and_then(Value::as_array);
        let names = names
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        let version = text(&configuration, "/kubernetesVersion").parse().ok();
        Ok(KubeadmSettings {
            endpoint,
            names,
            services: text(&configuration, "/networking/serviceSubnet")
                .split(',')
                .filter_map(|subnet| subnet.trim().parse().ok())
                .collect(),
            version,
        })
    }

    /// Returns whether clients reach the API server under this host name or address: it is the
    /// endpoint, the certificate is valid for it, or it is an address of a Service. Names are compared without case, and the first
    /// label may be `*` (RFC 6125 §6.4).
    pub fn is_served_under(&self, host: &str) -> bool {
        let endpoint = self
            .endpoint
            .rsplit_once(':')
            .map_or(self.endpoint.as_str(), |(host, _)| host);
        let endpoint = endpoint.trim_start_matches('[').trim_end_matches(']');
        let parent = host.split_once('.').map_or("", |(_, parent)| parent);
        // an IPv4 address also has a form as an IPv6 address
        let address = |host: &str| {
            host.parse()
                .ok()
                .map(|address: IpAddr| address.to_canonical())
        };
        let asked = address(host);
        let is_of_services =
            |address| (self.services.iter()).any(|subnet| subnet.contains(address));
        asked.is_some_and(is_of_services)
            || std::iter::once(endpoint)
                .chain(self.names.iter().map(String::as_str))
                .any(|name| match name.strip_prefix("*.") {
                    Some(of) => of.eq_ignore_ascii_case(parent),
                    None if asked.is_some() => address(name) == asked,
                    None => name.eq_ignore_ascii_case(host),
                })
    }
}

/// Refuses nodes because of kubeadm's ClusterConfiguration.
fn unusable(error: impl fmt::Display) -> TicketRefusal {
    let details = format!("ConfigMap {NAMESPACE}/{KUBEADM_CONFIG}: ClusterConfiguration: {error}");
    TicketRefusal::internal("kubeadm-config", details)
}

/// Returns kubeadm's controlPlaneEndpoint as `host:port`. Adds the default port if it has none.
fn endpoint(text: &str) -> Result<String, TicketRefusal> {
    if let Ok(address) = text.parse::<std::net::SocketAddr>() {
        return Ok(address.to_string());
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') => (
            host,
            port.parse().map_err(|_| {
                unusable(format_args!(
                    "controlPlaneEndpoint {text:?} has an invalid port"
                ))
            })?,
        ),
        _ => (text, API_PORT),
    };
    let host = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    parameters::host(host)
        .map_err(|error| unusable(format_args!("controlPlaneEndpoint: {error}")))?;
    Ok(if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn kubeadm(configuration: &str) -> Result<KubeadmSettings, TicketRefusal> {
        KubeadmSettings::read(&ConfigMap {
            data: [("ClusterConfiguration".to_owned(), configuration.to_owned())].into(),
            ..ConfigMap::default()
        })
    }

    #[test]
    fn the_endpoint_gets_the_api_servers_port_where_it_has_none() {
        for (text, expected) in [
            ("10.0.0.1", "10.0.0.1:6443"),
            ("10.0.0.1:443", "10.0.0.1:443"),
            ("lb.example", "lb.example:6443"),
            ("lb.example:8443", "lb.example:8443"),
            ("fd00::1", "[fd00::1]:6443"),
            ("[fd00::1]", "[fd00::1]:6443"),
            ("[fd00::1]:443", "[fd00::1]:443"),
        ] {
            assert_eq!(endpoint(text).as_deref(), Ok(expected));
        }
        for text in ["", "a b", "lb:x", "https://lb", ":6443"] {
            assert!(endpoint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn kubeadms_names_are_read_and_other_values_are_ignored() {
        let read =
            kubeadm("apiServer:\n  certSANs: [127.0.0.1, lb.example, 7]\ncontrolPlaneEndpoint: lb.example\n").unwrap();
        assert_eq!(read.names, ["127.0.0.1", "lb.example"]);
        assert!(
            kubeadm("apiServer: {}\n")
                .unwrap_err()
                .details
                .contains("controlPlaneEndpoint")
        );
        assert!(
            kubeadm("a: [")
                .unwrap_err()
                .details
                .contains("ClusterConfiguration: line")
        );
    }

    #[test]
    fn the_api_server_s_names_are_those_of_its_certificate_and_its_endpoint() {
        let sans =
            "apiServer:\n  certSANs: [10.0.0.5, lb.example, '*.Wild.example', 'fd00:0::5']\n";
        let read = kubeadm(&format!("{sans}controlPlaneEndpoint: '[fd00::1]:443'\n")).unwrap();
        for host in [
            "10.0.0.5",
            "LB.example",
            "a.wild.example",
            "fd00::5",
            "fd00::1",
            "fd00:0:0::1",
        ] {
            assert!(read.is_served_under(host), "{host}");
        }
        for host in [
            "10.0.0.50",
            "a.lb.example",
            "wild.example",
            "a.b.wild.example",
            "example",
            "fd00::2",
            "",
        ] {
            assert!(!read.is_served_under(host), "{host}");
        }
        assert!(
            kubeadm("controlPlaneEndpoint: cluster.example\n")
                .unwrap()
                .is_served_under("cluster.example")
        );
    }

    #[test]
    fn a_list_of_a_later_version_waits_for_the_control_plane() {
        let mut state = Objects::default();
        let mut list = |created: &str, name: &str, version: &str| {
            let name = format!("{CONFIG_MAP_PREFIX}{name}");
            let map = json!({
                "metadata": {"name": name, "creationTimestamp": created},
                "data": {"cluster-version": version, "components": "[]"},
            });
            state.store_map(KnownMap::read(from_value(map).unwrap()));
        };
        list("2026-01-01T00:00:00Z", "first", "v1.34.4");
        list("2026-01-02T00:00:00Z", "again", "v1.34.4");
        list("2026-01-03T00:00:00Z", "later", "v1.35.0");
        for (present, expected) in [
            ("v1.34.4", "again"),
            ("v1.35.0", "later"),
            ("v1.35.1", "later"),
            // an unknown version, and one without a list
            ("stable", "later"),
            ("v1.33.0", "later"),
        ] {
            let configuration =
                format!("controlPlaneEndpoint: lb.example\nkubernetesVersion: {present}\n");
            let map = json!({
                "metadata": {"name": KUBEADM_CONFIG},
                "data": {"ClusterConfiguration": configuration},
            });
            state.store_map(KnownMap::read(from_value(map).unwrap()));
            let found = state.newest_components().unwrap();
            assert_eq!(
                found.name,
                format!("{CONFIG_MAP_PREFIX}{expected}"),
                "{present}"
            );
        }
    }
}
