//! Tests of the renewal of kubelets' serving certificates. Requests come with nodes' client
//! certificates, the member controller judges them with the permissions of the chart, and a real
//! kube-controller-manager signs.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::aws::Moto;
use kubernetes::client::{
    CERTIFICATE_SIGNING_REQUESTS, CLUSTER_ROLES, CONFIG_MAPS, Client, NODES, Selector,
};
use kubernetes::kubelet_certificate::pem;
use rcgen::{KeyPair, PKCS_ECDSA_P384_SHA384};
use serde_json::{Value, json};
use services::member_controller::{MemberController, Options};

use crate::kube_apiserver::Cluster;
use crate::setup::*;
use crate::swtpm::Swtpm;

const USER: &str = "system:node:worker-0";
const IP: &str = "127.42.2.100";
pub const SERVING: &[&str] = &["digital signature", "server auth"];

/// A kubelet with its client certificate.
pub fn kubelet(cluster: &Cluster, node: &str) -> Client {
    cluster.client_of(&format!("system:node:{node}"), "system:nodes")
}

/// Returns the PKCS#10 request of a kubelet.
pub fn pkcs10(key: &KeyPair, common_name: &str, names: &[&str], addresses: &[&str]) -> String {
    let request = kubelets_request(key, common_name, names, addresses);
    BASE64_STANDARD.encode(pem("CERTIFICATE REQUEST", &request).as_bytes())
}

/// Requests a certificate with the credentials of this client.
pub fn ask(client: &Client, name: &str, request: &str, usages: &[&str]) {
    let signer = "kubernetes.io/kubelet-serving";
    let spec = json!({"signerName": signer, "request": request, "usages": usages});
    client
        .create(
            &CERTIFICATE_SIGNING_REQUESTS.all(),
            &json!({"metadata": {"name": name}, "spec": spec}),
        )
        .unwrap();
}

/// Requests the certificate that a kubelet should request.
fn ask_for(client: &Client, name: &str, node: &str, address: &str) {
    let request = pkcs10(
        &KeyPair::generate().unwrap(),
        &format!("system:node:{node}"),
        &[node],
        &[address],
    );
    ask(client, name, &request, SERVING);
}

/// A cluster in which kubelets renew their certificates.
pub trait Renewals {
    /// Starts without earlier requests.
    fn for_renewals() -> Shared;
    /// Worker 0 joins, and its kubelet starts.
    fn join_worker(&self);
    fn asked(&self, name: &str) -> Value;
    /// Returns the decision about a request: type and reason of its only condition.
    fn decision(&self, name: &str) -> Option<(String, String)>;
    fn eventually_decided(&self, name: &str, kind: &str, reason: &str);
}

impl Renewals for Setup {
    fn for_renewals() -> Shared {
        let (alone, cluster, setup) = Setup::shared();
        for request in setup
            .admin
            .list(&CERTIFICATE_SIGNING_REQUESTS.all(), &Selector::default())
            .unwrap()
            .items
        {
            setup
                .admin
                .delete(&CERTIFICATE_SIGNING_REQUESTS.named(name(&request)))
                .unwrap();
        }
        (alone, cluster, setup)
    }

    fn join_worker(&self) {
        self.join(&Swtpm::start(), &worker()).unwrap();
        self.make_node("worker-0");
    }

    fn asked(&self, name: &str) -> Value {
        self.admin
            .get(&CERTIFICATE_SIGNING_REQUESTS.named(name))
            .unwrap()
    }

