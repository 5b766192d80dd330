//! The fields of a Node object that decisions depend on.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use base::time;

/// The type of the condition with the result of the last attestation ([`watch`](crate::member_controller::watch)).
pub const ATTESTED: &str = "Attested";
/// The label with the same result: `true`, `false` or `unknown`. A kubelet may not change a label with
/// this prefix (the API server's plugin NodeRestriction), so a node cannot claim to be attested.
pub const LABEL: &str = "firstlight.node-restriction.kubernetes.io/attested";
/// The key of the taint of a node that was refused. A kubelet may not change taints.
pub const TAINT: &str = "firstlight/attestation";
/// The annotation of a node that this service has cordoned.
pub const CORDONED: &str = "firstlight/cordoned";

/// The state of a Node object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeStatus {
    /// Distinguishes the object from a deleted one of the same name.
    pub uid: String,
    /// Since when the node is Ready; `None` if it is not.
    pub ready_since: Option<SystemTime>,
    /// Distinguishes the boots of a machine; its kubelet writes it.
    pub boot: String,
    /// The first address of the type InternalIP.
    pub address: Option<IpAddr>,
    /// What the watch of attestation has written.
    pub attested: Attested,
}

/// What the watch of attestation has written to a Node object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attested {
    /// The status, reason and message of the condition [`ATTESTED`]; empty without it.
    pub condition: [String; 3],
    /// Since when the condition has this status.
    pub since: String,
    /// The value of [`LABEL`].
    pub label: Option<String>,
    /// The value of [`TAINT`].
    pub taint: Option<String>,
    /// Whether the node is cordoned, by anybody.
    pub is_cordoned: bool,
    /// Whether this service has cordoned it.
    pub has_cordoned: bool,
}

impl NodeStatus {
    /// Reads a Node object.
    pub fn read(node: &Value) -> NodeStatus {
        let conditions = node.pointer("/status/conditions").and_then(Value::as_array);
        let ready = conditions
            .into_iter()
            .flatten()
            .find(|condition| condition["type"] == "Ready");
        let ready_since = ready
            .filter(|ready| ready["status"] == "True")
            .map(|ready| {
                let since = ready["lastTransitionTime"].as_str();
                // A condition without a time counts as Ready since the beginning.
                since
                    .and_then(time::parse)
                    .unwrap_or(SystemTime::UNIX_EPOCH)
            });
        NodeStatus {
            uid: text(&node["metadata"]["uid"]),
            ready_since,
            boot: text(&node["status"]["nodeInfo"]["bootID"]),
            address: internal_address(node),
            attested: Attested::read(node),
        }
    }

    /// Keeps the fields of a Node object that are used. A whole one has 10 KiB, mostly image names.
    pub fn reduce(node: Value) -> Value {
        let (metadata, spec, status) = (&node["metadata"], &node["spec"], &node["status"]);
        json!({
            "metadata": {
                "name": metadata["name"], "uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"],
                "labels": {LABEL: metadata["labels"][LABEL]},
                "annotations": {CORDONED: metadata["annotations"][CORDONED]},
            },
            "spec": {"taints": spec["taints"], "unschedulable": spec["unschedulable"]},
            "status": {
                "conditions": status["conditions"], "addresses": status["addresses"],
                "nodeInfo": {"bootID": status["nodeInfo"]["bootID"]},
            },
        })
    }

    /// Returns whether the node became Ready after it got its turn.
    pub fn is_ready_since(&self, turn: Option<SystemTime>) -> bool {
        let turn = turn.unwrap_or(SystemTime::UNIX_EPOCH);
        // The time of a node's condition has whole seconds.
        self.ready_since
            .is_some_and(|since| since + Duration::from_secs(1) > turn)
    }
}

impl Attested {
    /// Reads a Node object.
    pub fn read(node: &Value) -> Attested {
        let (metadata, spec) = (&node["metadata"], &node["spec"]);
        let conditions = node["status"]["conditions"].as_array();
        let condition = conditions
            .into_iter()
            .flatten()
            .find(|condition| condition["type"] == ATTESTED);
        let field = |name| condition.map_or_else(String::new, |it| text(&it[name]));
        let taints = spec["taints"].as_array();
        let taint = taints
            .into_iter()
            .flatten()
            .find(|taint| taint["key"] == TAINT);
        Attested {
            condition: ["status", "reason", "message"].map(field),
            since: field("lastTransitionTime"),
            label: metadata["labels"][LABEL].as_str().map(str::to_owned),
            taint: taint.map(|taint| text(&taint["value"])),
            is_cordoned: spec["unschedulable"] == true,
            has_cordoned: !metadata["annotations"][CORDONED].is_null(),
        }
    }
}

fn internal_address(node: &Value) -> Option<IpAddr> {
    let addresses = node["status"]["addresses"].as_array();
    let mut internal = addresses
        .into_iter()
        .flatten()
        .filter(|address| address["type"] == "InternalIP");
    internal.find_map(|address| address["address"].as_str()?.parse().ok())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_ready_since_its_condition_says_so() {
        let node = |status: &str| {
            let ready = json!({"type": "Ready", "status": status, "lastTransitionTime": "1970-01-01T00:00:07Z"});
            NodeStatus::read(&NodeStatus::reduce(
                json!({"metadata": {"uid": "u"}, "status": {"images": [1], "conditions": [ready]}}),
            ))
        };
        assert_eq!(
            node("True").ready_since,
            Some(SystemTime::UNIX_EPOCH + Duration::from_secs(7))
        );
        assert_eq!(
            (node("False").ready_since, node("Unknown").uid.as_str()),
            (None, "u")
        );
    }

    #[test]
    fn what_the_watch_needs_of_a_node_stays_in_its_reduced_form() {
        let node = json!({
            "metadata": {
                "name": "n", "uid": "u", "labels": {LABEL: "false", "other": "x"}, "annotations": {CORDONED: "true"},
            },
            "spec": {"unschedulable": true, "taints": [{"key": "a"}, {"key": TAINT, "value": "refused"}]},
            "status": {
                "conditions": [{"type": ATTESTED, "status": "False", "reason": "Measurement", "message": "PCR 4",
                    "lastTransitionTime": "1970-01-01T00:00:07Z"}],
                "addresses": [
                    {"type": "Hostname", "address": "n"}, {"type": "InternalIP", "address": "10.0.0.7"},
                    {"type": "InternalIP", "address": "fd00::7"},
                ],
                "nodeInfo": {"bootID": "b", "kernelVersion": "6"},
            },
        });
        let expected = NodeStatus {
            uid: "u".into(),
            ready_since: None,
            boot: "b".into(),
            address: Some("10.0.0.7".parse().unwrap()),
            attested: Attested {
                condition: ["False", "Measurement", "PCR 4"].map(Into::into),
                since: "1970-01-01T00:00:07Z".into(),
                label: Some("false".into()),
                taint: Some("refused".into()),
                is_cordoned: true,
                has_cordoned: true,
            },
        };
        assert_eq!(NodeStatus::read(&node), expected);
        assert_eq!(NodeStatus::read(&NodeStatus::reduce(node)), expected);
        assert_eq!(NodeStatus::read(&json!({})), NodeStatus::default());
    }
}
