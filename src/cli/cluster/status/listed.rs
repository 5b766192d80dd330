//! The nodes of a cluster as the API server lists them, that is, as their kubelets describe them.

use std::slice::from_ref;

use kubernetes::client::{self, Client, NODES, Selector};
use kubernetes::control_planes::is_labelled;
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::objects::{NodeObject, condition, is_true};
use kubernetes::readiness;

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
    let listed = client.list_as(&NODES.all(), &Selector::default())?;
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

impl Listed {
    /// Reads a Node. Every field of a foreign object may be missing.
    pub fn read(node: &NodeObject) -> Listed {
        let (metadata, spec, status) = (&node.metadata, &node.spec, &node.status);
        let name = metadata.name.clone();
        let internal: Vec<_> = node.addresses("InternalIP").map(str::to_owned).collect();
        let external = node.addresses("ExternalIP").next();
        let address = internal.first().map(String::as_str).or(external);
        let ready = condition(&status.conditions, "Ready");
        let not_ready = ready.filter(|it| it.status != "True");
        let is_bad = |trouble: &&'static str| is_true(&status.conditions, trouble);
        let port = u16::try_from(status.daemon_endpoints.kubelet_endpoint.port);
        Listed {
            address: address.unwrap_or(&name).to_owned(),
            uid: metadata.uid.clone(),
            is_control_plane: false,
            is_labelled: is_labelled(node),
            is_ready: node.is_ready(),
            why_not: not_ready.map_or_else(String::new, |it| it.message.clone()),
            no_network: readiness::without_network(from_ref(node)).pop(),
            troubles: TROUBLES.into_iter().filter(is_bad).collect(),
            is_cordoned: spec.unschedulable,
            taints: spec.taints.iter().map(|taint| taint.key.clone()).collect(),
            version: status.node_info.kubelet_version.clone(),
            kubelet_port: port.ok().filter(|port| *port > 0).unwrap_or(KUBELET_PORT),
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
    use serde_json::{from_value, json};

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
        let mut nodes = [Listed::read(&from_value(node).unwrap())];
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
        let node = json!({"metadata": {"name": "a"}, "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 99999}}}});
        let node = Listed::read(&from_value(node).unwrap());
        assert_eq!(
            (node.address.as_str(), node.kubelet_port),
            ("a", KUBELET_PORT)
        );
        assert!(!node.is_ready && node.internal.is_empty() && !node.is_cordoned);
        assert_eq!(Listed::read(&NodeObject::default()).name, "");
    }
}
