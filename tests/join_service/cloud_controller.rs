//! The cloud controller manager of AWS, built by tools/aws-controller.sh, beside the member controller: both ask moto. The controller has the
//! permissions in AWS of docs/clouds, and those in Kubernetes of its own chart, with the values of docs/clouds/controller-manager.md.
//! The test does the work of the kubelets.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use ::services::member_controller::Options;
use ::services::member_controller::deleted_machines::Times;
use base::stop::Stop;
use base::time;
use common::aws::{Imds, Moto};
use common::manifests::settings;
use kubernetes::client::{CONFIG_MAPS, Client, NODES, Object, PODS, Selector};
use kubernetes::{services, yaml};
use rcgen::KeyPair;
use rpc::grpc::Code;
use serde_json::{Value, json};
use support::ROOT;
use support::foreign::fetched;

use crate::kube_apiserver::{self, Cluster, PATIENCE, Process};
use crate::renewal::{Renewals, SERVING, ask, kubelet, pkcs10};
use crate::setup::*;
use crate::swtpm::Swtpm;

const TAINT: &str = "node.cloudprovider.kubernetes.io/uninitialized";

/// Returns the objects of the controller's chart with the documented values.
fn chart(folder: &Path) -> Vec<Value> {
    let page = fs::read_to_string(format!("{ROOT}/docs/clouds/controller-manager.md")).unwrap();
    let list = page
        .split("```")
        .find_map(|block| block.strip_prefix("yaml\n"))
        .unwrap();
    let list = yaml::document(list).unwrap();
    fs::write(
        folder.join("values.json"),
        list["addons"][0]["values"].to_string(),
    )
    .unwrap();
    let output = Command::new(fetched("helm.sh"))
        .args(["template", "controller", "--namespace=kube-system"])
        .args(["--values=values.json"])
        .arg(controller("chart"))
        .current_dir(folder)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let mut objects = yaml::documents(str::from_utf8(&output.stdout).unwrap()).unwrap();
    // each template of the chart ends with an empty document
    objects.retain(Value::is_object);
    objects
}

/// Returns the program, or the folder of its chart.
fn controller(what: &str) -> PathBuf {
    let output = Command::new(format!("{ROOT}/tools/aws-controller.sh"))
        .arg(what)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).unwrap().trim().into()
}

/// The running controller. Prints the end of its log if the test fails.
struct Controller {
    log: PathBuf,
    _process: Process,
    _imds: Arc<Imds>,
}

impl Drop for Controller {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            println!("{}", lines[lines.len().saturating_sub(50)..].join("\n"));
        }
    }
}

/// Starts the controller on the first machine of moto, as its DaemonSet would.
fn start(cluster: &Cluster, admin: &Client, moto: &Moto) -> Controller {
    let objects = chart(&cluster.path(""));
    for object in objects
        .iter()
        .filter(|object| object["kind"] != "DaemonSet")
    {
        admin.apply(&Object::of(object).unwrap(), object).unwrap();
    }
    let set = objects.iter().find(|object| object["kind"] == "DaemonSet");
    let pod = &set.unwrap()["spec"]["template"]["spec"];
    // neither the node's taint nor a missing pod network keeps it from starting
    assert_eq!(pod["hostNetwork"], true);
    let tolerated = pod["tolerations"].as_array().unwrap();
    assert!(
        tolerated
            .iter()
            .any(|toleration| toleration["key"] == TAINT)
    );

    let (imds, metadata) = moto.controller(0);
    let url = moto.cluster["url"].as_str().unwrap();
    let (ca, _) = cluster.ca();
    let account = "system:serviceaccount:kube-system:cloud-controller-manager";
    let user = cluster.kubeconfig_of(account, "system:serviceaccounts", &ca);
    fs::write(cluster.path("controller.conf"), user).unwrap();
    // what a region's own endpoint is in AWS
    let override_of_ec2 = format!(
        "[Global]\n[ServiceOverride \"1\"]\nService = EC2\nRegion = eu-central-1\nURL = {url}\nSigningRegion = eu-central-1\n\
         SigningMethod = v4\nSigningName = ec2\n"
    );
    fs::write(cluster.path("cloud.conf"), override_of_ec2).unwrap();
    let path = |name: &str| cluster.path(name).display().to_string();
    let documented = pod["containers"][0]["args"].as_array().unwrap().iter();
    let documented = documented.map(|word| word.as_str().unwrap().to_owned());
    let own = [
        format!("--cloud-config={}", path("cloud.conf")),
        format!("--kubeconfig={}", path("controller.conf")),
        format!("--authentication-kubeconfig={}", path("controller.conf")),
        format!("--authorization-kubeconfig={}", path("controller.conf")),
        "--authentication-skip-lookup".to_owned(),
        "--secure-port=0".to_owned(),
        "--leader-elect=false".to_owned(),
        // the default is 5 minutes
        "--node-status-update-frequency=3s".to_owned(),
    ];
    let program = controller("program").display().to_string();
    let endpoint = format!("AWS_EC2_METADATA_SERVICE_ENDPOINT={metadata}");
    let words: Vec<String> = [endpoint, program]
        .into_iter()
        .chain(documented)
        .chain(own)
        .collect();
    let process = cluster.start_program("controller", Path::new("/usr/bin/env"), &words);
    Controller {
        log: cluster.path("controller.log"),
        _process: process,
        _imds: imds,
    }
}

