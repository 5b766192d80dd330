//! `firstlight node reboot|shutdown` and `support` with a real API server: pods are moved away before a machine stops, and come back; no
//! secret of the cluster is in an archive. The test does the work of the kubelets.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use base::stop::Stop;
use common::kube_apiserver::{self, PATIENCE};
use kubernetes::client::{
    CONFIG_MAPS, Client, NODES, PODS, Resource, SECRETS, SERVICE_ACCOUNTS, Selector,
};
use kubernetes::machine_record::MachineRecord;
use serde_json::{Value, json};
use support::secrets::{self, Secrets};

use crate::doctor::{add_control_plane, add_node};
use crate::operator::{Cluster, kubelets_certificate};
use crate::program::Program;
use crate::setting::{MASTER_KEY, MASTER_SALT, set_private};

const POLICY: [&str; 4] = [
    "--policy",
    "config/attestationConfig",
    "--master-secret",
    "master-secret.json",
];
/// Set while a test runs itself with a `systemctl` that does not stop this machine.
const STAND_IN: &str = "FIRSTLIGHT_TEST_SYSTEMCTL";

/// Runs this test again with a `systemctl` that only writes its arguments down. Returns whether this is that run.
pub fn has_stand_in(test: &str) -> bool {
    if env::var_os(STAND_IN).is_some() {
        return true;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("systemctl");
    fs::write(
        &program,
        format!("#!/bin/sh\necho \"$@\" >> \"${STAND_IN}\"\n"),
    )
    .unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&program, executable).unwrap();
    let path = env::var("PATH").unwrap();
    let status = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env("PATH", format!("{}:{path}", folder.path().display()))
        .env(STAND_IN, folder.path().join("calls"))
        .status();
    assert!(status.unwrap().success());
    false
}

/// Returns what systemctl was told since the last look.
pub fn told() -> String {
    let path = env::var_os(STAND_IN).unwrap();
    let told = fs::read_to_string(&path).unwrap_or_default();
    let _ = fs::remove_file(path);
    told
}

/// The node `cp-0` and an API server.
struct Setup {
    node: Cluster,
    cluster: kube_apiserver::Cluster,
    client: Client,
}

impl Setup {
    fn new() -> Setup {
        let node = Cluster::new();
        let path = "files/var/lib/kubelet/pki/kubelet-server.crt";
        node.node.file(path, kubelets_certificate("cp-0"));
        let cluster = kube_apiserver::Cluster::start();
        let client = cluster.client(&Stop::new()).within(PATIENCE);
        client.wait_ready(&mut |_| {}).unwrap();
        set_private(
            &node
                .node
                .file("firstlight-admin.conf", cluster.kubeconfig()),
        );
        let account = json!({"metadata": {"name": "default"}});
        for namespace in ["default", "kube-system"] {
            let accounts = SERVICE_ACCOUNTS.in_namespace(namespace);
            client.create_if_absent(&accounts, &account).unwrap();
        }
        let labels =
            json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": null}}});
        for name in ["cp-0", "worker-0"] {
            add_node(&client, name, "10.0.0.1", 10250, true);
            client.merge(&NODES.named(name), &labels).unwrap();
        }
        Setup {
            node,
            cluster,
            client,
        }
    }

    /// Starts a command about the node.
    fn start(&self, arguments: &[&str]) -> Program {
        let arguments = [arguments, &POLICY].concat();
        Program::start(&mut self.node.node.firstlight(&arguments))
    }

    /// Adds a pod of a ReplicaSet, a DaemonSet or nobody.
    fn pod(&self, name: &str, owner: &str) {
        let mut pod = json!({
            "metadata": {"name": name},
            "spec": {"nodeName": "cp-0", "terminationGracePeriodSeconds": 0, "containers": [{"name": "a", "image": "a"}]},
        });
        if !owner.is_empty() {
            let owner = json!({"apiVersion": "apps/v1", "kind": owner, "name": "a", "uid": "1", "controller": true});
            pod["metadata"]["ownerReferences"] = json!([owner]);
        }
        self.client
            .create(&PODS.in_namespace("default"), &pod)
            .unwrap();
    }

    fn pods(&self) -> Vec<String> {
        let pods = PODS.in_namespace("default");
        let list = self.client.list(&pods, &Selector::default()).unwrap();
        let name = |pod: &Value| pod["metadata"]["name"].as_str().unwrap().to_owned();
        list.items.iter().map(name).collect()
    }

