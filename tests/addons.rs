//! Tests of `firstlight apply --addons` with a real Helm and a real kube-apiserver (`make kubernetes-api`). There are no
//! controllers, so the tests report in a controller's place whether a workload is ready.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use base::stop::Stop;
use common::addons::{self, failed, folder_sha256, sha256, succeeded, tool};
use common::kube_apiserver::{self, Cluster};
use kubernetes::client::{
    CONFIG_MAPS, Client, DAEMON_SETS, DEPLOYMENTS, NODES, Object, Resource, Selector,
};
use kubernetes::constellation::outside;
use serde_json::{Value, json};

const CHART: &str = "apiVersion: v2\nname: plugin\nversion: 1.2.3\n";
const TEMPLATE: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata:
  name: plugin
spec:
  selector: {matchLabels: {app: plugin}}
  template:
    metadata: {labels: {app: plugin}}
    spec:
      containers: [{name: plugin, image: "example.com/plugin:{{ required "tag is missing" .Values.tag }}"}]
"#;
/// Braces that are not a template of Helm, as many manifests have them.
const MANIFESTS: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: dashboard, namespace: default}\ndata: {legend: '{{instance}}'}\n";

/// An operator with a chart and manifests.
struct Operator {
    folder: addons::Operator,
    client: Client,
}

