//! `firstlight doctor` names the accounts of agents that may take over the cluster.

use kubernetes::client::{
    CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, Collection, ObjectKind, ROLE_BINDINGS, ROLES, Selector,
};
use kubernetes::rbac::{self, PrivilegedAccount};
use serde_json::{Value, json};

use crate::agents::{agents, install};
use crate::attacker::{Inside, settings};

const NAMESPACE: &str = "kube-system";

/// Reads roles and bindings as the command does.
fn powerful(inside: &Inside) -> Vec<PrivilegedAccount> {
    fn list<K: ObjectKind>(inside: &Inside, collections: [Collection; 2]) -> Vec<K> {
        let all = collections.iter().flat_map(|collection| {
            let all = inside.admin.list_as(collection, &Selector::default());
            all.unwrap().items
        });
        all.collect()
    }
    let roles = [CLUSTER_ROLES.all(), ROLES.in_namespace(NAMESPACE)];
    let bindings = [
        CLUSTER_ROLE_BINDINGS.all(),
        ROLE_BINDINGS.in_namespace(NAMESPACE),
    ];
    rbac::powerful(&list(inside, roles), &list(inside, bindings))
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn accounts_that_may_take_over_the_cluster_are_named_and_those_of_kubernetes_are_not() {
    let inside = Inside::start(&settings());
    // what the API server, kubeadm, the services and flannel make
    assert_eq!(powerful(&inside), []);

    for agent in agents() {
        install(&inside, &agent);
    }
    let secrets = "read the Secrets of kube-system, such as the tokens of machines that join";
    let tokens = "request tokens of the accounts of kube-system, so act as each of them";
    let found = powerful(&inside);
    let found: Vec<_> = found.iter().map(|it| (&*it.name, &*it.may)).collect();
    let expected: [(&str, &[&str]); 5] = [
        ("kube-system/cilium", &[secrets]),
        ("kube-system/cilium-operator", &[secrets]),
        ("kube-system/cloud-controller-manager", &[tokens, secrets]),
        ("kube-system/csi-azuredisk-controller-sa", &[secrets]),
        ("kube-system/csi-azuredisk-node-sa", &[secrets]),
    ];
    assert_eq!(found, expected);
}

/// Gives a subject this role in the whole cluster, or in the namespace.
fn bind(inside: &Inside, name: &str, subject: &Value, rule: &Value, namespace: Option<&str>) {
    let role = json!({"metadata": {"name": name}, "rules": [rule]});
    let binding = json!({"metadata": {"name": name}, "subjects": [subject], "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}});
    inside.admin.create(&CLUSTER_ROLES.all(), &role).unwrap();
    let bindings = match namespace {
        None => CLUSTER_ROLE_BINDINGS.all(),
        Some(namespace) => ROLE_BINDINGS.in_namespace(namespace),
    };
    inside.admin.create(&bindings, &binding).unwrap();
}

fn rule(group: &str, resource: &str, verb: &str) -> Value {
    json!({"apiGroups": [group], "resources": [resource], "verbs": [verb]})
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn each_right_that_gives_the_cluster_is_found_and_a_limited_one_is_not() {
    let inside = Inside::start(&settings());
    let admission = "admissionregistration.k8s.io";
    let rbac = "rbac.authorization.k8s.io";
    let rights = [
        (
            "request tokens",
            rule("", "serviceaccounts/token", "create"),
        ),
        ("request tokens", rule("*", "*/token", "create")),
        ("act as others", rule("", "groups", "impersonate")),
        ("give itself roles", rule(rbac, "clusterroles", "escalate")),
        ("give itself roles", rule(rbac, "roles", "bind")),
        (
            "approve certificates",
            rule("certificates.k8s.io", "signers", "approve"),
        ),
        ("through the kubelets", rule("", "nodes/proxy", "get")),
        ("run commands in pods", rule("", "pods/exec", "get")),
        ("make pods", rule("", "pods", "*")),
        ("make pods", rule("apps", "daemonsets", "patch")),
        ("read the Secrets", rule("", "*", "list")),
        (
            "take the admission policies",
            rule(admission, "validatingadmissionpolicies", "delete"),
        ),
        (
            "see and change",
            rule(admission, "mutatingwebhookconfigurations", "create"),
        ),
        (
            "pass admission policies",
            rule("firstlight", "records", "assign"),
        ),
        ("do everything", rule("*", "*", "*")),
    ];
    let account =
        |name: &str| json!({"kind": "ServiceAccount", "namespace": "agents", "name": name});
    for (index, (_, rule)) in rights.iter().enumerate() {
        let name = format!("agent-{index:02}");
        bind(&inside, &name, &account(&name), rule, None);
    }
    let secrets = rule("", "secrets", "get");
    inside.namespace("tenant");
    bind(&inside, "own", &account("own"), &secrets, Some("tenant"));
    let mut named = secrets.clone();
    named["resourceNames"] = json!(["cilium-ca"]);
    bind(&inside, "named", &account("named"), &named, None);
    let harmless = rule("", "nodes/proxy", "get");
    bind(
        &inside,
        "no-use",
        &account("no-use"),
        &harmless,
        Some("kube-system"),
    );
    let found = powerful(&inside);
    for (index, (expected, rule)) in rights.iter().enumerate() {
        let found = &found[index];
        assert_eq!(found.name, format!("agents/agent-{index:02}"), "{rule}");
        let [may] = &found.may[..] else {
            panic!("{rule}: {found:?}")
        };
        assert!(
            may.starts_with(expected) || may.contains(expected),
            "{rule}: {may}"
        );
    }
    assert_eq!(found.len(), rights.len(), "{found:#?}");

    // people, and what stands for all pods of a namespace
    let here = Some("kube-system");
    let group = |name: &str| json!({"apiGroup": rbac, "kind": "Group", "name": name});
    bind(&inside, "people", &group("oidc:admins"), &secrets, here);
    bind(
        &inside,
        "pods",
        &group("system:serviceaccounts:agents"),
        &secrets,
        here,
    );
    let found = powerful(&inside).split_off(rights.len());
    let found: Vec<_> = found
        .iter()
        .map(|it| (&*it.name, it.is_of_people))
        .collect();
    let expected = [
        ("group oidc:admins", true),
        ("group system:serviceaccounts:agents", false),
    ];
    assert_eq!(found, expected);
}
