//! `firstlight init` makes a cluster: the shipped programs, a real TPM (swtpm), systemd, containerd, kubeadm and all that it
//! starts, on a node in namespaces of this machine (docs/testing-kubernetes.md).
//!
//! The tests need root and `make build`'s programs, and take minutes, so `cargo test` skips them; `make test-cluster` runs them.

use support::metadata;
mod growing;
mod network;
mod node;
mod operator;
mod restore;
mod rollout;
mod scaling;
mod workload;
use support::program;
use support::swtpm;

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use base::time;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use network::Network;
use node::Node;
use operator::Operator;
use program::Program;
use proto::join::{
    ISSUE_REJOIN_TICKET, IssueRejoinTicketRequest, IssueRejoinTicketResponse, NODE_PORT,
};
use rpc::grpc::{CallOptions, Channel, Status};
use serde_json::{Value, json};
use swtpm::Swtpm;
use verifier::qemu_vtpm;

/// Pods of kube-system for each cluster: CoreDNS, twice.
const PODS_OF_CLUSTER: usize = 2;
/// Pods on each control plane: etcd, API server, controller manager, scheduler, join service, key service, member controller.
const PODS_OF_CONTROL_PLANE: usize = 7;
/// Pods on every node: kube-proxy.
const PODS_OF_NODE: usize = 1;
const PATIENCE: Duration = Duration::from_secs(300);
const INIT_SECRET: &str = "correct_horse%battery@staple";

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn init_makes_a_cluster_that_survives_lost_operators_and_reboots() {
    let network = Network::empty();
    let mut node = Node::boot(network, "init", "Control_Plane-0", "ControlPlane");
    node.start_bootstrapper();

    // an operator is cut off during the init, and repeats it
    let operator = Operator::new();
    let first = operator.init(&node, &[]);
    first.expect("kubeadm init ..");
    drop(first);
    lap(
        &node,
        "the first operator is gone in the middle of kubeadm init",
    );
    // an operator with other secrets is refused
    let strange = Operator::new();
    let mut stranger = strange.init(&node, &[]);
    assert_eq!(stranger.exit().code(), Some(3), "{}", stranger.output());
    stranger.expect("attestation refused: PCR 15");
    // without a network plugin the services cannot start, and the operator learns why
    let image = node.import_services();
    let second = operator.init(&node, &["--verbose", "--image", &image]);
    second.expect_within("waiting for key-service", PATIENCE);
    let waiting = Instant::now();
    second.expect(&format!(
        "no network plugin is installed on {}",
        node.name()
    ));
    support::promptly::assert_no_wait(waiting, Duration::from_secs(3));
    lap(&node, "the operator knows that there is no network plugin");
    let told = second.output();
    drop(second);
    // a list of add-ons completes it
    let mut addons = operator.apply_addons();
    addons.expect_within("flannel", PATIENCE);
    assert!(addons.exit().success(), "{}", addons.output());
    println!("{}", addons.output());
    for phase in [
        "state disk:",
        "components:",
        "kubeadm preflight:",
        "certificates:",
        "kubeadm init:",
    ] {
        assert!(told.contains(phase), "no {phase} in {told}");
    }
    assert!(
        told.contains("kubeadm: installed") && !has_token(&told),
        "{told}"
    );
    lap(&node, "the network plugin is installed");
    println!("{told}");

    // the bootstrapper has completed the set-up, and no token is left
    let journal = node.wait_for_bootstrapper();
    assert!(
        !has_token(&journal) && journal.contains("complete:"),
        "{journal}"
    );
    node.assert_measured(&operator.cluster_id());

    wait_for_cluster(&operator, &[&node]);
    lap(
        &node,
        "the node is Ready, and every pod of kube-system runs",
    );
    println!(
        "{}",
        operator.kubectl(&["get", "nodes,pods", "--all-namespaces", "--output", "wide"])
    );

    // the API server reaches the kubelet, whose certificate its own CA has signed
    let logs = operator.kubectl(&[
        "logs",
        "--namespace",
        "kube-system",
        "--selector",
        "component=etcd",
        "--tail",
        "1",
    ]);
    assert!(!logs.is_empty());
    // no bootstrap token is left after its minute
    wait_for("the end of kubeadm's own token", || tokens(&operator) == 0);
    assert_eq!(priority_of_etcd(&node), "realtime: prio 0");
    workload::deploy(&operator, &[&node]);
    workload::answers(&operator, &[&node]);

    // data survives a reboot
    operator.keep();
    node.reboot();
    node.start_bootstrapper();
    let journal = node.wait_for_bootstrapper();
    assert!(
        journal.contains("a member of its cluster, which it joined in an earlier boot"),
        "{journal}"
    );
    wait_for_cluster(&operator, &[&node]);
    operator.expect_kept();
    workload::answers(&operator, &[&node]);
    lap(&node, "after a reboot the cluster is back, with its data");
    // the next reboot needs no operator: the cluster opens the disk of its own node
    let mut unlock = node.unlock_as_another();
    println!(
        "{}",
        unlock.expect("key-slot: opened with the key from join service")
    );
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
        if name == "Control_Plane-1" {
            node.interrupt_join();
        }
        node.start_bootstrapper();
        node
    };
    let mut first = boot("control-plane-0", "ControlPlane");
    // these find no join service yet, and keep asking
    let mut second = boot("Control_Plane-1", "ControlPlane");
    let mut worker = boot("worker-0", "Worker");
    let altered = Node::boot(network, "join", "worker-1", "Worker");
    altered.alter();
    altered.start_bootstrapper();

    let operator = Operator::new();
    let image = first.import_services();
    let mut init = operator.init_with_network(&first, &["--image", &image]);
    init.expect_within("objects are new or changed", PATIENCE);
    assert!(init.exit().success(), "{}", init.output());
    lap(&first, "init has ended");
    for node in [&worker, &second] {
        let journal = node.wait_for_bootstrapper();
        assert!(
            journal.contains("complete:") && !has_token(&journal),
            "{journal}"
        );
        let proved = "which proves an accepted image";
        assert!(journal.contains(proved), "{journal}");
        let goes_on = journal.contains("continues with etcd, which already has this member");
        assert_eq!(goes_on, node.is_control_plane, "{journal}");
        node.assert_measured(&operator.cluster_id());
        lap(node, &format!("{} has joined", node.name()));
    }
    a_peer_of_the_old_form_is_refused(&first);
    wait_for_cluster(&operator, &[&first, &second, &worker]);
    lap(
        &first,
        "all nodes are Ready, and every pod of kube-system runs",
    );
    println!(
        "{}",
        operator.kubectl(&["get", "nodes,pods", "--all-namespaces", "--output", "wide"])
    );
    assert_eq!(operator.status(None), Some(0));
    assert_eq!(operator.status(Some(altered.address())), Some(3));
    wait_for("the end of every bootstrap token", || {
        tokens(&operator) == 0
    });
    let members = operator.kubectl(&[
        "get",
        "pods",
        "--namespace",
        "kube-system",
        "--selector",
        "component=etcd",
    ]);
    assert!(
        members.contains("etcd-control-plane-0") && members.contains("etcd-control-plane-1"),
        "{members}"
    );

    // a machine with other software refuses the cluster's join services, which run another image than its own
    let journal = || altered.sh("journalctl --boot --unit bootstrapper --output cat");
    wait_for("the refusal by the altered node", || {
        let said = journal();
        said.contains("none of the 2 accepted images") && said.contains("PCR 4: expected")
    });
    // if it accepts them, they refuse it, and both sides log the reason
    altered.accept_services(&operator::policy());
    wait_for("the refusal of the altered node", || {
        operator.logs_of_join_services().contains("PCR 4")
    });
    let told = "it refused this machine's attestation (its log says why); correct the cause";
    wait_for("the altered node's own word", || journal().contains(told));
    assert!(!journal().contains("complete:"), "{}", journal());
    drop(altered);

    // a workload runs on all nodes, and the API server reaches their kubelets
    let nodes = [&first, &second, &worker];
    workload::deploy(&operator, &nodes);
    workload::answers(&operator, &nodes);
    lap(&first, "pods of all nodes reach each other");
    client_certificates_are_of_tickets(&operator, &[&second, &worker]);
    kubelets_renew_their_certificates(&operator, &[&first, &worker]);
    a_control_plane_renews_its_certificates(&operator, &second);
    authorities_get_new_certificates(&operator, [&first, &second], &worker);

    // without the second control plane etcd has no majority: the join service opens disks by the records that it knows
    let id = operator.cluster_id();
    for node in [&mut worker, &mut second] {
        node.power_off();
        let initramfs = node.start_initramfs();
        boot_with_key_from("join service", initramfs, node, &id);
        lap(node, &format!("{} is back from a reboot", node.name()));
    }
    wait_for_cluster(&operator, &[&first, &second, &worker]);
    workload::answers(&operator, &[&first, &second, &worker]);
    lap(
        &second,
        "all nodes are Ready again, and their pods reach each other",
    );

    operator.keep();
    bring_back_after_a_power_cut(&operator, &mut first, &mut second, &mut worker);
    operator.expect_kept();
    let nodes = [&first, &second, &worker];
    workload::answers(&operator, &nodes);
    lap(
        &first,
        "after a power cut: pods of all nodes reach each other",
    );
    println!("memory in use: {:?} MiB", nodes.map(Node::memory));
}

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn kubernetes_is_upgraded_node_by_node_and_a_new_node_follows() {
    let images = PathBuf::from(node::tool("kubernetes-next.sh", &[]));
    let next = images.parent().unwrap();
    let (list, to) = (operator::components(next), operator::version(next));
    let network = Network::empty();
    let boot = |name: &str, role: &str| {
        let node = Node::boot(network, "upgrade", name, role);
        if role == "ControlPlane" {
            node.import_services();
        }
        node
    };
    let first = boot("control-plane-0", "ControlPlane");
    let second = boot("control-plane-1", "ControlPlane");
    let worker = boot("worker-0", "Worker");
    for node in [&first, &second, &worker] {
        node.start_bootstrapper();
    }
    let operator = Operator::new();
    let image = first.import_services();
    let mut init = operator.init_with_network(&first, &["--image", &image]);
    init.expect_within("objects are new or changed", PATIENCE);
    assert!(init.exit().success(), "{}", init.output());
    let nodes = [&first, &second, &worker];
    for node in [&second, &worker] {
        node.wait_for_bootstrapper();
    }
    wait_for_cluster(&operator, &nodes);
    lap(&first, "the cluster is there");
    operator.keep();
    let from = kubelet_of(&operator, &first);
    assert_ne!(from, to);

    // the list waits in the cluster, and no node has changed
    for more in [&["--dry-run"][..], &[]] {
        let upgrade = operator.upgrade(&to, &list, more);
        println!("{}", upgrade.output());
        upgrade.expect(&format!("{from} -> {to}"));
        upgrade.expect("worker-0");
    }
    for node in nodes {
        node.provide(&images);
    }
    // not before the control plane
    let refused = worker.upgrade(&list).unwrap_err();
    assert!(
        refused.contains("upgrade the control planes first"),
        "{refused}"
    );

    // cut off between the pods of the control plane, and then again
    let is_begun = format!("grep -q {to} /etc/kubernetes/manifests/kube-apiserver.yaml");
    first.interrupt_upgrade(&is_begun, &list);
    upgrade(&operator, &first, &list, &to);
    // an older list would bring the cluster's configuration back
    let mut older = operator.components();
    // the image's own kubeadm is the new one already
    operator::put_script(&mut older[1], &format!("#!/run/sh\necho {from}\n"));
    let refused = second.upgrade(&older).unwrap_err();
    let no_fit = format!("{from} does not fit the cluster, which is at {to}");
    assert!(refused.contains(&no_fit), "{refused}");
    // cut off while the kubelet is replaced
    second.interrupt_upgrade("test -e /run/state/bin/kubelet.before-upgrade", &list);
    upgrade(&operator, &second, &list, &to);
    only_the_join_service_approves_kubelets(&operator);

    // a new kubelet that exits: the old one runs again, also if the upgrade was cut off with the new one in place
    let script = format!("#!/run/sh\n[ $1 = --version ] && echo Kubernetes {to}\n");
    let mut broken = list.clone();
    operator::put_script(&mut broken[0], &script);
    let is_new = "head -c 2 /run/state/bin/kubelet | grep -q '#!'";
    worker.interrupt_upgrade(is_new, &broken);
    let refused = worker.upgrade(&broken).unwrap_err();
    println!("{refused}");
    assert!(
        refused.contains(&format!("the kubelet is {from} again")),
        "{refused}"
    );
    assert_eq!(kubelet_of(&operator, &worker), from);
    upgrade(&operator, &worker, &list, &to);

    // every pod is of the new version, etcd and CoreDNS too, and the data is there
    wait_for_cluster(&operator, &nodes);
    let select = ["get", "pods", "--namespace", "kube-system", "--output"];
    let images_of = "jsonpath={range .items[*]}{.spec.containers[0].image}{\"\\n\"}{end}";
    let new = text(&images.join("names"));
    // four pods of each control plane, CoreDNS twice, and kube-proxy on each node
    let expected = 2 * 4 + PODS_OF_CLUSTER + nodes.len();
    wait_for("the pods of the new version", || {
        let images = operator.kubectl(&[&select[..], &[images_of]].concat());
        let mut of_kubernetes = images
            .lines()
            .filter(|it| it.starts_with("registry.k8s.io/"));
        of_kubernetes.clone().count() == expected
            && of_kubernetes.all(|it| new.lines().any(|name| name == it))
    });
    let upgraded = operator.upgrade(&to, &list, &[]);
    upgraded.expect(&format!("Every node has {to}"));
    for control_plane in [&first, &second] {
        assert_eq!(priority_of_etcd(control_plane), "realtime: prio 0");
    }
    // a new node follows, in place of another one: each node's disk takes space on this machine
    operator.kubectl(&["delete", "node", worker.name()]);
    drop(worker);
    let later = boot("worker-1", "Worker");
    later.provide(&images);
    later.start_bootstrapper();
    later.wait_for_bootstrapper();
    wait_for("the new node", || kubelet_of(&operator, &later) == to);
    operator.expect_kept();
    lap(&first, "a node has joined with the new version");
}

