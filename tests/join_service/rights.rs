//! Tests the permissions of the join service's account: it may change its own objects only.

use base::stop::Stop;
use kubernetes::client::{
    CONFIG_MAPS, Client, EVENTS, Error, LEASES, Object, SECRETS,
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
