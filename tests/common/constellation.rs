//! A cluster of Constellation in a real API server: the objects that its bootstrapper, its command, its charts and its node operator make,
//! in their forms.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::kube_apiserver::PATIENCE;
use base::stop::Stop;
use base::time;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{
    CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, CSI_DRIVERS, Client, DAEMON_SETS,
    DEPLOYMENTS, NODE_VERSIONS, NODES, PENDING_NODES, Resource, SCALING_GROUPS, SECRETS,
    SERVICE_ACCOUNTS, SERVICES, Selector,
};
use kubernetes::constellation::node_version;
use kubernetes::machine_record::{self, MachineRecord};
use serde_json::{Value, json};

/// The attestation policy in `join-config`, as Constellation's command writes it.
pub const POLICY: &str = r#"{"measurements":{"11":{"expected":"db794e9bc200e22550514674ca3494119b00b2db74ffe2f7c970bf6bf5bc1cae","warnOnly":false},"12":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false},"13":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false},"4":{"expected":"5198fd549fc9f44a49168b788f58e366af624866647dbe7e917388a0b1673c1d","warnOnly":false},"8":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false},"9":{"expected":"2dee5d9c597a9098821e73214b9347b8e5e448c09ebd3375143855be72e33058","warnOnly":false}}}"#;
/// The image of the nodes, as the cloud names it.
pub const IMAGE: &str = "ami-0c0ffee0000000001";
/// PCR 4 of every other image begins with these digits.
const NEW_PCR4: &str = "44444444";
/// The group of machines of each role.
const GROUPS: [(&str, &str); 2] = [("ControlPlane", "plane-group"), ("Worker", "worker-group")];
/// The ConfigMap with the components of this version.
const COMPONENTS: &str = "k8s-components-sha256-00";
const NAMESPACE: &str = "kube-system";

/// A form of the objects of Constellation's charts. Rendering the charts of v2.16.0 to v2.24.0 and of the last state of the repository
/// gives four forms of the objects that a move reads.
pub struct Release {
    /// The last release of this form.
    pub name: &'static str,
    /// The index in [`Platform::driver_versions`].
    driver: usize,
    /// Whether the join service can read the key of Google's service account (since v2.22.0).
    has_google_key: bool,
    /// Whether the join service certifies SSH host keys (since v2.24.0).
    certifies_hosts: bool,
}

const fn release(name: &'static str, driver: usize, since: usize) -> Release {
    Release {
        name,
        driver,
        has_google_key: since > 0,
        certifies_hosts: since > 1,
    }
}

/// v2.16.0 to v2.16.4, v2.17.0 to v2.21.1, v2.22.0 to v2.23.1, and v2.24.0.
pub const RELEASES: [Release; 4] = [
    release("v2.16.4", 0, 0),
    release("v2.21.1", 1, 0),
    release("v2.23.1", 1, 1),
    release("v2.24.0", 2, 2),
];