/// Upgrades a node that may have been upgraded in part.
fn upgrade(operator: &Operator, node: &Node, list: &Value, to: &str) {
    let mut said = node.upgrade(list);
    let end = Instant::now() + PATIENCE;
    // for this check kubeadm starts a pod, and waits 15 s, in which another controller manager may have to take over
    while said
        .as_ref()
        .is_err_and(|error| error.contains("upgrade-health-check"))
        && Instant::now() < end
    {
        said = node.upgrade(list);
    }
    let said = said.unwrap_or_else(|error| panic!("{error}"));
    println!("{said}");
    assert!(!has_token(&said), "{said}");
    wait_for("the new kubelet's word", || {
        kubelet_of(operator, node) == to
    });
    node.sh("test ! -e /run/state/bin/kubelet.before-upgrade");
    lap(node, &format!("{} has {to}", node.name()));
}

/// Returns the version of a node's kubelet.
fn kubelet_of(operator: &Operator, node: &Node) -> String {
    let version = "jsonpath={.status.nodeInfo.kubeletVersion}";
    operator
        .try_kubectl(&["get", "node", node.name(), "--output", version])
        .unwrap_or_default()
}

/// A new cluster requires the strong form, so its join service serves no node of Constellation.
fn a_peer_of_the_old_form_is_refused(control_plane: &Node) {
    let tpm = Swtpm::start();
    let issuer = qemu_vtpm::issuer(tpm.location().parse().unwrap(), None);
    let socket = TcpStream::connect((control_plane.address(), NODE_PORT)).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let transport = atls::Client::new(Some(Arc::new(issuer)), None)
        .only_old()
        .connect(socket, deadline)
        .unwrap();
    let request = IssueRejoinTicketRequest {
        disk_uuid: "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22".into(),
    };
    let options = CallOptions {
        timeout: Some(PATIENCE),
        ..CallOptions::default()
    };
    let answer =
        Channel::new(transport, "join")
            .unwrap()
            .unary(ISSUE_REJOIN_TICKET, &request, &options);
    let refused: Result<IssueRejoinTicketResponse, Status> = answer;
    let refused = refused.err().unwrap();
    // its machine meets the policy but for the form
    let why = "it refused this machine's attestation";
    assert!(refused.to_string().contains(why), "{refused}");
}

