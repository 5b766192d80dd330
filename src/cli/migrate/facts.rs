//! What a cluster of Constellation has, as its API server says.

use kubernetes::client::{
    self, CONFIG_MAPS, Client, Collection, DAEMON_SETS, DEPLOYMENTS, JOINING_NODES, NODES, Object,
    ObjectKind, PENDING_NODES, SCALING_GROUPS, Selector,
};
use kubernetes::constellation::{
    node_version::{IMAGE_ANNOTATION, NodeVersion},
    outside,
};
use kubernetes::control_planes::is_labelled;
use kubernetes::objects::{AnyObject, ConfigMap, JoiningNode, NodeObject, ScalingGroup, Workload};
use kubernetes::services::master_secret;
use kubernetes::services::{self, Maker, RefusedOldClients};
use kubernetes::{NAMESPACE, kubeadm, yaml};
use serde_json::Value;
use zeroize::Zeroizing;

/// The Deployment of Constellation's node operator.
const NODE_OPERATOR: &str = "constellation-operator-controller-manager";
/// Its volume for the socket of the upgrade agent, which only nodes of Constellation have.
const AGENT_VOLUME: &str = "upgrade-agent-socket";
/// The folders of files that each control plane has, whichever system it runs.
const COMMON_FOLDER: &str = "/etc/kubernetes/pki/";

/// The cluster.
pub struct Facts {
    /// The API server's URL.
    pub server: String,
    /// Its version.
    pub version: String,
    /// Which system the key service is of; `None` if there is none.
    pub maker: Option<Maker>,
    /// The attestation variant of the nodes.
    pub variant: Option<String>,
    /// The attestation policy, JSON.
    pub policy: Option<String>,
    /// The measurement salt.
    pub salt: Option<Vec<u8>>,
    /// What the cluster has as its master secret, in the form of its Secret.
    pub master_secret: Option<Zeroizing<Vec<u8>>>,
    /// What the node operator brings the nodes to.
    pub node_version: Option<NodeVersion>,
    /// The groups of machines that it knows.
    pub groups: Vec<Group>,
    /// Names of nodes that it waits for, to join or to leave.
    pub pending: Vec<String>,
    /// Names of nodes that have a ticket and have not joined.
    pub joining: Vec<String>,
    /// The node operator, if it is installed.
    pub operator: Option<NodeOperator>,
    /// The nodes.
    pub nodes: Vec<ClusterNode>,
    /// The clients of the key service that show no token.
    pub old_clients: RefusedOldClients,
    /// DaemonSets and Deployments.
    pub workloads: Vec<FoundWorkload>,
    /// Why an address proves nothing about a client without a token; `None` if Cilium keeps packets from outside away.
    pub open_network: Option<String>,
    /// Arguments of the API server with files that only control planes of Constellation have.
    pub foreign_files: Vec<(String, String)>,
}

/// A group of machines with one image.
pub struct Group {
    /// Its name in the cloud.
    pub id: String,
    /// The image that new machines of it get.
    pub image: String,
}

/// The node operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeOperator {
    /// Whether it runs, or shall run.
    pub is_on: bool,
    /// Whether its pod starts only on a node with Constellation's upgrade agent.
    pub needs_agent: bool,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterNode {
    /// Its name.
    pub name: String,
    /// Whether it is a control plane.
    pub is_control_plane: bool,
    /// Whether its kubelet says that it is ready.
    pub is_ready: bool,
    /// The version of its kubelet.
    pub kubelet: String,
    /// Its image as the node operator has written it; empty if it has not.
    pub image: String,
}

/// A DaemonSet or a Deployment.
pub struct FoundWorkload {
    /// `NAMESPACE/NAME`.
    pub place: String,
    /// The name.
    pub name: String,
    /// The image of its first container.
    pub image: String,
}

