//! What the policies of admission.yaml refuse, and what they must let pass: what kubelets, kubeadm, flannel, cloud controllers, the
//! controller manager and our own services write.

use kubernetes::client::{
    CONFIG_MAPS, Client, DAEMON_SETS, NODES, Object, PODS, ROLE_BINDINGS, Resource, SECRETS,
    SERVICE_ACCOUNTS, Selector,
};
use serde_json::{Value, json};

use crate::attacker::{Inside, Kubelet, eventually, forbidden};

const ROLE: &str = "node-role.kubernetes.io/control-plane";
const LABEL: &str = "firstlight.node-restriction.kubernetes.io/attested";
const SLICES: Resource = Resource::namespaced("discovery.k8s.io", "v1", "endpointslices");
const ENDPOINTS: Resource = Resource::namespaced("", "v1", "endpoints");

fn status(node: &str) -> Object {
    NODES.named(node).subresource("status")
}

/// What the join service or an administrator writes when a node is refused.
fn refuse(inside: &Inside, node: &str) {
    let refused = json!({
        "metadata": {"labels": {LABEL: "false"}, "annotations": {"firstlight/cordoned": "a"}},
        "spec": {"unschedulable": true, "taints": [{"key": "firstlight/attestation", "value": "refused", "effect": "NoSchedule"}]},
    });
    inside.admin.merge(&NODES.named(node), &refused).unwrap();
    let condition = json!({"status": {"conditions": [{"type": "Attested", "status": "False", "reason": "Refused"}]}});
    inside.admin.merge(&status(node), &condition).unwrap();
}

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!([{"apiGroups": [group], "resources": resources, "verbs": verbs}])
}

/// Returns the addresses behind a Service, by its EndpointSlices.
fn behind(inside: &Inside, service: &str) -> Vec<String> {
    let selector = Selector::labels(&format!("kubernetes.io/service-name={service}"));
    let slices = SLICES.in_namespace("kube-system");
    let slices = inside.admin.list(&slices, &selector).unwrap().items;
    let endpoints = slices
        .iter()
        .flat_map(|slice| slice["endpoints"].as_array().cloned().unwrap_or_default());
    endpoints
        .map(|endpoint| endpoint["addresses"][0].as_str().unwrap().to_owned())
        .collect()
}

