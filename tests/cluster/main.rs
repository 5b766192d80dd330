//! `firstlight init` makes a cluster: the shipped programs, a real TPM (swtpm), systemd, containerd, kubeadm and all that it
//! starts, in a node that is namespaces of this machine (docs/testing-kubernetes.md).
//!
//! They need root and `make build`'s programs, and take minutes, so `cargo test` passes them by; `make test-cluster` runs
//! them.

#[allow(dead_code)] // not all of it is needed here
#[path = "../common/metadata.rs"]
mod metadata;
mod network;
mod node;
mod operator;
#[allow(dead_code)] // not all of it is needed here
#[path = "../common/program.rs"]
mod program;
#[allow(dead_code)] // not all of it is needed here
#[path = "../common/swtpm.rs"]
mod swtpm;

use std::fs;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use network::Network;
use node::Node;
use operator::Operator;
use serde_json::{Value, json};

/// What runs in kube-system once: CoreDNS, twice.
const PODS_OF_CLUSTER: usize = 2;
/// On each control plane: etcd, API server, controller manager, scheduler, join service, key service.
const PODS_OF_CONTROL_PLANE: usize = 6;
/// On every node: kube-proxy.
const PODS_OF_NODE: usize = 1;
const PATIENCE: Duration = Duration::from_secs(300);
const INIT_SECRET: &str = "correct_horse%battery@staple";

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn init_makes_a_cluster_that_survives_lost_operators_and_reboots() {
    let network = Network::empty();
    let mut node = Node::boot(network, "init", "Control_Plane-0", "ControlPlane");
    node.start_bootstrapper();

    // an operator who is cut off in the middle, and comes again
    let operator = Operator::new();
    let first = operator.init(node.address(), &[]);
    first.expect("kubeadm init ..");
    drop(first);
    lap(&node, "the first operator is gone in the middle of kubeadm init");
    // one with other secrets gets nothing
    let strange = Operator::new();
    let mut stranger = strange.init(node.address(), &[]);
    assert_eq!(stranger.exit().code(), Some(3), "{}", stranger.output());
    stranger.expect("attestation refused: PCR 15");
    let image = node.import_services();
    let mut second = operator.init(node.address(), &["--verbose", "--image", &image]);
    second.expect_within("objects are new or changed", PATIENCE);
    assert!(second.exit().success(), "{}", second.output());
    let told = second.output();
    for phase in ["state disk:", "components:", "kubeadm preflight:", "certificates:", "kubeadm init:"] {
        assert!(told.contains(phase), "no {phase} in {told}");
    }
    assert!(told.contains("kubeadm: installed") && !has_token(&told), "{told}");
    lap(&node, "init has ended");
    println!("{told}");

    // the bootstrapper has stopped, and left what it should
    let journal = node.wait_for_bootstrapper();
    assert!(!has_token(&journal) && journal.contains("complete:"), "{journal}");
    node.assert_measured(&operator.cluster_id());

    wait_for_cluster(&operator, 1, 0);
    lap(&node, "the node is Ready, and every pod of kube-system runs");
    println!("{}", operator.kubectl(&["get", "nodes,pods", "--all-namespaces", "--output", "wide"]));

    // the API server reaches the kubelet, whose certificate its own CA has signed
    let logs = operator.kubectl(&["logs", "--namespace", "kube-system", "--selector", "component=etcd", "--tail", "1"]);
    assert!(!logs.is_empty());
    // who has a bootstrap token: nobody, after its minute
    wait_for("the end of kubeadm's own token", || tokens(&operator) == 0);
    let priority = node.sh("for t in /proc/$(pidof etcd)/task/*; do ionice -p ${t##*/}; done | sort -u");
    assert_eq!(priority.trim(), "realtime: prio 0");

    // data survives a reboot
    operator.kubectl(&["create", "configmap", "kept", "--from-literal", "is=there"]);
    node.reboot();
    node.start_bootstrapper();
    let journal = node.wait_for_bootstrapper();
    assert!(journal.contains("a member of its cluster since before this boot"), "{journal}");
    wait_for_cluster(&operator, 1, 0);
    assert_eq!(operator.kubectl(&["get", "configmap", "kept", "--output", "jsonpath={.data.is}"]), "there");
    lap(&node, "after a reboot the cluster is back, with its data");
    // and the next reboot needs no operator: the cluster itself lets its node in
    let mut unlock = node.unlock_as_another();
    println!("{}", unlock.expect("key-slot: opened with the key from join service"));
    unlock.exit();
    println!("memory in use: {} MiB", node.memory());
}

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn nodes_join_by_what_they_run_and_come_back() {
    let network = Network::empty();
    let boot = |name: &str, role: &str| {
        let node = Node::boot(network, "join", name, role);
        if role == "ControlPlane" {
            node.import_services();
        }
        node.start_bootstrapper();
        node
    };
    let first = boot("control-plane-0", "ControlPlane");
    // these find no join service yet, and go on looking
    let mut second = boot("Control_Plane-1", "ControlPlane");
    let mut worker = boot("worker-0", "Worker");
    let altered = Node::boot(network, "join", "worker-1", "Worker");
    altered.alter();
    altered.start_bootstrapper();

    let operator = Operator::new();
    let image = first.import_services();
    let mut init = operator.init(first.address(), &["--image", &image]);
    init.expect_within("objects are new or changed", PATIENCE);
    assert!(init.exit().success(), "{}", init.output());
    lap(&first, "init has ended");
    for node in [&worker, &second] {
        let journal = node.wait_for_bootstrapper();
        assert!(journal.contains("complete:") && !has_token(&journal), "{journal}");
        node.assert_measured(&operator.cluster_id());
        lap(node, &format!("{} has joined", node.name()));
    }
    wait_for_cluster(&operator, 2, 1);
    lap(&first, "all nodes are Ready, and every pod of kube-system runs");
    println!("{}", operator.kubectl(&["get", "nodes,pods", "--all-namespaces", "--output", "wide"]));
    wait_for("the end of every bootstrap token", || tokens(&operator) == 0);
    let members = operator.kubectl(&["get", "pods", "--namespace", "kube-system", "--selector", "component=etcd"]);
    assert!(members.contains("etcd-control-plane-0") && members.contains("etcd-control-plane-1"), "{members}");

    // who runs something else stays outside, and both sides say why
    let logs = ["logs", "--namespace", "kube-system", "--selector", "k8s-app=join-service", "--tail", "-1"];
    let refused = || operator.kubectl(&logs).lines().any(|line| line.contains("PCR 4"));
    wait_for("the refusal of the altered node", refused);
    let journal = altered.sh("journalctl --boot --unit bootstrapper --output cat");
    assert!(journal.contains("refused") && !journal.contains("complete:"), "{journal}");
    drop(altered);

    // a workload on what joined, and the API server reaches its kubelet
    operator.kubectl(&["create", "deployment", "work", "--image", &worker.pause_image(), "--replicas", "3"]);
    operator.kubectl(&["wait", "deployment/work", "--for", "condition=Available", "--timeout", "120s"]);
    let places = operator.kubectl(&["get", "pods", "--selector", "app=work", "--output", "wide"]);
    assert_eq!(places.matches(worker.name()).count(), 3, "{places}");
    operator.kubectl(&["logs", "--selector", "app=work"]);
    kubelets_renew_their_certificates(&operator, &[&first, &worker]);

    for node in [&mut worker, &mut second] {
        node.reboot();
        node.start_bootstrapper();
        let journal = node.wait_for_bootstrapper();
        assert!(journal.contains("a member of its cluster since before this boot"), "{journal}");
    }
    wait_for_cluster(&operator, 2, 1);
    lap(&first, "a worker and a control plane are back from a reboot");
    // the next time the cluster opens the worker's disk: for its TPM, and for no other
    let mut unlock = worker.unlock();
    println!("{}", unlock.expect("key-slot: opened with the key from join service"));
    unlock.exit();
    println!("memory in use: {:?} MiB", [&first, &second, &worker].map(Node::memory));
}

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn a_set_up_that_fails_is_told_at_once_and_the_node_starts_over() {
    let node = Node::boot(Network::empty(), "failure", "control-plane-0", "ControlPlane");
    let shared = Operator::new();
    let file = |name: &str, list: Value| shared.file(name, &list.to_string());
    let kubeadm = |url: &str, hash: &str| json!([{"url": url, "hash": hash, "install_path": "/run/state/bin/kubeadm"}]);
    // the real one, but for one thing that it cannot do
    let replaced = |component: &str, script: &str| {
        let mut list = shared.components();
        let place = format!("/run/state/bin/{component}");
        let one = list.as_array_mut().unwrap().iter_mut().find(|one| one["install_path"] == *place).unwrap();
        let url = format!("data:text/plain;base64,{}", STANDARD.encode(script));
        *one = json!({"url": url, "hash": "", "install_path": place});
        list
    };
    let failing = |pattern: &str| {
        let fail = format!("case \"$*\" in {pattern}) echo one word more >&2; exit 7 ;; esac");
        replaced("kubeadm", &format!("#!/bin/sh\n{fail}\nexec /opt/components/kubeadm \"$@\"\n"))
    };
    let kubelet =
        "#!/bin/sh\n[ \"$*\" != --version ] || exec /opt/components/kubelet --version\necho one word more; exit 7\n";
    let wrong = format!("sha256:{}", "00".repeat(32));
    let cases = [
        (file("hash.json", kubeadm("file:///opt/components/kubeadm", &wrong)), "expected SHA-256 0000"),
        (file("none.json", json!([])), "kubeadm init phase preflight could not be started"),
        (
            file("certs.json", failing("'init phase certs '*")),
            "kubeadm init phase certs all failed with exit code 7; its last lines:\none word more",
        ),
        (
            file("init.json", failing("'init --config '*")),
            "kubeadm init failed with exit code 7; its last lines:\none word more",
        ),
        (
            file("kubelet.json", replaced("kubelet", kubelet)),
            "the kubelet ends again and again; its last words:\none word more",
        ),
    ];
    for (components, why) in cases {
        node.put_new_disk();
        node.start_bootstrapper();
        let owner = Operator::new();
        let mut operator = owner.init(node.address(), &["--components", components.to_str().unwrap()]);
        assert_eq!(operator.exit().code(), Some(1), "{}", operator.output());
        let told = operator.output();
        assert!(told.contains(why) && told.contains("reboot it, and it starts over"), "{told}");
        println!("{told}");
        let journal = node.wait_for_bootstrapper();
        assert!(journal.contains("reset: the next boot formats the state disk"), "{journal}");
        // nothing beside what was installed whole
        let installed = node.sh("ls -A /run/state/bin | grep -vE '^kube(adm|let|ctl)$' || true");
        assert_eq!(installed, "");
        node.format_the_disk();
        node.power_cycle_the_tpm();
    }
}

