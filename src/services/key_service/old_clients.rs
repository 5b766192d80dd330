//! Clients without a token: the CSI drivers of Constellation, which ask from every node, in
//! plaintext and without a proof. They are served at an address of their own, through a day that
//! the operator names.
//!
//! They get keys of volumes, never of a state disk with a record ([`super::disks`]), and only from
//! the address of a node to which a volume is attached, or of a driver's pod on such a node. Their
//! requests do not name the volume, so such a node can have the key of every volume whose LUKS UUID
//! it knows. A grant for `anyone` can give other keys to every pod.
//!
//! Each request costs lists of the API server, so one is answered at a time, and few wait.
//!
//! The address proves as much as the cluster's network does: with a plugin that drops packets with
//! a wrong source, it is that of the node. Without one, every pod can pose as every other one, but
//! needs the answers to reach it.
//!
//! In a tunnel of Cilium, the source address of the host at a pod of another node is that of its interface `cilium_host`
//! (`createNodeRouteSpec` of Cilium), which its CiliumNode names. Each agent of Cilium may change these objects, and routes by
//! them.
//!
//! Such clients are served only while packets from outside of the cluster cannot have such an address
//! ([`kubernetes::services::outside`]): Cilium replaces kube-proxy, as in each cluster of Constellation but those of
//! `--conformance`. kube-proxy would give the host of a node the address of that node.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::volumes::VOLUME_ATTACHMENTS;
use kubernetes::client::{Client, Error, NODES, PODS, Resource, Selector};
use kubernetes::services::migration::Migration;
use kubernetes::services::{asks_a_key_service, outside};
use rpc::grpc::{Code, Status};

/// What Cilium knows of each node.
const CILIUM_NODES: Resource = Resource::cluster("cilium.io", "v2", "ciliumnodes");

/// The timeout of each list. Clients of Constellation set no deadline.
const TIME: Duration = Duration::from_secs(5);

/// How many requests may wait for the lists of another one.
const MAX_WAITING: usize = 8;

/// Identifies clients without a token by their addresses.
pub struct OldClients {
    client: Client,
    until: Migration,
    turns: Turns,
}

/// Lets one request at a time ask, while few wait.
#[derive(Default)]
struct Turns {
    turn: Mutex<()>,
    /// Those that wait, and the one that asks.
    waiting: AtomicUsize,
}

/// A client without a token.
pub struct OldClient {
    node: String,
    /// The pods with its address.
    pods: Vec<String>,
    /// Whether it may be a driver: it has the address of its host, or its pod has a driver's argument.
    may_be_driver: bool,
}

impl fmt::Display for OldClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " node={:?} pods={:?}", self.node, self.pods)
    }
}

impl OldClients {
    /// Creates a client of the API server. It needs the permissions of the chart.
    pub fn new(client: &Client, until: Migration) -> OldClients {
        OldClients {
            client: client.within(TIME),
            until,
            turns: Turns::default(),
        }
    }

    /// Returns whether such clients are still served.
    pub fn are_served(&self) -> bool {
        self.until.is_on(SystemTime::now())
    }

    /// Returns the client with this address. Refuses an address that is not that of one node, or of
    /// pods on one node.
    pub fn identify(&self, peer: Option<IpAddr>) -> Result<OldClient, Status> {
        if !self.are_served() {
            return Err(denied(format!(
                "clients without a token are no longer served, since {} is over: use a driver that sends the token of its pod \
                 (docs/storage.md), or `firstlight apply --old-clients-until DATE`",
                self.until
            )));
        }
        let Some(address) = peer.map(|peer| peer.to_canonical()) else {
            return Err(denied("the address of the client is unknown".into()));
        };
        let turn = self.turns.take()?;
        let why_open = outside::why_open(&self.client).map_err(|error| {
            log::error!("the API server does not say whether Cilium replaces kube-proxy: {error}");
            unavailable("whether Cilium replaces kube-proxy")
        })?;
        if let Some(why) = why_open {
            return Err(denied(format!(
                "clients without a token are served only where Cilium replaces kube-proxy, and so drops packets from outside of \
                 the cluster: {why}"
            )));
        }
        let found = self.find(address);
        drop(turn);
        let found = found.map_err(|error| {
            log::error!("the API server does not say whose address {address} is: {error}");
            unavailable("which node this client is on")
        })?;
        found.ok_or_else(|| {
            denied(format!(
                "{address} is not the address of one node, or of a pod on one"
            ))
        })
    }

