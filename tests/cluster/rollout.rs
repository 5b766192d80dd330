//! `firstlight rollout` with two images, of which one is bad: docs/day-two/upgrade.md. The nodes run what the pods of the rollout ask their
//! systemd for, and each reboot is one of the whole node. In place of the firmware and of the boot loader the test measures the image
//! that the node has installed.

use ring::digest::{SHA256, digest};
use serde_json::json;
use support::swtpm::PCR_4;

use crate::growing::Growing;
use crate::node::{Node, hex};
use crate::operator::policy;
use crate::{PATIENCE, boot_with_key_from, lap, recover, wait_for, wait_for_cluster};

/// What a node is told to run. The image of these tests has no shell of its own.
const UPDATE: &str = "/usr/bin/next-image";
const SCRIPT: &str = "#!/run/sh\necho \"installing $1\"; echo $1 > /run/state/next-image\n";

/// Returns the policy of the image that measures this byte.
fn policy_of(image: &str) -> String {
    let measured = vec![u8::from_str_radix(image, 16).unwrap(); 32];
    let pcr_4 = digest(&SHA256, &[&PCR_4[..], &measured].concat());
    let enforced = |value: &str| json!({"expected": value, "warnOnly": false});
    let registers = json!({"4": enforced(&hex(pcr_4.as_ref())), "15": enforced(&"00".repeat(32))});
    json!({"name": format!("image {image}"), "measurements": registers}).to_string()
}

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn an_image_is_rolled_out_and_a_bad_one_stops_at_the_first_node() {
    let (growing, mut first, operator) = Growing::start("rollout");
    let id = &growing.id;
    let launch = |name: &str| growing.launch(name, "Worker");
    let mut workers = [launch("worker-0"), launch("worker-1")];
    for worker in &workers {
        worker.wait_for_bootstrapper();
    }
    wait_for_cluster(&operator, &[&first, &workers[0], &workers[1]]);
    lap(&first, "the cluster is there");

    // a good image reaches all nodes; the only control plane gets its key from the operator
    operator.file("new.json", &policy_of("b1"));
    for node in workers.iter().chain([&first]) {
        node.put(UPDATE, SCRIPT.as_bytes(), 0o755);
    }
    let command = format!("{UPDATE} b1");
    let all = [
        "start",
        "--policy",
        "new.json",
        "--node-command",
        &command,
        "--yes",
    ];
    let all = [&all[..], &["--accept-downtime", "--delete-emptydir-data"]].concat();
    let mut rollout = operator.rollout(&all);
    for worker in &mut workers {
        let initramfs = boot_installed(worker, "b1");
        boot_with_key_from("join service", initramfs, worker, id);
        lap(worker, &format!("{} has the new image", worker.name()));
    }
    let initramfs = boot_installed(&mut first, "b1");
    initramfs.expect("waiting: for a key of disk");
    recover(&operator, &first, &["--policy", "new.json"]);
    boot_with_key_from("the operator at", initramfs, &mut first, id);
    rollout.expect_within("done: every node has the image image b1", PATIENCE * 2);
    assert!(rollout.exit().success(), "{}", rollout.output());
    println!("{}", rollout.output());
    lap(&first, "every node has the new image");
    let nodes = [&first, &workers[0], &workers[1]];
    wait_for_cluster(&operator, &nodes);
    let config = [
        "get",
        "configmap",
        "join-config",
        "--namespace",
        "kube-system",
        "--output",
    ];
    let present =
        operator.kubectl(&[&config[..], &["jsonpath={.data.attestationConfig}"]].concat());
    let pcr_4 = |policy: &str| {
        let policy: serde_json::Value = serde_json::from_str(policy).unwrap();
        assert!(policy["alsoAccepted"].is_null(), "{policy}");
        policy["measurements"]["4"]["expected"].clone()
    };
    assert_eq!(pcr_4(&present), pcr_4(&policy_of("b1")));
    assert_ne!(pcr_4(&present), pcr_4(&policy()));

    // an image whose registers are not those of its policy stops at the first node
    operator.file("bad.json", &policy_of("c1"));
    for worker in &workers {
        worker.put(UPDATE, SCRIPT.as_bytes(), 0o755);
    }
    let command = format!("{UPDATE} c2");
    let bad = [
        "start",
        "--policy",
        "bad.json",
        "--node-command",
        &command,
        "--yes",
    ];
    let bad = [
        &bad[..],
        &[
            "--accept-downtime",
            "--delete-emptydir-data",
            "--node-timeout",
            "2m",
        ],
    ]
    .concat();
    let mut rollout = operator.rollout(&bad);
    let initramfs = boot_installed(&mut workers[0], "c2");
    initramfs.expect("it refused this machine's attestation");
    rollout.expect_within("for worker-0 to prove the new image", PATIENCE);
    assert_eq!(rollout.exit().code(), Some(1), "{}", rollout.output());
    rollout.expect("A join service has refused it");
    println!("{}", rollout.output());
    assert!(
        !initramfs.output().contains("key-slot"),
        "{}",
        initramfs.output()
    );
    drop(initramfs);
    let untouched = workers[1].try_sh("cat /run/state/next-image").unwrap();
    assert_eq!(untouched.trim(), "b1");

    // it falls back to the image before, which the policy still accepts
    workers[0].measure_in_next_boot("b1");
    let initramfs = workers[0].start_initramfs();
    boot_with_key_from("join service", initramfs, &mut workers[0], id);
    let mut abort = operator.rollout(&["abort", "--yes"]);
    assert!(abort.exit().success(), "{}", abort.output());
    abort.expect("The policy keeps accepting both images");
    wait_for_cluster(&operator, &[&first, &workers[0], &workers[1]]);
    let unschedulable = "jsonpath={.items[*].spec.unschedulable}";
    wait_for("the end of the cordon", || {
        operator
            .kubectl(&["get", "nodes", "--output", unschedulable])
            .is_empty()
    });
    lap(&first, "the bad image has stopped at one node");
}

/// Waits until a node has shut down by itself, and starts the initramfs of what it has installed.
fn boot_installed(node: &mut Node, expected: &str) -> crate::program::Program {
    wait_for("the reboot", || node.has_ended());
    let installed = node.read_disk("next-image");
    assert_eq!(installed.trim(), expected);
    node.measure_in_next_boot(installed.trim());
    node.start_initramfs()
}
