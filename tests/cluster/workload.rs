//! A user's workload: web servers on several nodes, and their Service.

use serde_json::{Value, json};

use crate::node::Node;
use crate::operator::Operator;
use crate::{is_running_since_boot, items, wait_for, wait_for_all};

/// The image in each node's store (tools/node-image.sh).
const IMAGE: &str = "firstlight.local/web:1";
const PODS: [&str; 3] = ["pods", "--selector", "app=web"];

/// Deploys one pod for each of the nodes, and a Service.
pub fn deploy(operator: &Operator, nodes: &[&Node]) {
    let labels = json!({"app": "web"});
    let serve =
        "mkdir -p /srv && hostname >/srv/index.html && exec busybox httpd -f -p 8080 -h /srv";
    let spread =
        json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}});
    let pod = json!({
        "containers": [{
            "name": "web",
            "image": IMAGE,
            "command": ["busybox", "sh", "-c", serve],
            "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 2},
        }],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [spread]}},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane"}],
        "terminationGracePeriodSeconds": 1,
    });
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": nodes.len(),
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    });
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]},
    });
    for (name, object) in [("deployment.json", deployment), ("service.json", service)] {
        let file = operator.file(name, &object.to_string());
        operator.kubectl(&["apply", "--filename", file.to_str().unwrap()]);
    }
}

/// Checks that each pod reaches each pod, over the network of pods, and that the Service has a name and answers.
pub fn answers(operator: &Operator, nodes: &[&Node]) {
    wait_for_all(operator, &PODS, nodes.len(), |pod| {
        is_running_since_boot(pod, nodes)
    });
    let pods = items(&operator.kubectl(&[&["get", "--output", "json"], &PODS[..]].concat()));
    let service = operator.kubectl(&[
        "get",
        "service",
        "web",
        "--output",
        "jsonpath={.spec.clusterIP}",
    ]);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let names: Vec<String> = pods
        .iter()
        .map(|pod| text(&pod["metadata"]["name"]))
        .collect();
    for pod in &pods {
        let run = |command: &[&str]| {
            let name = text(&pod["metadata"]["name"]);
            let within = ["exec", &name, "--", "busybox"];
            operator.try_kubectl(&[&within[..], command].concat())
        };
        // Debian's static busybox crashes in `wget -T`
        let get = |address: &str| {
            let url = format!("http://{address}/");
            run(&["timeout", "5", "busybox", "wget", "-q", "-O", "-", &url])
        };
        for other in &pods {
            let address = format!("{}:8080", text(&other["status"]["podIP"]));
            let expected = text(&other["metadata"]["name"]);
            let what = format!(
                "the answer of {expected} on {} to {} on {}",
                other["spec"]["nodeName"], pod["metadata"]["name"], pod["spec"]["nodeName"]
            );
            wait_for(&what, || {
                get(&address).is_some_and(|said| said.trim() == expected)
            });
        }
        wait_for("the Service's answer", || {
            get(&service).is_some_and(|said| names.iter().any(|name| said.trim() == name))
        });
        wait_for("the Service's name", || {
            run(&["nslookup", "web.default.svc.cluster.local"])
                .is_some_and(|said| said.contains(&service))
        });
    }
    println!(
        "{}",
        operator.kubectl(&[&["get", "--output", "wide"], &PODS[..]].concat())
    );
}
