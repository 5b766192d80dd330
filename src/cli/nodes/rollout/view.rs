//! Reads what a rollout has to know about the cluster.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use kubernetes::client::{self, Client, LEASES, NODES, Selector};
use kubernetes::control_planes::{ControlPlanes, StaticPod, is_labelled};
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::services;
use serde_json::Value;
use verifier::Policy;

use super::decide::{ClusterFacts, Seen};
use crate::nodes::etcd_members::ETCD;
use crate::workspace::objects::{KUBELET_LEASES, condition, list, text};

/// How long after its ticket a machine may become a Node: its token for that is valid for 15 minutes.
const JOIN: Duration = Duration::from_secs(20 * 60);

/// Asks the API server, and changes nothing.
pub fn read(client: &Client) -> Result<ClusterFacts, client::Error> {
    let nodes = client.list_keeping(&NODES.all(), &Selector::default(), without_images)?;
    let named = |object: &Value| text(object, "/metadata/name").to_owned();
    let records = machine_record::of_nodes(client)?;
    let planes = ControlPlanes::of(&records, &nodes.items);
    let image = |record: &MachineRecord| (record.node.clone(), record.image.clone());
    let images: BTreeMap<String, String> = records.iter().map(image).collect();
    let is_joining = |record: &&MachineRecord| {
        let is_node = |node: &Value| text(node, "/metadata/name") == record.node;
        // an issue in the future is that of another clock
        let is_old = |issued: SystemTime| issued.elapsed().is_ok_and(|age| age > JOIN);
        !nodes.items.iter().any(is_node) && record.issued.is_some_and(|issued| !is_old(issued))
    };
    let joining = records.iter().filter(is_joining).map(image).collect();
    let leases = LEASES.in_namespace(KUBELET_LEASES);
    let leases = client.list(&leases, &Selector::default())?.items;
    let renewed = |lease: &Value| text(lease, "/spec/renewTime").to_owned();
    let leases: BTreeMap<String, String> = leases
        .iter()
        .map(|lease| (named(lease), renewed(lease)))
        .collect();
    let mut nodes: Vec<Seen> = (nodes.items.iter())
        .map(|node| Seen {
            is_control_plane: planes.find(text(node, "/metadata/name")).is_some(),
            ..seen(node, &images, &leases)
        })
        .collect();
    nodes.sort_by(|one, other| one.name.cmp(&other.name));
    let mut members = vec![];
    for plane in &planes.proven {
        match plane.static_pod(client, ETCD)? {
            StaticPod::Absent => {}
            StaticPod::Real(pod) => members.push(condition(&pod, "Ready") == Some("True")),
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

/// The list of the images on a node is most of its object.
fn without_images(mut node: Value) -> Value {
    if let Some(status) = node["status"].as_object_mut() {
        status.remove("images");
    }
    node
}

fn seen(
    node: &Value,
    images: &BTreeMap<String, String>,
    leases: &BTreeMap<String, String>,
) -> Seen {
    let name = text(node, "/metadata/name");
    let mut conditions = list(node, "/status/conditions").iter();
    let ready = conditions.find(|it| text(it, "/type") == "Ready");
    // a kubelet without a lease writes its status
    let heartbeat = || ready.map_or("", |it| text(it, "/lastHeartbeatTime"));
    Seen {
        name: name.into(),
        uid: text(node, "/metadata/uid").into(),
        is_control_plane: false,
        is_labelled: is_labelled(node),
        is_ready: condition(node, "Ready") == Some("True"),
        is_cordoned: node["spec"]["unschedulable"] == true,
        image: images.get(name).cloned().unwrap_or_default(),
        kubelet: text(node, "/status/nodeInfo/kubeletVersion").into(),
        boot: text(node, "/status/nodeInfo/bootID").into(),
        renewed: match leases.get(name) {
            Some(renewed) => renewed.clone(),
            None => heartbeat().to_owned(),
        },
    }
}
