//! Objects that Firstlight and others find by their names: what agents with the rights of their published charts try, and
//! what the owners go on writing.

use std::fs;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use base::time;
use common::kube_apiserver::{Process, build};
use common::volumes::add_pod;
use kubernetes::client::{
    CONFIG_MAPS, Client, Error, LEASES, Object, Resource, SECRETS, SERVICE_ACCOUNTS, SERVICES,
};
use serde_json::{Value, json};

use crate::attacker::{Inside, definition, eventually, forbidden, settings, token_volume};

const NAMESPACE: &str = "kube-system";
const REFUSED: &str = "only its owner and administrators write the object";
/// The controllers of kube-controller-manager that write some of these objects.
const CONTROLLERS: &str =
    "bootstrap-signer-controller,token-cleaner-controller,root-ca-certificate-publisher-controller";

/// Starts the controllers, for all tests.
fn with_controllers(inside: &'static Inside) {
    static RUNNING: OnceLock<Process> = OnceLock::new();
    RUNNING.get_or_init(|| inside.cluster.start_restricted_controllers(CONTROLLERS));
}

fn map(name: &str) -> Object {
    CONFIG_MAPS.in_namespace(NAMESPACE).named(name)
}

fn secret(name: &str) -> Object {
    SECRETS.in_namespace(NAMESPACE).named(name)
}

fn lease(name: &str) -> Object {
    LEASES.in_namespace(NAMESPACE).named(name)
}

fn service(name: &str) -> Object {
    SERVICES.in_namespace(NAMESPACE).named(name)
}

fn rule(groups: &[&str], resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": groups, "resources": resources, "verbs": verbs})
}

fn create(client: &Client, at: &Object, more: &Value) -> Result<Value, Error> {
    let mut object = json!({"metadata": {"name": at.name()}});
    for (field, value) in more.as_object().unwrap() {
        object[field] = value.clone();
    }
    client.create(&at.collection(), &object)
}

fn deleted(client: &Client, at: &Object) -> Result<Value, Error> {
    client.delete(at).map(|()| Value::Null)
}

fn data(content: &str) -> Value {
    json!({"data": {"a": content}})
}

