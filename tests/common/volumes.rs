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

/// A driver of Constellation: the name of its CSIDriver, and its account.
pub type OldDriver = (&'static str, &'static str);
pub const CINDER: OldDriver = ("cinder.csi.confidential.cloud", "csi-cinder-node-sa");
pub const AWS: OldDriver = ("aws.csi.confidential.cloud", "ebs-csi-node-sa");

/// Creates the CSIDriver of this driver.
pub fn add_csi_driver(client: &Client, (name, _): OldDriver) {
    let driver = json!({"metadata": {"name": name}, "spec": {"attachRequired": true}});
    client.create(&CSI_DRIVERS.all(), &driver).unwrap();
}

/// Attaches a volume of this driver, in an attachment with the name `VOLUME-NODE`.
pub fn attach_to(client: &Client, driver: OldDriver, volume: &str, node: &str, is_done: bool) {
    let name = format!("{volume}-{node}");
    let object = json!({"metadata": {"name": name}, "spec": {
        "attacher": driver.0, "nodeName": node, "source": {"persistentVolumeName": volume},
    }});
    client.create(&ATTACHMENTS.all(), &object).unwrap();
    let status = json!({"status": {"attached": is_done}});
    let at = ATTACHMENTS.named(&name).subresource("status");
    client.merge(&at, &status).unwrap();
}

/// Creates a pod of this account as the DaemonSet controller and the kubelet do: on the network of its host, or with
/// this address.
pub fn add_driver(client: &Client, driver: OldDriver, node: &str, address: Option<&str>) {
    let name = format!("{}-{node}", driver.1);
    let account = ("kube-system", driver.1);
    add_client(
        client,
        account,
        &name,
        node,
        Some("DaemonSet"),
        address,
        &[],
    );
}

/// Creates a pod with an owner of this kind and these arguments.
pub fn add_client(
    client: &Client,
    (namespace, account): (&str, &str),
    name: &str,
    node: &str,
    owner: Option<&str>,
    address: Option<&str>,
    arguments: &[&str],
) {
    for (at, object) in [
        (NAMESPACES.all(), namespace),
        (SERVICE_ACCOUNTS.in_namespace(namespace), account),
    ] {
        let object = json!({"metadata": {"name": object}});
        client.create_if_absent(&at, &object).unwrap();
    }
    let owners: Vec<_> = owner
        .iter()
        .map(|kind| json!({"apiVersion": "apps/v1", "kind": kind, "name": "a", "uid": "1", "controller": true}))
        .collect();
    let pod = json!({"metadata": {"name": name, "ownerReferences": owners}, "spec": {
        "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false, "hostNetwork": address.is_none(),
        "containers": [{"name": "a", "image": "a", "args": arguments}],
    }});
    let pods = PODS.in_namespace(namespace);
    client.create(&pods, &pod).unwrap();
    if let Some(ip) = address {
        let status = json!({"status": {"podIP": ip, "podIPs": [{"ip": ip}]}});
        let at = pods.named(name).subresource("status");
        client.merge(&at, &status).unwrap();
    }
}
