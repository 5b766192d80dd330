//! Clients without a token: the CSI drivers of Constellation, which ask from every node, in
//! plaintext and without a proof. They are served at an address of their own, through a day that
//! the operator names.
//!
//! They get keys of volumes, never of a state disk with a record ([`super::disks`]), and only from
//! the address of a pod of a driver: a pod of a DaemonSet in kube-system with the account of a driver
//! whose CSIDriver the cluster has ([`drivers`]), on a node to which a volume of this driver is
//! attached. A pod with another account is a driver if a grant names its account with `volume`, and
//! it is of a DaemonSet. Arguments, labels and images of pods have no effect. A driver on its host's
//! network has the addresses of its node, as each program on this host does.
//!
//! Their requests do not name the volume, so such a pod can have the key of every volume whose LUKS
//! UUID it knows. A grant of an `id:` for its account gives a pod on the pod network another key,
//! such as that of the S3 proxy; a grant for `anyone` gives it to every pod.
//!
//! Each request costs lists of the API server, so one is answered at a time. The addresses take
//! turns, so that no number of requests from one address keeps the drivers of other nodes away.
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
//! ([`kubernetes::constellation::outside`]): Cilium replaces kube-proxy, as in each cluster of Constellation but those of
//! `--conformance`. kube-proxy would give the host of a node the address of that node.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime};

use base::network::Network;
use base::network::semaphore::{Permit, Semaphore};
use kubernetes::client::{
    CILIUM_NODES, CSI_DRIVERS, Client, Error, NODES, PODS, Selector, VOLUME_ATTACHMENTS,
};
use kubernetes::constellation::drivers;
use kubernetes::constellation::outside;
use kubernetes::objects::{self, CiliumNode, NodeObject, VolumeAttachment};
use kubernetes::services::migration::Migration;
use rpc::grpc::{Code, Status};

/// The timeout of each list. Clients of Constellation set no deadline.
const TIME: Duration = Duration::from_secs(5);

/// How many requests may wait for their turn. Beyond it, the address with most requests loses one.
const PLACES: usize = 64;
/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(30);

/// Identifies clients without a token by their addresses.
pub struct OldClients {
    client: Client,
    until: Migration,
    /// The accounts of drivers that the operator's grants name.
    granted: Vec<String>,
    turns: Semaphore,
}

/// A client without a token.
pub struct OldClient {
    node: String,
    address: IpAddr,
    /// The pods with its address.
    pods: Vec<Pod>,
}

/// A pod whose address a client has.
struct Pod {
    /// `NAMESPACE/NAME`.
    place: String,
    /// `NAMESPACE/NAME` of its service account.
    account: Option<String>,
    is_of_daemon_set: bool,
    /// Whether it has the addresses of its host.
    is_on_host: bool,
}

impl fmt::Display for OldClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " node={:?} pods={:?}", self.node, self.places())
    }
}

impl OldClient {
    /// Returns the account of the client, by which a grant can name it; `None` if it has the address
    /// of its host, or of pods with different accounts.
    pub fn account(&self) -> Option<&str> {
        let (first, others) = self.pods.split_first()?;
        let is_same = |pod: &Pod| pod.account == first.account;
        let is_one = !self.pods.iter().any(|pod| pod.is_on_host) && others.iter().all(is_same);
        first.account.as_deref().filter(|_| is_one)
    }

    fn places(&self) -> Vec<&str> {
        self.pods.iter().map(|pod| pod.place.as_str()).collect()
    }

    /// Returns the accounts with which it may be a driver.
    fn accounts_of_drivers(&self) -> impl Iterator<Item = &str> {
        let pods = self.pods.iter().filter(|pod| pod.is_of_daemon_set);
        pods.filter_map(|pod| pod.account.as_deref())
    }
}

