//! The life of a cluster whose machines run the image of mkosi, and nothing of it masked: machines under QEMU, from power-on to a
//! workload, with a network plugin; power cuts; recovery; lost machines; and the operator, who has no shell there.
//!
//! [`from_power_on_to_the_next_year`] is the story. Each step of it is a test of its own, too, which begins with a saved cluster of two
//! machines that are off ([`Cluster::saved`]).
//!
//! It needs root, and takes long: under emulation Kubernetes is slow. `cargo test` skips it; `make test-whole` runs it in a network
//! namespace of its own (docs/testing-kubernetes.md).

use support::metadata;
#[path = "../cluster/network.rs"]
mod network;
mod node;
mod operator;
mod release;
mod servers;
#[path = "../images/words.rs"]
mod words;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use machine::{dist, root};
use support::boot_image::run;

use network::Network;
use node::{Clock, Node, image};
use operator::{Operator, pcr_11};
use release::Release;
use servers::Servers;
use support::program::Program;
use tempfile::TempDir;

const INIT_SECRET: &str = "correct_horse%battery@staple";
/// The limit for one step. Without KVM a machine needs some minutes for what takes a real one seconds.
const PATIENCE: Duration = Duration::from_secs(1500);

#[test]
#[ignore = "needs root, and boots machines that run Kubernetes: make test-whole"]
fn from_power_on_to_the_next_year() {
    let mut cluster = Cluster::grow();
    a_worker_comes_back_by_itself(&mut cluster);
    nobody_needs_a_shell(&mut cluster);
    faults_are_repaired(&mut cluster);
    cluster.switch_off();
    cluster.save();
    cluster.switch_on();
    a_machine_takes_the_place_of_another(&mut cluster);
    half_of_etcd_is_lost(&mut cluster);
    an_image_is_rolled_out(&mut cluster);
    a_bad_image_falls_back(&mut cluster);
    kubernetes_is_upgraded(&mut cluster);
    cluster.switch_off();
    a_year_passes(&mut cluster);
}

/// A test that is one step of the story.
macro_rules! step {
    ($name:ident, $step:ident) => {
        #[test]
        #[ignore = "needs root, and boots machines that run Kubernetes: make test-whole STEP=..."]
        fn $name() {
            let mut cluster = Cluster::saved();
            cluster.switch_on();
            $step(&mut cluster);
        }
    };
}

#[test]
#[ignore = "needs root, and boots machines that run Kubernetes: make test-whole STEP=year"]
fn step_year() {
    a_year_passes(&mut Cluster::saved());
}

step!(step_rejoin, a_worker_comes_back_by_itself);
step!(step_operator, nobody_needs_a_shell);
step!(step_faults, faults_are_repaired);
step!(step_replace, a_machine_takes_the_place_of_another);
step!(step_etcd, half_of_etcd_is_lost);
step!(step_rollout, an_image_is_rolled_out);
step!(step_fallback, a_bad_image_falls_back);
step!(step_upgrade, kubernetes_is_upgraded);

/// A control plane, a worker, what is around them, and their operator.
struct Cluster {
    network: &'static Network,
    servers: Servers,
    operator: Operator,
    first: Node,
    worker: Node,
}

impl Cluster {
    /// Switches two new machines on, and makes a cluster of them.
    fn grow() -> Cluster {
        let network = Network::empty();
        let servers = Servers::start();
        let mut first = Node::new(network, "control-plane-0", "ControlPlane");
        let operator = Operator::new(&first);

        first.power_on();
        first.wait_for_line(" formatted:");
        first.wait_for_line(" ready: waiting for the operator's init");
        operator.accept(&first.attestation_key());
        operator.init(&first);
        operator.wait_for_nodes(1);

        operator.allow_workloads_on_control_planes();
        operator.deploy();
        operator.ask("ask-first", None, &["web-"]);

        let written = operator.cut_power_while_writing(&mut first);
        first.power_on();
        first.wait_for_line(" waiting: for a key of disk");
        operator.recover(&first);
        first.wait_for_line(" ready: a member of its cluster");
        operator.wait_for_nodes(1);
        operator.expect_written(&written);
        operator.ask("ask-again", None, &["web-"]);

        let mut cluster = Cluster {
            network,
            servers,
            operator,
            first,
            worker: Node::new(network, "worker-0", "Worker"),
        };
        cluster.worker.power_on();
        cluster.operator.admit(&mut cluster.worker);
        cluster.operator.wait_for_nodes(2);
        cluster.operator.deploy_on_each_node();
        cluster.pods_reach_each_other();
        cluster
    }

