//! The ports of Firstlight on the nodes: no tenant and no agent on a worker takes them.

use common::kube_apiserver::Cluster;
use kubernetes::client::{CONFIG_MAPS, PODS, SERVICES};
use kubernetes::kubeadm;
use serde_json::{Value, json};

use crate::attacker::{Inside, forbidden, settings};

const JOIN_SERVICE: u16 = 30090;

fn service(port: u16, more: &Value) -> Value {
    let mut service = json!({"metadata": {"name": format!("p{port}")}, "spec": {"selector": {"app": "p"}, "ports": [{"port": port}]}});
    for (name, value) in more.as_object().unwrap() {
        service["spec"][name] = value.clone();
    }
    service
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_tenant_takes_no_address_of_a_node_by_external_ips() {
    let inside = Inside::shared();
    let tenant = inside.tenant("external");
    let services = SERVICES.in_namespace("external");
    let taken = service(JOIN_SERVICE, &json!({"externalIPs": ["10.9.0.1"]}));
    forbidden(
        tenant.create(&services, &taken),
        "Use of external IPs is denied",
    );
    tenant.create(&services, &service(80, &json!({}))).unwrap();
    let later = json!({"spec": {"externalIPs": ["10.9.0.1"]}});
    forbidden(
        tenant.merge(&services.named("p80"), &later),
        "Use of external IPs is denied",
    );
}

/// The API server of a cluster that `firstlight init` of an earlier version has made.
#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn external_ips_are_refused_without_the_admission_plugin() {
    let inside = Inside::start_on(Cluster::start_with(&["NodeRestriction"], &[]), &settings());
    let tenant = inside.tenant("external");
    let services = SERVICES.in_namespace("external");
    let taken = service(JOIN_SERVICE, &json!({"externalIPs": ["10.9.0.1"]}));
    forbidden(
        tenant.create(&services, &taken),
        "only administrators make Services with externalIPs",
    );
    // those that exist stay, and lose addresses, but get no others
    inside.kubeadm().create(&services, &taken).unwrap();
    let at = services.named("p30090");
    tenant
        .merge(&at, &json!({"metadata": {"labels": {"a": "b"}}}))
        .unwrap();
    let more = json!({"spec": {"externalIPs": ["10.9.0.1", "10.9.0.2"]}});
    forbidden(
        tenant.merge(&at, &more),
        "only administrators make Services with externalIPs",
    );
    tenant
        .merge(&at, &json!({"spec": {"externalIPs": []}}))
        .unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_assigns_addresses_of_load_balancers_gives_none_to_our_ports() {
    let inside = Inside::shared();
    let worker = inside.worker("balancer", "10.3.0.9");
    let tenant = inside.tenant("balanced");
    let rules = json!([{"apiGroups": [""], "resources": ["services", "services/status"], "verbs": ["get", "update", "patch"]}]);
    let metallb = inside.agent_on(&worker, ("metallb-system", "controller"), &rules);
    let cloud = inside.agent_on(&worker, ("kube-system", "service-controller"), &rules);
    let services = SERVICES.in_namespace("balanced");
    let ingress = json!({"status": {"loadBalancer": {"ingress": [{"ip": "10.9.0.1"}]}}});
    let by_name = json!({"status": {"loadBalancer": {"ingress": [{"hostname": "a.example.com"}]}}});
    for port in [JOIN_SERVICE, 9000, 9999] {
        let balanced = service(port, &json!({"type": "LoadBalancer"}));
        tenant.create(&services, &balanced).unwrap();
        let at = services.named(&format!("p{port}")).subresource("status");
        forbidden(
            metallb.merge(&at, &ingress),
            "give an address of a load balancer",
        );
        metallb.merge(&at, &by_name).unwrap();
        cloud.merge(&at, &ingress).unwrap();
    }
    let web = service(443, &json!({"type": "LoadBalancer"}));
    tenant.create(&services, &web).unwrap();
    let at = services.named("p443");
    metallb.merge(&at.subresource("status"), &ingress).unwrap();
    // the port follows the address
    let port = json!({"spec": {"ports": [{"port": JOIN_SERVICE}]}});
    forbidden(
        tenant.merge(&at, &port),
        "give an address of a load balancer",
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_pod_takes_no_port_of_firstlight_on_its_node() {
    let inside = Inside::shared();
    let tenant = inside.tenant("host-ports");
    let pods = PODS.in_namespace("host-ports");
    let pod = |name: &str, kind: &str, port: u16| {
        let mut pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "a", "image": "a"}]}});
        let taking =
            json!({"name": "b", "image": "a", "ports": [{"containerPort": 80, "hostPort": port}]});
        match pod["spec"][kind].as_array_mut() {
            Some(containers) => containers.push(taking),
            None => pod["spec"][kind] = json!([taking]),
        }
        pod
    };
    for port in [JOIN_SERVICE, 9000, 9999] {
        for kind in ["containers", "initContainers"] {
            let made = tenant.create(&pods, &pod(&format!("p{port}"), kind, port));
            forbidden(made, "no pod takes a port of Firstlight");
        }
    }
    tenant
        .create(&pods, &pod("p8080", "containers", 8080))
        .unwrap();
}

/// What `bootstrapper upgrade` does before kubeadm.
#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_upgrade_writes_the_admission_plugin_into_kubeadms_configuration_once() {
    let inside = Inside::shared();
    let configuration = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\napiServer:\n  extraArgs:\n  - name: profiling\n    value: \"false\"\nkubernetesVersion: v1.36.3\n";
    let map = json!({"metadata": {"name": "kubeadm-config"}, "data": {"ClusterConfiguration": configuration}});
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let admin = inside.kubeadm();
    admin.create(&maps, &map).unwrap();
    assert!(kubeadm::deny_external_ips(&admin).unwrap());
    let at = maps.named("kubeadm-config");
    let written = admin.get(&at).unwrap();
    let text = written["data"]["ClusterConfiguration"].as_str().unwrap();
    let read: Value = serde_json::from_str(text).unwrap();
    assert_eq!(
        read["apiServer"]["extraArgs"][1],
        json!({"name": "enable-admission-plugins", "value": "NodeRestriction,DenyServiceExternalIPs"})
    );
    assert!(!kubeadm::deny_external_ips(&admin).unwrap());
    assert_eq!(
        admin.get(&at).unwrap()["metadata"]["resourceVersion"],
        written["metadata"]["resourceVersion"]
    );
}