impl Operator {
    fn new() -> Operator {
        let folder = addons::Operator::new();
        fs::create_dir_all(folder.at("plugin/templates")).unwrap();
        folder.write("plugin/Chart.yaml", CHART);
        folder.write("plugin/templates/all.yaml", TEMPLATE);
        folder.write("dashboard.yaml", MANIFESTS);
        Operator {
            client: Cluster::shared().client(&Stop::new()),
            folder,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.at(name)
    }

    /// Writes a list with the chart as an add-on of this name, and the manifests with the same name and `-dashboard`.
    fn list(&self, name: &str, tag: &str, with_manifests: bool) {
        let chart = folder_sha256(&self.at("plugin"));
        let mut list = format!(
            "addons:\n- name: {name}\n  namespace: {name}\n  chart: plugin\n  sha256: {chart}\n  values: {{tag: '{tag}'}}\n"
        );
        if with_manifests {
            let manifests = sha256(MANIFESTS.as_bytes());
            list += &format!(
                "- name: {name}-dashboard\n  namespace: {name}\n  manifests: dashboard.yaml\n  sha256: {manifests}\n"
            );
        }
        fs::write(self.at("addons.yaml"), list).unwrap();
    }

    fn apply(&self, more: &[&str]) -> Output {
        self.folder.apply(more)
    }

    fn plugin(&self, name: &str) -> Object {
        DEPLOYMENTS.in_namespace(name).named("plugin")
    }

    /// Returns the image of the plugin, or `None` if it is not there.
    fn image(&self, name: &str) -> Option<String> {
        let plugin = self.client.find(&self.plugin(name)).unwrap()?;
        let image = plugin.pointer("/spec/template/spec/containers/0/image");
        image.and_then(|image| image.as_str().map(str::to_owned))
    }

    /// Reports that the plugin is ready, in place of its controller, until it is stopped.
    fn play_controller(&self, name: &str, stop: &Stop) {
        while !stop.wait(std::time::Duration::from_millis(100)) {
            let Ok(Some(plugin)) = self.client.find(&self.plugin(name)) else {
                continue;
            };
            let status = json!({"status": {"observedGeneration": plugin["metadata"]["generation"], "replicas": 1,
                "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}});
            let _ = self
                .client
                .merge(&self.plugin(name).subresource("status"), &status);
        }
    }

    fn applied_with_controller(&self, name: &str, more: &[&str]) -> Output {
        let stop = Stop::new();
        std::thread::scope(|scope| {
            scope.spawn(|| self.play_controller(name, &stop));
            let output = self.apply(more);
            stop.stop();
            output
        })
    }
}

fn widgets() -> Resource {
    Resource::namespaced("example.com", "v1", "widgets")
}

/// Defines a custom resource in two versions, and makes two objects of it.
fn define_widgets(client: &Client) {
    let any = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let version = |name: &str, is_stored: bool| json!({"name": name, "served": true, "storage": is_stored, "schema": any});
    let definition = json!({"metadata": {"name": "widgets.example.com"}, "spec": {
        "group": "example.com", "scope": "Namespaced", "names": {"kind": "Widget", "plural": "widgets"},
        "versions": [version("v1beta1", false), version("v1", true)],
    }});
    let definitions = Resource::cluster("apiextensions.k8s.io", "v1", "customresourcedefinitions");
    client
        .create_if_absent(&definitions.all(), &definition)
        .unwrap();
    let at = widgets().in_namespace("default");
    for name in ["a", "b"] {
        let widget = json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": 7}});
        let end = std::time::Instant::now() + kube_apiserver::PATIENCE;
        while let Err(error) = client.create_if_absent(&at, &widget) {
            assert!(std::time::Instant::now() < end, "{error}");
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn addons_are_installed_kept_changed_and_named_when_the_list_drops_them() {
    let operator = Operator::new();
    operator.list("kept", "1", true);
    let dry = operator.apply(&["--dry-run"]);
    assert!(
        succeeded(&dry)
            .0
            .contains("would change add-on kept\nwould change add-on kept-dashboard")
    );
    assert_eq!(operator.image("kept"), None);

    let first = operator.applied_with_controller("kept", &[]);
    assert_eq!(succeeded(&first).0, "2 objects are new or changed\n");
    assert_eq!(operator.image("kept").unwrap(), "example.com/plugin:1");
    let map = CONFIG_MAPS.in_namespace("default").named("dashboard");
    assert_eq!(
        operator.client.get(&map).unwrap()["data"]["legend"],
        "{{instance}}"
    );

    let again = operator.applied_with_controller("kept", &[]);
    let (result, told) = succeeded(&again);
    assert_eq!(result, "nothing had to be changed\n");
    assert!(told.contains("add-on kept: stays as it is"), "{told}");

    let saved = || {
        let files = fs::read_dir(operator.at("")).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let is_it = |path: &PathBuf| path.to_str().unwrap().contains("custom-resources");
        files.filter(is_it).collect::<Vec<_>>()
    };
    assert!(saved().is_empty(), "a new add-on changes nothing of others");
    define_widgets(&operator.client);
    operator.list("kept", "2", false);
    let changed = operator.applied_with_controller("kept", &[]);
    let (result, told) = succeeded(&changed);
    assert_eq!(result, "1 object is new or changed\n");
    assert!(
        told.contains("add-on kept-dashboard is not in addons.yaml any more, and stays: `helm uninstall kept-dashboard --namespace kept`"),
        "{told}"
    );
    let [file] = &saved()[..] else {
        panic!("{:?}", saved())
    };
    assert!(
        told.contains("the custom resources are saved in firstlight-custom-resources-"),
        "{told}"
    );
    let mode = fs::metadata(file).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    let list: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let kinds: Vec<_> = (list["items"].as_array().unwrap().iter())
        .map(|item| item["kind"].as_str().unwrap())
        .collect();
    assert!(kinds.contains(&"CustomResourceDefinition") && kinds.ends_with(&["Widget"; 2]));
    // what was lost comes back from the file
    let widgets = widgets();
    let names = ["a", "b"].map(|name| widgets.in_namespace("default").named(name));
    for name in &names {
        operator.client.delete(name).unwrap();
    }
    for item in &list["items"].as_array().unwrap()[kinds.len() - 2..] {
        operator
            .client
            .create(&widgets.in_namespace("default"), item)
            .unwrap();
    }
    assert_eq!(operator.client.get(&names[1]).unwrap()["spec"]["size"], 7);
    assert_eq!(operator.image("kept").unwrap(), "example.com/plugin:2");
    assert!(operator.client.find(&map).unwrap().is_some());
}

/// The list that docs/network.md recommends, with the chart that Cilium publishes.
#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn cilium_is_installed_with_the_documented_values() {
    let operator = Operator::new();
    let list = addons::list("cilium.yaml", &tool("cilium-chart.sh"));
    fs::write(operator.at("addons.yaml"), list).unwrap();
    succeeded(&operator.apply(&["--skip-wait"]));

    let config = CONFIG_MAPS
        .in_namespace("kube-system")
        .named("cilium-config");
    let config = operator.client.get(&config).unwrap();
    for (field, value) in [
        ("enable-wireguard", "true"),
        ("encrypt-node", "true"),
        ("enable-encryption-strict-mode-egress", "true"),
        ("enable-encryption-strict-mode-ingress", "true"),
        ("encryption-strict-egress-cidr", "10.244.0.0/16"),
        (
            "encryption-strict-egress-allow-remote-node-identities",
            "true",
        ),
        ("routing-mode", "tunnel"),
        ("tunnel-protocol", "vxlan"),
        ("kube-proxy-replacement", "false"),
        ("enable-l7-proxy", "false"),
        ("external-envoy-proxy", "false"),
        ("ipam", "kubernetes"),
    ] {
        assert_eq!(config["data"][field], value, "{field}");
    }
    let client = &operator.client;
    let why = outside::why_open(client).unwrap();
    assert!(why.is_some_and(|why| why.contains("kube-proxy-replacement is \"false\"")));
    // there is no node for the DaemonSet, but the Deployment waits for its pod
    let late = operator.apply(&["--timeout", "2s"]);
    failed(&late, "add-on cilium is not ready after 2 s: ");
    failed(&late, "cilium-operator");

    // as in a cluster of Constellation
    let list = addons::list("cilium.yaml", &tool("cilium-chart.sh"));
    let replaced = list.replace(
        "kubeProxyReplacement: \"false\"",
        "kubeProxyReplacement: \"true\"\n    bpf: {masquerade: true}",
    );
    assert_ne!(list, replaced);
    fs::write(operator.at("addons.yaml"), replaced).unwrap();
    succeeded(&operator.apply(&["--skip-wait"]));
    assert_eq!(outside::why_open(client).unwrap(), None);
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn the_controller_of_aws_is_installed_with_the_documented_values() {
    let page = include_str!("../docs/clouds/controller-manager.md");
    let list = page
        .split("```")
        .find_map(|block| block.strip_prefix("yaml\n"))
        .unwrap();
    let operator = Operator::new();
    let script = format!("{}/tools/aws-controller.sh", support::ROOT);
    let printed = Command::new(script).arg("chart").output().unwrap();
    assert!(printed.status.success(), "{printed:?}");
    let chart = PathBuf::from(String::from_utf8(printed.stdout).unwrap().trim());
    let chart_line = format!("chart: {}\n", chart.display());
    let list = list
        .replace("chart: aws-cloud-controller-manager\n", &chart_line)
        .replace(&"0".repeat(64), &folder_sha256(&chart));
    fs::write(operator.at("addons.yaml"), list).unwrap();
    succeeded(&operator.apply(&["--skip-wait"]));

    let set = DAEMON_SETS
        .in_namespace("kube-system")
        .named("aws-cloud-controller-manager");
    let set = operator.client.get(&set).unwrap();
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["hostNetwork"], true);
    let image = pod["containers"][0]["image"].as_str().unwrap();
    assert!(
        image.ends_with("/cloud-controller-manager:v1.34.4"),
        "{image}"
    );
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn an_addon_that_does_not_get_ready_is_taken_back_with_the_reason() {
    let operator = Operator::new();
    operator.list("late", "1", false);
    let new = operator.apply(&["--timeout", "3s"]);
    failed(&new, "add-on late is not ready after 3 s: plugin: ");
    failed(&new, "the add-on was removed again");
    assert_eq!(operator.image("late"), None);

    succeeded(&operator.applied_with_controller("late", &[]));
    operator.list("late", "2", false);
    let worse = operator.apply(&["--timeout", "3s"]);
    failed(&worse, "revision 1 of the add-on was restored");
    assert_eq!(operator.image("late").unwrap(), "example.com/plugin:1");

    // a template that Helm cannot render changes nothing
    operator.list("late", "3", false);
    let list = fs::read_to_string(operator.at("addons.yaml")).unwrap();
    fs::write(operator.at("addons.yaml"), list.replace("tag:", "tags:")).unwrap();
    failed(&operator.apply(&[]), "tag is missing");

    // a resource that the API server does not know
    let template = TEMPLATE.replace("kind: Deployment", "kind: Deplyment");
    fs::write(operator.at("plugin/templates/all.yaml"), template).unwrap();
    operator.list("late", "3", false);
    let refused = operator.apply(&[]);
    failed(&refused, "add-on late: helm upgrade late");
    failed(&refused, "no matches for kind \"Deplyment\"");
    assert_eq!(operator.image("late").unwrap(), "example.com/plugin:1");
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn a_plugin_that_brings_no_network_is_taken_back_and_the_node_is_named() {
    let operator = Operator::new();
    let list = |tag: &str| {
        operator.list("net", tag, false);
        let list = fs::read_to_string(operator.at("addons.yaml")).unwrap();
        let list = list.replace("  chart:", "  before-services: true\n  chart:");
        fs::write(operator.at("addons.yaml"), list).unwrap();
    };
    list("1");
    succeeded(&operator.applied_with_controller("net", &[]));
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "bare"}});
    operator
        .client
        .create_if_absent(&NODES.all(), &node)
        .unwrap();
    // as the kubelet of a node with containerd writes it
    let message = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin \
        returns error: cni plugin not initialized";
    let status = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": message}]}});
    operator
        .client
        .merge(&NODES.named("bare").subresource("status"), &status)
        .unwrap();

    list("2");
    let output = operator.applied_with_controller("net", &["--timeout", "3s"]);
    operator.client.delete(&NODES.named("bare")).unwrap();
    failed(
        &output,
        "add-on net is not ready after 3 s: no network plugin is installed on bare",
    );
    failed(&output, "revision 1 of the add-on was restored");
    assert_eq!(operator.image("net").unwrap(), "example.com/plugin:1");
    assert!(
        operator
            .client
            .list(&NODES.all(), &Selector::default())
            .unwrap()
            .items
            .is_empty()
    );
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn what_cannot_be_installed_is_refused_before_the_first_packet() {
    let operator = Operator::new();
    fs::write(
        operator.at("admin.conf"),
        Cluster::shared()
            .kubeconfig()
            .replace(&Cluster::shared().server(), "https://127.0.0.1:1"),
    )
    .unwrap();
    let list = |text: &str| fs::write(operator.at("addons.yaml"), text).unwrap();
    for text in [
        "- name: a\n",
        "7\n",
        "addons: {}\n",
        "addons: []\nmore: 1\n",
    ] {
        list(text);
        failed(
            &operator.apply(&["--timeout", "3s"]),
            "it is not a list of add-ons",
        );
    }

    operator.list("other", "1", false);
    fs::write(operator.at("plugin/values.yaml"), "more: true\n").unwrap();
    failed(
        &operator.apply(&["--timeout", "3s"]),
        "it is not the file that the list was written for",
    );
    let got = folder_sha256(&operator.at("plugin"));
    list("addons:\n- {name: a, namespace: a, chart: plugin}\n");
    failed(
        &operator.apply(&["--timeout", "3s"]),
        &format!("sha256 is missing; plugin has {got}"),
    );
    operator.list("other", "1", true);
    fs::remove_file(operator.at("bin/helm")).unwrap();
    failed(
        &operator.apply(&["--timeout", "3s"]),
        "cannot use helm, which installs add-ons: No such file or directory",
    );
}
