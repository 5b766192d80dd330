//! What agents write, as their programs send it: these requests go on.

use common::volumes::ATTACHMENTS;
use kubernetes::client::{LEASES, NODES, Resource, SERVICES};
use serde_json::json;

use super::{
    Account, CLOUD, Call, DEFINITIONS, JSON_PATCH, KUBE_SYSTEM, MERGE, STRATEGIC, inside, node_of,
    patch, send, worker,
};
use crate::attacker::{Inside, Kubelet, definition, eventually};

fn status_of_node(node: &Kubelet) -> String {
    format!("/api/v1/nodes/{}/status", node.name)
}

fn at_node(node: &Kubelet) -> String {
    format!("/api/v1/nodes/{}", node.name)
}

/// Taints a node, as kubelets do that are started with this taint.
fn taint(inside: &Inside, node: &Kubelet, key: &str) {
    let taints = json!({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
    let at = NODES.named(&node.name);
    inside.admin.merge(&at, &taints).unwrap();
}

/// Removes the taint as the agents of Cilium, EBS and Azure do.
fn untaint(inside: &Inside, node: &Kubelet) -> Call {
    let taints = node_of(inside, &node.name)["spec"]["taints"].clone();
    let change = json!([{"op": "test", "path": "/spec/taints", "value": taints}, {"op": "replace", "path": "/spec/taints", "value": []}]);
    patch(JSON_PATCH, &at_node(node), change)
}

fn network_is_up(node: &Kubelet) -> Call {
    let condition = json!({"type": "NetworkUnavailable", "status": "False", "reason": "IsUp", "message": "is running",
        "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z"});
    let conditions = json!({"status": {"conditions": [condition]}});
    patch(STRATEGIC, &status_of_node(node), conditions)
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn flannel_and_cilium_go_on() {
    let inside = inside();
    let node = worker(inside, "network");
    let notes = |name: &str| {
        let change = json!({"metadata": {"annotations": {name: "10.9.9.9"}}});
        patch(STRATEGIC, &status_of_node(&node), change)
    };
    let flannel = Account::on(inside, "flannel", &node);
    flannel.goes_on(&notes("flannel.alpha.coreos.com/public-ip"));
    flannel.goes_on(&network_is_up(&node));

    let operator = Account::on(inside, "cilium-operator", &node);
    operator.goes_on(&network_is_up(&node));
    taint(inside, &node, "node.cilium.io/agent-not-ready");
    operator.goes_on(&untaint(inside, &node));
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
    let lease = json!({"metadata": {"name": "cilium-operator-resource-lock"}, "spec": {"holderIdentity": "a"}});
    operator.goes_on(&send("POST", leases, lease));
    let nodes = definition("cilium.io", "v2", "CiliumNode");
    operator.goes_on(&send("POST", DEFINITIONS, nodes));

    let agent = Account::on(inside, "cilium", &node);
    agent.goes_on(&notes("network.cilium.io/ipv4-cilium-host"));
    let objects = "/apis/cilium.io/v2/ciliumnodes";
    let object = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": node.name},
        "spec": {"addresses": [{"type": "CiliumInternalIP", "ip": "10.0.0.1"}]}});
    eventually("the API server serves CiliumNodes", || {
        let (status, _) = agent.send(&send("POST", objects, object.clone()));
        (200..300).contains(&status)
    });
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn cilium_gives_a_service_of_a_tenant_an_address_and_endpoints_of_another_cluster() {
    let inside = inside();
    let node = worker(inside, "balanced");
    let tenant = inside.tenant("balanced-tenant");
    let service = json!({"metadata": {"name": "web"}, "spec": {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [{"port": 443}]}});
    let services = SERVICES.in_namespace("balanced-tenant");
    tenant.create(&services, &service).unwrap();
    let operator = Account::on(inside, "cilium-operator", &node);
    let at = "/api/v1/namespaces/balanced-tenant/services/web/status";
    let ingress = json!([{"op": "replace", "path": "/status/loadBalancer", "value": {"ingress": [{"ip": "192.0.2.7"}]}}]);
    operator.goes_on(&patch(JSON_PATCH, at, ingress));
    let slice = json!({
        "metadata": {"name": "web-other", "labels": {"kubernetes.io/service-name": "web", "endpointslice.kubernetes.io/managed-by": "endpointslice-mesh-controller.cilium.io"}},
        "addressType": "IPv4", "endpoints": [{"addresses": ["10.9.9.9"]}], "ports": [{"port": 443}],
    });
    let at = "/apis/discovery.k8s.io/v1/namespaces/balanced-tenant/endpointslices";
    operator.goes_on(&send("POST", at, slice));
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn drivers_of_volumes_go_on() {
    let inside = inside();
    let node = worker(inside, "volumes");
    for (agent, key) in [
        ("ebs-csi-node", "ebs.csi.aws.com/agent-not-ready"),
        ("azuredisk-csi-node", "disk.csi.azure.com/agent-not-ready"),
    ] {
        taint(inside, &node, key);
        let account = Account::on(inside, agent, &node);
        account.goes_on(&untaint(inside, &node));
        let topology = json!({"metadata": {"labels": {"topology.ebs.csi.aws.com/zone": "a"}}});
        account.goes_on(&patch(STRATEGIC, &at_node(&node), topology));
    }
    let drivers = json!({"metadata": {"name": node.name, "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}]},
        "spec": {"drivers": [{"name": "ebs.csi.aws.com", "nodeID": "i-1", "topologyKeys": ["topology.ebs.csi.aws.com/zone"]}]}});
    let nodes = Resource::cluster("storage.k8s.io", "v1", "csinodes").all();
    node.client.create(&nodes, &drivers).unwrap();
    for agent in [
        "ebs-csi-controller",
        "azuredisk-csi-controller",
        "gce-pd-csi-controller",
    ] {
        let account = Account::on(inside, agent, &node);
        let name = format!("pv-{agent}");
        let made = json!({"metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": agent}}, "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "csi": {"driver": agent, "volumeHandle": name}}});
        let all = "/api/v1/persistentvolumes";
        account.goes_on(&send("POST", all, made));
        let attachment = json!({"metadata": {"name": format!("csi-{agent}")},
            "spec": {"attacher": agent, "nodeName": node.name, "source": {"persistentVolumeName": name}}});
        inside
            .admin
            .create(&ATTACHMENTS.all(), &attachment)
            .unwrap();
        let at = format!("/apis/storage.k8s.io/v1/volumeattachments/csi-{agent}/status");
        let attached = json!({"status": {"attached": true}});
        account.goes_on(&patch(MERGE, &at, attached));
    }
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
    let mut lease =
        json!({"metadata": {"name": "ebs-csi-aws-com"}, "spec": {"holderIdentity": "a"}});
    let controller = Account::on(inside, "ebs-csi-controller", &worker(inside, "volumes-2"));
    controller.goes_on(&send("POST", leases, lease.clone()));
    let at = LEASES.in_namespace("kube-system").named("ebs-csi-aws-com");
    lease["metadata"] = inside.admin.get(&at).unwrap()["metadata"].clone();
    let renewed = send("PUT", &format!("{leases}/ebs-csi-aws-com"), lease);
    controller.goes_on(&renewed);
}

/// Initializes a node as cloud controllers do: the whole Node with its provider ID, its zone and without their taint; then its addresses.
fn initialize(inside: &Inside, account: &Account, node: &Kubelet) {
    taint(
        inside,
        node,
        "node.cloudprovider.kubernetes.io/uninitialized",
    );
    let mut whole = node_of(inside, &node.name);
    whole["spec"]["providerID"] = format!("cloud:///{}", node.name).into();
    whole["spec"]["taints"] = json!([]);
    whole["metadata"]["labels"]["topology.kubernetes.io/zone"] = "a".into();
    account.goes_on(&send("PUT", &at_node(node), whole));
    let addresses = json!({"status": {"addresses": [
        {"type": "InternalIP", "address": node.address}, {"type": "ExternalIP", "address": "192.0.2.1"},
        {"type": "InternalDNS", "address": "a.internal"}, {"type": "Hostname", "address": node.name}, {"$patch": "replace"}]}});
    account.goes_on(&patch(STRATEGIC, &status_of_node(node), addresses));
    let there = node_of(inside, &node.name)["status"]["addresses"].to_string();
    assert!(there.contains("192.0.2.1"), "{}: {there}", account.name);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn controllers_of_a_cloud_go_on() {
    let inside = inside();
    let (plane, node) = (worker(inside, "cloud-plane"), worker(inside, "cloud-new"));
    let manager = Account::on(inside, CLOUD, &plane);
    initialize(inside, &manager, &node);
    let shutdown = json!({"spec": {"taints": [{"key": "node.cloudprovider.kubernetes.io/shutdown", "effect": "NoSchedule"}]}});
    manager.goes_on(&patch(STRATEGIC, &at_node(&node), shutdown));
    let tenant = inside.tenant("cloud-tenant");
    let service = json!({"metadata": {"name": "web"}, "spec": {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [{"port": 443}]}});
    let services = SERVICES.in_namespace("cloud-tenant");
    tenant.create(&services, &service).unwrap();
    let at = "/api/v1/namespaces/cloud-tenant/services/web";
    let finalizer =
        json!({"metadata": {"finalizers": ["service.kubernetes.io/load-balancer-cleanup"]}});
    manager.goes_on(&patch(STRATEGIC, at, finalizer));
    let ingress = json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.8"}]}}});
    manager.goes_on(&patch(STRATEGIC, &format!("{at}/status"), ingress));
    manager.goes_on(&send("DELETE", &at_node(&node), json!({})));

    let own = worker(inside, "cloud-own");
    let of_node = Account::on(inside, "azure-cloud-node-manager", &own);
    initialize(inside, &of_node, &own);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn autoscalers_go_on() {
    let inside = inside();
    let (own, node) = (worker(inside, "scaler"), worker(inside, "scaled"));
    // what the join service has written of a refused node stays as it is
    let refused =
        json!({"key": "firstlight/attestation", "value": "refused", "effect": "NoSchedule"});
    let marks = json!({"metadata": {"labels": {"firstlight.node-restriction.kubernetes.io/attested": "false"}}, "spec": {"taints": [refused]}});
    inside
        .admin
        .merge(&NODES.named(&node.name), &marks)
        .unwrap();
    let scaler = Account::on(inside, "cluster-autoscaler", &own);
    let mut whole = node_of(inside, &node.name);
    whole["spec"]["taints"] = json!([refused, {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}]);
    scaler.goes_on(&send("PUT", &at_node(&node), whole));
    let maps = format!("{KUBE_SYSTEM}/configmaps");
    let status =
        json!({"metadata": {"name": "cluster-autoscaler-status"}, "data": {"status": "a"}});
    scaler.goes_on(&send("POST", &maps, status.clone()));
    let at = format!("{maps}/cluster-autoscaler-status");
    scaler.goes_on(&send("PUT", &at, status));

    let karpenter = Account::on(inside, "karpenter", &own);
    let claimed = json!({"metadata": {"labels": {"karpenter.sh/nodepool": "a", "karpenter.sh/registered": "true"}, "finalizers": ["karpenter.sh/termination"]},
        "spec": {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}, refused]}});
    karpenter.goes_on(&patch(MERGE, &at_node(&node), claimed));
    let mut free = node_of(inside, &node.name);
    free["metadata"]["finalizers"] = json!([]);
    karpenter.goes_on(&send("PUT", &at_node(&node), free));
    karpenter.goes_on(&send("DELETE", &at_node(&node), json!({})));
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn agents_that_write_nothing_go_on() {
    let inside = inside();
    let node = worker(inside, "readers");
    let exporter = Account::on(inside, "node-exporter", &node);
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": exporter.token}});
    let at = "/apis/authentication.k8s.io/v1/tokenreviews";
    exporter.goes_on(&send("POST", at, review));
    let proxy = Account::on(inside, "kube-proxy", &node);
    proxy.goes_on(&send("GET", "/api/v1/services", json!({})));
}
