//! `firstlight status` of a whole cluster: a real API server lists the nodes, and each answers for itself.

use std::fs;

use base::uuid::Uuid;
use common::kube_apiserver::Cluster;
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, NODES};
use kubernetes::machine_record::MachineRecord;
use serde_json::json;

use base::stop::Stop;

use crate::init::init;
use crate::json::assert_documented;
use crate::program::Program;
use crate::setting::{INIT_SECRET, Setting, wait_for_port};

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_table_of_the_cluster_has_what_kubernetes_says_and_what_each_node_proves() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let member = Program::start(&mut setting.bootstrapper(&disk));
    wait_for_port(setting.node(9000));
    let mut operator = init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    member.expect("member: `firstlight status` is answered");
    let rebooting = Setting::new();
    let _waiting = Program::start(&mut rebooting.unlock(&rebooting.initialized_disk()));
    wait_for_port(rebooting.node(9999));

    // of both machines
    let policy = setting.policy_of(&[(15, [0; 32])]).display().to_string();
    let status = |more: &[&str]| {
        let args = [&["status", "--policy", &policy], more].concat();
        let output = setting.firstlight(&args).output().unwrap();
        let [said, errors] =
            [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        (output.status.code().unwrap(), said, errors)
    };
    let cluster = Cluster::shared();
    setting.file("firstlight-admin.conf", cluster.kubeconfig());

    // a cluster without nodes
    let (code, said, errors) = status(&[]);
    let heads = "NODE  ADDRESS  ROLE  KUBERNETES  STATE";
    assert_eq!(
        (code, said.lines().next()),
        (0, Some(heads)),
        "{said}{errors}"
    );

    let client = cluster.client(&Stop::new());
    let add = |name: &str, address: String, labels: serde_json::Value, ready: &str| {
        // as the kubelet of a node with containerd writes it
        let message = match ready {
            "False" => {
                "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin \
                 returns error: cni plugin not initialized"
            }
            _ => "m",
        };
        let node = json!({
            "metadata": {"name": name, "labels": labels},
            "status": {
                "addresses": [
                    {"type": "Hostname", "address": name},
                    {"type": "InternalIP", "address": address},
                ],
                "conditions": [
                    {"type": "MemoryPressure", "status": "False", "reason": "r", "message": "m"},
                    {"type": "Ready", "status": ready, "reason": "r", "message": message},
                ],
                "nodeInfo": {
                    "architecture": "amd64", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "",
                    "kubeProxyVersion": "", "kubeletVersion": "v1.34.4", "machineID": "", "operatingSystem": "linux",
                    "osImage": "", "systemUUID": "",
                },
            },
        });
        client.create(&NODES.all(), &node).unwrap();
    };
    let control_plane = json!({"node-role.kubernetes.io/control-plane": ""});
    add("cp-0", setting.host(2).to_string(), control_plane, "True");
    let (code, said, errors) = status(&[]);
    let cells = |said: &str| -> Vec<Vec<String>> {
        let table = said.split("\n\n").next().unwrap();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        table.lines().map(words).collect()
    };
    let host = setting.host(2).to_string();
    assert_eq!(code, 0, "{said}{errors}");
    assert_eq!(
        cells(&said),
        [
            ["NODE", "ADDRESS", "ROLE", "KUBERNETES", "STATE"].to_vec(),
            ["cp-0", &host, "control-plane", "Ready", "v1.34.4", "member"].to_vec(),
        ]
    );
    assert_eq!(errors, "");

    // it has no join service yet, so nothing says that it is the cluster of the state file
    let saved = || -> serde_json::Value {
        let text = fs::read_to_string(setting.path("firstlight-state.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    // init has saved the first node
    assert_eq!(saved()["nodes"][0]["name"], "");
    assert_eq!(saved()["nodes"][0]["addresses"], json!([host]));
    let config = |salt: &str| json!({"metadata": {"name": "join-config"}, "binaryData": {"measurementSalt": salt}});
    let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
    let other = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    client.create(&maps, &config(other)).unwrap();
    let (code, _, errors) = status(&[]);
    assert!(
        code == 0 && errors.contains("the kubeconfig is of another cluster than this state file"),
        "{code} {errors}"
    );
    assert_eq!(saved()["nodesListed"], serde_json::Value::Null);
    let own = saved()["measurementSalt"].as_str().unwrap().to_owned();
    client
        .update(&maps.named("join-config"), &config(&own))
        .unwrap();
    let disk = Uuid::parse("0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22").unwrap();
    let key = rebooting.key_name();
    let record = MachineRecord::of_node("worker-a", &disk, Some(&key.digest()), "abcdef", "");
    client.create(&maps, &record.to_object()).unwrap();

    // one waits, one is off, one is another name of a machine in the list
    add(
        "worker-a",
        rebooting.host(2).to_string(),
        json!({}),
        "Unknown",
    );
    add("worker-b", setting.host(9).to_string(), json!({}), "False");
    add("worker-c", host.clone(), json!({}), "True");
    let (code, said, errors) = status(&["--timeout", "60s"]);
    println!("{said}{errors}");
    assert_eq!(code, 5, "{said}{errors}");
    let states: Vec<[String; 2]> = cells(&said)
        .into_iter()
        .skip(1)
        .map(|row| [row[0].clone(), row[5].clone()])
        .collect();
    assert_eq!(
        states,
        [
            ["cp-0", "member"],
            ["worker-a", "waits-for-key"],
            ["worker-b", "unreachable"],
            ["worker-c", "member"],
        ]
    );
    let nodes = saved()["nodes"].clone();
    let names: Vec<&str> = nodes
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["cp-0", "worker-a", "worker-b", "worker-c"]);
    let expected = json!({
        "name": "worker-a",
        "role": "worker",
        "addresses": [rebooting.host(2).to_string()],
        "key": key.to_string(),
    });
    assert_eq!(nodes[1], expected);
    assert!(saved()["nodesListed"].is_string());
    client.delete(&maps.named("join-config")).unwrap();
    client.delete(&maps.named("join-node-worker-a")).unwrap();
    for part in [
        "\nworker-a:\n",
        "waiting for the key of its disk from a join service",
        "\nworker-b:\n",
        "no answer",
        "\nno network plugin is installed on worker-b: ",
        "\nOne machine answers for several nodes (cp-0, worker-c), with the attestation key 000b",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(
        errors.contains(
            "2 of 4 nodes are not members: worker-a (waits-for-key), worker-b (unreachable)"
        ),
        "{errors}"
    );
    let (code, said, _) = status(&["--timeout", "60s", "-o", "json"]);
    assert_eq!(code, 5);
    let report = assert_documented("status of a cluster", &said);
    assert_eq!(report["nodes"][1]["status"]["state"], "waits-for-key");
    assert_eq!(report["nodes"][0]["ready"], true);
    assert_eq!(report["nodes"][0]["image"], "the first image", "{report:#}");
    assert_eq!(report["nodes"][2]["image"], json!(null));
    let waits = report["waiting"].as_array().unwrap().iter();
    let kinds: Vec<_> = waits.map(|it| [&it["kind"], &it["object"]]).collect();
    assert!(
        kinds.contains(&[&json!("network-plugin"), &json!("worker-b")]),
        "{kinds:?}"
    );
    assert!(
        kinds.contains(&[&json!("node-without-record"), &json!("cp-0")]),
        "{kinds:?}"
    );
    let networks = ["0", "1", "2", "3"].map(|at| report.pointer(&format!("/nodes/{at}/network")));
    assert_eq!(
        networks.map(|it| it == Some(&json!(true))),
        [true, true, false, true]
    );

    // without the API server, the command can still ask one node
    let elsewhere = cluster
        .kubeconfig()
        .replace(&cluster.server(), "https://127.0.0.1:9");
    fs::write(setting.path("firstlight-admin.conf"), elsewhere).unwrap();
    let (code, _, errors) = status(&["--timeout", "5s"]);
    assert_eq!(code, 4, "{errors}");
    assert!(errors.contains("firstlight status HOST"), "{errors}");
    let (code, _, errors) = status(&["--svg", "boot.svg"]);
    assert_eq!(code, 2, "{errors}");
}
