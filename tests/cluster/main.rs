//! `firstlight init` makes a cluster: the shipped programs, a real TPM (swtpm), systemd, containerd, kubeadm and all that it
//! starts, in a node that is namespaces of this machine (docs/testing-kubernetes.md).
//!
//! They need root and `make build`'s programs, and take minutes, so `cargo test` passes them by; `make test-cluster` runs
//! them.

#[allow(dead_code)] // not all of it is needed here
#[path = "../common/metadata.rs"]
mod metadata;
mod node;
#[allow(dead_code)] // not all of it is needed here
#[path = "../common/program.rs"]
mod program;
#[allow(dead_code)] // not all of it is needed here
#[path = "../common/swtpm.rs"]
mod swtpm;

use std::fs;
use std::time::{Duration, Instant};

use node::Node;
use serde_json::{Value, json};

/// What runs in kube-system: etcd, API server, controller manager, scheduler, kube-proxy, two of CoreDNS, join service, key
/// service.
const PODS: usize = 9;
const PATIENCE: Duration = Duration::from_secs(300);

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn init_makes_a_cluster_that_survives_lost_operators_and_reboots() {
    let mut node = Node::boot("init");
    node.start_bootstrapper();

    // an operator who is cut off in the middle, and comes again
    let first = node.init(&[]);
    first.expect("kubeadm init ..");
    drop(first);
    lap(&node, "the first operator is gone in the middle of kubeadm init");
    // one with other secrets gets nothing
    let mut stranger = node.init_in("stranger", &[]);
    assert_eq!(stranger.exit().code(), Some(3), "{}", stranger.output());
    stranger.expect("attestation refused: PCR 15");
    let image = node.import_services();
    let mut second = node.init(&["--verbose", "--image", &image]);
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
    node.wait_for("the bootstrapper's end", || node.try_sh("systemctl is-active bootstrapper").is_none());
    let journal = node.sh("journalctl --unit bootstrapper --output cat");
    assert!(!has_token(&journal) && journal.contains("complete:"), "{journal}");
    node.assert_measured();

    wait_for_cluster(&node);
    lap(&node, "the node is Ready, and every pod of kube-system runs");
    println!("{}", node.kubectl(&["get", "nodes,pods", "--all-namespaces", "--output", "wide"]));

    // the API server reaches the kubelet, whose certificate its own CA has signed
    let logs = node.kubectl(&["logs", "--namespace", "kube-system", "--selector", "component=etcd", "--tail", "1"]);
    assert!(!logs.is_empty());
    // who has a bootstrap token: nobody, after its minute
    node.wait_for("the end of kubeadm's own token", || {
        let tokens = node.kubectl(&["get", "secrets", "--namespace", "kube-system", "--output", "name"]);
        !tokens.contains("bootstrap-token")
    });
    let priority = node.sh("for t in /proc/$(pidof etcd)/task/*; do ionice -p ${t##*/}; done | sort -u");
    assert_eq!(priority.trim(), "realtime: prio 0");

    // data survives a reboot
    node.kubectl(&["create", "configmap", "kept", "--from-literal", "is=there"]);
    node.reboot();
    node.start_bootstrapper();
    node.wait_for("the bootstrapper's end", || node.try_sh("systemctl is-active bootstrapper").is_none());
    let journal = node.sh("journalctl --boot --unit bootstrapper --output cat");
    assert!(journal.contains("a member of its cluster since before this boot"), "{journal}");
    wait_for_cluster(&node);
    assert_eq!(node.kubectl(&["get", "configmap", "kept", "--output", "jsonpath={.data.is}"]), "there");
    lap(&node, "after a reboot the cluster is back, with its data");
    // and the next reboot needs no operator: the cluster itself lets its node in
    let mut unlock = node.unlock();
    println!("{}", unlock.expect("key-slot: opened with the key from join service"));
    unlock.exit();
    println!("memory in use: {} MiB", node.memory());
}

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn a_set_up_that_fails_is_told_at_once_and_the_node_starts_over() {
    let node = Node::boot("failure");
    // the image's program is not what the operator's list wants
    let list = node.operators_file(
        "wrong.json",
        &json!([{"url": "file:///opt/components/kubeadm", "hash": format!("sha256:{}", "00".repeat(32)),
            "install_path": "/run/state/bin/kubeadm"}])
        .to_string(),
    );
    let cases = [
        (list.to_str().unwrap().to_owned(), "expected SHA-256 0000"),
        (
            node.operators_file("none.json", "[]").to_str().unwrap().to_owned(),
            "kubeadm init phase preflight could not be started",
        ),
    ];
    for (components, why) in cases {
        node.put_new_disk();
        node.start_bootstrapper();
        let mut operator = node.init(&["--components", &components]);
        assert_eq!(operator.exit().code(), Some(1), "{}", operator.output());
        let told = operator.output();
        assert!(told.contains(why) && told.contains("reboot it, and it starts over"), "{told}");
        println!("{told}");
        node.wait_for("the bootstrapper's end", || node.try_sh("systemctl is-active bootstrapper").is_none());
        let journal = node.sh("journalctl --unit bootstrapper --output cat");
        assert!(journal.contains("reset: the next boot formats the state disk"), "{journal}");
        assert_eq!(node.sh("ls /run/state/bin | wc -l").trim(), "0", "something half-done was left");
        node.power_cycle_the_tpm();
        node.remove_operators_files();
    }
}

fn lap(node: &Node, what: &str) {
    println!("{:8.1} s  {what}", node.since_boot().as_secs_f64());
}

fn wait_for_cluster(node: &Node) {
    node.wait_for("every pod of kube-system", || {
        let get = |what| node.try_kubectl(&["get", what, "--namespace", "kube-system", "--output", "json"]);
        let (Some(nodes), Some(pods)) = (get("nodes"), get("pods")) else { return false };
        let (nodes, pods) = (items(&nodes), items(&pods));
        nodes.len() == 1 && nodes.iter().all(is_ready) && pods.len() == PODS && pods.iter().all(is_ready)
    });
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

/// Waits for `done`, for `time` at most.
fn wait_within(time: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + time;
    while !done() {
        assert!(Instant::now() < end, "waited for {what} for {} s", time.as_secs());
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// A file's text, for an error.
fn text(path: &std::path::Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