/// Puts a pod that the DaemonSet controller has made for this control plane there, as the scheduler does, and reports its address as
/// the kubelet does. Returns its name.
fn run_pod(inside: &Inside, plane: &Kubelet, set: &str, ip: &str) -> String {
    eventually("a pod for the control plane", || {
        inside.nodes_of(set).contains(&plane.name)
    });
    let pods = PODS.in_namespace("kube-system");
    let selector = Selector::labels(&format!("k8s-app={set}"));
    let all = inside.admin.list(&pods, &selector).unwrap().items;
    let is_here = |pod: &&Value| {
        pod["spec"]["affinity"]
            .to_string()
            .contains(&format!("\"{}\"", plane.name))
    };
    let name = all.iter().find(is_here).unwrap()["metadata"]["name"]
        .as_str()
        .unwrap()
        .to_owned();
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
        "target": {"apiVersion": "v1", "kind": "Node", "name": plane.name},
    });
    let scheduler = inside.cluster.client_of("system:kube-scheduler", "");
    scheduler
        .create_subresource(&pods.named(&name).subresource("binding"), &binding)
        .unwrap();
    let ready = json!({"status": {
        "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "hostIP": plane.address,
        "conditions": [{"type": "Ready", "status": "True"}],
    }});
    let at = pods.named(&name).subresource("status");
    plane.client.merge(&at, &ready).unwrap();
    name
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn the_token_of_a_network_plugin_gives_no_role_no_attestation_and_no_address() {
    let inside = Inside::shared();
    inside.control_plane("label-plane", "10.2.0.1");
    let (refused, other) = (
        inside.worker("label-refused", "10.2.0.9"),
        inside.worker("label-other", "10.2.0.2"),
    );
    refuse(inside, "label-refused");
    let flannel = inside.flannel_on(&refused);
    let label = |key: &str, value: Value| json!({"metadata": {"labels": {key: value}}});
    for (node, change, part) in [
        (
            "label-refused",
            label(ROLE, json!("")),
            "make a node a control plane",
        ),
        (
            "label-plane",
            label(ROLE, Value::Null),
            "take this role away",
        ),
        (
            "label-refused",
            label(LABEL, json!("true")),
            "change the attestation",
        ),
        (
            "label-other",
            label(LABEL, json!("false")),
            "change the attestation",
        ),
        (
            "label-refused",
            json!({"metadata": {"annotations": {"firstlight/cordoned": null}}}),
            "change the attestation",
        ),
        (
            "label-refused",
            json!({"status": {"conditions": [{"type": "Attested", "status": "True"}]}}),
            "change the attestation",
        ),
        (
            "label-other",
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.2.0.9"}]}}),
            "change its addresses",
        ),
        (
            "label-other",
            json!({"status": {"nodeInfo": {"kubeletVersion": "v1.99.0"}}}),
            "its versions",
        ),
        (
            "label-other",
            json!({"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}),
            "its versions",
        ),
    ] {
        forbidden(flannel.merge(&status(node), &change), part);
    }
    eventually("pods for the control plane", || {
        let of = |set: &str| inside.nodes_of(set).contains(&"label-plane".to_owned());
        of("join-service") && of("key-service") && of("member-controller")
    });
    for set in ["join-service", "key-service", "member-controller"] {
        assert!(!inside.nodes_of(set).contains(&refused.name), "{set}");
    }
    let seen = other.node();
    assert_eq!(seen["status"]["addresses"][0]["address"], other.address);
    assert_eq!(seen["metadata"]["labels"][LABEL], Value::Null);
    // the plugin's own work
    let note =
        json!({"metadata": {"annotations": {"flannel.alpha.coreos.com/public-ip": "10.2.0.9"}}});
    flannel.merge(&status("label-refused"), &note).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_refused_kubelet_takes_nothing_back_and_goes_on_reporting() {
    let inside = Inside::shared();
    let refused = inside.worker("cordoned", "10.2.1.1");
    refuse(inside, "cordoned");
    let at = NODES.named("cordoned");
    let schedulable = json!({"spec": {"unschedulable": null}});
    forbidden(
        refused.client.merge(&at, &schedulable),
        "take back the cordon",
    );
    let note = json!({"metadata": {"annotations": {"firstlight/cordoned": null}}});
    forbidden(refused.client.merge(&at, &note), "change the attestation");
    let condition = json!({"status": {"conditions": [{"type": "Attested", "status": "True"}]}});
    forbidden(
        refused.client.merge(&status("cordoned"), &condition),
        "change the attestation",
    );
    refused.report().unwrap();
    // kubectl uncordon of an administrator
    inside.kubeadm().merge(&at, &schedulable).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_node_and_cloud_controllers_write_addresses_and_provider_ids_and_no_other_agent_does() {
    let inside = Inside::shared();
    let (one, other) = (
        inside.worker("cloud-1", "10.2.2.1"),
        inside.worker("cloud-2", "10.2.2.2"),
    );
    let address =
        |ip: &str| json!({"status": {"addresses": [{"type": "InternalIP", "address": ip}]}});
    let provider = |id: &str| json!({"spec": {"providerID": id}});
    // a kubelet sets its provider ID at registration or later
    one.client
        .merge(&status("cloud-1"), &address("10.2.2.3"))
        .unwrap();
    one.client
        .merge(&NODES.named("cloud-1"), &provider("aws:///1"))
        .unwrap();

    let nodes = rule("", &["nodes", "nodes/status"], &["get", "update", "patch"]);
    let agent = inside.agent_on(&one, ("agents", "labels-nodes"), &nodes);
    forbidden(
        agent.merge(&status("cloud-2"), &address("10.2.2.1")),
        "change its addresses",
    );
    forbidden(
        agent.merge(&status("cloud-1"), &address("10.2.2.1")),
        "change its addresses",
    );
    forbidden(
        agent.merge(&NODES.named("cloud-2"), &provider("aws:///1")),
        "change its addresses",
    );

    let manager = inside.agent_on(&one, ("kube-system", "cloud-node-manager"), &nodes);
    manager
        .merge(&status("cloud-1"), &address("10.2.2.1"))
        .unwrap();
    forbidden(
        manager.merge(&status("cloud-2"), &address("10.2.2.1")),
        "change its addresses",
    );

    let controller = inside.agent_on(&one, ("kube-system", "cloud-controller-manager"), &nodes);
    controller
        .merge(&status("cloud-2"), &address("10.2.2.4"))
        .unwrap();
    controller
        .merge(&NODES.named("cloud-2"), &provider("aws:///2"))
        .unwrap();
    assert_eq!(
        other.node()["status"]["addresses"][0]["address"],
        "10.2.2.4"
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_kubelet_and_no_agent_makes_a_pod_an_endpoint_of_our_services() {
    let inside = Inside::shared();
    let plane = inside.control_plane("ends-plane", "10.2.3.1");
    let worker = inside.worker("ends-worker", "10.2.3.9");
    refuse(inside, "ends-worker");
    let works = run_pod(inside, &plane, "member-controller", "10.2.3.101");
    let key = run_pod(inside, &plane, "key-service", "10.2.3.102");
    let is_behind = |service: &str, ip: &str| behind(inside, service).contains(&ip.to_owned());
    eventually("endpoints by the controller", || {
        is_behind("join-attestation", "10.2.3.101") && is_behind("key-service", "10.2.3.102")
    });

    for set in ["join-service", "key-service", "member-controller"] {
        let mirror = worker.mirror(
            "kube-system",
            &format!("{set}-z9"),
            &json!({"k8s-app": set}),
        );
        forbidden(
            mirror,
            "only the DaemonSet controller and administrators make pods",
        );
    }
    // a kubelet may not change labels by the status, but Calico's account may
    worker
        .mirror("kube-system", "later", &json!({"a": "b"}))
        .unwrap();
    let label = json!({"metadata": {"labels": {"k8s-app": "join-service"}}});
    let pods = PODS.in_namespace("kube-system");
    let later = pods.named("later").subresource("status");
    assert!(worker.client.merge(&later, &label).is_err());
    let calico = inside.agent_on(
        &worker,
        ("kube-system", "calico-cni-plugin"),
        &rule("", &["pods/status"], &["patch"]),
    );
    forbidden(calico.merge(&later, &label), "make pods of the services");
    let moved = json!({"status": {"podIP": "10.2.3.9", "podIPs": [{"ip": "10.2.3.9"}]}});
    let note =
        json!({"metadata": {"annotations": {"cni.projectcalico.org/podIP": "10.2.3.101/32"}}});
    for pod in [&works, &key] {
        let at = pods.named(pod).subresource("status");
        forbidden(calico.merge(&at, &moved), "gives a pod of the services");
        calico.merge(&at, &note).unwrap();
    }
    for (service, ip) in [
        ("join-attestation", "10.2.3.101"),
        ("key-service", "10.2.3.102"),
    ] {
        assert!(
            is_behind(service, ip) && !is_behind(service, "10.2.3.9"),
            "{service}"
        );
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_may_write_pods_and_workloads_gets_no_pod_of_our_accounts() {
    let inside = Inside::shared();
    let plane = inside.control_plane("pods-plane", "10.2.4.1");
    let worker = inside.worker("pods-worker", "10.2.4.9");
    let pod = run_pod(inside, &plane, "key-service", "10.2.4.102");
    let agent = inside.agent_on(
        &worker,
        ("agents", "pods"),
        &json!([
            {"apiGroups": [""], "resources": ["pods", "pods/ephemeralcontainers"], "verbs": ["create", "get", "patch", "update"]},
            {"apiGroups": [""], "resources": ["bindings", "pods/binding", "pods/exec", "pods/attach", "pods/portforward"], "verbs": ["create"]},
            {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["create", "get", "patch", "update"]},
        ]),
    );
    let pods = PODS.in_namespace("kube-system");
    let make = |name: &str, labels: Value, account: &str| {
        json!({
            "metadata": {"name": name, "labels": labels},
            "spec": {"serviceAccountName": account, "nodeName": "pods-worker", "containers": [{"name": "a", "image": "a"}]},
        })
    };
    let no_labels = make("by-account", json!({}), "join-service");
    forbidden(
        agent.create(&pods, &no_labels),
        "only the DaemonSet controller",
    );
    let labelled = make("by-label", json!({"k8s-app": "key-service"}), "default");
    forbidden(
        agent.create(&pods, &labelled),
        "only the DaemonSet controller",
    );
    let image = agent.modify(&pods.named(&pod), |pod| {
        pod["spec"]["containers"][0]["image"] = json!("attacker");
        true
    });
    forbidden(image, "change pods of the services");
    let debug = json!({"spec": {"ephemeralContainers": [{"name": "d", "image": "attacker"}]}});
    let at = pods.named(&pod).subresource("ephemeralcontainers");
    forbidden(agent.merge(&at, &debug), "change pods of the services");

    let image = json!({"spec": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}});
    for part in ["exec", "attach", "portforward"] {
        let opened = agent.create_subresource(&pods.named(&pod).subresource(part), &json!({}));
        forbidden(opened, "run commands in pods of the services");
    }
    // another scheduler, whose pod is on a worker, may be faster than the cluster's own
    let binding = |name: &str| {
        json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "pods-worker"},
        })
    };
    let at = pods.named(&pod).subresource("binding");
    let put = agent.create_subresource(&at, &binding(&pod));
    forbidden(put, "only the scheduler and administrators put pods");
    let bindings = Resource::namespaced("", "v1", "bindings").in_namespace("kube-system");
    let put = agent.create(&bindings, &binding(&pod));
    forbidden(put, "only the scheduler and administrators put pods");
    let mut other = make("unbound", json!({}), "default");
    other["spec"].as_object_mut().unwrap().remove("nodeName");
    agent.create(&pods, &other).unwrap();
    let at = pods.named("unbound").subresource("binding");
    agent.create_subresource(&at, &binding("unbound")).unwrap();
    let sets = DAEMON_SETS.in_namespace("kube-system");
    forbidden(
        agent.merge(&sets.named("key-service"), &image),
        "change the DaemonSets",
    );
    // the DaemonSet controller makes no pod of our account for another DaemonSet
    let set = json!({"metadata": {"name": "stranger"}, "spec": {
        "selector": {"matchLabels": {"app": "stranger"}},
        "template": {"metadata": {"labels": {"app": "stranger"}}, "spec": {
            "serviceAccountName": "join-service", "tolerations": [{"operator": "Exists"}], "containers": [{"name": "a", "image": "a"}]}},
    }});
    agent.create(&sets, &set).unwrap();
    eventually("the controller is refused", || {
        let failed = Selector::fields("reason=FailedCreate,involvedObject.name=stranger");
        let events = Resource::namespaced("", "v1", "events").in_namespace("kube-system");
        let events = inside.admin.list(&events, &failed).unwrap().items;
        events.iter().any(|event| {
            event["message"]
                .to_string()
                .contains("pods of other DaemonSets")
        })
    });
    let selector = Selector::labels("app=stranger");
    assert!(
        inside
            .admin
            .list(&pods, &selector)
            .unwrap()
            .items
            .is_empty()
    );
    inside.admin.delete(&sets.named("stranger")).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_kubelet_makes_pods_of_kubeadms_control_plane_only_by_the_name_of_its_own_node() {
    let inside = Inside::shared();
    let plane = inside.control_plane("static-plane", "10.2.5.1");
    let worker = inside.worker("static-worker", "10.2.5.9");
    let labels = |component: &str| json!({"component": component, "tier": "control-plane"});
    for component in [
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
    ] {
        let name = format!("{component}-static-plane");
        plane
            .mirror("kube-system", &name, &labels(component))
            .unwrap();
        let names = [format!("{component}-other-plane"), format!("{component}-0")];
        for name in names {
            let made = worker.mirror("kube-system", &name, &labels(component));
            forbidden(made, "each only those of its own node");
        }
    }
    let calico = inside.agent_on(
        &worker,
        ("kube-system", "calico-cni-plugin"),
        &rule("", &["pods/status"], &["patch"]),
    );
    worker
        .mirror("kube-system", "static-later", &json!({"a": "b"}))
        .unwrap();
    let at = PODS
        .in_namespace("kube-system")
        .named("static-later")
        .subresource("status");
    let label = json!({"metadata": {"labels": labels("etcd")}});
    forbidden(calico.merge(&at, &label), "each only those of its own node");
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_may_write_endpoints_does_not_write_ours() {
    let inside = Inside::shared();
    let worker = inside.worker("slices", "10.2.6.9");
    let agent = inside.agent_on(
        &worker,
        ("agents", "endpoints"),
        &json!([
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["create", "get", "patch", "update"]},
            {"apiGroups": [""], "resources": ["endpoints", "endpoints/restricted"], "verbs": ["create", "get", "patch", "update"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices/restricted"], "verbs": ["create"]},
        ]),
    );
    let slice = |name: &str, service: &str| {
        json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.2.6.9"], "conditions": {"ready": true}}], "ports": [{"port": 9443}],
        })
    };
    let slices = SLICES.in_namespace("kube-system");
    for service in [
        "join-service",
        "join-attestation",
        "key-service",
        "key-service-local",
        "key-service-waiting",
    ] {
        forbidden(
            agent.create(&slices, &slice(service, service)),
            "which pods serve the Services",
        );
    }
    agent.create(&slices, &slice("own", "own")).unwrap();
    let label = json!({"metadata": {"labels": {"kubernetes.io/service-name": "key-service"}}});
    forbidden(
        agent.merge(&slices.named("own"), &label),
        "which pods serve the Services",
    );
    let map = json!({"subsets": [{"addresses": [{"ip": "10.2.6.9"}], "ports": [{"port": 9443}]}]});
    let endpoints = ENDPOINTS.in_namespace("kube-system");
    eventually("endpoints by the controller", || {
        inside
            .admin
            .find(&endpoints.named("key-service"))
            .unwrap()
            .is_some()
    });
    forbidden(
        agent.merge(&endpoints.named("key-service"), &map),
        "which pods serve the Services",
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_may_request_any_token_gets_none_of_our_accounts() {
    let inside = Inside::shared();
    let plane = inside.control_plane("accounts-plane", "10.2.7.1");
    let worker = inside.worker("accounts-worker", "10.2.7.9");
    let agent = inside.agent_on(
        &worker,
        ("agents", "external-secrets"),
        &json!([
            {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]},
            {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "get", "update"]},
            {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["rolebindings"], "verbs": ["create"]},
            {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles"], "verbs": ["bind"]},
        ]),
    );
    let accounts = SERVICE_ACCOUNTS.in_namespace("kube-system");
    let token = |name: &str| accounts.named(name).subresource("token");
    for name in ["join-service", "key-service", "member-controller"] {
        let asked = agent.create_subresource(
            &token(name),
            &json!({"spec": {"audiences": ["key-service"]}}),
        );
        forbidden(asked, "get tokens of the accounts of Firstlight");
        let secret = json!({
            "metadata": {"name": format!("token-{name}"), "annotations": {"kubernetes.io/service-account.name": name}},
            "type": "kubernetes.io/service-account-token",
        });
        let secrets = SECRETS.in_namespace("kube-system");
        forbidden(agent.create(&secrets, &secret), "Secrets with tokens");
        let binding = json!({
            "metadata": {"name": "more"}, "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "kube-system"}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
        });
        let bindings = ROLE_BINDINGS.in_namespace("default");
        forbidden(
            agent.create(&bindings, &binding),
            "give roles to the accounts",
        );
    }
    agent
        .create_subresource(&token("default"), &json!({"spec": {}}))
        .unwrap();
    // the kubelet of the pod
    let pod = run_pod(inside, &plane, "join-service", "10.2.7.101");
    let at = PODS.in_namespace("kube-system").named(&pod);
    let uid = crate::attacker::uid(&inside.admin.get(&at).unwrap());
    let account = ("kube-system", "join-service");
    plane.eventual_token(account, &pod, &uid, &["key-service"]);
    assert!(worker.token(account, &pod, &uid, &["key-service"]).is_err());
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn only_their_owners_write_records_certificates_and_tokens_of_tickets() {
    let inside = Inside::shared();
    let plane = inside.control_plane("records-plane", "10.2.8.1");
    let worker = inside.worker("records-worker", "10.2.8.9");
    let agent = inside.agent_on(
        &worker,
        ("kube-system", "cluster-autoscaler"),
        &rule(
            "",
            &["configmaps", "secrets"],
            &["create", "get", "update", "patch", "delete"],
        ),
    );
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let secrets = SECRETS.in_namespace("kube-system");
    let named = |name: &str| json!({"metadata": {"name": name}});
    let owned = "only the service that owns this record";
    for name in [
        "join-node-new",
        "join-disk-new",
        "join-collateral",
        "join-removed-nodes",
        "k8s-components-new",
        "kubelet-config",
        "kube-proxy",
        "join-attested-new",
    ] {
        forbidden(agent.create(&maps, &named(name)), owned);
    }
    for name in ["join-config", "key-service-ca"] {
        forbidden(
            agent.merge(&maps.named(name), &json!({"data": {"a": "b"}})),
            owned,
        );
        assert_eq!(
            agent.delete(&maps.named(name)).unwrap_err().code(),
            Some(403)
        );
    }
    for name in [
        "join-node-files",
        "join-attestation-keys",
        "bootstrap-token-abcdef",
    ] {
        forbidden(agent.create(&secrets, &named(name)), owned);
    }
    agent
        .create(&maps, &named("cluster-autoscaler-status"))
        .unwrap();

    let services = |account: &str, ip: &str| {
        let pod = run_pod(inside, &plane, account, ip);
        let at = PODS.in_namespace("kube-system").named(&pod);
        let uid = crate::attacker::uid(&inside.admin.get(&at).unwrap());
        let token = plane.eventual_token(("kube-system", account), &pod, &uid, &[]);
        inside.cluster.client_with(&token)
    };
    let join = services("join-service", "10.2.8.101");
    join.create(&maps, &named("join-node-records")).unwrap();
    join.delete(&maps.named("join-node-records")).unwrap();
    // only an operator removes a node, or lets it join again
    let removed = json!({"metadata": {"name": "join-removed-nodes"}, "data": {}});
    let made = join.create(&maps, &removed);
    forbidden(made, "the join service changes no ConfigMaps but");
    let ticket = json!({
        "metadata": {"name": "bootstrap-token-fedcba", "labels": {"firstlight/node": "a"}}, "type": "bootstrap.kubernetes.io/token",
        "data": {"auth-extra-groups": "c3lzdGVtOmJvb3RzdHJhcHBlcnM6Zmlyc3RsaWdodDpqb2luLXRpY2tldA=="},
    });
    join.create(&secrets, &ticket).unwrap();
    join.delete(&secrets.named("bootstrap-token-fedcba"))
        .unwrap();
    let key = services("key-service", "10.2.8.102");
    let at = maps.named("key-service-ca");
    let certificate = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "key-service-ca", "namespace": "kube-system"}, "data": {"ca.crt": "a"}});
    key.apply_as("key-service", &at, &certificate).unwrap();
    judges(&services("member-controller", "10.2.8.103"), &worker);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_migration_of_storage_and_the_garbage_collector_change_nothing_and_pass() {
    let inside = Inside::shared();
    let worker = inside.worker("same-worker", "10.2.10.9");
    let verbs = ["get", "update", "patch"];
    let agent = inside.agent_on(
        &worker,
        ("agents", "migration"),
        &json!([
            {"apiGroups": [""], "resources": ["configmaps", "secrets", "endpoints", "endpoints/restricted"], "verbs": verbs},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs},
        ]),
    );
    let owner =
        |uid: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "no-such", "uid": uid});
    for (resource, object) in objects_of_policies() {
        let all = resource.in_namespace("kube-system");
        let mut object = object;
        object["metadata"]["finalizers"] = json!(["tests/kept"]);
        object["metadata"]["annotations"]["tests/a"] = json!("b");
        let name = object["metadata"]["name"].as_str().unwrap();
        let at = all.named(name);
        inside.admin.create_if_absent(&all, &object).unwrap();
        inside.admin.merge(&at, &object).unwrap();
        // the controllers of the cluster write some of these, too
        eventually(name, || match agent.update(&at, &agent.get(&at).unwrap()) {
            Ok(_) => true,
            Err(error) if error.code() == Some(409) => false,
            Err(error) => panic!("{at}: {error}"),
        });
        let of_account = object["type"] == "kubernetes.io/service-account-token";
        for change in [
            json!({"metadata": {"finalizers": ["tests/kept", "tests/other"]}}),
            json!({"metadata": {"ownerReferences": [owner("6a1f1f2e-6f6b-4a8e-9d4b-3a0d3c1c0a12")]}}),
            json!({"metadata": {"annotations": {"tests/a": "c"}}}),
            json!({"metadata": {"labels": {"tests/a": "c"}}}),
            json!({"immutable": true}),
        ] {
            let has_field = object["kind"] == "ConfigMap" || object["kind"] == "Secret";
            if !of_account && (has_field || change["immutable"].is_null()) {
                forbidden(agent.merge(&at, &change), "only ");
            }
        }
        let removed = json!({"metadata": {"finalizers": null}});
        agent.merge(&at, &removed).unwrap();
    }
}

/// Objects that the policies know, one of each kind for each policy.
fn objects_of_policies() -> Vec<(Resource, Value)> {
    let map = |name: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "b"}});
    let secret = |name: &str, kind: &str| {
        let notes = json!({"kubernetes.io/service-account.name": name});
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": format!("same-{name}"), "annotations": notes}, "type": kind})
    };
    let mut files = secret("files", "Opaque");
    files["metadata"] = json!({"name": "join-node-files"});
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": [{"addresses": ["10.2.10.9"]}],
        "metadata": {"name": "key-service-same", "labels": {"kubernetes.io/service-name": "key-service"}}, "ports": [{"port": 9000}],
    });
    let endpoints = json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "key-service-waiting"},
        "subsets": [{"addresses": [{"ip": "10.2.10.9"}], "ports": [{"port": 9000}]}]});
    let token = "kubernetes.io/service-account-token";
    vec![
        (CONFIG_MAPS, map("join-node-same")),
        (SECRETS, files),
        (SECRETS, secret("join-service", token)),
        (SECRETS, secret("daemon-set-controller", token)),
        (SLICES, slice),
        (ENDPOINTS, endpoints),
    ]
}

