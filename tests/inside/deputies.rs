//! What stops the services without a right to any of their objects: deletion by Kubernetes' own controllers, which act for an account that may
//! only write owners or conditions; eviction; pods of a worker that kubeadm takes for those of a control plane; objects that are too large.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use base::uuid::Uuid;
use common::kube_apiserver::{Process, build};
use common::volumes::add_pod;
use kubernetes::client::{
    CERTIFICATE_SIGNING_REQUESTS, CONFIG_MAPS, Client, DAEMON_SETS, NODES, PODS, Resource,
    SERVICE_ACCOUNTS, SERVICES, Selector,
};
use kubernetes::kubeadm;
use kubernetes::kubelet_certificate::{issue_client, place_client};
use kubernetes::machine_record::MachineRecord;
use kubernetes::parameters::NodeName;
use kubernetes::services::TICKET_GROUP;
use serde_json::{Value, json};

use crate::attacker::{
    ETCD_ENDPOINT, FLANNEL, Inside, Kubelet, eventually, forbidden, settings, token_volume, uid,
};

const KUBE_SYSTEM: &str = "kube-system";
const SLICES: Resource = Resource::namespaced("discovery.k8s.io", "v1", "endpointslices");
/// The account of an agent with rights of Karpenter, cluster-autoscaler and Cilium's operator.
const AGENT: (&str, &str) = ("agents", "deputies");

/// A cluster whose garbage collector runs, as in each real one.
fn inside() -> &'static Inside {
    static CLUSTER: OnceLock<(Inside, Process)> = OnceLock::new();
    let make = || {
        let inside = Inside::start(&settings());
        let collector = "garbage-collector-controller";
        let running = inside.cluster.start_restricted_controllers(collector);
        (inside, running)
    };
    &CLUSTER.get_or_init(make).0
}

