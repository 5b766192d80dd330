//! Which nodes are control planes, and which pods run there: only by what no kubelet and no agent of
//! a node can write.
//!
//! ```text
//! the role               the record of the node          join service, init, administrator
//! the pods of a program  name, node, owner of the pod    for a mirror pod only the kubelet of this node
//! the kubelet's address  the record of the node          as above
//! ```
//!
//! Labels decide nothing here: each kubelet may give a mirror pod of its node any label, and each
//! account that may patch the status of Nodes may write labels and addresses of all Nodes. What they
//! claim without a record is only reported ([`ControlPlanes::ignored`]).
//!
//! The API server asks a kubelet at the first internal address of its Node, and accepts any kubelet
//! there whose certificate has this address. So an address that is not in the record leads to another
//! machine, and [`ControlPlane::refusal`] says so.

use std::net::IpAddr;

use serde_json::Value;

use super::NAMESPACE;
use super::client::{self, Client, NODES, PODS, Selector};
use super::machine_record::{self, MachineRecord};
use super::objects::{NodeObject, Pod};

/// The label of control planes, as kubeadm writes it.
pub const ROLE_LABEL: &str = "node-role.kubernetes.io/control-plane";
/// The annotation that the API server accepts only in a mirror pod that a kubelet makes of its own node.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// A node that is a control plane by its record.
#[derive(Debug, Clone, Default)]
pub struct ControlPlane {
    /// The name of the Node.
    pub name: String,
    /// The UID of the Node.
    pub uid: String,
    /// The record.
    pub record: MachineRecord,
    /// The address at which the API server asks the kubelet. Empty if the Node has none.
    pub address: String,
}

impl ControlPlane {
    /// Returns why nothing that this node answers may be believed: its evidence was refused, or the
    /// API server would ask another machine.
    pub fn refusal(&self) -> Option<String> {
        let (name, record) = (&self.name, &self.record);
        if record.refused.is_some() {
            return Some(format!(
                "the evidence of {name} was refused (see its record, ConfigMap {NAMESPACE}/{})",
                record.name
            ));
        }
        other_machine(name, &self.address, record)
    }

    /// Returns whether a pod is the mirror pod that the kubelet of this node makes of the static pod
    /// of a program. No other kubelet can make one of this node.
    pub fn has_static_pod(&self, program: &str, pod: &Pod) -> bool {
        pod.metadata.name == static_pod_name(program, &self.name)
            && pod.spec.node_name == self.name
            && pod.metadata.annotation(MIRROR).is_some()
            && has_owner(pod, "Node", &self.name, &self.uid)
    }

    /// Returns the static pod of a program on this node.
    pub fn static_pod(&self, client: &Client, program: &str) -> Result<StaticPod, client::Error> {
        let name = static_pod_name(program, &self.name);
        let pod = client.find_whole::<Pod>(&PODS.in_namespace(NAMESPACE).named(&name))?;
        Ok(match pod {
            None => StaticPod::Absent,
            Some((pod, whole)) if self.has_static_pod(program, &pod) => {
                StaticPod::Real(Box::new(pod), whole)
            }
            Some((pod, _)) => StaticPod::False(format!(
                "the pod {NAMESPACE}/{name} is not the static pod of {0}: it is on the node {1}, and its owner is not the Node {0}. \
                 Find out who made it, and delete it",
                self.name,
                match &*pod.spec.node_name {
                    "" => "(none)",
                    node => node,
                }
            )),
        })
    }

    /// The same as [`ControlPlane::refusal`], with the Node as it is now: what reads from the kubelet
    /// asks this before and after.
    pub fn refusal_now(&self, client: &Client) -> Result<Option<String>, client::Error> {
        let node: NodeObject = client.get_as(&NODES.named(&self.name))?;
        if node.metadata.uid != self.uid {
            return Ok(Some(format!(
                "the Node {} was deleted and created again meanwhile: run the command again",
                self.name
            )));
        }
        let now = ControlPlane {
            address: first_internal(&node),
            ..self.clone()
        };
        Ok(now.refusal())
    }
}

