//! The agents that docs/addons/ recommends, with the permissions of their real charts: what each of them could write before, and what
//! it goes on writing.

use std::path::Path;
use std::process::Command;

use common::addons::{text, tool};
use kubernetes::client::{
    CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client, DAEMON_SETS, NODES, Object, PODS,
    Resource, SECRETS, SERVICE_ACCOUNTS, SERVICES,
};
use kubernetes::yaml;
use serde_json::json;

use crate::attacker::{Inside, Kubelet, forbidden};

const ROLE: &str = "node-role.kubernetes.io/control-plane";
const LABEL: &str = "firstlight.node-restriction.kubernetes.io/attested";
const ENDPOINT_SLICES: Resource = Resource::namespaced("discovery.k8s.io", "v1", "endpointslices");

/// Makes the accounts and roles of a chart with the values of our list in docs/addons/. Returns the accounts, `(NAMESPACE, NAME)`.
fn install(inside: &Inside, list: &str, chart: &Path, namespace: &str) -> Vec<(String, String)> {
    let list = Path::new(support::ROOT).join("docs/addons").join(list);
    let list = yaml::document(&std::fs::read_to_string(list).unwrap()).unwrap();
    let addons = list["addons"].as_array().unwrap();
    let addon = addons.iter().find(|it| it["chart"].is_string()).unwrap();
    let values = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(values.path(), addon["values"].to_string()).unwrap();
    let output = Command::new(tool("helm.sh"))
        .args(["template", "agent", "--kube-version", "1.34.4"])
        .args(["--namespace", namespace, "--values"])
        .arg(values.path())
        .arg(chart)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut accounts = vec![];
    for mut object in yaml::documents(text(&output.stdout)).unwrap() {
        let kinds = [
            "ServiceAccount",
            "ClusterRole",
            "ClusterRoleBinding",
            "Role",
            "RoleBinding",
        ];
        if !kinds.iter().any(|kind| object["kind"] == *kind) {
            continue;
        }
        let is_of_cluster = object["kind"].as_str().unwrap().starts_with("Cluster");
        if !is_of_cluster && object["metadata"]["namespace"].is_null() {
            object["metadata"]["namespace"] = namespace.into();
        }
        let at = Object::of(&object).unwrap();
        if let Some(place) = object["metadata"]["namespace"].as_str() {
            inside.namespace(place);
        }
        inside.admin.apply(&at, &object).unwrap();
        if object["kind"] == "ServiceAccount" {
            let place = object["metadata"]["namespace"].as_str().unwrap();
            accounts.push((place.to_owned(), at.name().to_owned()));
        }
    }
    accounts
}

