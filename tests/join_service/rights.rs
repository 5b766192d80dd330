//! Tests the permissions of the accounts of the join service and of the member controller: each may change its own objects only, and
//! neither does the other's work.

use base::stop::Stop;
use kubernetes::client::{
    CERTIFICATE_SIGNING_REQUESTS, CONFIG_MAPS, Client, EVENTS, Error, LEASES, NODES, Object,
    SECRETS, Selector, VALIDATING_ADMISSION_POLICY_BINDINGS,
};
use kubernetes::services::TICKET_GROUP;
use serde_json::{Value, json};

use crate::renewal::{Renewals, kubelet};
use crate::setup::*;

/// The type of bootstrap tokens, and a label of those of tickets.
const TOKEN: &str = "bootstrap.kubernetes.io/token";
const LABEL: &str = "firstlight/node";
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
    let (_alone, cluster, setup) = Setup::shared();
    let account = Client::new(setup.account(cluster, JOIN_SERVICE), &Stop::new());
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
    // The member controller has the keys of attestation results.
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
    const ATTESTED: &str = "firstlight.node-restriction.kubernetes.io/attested";
    let (_alone, cluster, setup) = Setup::shared();
    let account = Client::new(setup.account(cluster, MEMBER_CONTROLLER), &Stop::new());
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
    let own = format!("/metadata/labels/{}", ATTESTED.replace('/', "~1"));
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
        ("/metadata/labels", json!({ATTESTED: "true"})),
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

/// Also with the watch and its issuer on, which give the member controller its rights to Nodes and to one Secret.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_join_service_works_on_no_member_and_the_member_controller_admits_none() {
    let (_alone, cluster, mut setup) = Setup::for_renewals();
    setup.permit_watch_of("https://results.example");
    // nobody decides about the request
    drop(setup.controller.take());
    let account = |name| Client::new(setup.account(cluster, name), &Stop::new());
    let (join, works) = (account(JOIN_SERVICE), account(MEMBER_CONTROLLER));
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let secrets = SECRETS.in_namespace("kube-system");
    let leases = LEASES.in_namespace("kube-system");
    setup.make_node("worker-0");
    crate::client_certificates::ask(&kubelet(cluster, "worker-0"), "own", "worker-0");
    let request = CERTIFICATE_SIGNING_REQUESTS.named("own");
    let approval = request.subresource("approval");
    let mut approved = setup.admin.get(&request).unwrap();
    approved["status"]["conditions"] =
        json!([{"type": "Approved", "status": "True", "reason": "a", "message": "a"}]);
    let node = NODES.named("worker-0");
    let whole = setup.admin.get(&node).unwrap();
    let record = json!({
        "metadata": {"name": "join-node-worker-0", "labels": {"firstlight/record": "machine"}},
        "data": {"node": "worker-0", "machine": "m", "disk": disk(1)},
    });
    setup.admin.create(&maps, &record).unwrap();
    let at = maps.named("join-node-worker-0");
    let change = |pointer: &str, field: &str, value: Value| {
        let change = |map: &mut Value| {
            let fields = map.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
            fields.insert(field.into(), value.clone());
            fields.retain(|_, value| !value.is_null());
            true
        };
        works.modify(&at, change)
    };
    let named = |name: &str| json!({"metadata": {"name": name}});
    eventually("the limits are in force", || {
        works.update(&node, &whole).is_ok()
            && is_forbidden(change("/data", "machine", "other".into()))
            && works
                .create(&maps, &named("join-attested-worker-0"))
                .is_ok()
    });

    assert!(is_forbidden(join.update(&approval, &approved)));
    let all = CERTIFICATE_SIGNING_REQUESTS.all();
    assert!(is_forbidden(join.list(&all, &Selector::default())));
    assert!(is_forbidden(join.update(&node, &whole)));
    let condition = json!({"status": {"conditions": [{"type": "Attested", "status": "True"}]}});
    assert!(is_forbidden(
        join.merge(&node.subresource("status"), &condition)
    ));
    assert!(is_forbidden(join.create(&leases, &named("join-watch"))));
    assert!(is_forbidden(
        join.create(&maps, &named("join-attested-worker-0"))
    ));
    let keys = json!({"metadata": {"name": "join-attestation-keys"}, "type": "Opaque"});
    assert!(is_forbidden(join.create(&secrets, &keys)));
    assert!(is_forbidden(
        join.get(&secrets.named("join-attestation-keys"))
    ));

    let token = secret("bootstrap-token-dddddd", TOKEN, LABEL, TICKET_GROUP);
    assert!(is_forbidden(works.create(&secrets, &token)));
    join.create(&secrets, &token).unwrap();
    let token = secrets.named("bootstrap-token-dddddd");
    assert!(is_forbidden(works.get(&token)) && is_forbidden(works.delete(&token)));
    assert!(is_forbidden(works.list(&secrets, &Selector::default())));
    assert!(is_forbidden(
        works.create(&leases, &named("join-control-plane"))
    ));
    // another machine gets neither the disk nor the name of a node
    for field in ["machine", "disk", "role", "token", "addresses"] {
        assert!(
            is_forbidden(change("/data", field, "other".into())),
            "{field}"
        );
    }
    let label = change("/metadata/labels", "firstlight/record", Value::Null);
    assert!(is_forbidden(label));
    let of_disk = |machine: &str| {
        let data = json!({"disk": disk(2), "machine": machine});
        json!({"metadata": {"name": format!("join-disk-{}", disk(2))}, "data": data})
    };
    assert!(is_forbidden(works.create(&maps, &of_disk("other"))));
    for name in ["join-node-worker-1", "join-removed-nodes", "join-config"] {
        assert!(is_forbidden(works.create(&maps, &named(name))), "{name}");
    }

    // its own work
    works.create(&maps, &of_disk("none")).unwrap();
    change("/data", "refused", "2026-11-28T20:00:00Z".into()).unwrap();
    change("/data", "generation", "1-0123456789abcdef".into()).unwrap();
    change("/data", "refused", Value::Null).unwrap();
    works.create(&secrets, &keys).unwrap();
    works.update(&approval, &approved).unwrap();
    // a cluster whose control planes have no records gives no keys
    let role = |role: Value| json!({"data": {"role": role}});
    setup
        .admin
        .merge(&at, &role("control-plane".into()))
        .unwrap();
    assert!(is_forbidden(works.delete(&at)));
    setup.admin.merge(&at, &role(Value::Null)).unwrap();
    works.delete(&at).unwrap();
}