    /// The cluster that [`Cluster::save`] saved last with the same programs; grows one if there is none. Its machines are off.
    fn saved() -> Cluster {
        let folder = saved_folder();
        if !folder.is_dir() {
            let mut cluster = Cluster::grow();
            cluster.switch_off();
            cluster.save();
            return cluster;
        }
        let network = Network::empty();
        let servers = Servers::start();
        let mut first = Node::new(network, "control-plane-0", "ControlPlane");
        let mut worker = Node::new(network, "worker-0", "Worker");
        first.load(&folder);
        worker.load(&folder);
        let operator = Operator::new(&first);
        operator.load(&folder);
        println!("the cluster is the one in {}", folder.display());
        Cluster {
            network,
            servers,
            operator,
            first,
            worker,
        }
    }

    /// Copies machines that are off, and the operator's files, for tests of single steps.
    fn save(&self) {
        let folder = saved_folder();
        // clusters of other programs
        let _ = fs::remove_dir_all(folder.parent().unwrap());
        let part = folder.with_extension("part");
        self.first.save(&part);
        self.worker.save(&part);
        self.operator.save(&part);
        fs::rename(part, &folder).unwrap();
        println!("the cluster is saved in {}", folder.display());
    }

    /// The operator switches both machines off, the control plane last.
    fn switch_off(&mut self) {
        for node in [&mut self.worker, &mut self.first] {
            shut_down(&self.operator, node);
        }
    }

    /// Switches both machines on, which are off, and recovers all.
    fn switch_on(&mut self) {
        self.first.power_on();
        self.worker.power_on();
        self.first.wait_for_line(" waiting: for a key of disk");
        self.operator.recover_all();
        for node in [&mut self.first, &mut self.worker] {
            node.wait_for_line(" ready: a member of its cluster");
        }
        self.operator.wait_for_nodes(2);
        self.pods_reach_each_other();
    }

    fn pods_reach_each_other(&self) {
        let [first, worker] = [&self.first, &self.worker].map(Node::name);
        self.operator.ask("ask-worker", Some(first), &[worker]);
        self.operator
            .ask("ask-control-plane", Some(worker), &[first]);
    }
}

/// The folder of the saved cluster of these programs.
fn saved_folder() -> PathBuf {
    let programs = ["firstlight", "firstlight-image.tar"].map(|name| dist(name).unwrap());
    let sums = run(Command::new("sha256sum").arg(node::image()).args(programs));
    let sums: String = sums.lines().map(|line| &line[..8]).collect();
    root().join("target/whole").join(sums)
}

/// The operator switches a machine off.
fn shut_down(operator: &Operator, node: &mut Node) {
    operator.machine(node, &["shutdown", "--skip-drain", "--yes"]);
    node.wait_for_end();
}

/// Switches the worker on, which needs no operator, and waits for both nodes.
fn rejoin(operator: &Operator, worker: &mut Node) {
    worker.power_on();
    worker.wait_for_line(" ready: a member of its cluster");
    operator.wait_for_nodes(2);
}

/// By the join service of the cluster, without the operator.
fn a_worker_comes_back_by_itself(cluster: &mut Cluster) {
    cluster.worker.cut_power();
    println!("the power of the worker is cut");
    rejoin(&cluster.operator, &mut cluster.worker);
    cluster.pods_reach_each_other();
}

/// docs/day-two/operator.md
fn nobody_needs_a_shell(cluster: &mut Cluster) {
    let Cluster {
        operator,
        first,
        worker,
        ..
    } = cluster;
    let says = |node: &Node, log: &[&str], word: &str| {
        let text = operator.logs(node, log);
        assert!(text.contains(word), "{log:?} without {word}: {text}");
    };
    says(worker, &["--unit", "kubelet"], "kubelet");
    says(worker, &["--boot", "-1", "--lines", "50"], "systemd");
    says(worker, &["--kernel"], "Linux version");
    says(first, &["--audit", "--lines", "3"], "audit.k8s.io");
    operator.replace_kubeconfig(first);
    operator.wait_for_nodes(2);
    operator.machine(worker, &["restart", "--unit", "containerd"]);
    operator.collect_facts(&[first, worker]);
    shut_down(operator, worker);
    rejoin(operator, worker);
    says(worker, &["--calls"], "restart containerd.service");
}