    fn is_cordoned(&self) -> bool {
        let node = self.client.get(&NODES.named("cp-0")).unwrap();
        node["spec"]["unschedulable"] == true
    }

    fn boots_again(&self, number: u32) {
        let status = json!({"status": {"nodeInfo": {"bootID": format!("boot-{number}")}}});
        let node = NODES.named("cp-0").subresource("status");
        self.client.merge(&node, &status).unwrap();
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn pods_are_moved_away_before_a_machine_stops_and_come_back_after_a_reboot() {
    let name = "absence::pods_are_moved_away_before_a_machine_stops_and_come_back_after_a_reboot";
    if !has_stand_in(name) {
        return;
    }
    let mut setup = Setup::new();
    setup.pod("web", "ReplicaSet");
    setup.pod("agent", "DaemonSet");
    let mut reboot = setup.start(&["node", "reboot", "cp-0"]);
    reboot.expect("cp-0: its pods are moved away");
    reboot.expect("cp-0: restarts");
    assert_eq!(told(), "reboot --no-block\n");
    assert_eq!(setup.pods(), ["agent"]);
    assert!(setup.is_cordoned());
    setup.boots_again(1);
    reboot.expect("cp-0: is back, and takes pods");
    assert!(reboot.exit().success() && !setup.is_cordoned());

    // a pod that nobody makes again
    setup.pod("own", "");
    let mut reboot = setup.start(&["node", "reboot", "cp-0"]);
    reboot.expect("no controller makes it again elsewhere");
    assert_eq!(reboot.exit().code(), Some(1));
    assert!(told().is_empty() && !setup.is_cordoned());
    let mut skips = setup.start(&["node", "reboot", "cp-0", "--skip-drain"]);
    assert!(skips.exit().success(), "{}", skips.output());
    assert_eq!(told(), "reboot --no-block\n");

    let mut shutdown = setup.start(&["node", "shutdown", "cp-0", "--delete-unmanaged-pods"]);
    shutdown.expect("cp-0: takes no pods until kubectl uncordon cp-0");
    assert!(shutdown.exit().success() && setup.is_cordoned());
    assert_eq!(told(), "poweroff --no-block\n");
    assert_eq!(setup.pods(), ["agent"]);

    // the node answers, and the API server does not
    setup.cluster.kill_api_server();
    let mut reboot = setup.start(&["node", "reboot", "cp-0"]);
    reboot.expect("pods stay where they are: ");
    assert!(reboot.exit().success(), "{}", reboot.output());
    assert_eq!(told(), "reboot --no-block\n");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_control_plane_does_not_stop_while_etcd_needs_it_unless_the_operator_says_so() {
    let name =
        "absence::a_control_plane_does_not_stop_while_etcd_needs_it_unless_the_operator_says_so";
    if !has_stand_in(name) {
        return;
    }
    let setup = Setup::new();
    let host = setup.node.node.host(2).to_string();
    add_control_plane(&setup.client, &setup.cluster, &host);
    let mut reboot = setup.start(&["node", "reboot", "cp-0"]);
    reboot.expect("etcd has 1 member, and loses its majority");
    reboot.expect("only after `firstlight recover`");
    assert_eq!(reboot.exit().code(), Some(2), "{}", reboot.output());
    assert!(told().is_empty() && !setup.is_cordoned());

    let mut agreed = setup.start(&["node", "shutdown", "cp-0", "--yes"]);
    assert!(agreed.exit().success(), "{}", agreed.output());
    assert_eq!(told(), "poweroff --no-block\n");

    let label = json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}});
    let other = NODES.named("worker-0");
    setup.client.merge(&other, &label).unwrap();
    let fails = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let status = other.subresource("status");
    setup.client.merge(&status, &fails).unwrap();
    let mut reboot = setup.start(&["node", "reboot", "cp-0", "--yes"]);
    reboot.expect("the control plane worker-0 is not Ready");
    assert_eq!(reboot.exit().code(), Some(1));
    assert!(told().is_empty());
}

