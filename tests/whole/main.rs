//! From power-on to a workload: machines under QEMU with the image of mkosi, and nothing of it masked. The firmware starts the image,
//! `unlock` opens the state disk, `firstlight init` makes a cluster with a network plugin, a Deployment answers, the power is cut, a
//! second machine joins, and comes back by itself after its power was cut. The operator reads logs, makes a kubeconfig, and restarts
//! machines without a shell.
//!
//! It needs root, and takes long: under emulation Kubernetes is slow. `cargo test` skips it; `make test-whole` runs it in a network
//! namespace of its own (docs/testing-kubernetes.md).

use support::metadata;
#[path = "../cluster/network.rs"]
mod network;
mod node;
mod operator;
mod servers;

use std::time::Duration;

use network::Network;
use node::Node;
use operator::Operator;
use servers::Servers;

const INIT_SECRET: &str = "correct_horse%battery@staple";
/// The limit for one step. Without KVM a machine needs some minutes for what takes a real one seconds.
const PATIENCE: Duration = Duration::from_secs(1500);

#[test]
#[ignore = "needs root, and boots machines that run Kubernetes: make test-whole"]
fn from_power_on_to_a_workload_on_two_machines() {
    let network = Network::empty();
    let _servers = Servers::start();
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

    let mut second = Node::new(network, "worker-0", "Worker");
    second.power_on();
    second.wait_for_line(" attestation-key: ");
    operator.accept(&second.attestation_key());
    operator.apply_policy();
    second.wait_for_line(" complete:");
    operator.wait_for_nodes(2);
    operator.deploy_on_each_node();
    operator.ask("ask-worker", Some("control-plane-0"), &["worker-0"]);
    operator.ask("ask-control-plane", Some("worker-0"), &["control-plane-0"]);

    // by the join service of the cluster, without the operator
    second.cut_power();
    println!("the power of the worker is cut");
    second.power_on();
    second.wait_for_line(" ready: a member of its cluster");
    operator.wait_for_nodes(2);
    operator.ask("ask-worker-again", Some("control-plane-0"), &["worker-0"]);

    // nobody has a shell there
    assert!(
        operator
            .logs(&second, &["--unit", "kubelet"])
            .contains("kubelet")
    );
    assert!(
        operator
            .logs(&second, &["--boot", "-1", "--lines", "50"])
            .contains("systemd")
    );
    assert!(
        operator
            .logs(&second, &["--kernel"])
            .contains("Linux version")
    );
    assert!(
        operator
            .logs(&first, &["--audit", "--lines", "3"])
            .contains("audit.k8s.io")
    );
    operator.replace_kubeconfig(&first);
    operator.wait_for_nodes(2);
    operator.machine(&second, "worker-0", &["restart", "--unit", "containerd"]);
    operator.collect_facts(&[&first, &second]);
    operator.machine(&second, "worker-0", &["shutdown"]);
    second.wait_for_end();
    second.power_on();
    second.wait_for_line(" ready: a member of its cluster");
    operator.wait_for_nodes(2);
    assert!(
        operator
            .logs(&second, &["--calls"])
            .contains("restart containerd.service")
    );
}
