//! Constellation's NodeVersion: which image and which components all nodes shall have. Its node operator replaces each node that
//! differs, where it knows the cloud; join services give new nodes the components.

use serde_json::{Map, Value};

use crate::client::{self, Client, NODE_VERSIONS, Object};

/// The name of the only object.
pub const NAME: &str = "constellation-version";
/// The annotation of a Node with its image, as the cloud names it. The node operator writes it.
pub const IMAGE_ANNOTATION: &str = "constellation.edgeless.systems/node-image";
/// The annotation of a Node with the name of its ConfigMap of components.
pub const COMPONENTS_ANNOTATION: &str = "constellation.edgeless.systems/kubernetes-components";
/// The image in a cloud that the node operator does not know: there, it replaces no nodes.
const NO_IMAGE: &str = "unsupportedCSP";
/// The condition of the object while nodes differ from it.
const OUTDATED: &str = "Outdated";

/// The fields of the `spec`.
pub const IMAGE: &str = "image";
/// The version of the image. Only Constellation's command reads it, and it replaces no image whose version has no number.
pub const IMAGE_VERSION: &str = "imageVersion";
/// The name of the ConfigMap with the components.
pub const COMPONENTS: &str = "kubernetesComponentsReference";
/// The version of Kubernetes.
pub const CLUSTER_VERSION: &str = "kubernetesClusterVersion";

/// The object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeVersion {
    spec: Map<String, Value>,
    /// Whether the node operator upgrades Kubernetes on the control planes.
    pub is_upgrading: bool,
    /// Whether nodes differ, so that the node operator replaces them.
    pub is_outdated: bool,
}

/// Returns the place of the object.
pub fn place() -> Object {
    NODE_VERSIONS.named(NAME)
}

impl NodeVersion {
    /// Returns the cluster's NodeVersion, if it has one.
    pub fn find(client: &Client) -> Result<Option<NodeVersion>, client::Error> {
        Ok(client.find(&place())?.as_ref().map(NodeVersion::of))
    }

    /// Reads the object.
    pub fn of(object: &Value) -> NodeVersion {
        let status = &object["status"];
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        NodeVersion {
            spec: object["spec"].as_object().cloned().unwrap_or_default(),
            is_upgrading: status["activeclusterversionupgrade"] == true,
            is_outdated: conditions
                .any(|condition| condition["type"] == OUTDATED && condition["status"] == "True"),
        }
    }

    /// Returns a field of the `spec`; empty if it is absent.
    pub fn field(&self, name: &str) -> &str {
        self.spec
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    /// Returns whether it names an image, so that the node operator knows this cloud and replaces nodes.
    pub fn names_an_image(&self) -> bool {
        !["", NO_IMAGE].contains(&self.field(IMAGE))
    }
}

/// Sets these fields of the `spec`, and leaves the others.
pub fn set(client: &Client, fields: &[(&str, &str)]) -> Result<NodeVersion, client::Error> {
    let spec: Map<_, _> = fields
        .iter()
        .map(|(name, value)| ((*name).to_owned(), Value::from(*value)))
        .collect();
    let patch = serde_json::json!({ "spec": spec });
    Ok(NodeVersion::of(&client.merge(&place(), &patch)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_change_is_in_progress_as_the_node_operator_says_it() {
        let of = |status: Value| {
            let object = json!({"spec": {"image": "ami-1"}, "status": status});
            let version = NodeVersion::of(&object);
            (version.is_upgrading, version.is_outdated)
        };
        let outdated = |status: &str| {
            of(
                json!({"activeclusterversionupgrade": false, "conditions": [{"type": "Outdated", "status": status}]}),
            )
        };
        assert_eq!(outdated("True"), (false, true));
        assert_eq!(outdated("False"), (false, false));
        assert_eq!(
            of(json!({"activeclusterversionupgrade": true})),
            (true, false)
        );
        assert_eq!(of(Value::Null), (false, false));
    }

    #[test]
    fn a_cloud_without_replacement_has_no_image() {
        for (image, expected) in [
            (json!("ami-1"), true),
            (json!("unsupportedCSP"), false),
            (json!(""), false),
            (Value::Null, false),
            (json!(7), false),
        ] {
            let version = NodeVersion::of(&json!({"spec": {"image": image}}));
            assert_eq!(version.names_an_image(), expected, "{version:?}");
        }
    }
}
