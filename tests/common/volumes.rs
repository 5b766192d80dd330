//! Nodes, pods and volumes of a CSI driver in a real API server, as the controllers and kubelets of a cluster make them.

use kubernetes::client::{Client, NAMESPACES, NODES, PODS, Resource, SERVICE_ACCOUNTS};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

pub const ATTACHMENTS: Resource = Resource::cluster("storage.k8s.io", "v1", "volumeattachments");
pub const CSI_DRIVERS: Resource = Resource::cluster("storage.k8s.io", "v1", "csidrivers");
pub const VOLUMES: Resource = Resource::cluster("", "v1", "persistentvolumes");
pub const CLAIMS: Resource = Resource::namespaced("", "v1", "persistentvolumeclaims");

/// The name of the driver.
pub const DRIVER: &str = "csi.test";
const SIZE: &str = "64Mi";

/// Registers a node with this address. Returns its UID.
pub fn add_node(client: &Client, name: &str, address: &str) -> String {
    let node = client
        .create(&NODES.all(), &json!({"metadata": {"name": name}}))
        .unwrap();
    let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": address}]}});
    client
        .merge(&NODES.named(name).subresource("status"), &status)
        .unwrap();
    node["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// Creates a pod of this account, which the scheduler has put on the node, with these volumes. Returns its UID.
pub fn add_pod(
    client: &Client,
    account: (&str, &str),
    name: &str,
    node: &str,
    volumes: Value,
) -> String {
    let (namespace, account) = account;
    client
        .create_if_absent(&NAMESPACES.all(), &json!({"metadata": {"name": namespace}}))
        .unwrap();
    let named = json!({"metadata": {"name": account}});
    client
        .create_if_absent(&SERVICE_ACCOUNTS.in_namespace(namespace), &named)
        .unwrap();
    let pod = json!({"metadata": {"name": name}, "spec": {
        "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false, "volumes": volumes,
        "containers": [{"name": "a", "image": "a"}],
    }});
    let pod = client.create(&PODS.in_namespace(namespace), &pod).unwrap();
    pod["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// Returns a token of this pod for the audience, as the kubelet of its node requests it.
pub fn token_of_pod(
    client: &Client,
    account: (&str, &str),
    name: &str,
    uid: &str,
    audience: &str,
) -> String {
    let request = json!({"spec": {
        "audiences": [audience], "expirationSeconds": 600,
        "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid},
    }});
    let at = SERVICE_ACCOUNTS
        .in_namespace(account.0)
        .named(account.1)
        .subresource("token");
    let answer = client.create_subresource(&at, &request).unwrap();
    answer["status"]["token"].as_str().unwrap().to_owned()
}

/// Creates a PersistentVolume. Its handle is `volumes/NAME`.
pub fn add_volume(client: &Client, name: &str) {
    let volume = json!({"metadata": {"name": name}, "spec": {
        "capacity": {"storage": SIZE}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "csi": {"driver": DRIVER, "volumeHandle": format!("volumes/{name}")},
    }});
    client.create(&VOLUMES.all(), &volume).unwrap();
}

/// Returns the name that Kubernetes' attach controller gives to the VolumeAttachment.
pub fn attachment(name: &str, node: &str) -> String {
    let text = format!("volumes/{name}{DRIVER}{node}");
    let hash = digest(&SHA256, text.as_bytes());
    let hex: String = hash
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("csi-{hex}")
}

/// Attaches the volume to the node; if not `is_done`, the driver has not attached it yet.
pub fn attach(client: &Client, name: &str, node: &str, is_done: bool) {
    let attachment = attachment(name, node);
    let object = json!({"metadata": {"name": attachment}, "spec": {
        "attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": name},
    }});
    client.create(&ATTACHMENTS.all(), &object).unwrap();
    let status = json!({"status": {"attached": is_done}});
    client
        .merge(
            &ATTACHMENTS.named(&attachment).subresource("status"),
            &status,
        )
        .unwrap();
}