fn agent(inside: &Inside, worker: &Kubelet) -> Client {
    let rules = json!([
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch", "delete"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "delete", "deletecollection"]},
        {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["get", "patch", "update"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["get", "patch", "delete"]},
        {"apiGroups": [""], "resources": ["services", "services/status", "endpoints"], "verbs": ["get", "create", "patch", "delete"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "delete", "deletecollection"]},
        {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["get", "patch", "delete"]},
    ]);
    inside.agent_on(worker, AGENT, &rules)
}

/// An owner that does not exist, so that the garbage collector deletes what it owns.
fn orphaned() -> Value {
    let uid = "6a1f1f2e-6f6b-4a8e-9d4b-3a0d3c1c0a12";
    let owner = json!({"apiVersion": "v1", "kind": "Namespace", "name": "absent", "uid": uid});
    json!({"metadata": {"ownerReferences": [owner]}})
}

fn deleted(
    done: Result<(), kubernetes::client::Error>,
) -> Result<Value, kubernetes::client::Error> {
    done.map(|()| Value::Null)
}

/// Returns the name of a pod of this service.
fn pod_of(inside: &Inside, service: &str) -> String {
    let pods = PODS.in_namespace(KUBE_SYSTEM);
    let selector = Selector::labels(&format!("k8s-app={service}"));
    let all = || inside.admin.list(&pods, &selector).unwrap().items;
    eventually("a pod of the service", || !all().is_empty());
    all()[0]["metadata"]["name"].as_str().unwrap().to_owned()
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_network_plugin_has_no_node_deleted_by_the_garbage_collector() {
    let inside = inside();
    let worker = inside.worker("owned-worker", "10.7.0.1");
    inside.control_plane("owned-plane", "10.7.0.2");
    let flannel = inside.flannel_on(&worker);
    let refused = "only who may delete a node gives it owners or finalizers";
    let kept = json!({"metadata": {"finalizers": ["example.com/stay"]}});
    for node in ["owned-plane", "owned-worker"] {
        let status = NODES.named(node).subresource("status");
        forbidden(flannel.merge(&status, &orphaned()), refused);
        forbidden(flannel.merge(&status, &kept), refused);
    }
    // `firstlight node remove` deletes a Node with a finalizer, but it stays
    let own = NODES.named("owned-worker");
    forbidden(worker.client.merge(&own, &kept), refused);
    inside.admin.delete(&own).unwrap();
    let mut again = json!({"metadata": {"name": "owned-worker"}});
    again["metadata"]["finalizers"] = kept["metadata"]["finalizers"].clone();
    forbidden(worker.client.create(&NODES.all(), &again), refused);
    // Karpenter, which may delete Nodes, has them deleted with its own objects: the collector runs
    inside.worker("owned-other", "10.7.0.3");
    let karpenter = agent(inside, &worker);
    let other = NODES.named("owned-other");
    karpenter.merge(&other, &orphaned()).unwrap();
    eventually("the collector deletes the Node", || {
        inside.admin.find(&other).unwrap().is_none()
    });
    assert!(
        inside
            .admin
            .find(&NODES.named("owned-plane"))
            .unwrap()
            .is_some()
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_that_deletes_nodes_deletes_no_control_plane() {
    let inside = inside();
    let worker = inside.worker("gone-worker", "10.7.1.1");
    inside.control_plane("gone-plane", "10.7.1.2");
    let karpenter = agent(inside, &worker);
    let plane = NODES.named("gone-plane");
    let refused = "delete the Node of a control plane";
    forbidden(deleted(karpenter.delete(&plane)), refused);
    karpenter.delete(&NODES.named("gone-worker")).unwrap();
    // a cloud has deleted the machine
    let rules = json!([{"apiGroups": [""], "resources": ["nodes"], "verbs": ["delete"]}]);
    let cloud = (KUBE_SYSTEM, "cloud-controller-manager");
    let other = inside.worker("gone-other", "10.7.1.3");
    inside
        .agent_on(&other, cloud, &rules)
        .delete(&plane)
        .unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_says_that_a_control_plane_is_not_ready_or_has_no_room() {
    let inside = inside();
    let worker = inside.worker("ready-worker", "10.7.2.1");
    let plane = inside.control_plane("ready-plane", "10.7.2.2");
    let flannel = inside.flannel_on(&worker);
    let status = NODES.named("ready-plane").subresource("status");
    let ready = |status: &str| json!({"status": {"conditions": [{"type": "Ready", "status": status, "reason": "a"}]}});
    let refused = "whether it is ready and has room for pods";
    // the controller of nodes takes the endpoints of such a node away
    forbidden(flannel.merge(&status, &ready("False")), refused);
    forbidden(flannel.merge(&status, &ready("Unknown")), refused);
    let full = json!({"status": {"allocatable": {"pods": "0"}}});
    forbidden(flannel.merge(&status, &full), refused);
    plane.report().unwrap();
    let room = json!({"status": {"allocatable": {"pods": "110", "cpu": "2"}}});
    plane.client.merge(&status, &room).unwrap();
    let rules = json!([{"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}]);
    let controller = inside.agent_on(&worker, (KUBE_SYSTEM, "node-controller"), &rules);
    controller.merge(&status, &ready("Unknown")).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_ends_no_pod_of_ours_and_says_of_none_that_it_has_ended() {
    let inside = inside();
    let worker = inside.worker("ended-worker", "10.7.3.1");
    inside.control_plane("ended-plane", "10.7.3.2");
    let agent = agent(inside, &worker);
    let pods = PODS.in_namespace(KUBE_SYSTEM);
    let failed = json!({"status": {"phase": "Failed"}});
    for service in ["join-service", "key-service", "member-controller"] {
        let name = pod_of(inside, service);
        let at = pods.named(&name);
        let refused = "end pods of the services";
        forbidden(deleted(agent.delete(&at)), refused);
        let uid = uid(&inside.admin.get(&at).unwrap());
        let evicted = agent.evict(&at, &uid).map(|_| Value::Null);
        forbidden(evicted, refused);
        let said = agent.merge(&at.subresource("status"), &failed);
        forbidden(said, "whether a pod of Firstlight runs");
        // the controller replaces pods
        inside.admin.delete(&at).unwrap();
    }
    // by the end of this pod, a rollout goes on
    let job = json!({"metadata": {"name": "firstlight-upgrade-ended-plane"},
        "spec": {"nodeName": "ended-plane", "containers": [{"name": "a", "image": "a"}]}});
    inside.kubeadm().create(&pods, &job).unwrap();
    let at = pods
        .named("firstlight-upgrade-ended-plane")
        .subresource("status");
    let done = json!({"status": {"phase": "Succeeded"}});
    forbidden(agent.merge(&at, &done), "whether a pod of Firstlight runs");
    // other pods are the agent's work
    let other = json!({"metadata": {"name": "ended-other"}, "spec": {"containers": [{"name": "a", "image": "a"}]}});
    inside.admin.create(&pods, &other).unwrap();
    let at = pods.named("ended-other");
    agent.merge(&at.subresource("status"), &failed).unwrap();
    agent.delete(&at).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn an_agent_deletes_no_endpoints_no_account_and_no_daemon_set_of_ours() {
    let inside = inside();
    let worker = inside.worker("objects-worker", "10.7.4.1");
    inside.control_plane("objects-plane", "10.7.4.2");
    let agent = agent(inside, &worker);
    let slices = SLICES.in_namespace(KUBE_SYSTEM);
    let of_service = Selector::labels("kubernetes.io/service-name=key-service-local");
    let all = || inside.admin.list(&slices, &of_service).unwrap().items;
    eventually("a slice by the controller", || !all().is_empty());
    let slice = all()[0]["metadata"]["name"].as_str().unwrap().to_owned();
    let refused = "delete endpoints of the Services";
    forbidden(deleted(agent.delete(&slices.named(&slice))), refused);
    let accounts = SERVICE_ACCOUNTS.in_namespace(KUBE_SYSTEM);
    let sets = DAEMON_SETS.in_namespace(KUBE_SYSTEM);
    for name in ["join-service", "key-service", "member-controller"] {
        for at in [accounts.named(name), sets.named(name)] {
            let refused = "delete the DaemonSets and accounts";
            forbidden(deleted(agent.delete(&at)), refused);
            // nor does the collector, to which this account is nobody
            agent.merge(&at, &orphaned()).unwrap();
        }
    }
    let service = SERVICES
        .in_namespace(KUBE_SYSTEM)
        .named("key-service-local");
    let refused = "only its owner and administrators write";
    forbidden(agent.merge(&service, &orphaned()), refused);
    inside.worker("objects-last", "10.7.4.3");
    let last = NODES.named("objects-last");
    agent.merge(&last, &orphaned()).unwrap();
    eventually("the collector has come to what was written later", || {
        inside.admin.find(&last).unwrap().is_none()
    });
    for at in [
        service,
        accounts.named("join-service"),
        accounts.named("key-service"),
        accounts.named("member-controller"),
        sets.named("join-service"),
        sets.named("key-service"),
        sets.named("member-controller"),
    ] {
        let object = inside.admin.get(&at).unwrap();
        assert!(object["metadata"]["deletionTimestamp"].is_null(), "{at}");
        let free = json!({"metadata": {"ownerReferences": null}});
        inside.admin.merge(&at, &free).unwrap();
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_takes_connections_to_the_key_service_by_an_address_of_a_load_balancer() {
    let inside = inside();
    let worker = inside.worker("cluster-ip", "10.7.5.1");
    let agent = agent(inside, &worker);
    let local = SERVICES
        .in_namespace(KUBE_SYSTEM)
        .named("key-service-local");
    let address = inside.admin.get(&local).unwrap()["spec"]["clusterIP"].clone();
    let services = SERVICES.in_namespace("agents");
    let balanced = json!({"metadata": {"name": "b"}, "spec": {"type": "LoadBalancer", "ports": [{"port": 9443}]}});
    agent.create(&services, &balanced).unwrap();
    let taken = json!({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}});
    forbidden(
        agent.merge(&services.named("b").subresource("status"), &taken),
        "give an address of a load balancer",
    );
}

/// kubeadm counts the pods of etcd by their labels, and waits until each of them has the annotation.
#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_worker_has_no_pod_that_stops_kubeadm_on_control_planes() {
    let inside = inside();
    let worker = inside.worker("count-worker", "10.7.6.1");
    let plane = inside.control_plane("count-plane", "10.7.6.2");
    let etcd = json!({"component": "etcd", "tier": "control-plane"});
    let mirrored = |kubelet: &Kubelet, more: &Value| {
        let name = format!("etcd-{}", kubelet.name);
        kubelet.mirror_with(KUBE_SYSTEM, &name, &etcd, more)
    };
    let none = json!({ETCD_ENDPOINT: null});
    forbidden(mirrored(&worker, &none), "names its endpoint for kubeadm");

    let maps = CONFIG_MAPS.in_namespace(KUBE_SYSTEM);
    let disk = Uuid::parse("00000000-0000-0000-0000-000000000007").unwrap();
    for (node, is_plane) in [("count-worker", false), ("count-plane", true)] {
        let record = MachineRecord {
            control_plane: is_plane,
            ..MachineRecord::of_node(node, &disk, Some("m"), "", "")
        };
        inside.admin.create(&maps, &record.to_object()).unwrap();
    }
    eventually("the policy knows the records", || {
        let tried = mirrored(&worker, &json!({}));
        tried.is_err_and(|error| error.to_string().contains("is no control plane"))
    });
    mirrored(&plane, &json!({})).unwrap();
    let at = PODS.in_namespace(KUBE_SYSTEM).named("etcd-count-plane");
    forbidden(
        agent(inside, &worker).merge(
            &at.subresource("status"),
            &json!({"metadata": {"annotations": none}}),
        ),
        "names its endpoint for kubeadm",
    );
}

/// A worker may have had the role's label when the policies did not hold yet, and so have a pod of ours.
#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_kubelet_gets_no_token_of_our_accounts_when_its_record_says_that_it_is_a_worker() {
    let inside = inside();
    let plane = inside.control_plane("claims-plane", "10.7.7.1");
    let worker = inside.worker("claims-worker", "10.7.7.2");
    let maps = CONFIG_MAPS.in_namespace(KUBE_SYSTEM);
    let disk = Uuid::parse("00000000-0000-0000-0000-000000000008").unwrap();
    for (kubelet, is_plane) in [(&worker, false), (&plane, true)] {
        let record = MachineRecord {
            control_plane: is_plane,
            ..MachineRecord::of_node(&kubelet.name, &disk, Some("m"), "", "")
        };
        inside.admin.create(&maps, &record.to_object()).unwrap();
    }
    let token = |kubelet: &Kubelet| {
        let account = (KUBE_SYSTEM, "join-service");
        let pod = format!("join-service-{}", kubelet.name);
        let volume = token_volume(&[""]);
        let pods = PODS.in_namespace(KUBE_SYSTEM);
        let uid = match inside.admin.find(&pods.named(&pod)).unwrap() {
            Some(pod) => uid(&pod),
            None => add_pod(&inside.admin, account, &pod, &kubelet.name, volume),
        };
        kubelet.token(account, &pod, &uid, &[])
    };
    eventually("the policy knows the record", || {
        let refused = token(&worker);
        refused.is_err_and(|error| error.to_string().contains("is no control plane"))
    });
    eventually("the control plane gets one", || token(&plane).is_ok());
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn the_kubelet_of_a_removed_node_whose_node_is_kept_writes_nothing() {
    let inside = inside();
    let worker = inside.worker("kept-worker", "10.7.8.1");
    inside.mark_removed("kept-worker");
    let refused = "was removed from the cluster";
    eventually("the policy knows the name", || {
        let tried = worker.report();
        tried.is_err_and(|error| error.to_string().contains(refused))
    });
    let mirror = worker.mirror("default", "kept", &json!({}));
    forbidden(mirror, refused);
    let (namespace, account) = FLANNEL;
    let volume = token_volume(&[""]);
    let uid = add_pod(
        &inside.admin,
        (namespace, account),
        "kept",
        "kept-worker",
        volume,
    );
    eventually("the kubelet gets no token", || {
        let asked = worker.token((namespace, account), "kept", &uid, &[]);
        asked.is_err_and(|error| error.to_string().contains(refused))
    });
}

/// cluster-autoscaler may create ConfigMaps in kube-system. In JSON, a control character is six times as long.
#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn large_objects_of_an_agent_do_not_hide_the_records() {
    let inside = Inside::shared();
    let worker = inside.worker("large-worker", "10.7.9.1");
    let agent = agent(inside, &worker);
    let maps = CONFIG_MAPS.in_namespace(KUBE_SYSTEM);
    let large = "\u{1}".repeat(480 << 10);
    let name = |number: usize| format!("large-{number:02}");
    for number in 0..24 {
        let map = json!({"metadata": {"name": name(number)}, "data": {"a": large}});
        agent.create(&maps, &map).unwrap();
    }
    let keep = |map: Value| map["metadata"]["name"].clone();
    let listed = inside.admin.list_keeping(&maps, &Selector::default(), keep);
    let listed = listed.unwrap().items;
    for number in 0..24 {
        assert!(listed.contains(&name(number).into()), "{number}");
        inside.admin.delete(&maps.named(&name(number))).unwrap();
    }
    assert!(listed.contains(&"join-config".into()));
}

/// As kubeadm configures it. With the certificate of its ticket, it asks for none by the token.
#[test]
#[ignore = "needs a kube-apiserver and a kubelet: make test-inside"]
fn a_real_kubelet_with_the_certificate_of_its_ticket_asks_for_none() {
    let inside = Inside::shared();
    let requests = CERTIFICATE_SIGNING_REQUESTS.all();
    let asked = |user: &str| {
        let all = inside.admin.list(&requests, &Selector::default()).unwrap();
        all.items.iter().any(|it| it["spec"]["username"] == user)
    };
    let (ca, ca_key) = inside.cluster.ca();
    let start = |user: &str, folder: &Path| {
        let path = |name: &str| folder.join(name).display().to_string();
        let kubeconfig = inside.cluster.kubeconfig_of(user, TICKET_GROUP, &ca);
        fs::write(path("bootstrap.conf"), kubeconfig).unwrap();
        let config = json!({"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "rotateCertificates": true, "failCgroupV1": false, "authentication": {"anonymous": {"enabled": false}}});
        fs::write(path("config.yaml"), config.to_string()).unwrap();
        let program = build(&["kubelet"]).join("kubelet");
        let arguments = [
            format!("--bootstrap-kubeconfig={}", path("bootstrap.conf")),
            format!("--kubeconfig={}", path("kubelet.conf")),
            format!("--config={}", path("config.yaml")),
            format!("--cert-dir={}", path("")),
            format!("--root-dir={}", path("root")),
            "--hostname-override=kubelet-key".to_owned(),
        ];
        inside
            .cluster
            .start_program("kubelet", &program, &arguments)
    };
    let (without, with) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // without containerd it ends soon, perhaps before it has asked
    let user = "system:bootstrap:nocert";
    let kubelet = RefCell::new((start(user, without.path()), Instant::now()));
    eventually("the kubelet asks", || {
        if kubelet.borrow().1.elapsed() > Duration::from_secs(10) {
            kubelet.replace((start(user, without.path()), Instant::now()));
        }
        asked(user)
    });
    drop(kubelet);

    let node = NodeName::from_machine("kubelet-key").unwrap();
    let made = issue_client(ca.as_bytes(), ca_key.as_bytes(), &node, SystemTime::now()).unwrap();
    let link = Path::new(kubeadm::KUBELET_CLIENT_CERTIFICATE)
        .file_name()
        .unwrap();
    place_client(&with.path().join(link), &made).unwrap();
    let kubelet = start("system:bootstrap:hascert", with.path());
    // it writes this file when it has a certificate, or before it asks for one
    eventually("the kubelet has its kubeconfig", || {
        with.path().join("kubelet.conf").exists()
    });
    std::thread::sleep(Duration::from_secs(5));
    drop(kubelet);
    assert!(!asked("system:bootstrap:hascert"));
    let kubeconfig = fs::read_to_string(with.path().join("kubelet.conf")).unwrap();
    assert!(
        kubeconfig.contains("kubelet-client-current.pem"),
        "{kubeconfig}"
    );
}
