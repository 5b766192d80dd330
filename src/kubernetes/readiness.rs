//! Whether workloads of a cluster are ready, and what keeps them from it.

use std::time::Duration;

use super::client::{DAEMON_SETS, DEPLOYMENTS, Resource, STATEFUL_SETS};
use super::objects::{NodeObject, Pod, Workload, is_true};

/// The kinds whose objects [`missing_of`] judges.
pub const WORKLOADS: [Resource; 3] = [DAEMON_SETS, DEPLOYMENTS, STATEFUL_SETS];
/// The text in the message of a node's condition `Ready` while the container runtime has no network plugin: containerd and CRI-O
/// say `NetworkPluginNotReady`, as the kubelet's CRI defines it.
const NO_NETWORK: &str = "NetworkPluginNotReady";

/// How long a node may be without a network before this is reported: a plugin that was just installed takes some seconds.
pub const NETWORK_GRACE: Duration = Duration::from_secs(20);

/// Returns what is missing of a DaemonSet, a Deployment or a StatefulSet as the API server has it, such as
/// `join-service: 1 of 3 ready`, or `None` if it is ready. A DaemonSet of which no node needs a pod is ready.
pub fn missing_of(workload: &Workload) -> Option<String> {
    let (metadata, spec, status) = (&workload.metadata, &workload.spec, &workload.status);
    let name = &metadata.name;
    if status.observed_generation < metadata.generation {
        return Some(format!(
            "{name}: the controller manager has not processed it yet"
        ));
    }
    let replicas = spec.replicas.unwrap_or(1);
    let is_on_delete = spec.update_strategy.kind == "OnDelete";
    // a StatefulSet takes the new revision for its current one when all of its pods are of it
    let has_partition = spec.update_strategy.rolling_update.partition != 0;
    if !is_on_delete && !has_partition && status.current_revision != status.update_revision {
        return Some(format!(
            "{name}: {} of {replicas} updated",
            status.updated_replicas
        ));
    }
    let (ready, wanted) = match &*workload.kind {
        // whoever deletes the old pods decides when
        "DaemonSet" if is_on_delete => (status.number_available, status.desired_number_scheduled),
        "DaemonSet" => (
            status.number_available.min(status.updated_number_scheduled),
            status.desired_number_scheduled,
        ),
        // as many as the Deployment's strategy requires, which can be fewer than all; old pods stay until new ones are available
        "Deployment"
            if is_true(&status.conditions, "Available")
                && status.replicas <= status.updated_replicas =>
        {
            (status.updated_replicas, replicas)
        }
        "Deployment" => (
            status.available_replicas.min(status.updated_replicas),
            replicas,
        ),
        _ => (status.ready_replicas, replicas),
    };
    (ready < wanted).then(|| format!("{name}: {ready} of {wanted} ready"))
}

/// Returns the labels of a workload's pods, as a selector.
pub fn labels_of(workload: &Workload) -> String {
    let labels = workload.spec.selector.match_labels.iter();
    let labels = labels.map(|(name, value)| format!("{name}={value}"));
    labels.collect::<Vec<_>>().join(",")
}

/// Returns what the kubelets report about the containers of a pod that do not run.
pub fn troubles_of(pod: &Pod) -> Vec<String> {
    /// Reasons of a normal start.
    const NORMAL: [&str; 3] = ["", "ContainerCreating", "PodInitializing"];
    let (name, node) = (&pod.metadata.name, &pod.spec.node_name);
    let mut troubles = Vec::new();
    for container in pod.containers() {
        let Some(waiting) = &container.state.waiting else {
            continue;
        };
        let reason = waiting.reason.as_str();
        if NORMAL.contains(&reason) {
            continue;
        }
        let mut trouble = format!("pod {name} on {node}: {reason}");
        let ended = container.last_state.terminated.as_ref();
        // with FallbackToLogsOnError it is the end of the log, whose last line is the error
        let last = ended.and_then(|it| it.message.trim_end().lines().next_back());
        let message = [last.unwrap_or_default(), &waiting.message];
        if let Some(message) = message.iter().find(|message| !message.is_empty()) {
            trouble += &format!(": {message:.500}");
        }
        if let Some(ended) = ended {
            trouble += &format!(" (exit code {})", ended.exit_code);
        }
        troubles.push(trouble);
    }
    for condition in &pod.status.conditions {
        if condition.kind == "PodScheduled" && condition.status == "False" {
            troubles.push(format!("pod {name}: {}", condition.message));
        }
    }
    troubles
}

/// Returns a sentence for each node whose container runtime has no network plugin: its pods stay in `ContainerCreating`.
pub fn without_network(nodes: &[NodeObject]) -> Vec<String> {
    let lacks = |node: &&NodeObject| {
        let mut conditions = node.status.conditions.iter();
        conditions.any(|it| it.kind == "Ready" && it.message.contains(NO_NETWORK))
    };
    let sentence = |node: &NodeObject| {
        format!(
            "no network plugin is installed on {}: pods that are not on the host's network do not start there",
            node.metadata.name
        )
    };
    nodes.iter().filter(lacks).map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn missing(kind: &str, generation: u64, status: Value) -> Option<String> {
        let workload = json!({"kind": kind, "metadata": {"name": "a", "generation": generation}, "spec": {"replicas": 2}, "status": status});
        missing_of(&from_value(workload).unwrap())
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
        let node = |name: &str, message: &str| {
            let condition = json!({"type": "Ready", "status": "False", "message": message});
            from_value(json!({"metadata": {"name": name}, "status": {"conditions": [condition]}}))
                .unwrap()
        };
        // as the kubelet v1.34 writes it with containerd 1.6
        let bare = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin returns \
            error: cni plugin not initialized";
        let found = without_network(&[
            node("a", bare),
            node("b", "kubelet is posting ready status"),
            NodeObject::default(),
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
            troubles_of(&from_value(pod).unwrap()),
            [
                "pod a-1 on n: ImagePullBackOff: no such image",
                "pod a-1 on n: CrashLoopBackOff: back-off (exit code 1)",
                "pod a-1 on n: CrashLoopBackOff: no wrapping key (exit code 1)",
                "pod a-1: no node"
            ]
        );
        assert!(troubles_of(&Pod::default()).is_empty());
    }
}