/// The member controller writes what it concludes about a node.
fn judges(controller: &Client, worker: &Kubelet) {
    let mut node = worker.node();
    node["metadata"]["labels"][LABEL] = json!("false");
    node["metadata"]["annotations"]["firstlight/cordoned"] = json!("a");
    node["spec"]["unschedulable"] = json!(true);
    let taint =
        json!({"key": "firstlight/attestation", "value": "refused", "effect": "NoSchedule"});
    node["spec"]["taints"].as_array_mut().unwrap().push(taint);
    controller
        .update(&NODES.named(&worker.name), &node)
        .unwrap();
    let mut conditions = worker.node()["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap();
    conditions.push(json!({"type": "Attested", "status": "False", "reason": "Refused"}));
    let condition = json!({"status": {"conditions": conditions}});
    controller.merge(&status(&worker.name), &condition).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn the_kubelet_of_a_removed_node_does_not_make_the_node_again() {
    let inside = Inside::shared();
    let worker = inside.worker("removed-worker", "10.2.9.9");
    inside.mark_removed("removed-worker");
    inside.admin.delete(&NODES.named("removed-worker")).unwrap();
    let node = json!({"metadata": {"name": "removed-worker"}});
    eventually("the policy knows the name", || {
        let tried = worker.client.create(&NODES.all(), &node);
        let is_refused =
            tried.is_err_and(|error| error.to_string().contains("was removed from the cluster"));
        inside
            .admin
            .delete_if_there(&NODES.named("removed-worker"))
            .unwrap();
        is_refused
    });
    inside.worker("removed-other", "10.2.9.8");
}