/// A cloud, and the CSI driver of its charts.
pub struct Platform {
    /// The cloud's name, as Constellation's chart writes it.
    pub cloud: &'static str,
    /// Whether the node operator knows the cloud.
    pub has_operator: bool,
    variant: &'static str,
    /// The DaemonSet of the driver.
    pub driver: &'static str,
    container: &'static str,
    image: &'static str,
    account: &'static str,
    /// The name of the CSIDriver.
    csi_driver: &'static str,
    driver_versions: [&'static str; 3],
    /// From which of these versions on the driver has no argument `--kms-addr`.
    without_address_since: usize,
}

pub const PLATFORMS: [Platform; 4] = [
    Platform {
        cloud: "AWS",
        has_operator: true,
        variant: "aws-nitro-tpm",
        driver: "ebs-csi-node",
        container: "ebs-plugin",
        image: "aws-csi-driver",
        account: "ebs-csi-node-sa",
        csi_driver: "aws.csi.confidential.cloud",
        driver_versions: ["v1.1.0", "v1.2.0", "v1.3.0"],
        without_address_since: 1,
    },
    Platform {
        cloud: "Azure",
        has_operator: true,
        variant: "azure-trustedlaunch",
        driver: "csi-azuredisk-node",
        container: "azuredisk",
        image: "azure-csi-driver",
        account: "csi-azuredisk-node-sa",
        csi_driver: "azuredisk.csi.confidential.cloud",
        driver_versions: ["v1.3.0", "v1.4.0", "v1.5.0"],
        without_address_since: 3,
    },
    Platform {
        cloud: "GCP",
        has_operator: true,
        variant: "gcp-sev-es",
        driver: "csi-gce-pd-node",
        container: "gce-pd-driver",
        image: "gcp-csi-driver",
        account: "csi-gce-pd-node-sa",
        csi_driver: "gcp.csi.confidential.cloud",
        driver_versions: ["v1.3.0", "v1.4.0", "v1.5.0"],
        without_address_since: 3,
    },
    Platform {
        cloud: "OpenStack",
        has_operator: false,
        variant: "qemu-vtpm",
        driver: "openstack-cinder-csi-nodeplugin",
        container: "cinder-csi-plugin",
        image: "cinder-csi-plugin",
        account: "csi-cinder-node-sa",
        csi_driver: "cinder.csi.confidential.cloud",
        driver_versions: ["v1.0.2"; 3],
        without_address_since: 3,
    },
];
const DEFINITIONS: Resource =
    Resource::cluster("apiextensions.k8s.io", "v1", "customresourcedefinitions");

/// Defines the custom resources of the node operator's chart, with their fields.
pub fn define(client: &Client) {
    let text = json!({"type": "string"});
    let whole = json!({"type": "integer", "format": "int32"});
    let yes = json!({"type": "boolean"});
    let moment = json!({"type": "string", "format": "date-time"});
    let objects = json!({"type": "array", "items": {"type": "object", "properties": {
        "apiVersion": text, "fieldPath": text, "kind": text, "name": text, "namespace": text, "resourceVersion": text, "uid": text,
    }}});
    let conditions = json!({"type": "array", "items": {
        "type": "object", "required": ["lastTransitionTime", "message", "reason", "status", "type"],
        "properties": {"lastTransitionTime": moment, "message": text, "observedGeneration": {"type": "integer"}, "reason": text,
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]}, "type": text},
    }});
    let lists = [
        "outdated",
        "upToDate",
        "donors",
        "heirs",
        "mints",
        "awaitingAnnotation",
        "pending",
        "obsolete",
        "invalid",
    ];
    let mut of_version: serde_json::Map<String, Value> = lists
        .iter()
        .map(|name| ((*name).to_owned(), objects.clone()))
        .collect();
    of_version.insert("budget".into(), whole.clone());
    of_version.insert("conditions".into(), conditions.clone());
    of_version.insert("activeclusterversionupgrade".into(), yes.clone());
    let kinds = [
        (
            "NodeVersion",
            json!({"image": text, "imageVersion": text, "kubernetesComponentsReference": text, "kubernetesClusterVersion": text}),
            json!({"type": "object", "properties": of_version, "required": ["budget", "conditions", "activeclusterversionupgrade"]}),
        ),
        (
            "JoiningNode",
            json!({"name": text, "componentsreference": text, "iscontrolplane": yes, "deadline": moment}),
            json!({"type": "object"}),
        ),
        (
            "ScalingGroup",
            json!({"nodeImage": text, "groupId": text, "autoscalerGroupName": text, "autoscaling": yes, "min": whole, "max": whole,
                "role": {"type": "string", "enum": ["Worker", "ControlPlane"]}}),
            json!({"type": "object", "properties": {"imageReference": text, "conditions": conditions}, "required": ["conditions"]}),
        ),
        (
            "PendingNode",
            json!({"providerID": text, "groupID": text, "nodeName": text, "goal": {"type": "string", "enum": ["Join", "Leave"]},
                "deadline": moment}),
            json!({"type": "object", "properties": {"cspState": text, "reachedGoal": yes}}),
        ),
    ];
    for (kind, spec, status) in kinds {
        let (singular, plural) = (kind.to_lowercase(), format!("{}s", kind.to_lowercase()));
        let schema = json!({"openAPIV3Schema": {"type": "object", "properties": {
            "apiVersion": text, "kind": text, "metadata": {"type": "object"},
            "spec": {"type": "object", "properties": spec}, "status": status,
        }}});
        let definition = json!({"metadata": {"name": format!("{plural}.update.edgeless.systems")}, "spec": {
            "group": "update.edgeless.systems", "scope": "Cluster",
            "names": {"kind": kind, "listKind": format!("{kind}List"), "plural": plural, "singular": singular},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": schema, "subresources": {"status": {}}}],
        }});
        client.create(&DEFINITIONS.all(), &definition).unwrap();
    }
    // Cilium's own, as far as the key service reads it
    let any = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let cilium = json!({"metadata": {"name": "ciliumnodes.cilium.io"}, "spec": {
        "group": "cilium.io", "scope": "Cluster", "names": {"kind": "CiliumNode", "plural": "ciliumnodes"},
        "versions": [{"name": "v2", "served": true, "storage": true, "schema": any}],
    }});
    client.create(&DEFINITIONS.all(), &cilium).unwrap();
    let cilium_nodes = Resource::cluster("cilium.io", "v2", "ciliumnodes");
    let end = Instant::now() + PATIENCE;
    // the server serves a new resource only some time after it accepted its definition
    for resource in [NODE_VERSIONS, SCALING_GROUPS, PENDING_NODES, cilium_nodes] {
        while let Err(error) = client.list(&resource.all(), &Selector::default()) {
            assert!(Instant::now() < end, "{error}");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Makes the objects of a cluster with this version of Kubernetes, a master secret, its salt and a measurement salt of zeros. A
/// cluster in a cloud that the node operator does not know has no `groups`.
pub fn make(client: &Client, version: &str, in_known_cloud: bool) {
    let in_kube_system = |resource: Resource| resource.in_namespace(NAMESPACE);
    let zeros = BASE64_STANDARD.encode([0; 32]);
    let maps = in_kube_system(CONFIG_MAPS);
    for map in [
        json!({"metadata": {"name": "join-config"}, "data": {"attestationConfig": POLICY}, "binaryData": {"measurementSalt": zeros}}),
        json!({"metadata": {"name": "internal-config"}}),
        json!({"metadata": {"name": "cilium-config"}, "data": {"kube-proxy-replacement": "strict", "enable-bpf-masquerade": "true",
            "enable-wireguard": "true", "encrypt-node": "true"}}),
        json!({"metadata": {"name": "kubeadm-config"}, "data": {"ClusterConfiguration": cluster_configuration(version)}}),
        json!({"metadata": {"name": COMPONENTS}, "immutable": true, "data": {"components": "[]", "cluster-version": version}}),
    ] {
        client.create(&maps, &map).unwrap();
    }
    let secret = json!({"metadata": {"name": "constellation-mastersecret"}, "type": "Opaque", "immutable": true,
        "data": {"mastersecret": zeros, "salt": zeros}});
    client.create(&in_kube_system(SECRETS), &secret).unwrap();
    for (account, rules) in [
        (
            "join-service",
            json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "list", "create", "update"]}]),
        ),
        (
            "key-service",
            json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]),
        ),
    ] {
        let named = json!({"name": account});
        client
            .create(
                &in_kube_system(SERVICE_ACCOUNTS),
                &json!({"metadata": named}),
            )
            .unwrap();
        client
            .create(
                &CLUSTER_ROLES.all(),
                &json!({"metadata": named, "rules": rules}),
            )
            .unwrap();
        let binding = json!({"metadata": named,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": account},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]});
        client
            .create(&CLUSTER_ROLE_BINDINGS.all(), &binding)
            .unwrap();
    }
    let services = in_kube_system(SERVICES);
    for (name, kind, port) in [
        (
            "join-service",
            "NodePort",
            json!({"name": "grpc", "protocol": "TCP", "port": 9090, "targetPort": 9090, "nodePort": 30090}),
        ),
        (
            "key-service",
            "ClusterIP",
            json!({"name": "grpc", "protocol": "TCP", "port": 9000, "targetPort": 9000}),
        ),
    ] {
        let service = json!({"metadata": {"name": name}, "spec": {"type": kind, "selector": {"k8s-app": name}, "ports": [port]}});
        client.create(&services, &service).unwrap();
    }
    let sets = in_kube_system(DAEMON_SETS);
    for set in [
        join_service(&RELEASES[3], "QEMU", "qemu-vtpm"),
        key_service(),
        daemon("cilium", "cilium", json!([])),
        csi_driver(&RELEASES[3], &PLATFORMS[0]),
        daemon("verification-service", "verification-service", json!([])),
    ] {
        client.create(&sets, &set).unwrap();
    }
    let deployments = in_kube_system(DEPLOYMENTS);
    client.create(&deployments, &node_operator()).unwrap();
    let image = if in_known_cloud {
        IMAGE
    } else {
        "unsupportedCSP"
    };
    for (role, group) in GROUPS.iter().filter(|_| in_known_cloud) {
        let group = json!({"apiVersion": "update.edgeless.systems/v1alpha1", "kind": "ScalingGroup", "metadata": {"name": group},
            "spec": {"nodeImage": node_version::NAME, "groupId": group, "role": role}});
        client.create(&SCALING_GROUPS.all(), &group).unwrap();
    }
    let node_version = json!({"apiVersion": "update.edgeless.systems/v1alpha1", "kind": "NodeVersion",
        "metadata": {"name": node_version::NAME},
        "spec": {"image": image, "imageVersion": "v2.16.4", "kubernetesComponentsReference": COMPONENTS, "kubernetesClusterVersion": version}});
    client.create(&NODE_VERSIONS.all(), &node_version).unwrap();
    set_status(client, image, false);
    for (name, is_control_plane) in [("plane-0", true), ("worker-0", false)] {
        add_node(
            client,
            name,
            is_control_plane,
            if in_known_cloud { IMAGE } else { "" },
            version,
        );
    }
}

/// Replaces the join service and the CSI driver of [`make`] by those of this release in this cloud.
pub fn install(client: &Client, release: &Release, platform: &Platform) {
    let sets = DAEMON_SETS.in_namespace(NAMESPACE);
    for name in ["join-service", PLATFORMS[0].driver, platform.driver] {
        if client.find(&sets.named(name)).unwrap().is_some() {
            client.delete(&sets.named(name)).unwrap();
        }
    }
    let join_service = join_service(release, platform.cloud, platform.variant);
    client.create(&sets, &join_service).unwrap();
    client
        .create(&sets, &csi_driver(release, platform))
        .unwrap();
    let driver = json!({"metadata": {"name": platform.csi_driver}, "spec": {"attachRequired": true, "podInfoOnMount": true}});
    client
        .create_if_absent(&CSI_DRIVERS.all(), &driver)
        .unwrap();
}

/// As kubeadm keeps it, in the form of Constellation's bootstrapper.
fn cluster_configuration(version: &str) -> String {
    format!(
        "apiServer:\n  certSANs:\n  - 127.0.0.1\n  extraArgs:\n    audit-policy-file: /etc/kubernetes/audit-policy.yaml\n    \
         kubelet-certificate-authority: /etc/kubernetes/pki/ca.crt\n    profiling: \"false\"\napiVersion: kubeadm.k8s.io/v1beta3\n\
         clusterName: constell-1a2b3c4d\ncontrolPlaneEndpoint: 203.0.113.7:6443\nkind: ClusterConfiguration\nkubernetesVersion: {version}\n"
    )
}

/// A DaemonSet whose pods have these containers besides one with the name.
fn daemon(name: &str, image: &str, more: Value) -> Value {
    let image = format!("ghcr.io/edgelesssys/constellation/{image}:v2.16.4");
    let mut containers = vec![json!({"name": name, "image": image})];
    containers.extend(more.as_array().into_iter().flatten().cloned());
    let labels = json!({"k8s-app": name});
    json!({"metadata": {"name": name, "labels": labels}, "spec": {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}},
    }})
}