/// All nodes are off at once. The operator recovers the control planes for etcd's majority; the worker comes back by itself.
fn bring_back_after_a_power_cut(
    operator: &Operator,
    first: &mut Node,
    second: &mut Node,
    worker: &mut Node,
) {
    let id = operator.cluster_id();
    thread::scope(|scope| {
        for node in [&mut *first, &mut *second, &mut *worker] {
            scope.spawn(|| node.power_off());
        }
    });
    let in_initramfs = [&mut *first, &mut *second, &mut *worker].map(Node::start_initramfs);
    for initramfs in &in_initramfs {
        initramfs.expect("waiting: for a key of disk");
    }
    let [of_first, of_second, of_worker] = in_initramfs;

    // the operator's state file has the first node's key since the init
    recover(operator, first, &[]);
    boot_with_key_from("the operator at", of_first, first, &id);
    wait_for("etcd on the first control plane", || {
        first.try_sh("pidof etcd").is_some()
    });
    lap(
        first,
        "after a power cut: the operator has recovered one control plane, etcd waits for another",
    );
    // one member of two is not a majority, so there is no API server, and the kubelet starts no join service
    let mut status = operator.recover(second.address(), &["--status"]);
    assert!(status.exit().success(), "{}", status.output());
    let waits = status.expect(&format!(
        "Waiting for: join service {}:30090: cannot connect",
        first.address()
    ));
    println!("{waits}");
    for initramfs in [&of_second, &of_worker] {
        assert!(
            !initramfs.output().contains("key-slot"),
            "{}",
            initramfs.output()
        );
    }

    // the second node joined, so its key comes from its console
    let console = of_second.expect("attestation-key: ");
    let key = console
        .rsplit(' ')
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned();
    let mut refused = operator.recover(second.address(), &[]);
    assert_eq!(refused.exit().code(), Some(3), "{}", refused.output());
    refused.expect(&key);
    recover(operator, second, &["--attestation-key", &key]);
    boot_with_key_from("the operator at", of_second, second, &id);
    boot_with_key_from("join service", of_worker, worker, &id);
    lap(
        first,
        "after a power cut: the worker has its key, from the cluster",
    );
    wait_for_cluster(operator, &[first, second, worker]);
    lap(
        first,
        "after a power cut: all nodes are Ready, and every pod of kube-system runs",
    );
}