/// Registers a node as its kubelet does with `--cloud-provider=external` and `--node-ip`, and makes the record of its join.
fn register(setup: &Setup, cluster: &Cluster, node: &str, address: &str, number: u8) -> Client {
    let data = json!({"node": node, "disk": disk(number), "machine": "m", "addresses": address});
    let record = json!({"metadata": {"name": format!("join-node-{node}")}, "data": data});
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    setup.admin.create(&maps, &record).unwrap();
    let kubelet = kubelet(cluster, node);
    let taint = json!({"key": TAINT, "value": "true", "effect": "NoSchedule"});
    let object = json!({
        "metadata": {"name": node, "annotations": {"alpha.kubernetes.io/provided-node-ip": address},
            "labels": {"kubernetes.io/hostname": node}},
        "spec": {"taints": [taint]},
    });
    kubelet.create(&NODES.all(), &object).unwrap();
    let now = time::seconds(SystemTime::now());
    let ready = json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now,
        "lastHeartbeatTime": now});
    let status = json!({"status": {"conditions": [ready], "addresses": [
        {"type": "InternalIP", "address": address}, {"type": "Hostname", "address": node},
    ]}});
    let at = NODES.named(node).subresource("status");
    kubelet.merge(&at, &status).unwrap();
    kubelet
}

/// Returns the addresses in a Node, each as `TYPE ADDRESS`.
fn addresses(setup: &Setup, node: &str) -> Vec<String> {
    let node = setup.admin.get(&NODES.named(node)).unwrap();
    let all = node["status"]["addresses"].as_array().unwrap().iter();
    let text = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    let mut all: Vec<_> = all
        .map(|one| format!("{} {}", text(one, "type"), text(one, "address")))
        .collect();
    all.sort();
    all
}

/// Requests what a kubelet requests with these addresses in its Node: pkg/kubelet/certificate/kubelet.go of Kubernetes.
fn ask_as_kubelet(client: &Client, name: &str, node: &str, addresses: &[String]) {
    let of = |kinds: &[&str]| {
        let mut values: Vec<_> = addresses
            .iter()
            .filter_map(|one| one.split_once(' '))
            .filter(|(kind, _)| kinds.contains(kind))
            .map(|(_, value)| value)
            .collect();
        values.sort();
        values.dedup();
        values
    };
    let names = of(&["Hostname", "InternalDNS", "ExternalDNS"]);
    let ips = of(&["InternalIP", "ExternalIP"]);
    let key = KeyPair::generate().unwrap();
    let request = pkcs10(&key, &format!("system:node:{node}"), &names, &ips);
    ask(client, name, &request, SERVING);
}

