//! Whether workloads of a cluster are ready, and what keeps them from it.

use std::time::Duration;

use serde_json::Value;

use super::client::{DAEMON_SETS, DEPLOYMENTS, Resource, STATEFUL_SETS};

/// The kinds whose objects [`missing_of`] judges.
pub const WORKLOADS: [Resource; 3] = [DAEMON_SETS, DEPLOYMENTS, STATEFUL_SETS];
/// The text in the message of a node's condition `Ready` while the container runtime has no network plugin: containerd and CRI-O
/// say `NetworkPluginNotReady`, as the kubelet's CRI defines it.
const NO_NETWORK: &str = "NetworkPluginNotReady";

/// How long a node may be without a network before this is reported: a plugin that was just installed takes some seconds.
pub const NETWORK_GRACE: Duration = Duration::from_secs(20);

fn number(object: &Value, pointer: &str) -> Option<u64> {
    object.pointer(pointer).and_then(Value::as_u64)
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or("")
}

fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    value
        .pointer(pointer)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// Returns what is missing of a DaemonSet, a Deployment or a StatefulSet as the API server has it, such as
/// `join-service: 1 of 3 ready`, or `None` if it is ready. A DaemonSet of which no node needs a pod is ready.
pub fn missing_of(object: &Value) -> Option<String> {
    let name = text(object, "/metadata/name");
    if number(object, "/status/observedGeneration").unwrap_or(0)
        < number(object, "/metadata/generation").unwrap_or(0)
    {
        return Some(format!(
            "{name}: the controller manager has not processed it yet"
        ));
    }
    let status = |field: &str| number(object, &format!("/status/{field}")).unwrap_or(0);
    let replicas = || number(object, "/spec/replicas").unwrap_or(1);
    let is_on_delete = text(object, "/spec/updateStrategy/type") == "OnDelete";
    // a StatefulSet takes the new revision for its current one when all of its pods are of it
    let has_partition = object
        .pointer("/spec/updateStrategy/rollingUpdate/partition")
        .is_some_and(|it| *it != 0);
    if !is_on_delete
        && !has_partition
        && text(object, "/status/currentRevision") != text(object, "/status/updateRevision")
    {
        return Some(format!(
            "{name}: {} of {} updated",
            status("updatedReplicas"),
            replicas()
        ));
    }
    let (ready, wanted) = match text(object, "/kind") {
        // whoever deletes the old pods decides when
        "DaemonSet" if is_on_delete => {
            (status("numberAvailable"), status("desiredNumberScheduled"))
        }
        "DaemonSet" => (
            status("numberAvailable").min(status("updatedNumberScheduled")),
            status("desiredNumberScheduled"),
        ),
        // as many as the Deployment's strategy requires, which can be fewer than all; old pods stay until new ones are available
        "Deployment"
            if is_true(object, "Available") && status("replicas") <= status("updatedReplicas") =>
        {
            (status("updatedReplicas"), replicas())
        }
        "Deployment" => (
            status("availableReplicas").min(status("updatedReplicas")),
            replicas(),
        ),
        _ => (status("readyReplicas"), replicas()),
    };
    (ready < wanted).then(|| format!("{name}: {ready} of {wanted} ready"))
}

fn is_true(object: &Value, condition: &str) -> bool {
    list(object, "/status/conditions")
        .iter()
        .any(|it| it["type"] == condition && it["status"] == "True")
}

/// Returns the labels of a workload's pods, as a selector.
pub fn labels_of(workload: &Value) -> String {
    let labels = workload
        .pointer("/spec/selector/matchLabels")
        .and_then(Value::as_object);
    let labels = labels
        .into_iter()
        .flatten()
        .map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or("")));
    labels.collect::<Vec<_>>().join(",")
}

/// Returns what the kubelets report about the containers of a pod that do not run.
pub fn troubles_of(pod: &Value) -> Vec<String> {
    /// Reasons of a normal start.
    const NORMAL: [&str; 3] = ["", "ContainerCreating", "PodInitializing"];
    let (name, node) = (text(pod, "/metadata/name"), text(pod, "/spec/nodeName"));
    let mut troubles = Vec::new();
    for list_of in ["/status/initContainerStatuses", "/status/containerStatuses"] {
        for status in list(pod, list_of) {
            let reason = text(status, "/state/waiting/reason");
            if NORMAL.contains(&reason) {
                continue;
            }
            let mut trouble = format!("pod {name} on {node}: {reason}");
            // with FallbackToLogsOnError it is the end of the log, whose last line is the error
            let ended = text(status, "/lastState/terminated/message").trim_end();
            let message = [
                ended.lines().next_back().unwrap_or_default(),
                text(status, "/state/waiting/message"),
            ];
            if let Some(message) = message.iter().find(|message| !message.is_empty()) {
                trouble += &format!(": {message:.500}");
            }
            if let Some(code) = status.pointer("/lastState/terminated/exitCode") {
                trouble += &format!(" (exit code {code})");
            }
            troubles.push(trouble);
        }
    }
    for condition in list(pod, "/status/conditions") {
        if condition["type"] == "PodScheduled" && condition["status"] == "False" {
            troubles.push(format!("pod {name}: {}", text(condition, "/message")));
        }
    }
    troubles
}