/// Runs `firstlight recover` until the node has opened its disk.
fn recover(operator: &Operator, node: &Node, more: &[&str]) {
    let mut recover = operator.recover(node.address(), more);
    assert!(recover.exit().success(), "{}", recover.output());
    println!("{}", recover.expect("opened its disk"));
}

/// Checks that the initramfs gets a key from `source`, and that the booted node is a member of the cluster again.
fn boot_with_key_from(source: &str, mut initramfs: Program, node: &mut Node, cluster_id: &[u8]) {
    let line = initramfs.expect("key-slot: opened");
    assert!(
        line.contains(&format!("with the key from {source}")),
        "{line}"
    );
    println!("{}: {line}", node.name());
    initramfs.exit();
    node.boot_on(cluster_id);
    node.start_bootstrapper();
    let journal = node.wait_for_bootstrapper();
    assert!(
        journal.contains("a member of its cluster, which it joined in an earlier boot"),
        "{journal}"
    );
}

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn a_set_up_that_fails_is_told_at_once_and_the_node_starts_over() {
    let node = Node::boot(
        Network::empty(),
        "failure",
        "control-plane-0",
        "ControlPlane",
    );
    let shared = Operator::new();
    let file = |name: &str, list: Value| shared.file(name, &list.to_string());
    let kubeadm = |url: &str, hash: &str| json!([{"url": url, "hash": hash, "install_path": "/run/state/bin/kubeadm"}]);
    // the real kubeadm, except for one command that fails
    let replaced = |component: &str, script: &str| {
        let mut list = shared.components();
        let place = format!("/run/state/bin/{component}");
        let one = list
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .find(|one| one["install_path"] == *place)
            .unwrap();
        let url = format!("data:text/plain;base64,{}", STANDARD.encode(script));
        *one = json!({"url": url, "hash": "", "install_path": place});
        list
    };
    let failing = |pattern: &str| {
        let fail = format!("case \"$*\" in {pattern}) echo one word more >&2; exit 7 ;; esac");
        replaced(
            "kubeadm",
            &format!("#!/run/sh\n{fail}\nexec /usr/lib/firstlight/components/kubeadm \"$@\"\n"),
        )
    };
    let kubelet = "#!/run/sh\n[ \"$*\" != --version ] || exec /usr/lib/firstlight/components/kubelet --version\necho one word more; exit 7\n";
    let wrong = format!("sha256:{}", "00".repeat(32));
    let cases = [
        (
            file(
                "hash.json",
                kubeadm("file:///usr/lib/firstlight/components/kubeadm", &wrong),
            ),
            "expected SHA-256 0000",
        ),
        (
            file("none.json", json!([])),
            "kubeadm init phase preflight could not be started",
        ),
        (
            file("certs.json", failing("'init phase certs '*")),
            "kubeadm init phase certs all failed with exit code 7; its last lines:\n    one word more",
        ),
        (
            file("init.json", failing("'init --config '*")),
            "kubeadm init failed with exit code 7; its last lines:\n    one word more",
        ),
        (
            file("kubelet.json", replaced("kubelet", kubelet)),
            "the kubelet exits again and again; its last lines:\n    one word more",
        ),
    ];
    for (components, why) in cases {
        node.put_new_disk();
        node.start_bootstrapper();
        let owner = Operator::new();
        let mut operator = owner.init(&node, &["--components", components.to_str().unwrap()]);
        assert_eq!(operator.exit().code(), Some(1), "{}", operator.output());
        let told = operator.output();
        assert!(
            told.contains(why) && told.contains("reboot it, and it starts over"),
            "{told}"
        );
        println!("{told}");
        let journal = node.wait_for_bootstrapper();
        assert!(
            journal.contains("reset: the next boot formats the state disk"),
            "{journal}"
        );
        // only complete components are installed
        let installed = node.sh("ls -A /run/state/bin | grep -vE '^kube(adm|let|ctl)$' || true");
        assert_eq!(installed, "");
        node.format_the_disk();
        node.power_cycle_the_tpm();
    }
}

