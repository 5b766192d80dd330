//! Tests of kubelets' client certificates by the bootstrap tokens of join tickets. The member controller
//! approves them for the ticket's node, beside Kubernetes' own approver with the permissions that
//! kubeadm gives to tokens of its group.

use std::thread;
use std::time::{Duration, SystemTime};

use base::stop::Stop;
use base::time;
use kubernetes::client::{
    CERTIFICATE_SIGNING_REQUESTS, CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client, NODES,
    SECRETS, Selector,
};
use kubernetes::removed_nodes;
use kubernetes::services::kubeadm_bindings;
use rcgen::KeyPair;
use rpc::grpc::Code;
use serde_json::{Value, json};
use services::member_controller::{MemberController, Options};
use services::probe;

use crate::kube_apiserver::set_ready_controllers;
use crate::renewal::{self, Renewals, kubelet, pkcs10};
use crate::setup::*;
use crate::swtpm::Swtpm;

/// Requests a certificate as a kubelet does (k8s.io/kubernetes, pkg/kubelet/certificate/bootstrap).
pub fn ask(client: &Client, request: &str, node: &str) {
    ask_with_key(client, &KeyPair::generate().unwrap(), request, node);
}

fn ask_with_key(client: &Client, key: &KeyPair, request: &str, node: &str) {
    let spec = json!({
        "signerName": "kubernetes.io/kube-apiserver-client-kubelet", "usages": ["digital signature", "client auth"],
        "request": pkcs10(key, &format!("system:node:{node}"), &[], &[]),
    });
    client
        .create(
            &CERTIFICATE_SIGNING_REQUESTS.all(),
            &json!({"metadata": {"name": request}, "spec": spec}),
        )
        .unwrap();
}

/// Does the work of kubeadm's phase bootstrap-token.
pub fn bind_as_kubeadm(admin: &Client) {
    let tokens = "system:bootstrappers:kubeadm:default-node-token";
    let requests = "system:certificates.k8s.io:certificatesigningrequests";
    for (name, role, group) in [
        (
            "kubeadm:kubelet-bootstrap",
            "system:node-bootstrapper",
            tokens,
        ),
        (
            "kubeadm:node-autoapprove-bootstrap",
            &format!("{requests}:nodeclient"),
            tokens,
        ),
        (
            "kubeadm:node-autoapprove-certificate-rotation",
            &format!("{requests}:selfnodeclient"),
            "system:nodes",
        ),
    ] {
        let binding = json!({
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}],
        });
        admin
            .create_if_absent(&CLUSTER_ROLE_BINDINGS.all(), &binding)
            .unwrap();
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_token_gets_the_certificate_of_its_tickets_node_and_no_other_and_old_tokens_work_on() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    bind_as_kubeadm(&setup.admin);
    let token = |ticket: &proto::join::IssueJoinTicketResponse| by_token(cluster, &ticket.token);
    let first = token(&setup.join(&Swtpm::start(), &worker()).unwrap());
    let old = proto::join::IssueJoinTicketRequest {
        accepts_cluster_ca: false,
        has_client_key: false,
        ..request("worker-1.example", &["127.42.2.101"], 2, false)
    };
    let second = token(&setup.join(&Swtpm::start(), &old).unwrap());
    let _signer = cluster.start_signer();
    ask(&first, "own", "worker-0");
    ask(&second, "own-of-old", "worker-1.example");
    for request in ["own", "own-of-old"] {
        setup.eventually_decided(request, "Approved", "ticket");
        eventually("the request is signed", || {
            setup.asked(request)["status"]["certificate"].is_string()
        });
    }
    // Requests for another joining node, for a control plane, and for an unknown node.
    for (request, node) in [
        ("other", "worker-1.example"),
        ("plane", "plane-0"),
        ("nobody", "nobody"),
    ] {
        ask(&first, request, node);
        setup.eventually_decided(request, "Denied", "subject");
    }

    // The next ticket's token replaces this one.
    let again = token(&setup.join_again(&Swtpm::start(), &request("worker-2", &[], 3, false)));
    ask(&again, "third", "worker-2");
    setup.eventually_decided("third", "Approved", "ticket");

    // A token of the old join service or of `kubeadm token create` is still judged by Kubernetes'
    // own approver.
    let of_old = json!({
        "metadata": {"name": "bootstrap-token-01dt0k"}, "type": "bootstrap.kubernetes.io/token",
        "stringData": {
            "token-id": "01dt0k", "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true",
            "expiration": time::seconds(SystemTime::now() + Duration::from_secs(900)),
            "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token",
        },
    });
    setup
        .admin
        .create(&SECRETS.in_namespace("kube-system"), &of_old)
        .unwrap();
    ask(
        &by_token(cluster, "01dt0k.0123456789abcdef"),
        "old",
        "old-node",
    );
    setup.eventually_decided("old", "Approved", "AutoApproved");
    // The approver has judged the other requests as well.
    thread::sleep(Duration::from_secs(2));
    for request in ["other", "plane", "nobody"] {
        assert_eq!(setup.decision(request).unwrap().0, "Denied");
        assert!(setup.asked(request)["status"]["certificate"].is_null());
    }
}

