//! Machines appear and disappear, as with an autoscaler: docs/day-two/autoscaling.md.

use std::fs;
use std::path::Path;

use crate::growing::Growing;
use crate::node::{Node, tool};
use crate::{has_token, lap, tokens, wait_for, wait_for_cluster, workload};

/// Each new machine has only the image and the settings of the launch template. In a cloud the cloud controller manager deletes the
/// Node objects of machines that are gone; here the test does.
#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn a_cluster_grows_to_six_nodes_and_shrinks_to_three() {
    let (growing, first, operator) = Growing::start("scale");
    let launch = |name: &str, role: &str| growing.launch(name, role);
    let check = |nodes: &[&Node], what: &str| {
        for node in &nodes[1..] {
            let journal = node.wait_for_bootstrapper();
            assert!(!has_token(&journal), "{journal}");
        }
        wait_for_cluster(&operator, nodes);
        workload::deploy(&operator, nodes);
        workload::answers(&operator, nodes);
        wait_for("the end of every bootstrap token", || {
            tokens(&operator) == 0
        });
        let control_planes = nodes.iter().filter(|node| node.is_control_plane);
        let expected: Vec<_> = control_planes.map(|node| node.name().to_owned()).collect();
        let members: Vec<_> = members(&first).into_iter().map(|(_, name)| name).collect();
        assert_eq!(members, expected, "etcd's members");
        lap(&first, what);
    };

    let stays = ["worker-0", "worker-1"].map(|name| launch(name, "Worker"));
    let three = [&first, &stays[0], &stays[1]];
    check(&three, "three nodes");
    let mut goes = [
        ("control-plane-1", "ControlPlane"),
        ("worker-2", "Worker"),
        ("worker-3", "Worker"),
    ]
    .map(|(name, role)| launch(name, role));
    let six: Vec<_> = three.into_iter().chain(&goes).collect();
    check(&six, "six nodes");

    // a control plane leaves etcd before its machine is deleted: docs/day-two/remove-node.md
    let gone = goes.each_ref().map(|node| node.name().to_owned());
    let (member, _) = (members(&first).into_iter())
        .find(|(_, name)| *name == gone[0])
        .unwrap();
    etcdctl(&first, &format!("member remove {member}"));
    for node in &mut goes {
        node.delete();
    }
    for name in &gone {
        operator.kubectl(&["delete", "node", name, "--wait=false"]);
    }
    check(&three, "three nodes again");
    wait_for("the end of the leases of nodes that are gone", || {
        let left = operator.kubectl(&["get", "nodes,leases", "-A", "--output", "name"]);
        !left
            .lines()
            .any(|line| gone.iter().any(|name| line.ends_with(&format!("/{name}"))))
    });

    // the records stay for an hour; another machine has the name as soon as the operator deletes the record
    let record = |name: &str| format!("configmap/join-node-{name}");
    let is_direct = |name: &String| {
        let field = "jsonpath={.data.direct}";
        let named = ["get", &record(name), "--namespace", "kube-system"];
        operator.kubectl(&[&named[..], &["--output", field]].concat()) == "yes"
    };
    // a machine that came through the load balancer did not prove its address: one that does gets the name at once
    let [_, first_worker, second_worker] = gone.each_ref().map(is_direct);
    let (same, other) = if second_worker && !first_worker {
        (2, 1)
    } else {
        (1, 2)
    };
    let again = launch(&gone[same], "Worker");
    let is_refused = first_worker || second_worker;
    if is_refused {
        wait_for("the refusal of another machine with the name", || {
            again
                .try_sh("journalctl --boot --unit bootstrapper | grep -q 'another machine of this name is joining'")
                .is_some()
        });
    }
    for name in &gone {
        if is_refused || *name != gone[same] {
            operator.kubectl(&["delete", &record(name), "--namespace", "kube-system"]);
        }
    }
    check(
        &[&first, &stays[0], &stays[1], &again],
        "another machine has the name",
    );

    // a machine that was deleted, and is there again, gets no key for its disk
    let initramfs = goes[other].start_initramfs();
    initramfs.expect("waiting: for a key of disk");
    let caller = format!("\"{}:", goes[other].address());
    wait_for("the refusal of a deleted machine's disk", || {
        let said = operator.logs_of_join_services();
        said.lines()
            .any(|line| line.contains(&caller) && line.contains("\"disk-unknown\""))
    });
    assert!(
        !initramfs.output().contains("key-slot"),
        "{}",
        initramfs.output()
    );
    println!(
        "memory in use: {:?} MiB",
        [&first, &stays[0], &stays[1], &again].map(Node::memory)
    );
}

/// Runs etcdctl in a control plane.
fn etcdctl(node: &Node, arguments: &str) -> String {
    if node.try_sh("test -e /run/etcdctl").is_none() {
        let program = Path::new(&tool("etcd-tools.sh", &[])).join("etcdctl");
        node.put("/run/etcdctl", &fs::read(program).unwrap(), 0o755);
    }
    let keys = "/etc/kubernetes/pki/etcd";
    node.sh(&format!(
        "/run/etcdctl --endpoints https://127.0.0.1:2379 --cacert {keys}/ca.crt --cert {keys}/server.crt --key {keys}/server.key {arguments}"
    ))
}

/// Returns the IDs and names of etcd's members, sorted by name.
pub fn members(node: &Node) -> Vec<(String, String)> {
    let list = etcdctl(node, "member list");
    let mut members: Vec<_> = list
        .lines()
        .map(|line| {
            let fields: Vec<_> = line.split(", ").collect();
            (fields[0].to_owned(), fields[2].to_owned())
        })
        .collect();
    members.sort_by(|one, other| one.1.cmp(&other.1));
    members
}