/// Everything that the policies guard, tried by an agent whose pod is on this worker.
fn attack(agent: &Client, plane: &Kubelet, worker: &Kubelet) {
    let status = |node: &Kubelet| NODES.named(&node.name).subresource("status");
    let of_node = [
        json!({"metadata": {"labels": {ROLE: ""}}}),
        json!({"metadata": {"labels": {LABEL: "true"}}}),
        json!({"metadata": {"annotations": {"firstlight/cordoned": "a"}}}),
        json!({"spec": {"taints": [{"key": "firstlight/attestation", "effect": "NoSchedule"}]}}),
        json!({"spec": {"providerID": "other:///1"}}),
        json!({"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}}),
        json!({"status": {"conditions": [{"type": "Attested", "status": "True"}]}}),
    ];
    for change in &of_node {
        for at in [NODES.named(&worker.name), status(worker)] {
            let by_status = at != NODES.named(&worker.name);
            let ignored = if by_status { "spec" } else { "status" };
            if !change[ignored].is_null() {
                continue;
            }
            forbidden(agent.merge(&at, change), "");
        }
    }
    let role = json!({"metadata": {"labels": {ROLE: null}}});
    forbidden(agent.merge(&status(plane), &role), "");
    let system = |resource: &Resource| resource.in_namespace("kube-system");
    let named = |name: &str| json!({"metadata": {"name": name}});
    let pod = json!({"metadata": {"name": "a", "labels": {"k8s-app": "join-service"}}, "spec": {"containers": [{"name": "a", "image": "a"}]}});
    forbidden(agent.create(&system(&PODS), &pod), "");
    for name in ["join-service", "key-service", "member-controller"] {
        let token = system(&SERVICE_ACCOUNTS).named(name).subresource("token");
        forbidden(agent.create_subresource(&token, &json!({"spec": {}})), "");
        let set = system(&DAEMON_SETS).named(name);
        let change = json!({"spec": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}});
        forbidden(agent.merge(&set, &change), "");
        let change = json!({"spec": {"selector": {"a": "b"}}});
        forbidden(agent.merge(&system(&SERVICES).named(name), &change), "");
        let slice = json!({"metadata": {"name": "a", "labels": {"kubernetes.io/service-name": name}}, "addressType": "IPv4", "endpoints": []});
        forbidden(agent.create(&system(&ENDPOINT_SLICES), &slice), "");
    }
    for name in ["join-node-a", "join-disk-a", "join-removed-nodes"] {
        forbidden(agent.create(&system(&CONFIG_MAPS), &named(name)), "");
    }
    forbidden(
        agent.create(&system(&SECRETS), &named("bootstrap-token-abcdef")),
        "",
    );
    let binding = json!({
        "metadata": {"name": "a"}, "subjects": [{"kind": "ServiceAccount", "name": "join-service", "namespace": "kube-system"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
    });
    forbidden(agent.create(&CLUSTER_ROLE_BINDINGS.all(), &binding), "");
    assert_eq!(
        agent
            .delete(&CLUSTER_ROLES.named("join-service"))
            .unwrap_err()
            .code(),
        Some(403)
    );
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make test-inside"]
fn the_accounts_of_flannels_chart_write_nothing_that_is_guarded() {
    let inside = Inside::start(&crate::attacker::settings());
    let plane = inside.control_plane("flannel-plane", "10.4.0.1");
    let worker = inside.worker("flannel-worker", "10.4.0.9");
    let chart = tool("flannel.sh").join("chart");
    let accounts = install(&inside, "flannel.yaml", &chart, "kube-flannel");
    assert!(!accounts.is_empty());
    for (namespace, name) in &accounts {
        let agent = inside.token_on(&worker, (namespace, name), name);
        attack(&agent, &plane, &worker);
        let note = json!({"metadata": {"annotations": {"flannel.alpha.coreos.com/public-ip": "10.4.0.9"}}});
        let at = NODES.named(&worker.name).subresource("status");
        agent.merge(&at, &note).unwrap();
    }
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make test-inside"]
fn the_accounts_of_ciliums_chart_write_nothing_that_is_guarded() {
    let inside = Inside::start(&crate::attacker::settings());
    let plane = inside.control_plane("cilium-plane", "10.4.1.1");
    let worker = inside.worker("cilium-worker", "10.4.1.9");
    let accounts = install(
        &inside,
        "cilium.yaml",
        &tool("cilium-chart.sh"),
        "kube-system",
    );
    assert!(accounts.iter().any(|(_, name)| name == "cilium-operator"));
    for (namespace, name) in &accounts {
        let agent = inside.token_on(&worker, (namespace, name), name);
        attack(&agent, &plane, &worker);
    }
    // the operator's own work
    let operator = inside.token_on(&worker, ("kube-system", "cilium-operator"), "operator");
    let node = NODES.named(&worker.name);
    let mut conditions = worker.node()["status"]["conditions"].clone();
    let up = json!({"type": "NetworkUnavailable", "status": "False", "reason": "CiliumIsUp"});
    conditions.as_array_mut().unwrap().push(up);
    let condition = json!({"status": {"conditions": conditions}});
    operator
        .merge(&node.subresource("status"), &condition)
        .unwrap();
    operator
        .merge(&node, &json!({"spec": {"taints": []}}))
        .unwrap();
    let set = json!({"metadata": {"name": "ztunnel-cilium"}, "spec": {
        "selector": {"matchLabels": {"app": "ztunnel-cilium"}},
        "template": {"metadata": {"labels": {"app": "ztunnel-cilium"}}, "spec": {"containers": [{"name": "a", "image": "a"}]}},
    }});
    let sets = DAEMON_SETS.in_namespace("kube-system");
    operator.create(&sets, &set).unwrap();
}