/// Of a node that was initialised, and one that joined: their first certificates are as kubelets want them, and when they are
/// gone the cluster signs others, which the API server accepts.
fn kubelets_renew_their_certificates(operator: &Operator, nodes: &[&Node]) {
    let signer = "spec.signerName=kubernetes.io/kubelet-serving";
    let requests = || operator.kubectl(&["get", "certificatesigningrequests", "--field-selector", signer]);
    assert_eq!(requests(), "");
    for node in nodes {
        node.sh("rm /var/lib/kubelet/pki/kubelet-server.* && systemctl restart kubelet");
    }
    for node in nodes {
        let user = format!("system:node:{}", node.name().to_lowercase());
        let is_signed = |line: &str| line.contains(&user) && line.contains("Approved,Issued");
        wait_for("a new certificate", || requests().lines().any(is_signed));
        let of_node = format!("spec.nodeName={}", node.name().to_lowercase());
        let select =
            ["get", "pods", "--namespace", "kube-system", "--selector", "k8s-app=kube-proxy", "--output", "name"];
        let pod = operator.kubectl(&[&select[..], &["--field-selector", &of_node]].concat());
        let logs = ["logs", "--namespace", "kube-system", "--tail", "1", pod.trim()];
        wait_for("logs by the new certificate", || operator.try_kubectl(&logs).is_some());
        node.sh("test -e /var/lib/kubelet/pki/kubelet-server-current.pem");
        lap(node, &format!("the kubelet of {} serves with a renewed certificate", node.name()));
    }
    println!("{}", requests());
}