/// Writes the secrets of a node and of its cluster where they are, and returns them.
fn plant(setup: &Setup) -> Secrets {
    let mut all = Secrets::default();
    let mut secret = |name: &str, seed: u8| -> String {
        let text = format!(
            "{name}-{}",
            String::from(char::from(b'a' + seed)).repeat(40)
        );
        all.add(name, text.as_bytes());
        text
    };
    let file = |path: &str, content: &str| setup.node.node.file(path, content);
    for (number, path) in [
        "files/etc/kubernetes/pki/ca.key",
        "files/etc/kubernetes/pki/etcd/ca.key",
        "files/etc/kubernetes/pki/front-proxy-ca.key",
        "files/etc/kubernetes/pki/sa.key",
        "files/etc/kubernetes/firstlight/wrapping-key",
        "files/etc/kubernetes/bootstrap-kubelet.conf",
        "files/var/lib/kubelet/pki/kubelet-client-current.pem",
        "mount/ssh/ssh_host_ed25519_key",
        "mount/constellation/disk-key",
        "mount/firstlight/files/registry.json",
    ]
    .iter()
    .enumerate()
    {
        file(path, &secret(path, number as u8));
    }
    let create = |resource: &Resource, object: Value| {
        let collection = resource.in_namespace("kube-system");
        setup.client.create(&collection, &object).unwrap();
    };
    for (number, name) in [
        "constellation-mastersecret",
        "bootstrap-token-abcdef",
        "join-node-files",
    ]
    .iter()
    .enumerate()
    {
        let data = json!({"data": secret(name, 11 + number as u8)});
        create(
            &SECRETS,
            json!({"metadata": {"name": name}, "stringData": data}),
        );
    }
    let record = MachineRecord {
        name: "join-node-worker-9".into(),
        node: "worker-9".into(),
        ..MachineRecord::default()
    };
    let mut record = record.to_object();
    record["data"]["other"] = secret("another field of a record", 15).into();
    create(&CONFIG_MAPS, record);
    let data = json!({"data": secret("a ConfigMap", 16)});
    create(
        &CONFIG_MAPS,
        json!({"metadata": {"name": "mine"}, "data": data}),
    );
    let environment =
        json!([{"name": "PASSWORD", "value": secret("the environment of a pod", 17)}]);
    let annotations = json!({"a": secret("an annotation", 18)});
    let pod = json!({
        "metadata": {"name": "plugin", "annotations": annotations},
        "spec": {"containers": [{"name": "a", "image": "a", "env": environment, "args": [secret("an argument", 19)]}]},
    });
    create(&PODS, pod);
    let annotations =
        json!({"metadata": {"annotations": {"a": secret("an annotation of a Node", 20)}}});
    setup
        .client
        .merge(&NODES.named("cp-0"), &annotations)
        .unwrap();
    all.add("master secret", &MASTER_KEY);
    all.add("salt", &MASTER_SALT);
    all
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn an_archive_has_objects_of_the_api_server_and_none_of_the_clusters_secrets() {
    let mut setup = Setup::new();
    let secrets = plant(&setup);
    let (code, _, errors) = setup.node.run(&["support", "cp-0", "--file", "one.tar.gz"]);
    assert_eq!(code, 0, "{errors}");
    let folder = setup.node.node.path("facts");
    let tar = Command::new("tar")
        .args(["-xzf", "one.tar.gz", "--one-top-level=facts"])
        .current_dir(setup.node.node.path("."))
        .status();
    assert!(tar.unwrap().success());
    let fact = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    for (name, part) in [
        ("kubernetes/nodes", "\"cp-0\""),
        ("kubernetes/pods", "\"plugin\""),
        ("kubernetes/records", "\"worker-9\""),
        ("cp-0/disks", "Filesystem"),
    ] {
        assert!(fact(name).contains(part), "{name}: {}", fact(name));
    }
    assert!(folder.join("kubernetes/events-default").exists());
    let mut searched = 0;
    search(&folder, &secrets, &mut searched);
    assert!(searched > 25, "{searched} files");

    setup.cluster.kill_api_server();
    let (code, _, errors) = setup.node.run(&["support", "cp-0", "--file", "two.tar.gz"]);
    assert_eq!(code, 0, "{errors}");
    let why = Command::new("tar")
        .args(["-xzOf", "two.tar.gz", "kubernetes/no-answer"])
        .current_dir(setup.node.node.path("."))
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&why.stdout).contains("127.0.0.1"),
        "{why:?}"
    );
}

fn search(folder: &Path, secrets: &Secrets, searched: &mut usize) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            search(&path, secrets, searched);
            continue;
        }
        *searched += 1;
        let hits = secrets.find(&fs::read(&path).unwrap(), 0, &path.display().to_string());
        assert!(hits.is_empty(), "{}", secrets::list(&hits));
    }
}
