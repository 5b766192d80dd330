//! Reads what a rollout has to know about the cluster.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use kubernetes::KUBELET_LEASES;
use kubernetes::client::{self, Client, LEASES, NODES, Selector};
use kubernetes::control_planes::{ControlPlanes, StaticPod, is_labelled};
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::objects::{Lease, NodeObject, condition};
use kubernetes::services;
use verifier::Policy;

use super::decide::{ClusterFacts, Seen};
use crate::nodes::etcd_members::ETCD;

/// How long after its ticket a machine may become a Node: its token for that is valid for 15 minutes.
const JOIN: Duration = Duration::from_secs(20 * 60);

/// Asks the API server, and changes nothing.
pub fn read(client: &Client) -> Result<ClusterFacts, client::Error> {
    let nodes = client.list_as::<NodeObject>(&NODES.all(), &Selector::default())?;
    let records = machine_record::of_nodes(client)?;
    let planes = ControlPlanes::of(&records, &nodes.items);
    let image = |record: &MachineRecord| (record.node.clone(), record.image.clone());
    let images: BTreeMap<String, String> = records.iter().map(image).collect();
    let is_joining = |record: &&MachineRecord| {
        let is_node = |node: &NodeObject| node.metadata.name == record.node;
        // an issue in the future is that of another clock
        let is_old = |issued: SystemTime| issued.elapsed().is_ok_and(|age| age > JOIN);
        !nodes.items.iter().any(is_node) && record.issued.is_some_and(|issued| !is_old(issued))
    };
    let joining = records.iter().filter(is_joining).map(image).collect();
    let leases = LEASES.in_namespace(KUBELET_LEASES);
    let renewed = |lease: Lease| (lease.metadata.name, lease.spec.renew_time);
    let leases = client.list_keeping(&leases, &Selector::default(), renewed)?;
    let leases: BTreeMap<String, String> = leases.items.into_iter().collect();
    let mut nodes: Vec<Seen> = (nodes.items.iter())
        .map(|node| Seen {
            is_control_plane: planes.find(&node.metadata.name).is_some(),
            ..seen(node, &images, &leases)
        })
        .collect();
    nodes.sort_by(|one, other| one.name.cmp(&other.name));
    let mut members = vec![];
    for plane in &planes.proven {
        match plane.static_pod(client, ETCD)? {
            StaticPod::Absent => {}
            StaticPod::Real(pod, _) => members.push(pod.is_ready()),
            // its member runs perhaps, but nobody says so
            StaticPod::False(_) => members.push(false),
        }
    }
    let policy = services::present_policy(client)?.unwrap_or_default();
    // a policy that cannot be read accepts no image that is known
    let accepted = Policy::from_json(&policy).map(|policy| {
        policy
            .images()
            .iter()
            .map(|it| it.id().to_string())
            .collect()
    });
    Ok(ClusterFacts {
        nodes,
        accepted: accepted.unwrap_or_default(),
        joining,
        members: members.len(),
        ready_members: members.iter().filter(|is_ready| **is_ready).count(),
        unrecorded: planes.unrecorded(),
    })
}

fn seen(
    node: &NodeObject,
    images: &BTreeMap<String, String>,
    leases: &BTreeMap<String, String>,
) -> Seen {
    let (name, info) = (&node.metadata.name, &node.status.node_info);
    // a kubelet without a lease writes its status
    let heartbeat = || {
        condition(&node.status.conditions, "Ready")?
            .last_heartbeat_time
            .clone()
    };
    let renewed = leases.get(name).cloned().or_else(heartbeat);
    Seen {
        name: name.clone(),
        uid: node.metadata.uid.clone(),
        is_control_plane: false,
        is_labelled: is_labelled(node),
        is_ready: node.is_ready(),
        is_cordoned: node.spec.unschedulable,
        image: images.get(name).cloned().unwrap_or_default(),
        kubelet: info.kubelet_version.clone(),
        boot: info.boot_id.clone(),
        renewed: renewed.unwrap_or_default(),
    }
}
