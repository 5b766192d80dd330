//! Two of three control planes are lost with their disks, and `firstlight etcd restore` brings the cluster back: docs/day-two/etcd.md.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use serde_json::Value;

use crate::growing::Growing;
use crate::node::tool;
use crate::operator::Operator;
use crate::scaling::members;
use crate::{is_running_since_boot, items, lap, ready, wait_for, wait_for_cluster, workload};

#[test]
#[ignore = "needs root, and the node's image: make test-cluster"]
fn two_of_three_control_planes_are_lost_and_all_pods_come_back() {
    let (growing, first, operator) = Growing::start("restore");
    let launch = |name: &str, role: &str| {
        let node = growing.launch(name, role);
        node.wait_for_bootstrapper();
        lap(&node, &format!("{name} has joined"));
        node
    };
    let mut lost = ["control-plane-1", "control-plane-2"].map(|name| launch(name, "ControlPlane"));
    let worker = launch("worker-0", "Worker");
    let four = [&first, &lost[0], &lost[1], &worker];
    wait_for_cluster(&operator, &four);
    workload::deploy(&operator, &four);
    workload::answers(&operator, &four);
    assert_eq!(members(&first).len(), 3);
    operator.keep();
    println!(
        "{}",
        operator.run(&["etcd", "snapshot", "snapshot.db", "--yes"])
    );
    operator.kubectl(&["create", "configmap", "later", "--from-literal", "is=lost"]);
    let before = pods(&operator);
    lap(&first, "the snapshot is saved");

    for node in &mut lost {
        node.delete();
    }
    for name in ["snapshot.db", "snapshot.db.signature"] {
        let content = fs::read(operator.path(name)).unwrap();
        first.put(&format!("/run/state/{name}"), &content, 0o600);
    }
    let etcdutl = Path::new(&tool("etcd-tools.sh", &[])).join("etcdutl");
    // where the image of mkosi has it
    let path = "/usr/lib/firstlight/etcdutl";
    first.put(path, &fs::read(etcdutl).unwrap(), 0o755);
    wait_for("the end of the API", || {
        operator.try_kubectl(&["get", "nodes"]).is_none()
    });
    lap(&first, "two of three control planes are lost");
    let node = format!("control-plane-0={}", first.address());
    let restore = ["etcd", "restore", "snapshot.db", "--node", &node];
    // the member notices a second later that it has no leader, and an API server may answer from its memory
    let plan = wait_for_plan(&operator, &restore);
    assert!(
        plan.contains("control-plane-1 at") && plan.contains("this run has changed nothing"),
        "{plan}"
    );
    println!("{plan}");
    // killed while it exchanges the data, and run again
    let restored = SystemTime::now();
    let aside = "ls /var/lib/etcd/restore-*/before >/dev/null 2>&1";
    let cut = first
        .restore_etcd("/run/state/snapshot.db --yes", aside)
        .unwrap_err();
    assert!(!cut.contains("bootstrapper: "), "it has failed: {cut}");
    let rest = ["--policy", "policy.json", "--timeout", "25m", "--yes"];
    println!("{cut}{}", operator.run(&[&restore[..], &rest].concat()));
    let calls = ["logs", &node[16..], "--calls", "--policy", "policy.json"];
    assert!(operator.run(&calls).contains("restore-etcd"));
    lap(&first, "etcd is restored");

    let get = |name: &str| {
        let field = "jsonpath={.data.is}";
        operator.try_kubectl(&["get", "configmap", name, "--output", field])
    };
    wait_for("the object of the snapshot", || {
        get("kept").as_deref() == Some("there")
    });
    assert_eq!(get("later"), None);
    assert_eq!(members(&first).len(), 1);
    // the snapshot has the Job that made it
    operator.kubectl(&["delete", "jobs", "--namespace", "kube-system", "--all"]);
    // the objects of the snapshot have the state of then
    wait_for("etcd's pod", || {
        let get = [
            "get",
            "pods",
            "etcd-control-plane-0",
            "--namespace",
            "kube-system",
        ];
        let pod = operator.try_kubectl(&[&get[..], &["--output", "json"]].concat());
        let pod: Option<Value> = pod.and_then(|json| serde_json::from_str(&json).ok());
        pod.is_some_and(|pod| {
            let state = &pod["status"]["containerStatuses"][0]["state"]["running"];
            let started = base::time::parse(state["startedAt"].as_str().unwrap_or_default());
            ready(&pod).is_some() && started >= Some(restored)
        })
    });
    let names = lost.each_ref().map(|node| node.name().to_owned());
    let remove = [
        "node",
        "remove",
        &names[0],
        &names[1],
        "--machines-off",
        "--yes",
    ];
    println!(
        "{}",
        operator.run(&[&remove[..], &["--delete-emptydir-data"]].concat())
    );
    wait_for_cluster(&operator, &[&first, &worker]);
    lap(&first, "the lost control planes are removed");
    // no pod of a node that is left is missing, or another one
    let stayed = |pods: &BTreeSet<(String, String)>| {
        let is_here = |(_, node): &&(String, String)| !names.contains(node);
        pods.iter()
            .filter(is_here)
            .cloned()
            .collect::<BTreeSet<_>>()
    };
    assert!(
        stayed(&before).is_subset(&pods(&operator)),
        "{before:?}\n{:?}",
        pods(&operator)
    );

    let new = ["control-plane-3", "control-plane-4"].map(|name| launch(name, "ControlPlane"));
    let four = [&first, &new[0], &new[1], &worker];
    wait_for_cluster(&operator, &four);
    workload::answers(&operator, &four);
    let named: Vec<_> = members(&first).into_iter().map(|(_, name)| name).collect();
    assert_eq!(
        named,
        ["control-plane-0", "control-plane-3", "control-plane-4"]
    );
    let running = operator.kubectl(&["get", "pods", "--all-namespaces", "--output", "json"]);
    let running = items(&running);
    assert!(
        running.iter().all(|pod| is_running_since_boot(pod, &four)),
        "{running:#?}"
    );
    assert_eq!(running.len(), before.len());
    lap(&first, "three control planes again, and all pods are back");
}

/// Waits until the command finds nothing against a restoration; returns its plan.
fn wait_for_plan(operator: &Operator, restore: &[&str]) -> String {
    let mut plan = None;
    wait_for("the plan of a restoration", || {
        let more = ["--policy", "policy.json", "--dry-run"];
        plan = operator.try_run(&[restore, &more].concat());
        plan.is_some()
    });
    plan.unwrap()
}

/// Returns the names and nodes of all pods, except for those of the Job that saves a snapshot.
fn pods(operator: &Operator) -> BTreeSet<(String, String)> {
    let all = operator.kubectl(&["get", "pods", "--all-namespaces", "--output", "json"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of = |pod: &Value| {
        (
            text(&pod["metadata"]["name"]),
            text(&pod["spec"]["nodeName"]),
        )
    };
    let all = items(&all).into_iter().map(|pod| of(&pod));
    all.filter(|(name, _)| !name.starts_with("firstlight-etcd-"))
        .collect()
}