/// Checks that the bindings do not exist that `kubeadm init` and `kubeadm upgrade apply` make.
fn only_the_join_service_approves_kubelets(operator: &Operator) {
    let bindings = operator.kubectl(&["get", "clusterrolebindings", "--output", "name"]);
    assert!(bindings.contains("kubeadm:"), "{bindings}");
    assert!(!bindings.contains("kubeadm:node-autoapprove"), "{bindings}");
}

/// Checks that the kubelets of joined nodes have the client certificates of their tickets, and that none asked for one by its token.
fn client_certificates_are_of_tickets(operator: &Operator, nodes: &[&Node]) {
    only_the_join_service_approves_kubelets(operator);
    let signer = "spec.signerName=kubernetes.io/kube-apiserver-client-kubelet";
    let get = [
        "get",
        "certificatesigningrequests",
        "--field-selector",
        signer,
        "--output",
        "json",
    ];
    let asked = operator.kubectl(&get);
    let is_by_token = |request: &Value| {
        request["spec"]["username"]
            .to_string()
            .contains("system:bootstrap:")
    };
    let asked = items(&asked);
    assert!(!asked.iter().any(is_by_token), "{asked:?}");
    for node in nodes {
        let link = node.sh("readlink /var/lib/kubelet/pki/kubelet-client-current.pem");
        assert!(link.contains("kubelet-client-firstlight.pem"), "{link}");
    }
}