/// The operator of Cilium, Azure's CSI controller and each reader of all Secrets see the token of a ticket. With the certificate of a joining
/// control plane, one of them would get the token of its join service, and with that each disk key.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_reader_of_the_token_of_a_ticket_gets_no_certificate_of_its_node() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    bind_as_kubeadm(&setup.admin);
    let key = KeyPair::generate().unwrap();
    let machine = proto::join::IssueJoinTicketRequest {
        has_client_key: true,
        ..request_with_key(&key, "worker-0", &["127.42.2.100"], 1, false)
    };
    let ticket = setup.join(&Swtpm::start(), &machine).unwrap();
    let certificate = String::from_utf8(ticket.kubelet_client_cert.clone()).unwrap();
    let shown = openssl_text(&certificate);
    for part in [
        "CN = system:node:worker-0",
        "TLS Web Client Authentication",
        "O = system:nodes",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
    assert!(!shown.contains("Server Authentication"), "{shown}");
    assert_eq!(
        public_key_of(&certificate),
        key.public_key_pem().replace("\r", "")
    );
    let reader = by_token(cluster, &ticket.token);
    ask(&reader, "of-reader", "worker-0");
    setup.eventually_decided("of-reader", "Denied", "client-key");
    ask_with_key(&reader, &key, "of-machine", "worker-0");
    setup.eventually_decided("of-machine", "Approved", "ticket");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn without_a_ready_member_controller_there_is_no_ticket() {
    let (_alone, _, setup) = Setup::shared();
    set_ready_controllers(&setup.admin, 0);
    let tpm = Swtpm::start();
    let refusal = refused(setup.join(&tpm, &worker()));
    assert_eq!(refusal.code(), Code::Unavailable);
    assert!(
        refusal.to_string().contains("no member controller"),
        "{refusal}"
    );
    assert_eq!(setup.count("join", "no-approver"), 1);
    assert!(setup.tokens().is_empty() && setup.records().is_empty());
    set_ready_controllers(&setup.admin, 1);
    setup.join(&tpm, &worker()).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_member_controller_without_the_list_of_requests_is_not_ready() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let at = CLUSTER_ROLES.all().named("member-controller");
    let role = setup.admin.get(&at).unwrap();
    let without = |role: &mut Value| {
        let rules = role["rules"].as_array_mut().unwrap();
        rules.retain(|rule| rule["resources"] != json!(["certificatesigningrequests"]));
        true
    };
    setup.admin.modify(&at, without).unwrap();
    let account = Client::new(setup.account(cluster, MEMBER_CONTROLLER), &Stop::new());
    let requests = CERTIFICATE_SIGNING_REQUESTS.all();
    eventually("the right is gone", || {
        account.list(&requests, &Selector::default()).is_err()
    });
    let options = Options {
        health: Some("127.0.0.1:0".parse().unwrap()),
        ..setup.options(cluster)
    };
    setup.start_controller(options);
    let health = setup.controller().health_addr().unwrap();
    let is_ready = || probe::check_health(health, Duration::from_secs(5)).is_ok();
    thread::sleep(Duration::from_secs(2));
    assert!(!is_ready());
    let rules = json!({"rules": role["rules"]});
    setup.admin.merge(&at, &rules).unwrap();
    eventually("it is ready", is_ready);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_renews_its_own_certificate_and_asks_for_no_other() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    setup.join_worker();
    // Kubernetes' own approver, which would approve the same request, is off.
    let worker = kubelet(cluster, "worker-0");
    ask(&worker, "renewed", "worker-0");
    setup.eventually_decided("renewed", "Approved", "recorded");
    ask(&worker, "of-other", "plane-0");
    setup.eventually_decided("of-other", "Denied", "subject");
    ask(&kubelet(cluster, "deleted"), "of-deleted", "deleted");
    thread::sleep(Duration::from_secs(3));
    assert_eq!(setup.decision("of-deleted"), None);
}

/// The kubelet of a node that was removed still has a certificate. It makes its Node again, and asks for the next one.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_removed_node_renews_no_certificate_and_gets_no_ticket_until_it_is_readmitted() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    let tpm = Swtpm::start();
    setup.join(&tpm, &worker()).unwrap();
    setup.make_node("worker-0");
    let removed = kubelet(cluster, "worker-0");
    ask(&removed, "before", "worker-0");
    setup.eventually_decided("before", "Approved", "recorded");

    // its record alone is deleted
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let record = setup.admin.get(&maps.named("join-node-worker-0")).unwrap();
    setup
        .admin
        .delete(&maps.named("join-node-worker-0"))
        .unwrap();
    setup.admin.delete(&NODES.named("worker-0")).unwrap();
    removed
        .create(&NODES.all(), &json!({"metadata": {"name": "worker-0"}}))
        .unwrap();
    // the service has seen that the record is gone
    thread::sleep(Duration::from_secs(1));
    ask(&removed, "without-record", "worker-0");
    eventually("the request is left", || {
        count(setup.controller(), "left", "no-record") == 1
    });
    assert_eq!(setup.decision("without-record"), None);

    // the operator has removed it; a ticket that was under way may have left another record
    let machine = record["data"]["machine"].as_str().unwrap();
    removed_nodes::add(&setup.admin, "worker-0", machine).unwrap();
    let record = json!({"metadata": {"name": "join-node-worker-0"}, "data": record["data"]});
    setup.admin.create(&maps, &record).unwrap();
    setup.eventually_decided("without-record", "Denied", "removed");
    ask(&removed, "removed", "worker-0");
    setup.eventually_decided("removed", "Denied", "removed");
    for (number, name) in [(1, "worker-0"), (2, "worker-2")] {
        let asked = request(name, &[], 10 + number, false);
        let status = refused(setup.join(&tpm, &asked));
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        assert!(
            status
                .message()
                .contains("firstlight node readmit worker-0"),
            "{status}"
        );
    }
    let status = setup.rejoin(&tpm, &disk(1)).err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    // nor does another machine get the name, for which there is a valid certificate
    let status = refused(setup.join(&Swtpm::start(), &worker()));
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert_eq!(setup.count("join", "removed"), 3);

    assert!(removed_nodes::readmit(&setup.admin, "worker-0").unwrap());
    eventually("it joins again", || setup.join(&tpm, &worker()).is_ok());
}