impl OldClients {
    /// Creates a client of the API server. It needs the permissions of the chart. `granted` are the
    /// accounts with a grant for keys of volumes.
    pub fn new(client: &Client, until: Migration, granted: Vec<String>) -> OldClients {
        OldClients {
            client: client.within(TIME),
            until,
            granted,
            turns: Semaphore::new(1, PLACES),
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
        let turn = self.turn(address)?;
        let why_open = outside::why_open(&self.client).map_err(|error| {
            log::error!("cannot ask the API server whether Cilium replaces kube-proxy: {error}");
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
            log::error!("cannot ask the API server whose address {address} is: {error}");
            unavailable("which node this client is on")
        })?;
        found.ok_or_else(|| {
            denied(format!(
                "{address} is not the address of one node, or of a pod on one"
            ))
        })
    }

    /// Returns the volumes of the client's driver on its node, for the log. Refuses a client that is
    /// no driver, or whose node has no volume of it.
    pub fn volumes(&self, client: &OldClient) -> Result<Vec<String>, Status> {
        let turn = self.turn(client.address)?;
        let found = self.attached(client);
        drop(turn);
        let node = &client.node;
        let volumes = found.map_err(|error| {
            log::error!("cannot ask the API server which volumes {node} has: {error}");
            unavailable("which volumes this node has")
        })?;
        let Some(volumes) = volumes else {
            return Err(denied(format!(
                "{} on the node {node} is no driver of Constellation: expected a pod of a DaemonSet in kube-system with the \
                 account of a driver that the cluster has as a CSIDriver, or with an account that --grant names with volume",
                if client.pods.is_empty() {
                    "no pod".to_owned()
                } else {
                    client.places().join(", ")
                }
            )));
        };
        if volumes.is_empty() {
            return Err(denied(format!(
                "no volume of this driver is attached to the node {node}"
            )));
        }
        Ok(volumes)
    }

    /// Waits until it is the turn of this address.
    fn turn(&self, address: IpAddr) -> Result<Permit<'_>, Status> {
        let deadline = Instant::now() + PATIENCE;
        let turn = self.turns.take(Network::from(address), deadline, || false);
        turn.map_err(|busy| {
            let text = "too many clients without a token ask at the same time: try again";
            Status::new(Code::ResourceExhausted, text).with_retry_after(busy.retry_after)
        })
    }

    /// Returns the node with this address, and its pods with this address.
    fn find(&self, address: IpAddr) -> Result<Option<OldClient>, Error> {
        let mut found = self.pods(&format!("status.podIP={address}"))?;
        let mut nodes: BTreeSet<_> = found.iter().map(|(node, _)| node.clone()).collect();
        if nodes.is_empty() {
            nodes = self.nodes_with(address)?;
        }
        let (Some(node), true) = (nodes.pop_first(), nodes.is_empty()) else {
            return Ok(None);
        };
        if found.is_empty() {
            found = self.pods(&format!("spec.nodeName={node}"))?;
            found.retain(|(_, pod)| pod.is_on_host);
        }
        let pods = found.into_iter().map(|(_, pod)| pod).collect();
        Ok(Some(OldClient {
            node,
            address,
            pods,
        }))
    }

    /// Returns the pods with these fields that have not ended, each with its node.
    fn pods(&self, fields: &str) -> Result<Vec<(String, Pod)>, Error> {
        let selector = Selector::fields(fields);
        let found = self
            .client
            .list_keeping(&PODS.all(), &selector, node_and_pod)?;
        Ok(found.items.into_iter().flatten().collect())
    }

    /// Returns the nodes whose hosts may have this address.
    fn nodes_with(&self, address: IpAddr) -> Result<BTreeSet<String>, Error> {
        let (client, all) = (&self.client, Selector::default());
        let known = client.list_keeping(&NODES.all(), &all, name_and_addresses)?;
        let of_cilium =
            client.list_keeping(&CILIUM_NODES.all(), &all, name_and_cilium_addresses)?;
        let nodes = known.items.into_iter().chain(of_cilium.items);
        let with_it = nodes.filter(|(_, addresses)| addresses.contains(&address));
        Ok(with_it.map(|(name, _)| name).collect())
    }