/// Checks for an initialized node and a joined one: kubelets accept their first certificates, and when these are
/// deleted the cluster signs others, which the API server accepts.
fn kubelets_renew_their_certificates(operator: &Operator, nodes: &[&Node]) {
    let signer = "spec.signerName=kubernetes.io/kubelet-serving";
    let requests = || {
        operator.kubectl(&[
            "get",
            "certificatesigningrequests",
            "--field-selector",
            signer,
        ])
    };
    assert_eq!(requests(), "");
    for node in nodes {
        node.sh("rm /var/lib/kubelet/pki/kubelet-server.* && systemctl restart kubelet");
    }
    for node in nodes {
        let user = format!("system:node:{}", node.name().to_lowercase());
        let is_signed = |line: &str| line.contains(&user) && line.contains("Approved,Issued");
        wait_for("a new certificate", || requests().lines().any(is_signed));
        let of_node = format!("spec.nodeName={}", node.name().to_lowercase());
        let select = [
            "get",
            "pods",
            "--namespace",
            "kube-system",
            "--selector",
            "k8s-app=kube-proxy",
            "--output",
            "name",
        ];
        let pod = operator.kubectl(&[&select[..], &["--field-selector", &of_node]].concat());
        let logs = [
            "logs",
            "--namespace",
            "kube-system",
            "--tail",
            "1",
            pod.trim(),
        ];
        wait_for("logs by the new certificate", || {
            operator.try_kubectl(&logs).is_some()
        });
        node.sh("test -e /var/lib/kubelet/pki/kubelet-server-current.pem");
        lap(
            node,
            &format!(
                "the kubelet of {} serves with a renewed certificate",
                node.name()
            ),
        );
    }
    println!("{}", requests());
}

/// Gives a control plane certificates that end in ten days, and checks that its unit renews them, that the kubelet replaces the pods
/// that use them, once, and that the API answers all the time by the other control plane.
fn a_control_plane_renews_its_certificates(operator: &Operator, node: &Node) {
    node.sh("systemctl is-active firstlight-renew.timer && systemctl is-enabled firstlight-renew.service");
    node.sh(concat!(
        "version=$(/run/state/bin/kubeadm version --output short)\n",
        "printf 'apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: %s\n",
        "certificateValidityPeriod: 240h0m0s\n' $version >/run/short.yaml\n",
        "/run/state/bin/kubeadm certs renew all --config /run/short.yaml"
    ));
    let before = static_pods(operator, node);
    assert_eq!(before.len(), 4, "{before:?}");
    node.sh("systemctl start --no-block firstlight-renew");
    let log = || node.sh("journalctl --boot --unit firstlight-renew --output cat");
    wait_for("the end of the renewal", || {
        // the load balancer may have chosen the API server that stops
        let answers = || operator.try_kubectl(&["get", "--raw", "/readyz"]);
        assert!(answers().or_else(answers).is_some(), "{}", log());
        let log = log();
        assert!(!log.contains("Failed with result"), "{log}");
        log.contains("Finished")
    });
    let said = log();
    println!("{said}");
    // a node that joined has no super-admin.conf
    let renewed = said.lines().filter(|line| line.contains(" in 364 days"));
    assert_eq!(renewed.count(), 10, "{said}");
    let after = static_pods(operator, node);
    for (pod, hash) in &before {
        assert_eq!(after[pod] == *hash, pod == "etcd", "{pod}: {after:?}");
    }
    let config = "--kubeconfig /etc/kubernetes/admin.conf";
    let here = format!("--server https://{}:6443", node.address());
    node.sh(&format!(
        "/run/state/bin/kubectl {config} {here} get --raw /readyz"
    ));
    // without anything to renew, the unit only gives etcd the priority that a restart takes from it
    // threads come and go; the ionice of a node is busybox's
    let said = node.sh(
        "for p in $(pidof etcd); do for t in /proc/$p/task/*; do ionice -c 2 -n 4 -p ${t##*/} 2>&1 || true; done; done",
    );
    assert_ne!(priority_of_etcd(node), "realtime: prio 0", "{said}");
    node.sh(
        "systemctl start firstlight-renew && test ! -e /etc/kubernetes/firstlight-renewal.json",
    );
    assert_eq!(priority_of_etcd(node), "realtime: prio 0");
    let said = log();
    assert_eq!(
        said.matches(" restarts with its certificate").count(),
        3,
        "{said}"
    );
    assert_eq!(said.matches("Finished").count(), 2, "{said}");
    assert_eq!(static_pods(operator, node), after);
    lap(node, "a control plane has renewed its certificates");
}