/// A DaemonSet of a control plane, in the form of Constellation's chart.
fn on_control_planes(name: &str, arguments: Value, mounts: Value, volumes: Value) -> Value {
    let mut set = daemon(name, name, json!([]));
    let labels =
        json!({"component": name, "k8s-app": name, "kubernetes.io/cluster-service": "true"});
    set["metadata"]["labels"] = labels;
    let pod = &mut set["spec"]["template"]["spec"];
    pod["priorityClassName"] = "system-cluster-critical".into();
    pod["serviceAccountName"] = name.into();
    pod["nodeSelector"] = json!({"node-role.kubernetes.io/control-plane": ""});
    pod["tolerations"] = json!([
        {"key": "CriticalAddonsOnly", "operator": "Exists"},
        {"effect": "NoSchedule", "key": "node-role.kubernetes.io/master", "operator": "Exists"},
        {"effect": "NoSchedule", "key": "node-role.kubernetes.io/control-plane", "operator": "Exists"},
        {"effect": "NoExecute", "operator": "Exists"},
        {"effect": "NoSchedule", "operator": "Exists"},
    ]);
    pod["containers"][0]["args"] = arguments;
    pod["containers"][0]["volumeMounts"] = mounts;
    pod["volumes"] = volumes;
    set
}

fn join_service(release: &Release, cloud: &str, variant: &str) -> Value {
    let arguments = json!([
        format!("--cloud-provider={cloud}"),
        "--key-service-endpoint=key-service.kube-system:9000",
        format!("--attestation-variant={variant}"),
    ]);
    let mut mounts = vec![
        json!({"mountPath": "/var/config", "name": "config", "readOnly": true}),
        json!({"mountPath": "/etc/kubernetes", "name": "kubeadm", "readOnly": true}),
    ];
    let mut volumes = vec![
        json!({"name": "config", "projected": {"sources": [{"configMap": {"name": "join-config"}}, {"configMap": {"name": "internal-config"}}]}}),
        json!({"name": "kubeadm", "hostPath": {"path": "/etc/kubernetes"}}),
    ];
    if release.has_google_key {
        mounts
            .push(json!({"mountPath": "/var/secrets/google", "name": "gcekey", "readOnly": true}));
        volumes.insert(
            0,
            json!({"name": "gcekey", "secret": {"secretName": "gcekey", "optional": true}}),
        );
    }
    if release.certifies_hosts {
        mounts.push(
            json!({"mountPath": "/var/kubeadm-config", "name": "kubeadm-config", "readOnly": true}),
        );
        mounts.push(json!({"mountPath": "/var/run/state/ssh", "name": "ssh"}));
        volumes.push(json!({"name": "kubeadm-config", "configMap": {"name": "kubeadm-config"}}));
        volumes.push(json!({"name": "ssh", "hostPath": {"path": "/var/run/state/ssh"}}));
    }
    let mut set = on_control_planes("join-service", arguments, mounts.into(), volumes.into());
    let container = &mut set["spec"]["template"]["spec"]["containers"][0];
    if release.has_google_key {
        container["env"] = json!([{"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/var/secrets/google/key.json"}]);
    }
    container["ports"] = json!([{"containerPort": 9090, "name": "tcp"}]);
    container["securityContext"] = json!({"privileged": true});
    set
}

