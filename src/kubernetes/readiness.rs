//! Whether workloads of a cluster are ready, and what keeps them from it.

use std::time::Duration;

use serde_json::Value;

use super::client::{DAEMON_SETS, DEPLOYMENTS, Resource, STATEFUL_SETS};

/// The kinds whose objects [`missing_of`] judges.
pub const WORKLOADS: [Resource; 3] = [DAEMON_SETS, DEPLOYMENTS, STATEFUL_SETS];
/// What the message of a node's condition `Ready` has while the container runtime has no network plugin: containerd and CRI-O say
/// `NetworkPluginNotReady`, as the kubelet's CRI defines it.
const NO_NETWORK: &str = "NetworkPluginNotReady";

/// How long a node may be without a network before that is said: a plugin that was just installed takes some seconds.
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
    let (ready, wanted) = match text(object, "/kind") {
        "DaemonSet" => (
            status("numberAvailable").min(status("updatedNumberScheduled")),
            status("desiredNumberScheduled"),
        ),
        // as many as the Deployment's strategy demands, which can be fewer than all
        "Deployment" if is_true(object, "Available") => (status("updatedReplicas"), replicas()),
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
            let message = [
                text(status, "/lastState/terminated/message"),
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