/// Returns why the API server would ask another machine than this node's, if it asks a kubelet at this address.
fn other_machine(name: &str, address: &str, record: &MachineRecord) -> Option<String> {
    let is_own = |address: IpAddr| record.has_address(address);
    if address.parse().is_ok_and(is_own) {
        return None;
    }
    let own: Vec<_> = record.addresses.iter().map(IpAddr::to_string).collect();
    let expected = if own.is_empty() {
        "none, because the record is of an earlier version".to_owned()
    } else {
        own.join(" or ")
    };
    Some(format!(
        "the API server would ask another machine than {name}: expected the address {expected} (ConfigMap {NAMESPACE}/{}), got {}. If the \
         machine has a new address, write it into the field addresses of this record; otherwise find out who changed the status of the \
         Node",
        record.name,
        match address {
            "" => "none",
            address => address,
        }
    ))
}

/// Returns why the API server would ask another machine than that of this Node's record, also of a worker. A record of an earlier
/// version, without addresses, does not say so.
pub fn asks_other_machine(node: &NodeObject, record: &MachineRecord) -> Option<String> {
    let found = other_machine(&record.node, &first_internal(node), record);
    found.filter(|_| !record.addresses.is_empty())
}

/// What the API server has under the name of a static pod.
#[derive(Debug, Clone, PartialEq)]
pub enum StaticPod {
    /// Nothing.
    Absent,
    /// The mirror pod of the node's own kubelet, also whole.
    Real(Box<Pod>, Value),
    /// A pod of somebody else: a sentence that says so.
    False(String),
}

/// Returns the name of the mirror pod of a program on a node.
pub fn static_pod_name(program: &str, node: &str) -> String {
    format!("{program}-{node}")
}

/// Returns whether an object of this kind, name and UID owns a pod. A kubelet can name only its own
/// Node as the owner of a pod that it makes.
pub fn has_owner(pod: &Pod, kind: &str, name: &str, uid: &str) -> bool {
    let mut owners = pod.metadata.owner_references.iter();
    !uid.is_empty() && owners.any(|it| it.kind == kind && it.name == name && it.uid == uid)
}

/// The control planes of a cluster.
#[derive(Debug, Clone, Default)]
pub struct ControlPlanes {
    /// Those whose record says so, and whose Node exists, in the order of their names.
    pub proven: Vec<ControlPlane>,
    /// The nodes that have the role's label without such a record.
    pub labelled: Vec<String>,
}

impl ControlPlanes {
    /// Asks the API server.
    pub fn read(client: &Client) -> Result<ControlPlanes, client::Error> {
        let records = machine_record::of_nodes(client)?;
        let nodes = client.list_as(&NODES.all(), &Selector::default())?;
        Ok(ControlPlanes::of(&records, &nodes.items))
    }

    /// Compares records and Nodes.
    pub fn of(records: &[MachineRecord], nodes: &[NodeObject]) -> ControlPlanes {
        let mut found = ControlPlanes::default();
        for node in nodes {
            let name = &node.metadata.name;
            let mut records = records.iter();
            let record = records.find(|it| it.node == *name && it.control_plane);
            match record {
                Some(record) => found.proven.push(ControlPlane {
                    name: name.clone(),
                    uid: node.metadata.uid.clone(),
                    record: record.clone(),
                    address: first_internal(node),
                }),
                None if is_labelled(node) => found.labelled.push(name.clone()),
                None => {}
            }
        }
        found.proven.sort_by(|a, b| a.name.cmp(&b.name));
        found.labelled.sort();
        found
    }

    /// Returns a control plane by its name.
    pub fn find(&self, name: &str) -> Option<&ControlPlane> {
        self.proven.iter().find(|it| it.name == name)
    }

    /// Returns a sentence for each node that claims to be a control plane without a record.
    pub fn ignored(&self) -> Vec<String> {
        let sentence = |name: &String| {
            format!(
                "ignoring {name}: its Node has the label {ROLE_LABEL}, but no record says that {name} is a control plane"
            )
        };
        self.labelled.iter().map(sentence).collect()
    }

    /// Returns what to do if no record names a control plane; `None` if one does.
    pub fn unrecorded(&self) -> Option<&'static str> {
        let why = "no record says which nodes are control planes, as in a cluster of an earlier version: first run `firstlight apply`, which \
                   writes these records";
        self.proven.is_empty().then_some(why)
    }
}

/// Returns whether a Node has the label of control planes. It proves nothing.
pub fn is_labelled(node: &NodeObject) -> bool {
    node.metadata.label(ROLE_LABEL).is_some()
}

