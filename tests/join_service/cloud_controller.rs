//! Nodes that a cloud controller manager has to initialize.

use std::fs;

use base::stop::Stop;
use common::manifests::settings;
use kubernetes::client::{NODES, Object, PODS, Selector};
use kubernetes::services;
use serde_json::json;

use crate::kube_apiserver::{self, Cluster, PATIENCE};
use crate::setup::*;

const TAINT: &str = "node.cloudprovider.kubernetes.io/uninitialized";

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_services_are_scheduled_to_a_node_that_no_controller_has_initialized() {
    let cluster = Cluster::start();
    let client = cluster.client(&Stop::new()).within(PATIENCE);
    client.wait_ready(&mut |_| {}).unwrap();
    fs::write(cluster.path("scheduler.conf"), cluster.kubeconfig()).unwrap();
    let scheduler = kube_apiserver::build(&["kube-scheduler"]).join("kube-scheduler");
    let arguments = [
        format!("--kubeconfig={}", cluster.path("scheduler.conf").display()),
        "--leader-elect=false".to_owned(),
        "--secure-port=0".to_owned(),
    ];
    let _scheduler = cluster.start_program("scheduler", &scheduler, &arguments);
    let _controllers = cluster.start_controllers("daemonset-controller");

    let control_plane = "node-role.kubernetes.io/control-plane";
    let taint = |key: &str, effect: &str| json!({"key": key, "value": "true", "effect": effect});
    let node = json!({
        "metadata": {"name": "plane-0", "labels": {control_plane: "", "kubernetes.io/os": "linux"}},
        "spec": {"taints": [
            taint(TAINT, "NoSchedule"),
            taint(control_plane, "NoSchedule"),
            taint("node.kubernetes.io/not-ready", "NoSchedule"),
            taint("node.kubernetes.io/not-ready", "NoExecute"),
            taint("node.kubernetes.io/network-unavailable", "NoSchedule"),
        ]},
    });
    client.create(&NODES.all(), &node).unwrap();
    let resources = json!({"cpu": "4", "memory": "8Gi", "pods": "110"});
    let status = json!({"status": {"capacity": resources, "allocatable": resources}});
    let at = NODES.named("plane-0").subresource("status");
    client.merge(&at, &status).unwrap();
    for object in services::manifests(&settings(POLICY)).unwrap() {
        client
            .apply(&Object::of(&object).unwrap(), &object)
            .unwrap();
    }
    // with the tolerations that kubeadm gives CoreDNS
    let other = json!({"metadata": {"name": "dns"}, "spec": {
        "serviceAccountName": "join-service", "containers": [{"name": "dns", "image": "example.com/dns"}],
        "tolerations": [{"key": "CriticalAddonsOnly", "operator": "Exists"}, {"key": control_plane, "effect": "NoSchedule"}],
    }});
    let pods = PODS.in_namespace("kube-system");
    client.create(&pods, &other).unwrap();

    for service in ["join-service", "key-service"] {
        let its = Selector::labels(&format!("k8s-app={service}"));
        eventually(&format!("a pod of {service} has the node"), || {
            let found = client.list(&pods, &its).unwrap().items;
            found.iter().any(|pod| pod["spec"]["nodeName"] == "plane-0")
        });
    }
    eventually("the other pod waits for the controller", || {
        let pod = client.get(&pods.named("dns")).unwrap();
        let conditions = pod["status"]["conditions"].to_string();
        assert!(pod["spec"]["nodeName"].is_null(), "{pod}");
        conditions.contains("Unschedulable") && conditions.contains("taint")
    });
}
