//! The nodes of a cluster as the API server lists them, that is, as their kubelets describe them.

use std::slice::from_ref;

use kubernetes::client::{self, Client, NODES, Selector};
use kubernetes::control_planes::is_labelled;
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::readiness;
use serde_json::Value;

/// The port of a kubelet whose Node names none.
const KUBELET_PORT: u16 = 10250;
/// The conditions of a Node that are bad if they are true.
const TROUBLES: [&str; 4] = [
    "MemoryPressure",
    "DiskPressure",
    "PIDPressure",
    "NetworkUnavailable",
];

/// A node according to Kubernetes.
#[derive(Debug, Clone, Default)]
pub struct Listed {
    /// The name of the Node.
    pub name: String,
    /// The first internal address, or else the first external one, or else the name, which DNS may
    /// resolve.
    pub address: String,
    /// All internal addresses.
    pub internal: Vec<String>,
    /// The UID of the Node.
    pub uid: String,
    /// Whether it is a control plane: see [`set_roles`].
    pub is_control_plane: bool,
    /// Whether its Node has the label of control planes, which proves nothing.
    pub is_labelled: bool,
    /// Whether its kubelet says that it is ready.
    pub is_ready: bool,
    /// The message of a kubelet that is not ready.
    pub why_not: String,
    /// A sentence if it has no network plugin.
    pub no_network: Option<String>,
    /// The conditions that keep pods from it, such as `DiskPressure`.
    pub troubles: Vec<&'static str>,
    /// Whether new pods are not scheduled on it.
    pub is_cordoned: bool,
    /// The keys of its taints.
    pub taints: Vec<String>,
    /// The version of the kubelet.
    pub version: String,
    /// The port of the kubelet.
    pub kubelet_port: u16,
}

/// Returns the nodes of a cluster.
pub fn listed(client: &Client) -> Result<Vec<Listed>, client::Error> {
    let mut nodes = without_roles(client)?;
    set_roles(&mut nodes, &machine_record::of_nodes(client)?);
    Ok(nodes)
}

/// Returns the nodes of a cluster, all of them as workers.
pub fn without_roles(client: &Client) -> Result<Vec<Listed>, client::Error> {
    let listed = client.list_keeping(&NODES.all(), &Selector::default(), without_images)?;
    Ok(listed.items.iter().map(Listed::read).collect())
}

/// Sets which nodes are control planes, by their records. If no record names one, as in a cluster of an earlier version or for a user who
/// may not read records, the labels are shown instead: no command of this program that changes something uses them then.
pub fn set_roles(nodes: &mut [Listed], records: &[MachineRecord]) {
    let is_recorded = records.iter().any(|it| it.control_plane);
    for node in nodes {
        let mut own = records.iter().filter(|it| it.node == node.name);
        node.is_control_plane = if is_recorded {
            own.any(|it| it.control_plane)
        } else {
            node.is_labelled
        };
    }
}

/// The list of the images on a node is most of its object.
fn without_images(mut node: Value) -> Value {
    if let Some(status) = node.get_mut("status").and_then(Value::as_object_mut) {
        status.remove("images");
    }
    node
}

impl Listed {
    /// Reads a Node. Every field of a foreign object may be missing.
    pub fn read(node: &Value) -> Listed {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = |pointer: &str| node.pointer(pointer).and_then(Value::as_array);
        let conditions = || all("/status/conditions").into_iter().flatten();
        let is = |condition: &str, status: &str| {
            conditions().any(|it| it["type"] == condition && it["status"] == status)
        };
        let addresses = |kind: &str| -> Vec<String> {
            let all = all("/status/addresses").into_iter().flatten();
            let of_kind = all.filter(|address| address["type"] == kind);
            of_kind.map(|address| text(&address["address"])).collect()
        };
        let name = text(&node["metadata"]["name"]);
        let internal = addresses("InternalIP");
        let external = addresses("ExternalIP");
        let address = internal.first().or(external.first()).unwrap_or(&name);
        let ready = conditions().find(|it| it["type"] == "Ready" && it["status"] != "True");
        let taints = all("/spec/taints").into_iter().flatten();
        let port = node.pointer("/status/daemonEndpoints/kubeletEndpoint/Port");
        let port = port.and_then(Value::as_u64);
        Listed {
            address: address.clone(),
            uid: text(&node["metadata"]["uid"]),
            is_control_plane: false,
            is_labelled: is_labelled(node),
            is_ready: is("Ready", "True"),
            why_not: ready.map_or_else(String::new, |it| text(&it["message"])),
            no_network: readiness::without_network(from_ref(node)).pop(),
            troubles: TROUBLES.into_iter().filter(|it| is(it, "True")).collect(),
            is_cordoned: node["spec"]["unschedulable"] == true,
            taints: taints.map(|taint| text(&taint["key"])).collect(),
            version: text(&node["status"]["nodeInfo"]["kubeletVersion"]),
            kubelet_port: port
                .and_then(|port| port.try_into().ok())
                .filter(|port| *port > 0)
                .unwrap_or(KUBELET_PORT),
            name,
            internal,
        }
    }

    /// Returns the role as text.
    pub fn role(&self) -> &'static str {
        if self.is_control_plane {
            "control-plane"
        } else {
            "worker"
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_is_what_its_kubelet_says() {
        let node = json!({
            "metadata": {"name": "cp-0", "labels": {"node-role.kubernetes.io/control-plane": ""}},
            "spec": {"unschedulable": true, "taints": [{"key": "a/b", "effect": "NoSchedule"}]},
            "status": {
                "addresses": [{"type": "ExternalIP", "address": "1.1.1.1"}, {"type": "InternalIP", "address": "10.0.0.1"}],
                "conditions": [
                    {"type": "DiskPressure", "status": "True"}, {"type": "PIDPressure", "status": "False"},
                    {"type": "Ready", "status": "Unknown", "message": "silent"},
                ],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10251}},
                "nodeInfo": {"kubeletVersion": "v1.34.4"},
            },
        });
        let mut nodes = [Listed::read(&node)];
        let record = |name: &str| MachineRecord {
            node: name.into(),
            control_plane: true,
            ..MachineRecord::default()
        };
        for (records, role) in [
            (vec![], "control-plane"),
            (vec![record("cp-1")], "worker"),
            (vec![record("cp-0")], "control-plane"),
        ] {
            set_roles(&mut nodes, &records);
            assert_eq!(nodes[0].role(), role, "{records:?}");
        }
        let [node] = nodes;
        assert_eq!(node.address, "10.0.0.1");
        assert_eq!((node.is_ready, node.why_not.as_str()), (false, "silent"));
        assert_eq!(node.troubles, ["DiskPressure"]);
        assert_eq!(
            (node.is_cordoned, node.taints.as_slice()),
            (true, &["a/b".to_owned()][..])
        );
        assert_eq!(
            (node.version.as_str(), node.kubelet_port),
            ("v1.34.4", 10251)
        );
    }

    #[test]
    fn a_node_without_any_field_is_asked_by_its_name() {
        let node = Listed::read(
            &json!({"metadata": {"name": "a"}, "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 99999}}}}),
        );
        assert_eq!(
            (node.address.as_str(), node.kubelet_port),
            ("a", KUBELET_PORT)
        );
        assert!(!node.is_ready && node.internal.is_empty() && !node.is_cordoned);
        assert_eq!(Listed::read(&Value::Null).name, "");
    }
}