fn lap(node: &Node, what: &str) {
    println!("{:8.1} s  {what}", node.since_boot().as_secs_f64());
}

/// Until all nodes are Ready, and all that should run in kube-system does.
fn wait_for_cluster(operator: &Operator, control_planes: usize, workers: usize) {
    let nodes_wanted = control_planes + workers;
    let pods_wanted = PODS_OF_CLUSTER + control_planes * PODS_OF_CONTROL_PLANE + nodes_wanted * PODS_OF_NODE;
    wait_for("every pod of kube-system", || {
        let get = |what| operator.try_kubectl(&["get", what, "--namespace", "kube-system", "--output", "json"]);
        let (Some(nodes), Some(pods)) = (get("nodes"), get("pods")) else { return false };
        let (nodes, pods) = (items(&nodes), items(&pods));
        let is_all = |all: &[Value], wanted| all.len() == wanted && all.iter().all(is_ready);
        is_all(&nodes, nodes_wanted) && is_all(&pods, pods_wanted)
    });
}

/// How many bootstrap tokens there are.
fn tokens(operator: &Operator) -> usize {
    let secrets = operator.kubectl(&["get", "secrets", "--namespace", "kube-system", "--output", "name"]);
    secrets.lines().filter(|name| name.contains("bootstrap-token")).count()
}

fn items(json: &str) -> Vec<Value> {
    serde_json::from_str::<Value>(json).unwrap()["items"].as_array().unwrap().clone()
}

fn is_ready(object: &Value) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
}

/// Whether a text has a bootstrap token in it.
fn has_token(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.split_whitespace().any(|word| {
        word.split_once('.').is_some_and(|(id, secret)| {
            id.len() == 6 && secret.len() == 16 && (id.to_owned() + secret).chars().all(is_word)
        })
    })
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "waited for {what} for {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// A file's text, for an error.
fn text(path: &std::path::Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