fn is_there(setup: &Setup, node: &str) -> bool {
    setup.admin.find(&NODES.named(node)).unwrap().is_some()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_real_controller_initializes_nodes_whose_certificates_are_approved_and_removes_deleted_ones() {
    let (_alone, cluster, mut setup) = Setup::for_renewals();
    let _controllers = cluster.start_controllers(
        "certificatesigningrequest-signing-controller,node-lifecycle-controller",
    );
    let moto = Moto::start();
    let (metadata, _imds) = moto.machine(0);
    let options = Options {
        metadata: Some(metadata),
        // the program waits for five minutes and an hour
        deleted_machines: Times {
            pause: Duration::from_secs(2),
            grace: Duration::from_secs(30),
        },
        ..setup.options(cluster)
    };
    setup.start_controller(options);
    let machines = moto.cluster["machines"].as_array().unwrap();
    let text = |number: usize, field: &str| machines[number][field].as_str().unwrap().to_owned();
    let (node, other) = (text(1, "instanceId"), text(2, "instanceId"));
    let client = register(&setup, cluster, &node, &text(1, "privateIp"), 9);
    register(&setup, cluster, &other, &text(2, "privateIp"), 8);
    // a machine that is off, and whose Node an administrator has deleted
    let resting = moto.cluster["resting"].as_str().unwrap();
    register(&setup, cluster, resting, "10.7.0.99", 7);
    setup.admin.delete(&NODES.named(resting)).unwrap();
    let _controller = start(cluster, &setup.admin, &moto);

    let spec = |node: &str| setup.admin.get(&NODES.named(node)).unwrap()["spec"].clone();
    for node in [&node, &other] {
        eventually(&format!("{node} is initialized"), || {
            let taints = spec(node)["taints"].to_string();
            !taints.contains(TAINT) && addresses(&setup, node).len() == 5
        });
    }
    let id = format!("aws:///{}/{node}", text(1, "availabilityZone"));
    assert_eq!(spec(&node)["providerID"], *id);
    let of_cloud = [
        format!("ExternalDNS {}", text(1, "publicDnsName")),
        format!("ExternalIP {}", text(1, "publicIp")),
        format!("Hostname {}", text(1, "privateDnsName")),
        format!("InternalDNS {}", text(1, "privateDnsName")),
        format!("InternalIP {}", text(1, "privateIp")),
    ];
    assert_eq!(addresses(&setup, &node), of_cloud);
    let labels = &setup.admin.get(&NODES.named(&node)).unwrap()["metadata"]["labels"];
    assert_eq!(labels["topology.kubernetes.io/region"], "eu-central-1");

    ask_as_kubelet(&client, "first", &node, &of_cloud);
    setup.eventually_decided("first", "Approved", "recorded");
    eventually("the certificate is signed", || {
        setup.asked("first")["status"]["certificate"].is_string()
    });
    // the node writes another machine's address into its own Node, and requests it
    let mut lying = of_cloud.to_vec();
    lying[1] = format!("ExternalIP {}", text(2, "publicIp"));
    ask_as_kubelet(&client, "lying", &node, &lying);
    setup.eventually_decided("lying", "Denied", "address");
    let why = setup.asked("lying")["status"]["conditions"][0]["message"].to_string();
    assert!(
        why.contains(&format!("belongs to {other}, not to {node}")),
        "{why}"
    );

    // the machine gets another public address: the controller writes it, the kubelet asks again
    moto.change(&format!("address {node} 203.0.113.20"));
    let changed = "ExternalIP 203.0.113.20".to_owned();
    eventually("the controller writes the new address", || {
        addresses(&setup, &node).contains(&changed)
    });
    ask_as_kubelet(&client, "renewal", &node, &addresses(&setup, &node));
    setup.eventually_decided("renewal", "Approved", "recorded");

    // an administrator deletes the Node of a machine that runs
    setup.admin.delete(&NODES.named(&other)).unwrap();
    moto.change(&format!("terminate {node}"));
    eventually_within(180, "the Node of the deleted machine is gone", || {
        !is_there(&setup, &node)
    });
    let record = |node: &str| format!("join-node-{node}");
    let records = |setup: &Setup| {
        let maps = CONFIG_MAPS.in_namespace("kube-system");
        let names = [&node, &other, resting].map(|node| maps.named(&record(node)));
        names.map(|name| setup.admin.find(&name).unwrap().is_some())
    };
    assert_eq!(records(&setup), [true, true, true]);
    eventually_within(180, "its record is gone", || !records(&setup)[0]);
    // the other two machines exist: one runs, one is off
    assert_eq!(records(&setup), [false, true, true]);
    // the deleted machine's disk in another machine
    let refused = setup.rejoin(&Swtpm::start(), &disk(9));
    let refused = refused.err().expect("the disk stays closed");
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    assert!(
        refused
            .message()
            .contains("this disk belongs to another machine"),
        "{refused}"
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_services_are_scheduled_to_a_node_that_no_controller_has_initialized() {
    let cluster = Cluster::start();
    let client = cluster.client(&Stop::new()).within(PATIENCE);
    client.wait_ready(&mut |_| {}).unwrap();
    fs::write(cluster.path("scheduler.conf"), cluster.kubeconfig()).unwrap();
    let scheduler = kube_apiserver::build(&["kube-scheduler"]).join("kube-scheduler");
    let arguments = [
        format!("--kubeconfig={}", cluster.path("scheduler.conf").display()),
        "--leader-elect=false".to_owned(),
        "--secure-port=0".to_owned(),
    ];
    let _scheduler = cluster.start_program("scheduler", &scheduler, &arguments);
    let _controllers = cluster.start_controllers("daemonset-controller");

    let control_plane = "node-role.kubernetes.io/control-plane";
    let taint = |key: &str, effect: &str| json!({"key": key, "value": "true", "effect": effect});
    let node = json!({
        "metadata": {"name": "plane-0", "labels": {control_plane: "", "kubernetes.io/os": "linux"}},
        "spec": {"taints": [
            taint(TAINT, "NoSchedule"),
            taint(control_plane, "NoSchedule"),
            taint("node.kubernetes.io/not-ready", "NoSchedule"),
            taint("node.kubernetes.io/not-ready", "NoExecute"),
            taint("node.kubernetes.io/network-unavailable", "NoSchedule"),
        ]},
    });
    client.create(&NODES.all(), &node).unwrap();
    let resources = json!({"cpu": "4", "memory": "8Gi", "pods": "110"});
    let status = json!({"status": {"capacity": resources, "allocatable": resources}});
    let at = NODES.named("plane-0").subresource("status");
    client.merge(&at, &status).unwrap();
    for object in services::manifests(&settings(POLICY)).unwrap() {
        client
            .apply(&Object::of(&object).unwrap(), &object)
            .unwrap();
    }
    // with the tolerations that kubeadm gives CoreDNS
    let other = json!({"metadata": {"name": "dns"}, "spec": {
        "serviceAccountName": "join-service", "containers": [{"name": "dns", "image": "example.com/dns"}],
        "tolerations": [{"key": "CriticalAddonsOnly", "operator": "Exists"}, {"key": control_plane, "effect": "NoSchedule"}],
    }});
    let pods = PODS.in_namespace("kube-system");
    client.create(&pods, &other).unwrap();

    for service in ["join-service", "key-service"] {
        let its = Selector::labels(&format!("k8s-app={service}"));
        eventually(&format!("a pod of {service} has the node"), || {
            let found = client.list(&pods, &its).unwrap().items;
            found.iter().any(|pod| pod["spec"]["nodeName"] == "plane-0")
        });
    }
    eventually("the other pod waits for the controller", || {
        let pod = client.get(&pods.named("dns")).unwrap();
        let conditions = pod["status"]["conditions"].to_string();
        assert!(pod["spec"]["nodeName"].is_null(), "{pod}");
        conditions.contains("Unschedulable") && conditions.contains("taint")
    });
}