/// Returns the address that the API server takes with kubeadm's order of kinds: InternalIP first.
fn first_internal(node: &NodeObject) -> String {
    let first = node.addresses("InternalIP").next();
    first.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use base::uuid::Uuid;
    use serde_json::{from_value, json};

    use super::*;

    fn record(name: &str, is_control_plane: bool) -> MachineRecord {
        let disk = Uuid::parse("00000000-0000-0000-0000-000000000002").unwrap();
        MachineRecord {
            control_plane: is_control_plane,
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            ..MachineRecord::of_node(name, &disk, Some("m"), "", "")
        }
    }

    fn node(name: &str, is_labelled: bool, address: &str) -> NodeObject {
        let mut labels = json!({});
        if is_labelled {
            labels[ROLE_LABEL] = "".into();
        }
        let node = json!({
            "metadata": {"name": name, "uid": format!("uid-{name}"), "labels": labels},
            "status": {"addresses": [{"type": "Hostname", "address": name}, {"type": "InternalIP", "address": address}]},
        });
        from_value(node).unwrap()
    }

    #[test]
    fn a_label_makes_no_control_plane_and_its_absence_none_less() {
        let nodes = [
            node("b", false, "10.0.0.1"),
            node("a", true, "10.0.0.1"),
            node("worker", true, "10.0.0.1"),
            node("unknown", true, "10.0.0.1"),
        ];
        let records = [
            record("a", true),
            record("b", true),
            record("gone", true),
            record("worker", false),
        ];
        let found = ControlPlanes::of(&records, &nodes);
        let names: Vec<_> = found.proven.iter().map(|it| &*it.name).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(found.labelled, ["unknown", "worker"]);
        assert_eq!(found.ignored().len(), 2);
        assert!(found.unrecorded().is_none() && found.find("gone").is_none());
        assert!(ControlPlanes::of(&[], &nodes).unrecorded().is_some());
    }

    #[test]
    fn a_control_plane_is_asked_only_at_an_address_of_its_record() {
        let plane = |address: &str, change: &dyn Fn(&mut MachineRecord)| {
            let mut record = record("a", true);
            change(&mut record);
            let found = ControlPlanes::of(&[record], &[node("a", true, address)]);
            found.proven[0].refusal()
        };
        assert_eq!(plane("10.0.0.1", &|_| ()), None);
        assert_eq!(plane("::ffff:10.0.0.1", &|_| ()), None);
        assert_eq!(plane("fd00:0::1", &|_| ()), None);
        let other = plane("10.0.0.9", &|_| ()).unwrap();
        assert!(
            other.contains("expected the address 10.0.0.1 or fd00::1"),
            "{other}"
        );
        assert!(other.contains("got 10.0.0.9"), "{other}");
        assert!(plane("", &|_| ()).unwrap().contains("got none"));
        let unknown = plane("10.0.0.1", &|it| it.addresses.clear()).unwrap();
        assert!(unknown.contains("of an earlier version"), "{unknown}");
        let moved = node("a", true, "10.0.0.9");
        assert!(asks_other_machine(&moved, &record("a", false)).is_some());
        assert!(asks_other_machine(&moved, &MachineRecord::default()).is_none());
        let refused = plane("10.0.0.1", &|it| it.refused = Some(SystemTime::now()));
        assert!(refused.unwrap().contains("was refused"));
    }

    #[test]
    fn only_the_kubelet_of_a_node_makes_its_static_pod() {
        let found = ControlPlanes::of(&[record("a", true)], &[node("a", true, "10.0.0.1")]);
        let good = json!({
            "metadata": {"name": "etcd-a", "annotations": {MIRROR: "x"},
                "ownerReferences": [{"kind": "Node", "name": "a", "uid": "uid-a"}]},
            "spec": {"nodeName": "a"},
        });
        let has = |pod: &Value| {
            let pod = from_value(pod.clone()).unwrap();
            found.proven[0].has_static_pod("etcd", &pod)
        };
        assert!(has(&good));
        for (pointer, other) in [
            ("/metadata/name", "etcd-b"),
            ("/spec/nodeName", "worker"),
            ("/metadata/ownerReferences/0/name", "worker"),
            ("/metadata/ownerReferences/0/uid", "uid-worker"),
            ("/metadata/ownerReferences/0/kind", "Job"),
        ] {
            let mut pod = good.clone();
            *pod.pointer_mut(pointer).unwrap() = other.into();
            assert!(!has(&pod), "{pointer}");
        }
        let mut pod = good.clone();
        pod["metadata"]["annotations"] = json!({});
        assert!(!has(&pod) && !has(&json!({})));
    }
}