    /// Returns the names of the PersistentVolumes of the client's driver that are attached to its
    /// node; `None` if it is no driver.
    fn attached(&self, client: &OldClient) -> Result<Option<Vec<String>>, Error> {
        let mut own = BTreeSet::new();
        let mut is_granted = false;
        for account in client.accounts_of_drivers() {
            is_granted |= self.granted.iter().any(|granted| granted == account);
            if let Some(driver) = drivers::of_account(account)
                && self.client.find(&CSI_DRIVERS.named(driver.name))?.is_some()
            {
                own.insert(driver.name);
            }
        }
        if own.is_empty() && !is_granted {
            return Ok(None);
        }
        let found = self.client.list_keeping(
            &VOLUME_ATTACHMENTS.all(),
            &Selector::default(),
            |it: VolumeAttachment| it.status.attached.then_some(it.spec),
        )?;
        let attached = found.items.into_iter().flatten();
        let is_own = |driver: &str| is_granted || own.contains(driver);
        let volumes = attached
            .filter(|it| it.node_name == client.node && is_own(&it.attacher))
            .filter_map(|it| it.source.persistent_volume_name);
        Ok(Some(volumes.collect()))
    }
}

/// Returns the error of a client of which the API server does not say this.
fn unavailable(what: &str) -> Status {
    let message = format!("cannot check at the moment {what}: try again");
    Status::new(Code::Unavailable, message)
}

fn denied(why: String) -> Status {
    Status::new(Code::PermissionDenied, why)
}

/// Reduces a pod that has not ended to its node and the fields of [`Pod`].
fn node_and_pod(pod: objects::Pod) -> Option<(String, Pod)> {
    if pod.has_ended() || pod.spec.node_name.is_empty() {
        return None;
    }
    let mut owners = pod.metadata.owner_references.iter();
    let is_of_daemon_set =
        owners.any(|it| it.controller && it.kind == "DaemonSet" && it.api_version == "apps/v1");
    let known = Pod {
        place: pod.metadata.place(),
        account: drivers::account(&pod.metadata.namespace, &pod.spec),
        is_of_daemon_set,
        is_on_host: pod.spec.host_network,
    };
    Some((pod.spec.node_name, known))
}

/// Reduces a node to its name and its internal addresses.
fn name_and_addresses(node: NodeObject) -> (String, Vec<IpAddr>) {
    let internal = node.addresses("InternalIP");
    let internal = internal.filter_map(|own| own.parse().ok()).collect();
    (node.metadata.name, internal)
}

/// Reduces a CiliumNode, which has the name of its node, to this name and the addresses of cilium_host.
fn name_and_cilium_addresses(node: CiliumNode) -> (String, Vec<IpAddr>) {
    let own = node.spec.addresses.iter();
    let own = own.filter(|address| address.kind == "CiliumInternalIP");
    let own = own.filter_map(|address| address.ip.parse().ok()).collect();
    (node.metadata.name, own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_an_account_only_if_it_is_that_of_all_its_pods() {
        let pod = |account: Option<&str>, is_on_host| Pod {
            place: "a/b".into(),
            account: account.map(str::to_owned),
            is_of_daemon_set: false,
            is_on_host,
        };
        let of = |pods| {
            let (node, address) = ("n".into(), IpAddr::from([192, 0, 2, 1]));
            let client = OldClient {
                node,
                address,
                pods,
            };
            client.account().map(str::to_owned)
        };
        let own = Some("a/b");
        assert_eq!(of(vec![pod(own, false), pod(own, false)]).as_deref(), own);
        for pods in [
            vec![],
            vec![pod(own, true)],
            vec![pod(own, false), pod(own, true)],
            vec![pod(own, false), pod(Some("a/c"), false)],
            vec![pod(own, false), pod(None, false)],
            vec![pod(None, false)],
        ] {
            assert_eq!(of(pods), None);
        }
    }
}