    /// Returns the volumes of the client's node, for the log. Refuses a client that is no driver, or
    /// whose node has no volume.
    pub fn volumes(&self, client: &OldClient) -> Result<Vec<String>, Status> {
        let OldClient { node, pods, .. } = client;
        if !client.may_be_driver {
            return Err(denied(format!(
                "the pod {} on the node {node} is no driver of volumes: expected a pod on the network of its host, or one with the \
                 argument --kms-addr",
                pods.join(", ")
            )));
        }
        let turn = self.turns.take()?;
        let volumes = self.attached(node);
        drop(turn);
        let volumes = volumes.map_err(|error| {
            log::error!("the API server does not say which volumes {node} has: {error}");
            unavailable("which volumes this node has")
        })?;
        if volumes.is_empty() {
            return Err(denied(format!("no volume is attached to the node {node}")));
        }
        Ok(volumes)
    }

    /// Returns the node with this address, and its pods with this address.
    fn find(&self, address: IpAddr) -> Result<Option<OldClient>, Error> {
        let selector = Selector::fields(&format!("status.podIP={address}"));
        let found = self
            .client
            .list_keeping(&PODS.all(), &selector, node_name_and_kind)?;
        let pods: Vec<_> = found.items.iter().filter(|pod| !pod.is_null()).collect();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut nodes: BTreeSet<_> = pods.iter().map(|pod| text(&pod[0])).collect();
        if nodes.is_empty() {
            nodes = self.nodes_with(address)?;
        }
        Ok(match (nodes.pop_first(), nodes.is_empty()) {
            (Some(node), true) => Some(OldClient {
                node,
                pods: pods.iter().map(|pod| text(&pod[1])).collect(),
                may_be_driver: pods.is_empty() || pods.iter().any(|pod| pod[2] == true),
            }),
            _ => None,
        })
    }

    /// Returns the nodes whose hosts may have this address.
    fn nodes_with(&self, address: IpAddr) -> Result<BTreeSet<String>, Error> {
        let list = |resource: &Resource, reduce| {
            let found = self
                .client
                .list_keeping(&resource.all(), &Selector::default(), reduce);
            found.map(|found| found.items)
        };
        let known = list(&NODES, name_and_addresses)?;
        let of_cilium = list(&CILIUM_NODES, name_and_cilium_addresses)?;
        let has_address = |node: &Value| strings(&node[1]).any(|own| own.parse() == Ok(address));
        let mut names = BTreeSet::new();
        for node in known.iter().chain(&of_cilium) {
            if has_address(node) {
                names.extend(node[0].as_str().map(str::to_owned));
            }
        }
        Ok(names)
    }

    /// Returns the names of the PersistentVolumes that are attached to this node.
    fn attached(&self, node: &str) -> Result<Vec<String>, Error> {
        let found = self.client.list_keeping(
            &VOLUME_ATTACHMENTS.all(),
            &Selector::default(),
            node_and_volume,
        )?;
        let volumes = found.items.iter().filter(|attached| attached[0] == node);
        Ok(volumes
            .filter_map(|attached| Some(attached[1].as_str()?.to_owned()))
            .collect())
    }
}

impl Turns {
    /// Waits until it is the caller's turn. Refuses if too many wait.
    fn take(&self) -> Result<Turn<'_>, Status> {
        let place = Place(&self.waiting);
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= MAX_WAITING {
            return Err(Status::new(
                Code::ResourceExhausted,
                "too many clients without a token ask at the same time: try again",
            ));
        }
        Ok(Turn {
            _alone: self.turn.lock().unwrap_or_else(PoisonError::into_inner),
            _place: place,
        })
    }
}

