//! Whom a control plane and the operator ask about etcd and the other static pods: no pod of a worker.

use base::uuid::Uuid;
use bootstrapper::steps::static_pods::is_ready_here;
use kubernetes::client::{CONFIG_MAPS, Client, Error, NODES, PODS};
use kubernetes::control_planes::{ControlPlanes, StaticPod};
use kubernetes::machine_record::MachineRecord;
use serde_json::{Value, json};

use crate::attacker::{ETCD_ENDPOINT, Inside, Kubelet, forbidden};

/// When the certificate of a pod ends, as `bootstrapper renew` writes it into the manifest.
const ENDS: &str = "2027-11-26T23:00:00Z";

/// Makes a static pod with all that kubeadm and `bootstrapper renew` give to one of this program, as the kubelet of this node mirrors it: its name and UID.
fn mirror(
    client: &Client,
    (node, uid): (&str, &str),
    name: &str,
    program: &str,
) -> Result<Value, Error> {
    let pods = PODS.in_namespace("kube-system");
    let pod = json!({
        "metadata": {
            "name": name, "labels": {"component": program, "tier": "control-plane"},
            "annotations": {"kubernetes.io/config.mirror": "a", "kubernetes.io/config.source": "file", "firstlight/certificate-ends": ENDS, ETCD_ENDPOINT: "https://10.1.7.3:2379"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": true}],
        },
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "hostNetwork": true, "containers": [{"name": program, "image": "a"}]},
    });
    let made = client.create(&pods, &pod)?;
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    let at = pods.named(name).subresource("status");
    client.merge(&at, &status)?;
    Ok(made)
}

/// Makes such a pod of the kubelet's own node.
fn own(kubelet: &Kubelet, name: &str, program: &str) -> Result<Value, Error> {
    mirror(
        &kubelet.client,
        (&kubelet.name, &kubelet.uid),
        name,
        program,
    )
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_renewal_waits_for_the_pod_of_its_own_node_and_for_no_pod_of_a_worker() {
    let inside = Inside::shared();
    let plane = inside.control_plane("renew-plane", "10.1.7.1");
    let worker = inside.worker("renew-worker", "10.1.7.2");
    let program = "kube-scheduler";
    let is_ready = || is_ready_here(&inside.admin, &plane.client, program, ENDS).unwrap();
    // The labels and the annotation are those of the real pod.
    let _ = own(&worker, "kube-scheduler-renew-worker", program);
    assert!(!is_ready());
    // So is the name; an admission policy may forbid it.
    let has_name = own(&worker, "kube-scheduler-renew-plane", program).is_ok();
    assert!(!is_ready());
    if has_name {
        let at = PODS
            .in_namespace("kube-system")
            .named("kube-scheduler-renew-plane");
        worker.client.delete(&at).unwrap();
    }
    own(&plane, "kube-scheduler-renew-plane", program).unwrap();
    assert!(is_ready());
    assert!(!is_ready_here(&inside.admin, &plane.client, program, "other").unwrap());
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_label_and_a_mirror_pod_make_no_control_plane_with_etcd() {
    let inside = Inside::shared();
    let plane = inside.control_plane("etcd-plane", "10.1.7.3");
    let worker = inside.worker("etcd-worker", "10.1.7.4");
    // The record of its ticket.
    let disk = Uuid::parse("00000000-0000-0000-0000-0000000000e7").unwrap();
    let record = MachineRecord {
        control_plane: true,
        addresses: vec!["10.1.7.3".parse().unwrap()],
        ..MachineRecord::of_node("etcd-plane", &disk, Some("m"), "", "")
    };
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    inside.admin.create(&maps, &record.to_object()).unwrap();
    own(&plane, "etcd-etcd-plane", "etcd").unwrap();

    let label = json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}});
    // as an account does that may patch the status of Nodes; a policy forbids it to flannel's
    let status = NODES.named("etcd-worker").subresource("status");
    inside.admin.merge(&status, &label).unwrap();
    let _ = own(&worker, "etcd-a", "etcd");
    // as the other node's kubelet it makes none
    let of_plane = (plane.name.as_str(), plane.uid.as_str());
    forbidden(
        mirror(&worker.client, of_plane, "etcd-b", "etcd"),
        "can only create pods",
    );
    let planes = ControlPlanes::read(&inside.admin).unwrap();
    assert!(planes.labelled.contains(&"etcd-worker".to_owned()));
    let found = planes.find("etcd-plane").unwrap();
    assert_eq!(found.refusal_now(&inside.admin).unwrap(), None);
    assert!(matches!(
        found.static_pod(&inside.admin, "etcd").unwrap(),
        StaticPod::Real(..)
    ));
    // The API server would ask another machine.
    let moved = json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.1.7.4"}, {"type": "InternalIP", "address": "10.1.7.3"}]}});
    let status = NODES.named("etcd-plane").subresource("status");
    inside.admin.merge(&status, &moved).unwrap();
    let why = found.refusal_now(&inside.admin).unwrap().unwrap();
    assert!(why.contains("expected the address 10.1.7.3"), "{why}");
}