fn key_service() -> Value {
    let mounts = json!([{"mountPath": "/var/config", "name": "config", "readOnly": true}]);
    let items =
        json!([{"key": "mastersecret", "path": "mastersecret"}, {"key": "salt", "path": "salt"}]);
    let volumes = json!([
        {"name": "config", "projected": {"sources": [{"secret": {"name": "constellation-mastersecret", "items": items}}]}},
    ]);
    on_control_planes("key-service", json!(["--port=9000"]), mounts, volumes)
}

fn csi_driver(release: &Release, platform: &Platform) -> Value {
    let mut arguments = vec!["--endpoint=$(CSI_ENDPOINT)", "--v=2"];
    // else the address of the key service is the program's default
    if release.driver < platform.without_address_since {
        arguments.push("--kms-addr=key-service.kube-system:9000");
    }
    let version = platform.driver_versions[release.driver];
    let image = format!(
        "ghcr.io/edgelesssys/constellation/{}:{version}@sha256:{:064}",
        platform.image, 0
    );
    let plugin = json!([{"name": platform.container, "image": image, "args": arguments}]);
    let mut set = daemon(platform.driver, "node-driver-registrar", plugin);
    let pod = &mut set["spec"]["template"]["spec"];
    if platform.has_operator {
        pod["serviceAccountName"] = platform.account.into();
    } else {
        // the chart of Cinder's driver uses the older field
        pod["serviceAccount"] = platform.account.into();
        pod["hostNetwork"] = true.into();
    }
    set
}

