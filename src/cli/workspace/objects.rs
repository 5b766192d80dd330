//! Fields of Kubernetes' objects.

use serde_json::Value;

/// The namespace of kubelets' Leases. A kubelet renews its Lease every ten seconds, as a sign of life.
pub const KUBELET_LEASES: &str = "kube-node-lease";

/// Returns a text; empty if there is none.
pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or("")
}

/// Returns a list; empty if there is none.
pub fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object
        .pointer(pointer)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// Returns the status of a condition of a node or a pod.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    let mut all = list(object, "/status/conditions").iter();
    all.find(|it| text(it, "/type") == kind)
        .map(|it| text(it, "/status"))
}

/// Returns whether Kubernetes' node controller has not heard of the kubelet for some time. The machine may run nevertheless, for
/// example without a network.
pub fn is_silent(node: &Value) -> bool {
    condition(node, "Ready") == Some("Unknown")
}