/// Returns a sentence for each node whose container runtime has no network plugin: its pods stay in `ContainerCreating`.
pub fn without_network(nodes: &[Value]) -> Vec<String> {
    let lacks = |node: &&Value| {
        let conditions = list(node, "/status/conditions").iter();
        let mut ready = conditions.filter(|condition| condition["type"] == "Ready");
        ready.any(|condition| text(condition, "/message").contains(NO_NETWORK))
    };
    let sentence = |node: &Value| {
        format!(
            "no network plugin is installed on {}: pods that are not on the host's network do not start there",
            text(node, "/metadata/name")
        )
    };
    nodes.iter().filter(lacks).map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn missing(kind: &str, generation: u64, status: Value) -> Option<String> {
        missing_of(
            &json!({"kind": kind, "metadata": {"name": "a", "generation": generation}, "spec": {"replicas": 2}, "status": status}),
        )
    }

    #[test]
    fn a_set_is_ready_when_every_node_has_its_newest_pod() {
        let status = |observed, desired, updated, available| {
            json!({"observedGeneration": observed, "desiredNumberScheduled": desired,
                "updatedNumberScheduled": updated, "numberAvailable": available})
        };
        let missing = |generation, status| missing("DaemonSet", generation, status);
        assert_eq!(missing(2, status(2, 3, 3, 3)), None);
        assert!(
            missing(2, status(1, 3, 3, 3))
                .unwrap()
                .contains("has not processed it")
        );
        assert_eq!(missing(2, status(2, 3, 1, 3)).unwrap(), "a: 1 of 3 ready");
        assert_eq!(missing(2, status(2, 3, 3, 0)).unwrap(), "a: 0 of 3 ready");
        assert_eq!(missing(2, status(2, 0, 0, 0)), None);
    }

    #[test]
    fn a_deployment_is_ready_when_it_is_available_with_its_newest_pods() {
        let status = |updated, available, is_available| {
            json!({"observedGeneration": 1, "updatedReplicas": updated, "availableReplicas": available,
                "conditions": [{"type": "Available", "status": is_available}]})
        };
        let missing = |status| missing("Deployment", 1, status);
        assert_eq!(missing(status(2, 2, "True")), None);
        // its strategy may require fewer
        assert_eq!(missing(status(2, 1, "True")), None);
        // the only available pod is an old one
        let mut upgrade = status(2, 2, "True");
        upgrade["replicas"] = 3.into();
        upgrade["availableReplicas"] = 1.into();
        assert_eq!(missing(upgrade).unwrap(), "a: 1 of 2 ready");
        assert_eq!(missing(status(1, 2, "True")).unwrap(), "a: 1 of 2 ready");
        assert_eq!(missing(status(2, 1, "False")).unwrap(), "a: 1 of 2 ready");
        assert_eq!(
            missing(json!({"observedGeneration": 1})).unwrap(),
            "a: 0 of 2 ready"
        );
    }

    #[test]
    fn a_node_without_a_network_plugin_is_named() {
        let node = |name: &str, message: &str| json!({"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": "False", "message": message}]}});
        // as the kubelet v1.34 writes it with containerd 1.6
        let bare = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin returns \
            error: cni plugin not initialized";
        let found = without_network(&[
            node("a", bare),
            node("b", "kubelet is posting ready status"),
            json!({}),
        ]);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].starts_with("no network plugin is installed on a: "),
            "{}",
            found[0]
        );
    }

    #[test]
    fn trouble_is_said_with_its_reason() {
        let pod = json!({
            "metadata": {"name": "a-1"}, "spec": {"nodeName": "n"},
            "status": {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ContainerCreating"}}},
                    {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
                    {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                        "lastState": {"terminated": {"exitCode": 1}}},
                    {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                        "lastState": {"terminated": {"exitCode": 1, "message": "starts\nno wrapping key\n"}}},
                ],
                "conditions": [{"type": "PodScheduled", "status": "False", "message": "no node"}],
            },
        });
        assert_eq!(
            troubles_of(&pod),
            [
                "pod a-1 on n: ImagePullBackOff: no such image",
                "pod a-1 on n: CrashLoopBackOff: back-off (exit code 1)",
                "pod a-1 on n: CrashLoopBackOff: no wrapping key (exit code 1)",
                "pod a-1: no node"
            ]
        );
        assert!(troubles_of(&json!({})).is_empty());
    }
}