impl Facts {
    /// Asks the API server, and changes nothing.
    pub fn read(client: &Client) -> Result<Facts, client::Error> {
        let mut workloads = Vec::new();
        for resource in [DAEMON_SETS, DEPLOYMENTS] {
            let all = Selector::default();
            let found = client.list_keeping(&resource.all(), &all, FoundWorkload::read)?;
            workloads.extend(found.items);
        }
        workloads.sort_by(|one, other| one.place.cmp(&other.place));
        Ok(Facts {
            server: client.server().to_owned(),
            version: client.version()?,
            maker: services::maker(client)?,
            variant: services::present_variant(client)?,
            policy: services::present_policy(client)?,
            salt: services::present_salt(client)?,
            master_secret: master_secret::content(client)?,
            node_version: NodeVersion::find(client)?,
            groups: groups(client)?,
            pending: pending(client)?,
            joining: listed(client, &JOINING_NODES.all(), |it: JoiningNode| it.spec.name)?,
            operator: node_operator(client)?,
            nodes: nodes(client)?,
            old_clients: services::all_old_clients(client)?,
            workloads,
            open_network: outside::why_open(client)?,
            foreign_files: files_in(&configuration(client)?["apiServer"]["extraArgs"]),
        })
    }

    /// Returns whether the node operator replaces nodes by those of another image.
    pub fn operator_moves_nodes(&self) -> bool {
        let knows_image = (self.node_version.as_ref()).is_some_and(NodeVersion::names_an_image);
        knows_image && self.operator.is_some_and(|operator| operator.is_on)
    }
}

/// Reduces the objects of a collection; none if its kind is not defined.
fn listed<K: ObjectKind, T>(
    client: &Client,
    collection: &Collection,
    keep: fn(K) -> T,
) -> Result<Vec<T>, client::Error> {
    match client.list_keeping(collection, &Selector::default(), keep) {
        Ok(list) => Ok(list.items),
        Err(error) if error.is_not_found() => Ok(vec![]),
        Err(error) => Err(error),
    }
}

fn groups(client: &Client) -> Result<Vec<Group>, client::Error> {
    listed(client, &SCALING_GROUPS.all(), |group: ScalingGroup| Group {
        id: group.spec.group_id,
        image: group.status.image_reference,
    })
}

/// Returns the nodes, control planes first.
pub fn nodes(client: &Client) -> Result<Vec<ClusterNode>, client::Error> {
    let nodes = client.list_keeping(&NODES.all(), &Selector::default(), ClusterNode::read)?;
    let mut nodes = nodes.items;
    nodes.sort_by(|one, other| {
        let key = |node: &ClusterNode| (!node.is_control_plane, node.name.clone());
        key(one).cmp(&key(other))
    });
    Ok(nodes)
}

/// Returns the names of nodes that the node operator waits for.
pub fn pending(client: &Client) -> Result<Vec<String>, client::Error> {
    listed(client, &PENDING_NODES.all(), |node: AnyObject| {
        node.metadata.name
    })
}

impl ClusterNode {
    fn read(node: NodeObject) -> ClusterNode {
        let image = node.metadata.annotation(IMAGE_ANNOTATION);
        ClusterNode {
            // a cluster of Constellation has no records yet; the role decides only the order of steps, and nobody gets a secret by it
            is_control_plane: is_labelled(&node),
            is_ready: node.is_ready(),
            image: image.unwrap_or_default().to_owned(),
            kubelet: node.status.node_info.kubelet_version,
            name: node.metadata.name,
        }
    }

    /// Returns whether the node has this image. Clouds compare the names of images without case.
    pub fn has_image(&self, image: &str) -> bool {
        self.image.eq_ignore_ascii_case(image)
    }

    /// Returns the role as text.
    pub fn role(&self) -> &'static str {
        if self.is_control_plane {
            "control plane"
        } else {
            "worker"
        }
    }
}

impl FoundWorkload {
    fn read(set: Workload) -> FoundWorkload {
        let container = set.container();
        FoundWorkload {
            place: set.metadata.place(),
            image: container.map_or_else(String::new, |it| it.image.clone()),
            name: set.metadata.name,
        }
    }
}

/// Returns the place of the node operator's Deployment.
pub fn operator_place() -> Object {
    DEPLOYMENTS.in_namespace(NAMESPACE).named(NODE_OPERATOR)
}