fn node_operator() -> Value {
    let labels = json!({"control-plane": "controller-manager"});
    let host = |name: &str, path: &str, kind: &str| json!({"name": name, "hostPath": {"path": path, "type": kind}});
    json!({"metadata": {"name": "constellation-operator-controller-manager"}, "spec": {
        "replicas": 1, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {
            "containers": [{
                "name": "manager", "image": "ghcr.io/edgelesssys/constellation/node-operator:v2.16.4", "command": ["/node-operator"],
                "volumeMounts": [
                    {"mountPath": "/etc/kubernetes/pki/etcd", "name": "etcd-certs"},
                    {"mountPath": "/etc/constellation-upgrade-agent.sock", "name": "upgrade-agent-socket", "readOnly": true},
                ],
            }],
            "volumes": [
                host("etcd-certs", "/etc/kubernetes/pki/etcd", "Directory"),
                host("upgrade-agent-socket", "/run/constellation-upgrade-agent.sock", "Socket"),
                host("usr-lib-os-release", "/usr/lib/os-release", "File"),
                host("etc-os-release", "/etc/os-release", "File"),
            ],
        }},
    }})
}

/// Registers a node. Without an image, no node operator has annotated it.
pub fn add_node(client: &Client, name: &str, is_control_plane: bool, image: &str, version: &str) {
    let mut node = json!({"metadata": {"name": name, "labels": {}, "annotations": {}}});
    if is_control_plane {
        node["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = "".into();
    }
    if !image.is_empty() {
        node["metadata"]["annotations"][node_version::IMAGE_ANNOTATION] = image.into();
    }
    client.create(&NODES.all(), &node).unwrap();
    let number = name.rsplit('-').next().and_then(|it| it.parse::<u8>().ok());
    let network = if is_control_plane {
        "192.0.2"
    } else {
        "198.51.100"
    };
    let address = format!("{network}.{}", number.unwrap_or(99));
    let status = json!({"status": {
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
            "lastHeartbeatTime": now(), "lastTransitionTime": now()}],
        "nodeInfo": {"kubeletVersion": version},
    }});
    client
        .merge(&NODES.named(name).subresource("status"), &status)
        .unwrap();
    if is_control_plane {
        make_known(client, name, &address);
    }
}

