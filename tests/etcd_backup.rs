//! A snapshot of etcd is restored under a real kube-apiserver by etcdutl, with the arguments that `bootstrapper restore-etcd` gives it
//! (`make kubernetes-api`). etcd and its tools are built from the same version.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use base::stop::Stop;
use bootstrapper::members::restore::changes::Changes;
use bootstrapper::members::restore::etcdutl_arguments;
use common::kube_apiserver::{Cluster, PATIENCE};
use kubernetes::client::{
    CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client, DAEMON_SETS, ROLE_BINDINGS, ROLES,
    Resource, VALIDATING_ADMISSION_POLICIES, VALIDATING_ADMISSION_POLICY_BINDINGS,
};
use serde_json::{Value, json};
use support::boot_image::run;
use support::foreign::fetched;

fn wait_ready(cluster: &Cluster) -> Client {
    let client = cluster.client(&Stop::new()).within(PATIENCE);
    client.wait_ready(&mut |_| {}).unwrap();
    client
}

fn version(object: &Value) -> u64 {
    let version = object["metadata"]["resourceVersion"].as_str();
    version.unwrap().parse().unwrap()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_backup_of_etcd_brings_back_the_objects_and_no_old_version() {
    let mut cluster = Cluster::start();
    let client = wait_ready(&cluster);
    let maps = CONFIG_MAPS.in_namespace("default");
    let map = |name: &str, value: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": value}});
    client.create(&maps, &map("kept", "saved")).unwrap();
    client.create(&maps, &map("deleted", "saved")).unwrap();

    let roles = CLUSTER_ROLES.all();
    for role in ["gone-role", "changed-role"] {
        let role = json!({"metadata": {"name": role}, "rules": []});
        client.create(&roles, &role).unwrap();
    }

    let snapshot: PathBuf = cluster.path("snapshot.db");
    let snapshot = snapshot.to_str().unwrap();
    let [url, peer] = cluster.etcd_urls();
    let mut save = Command::new(fetched("etcd-tools.sh").join("etcdctl"));
    run(save.args(["--endpoints", &url, "snapshot", "save", snapshot]));

    changes_of_rights_are_told(&cluster, &client, Path::new(snapshot));
    client.delete(&maps.named("deleted")).unwrap();
    client.create(&maps, &map("later", "lost")).unwrap();
    let last = version(
        &client
            .merge(&maps.named("kept"), &json!({"data": {"key": "changed"}}))
            .unwrap(),
    );

    cluster.replace_etcd(|folder| {
        let arguments = etcdutl_arguments(Path::new(snapshot), folder, "default", &peer, 1);
        run(Command::new(fetched("etcd-tools.sh").join("etcdutl")).args(arguments));
    });
    let client = wait_ready(&cluster);
    for name in ["kept", "deleted"] {
        let found = client.get(&maps.named(name)).unwrap();
        assert_eq!(found["data"]["key"], "saved", "{name}");
    }
    assert!(client.find(&maps.named("later")).unwrap().is_none());
    // programs that remember a version of before do not take an older object for a newer one
    let new = version(&client.create(&maps, &map("new", "1")).unwrap());
    assert!(new > last, "{new} after {last}");
}

/// Makes an object of each kind that decides who may do what, after a snapshot, and compares what the plan of a restoration says.
fn changes_of_rights_are_told(cluster: &Cluster, client: &Client, snapshot: &Path) {
    let admission =
        |name: &'static str| Resource::cluster("admissionregistration.k8s.io", "v1", name).all();
    let role =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"});
    let rules = json!({"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["secrets"]}]});
    let policy = json!({"matchConstraints": rules, "validations": [{"expression": "true"}]});
    let binding = json!({"policyName": "new", "validationActions": ["Audit"]});
    let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "a", "image": "a"}]}});
    let service = json!({
        "group": "example.com", "version": "v1", "groupPriorityMinimum": 1, "versionPriority": 1, "insecureSkipTLSVerify": true,
        "service": {"name": "a", "namespace": "default"},
    });
    let named =
        |name: &str, field: &str, value: Value| json!({"metadata": {"name": name}, field: value});
    let all = [
        (
            CLUSTER_ROLES.all(),
            named("new", "rules", json!([])),
            "ClusterRole new",
        ),
        (
            CLUSTER_ROLE_BINDINGS.all(),
            named("new", "roleRef", role.clone()),
            "ClusterRoleBinding new",
        ),
        (
            ROLES.in_namespace("default"),
            named("new", "rules", json!([])),
            "Role default/new",
        ),
        (
            ROLE_BINDINGS.in_namespace("default"),
            named("new", "roleRef", role),
            "RoleBinding default/new",
        ),
        (
            VALIDATING_ADMISSION_POLICIES.all(),
            named("new", "spec", policy),
            "ValidatingAdmissionPolicy new",
        ),
        (
            VALIDATING_ADMISSION_POLICY_BINDINGS.all(),
            named("new", "spec", binding),
            "ValidatingAdmissionPolicyBinding new",
        ),
        (
            admission("validatingwebhookconfigurations"),
            named("new", "webhooks", json!([])),
            "ValidatingWebhookConfiguration new",
        ),
        (
            admission("mutatingwebhookconfigurations"),
            named("new", "webhooks", json!([])),
            "MutatingWebhookConfiguration new",
        ),
        (
            Resource::cluster("apiregistration.k8s.io", "v1", "apiservices").all(),
            named("v1.example.com", "spec", service),
            "APIService v1.example.com",
        ),
        (
            DAEMON_SETS.in_namespace("kube-system"),
            named(
                "new",
                "spec",
                json!({"selector": {"matchLabels": {"a": "b"}}, "template": template}),
            ),
            "DaemonSet new",
        ),
        (
            CONFIG_MAPS.in_namespace("kube-system"),
            named("join-node-new", "data", json!({"role": "control-plane"})),
            "ConfigMap join-node-new",
        ),
        (
            CONFIG_MAPS.in_namespace("kube-system"),
            named("join-config", "data", json!({})),
            "ConfigMap join-config",
        ),
    ];
    let mut expected: Vec<String> = vec![
        "new: ClusterRole gone-role".into(),
        "different: ClusterRole changed-role".into(),
    ];
    for (collection, object, shown) in all {
        client.create(&collection, &object).unwrap();
        expected.push(format!("gone: {shown}"));
    }
    let roles = CLUSTER_ROLES.all();
    client.delete(&roles.named("gone-role")).unwrap();
    let rules = json!({"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]});
    client.merge(&roles.named("changed-role"), &rules).unwrap();
    expected.sort();
    // etcd writes its database some moments later
    let database = cluster.path("etcd/member/snap/db");
    let end = Instant::now() + PATIENCE;
    loop {
        let said =
            Changes::read(&File::open(snapshot).unwrap(), &database).map(|it| it.to_string());
        let lines = |said: &String| -> Vec<String> {
            let lines = said.lines().skip(1).map(|line| line.trim().to_owned());
            let mut lines: Vec<_> = lines.collect();
            lines.sort();
            lines
        };
        if said.as_ref().map(lines) == Ok(expected.clone()) {
            return;
        }
        assert!(Instant::now() < end, "expected {expected:#?}, got {said:?}");
        thread::sleep(Duration::from_millis(300));
    }
}