/// docs/day-two/operator.md#three-faults-repaired
fn faults_are_repaired(cluster: &mut Cluster) {
    let Cluster {
        operator, worker, ..
    } = cluster;
    let a_day_ahead = "kill -STOP $(/busybox pidof chronyd) && /busybox date -s @$(($(/busybox date +%s) + 86400))";
    operator.harm(worker, "clock", a_day_ahead);
    operator.wait_for_diagnosis("its clock is ", true);
    operator.machine(worker, &["restart", "--unit", "chrony"]);
    operator.wait_for_diagnosis("its clock is ", false);
    operator.end_harm("clock");

    operator.harm(worker, "runtime", "kill -STOP $(/busybox pidof containerd)");
    operator.wait_for_diagnosis("Kubernetes reports it as not ready", true);
    operator.machine(worker, &["restart", "--unit", "containerd"]);
    operator.wait_for_nodes(2);
    operator.end_harm("runtime");

    // what the kubelet leaves of a log that it has rotated
    let fill = r#"set -- /host/var/log/pods/kube-system_kube-proxy-*/kube-proxy
        free=$(/busybox df -m "$1" | /busybox awk 'END { print $4 }')
        /busybox fallocate -l "$((free - 8))M" "$1/0.log.20260101-000000""#;
    operator.harm(worker, "disk", fill);
    operator.wait_for_diagnosis("its kubelet reports DiskPressure", true);
    let report = operator.clean(worker);
    assert!(
        report.contains("deleted rotated logs of containers: 1 files"),
        "{report}"
    );
    operator.wait_for_diagnosis("its kubelet reports DiskPressure", false);
    operator.end_harm("disk");
    operator.deploy_on_each_node();
    cluster.pods_reach_each_other();
}

/// docs/day-two/remove-node.md
fn a_machine_takes_the_place_of_another(cluster: &mut Cluster) {
    cluster.worker.cut_power();
    cluster.operator.remove(cluster.worker.name());
    let new = Node::new(cluster.network, "worker-1", "Worker");
    std::mem::replace(&mut cluster.worker, new).leave(cluster.network);
    cluster.worker.power_on();
    cluster.operator.admit(&mut cluster.worker);
    cluster.operator.wait_for_nodes(2);
    cluster.operator.deploy_on_each_node();
    cluster.pods_reach_each_other();
}

/// docs/day-two/etcd.md: the second of two control planes is lost with its disk. The worker is off meanwhile, because three machines are
/// too many for two processors, and comes back through the join service of the restored cluster.
fn half_of_etcd_is_lost(cluster: &mut Cluster) {
    let Cluster {
        operator,
        first,
        worker,
        network,
        ..
    } = cluster;
    shut_down(operator, worker);
    let mut second = Node::new(network, "control-plane-1", "ControlPlane");
    second.power_on();
    operator.admit(&mut second);
    operator.wait_for_nodes(2);
    operator.write("before");
    operator.save_etcd();
    operator.write("after");
    let lost = second.name();
    second.cut_power();
    second.leave(network);
    operator.wait_for_the_end_of_the_api();
    operator.restore_etcd(first);
    operator.remove(lost);
    rejoin(operator, worker);
    assert!(operator.has("before") && !operator.has("after"));
    cluster.pods_reach_each_other();
}

/// Both machines download, try and keep a good image: docs/day-two/upgrade.md, docs/images/update.md
fn an_image_is_rolled_out(cluster: &mut Cluster) {
    let Cluster {
        operator,
        first,
        worker,
        servers,
        ..
    } = cluster;
    let kept = format!(" trial: version {} is kept", Release::GOOD);
    let good = Release::good();
    servers.offer(&good);
    let rollout = operator.roll_out(&good);
    worker.wait_for_end();
    worker.power_on();
    worker.wait_for_line(&kept);
    first.wait_for_end();
    first.power_on();
    first.wait_for_line(" waiting: for a key of disk");
    operator.recover(first);
    first.wait_for_line(&kept);
    ends(rollout, "done: every node has the image", 0);
    operator.accept_only(&good.policy);
    operator.expect_only(&good.policy);
    operator.wait_for_nodes(2);
    cluster.pods_reach_each_other();
}

