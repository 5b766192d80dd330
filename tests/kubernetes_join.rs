//! Tests that a real kubeadm passes the checks of a join with only our files, against a real API server (`make kubeadm`).

use common::kube_apiserver;

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use base::stop::Stop;
use kube_apiserver::Cluster;
use kubernetes::client::{CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client, SECRETS};
use kubernetes::kubeadm::{
    DISCOVERY, JoinSettings, JoinStart, NodeSettings, Trust, discovery, join_configuration,
};
use kubernetes::parameters::NodeName;
use serde_json::json;
use zeroize::Zeroizing;

const TOKEN: &str = "abcdef.0123456789abcdef";
/// The group of kubeadm's own bootstrap tokens.
const GROUP: &str = "system:bootstrappers:kubeadm:default-node-token";

/// Creates a token that may only authenticate, and the objects that kubeadm reads with it.
fn prepare(client: &Client) {
    let token = json!({
        "metadata": {"name": "bootstrap-token-abcdef"},
        "type": "bootstrap.kubernetes.io/token",
        "stringData": {
            "token-id": "abcdef",
            "token-secret": "0123456789abcdef",
            "usage-bootstrap-authentication": "true",
            "auth-extra-groups": GROUP,
        },
    });
    client
        .create(&SECRETS.in_namespace("kube-system"), &token)
        .unwrap();
    // a kubeadm takes clusters of its own minor version and of the one before
    let version = Command::new(kubeadm())
        .args(["version", "-o", "short"])
        .output();
    let version = String::from_utf8(version.unwrap().stdout).unwrap();
    let cluster = json!({
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "ClusterConfiguration",
        "kubernetesVersion": version.trim(),
    });
    let cluster = cluster.to_string();
    let kubelet =
        r#"{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}"#;
    for (name, data) in [
        ("kubeadm-config", json!({"ClusterConfiguration": cluster})),
        ("kubelet-config", json!({"kubelet": kubelet})),
    ] {
        let map = json!({"metadata": {"name": name}, "data": data});
        client
            .create(&CONFIG_MAPS.in_namespace("kube-system"), &map)
            .unwrap();
    }
    let role = json!({
        "metadata": {"name": "joining"},
        "rules": [{"apiGroups": [""], "resources": ["configmaps", "nodes"], "verbs": ["get"]}],
    });
    client.create(&CLUSTER_ROLES.all(), &role).unwrap();
    let binding = json!({
        "metadata": {"name": "joining"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "joining"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": GROUP}],
    });
    client
        .create(&CLUSTER_ROLE_BINDINGS.all(), &binding)
        .unwrap();
}

/// Returns the path of a kubeadm.
fn kubeadm() -> OsString {
    std::env::var_os("FIRSTLIGHT_KUBEADM").expect("FIRSTLIGHT_KUBEADM must name a kubeadm")
}

/// Runs `kubeadm join phase preflight` with our files, and returns its output.
fn preflight(
    folder: &Path,
    api_server: &str,
    authority: &str,
    token: &str,
) -> Result<String, String> {
    let ticket = JoinSettings {
        api_server: api_server.into(),
        token: Zeroizing::new(token.into()),
        trust: Trust::Authority(authority.into()),
        control_plane: false,
        start: JoinStart::Beginning,
    };
    let node = NodeSettings {
        name: NodeName::from_machine("Worker_1").unwrap(),
        ip: "127.0.0.1".parse().unwrap(),
        provider_id: String::new(),
        external_cloud_provider: false,
        kubeadm_timeout: None,
    };
    let (known, join) = (folder.join("cluster.conf"), folder.join("join.yaml"));
    fs::write(&known, discovery(api_server, authority)).unwrap();
    let text = join_configuration(&ticket, &node).replace(DISCOVERY, known.to_str().unwrap());
    // By default, kubeadm waits five minutes for a server that it does not trust.
    let text = text.replacen('{', r#"{"timeouts": {"discovery": "5s"},"#, 1);
    fs::write(&join, text).unwrap();
    let mut command = Command::new(kubeadm());
    // This machine is not a node. Only the discovery of the cluster is tested.
    command
        .args([
            "join",
            "phase",
            "preflight",
            "-v=1",
            "--ignore-preflight-errors=all",
            "--config",
        ])
        .arg(&join);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.success() {
        Ok(said)
    } else {
        Err(said)
    }
}

#[test]
#[ignore = "needs a kubeadm and a kube-apiserver: make kubeadm"]
fn kubeadm_knows_the_api_server_by_the_clusters_ca_alone_and_no_other() {
    let cluster = Cluster::shared();
    prepare(&cluster.client(&Stop::new()));
    let folder = tempfile::tempdir().unwrap();
    let (api_server, authority) = (
        cluster.server(),
        fs::read_to_string(cluster.path("ca.crt")).unwrap(),
    );
    let api_server = api_server.strip_prefix("https://").unwrap();
    let preflight =
        |authority: &str, token: &str| preflight(folder.path(), api_server, authority, token);

    // No object of the cluster is public, and nothing is signed with the token.
    let said = preflight(&authority, TOKEN).unwrap_or_else(|said| panic!("{said}"));
    assert!(
        said.contains("the TLS cert is valid so proceeding") && said.contains("kubeadm-config"),
        "{said}"
    );
    assert!(!said.contains(TOKEN), "{said}");
    let said = preflight(&authority, "abcdef.ffffffffffffffff").unwrap_err();
    assert!(said.contains("Unauthorized"), "{said}");
    let other = rcgen::generate_simple_self_signed(["kubernetes".to_owned()])
        .unwrap()
        .cert
        .pem();
    let said = preflight(&other, TOKEN).unwrap_err();
    assert!(
        said.contains("couldn't validate the identity of the API Server"),
        "{said}"
    );
    println!("{said}");
}