/// Returns the node operator, if it is installed.
pub fn node_operator(client: &Client) -> Result<Option<NodeOperator>, client::Error> {
    let mut found = client.find(&operator_place())?;
    Ok(found.as_mut().map(|deployment| NodeOperator {
        is_on: deployment["spec"]["replicas"] != 0,
        needs_agent: agent_check(deployment)
            .is_some_and(|kind| kind.as_str().is_some_and(|kind| !kind.is_empty())),
    }))
}

/// Returns what the kubelet checks of the upgrade agent's socket before it starts the node operator's pod.
pub fn agent_check(deployment: &mut Value) -> Option<&mut Value> {
    let volumes = deployment.pointer_mut("/spec/template/spec/volumes")?;
    let mut volumes = volumes.as_array_mut()?.iter_mut();
    let volume = volumes.find(|volume| volume["name"] == AGENT_VOLUME)?;
    volume.get_mut("hostPath")?.get_mut("type")
}

/// Returns kubeadm's configuration of the cluster, which each control plane that joins gets.
fn configuration(client: &Client) -> Result<Value, client::Error> {
    let map = CONFIG_MAPS
        .in_namespace(NAMESPACE)
        .named(kubeadm::CONFIG_MAP);
    let map: ConfigMap = client.find_as(&map)?.unwrap_or_default();
    Ok(yaml::document(map.text("ClusterConfiguration")).unwrap_or_default())
}

/// Returns the version of Kubernetes that kubeadm has recorded.
pub fn kubeadm_version(client: &Client) -> Result<String, client::Error> {
    Ok(text(&configuration(client)?["kubernetesVersion"]))
}

/// Returns the arguments with such files. Before v1beta4 of kubeadm's configuration, arguments are fields.
fn files_in(arguments: &Value) -> Vec<(String, String)> {
    let pairs: Vec<(&str, &Value)> = match arguments {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, it)| (name.as_str(), it))
            .collect(),
        Value::Array(items) => items
            .iter()
            .map(|it| (it["name"].as_str().unwrap_or_default(), &it["value"]))
            .collect(),
        _ => vec![],
    };
    let is_foreign = |path: &&str| {
        path.starts_with("/etc/kubernetes/")
            && !path.starts_with(COMMON_FOLDER)
            && *path != kubeadm::AUDIT_POLICY_PATH
    };
    let foreign = |(name, value): (&str, &Value)| {
        let path = value.as_str().filter(is_foreign)?;
        Some((name.to_owned(), path.to_owned()))
    };
    pairs.into_iter().filter_map(foreign).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_that_only_constellation_writes_is_found_in_both_forms_of_the_configuration() {
        let expected = [(
            "egress-selector-config-file".to_owned(),
            "/etc/kubernetes/egress-selector-configuration.yaml".to_owned(),
        )];
        let old = json!({
            "audit-policy-file": "/etc/kubernetes/audit-policy.yaml", "profiling": "false",
            "egress-selector-config-file": "/etc/kubernetes/egress-selector-configuration.yaml",
            "kubelet-certificate-authority": "/etc/kubernetes/pki/ca.crt",
        });
        assert_eq!(files_in(&old), expected);
        let fields = old.as_object().unwrap().iter();
        let new: Value = fields
            .map(|(name, value)| json!({"name": name, "value": value}))
            .collect();
        assert_eq!(files_in(&new), expected);
        assert_eq!(files_in(&Value::Null), []);
    }

    #[test]
    fn the_check_of_the_agents_socket_is_found_beside_other_volumes() {
        let volume = |name: &str, kind: Value| json!({"name": name, "hostPath": {"path": "/x", "type": kind}});
        let mut deployment = json!({"spec": {"template": {"spec": {"volumes": [
            {"name": "azureconfig", "secret": {}}, volume("etcd-certs", json!("Directory")),
            volume(AGENT_VOLUME, json!("Socket")),
        ]}}}});
        let check = agent_check(&mut deployment).unwrap();
        assert_eq!(*check, "Socket");
        *check = "".into();
        assert_eq!(
            deployment["spec"]["template"]["spec"]["volumes"][1]["hostPath"]["type"],
            "Directory"
        );
        assert!(agent_check(&mut json!({"spec": {}})).is_none());
    }
}
