//! The cluster of these tests is like a real one, so what an attacker cannot do here it cannot do there for the same reason.

use kubernetes::client::{NODES, PODS};
use serde_json::json;

use crate::attacker::{Inside, eventually, forbidden};

const DAEMON_SET: &str = "join-service";

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_kubelet_writes_its_own_node_and_no_other() {
    let inside = Inside::shared();
    let (one, other) = (
        inside.worker("own-1", "10.1.0.1"),
        inside.worker("own-2", "10.1.0.2"),
    );
    one.report().unwrap();
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    one.client.merge(&NODES.named(&one.name), &label).unwrap();
    let status = NODES.named(&other.name).subresource("status");
    forbidden(
        one.client.merge(&status, &label),
        "not allowed to modify node \"own-2\"",
    );
    assert_eq!(other.node()["metadata"]["labels"]["a"], json!(null));
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn controllers_put_our_pods_onto_a_control_plane_and_not_onto_a_worker() {
    let inside = Inside::shared();
    inside.worker("placed-worker", "10.1.0.3");
    inside.control_plane("placed-plane", "10.1.0.4");
    eventually("a pod for the control plane", || {
        inside
            .nodes_of(DAEMON_SET)
            .contains(&"placed-plane".to_owned())
    });
    assert!(
        !inside
            .nodes_of(DAEMON_SET)
            .contains(&"placed-worker".to_owned())
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_tenant_writes_its_own_namespace_and_no_other() {
    let inside = Inside::shared();
    let tenant = inside.tenant("own-tenant");
    let pod =
        json!({"metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "image": "a"}]}});
    tenant
        .create(&PODS.in_namespace("own-tenant"), &pod)
        .unwrap();
    forbidden(
        tenant.create(&PODS.in_namespace("kube-system"), &pod),
        "cannot create resource \"pods\"",
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_kubelet_mirrors_its_static_pods_and_gets_the_tokens_of_the_pods_there() {
    let inside = Inside::shared();
    let worker = inside.worker("tokens", "10.1.0.5");
    worker
        .mirror("kube-system", "proxy-tokens", &json!({"a": "b"}))
        .unwrap();
    let flannel = inside.flannel_on(&worker);
    let note = json!({"metadata": {"annotations": {"flannel.alpha.coreos.com/backend-type": "wireguard"}}});
    let status = NODES.named("tokens").subresource("status");
    flannel.merge(&status, &note).unwrap();
    forbidden(
        flannel.merge(&NODES.named("tokens"), &note),
        "cannot patch resource \"nodes\"",
    );
    // the token names the pod, and the pod the node
    let pod = PODS
        .in_namespace("kube-flannel")
        .named("kube-flannel-tokens");
    assert_eq!(
        inside.admin.get(&pod).unwrap()["spec"]["nodeName"],
        worker.name
    );
    assert_eq!(worker.node()["metadata"]["uid"], worker.uid);
}