/// Gives the cluster's authority a certificate that ends in ten days, on each node, and checks that the control planes make new ones with
/// the same key, that the worker takes one of them, and that all of them still work together.
fn authorities_get_new_certificates(
    operator: &Operator,
    control_planes: [&Node; 2],
    worker: &Node,
) {
    const CERTIFICATE: &str = "/etc/kubernetes/pki/ca.crt";
    let folder = tempfile::tempdir().unwrap();
    let certificate = |node: &Node| node.sh(&format!("cat {CERTIFICATE}"));
    fs::write(folder.path().join("crt"), certificate(control_planes[0])).unwrap();
    let key = control_planes[0].sh("cat /etc/kubernetes/pki/ca.key");
    fs::write(folder.path().join("key"), key).unwrap();
    let openssl = |arguments: &str| {
        let mut command = Command::new("openssl");
        command
            .args(arguments.split(' '))
            .current_dir(folder.path());
        assert!(command.status().unwrap().success(), "openssl {arguments}");
    };
    openssl("x509 -in crt -signkey key -days 10 -out short");
    let short = text(&folder.path().join("short"));
    for node in [control_planes[0], control_planes[1], worker] {
        node.put(CERTIFICATE, short.as_bytes(), 0o644);
    }
    for node in control_planes {
        renew(node);
        let log = node.sh("journalctl --boot --unit firstlight-renew --output cat");
        assert!(
            log.contains("is a new certificate with the same key"),
            "{log}"
        );
        assert!(log.contains("the kubelet restarts with"), "{log}");
        fs::write(folder.path().join("new"), certificate(node)).unwrap();
        openssl("x509 -in new -noout -checkend 315000000");
        lap(node, "its authority has a new certificate");
    }
    let had = worker.sh("pidof kubelet");
    wait_for("the worker's new certificate", || {
        renew(worker);
        certificate(worker) != short
    });
    assert_ne!(worker.sh("pidof kubelet"), had);
    let nodes = control_planes.map(certificate);
    assert!(nodes.contains(&certificate(worker)));
    let kubelet = worker.sh("cat /etc/kubernetes/kubelet.conf");
    assert!(kubelet.contains(&STANDARD.encode(certificate(worker))));
    let all = [control_planes[0], control_planes[1], worker];
    wait_for_cluster(operator, &all);
    workload::answers(operator, &all);
    lap(
        worker,
        "all nodes work with the new certificates of the authority",
    );
}

/// Runs the unit that renews certificates, which must succeed.
fn renew(node: &Node) {
    let property = |name: &str| {
        let show = format!("systemctl show --property {name} --value firstlight-renew");
        node.sh(&show).trim().to_owned()
    };
    let before = property("InvocationID");
    node.sh("systemctl start --no-block firstlight-renew");
    wait_for("the end of a renewal", || {
        let log = || node.sh("journalctl --boot --unit firstlight-renew --output cat");
        let state = property("ActiveState");
        assert_ne!(state, "failed", "{}", log());
        state == "inactive" && property("InvocationID") != before
    });
}

