//! The fields of a Node object that decisions depend on.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use base::time;
use kubernetes::objects::{NodeObject, condition};

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
    pub fn read(node: &NodeObject) -> NodeStatus {
        let ready = condition(&node.status.conditions, "Ready");
        let ready_since = ready.filter(|ready| ready.status == "True").map(|ready| {
            let since = ready.last_transition_time.as_deref();
            // A condition without a time counts as Ready since the beginning.
            since
                .and_then(time::parse)
                .unwrap_or(SystemTime::UNIX_EPOCH)
        });
        let mut internal = node.addresses("InternalIP");
        NodeStatus {
            uid: node.metadata.uid.clone(),
            ready_since,
            boot: node.status.node_info.boot_id.clone(),
            address: internal.find_map(|address| address.parse().ok()),
            attested: Attested::read(node),
        }
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
    pub fn read(node: &NodeObject) -> Attested {
        let attested = condition(&node.status.conditions, ATTESTED).cloned();
        let attested = attested.unwrap_or_default();
        let mut taints = node.spec.taints.iter();
        let taint = taints.find(|taint| taint.key == TAINT);
        Attested {
            condition: [attested.status, attested.reason, attested.message],
            since: attested.last_transition_time.unwrap_or_default(),
            label: node.metadata.label(LABEL).map(str::to_owned),
            taint: taint.map(|taint| taint.value.clone()),
            is_cordoned: node.spec.unschedulable,
            has_cordoned: node.metadata.annotation(CORDONED).is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_node_is_ready_since_its_condition_says_so() {
        let node = |status: &str| {
            let ready = json!({"type": "Ready", "status": status, "lastTransitionTime": "1970-01-01T00:00:07Z"});
            let node =
                json!({"metadata": {"uid": "u"}, "status": {"images": [1], "conditions": [ready]}});
            NodeStatus::read(&from_value(node).unwrap())
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
    fn what_the_watch_has_written_is_read_from_a_node() {
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
        assert_eq!(NodeStatus::read(&from_value(node).unwrap()), expected);
        let empty = NodeStatus::read(&NodeObject::default());
        assert_eq!(empty, NodeStatus::default());
    }
}