/// Says that a node is a control plane: as its API server does, and, in a cluster that has moved, as our join service does.
fn make_known(client: &Client, name: &str, address: &str) {
    let records = machine_record::of_nodes(client).unwrap();
    if records.iter().any(|record| record.control_plane) {
        let record = MachineRecord {
            name: machine_record::name_of_node(name),
            node: name.into(),
            control_plane: true,
            ..MachineRecord::default()
        };
        return machine_record::write_if_absent(client, &record).unwrap();
    }
    let slices = Resource::namespaced("discovery.k8s.io", "v1", "endpointslices");
    let slice = json!({
        "metadata": {"name": "kubernetes"}, "addressType": "IPv4",
        "endpoints": [{"addresses": [address]}], "ports": [{"name": "https", "port": 6443}],
    });
    client
        .create_if_absent(&slices.in_namespace("default"), &slice)
        .unwrap();
}

fn now() -> String {
    time::seconds(SystemTime::now())
}

/// Writes the status of NodeVersion and of the groups, as the node operator does.
fn set_status(client: &Client, image: &str, is_outdated: bool) {
    let condition = json!({"type": "Outdated", "status": if is_outdated { "True" } else { "False" }, "message": "",
        "reason": if is_outdated { "NodeVersionsOutOfDate" } else { "NodeVersionsUpToDate" }, "lastTransitionTime": now()});
    let status = json!({"status": {"budget": 1, "activeclusterversionupgrade": false, "conditions": [condition]}});
    client
        .merge(&node_version::place().subresource("status"), &status)
        .unwrap();
    for (_, group) in GROUPS {
        let status = json!({"status": {"imageReference": image, "conditions": []}});
        // a cloud that the node operator does not know has no groups
        let _ = client.merge(&SCALING_GROUPS.named(group).subresource("status"), &status);
    }
}

