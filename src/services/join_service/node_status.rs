//! The fields of a Node object that decisions depend on.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use booted_base::time;

/// The state of a Node object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeStatus {
    /// Distinguishes the object from a deleted one of the same name.
    pub uid: String,
    /// Since when the node is Ready; `None` if it is not.
    pub ready_since: Option<SystemTime>,
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
            uid: node["metadata"]["uid"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            ready_since,
        }
    }

    /// Keeps the fields of a Node object that are used. A whole one has 10 KiB, mostly image names.
    pub fn reduce(node: Value) -> Value {
        let metadata = &node["metadata"];
        json!({
            "metadata": {
                "name": metadata["name"], "uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"],
            },
            "status": {"conditions": node["status"]["conditions"]},
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
}