/// cluster-autoscaler's chart: it may create any ConfigMap in its namespace.
fn autoscaler(inside: &Inside, node: &str, address: &str) -> Client {
    let worker = inside.worker(node, address);
    let rules = json!([
        rule(&[""], &["configmaps"], &["create"]),
        rule(&[""], &["pods/status"], &["update"]),
    ]);
    inside.agent_on(&worker, (NAMESPACE, "autoscaler"), &rules)
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn cluster_autoscaler_creates_no_rollout_and_no_settings_of_cilium() {
    let inside = Inside::shared();
    let autoscaler = autoscaler(inside, "objects-autoscaler", "10.5.0.1");
    for name in ["firstlight-rollout", "cilium-config"] {
        forbidden(create(&autoscaler, &map(name), &data("evil")), REFUSED);
    }
    create(
        &autoscaler,
        &map("cluster-autoscaler-priority-expander"),
        &data("a"),
    )
    .unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn only_people_change_a_rollout_and_a_migration_of_storage_goes_on() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-maps", "10.5.0.2");
    let verbs = ["create", "get", "update", "patch", "delete"];
    let rules = json!([rule(&[""], &["configmaps"], &verbs)]);
    let agent = inside.agent_on(&worker, ("agents", "maps"), &rules);
    let people = inside.kubeadm();
    let at = map("firstlight-rollout");
    create(&people, &at, &data("a")).unwrap();
    forbidden(agent.merge(&at, &data("evil")), REFUSED);
    let note = json!({"metadata": {"annotations": {"a": "b"}}});
    forbidden(agent.merge(&at, &note), REFUSED);
    forbidden(deleted(&agent, &at), REFUSED);
    // a migration of the API server's storage writes what it reads
    let read = agent.get(&at).unwrap();
    agent.update(&at, &read).unwrap();
    people.merge(&at, &data("b")).unwrap();
    people.delete(&at).unwrap();
    create(&agent, &map("objects-own"), &data("a")).unwrap();
    agent.delete(&map("objects-own")).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_real_kubeadm_writes_its_objects_with_admin_conf() {
    let inside = Inside::start(&settings());
    inside.control_plane("objects-kubeadm", "10.5.0.12");
    let config = format!(
        "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: v1.36.3\n\
         controlPlaneEndpoint: 127.0.0.1:{}\nnetworking:\n  podSubnet: 10.244.0.0/16\n---\n\
         apiVersion: kubeadm.k8s.io/v1beta4\nkind: InitConfiguration\nlocalAPIEndpoint:\n  advertiseAddress: 10.5.0.12\n\
         nodeRegistration:\n  name: objects-kubeadm\n  criSocket: unix:///run/containerd/containerd.sock\n\
         bootstrapTokens:\n- token: abcdef.0123456789abcdef\n",
        inside.cluster.port()
    );
    let (ca, _) = inside.cluster.ca();
    let admin = inside
        .cluster
        .kubeconfig_of("kubernetes-admin", "kubeadm:cluster-admins", &ca);
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        format!("{}", path.display())
    };
    let (config, admin) = (file("config.yaml", &config), file("admin.conf", &admin));
    let kubeadm = build(&["kubeadm"]).join("kubeadm");
    let phase = |names: &[&str]| {
        let mut command = Command::new(&kubeadm);
        command.args(["init", "phase"]).args(names);
        let output = command
            .args(["--config", &config, "--kubeconfig", &admin])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{names:?}: {said}");
    };
    // again, as an upgrade does
    for _ in 0..2 {
        phase(&["upload-config", "all"]);
        phase(&["bootstrap-token"]);
        phase(&["addon", "kube-proxy"]);
    }
    for name in ["kubeadm-config", "kubelet-config", "kube-proxy"] {
        inside.admin.get(&map(name)).unwrap();
    }
    let info = CONFIG_MAPS
        .in_namespace("kube-public")
        .named("cluster-info");
    inside.admin.get(&info).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn the_operator_of_cilium_annotates_its_settings_and_changes_none_of_them() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-cilium", "10.5.0.3");
    let rules = json!([{
        "apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["cilium-config"], "verbs": ["patch"],
    }]);
    let operator = inside.agent_on(&worker, (NAMESPACE, "cilium-operator"), &rules);
    let at = map("cilium-config");
    let kubeadm = inside.kubeadm();
    create(&kubeadm, &at, &json!({"data": {"encrypt-node": "true"}})).unwrap();
    forbidden(
        operator.merge(&at, &json!({"data": {"encrypt-node": "false"}})),
        REFUSED,
    );
    forbidden(
        operator.merge(&at, &json!({"data": {"encrypt-node": null}})),
        REFUSED,
    );
    operator
        .merge(&at, &json!({"metadata": {"annotations": {"a": "b"}}}))
        .unwrap();
    // a person changes them with Helm
    kubeadm
        .merge(&at, &json!({"data": {"enable-wireguard": "true"}}))
        .unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_may_write_leases_holds_none_of_ours() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-leases", "10.5.0.4");
    // Cilium's operator, and Azure's CSI controller, which may delete them
    let verbs = ["create", "get", "list", "update", "patch", "delete"];
    let rules = json!([rule(&["coordination.k8s.io"], &["leases"], &verbs)]);
    let operator = inside.agent_on(&worker, (NAMESPACE, "leases"), &rules);
    let plane = inside.control_plane("objects-leases-plane", "10.5.0.5");
    let join = inside.token_on(&plane, (NAMESPACE, "join-service"), "join-service-leases");
    let account = (NAMESPACE, "member-controller");
    let watch = inside.token_on(&plane, account, "member-controller-leases");
    let held = |holder: &str| json!({"spec": {"holderIdentity": holder}});
    let renewed = |client: &Client, at: &Object, holder: &str| {
        let change = |lease: &mut Value| {
            lease["spec"]["holderIdentity"] = json!(holder);
            true
        };
        client.modify(at, change)
    };
    let people = inside.kubeadm();
    // in the shared cluster, controllers run without these Leases
    let user = |name: &str| inside.cluster.client_of(&format!("system:{name}"), "");
    let (controllers, scheduler) = (user("kube-controller-manager"), user("kube-scheduler"));
    for (name, owner) in [
        ("kube-controller-manager", &controllers),
        ("kube-scheduler", &scheduler),
        ("join-watch", &watch),
        ("join-control-plane", &join),
        ("firstlight-nodes", &people),
    ] {
        let at = lease(name);
        forbidden(create(&operator, &at, &held("evil")), REFUSED);
        create(owner, &at, &held("a")).unwrap();
        renewed(owner, &at, "b").unwrap();
        forbidden(renewed(&operator, &at, "evil"), REFUSED);
        forbidden(deleted(&operator, &at), REFUSED);
        people.delete(&at).unwrap();
    }
    let own = lease("cilium-operator-resource-lock");
    create(&operator, &own, &held("a")).unwrap();
    renewed(&operator, &own, "b").unwrap();
    operator.delete(&own).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_cloud_controller_that_may_write_secrets_writes_none_of_ours() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-secrets", "10.5.0.6");
    // GCP's cloud controller manager
    let rules = json!([rule(
        &[""],
        &["secrets"],
        &["create", "delete", "get", "update"]
    )]);
    let controller = inside.agent_on(&worker, (NAMESPACE, "gcp-controllers"), &rules);
    let people = inside.kubeadm();
    let wrapped = json!({"data": {"mastersecret": "YQ=="}});
    for name in [
        "firstlight-mastersecret-00",
        "firstlight-migration",
        "sh.helm.release.v1.firstlight.v2",
    ] {
        let at = secret(name);
        forbidden(create(&controller, &at, &wrapped), REFUSED);
        create(&people, &at, &wrapped).unwrap();
        let changed = controller.modify(&at, |secret| {
            secret["data"]["mastersecret"] = json!("Yg==");
            true
        });
        forbidden(changed, REFUSED);
        forbidden(deleted(&controller, &at), REFUSED);
        people.delete(&at).unwrap();
    }
    let plane = inside.control_plane("objects-secrets-plane", "10.5.0.7");
    let join = inside.token_on(&plane, (NAMESPACE, "join-service"), "join-service-secrets");
    let at = secret("bootstrap-token-aaaaaa");
    create(&join, &at, &ticket("aaaaaa")).unwrap();
    forbidden(deleted(&controller, &at), REFUSED);
    join.delete(&at).unwrap();
    create(&controller, &secret("objects-own"), &wrapped).unwrap();
    controller.delete(&secret("objects-own")).unwrap();
}

/// The bootstrap token of a ticket, as the join service makes it.
fn ticket(id: &str) -> Value {
    json!({
        "metadata": {"name": format!("bootstrap-token-{id}"), "labels": {"firstlight/node": "a"}},
        "type": "bootstrap.kubernetes.io/token",
        "data": {"auth-extra-groups": "c3lzdGVtOmJvb3RzdHJhcHBlcnM6Zmlyc3RsaWdodDpqb2luLXRpY2tldA=="},
    })
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_may_write_services_redirects_none_of_ours() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-services", "10.5.0.8");
    // Cilium's operator with an ingress or a gateway
    let verbs = ["create", "get", "update", "patch", "delete"];
    let rules = json!([
        rule(&[""], &["services"], &verbs),
        rule(&[""], &["services/status"], &["update", "patch"]),
    ]);
    let operator = inside.agent_on(&worker, (NAMESPACE, "services"), &rules);
    // the API server itself refuses addresses of a load balancer
    let reported = json!({"status": {"conditions": [
        {"type": "a", "status": "True", "reason": "a", "message": "a", "lastTransitionTime": "2026-01-01T00:00:00Z"},
    ]}});
    let balanced = json!({"status": {"loadBalancer": {"ingress": [{"ip": "10.5.0.8"}]}}});
    for name in [
        "join-service",
        "join-attestation",
        "key-service",
        "key-service-local",
    ] {
        let at = service(name);
        for change in [
            json!({"spec": {"selector": {"k8s-app": "evil"}}}),
            json!({"spec": {"internalTrafficPolicy": "Cluster", "sessionAffinity": "ClientIP"}}),
            json!({"spec": {"type": "LoadBalancer"}}),
            // kube-proxy leaves such a Service to another program
            json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": "evil"}}}),
            // Cilium sends connections to the Service of this name in other clusters
            json!({"metadata": {"annotations": {"service.cilium.io/global": "true"}}}),
        ] {
            forbidden(operator.merge(&at, &change), REFUSED);
        }
        forbidden(
            operator.merge(&at.subresource("status"), &reported),
            REFUSED,
        );
        forbidden(deleted(&operator, &at), REFUSED);
    }
    let ports = json!({"spec": {"selector": {"a": "b"}, "ports": [{"port": 9000}]}});
    let waiting = service("key-service-waiting");
    forbidden(create(&operator, &waiting, &ports), REFUSED);
    let own = service("cilium-ingress");
    let ports = json!({"spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
    create(&operator, &own, &ports).unwrap();
    operator
        .merge(&own.subresource("status"), &balanced)
        .unwrap();
    operator.delete(&own).unwrap();
    // a person applies the chart again with other settings
    let note = json!({"metadata": {"annotations": {"a": "b"}}});
    inside
        .kubeadm()
        .merge(&service("key-service"), &note)
        .unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn only_people_define_and_change_the_kinds_of_constellation() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-kinds", "10.5.0.13");
    let verbs = ["create", "get", "update", "patch", "delete"];
    let kinds = "customresourcedefinitions";
    let status = format!("{kinds}/status");
    let rules = json!([rule(&["apiextensions.k8s.io"], &[kinds, &status], &verbs)]);
    let agent = inside.agent_on(&worker, ("agents", "kinds"), &rules);
    let resource = Resource::cluster("apiextensions.k8s.io", "v1", kinds);
    let all = resource.all();
    let kind = definition("update.edgeless.systems", "v1alpha1", "ScalingGroup");
    forbidden(agent.create(&all, &kind), REFUSED);
    // the command of Constellation applies its charts
    let people = inside.kubeadm();
    people.create(&all, &kind).unwrap();
    let at = resource.named("scalinggroups.update.edgeless.systems");
    let note = json!({"metadata": {"annotations": {"a": "b"}}});
    forbidden(agent.merge(&at, &note), REFUSED);
    let unserved = agent.modify(&at, |kind| {
        kind["spec"]["versions"][0]["served"] = json!(false);
        true
    });
    forbidden(unserved, REFUSED);
    let condition = json!({"status": {"conditions": [{"type": "Established", "status": "False"}]}});
    forbidden(agent.merge(&at.subresource("status"), &condition), REFUSED);
    forbidden(deleted(&agent, &at), REFUSED);
    eventually("the API server serves the kind", || {
        let seen = agent.get(&at).unwrap();
        let conditions = seen["status"]["conditions"].as_array();
        conditions.is_some_and(|all| {
            all.iter()
                .any(|it| it["type"] == "Established" && it["status"] == "True")
        })
    });
    agent.update(&at, &agent.get(&at).unwrap()).unwrap();
    people.merge(&at, &note).unwrap();
    people.delete(&at).unwrap();
    eventually("the API server has removed the kind", || {
        people.find(&at).unwrap().is_none()
    });
    let own = definition("example.com", "v1", "Own");
    agent.create(&all, &own).unwrap();
    agent.delete(&resource.named("owns.example.com")).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn only_people_change_where_a_joining_machine_finds_the_cluster_and_a_controller_signs_it() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-info", "10.5.0.9");
    let verbs = ["create", "get", "update", "patch", "delete"];
    let rules = json!([rule(&[""], &["configmaps"], &verbs)]);
    let agent = inside.agent_on(&worker, ("agents", "info"), &rules);
    let at = CONFIG_MAPS
        .in_namespace("kube-public")
        .named("cluster-info");
    let of = |server: &str| json!({"data": {"kubeconfig": server}});
    let people = inside.kubeadm();
    forbidden(create(&agent, &at, &of("evil")), REFUSED);
    create(&people, &at, &of("a")).unwrap();
    forbidden(agent.merge(&at, &of("evil")), REFUSED);
    forbidden(deleted(&agent, &at), REFUSED);

    let token = json!({"type": "bootstrap.kubernetes.io/token", "stringData": {
        "token-id": "bbbbbb", "token-secret": "0123456789abcdef", "usage-bootstrap-signing": "true",
    }});
    create(&people, &secret("bootstrap-token-bbbbbb"), &token).unwrap();
    with_controllers(inside);
    let signature = || people.get(&at).unwrap()["data"]["jws-kubeconfig-bbbbbb"].clone();
    eventually("the controller signs", || signature().is_string());
    let before = signature();
    people.merge(&at, &of("b")).unwrap();
    eventually("the controller signs again", || signature() != before);
    people.delete(&secret("bootstrap-token-bbbbbb")).unwrap();
    eventually("the controller removes the signature", || {
        signature().is_null()
    });
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_may_request_any_token_gets_none_of_a_controller() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-tokens", "10.5.0.11");
    // GCP's cloud controller manager
    let rules = json!([
        rule(&[""], &["serviceaccounts/token"], &["create"]),
        rule(&[""], &["secrets"], &["create", "delete", "get", "update"]),
        rule(&[""], &["serviceaccounts"], &["create", "get", "update"]),
    ]);
    let manager = inside.agent_on(&worker, (NAMESPACE, "gcp-tokens"), &rules);
    let accounts = SERVICE_ACCOUNTS.in_namespace(NAMESPACE);
    let token = |account: &str| {
        let at = accounts.named(account).subresource("token");
        manager.create_subresource(&at, &json!({"spec": {}}))
    };
    let refused = "get tokens of its controllers";
    for account in [
        "daemon-set-controller",
        "clusterrole-aggregation-controller",
    ] {
        eventually("the controller manager has made the account", || {
            inside
                .admin
                .find(&accounts.named(account))
                .unwrap()
                .is_some()
        });
        forbidden(token(account), refused);
        let secret = json!({
            "metadata": {"name": "objects-token", "annotations": {"kubernetes.io/service-account.name": account}},
            "type": "kubernetes.io/service-account-token",
        });
        forbidden(
            manager.create(&SECRETS.in_namespace(NAMESPACE), &secret),
            refused,
        );
        // who may make pods gets no token through the kubelet either
        let volume = token_volume(&[""]);
        let pod = format!("objects-{account}");
        let uid = add_pod(
            &inside.admin,
            (NAMESPACE, account),
            &pod,
            &worker.name,
            volume,
        );
        eventually("the kubelet is refused by the policy", || {
            let asked = worker.token((NAMESPACE, account), &pod, &uid, &[]);
            asked.is_err_and(|error| error.to_string().contains(refused))
        });
    }
    let own = json!({"metadata": {"name": "objects-cloud-provider"}});
    manager.create(&accounts, &own).unwrap();
    token("objects-cloud-provider").unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_controller_deletes_expired_bootstrap_tokens() {
    let inside = Inside::shared();
    let end = time::seconds(SystemTime::now() - Duration::from_secs(60));
    let mut token = ticket("cccccc");
    token["stringData"] = json!({"token-id": "cccccc", "expiration": end});
    let at = secret("bootstrap-token-cccccc");
    create(&inside.kubeadm(), &at, &token).unwrap();
    with_controllers(inside);
    eventually("the token is deleted", || {
        inside.admin.find(&at).unwrap().is_none()
    });
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_controller_publishes_the_authority_of_the_cluster_and_no_agent_does() {
    let inside = Inside::shared();
    let worker = inside.worker("objects-authority", "10.5.0.10");
    let verbs = ["create", "get", "update", "patch", "delete"];
    let rules = json!([rule(&[""], &["configmaps"], &verbs)]);
    let agent = inside.agent_on(&worker, ("agents", "authority"), &rules);
    with_controllers(inside);
    let at = map("kube-root-ca.crt");
    let authority = || inside.admin.find(&at).unwrap();
    eventually("the authority", || authority().is_some());
    let evil = json!({"data": {"ca.crt": "evil"}});
    forbidden(agent.merge(&at, &evil), REFUSED);
    forbidden(deleted(&agent, &at), REFUSED);
    // the controller writes it again
    inside.kubeadm().merge(&at, &evil).unwrap();
    let is_right = |map: Value| {
        map["data"]["ca.crt"]
            .as_str()
            .unwrap()
            .starts_with("-----BEGIN")
    };
    eventually("the right one", || authority().is_some_and(is_right));
}