fn count(controller: &MemberController, result: &str, reason: &str) -> u64 {
    renewal::count_of("client", controller, result, reason)
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_closed_record_renews_no_certificate_until_it_is_open_again() {
    let (_alone, cluster, setup) = Setup::for_renewals();
    let tpm = Swtpm::start();
    setup.join(&tpm, &worker()).unwrap();
    setup.make_node("worker-0");
    let record = CONFIG_MAPS
        .in_namespace("kube-system")
        .named("join-node-worker-0");
    let refused = |since: Value| json!({"data": {"refused": since}});
    setup
        .admin
        .merge(&record, &refused("2026-11-28T20:00:00Z".into()))
        .unwrap();
    thread::sleep(Duration::from_secs(1));
    let worker = kubelet(cluster, "worker-0");
    ask(&worker, "client", "worker-0");
    let key = KeyPair::generate().unwrap();
    let serving = pkcs10(&key, "system:node:worker-0", &["worker-0"], &[]);
    renewal::ask(&worker, "serving", &serving, renewal::SERVING);
    eventually("the request is left", || {
        count(setup.controller(), "left", "refused-before") == 1
    });
    thread::sleep(Duration::from_secs(1));
    assert_eq!(
        (setup.decision("client"), setup.decision("serving")),
        (None, None)
    );
    // nor does the machine get a ticket, under this name or another one
    for (name, disk) in [("worker-0", 1), ("worker-2", 2)] {
        let status = crate::setup::refused(setup.join(&tpm, &request(name, &[], disk, false)));
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    }
    assert_eq!(setup.count("join", "refused-before"), 2);
    setup.admin.merge(&record, &refused(Value::Null)).unwrap();
    for request in ["client", "serving"] {
        setup.eventually_decided(request, "Approved", "recorded");
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn nodes_without_a_record_renew_their_certificates_while_migration_is_on() {
    let (_alone, cluster, mut setup) = Setup::for_renewals();
    setup.migration = "2099-12-31".parse().unwrap();
    setup.start(cluster);
    setup.make_node("of-before");
    ask(&kubelet(cluster, "of-before"), "migrating", "of-before");
    setup.eventually_decided("migrating", "Approved", "migration");
    let why = setup.asked("migrating")["status"]["conditions"][0]["message"].to_string();
    assert!(why.contains("through 2099-12-31"), "{why}");
    setup.migration = "2026-01-01".parse().unwrap();
    setup.start(cluster);
    ask(&kubelet(cluster, "of-before"), "later", "of-before");
    eventually("the request is left", || {
        count(setup.controller(), "left", "no-record") == 1
    });
    assert_eq!(setup.decision("later"), None);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn without_kubeadms_bindings_kubernetes_itself_approves_no_kubelet() {
    let (_alone, cluster, mut setup) = Setup::for_renewals();
    drop(setup.controller.take());
    bind_as_kubeadm(&setup.admin);
    let _signer = cluster.start_signer();
    let removed = kubelet(cluster, "worker-9");
    ask(&removed, "bound", "worker-9");
    setup.eventually_decided("bound", "Approved", "AutoApproved");
    assert_eq!(kubeadm_bindings::delete(&setup.admin).unwrap().len(), 2);
    assert!(kubeadm_bindings::delete(&setup.admin).unwrap().is_empty());
    // the authorizer has seen that they are gone
    thread::sleep(Duration::from_secs(2));
    ask(&removed, "unbound", "worker-9");
    thread::sleep(Duration::from_secs(5));
    assert_eq!(setup.decision("unbound"), None);
}

fn openssl(arguments: &[&str], input: &str) -> String {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut child = Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

pub fn openssl_text(certificate: &str) -> String {
    openssl(&["x509", "-noout", "-text"], certificate)
}

fn public_key_of(certificate: &str) -> String {
    openssl(&["x509", "-noout", "-pubkey"], certificate)
}