/// The turn of one request, until it is dropped.
struct Turn<'a> {
    _alone: MutexGuard<'a, ()>,
    _place: Place<'a>,
}

/// One of those that wait or ask.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the texts of a list.
fn strings(list: &Value) -> impl Iterator<Item = &str> {
    let all = list.as_array().into_iter().flatten();
    all.filter_map(Value::as_str)
}

/// Returns the error of a client of which the API server does not say this.
fn unavailable(what: &str) -> Status {
    let message = format!("cannot check at the moment {what}: try again");
    Status::new(Code::Unavailable, message)
}

fn denied(why: String) -> Status {
    Status::new(Code::PermissionDenied, why)
}

/// Reduces a pod that has not ended to its node, its name, and whether it may be a driver.
fn node_name_and_kind(pod: Value) -> Value {
    let ended = ["Succeeded", "Failed"]
        .iter()
        .any(|phase| pod["status"]["phase"] == **phase);
    let name = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
    let may_be_driver = pod["spec"]["hostNetwork"] == true || asks_a_key_service(&pod["spec"]);
    match &pod["spec"]["nodeName"] {
        Value::String(node) if !ended => json!([
            node,
            format!("{}/{}", name("namespace"), name("name")),
            may_be_driver
        ]),
        _ => Value::Null,
    }
}

/// Reduces a node to its name and its internal addresses.
fn name_and_addresses(node: Value) -> Value {
    let internal = addresses(&node["status"], "InternalIP", "address");
    json!([node["metadata"]["name"], internal])
}

/// Reduces a CiliumNode, which has the name of its node, to this name and the addresses of cilium_host.
fn name_and_cilium_addresses(node: Value) -> Value {
    let own = addresses(&node["spec"], "CiliumInternalIP", "ip");
    json!([node["metadata"]["name"], own])
}

/// Returns the addresses of this type, which are in this field of a node.
fn addresses<'a>(part: &'a Value, kind: &str, field: &str) -> Vec<&'a Value> {
    let all = part["addresses"].as_array().into_iter().flatten();
    all.filter(|address| address["type"] == kind)
        .map(|address| &address[field])
        .collect()
}

/// Reduces an attachment to its node and its volume; null if it is not attached.
fn node_and_volume(attachment: Value) -> Value {
    match attachment["status"]["attached"] == true {
        true => json!([
            attachment["spec"]["nodeName"],
            attachment["spec"]["source"]["persistentVolumeName"]
        ]),
        false => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn one_client_is_answered_at_a_time_and_seven_wait() {
        let turns = Turns::default();
        let (entered, release) = (Barrier::new(2), Barrier::new(2));
        let asked = AtomicUsize::new(0);
        let (sender, answers) = mpsc::channel();
        let (refused, before) = thread::scope(|scope| {
            scope.spawn(|| {
                let _turn = turns.take();
                entered.wait();
                release.wait();
            });
            entered.wait();
            let ask = |sender: mpsc::Sender<_>| {
                let answer = turns.take().map(|_turn| {
                    asked.fetch_add(1, Ordering::Relaxed);
                });
                sender.send(answer).unwrap();
            };
            for _ in 1..MAX_WAITING {
                let sender = sender.clone();
                scope.spawn(move || ask(sender));
            }
            let end = Instant::now() + Duration::from_secs(10);
            while turns.waiting.load(Ordering::Relaxed) < MAX_WAITING && Instant::now() < end {
                thread::yield_now();
            }
            scope.spawn(move || ask(sender));
            let refused = answers.recv_timeout(Duration::from_secs(10));
            let before = asked.load(Ordering::Relaxed);
            release.wait();
            (refused, before)
        });
        let refused = refused.expect("the ninth is refused at once").unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        assert_eq!(before, 0);
        assert_eq!(answers.iter().filter(Result::is_ok).count(), 7);
        // the place of a client that was answered or refused is free again
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 0);
        assert!(turns.take().is_ok());
    }
}