/// Returns the kubelet's hash of each manifest that a node runs, by the component, if all of these pods are ready.
fn static_pods(operator: &Operator, node: &Node) -> BTreeMap<String, String> {
    let of_node = format!(
        "spec.nodeName={}",
        node.name().to_lowercase().replace('_', "-")
    );
    let pods = operator.kubectl(&[
        "get",
        "pods",
        "--namespace",
        "kube-system",
        "--selector",
        "tier=control-plane",
        "--field-selector",
        &of_node,
        "--output",
        "json",
    ]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of = |pod: &Value| {
        let metadata = &pod["metadata"];
        assert!(ready(pod).is_some(), "{pod}");
        (
            text(&metadata["labels"]["component"]),
            text(&metadata["annotations"]["kubernetes.io/config.hash"]),
        )
    };
    items(&pods).iter().map(of).collect()
}

fn lap(node: &Node, what: &str) {
    println!("{:8.1} s  {what}", node.since_boot().as_secs_f64());
}

/// Waits until all nodes are Ready, and all pods of kube-system run.
fn wait_for_cluster(operator: &Operator, nodes: &[&Node]) {
    let control_planes = nodes.iter().filter(|node| node.is_control_plane).count();
    let pods =
        PODS_OF_CLUSTER + control_planes * PODS_OF_CONTROL_PLANE + nodes.len() * PODS_OF_NODE;
    wait_for_all(operator, &["nodes"], nodes.len(), |node| {
        is_ready_since_boot(node, nodes)
    });
    let of_cluster = ["pods", "--namespace", "kube-system"];
    wait_for_all(operator, &of_cluster, pods, |pod| {
        is_running_since_boot(pod, nodes)
    });
}

/// Waits until there are `count` objects, and the condition holds for all.
fn wait_for_all(operator: &Operator, what: &[&str], count: usize, is_so: impl Fn(&Value) -> bool) {
    let get = [&["get", "--output", "json"], what].concat();
    let end = Instant::now() + PATIENCE;
    loop {
        let all = operator
            .try_kubectl(&get)
            .map(|json| items(&json))
            .unwrap_or_default();
        let late: Vec<_> = all.iter().filter(|one| !is_so(one)).collect();
        if all.len() == count && late.is_empty() {
            return;
        }
        assert!(
            Instant::now() < end,
            "waited for {count} {what:?} for {} s: there are {}, and these are not ready: {late:#?}",
            PATIENCE.as_secs(),
            all.len()
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// For a while after a boot the API has the state from before it.
fn is_ready_since_boot(node: &Value, nodes: &[&Node]) -> bool {
    ready(node).is_some_and(|ready| {
        is_since_boot(
            &ready["lastHeartbeatTime"],
            &node["metadata"]["name"],
            nodes,
        )
    })
}

fn is_running_since_boot(pod: &Value, nodes: &[&Node]) -> bool {
    let containers = pod["status"]["containerStatuses"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let is_new = |one: &Value| {
        is_since_boot(
            &one["state"]["running"]["startedAt"],
            &pod["spec"]["nodeName"],
            nodes,
        )
    };
    ready(pod).is_some() && !containers.is_empty() && containers.iter().all(is_new)
}

/// Returns whether this time is later than the last boot of the node of this name.
fn is_since_boot(time: &Value, name: &Value, nodes: &[&Node]) -> bool {
    let time = time::parse(time.as_str().unwrap_or_default());
    nodes
        .iter()
        .find(|node| *name == node.name())
        .is_some_and(|node| time >= Some(node.booted()))
}

/// Returns the number of bootstrap tokens.
fn tokens(operator: &Operator) -> usize {
    let secrets = operator.kubectl(&[
        "get",
        "secrets",
        "--namespace",
        "kube-system",
        "--output",
        "name",
    ]);
    secrets
        .lines()
        .filter(|name| name.contains("bootstrap-token"))
        .count()
}

fn items(json: &str) -> Vec<Value> {
    serde_json::from_str::<Value>(json).unwrap()["items"]
        .as_array()
        .unwrap()
        .clone()
}

/// Returns the object's condition of that name, if it has one.
fn ready(object: &Value) -> Option<&Value> {
    object["status"]["conditions"]
        .as_array()?
        .iter()
        .find(|one| one["type"] == "Ready" && one["status"] == "True")
}

/// Returns whether a text contains a bootstrap token.
fn has_token(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.split_whitespace().any(|word| {
        word.split_once('.').is_some_and(|(id, secret)| {
            id.len() == 6 && secret.len() == 16 && (id.to_owned() + secret).chars().all(is_word)
        })
    })
}

/// Returns the different I/O priorities of etcd's threads, as ionice(1) names them.
fn priority_of_etcd(node: &Node) -> String {
    let said =
        node.sh("for t in /proc/$(pidof etcd)/task/*; do ionice -p ${t##*/}; done | sort -u");
    said.trim().into()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(
            Instant::now() < end,
            "waited for {what} for {} s",
            PATIENCE.as_secs()
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns a file's text, for an error.
fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