    fn decision(&self, name: &str) -> Option<(String, String)> {
        let conditions = self.asked(name)["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        assert!(conditions.len() < 2, "{conditions:?}");
        let text = |field: &str| conditions[0][field].as_str().unwrap().to_owned();
        (!conditions.is_empty()).then(|| (text("type"), text("reason")))
    }

    fn eventually_decided(&self, name: &str, kind: &str, reason: &str) {
        eventually(&format!("{name} is {kind}: {reason}"), || {
            self.decision(name).is_some()
        });
        assert_eq!(
            self.decision(name),
            Some((kind.to_owned(), reason.to_owned())),
            "{name}"
        );
    }
}

fn count(controller: &MemberController, result: &str, reason: &str) -> u64 {
    count_of("serving", controller, result, reason)
}

/// Returns how often this replica made this decision about this kind of certificate, for this reason.
pub fn count_of(kind: &str, controller: &MemberController, result: &str, reason: &str) -> u64 {
    let labels = format!("certificate=\"{kind}\",result=\"{result}\",reason=\"{reason}\"");
    let line = format!("firstlight_join_certificates_total{{{labels}}} ");
    let metrics = controller.metrics().render();
    metrics
        .lines()
        .find_map(|text| text.strip_prefix(&line))
        .map_or(0, |number| number.parse().unwrap())
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_kubelet_renews_the_certificate_of_its_join() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    let _signer = cluster.start_signer();
    setup.join_worker();
    let record = setup
        .admin
        .get(
            &CONFIG_MAPS
                .in_namespace("kube-system")
                .named("join-node-worker-0"),
        )
        .unwrap();
    assert_eq!(record["data"]["addresses"], IP);

    let key = KeyPair::generate().unwrap();
    ask(
        &kubelet(cluster, "worker-0"),
        "good",
        &pkcs10(&key, USER, &["worker-0"], &[IP]),
        SERVING,
    );
    setup.eventually_decided("good", "Approved", "recorded");
    eventually("the request is signed", || {
        setup.asked("good")["status"]["certificate"].is_string()
    });
    let message = setup.asked("good")["status"]["conditions"][0]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(message.contains("join-node-worker-0"), "{message}");

    let certificate = BASE64_STANDARD
        .decode(
            setup.asked("good")["status"]["certificate"]
                .as_str()
                .unwrap(),
        )
        .unwrap();
    fs::write(setup.dir.path().join("renewed.pem"), certificate).unwrap();
    for (option, name) in [("-verify_ip", IP), ("-verify_hostname", "worker-0")] {
        let mut openssl = Command::new("openssl");
        openssl.args([
            "verify",
            "-purpose",
            "sslserver",
            option,
            name,
            "-CAfile",
            "pki/ca.crt",
            "renewed.pem",
        ]);
        let output = openssl.current_dir(setup.dir.path()).output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert_eq!(count(setup.controller(), "approved", "recorded"), 1);
    setup.eventually_event("CertificateApproved");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn foreign_names_are_denied_and_requests_without_a_record_are_left() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    setup.join_worker();
    let (worker, key) = (kubelet(cluster, "worker-0"), KeyPair::generate().unwrap());
    let p384 = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
    let good = pkcs10(&key, USER, &["worker-0"], &[IP]);
    let both = ["server auth", "client auth"];
    for (name, request, usages, reason) in [
        ("usage", &good, &both[..], "usages"),
        ("no-usage", &good, &SERVING[..1], "usages"),
        (
            "key",
            &pkcs10(&p384, USER, &["worker-0"], &[IP]),
            SERVING,
            "certificate-request",
        ),
        (
            "subject",
            &pkcs10(&key, "system:node:plane-0", &["plane-0"], &["127.42.1.100"]),
            SERVING,
            "subject",
        ),
        (
            "name",
            &pkcs10(&key, USER, &["worker-0", "plane-0"], &[IP]),
            SERVING,
            "name",
        ),
        (
            "service",
            &pkcs10(&key, USER, &["kubernetes.default.svc"], &[IP]),
            SERVING,
            "name",
        ),
        (
            "address",
            &pkcs10(&key, USER, &["worker-0"], &["127.42.1.100"]),
            SERVING,
            "address",
        ),
        (
            "one-more",
            &pkcs10(&key, USER, &["worker-0"], &[IP, "127.42.2.101"]),
            SERVING,
            "address",
        ),
    ] {
        let before = count(setup.controller(), "denied", reason);
        ask(&worker, name, request, usages);
        setup.eventually_decided(name, "Denied", reason);
        eventually("the decision is counted", || {
            count(setup.controller(), "denied", reason) == before + 1
        });
    }

    // Requests of other users, and of a node that joined in another way.
    ask_for(&setup.admin, "requester", "worker-0", IP);
    ask_for(
        &kubelet(cluster, "worker-1.example"),
        "no-record",
        "worker-1.example",
        "127.42.2.101",
    );
    for reason in ["requester", "no-record"] {
        eventually(&format!("{reason} is left"), || {
            count(setup.controller(), "left", reason) == 1
        });
    }
    // It is judged again, but logged once.
    thread::sleep(Duration::from_secs(4));
    for reason in ["requester", "no-record"] {
        assert_eq!(
            (
                setup.decision(reason),
                count(setup.controller(), "left", reason)
            ),
            (None, 1)
        );
    }
    // An old record has no addresses: the cloud's list is used.
    let data = json!({"node": "worker-1.example", "disk": disk(9), "machine": "m"});
    let record = json!({"metadata": {"name": "join-node-worker-1.example"}, "data": data});
    setup
        .admin
        .create(&CONFIG_MAPS.in_namespace("kube-system"), &record)
        .unwrap();
    eventually("the missing node is reported", || {
        count(setup.controller(), "left", "no-node") == 1
    });
    setup
        .admin
        .create(
            &NODES.all(),
            &json!({"metadata": {"name": "worker-1.example"}}),
        )
        .unwrap();
    setup.eventually_decided("no-record", "Approved", "recorded");
    assert_eq!(setup.decision("requester"), None);

    // The machine of this name has another address now, or is deleted.
    setup.metadata.set_peers(&PEERS.replace(IP, "127.42.2.200"));
    thread::sleep(Duration::from_secs(6));
    ask_for(&worker, "moved", "worker-0", IP);
    eventually("the request for the old address is left", || {
        count(setup.controller(), "left", "unconfirmed") == 1
    });
    setup
        .metadata
        .set_peers(&PEERS.replace("worker-0", "worker-7"));
    thread::sleep(Duration::from_secs(6));
    ask_for(&worker, "gone", "worker-0", IP);
    eventually("the request of the deleted machine is left", || {
        count(setup.controller(), "left", "unknown-machine") == 1
    });
    setup.metadata.set_peers(PEERS);
    setup.eventually_decided("gone", "Approved", "recorded");
    setup.eventually_decided("moved", "Approved", "recorded");
}

/// The names and addresses that AWS's controller writes into a Node, and that a kubelet then requests. moto is the cloud.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn names_and_addresses_of_a_clouds_controller_are_confirmed_by_the_cloud() {
    let (_alone, cluster, mut setup) = Setup::for_renewals();
    let _signer = cluster.start_signer();
    let moto = Moto::get();
    let (metadata, _imds) = moto.machine(0);
    setup.start_controller(Options {
        metadata: Some(metadata),
        ..setup.options(cluster)
    });
    let machines = moto.cluster["machines"].as_array().unwrap();
    let text = |number: usize, field: &str| machines[number][field].as_str().unwrap().to_owned();
    let node = text(1, "instanceId");
    let data =
        json!({"node": node, "disk": disk(9), "machine": "m", "addresses": text(1, "privateIp")});
    let record = json!({"metadata": {"name": format!("join-node-{node}")}, "data": data});
    setup
        .admin
        .create(&CONFIG_MAPS.in_namespace("kube-system"), &record)
        .unwrap();
    setup.make_node(&node);
    let (kubelet, key) = (kubelet(cluster, &node), KeyPair::generate().unwrap());
    let request = |names: &[&str], addresses: &[&str]| {
        pkcs10(&key, &format!("system:node:{node}"), names, addresses)
    };
    let (internal, external) = (text(1, "privateDnsName"), text(1, "publicDnsName"));
    let addresses = [
        text(1, "privateIp"),
        text(1, "publicIp"),
        text(1, "ipv6"),
        text(1, "secondIpv6"),
    ];
    let of_controller = request(
        &[&internal, &external],
        &addresses.each_ref().map(String::as_str),
    );
    ask(&kubelet, "controller", &of_controller, SERVING);
    setup.eventually_decided("controller", "Approved", "recorded");
    eventually("the request is signed", || {
        setup.asked("controller")["status"]["certificate"].is_string()
    });
    for (name, request, reason) in [
        (
            "name-of-other",
            request(&[&text(2, "privateDnsName")], &[]),
            "name",
        ),
        (
            "address-of-other",
            request(&[&internal], &[&text(2, "publicIp")]),
            "address",
        ),
    ] {
        ask(&kubelet, name, &request, SERVING);
        setup.eventually_decided(name, "Denied", reason);
    }
    // an address that the cloud has given to no machine, or not yet
    ask(
        &kubelet,
        "early",
        &request(&[&internal], &["203.0.113.77"]),
        SERVING,
    );
    eventually("the request is left", || {
        count(setup.controller(), "left", "unconfirmed") == 1
    });
    assert_eq!(setup.decision("early"), None);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn one_of_several_replicas_decides_and_a_later_one_finds_waiting_requests() {
    let (_alone, cluster, mut setup) = Setup::for_renewals();
    setup.join_worker();
    let others: Vec<_> = (0..2)
        .map(|_| MemberController::start(setup.options(cluster)).unwrap())
        .collect();
    let worker = kubelet(cluster, "worker-0");
    for number in 0..5 {
        ask_for(&worker, &format!("request-{number}"), "worker-0", IP);
    }
    for number in 0..5 {
        setup.eventually_decided(&format!("request-{number}"), "Approved", "recorded");
    }
    thread::sleep(Duration::from_secs(1));
    let all = || [setup.controller()].into_iter().chain(&others);
    assert_eq!(
        all()
            .map(|service| count(service, "approved", "recorded"))
            .sum::<u64>(),
        5
    );
    assert!(all().all(|service| {
        !service
            .metrics()
            .render()
            .contains("certificates_total{certificate=\"serving\",result=\"failed\"")
    }));

    drop(others);
    drop(setup.controller.take());
    ask_for(&worker, "while-away", "worker-0", IP);
    setup.start(cluster);
    setup.eventually_decided("while-away", "Approved", "recorded");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_controller_that_may_not_approve_says_so_tries_seldom_and_goes_on_when_it_may() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    setup.join_worker();
    let role = CLUSTER_ROLES.named("member-controller");
    let before = setup.admin.get(&role).unwrap();
    setup
        .admin
        .modify(&role, |role| {
            role["rules"]
                .as_array_mut()
                .unwrap()
                .retain(|rule| rule["resources"] != json!(["signers"]));
            true
        })
        .unwrap();
    // Waits until the API server has processed the change.
    thread::sleep(Duration::from_secs(2));
    ask_for(&kubelet(cluster, "worker-0"), "not-allowed", "worker-0", IP);
    eventually("the failure is reported", || {
        count(setup.controller(), "failed", "api-refused") == 1
    });
    // each try counts, and the alert sees that the failure lasts
    eventually("the next try fails too", || {
        count(setup.controller(), "failed", "api-refused") >= 2
    });
    assert_eq!(setup.decision("not-allowed"), None);
    setup
        .admin
        .modify(&role, |role| {
            role["rules"] = before["rules"].clone();
            true
        })
        .unwrap();
    setup.eventually_decided("not-allowed", "Approved", "recorded");
}

/// A node compares an update of its image with the policy before it restarts.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_kubelet_reads_the_policy_and_no_other_object_of_the_services() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    setup.join_worker();
    let worker = kubelet(cluster, "worker-0");
    let map = |name| CONFIG_MAPS.in_namespace("kube-system").named(name);
    let config = json!({"metadata": {"name": "join-config"}, "data": {"attestationConfig": "{}"}});
    let here = CONFIG_MAPS.in_namespace("kube-system");
    if setup.admin.find(&map("join-config")).unwrap().is_none() {
        setup.admin.create(&here, &config).unwrap();
    }
    let read = worker.get(&map("join-config")).unwrap();
    assert!(read["data"]["attestationConfig"].is_string(), "{read}");
    let refused = worker.get(&map("join-node-worker-0")).unwrap_err();
    assert!(refused.to_string().contains("is forbidden"), "{refused}");
    let change = |map: &mut Value| {
        map["data"]["attestationConfig"] = json!("{\"measurements\": {}}");
        true
    };
    let refused = worker.modify(&map("join-config"), change).unwrap_err();
    assert!(refused.to_string().contains("is forbidden"), "{refused}");
}