/// Does what Constellation's node operator does in a cloud that it knows, until the test stops it: it replaces each node that has another
/// image than NodeVersion by a new one, one after the other, control planes first.
pub fn play_node_operator(client: &Client, stop: &Stop) {
    let mut number = 0;
    while !stop.wait(Duration::from_millis(200)) {
        let version = client.get(&node_version::place()).unwrap();
        let image = version["spec"]["image"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let kubernetes = version["spec"]["kubernetesClusterVersion"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let nodes = client
            .list(&NODES.all(), &Selector::default())
            .unwrap()
            .items;
        let has_role = |node: &Value| {
            !node["metadata"]["labels"]["node-role.kubernetes.io/control-plane"].is_null()
        };
        let mut outdated: Vec<_> = nodes
            .iter()
            .filter(|node| node["metadata"]["annotations"][node_version::IMAGE_ANNOTATION] != image)
            .collect();
        outdated.sort_by_key(|node| !has_role(node));
        if !can_operator_run(client, &nodes) {
            continue;
        }
        let Some(old) = outdated.first() else {
            set_status(client, &image, false);
            continue;
        };
        set_status(client, &image, true);
        if !is_admitted(client, &image) {
            continue;
        }
        number += 1;
        let is_control_plane = has_role(old);
        let role = if is_control_plane { "plane" } else { "worker" };
        let name = format!("{role}-{image}-{number}");
        let pending = json!({"apiVersion": "update.edgeless.systems/v1alpha1", "kind": "PendingNode", "metadata": {"name": name},
            "spec": {"nodeName": name, "goal": "Join", "deadline": now()}});
        client.create(&PENDING_NODES.all(), &pending).unwrap();
        stop.wait(Duration::from_millis(300));
        add_node(client, &name, is_control_plane, &image, &kubernetes);
        client.delete(&PENDING_NODES.named(&name)).unwrap();
        client
            .delete(&NODES.named(old["metadata"]["name"].as_str().unwrap()))
            .unwrap();
    }
}

/// Returns whether the kubelet of each control plane would start the node operator's pod: nodes of Firstlight have no upgrade agent.
fn can_operator_run(client: &Client, nodes: &[Value]) -> bool {
    let at = DEPLOYMENTS
        .in_namespace(NAMESPACE)
        .named("constellation-operator-controller-manager");
    let volumes = client.get(&at).unwrap()["spec"]["template"]["spec"]["volumes"].clone();
    let needs_agent = volumes[1]["hostPath"]["type"] == "Socket";
    let has_agent = |node: &&Value| {
        let metadata = &node["metadata"];
        metadata["labels"]["node-role.kubernetes.io/control-plane"].is_null()
            || metadata["annotations"][node_version::IMAGE_ANNOTATION] == IMAGE
    };
    !needs_agent || nodes.iter().all(|node| has_agent(&node))
}

/// Returns whether the join service would admit a machine with this image.
fn is_admitted(client: &Client, image: &str) -> bool {
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named("join-config");
    let pcr4 = if image == IMAGE { "5198fd54" } else { NEW_PCR4 };
    let map = client.get(&at).unwrap();
    map["data"]["attestationConfig"]
        .as_str()
        .unwrap()
        .contains(pcr4)
}

/// Writes the files of Constellation's command into an empty folder.
pub fn write_workspace(folder: &Path, kubeconfig: &str) {
    let zeros = BASE64_STANDARD.encode([0; 32]);
    let digits = "0".repeat(64);
    for (name, content) in [
        ("constellation-admin.conf", kubeconfig.to_owned()),
        ("constellation-mastersecret.json", format!("{{\n\t\"key\": \"{zeros}\",\n\t\"salt\": \"{zeros}\"\n}}")),
        (
            "constellation-state.yaml",
            format!(
                "version: v1 # Schema version of this state file.\ninfrastructure:\n    uid: 1a2b3c4d\n    clusterEndpoint: 203.0.113.7\n\
                 clusterValues:\n    clusterID: 823267d1276b940d1f04b9fac150721f196bf1090e125684d4efd8416a691588\n    ownerID: \"\"\n    \
                 measurementSalt: \"{digits}\"\n"
            ),
        ),
        (
            "constellation-conf.yaml",
            "version: v4\nimage: v2.16.4\nname: constell\nkubernetesVersion: v1.31.13\nprovider:\n    qemu: {}\nattestation:\n    \
             qemuVTPM:\n        measurements:\n            4: {expected: aa, warnOnly: false}\n"
                .to_owned(),
        ),
    ] {
        let path = folder.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }
}
