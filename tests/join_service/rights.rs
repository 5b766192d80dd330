//! Tests the permissions of the join service's account: it may change its own objects only.

use base::stop::Stop;
use kubernetes::client::{
    CONFIG_MAPS, Client, EVENTS, Error, LEASES, NODES, Object, SECRETS,
    VALIDATING_ADMISSION_POLICY_BINDINGS,
};
use kubernetes::services::TICKET_GROUP;
use serde_json::{Value, json};

use crate::kube_apiserver::Cluster;
use crate::setup::*;

const KUBEADM_GROUP: &str = "system:bootstrappers:kubeadm:default-node-token";

fn is_forbidden<T>(answer: Result<T, Error>) -> bool {
    match answer {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.code(), Some(403), "{error}");
            true
        }
    }
}

fn secret(name: &str, kind: &str, label: &str, group: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {label: "worker-0"}}, "type": kind,
        "stringData": {
            "token-id": name.rsplit('-').next().unwrap(), "token-secret": "0123456789abcdef",
            "usage-bootstrap-authentication": "true", "auth-extra-groups": group,
        },
    })
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_account_changes_and_deletes_nothing_that_is_not_the_join_services_own() {
    const TOKEN: &str = "bootstrap.kubernetes.io/token";
    const LABEL: &str = "firstlight/node";
    let _alone = alone();
    let cluster = Cluster::shared();
    let setup = Setup::new(cluster);
    let account = Client::new(setup.config(cluster).kubernetes.unwrap(), &Stop::new());
    let (maps, secrets) = (
        CONFIG_MAPS.in_namespace("kube-system"),
        SECRETS.in_namespace("kube-system"),
    );
    let leases = LEASES.in_namespace("kube-system");
    for name in ["somebody-s", "join-config"] {
        setup
            .admin
            .create(
                &maps,
                &json!({"metadata": {"name": name}, "data": {"a": "b"}}),
            )
            .unwrap();
    }
    // A token that an administrator creates with kubeadm.
    setup
        .admin
        .create(
            &secrets,
            &secret("bootstrap-token-aaaaaa", TOKEN, "a", KUBEADM_GROUP),
        )
        .unwrap();
    setup
        .admin
        .create(&secrets, &json!({"metadata": {"name": "somebody-s"}}))
        .unwrap();
    let scheduler = leases.named("kube-scheduler");
    setup.admin.delete_if_there(&scheduler).unwrap();

    let foreign: Vec<Object> = [
        "kubeadm-config",
        "k8s-components-sha256-1",
        "somebody-s",
        "join-config",
    ]
    .map(|name| maps.named(name))
    .into_iter()
    .chain(["somebody-s", "bootstrap-token-aaaaaa"].map(|name| secrets.named(name)))
    .collect();
    let before: Vec<_> = foreign
        .iter()
        .map(|object| setup.admin.get(object).unwrap())
        .collect();
    // The API server reads its policies every second.
    eventually("the limits are in force", || {
        let answer = account.create(&maps, &json!({"metadata": {"name": "probe"}}));
        setup.admin.delete_if_there(&maps.named("probe")).unwrap();
        is_forbidden(answer)
    });
    for (object, before) in foreign.iter().zip(&before) {
        let mut changed = before.clone();
        changed["data"] = json!({"a": "Yw=="});
        assert!(is_forbidden(account.update(object, &changed)), "{object}");
        assert!(is_forbidden(account.delete(object)), "{object}");
    }
    for (name, kind, label, group) in [
        ("somebody-else-s", "Opaque", LABEL, TICKET_GROUP),
        ("bootstrap-token-bbbbbb", "Opaque", LABEL, TICKET_GROUP),
        ("not-bootstrap-token-bbbbbb", TOKEN, LABEL, TICKET_GROUP),
        // No program would ever delete this object.
        ("bootstrap-token-bbbbbb", TOKEN, "a", TICKET_GROUP),
        // Kubernetes approves any node name for this group.
        ("bootstrap-token-bbbbbb", TOKEN, LABEL, KUBEADM_GROUP),
        (
            "bootstrap-token-bbbbbb",
            TOKEN,
            LABEL,
            &format!("{TICKET_GROUP},{KUBEADM_GROUP}"),
        ),
    ] {
        assert!(
            is_forbidden(account.create(&secrets, &secret(name, kind, label, group))),
            "{name} {kind} {group}"
        );
    }
    let unnamed = json!({"metadata": {"generateName": "x-"}});
    let other = json!({"metadata": {"name": "other"}});
    assert!(
        is_forbidden(account.create(&maps, &other))
            && is_forbidden(account.create(&maps, &unnamed))
    );
    assert!(is_forbidden(account.create(
        &leases,
        &json!({"metadata": {"name": "kube-scheduler"}})
    )));
    let event = json!({
        "metadata": {"name": "x.1", "namespace": "kube-system"}, "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "a", "reportingInstance": "b", "action": "c", "reason": "d", "type": "Normal",
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": "x", "namespace": "kube-system"},
    });
    assert!(is_forbidden(
        account.create(&EVENTS.in_namespace("kube-system"), &event)
    ));
    // It has keys of attestation results only if the operator wants results.
    let keys = secrets.named("join-attestation-keys");
    assert!(is_forbidden(account.get(&keys)));
    // The account cannot remove its limits.
    assert!(is_forbidden(account.delete(
        &VALIDATING_ADMISSION_POLICY_BINDINGS.named("join-service")
    )));
    let after: Vec<_> = foreign
        .iter()
        .map(|object| setup.admin.get(object).unwrap())
        .collect();
    assert_eq!(before, after);
    assert!(setup.admin.find(&scheduler).unwrap().is_none());

    // Its own objects.
    let (record, token) = (
        maps.named("join-node-x"),
        secrets.named("bootstrap-token-cccccc"),
    );
    account
        .create(&maps, &json!({"metadata": {"name": "join-node-x"}}))
        .unwrap();
    account
        .update(
            &record,
            &json!({"metadata": {"name": "join-node-x"}, "data": {"a": "b"}}),
        )
        .unwrap();
    account.delete(&record).unwrap();
    account
        .create(
            &secrets,
            &secret("bootstrap-token-cccccc", TOKEN, LABEL, TICKET_GROUP),
        )
        .unwrap();
    account.delete(&token).unwrap();
    // Other accounts are not limited.
    for object in &foreign[2..] {
        setup.admin.delete(object).unwrap();
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_account_changes_only_the_fields_of_nodes_that_belong_to_the_watch_and_only_if_it_is_on() {
    const LABEL: &str = "firstlight.node-restriction.kubernetes.io/attested";
    let _alone = alone();
    let cluster = Cluster::shared();
    let setup = Setup::new(cluster);
    let account = Client::new(setup.config(cluster).kubernetes.unwrap(), &Stop::new());
    let at = NODES.named("worker-0");
    let node = json!({
        "metadata": {"name": "worker-0", "labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {"taints": [{"key": "e", "value": "f", "effect": "NoExecute"}]},
    });
    setup.admin.create(&NODES.all(), &node).unwrap();
    setup.make_ready("worker-0", "True");
    let change = |pointer: &str, value: Value| {
        let mut node = setup.admin.get(&at).unwrap();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        node.pointer_mut(parent).unwrap()[field.replace("~1", "/")] = value;
        account.update(&at, &node)
    };
    let condition = |fields: Value| {
        let object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-0"}, "status": fields,
        });
        account.apply_as("test", &at.subresource("status"), &object)
    };
    let attested = |kind: &str| json!({"conditions": [{"type": kind, "status": "True", "reason": "a", "message": "b"}]});
    let own = format!("/metadata/labels/{}", LABEL.replace('/', "~1"));
    assert!(is_forbidden(change(&own, "true".into())));
    assert!(is_forbidden(condition(attested("Attested"))));

    setup.permit_watch();
    eventually("the rights are in force", || {
        change(&own, "true".into()).is_ok()
    });
    eventually("the limits are in force", || {
        let answer = change("/metadata/labels/a", "x".into());
        let before = json!({"metadata": {"labels": {"a": "b"}}});
        setup.admin.merge(&at, &before).unwrap();
        is_forbidden(answer)
    });
    condition(attested("Attested")).unwrap();
    change("/metadata/annotations/firstlight~1cordoned", "x".into()).unwrap();
    change("/spec/unschedulable", true.into()).unwrap();
    let ours = json!({"key": "firstlight/attestation", "value": "refused", "effect": "NoSchedule"});
    // the API server has added one
    let foreign = setup.admin.get(&at).unwrap()["spec"]["taints"].clone();
    let mut all = foreign.clone();
    all.as_array_mut().unwrap().push(ours);
    change("/spec/taints", all).unwrap();
    change("/spec/taints", foreign).unwrap();

    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]);
    for (pointer, value) in [
        ("/metadata/labels/new", "x".into()),
        ("/metadata/labels", json!({LABEL: "true"})),
        ("/metadata/annotations/c", "x".into()),
        ("/metadata/annotations", json!({})),
        ("/metadata/ownerReferences", owner),
        ("/metadata/finalizers", json!(["example.com/f"])),
        ("/spec/taints", json!([])),
        ("/spec/providerID", "x".into()),
    ] {
        assert!(is_forbidden(change(pointer, value)), "{pointer}");
    }
    assert!(is_forbidden(condition(attested("Ready"))));
    let address = json!({"addresses": [{"type": "InternalIP", "address": "10.0.0.7"}]});
    assert!(is_forbidden(condition(address)));
    let ports = json!({"daemonEndpoints": {"kubeletEndpoint": {"Port": 7}}});
    assert!(is_forbidden(condition(ports)));
    assert!(is_forbidden(account.delete(&at)));
    let other = json!({"metadata": {"name": "other"}});
    assert!(is_forbidden(account.create(&NODES.all(), &other)));
}