/// docs/day-two/upgrade.md, docs/images/update.md: the worker goes back by itself, and the operator ends the rollout.
fn a_bad_image_falls_back(cluster: &mut Cluster) {
    let Cluster {
        operator,
        worker,
        servers,
        ..
    } = cluster;
    let folder = TempDir::new_in(root().join("target")).unwrap();
    let before = operator.policy();
    // a node refuses an update whose root file system is the one that it already runs
    let good = Release::good();
    let bad = if pcr_11(&before) == pcr_11(&good.policy) {
        Release::bad(folder.path(), &image(), env!("CARGO_PKG_VERSION"))
    } else {
        Release::bad(folder.path(), &good.image, Release::GOOD)
    };
    servers.offer(&bad);
    let rollout = operator.roll_out(&bad);
    worker.wait_for_end();
    for _ in 0..3 {
        worker.power_on();
        worker.wait_for_line(" trial: not healthy in time: the machine restarts");
        worker.wait_for_end();
    }
    worker.power_on();
    worker.wait_for_line(" ready: a member of its cluster");
    // it depends on whether the kubelet reported that it is ready before the bad image restarted the machine
    let why = [
        "came back without the new image",
        "went back to its old image",
    ];
    let said = ends(rollout, "firstlight: ", 1);
    assert!(why.iter().any(|it| said.contains(it)), "{said}");
    operator.abort_rollout();
    operator.accept_only(&before);
    operator.apply_policy();
    operator.expect_only(&before);
    operator.wait_for_nodes(2);
    cluster.pods_reach_each_other();
}

/// Both machines get the version of Kubernetes that the image has: docs/day-two/upgrade.md
fn kubernetes_is_upgraded(cluster: &mut Cluster) {
    let operator = &cluster.operator;
    operator.roll_out_kubernetes();
    operator.wait_for_nodes(2);
    operator.expect_newer_kubernetes();
    operator.deploy_on_each_node();
    cluster.pods_reach_each_other();
}

/// The machines, which are off, are switched on after all certificates of a year have ended: docs/day-two/certificates.md. Then the
/// host sets their clocks back by that year.
fn a_year_passes(cluster: &mut Cluster) {
    const DAYS: u32 = 366;
    let Cluster {
        operator,
        first,
        worker,
        servers,
        ..
    } = cluster;
    servers.set_clock(DAYS);
    for node in [&mut *first, &mut *worker] {
        node.set_clock(Clock::Ahead(DAYS));
    }
    first.power_on();
    first.wait_for_line(" waiting: for a key of disk");
    operator.recover(first);
    first.wait_for_line(" ready: a member of its cluster");
    operator.replace_kubeconfig(first);
    operator.accept_certificates_of_the_future();
    operator.wait_for_the_api();
    worker.power_on();
    worker.wait_for_line(" ready: a member of its cluster");
    operator.reset(worker);
    operator.wait_for_nodes(2);
    operator.expect_certificates(first, &[2379, 6443, 10250], DAYS + 300);
    operator.expect_certificates(worker, &[10250], DAYS + 300);
    operator.deploy_on_each_node();
    operator.write("in-the-next-year");
    cluster.pods_reach_each_other();

    cluster.switch_off();
    cluster.first.set_clock(Clock::Right);
    cluster.worker.set_clock(Clock::Right);
    cluster.switch_on();
    assert!(cluster.operator.has("in-the-next-year"));
}

/// Waits for the end of a rollout, of which this line is the last one, and returns what it said.
fn ends(mut rollout: Program, line: &str, code: i32) -> String {
    rollout.expect_within(line, PATIENCE * 2);
    let ended = rollout.exit().code();
    let said = rollout.output();
    println!("{said}");
    assert_eq!(ended, Some(code), "{said}");
    said
}
