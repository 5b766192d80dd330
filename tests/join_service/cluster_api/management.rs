//! A management cluster: an API server, and the controllers of Cluster API with the roles and webhooks of their manifests.

use std::fs;
use std::net::{IpAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{Client, Resource, Selector};
use kubernetes::yaml;
use serde_json::{Value, json};
use support::foreign::fetched;

use crate::kube_apiserver::{self, Cluster, PATIENCE, Process};
use crate::setup::{eventually_within, name};

const GROUP: &str = "cluster.x-k8s.io";
const MACHINES: Resource = Resource::namespaced(GROUP, "v1beta2", "machines");
/// The machines of the provider.
const PROVIDED: Resource =
    Resource::namespaced("infrastructure.cluster.x-k8s.io", "v1beta2", "devmachines");
const DEFINITIONS: Resource =
    Resource::cluster("apiextensions.k8s.io", "v1", "customresourcedefinitions");
/// The kinds of the manifests that need a cluster with nodes. The test starts the programs itself, with a certificate of its own.
const OF_PODS: [&str; 4] = ["Deployment", "Service", "Certificate", "Issuer"];

/// The management cluster. Prints the ends of its controllers' logs if the test fails.
pub struct Management {
    pub cluster: Cluster,
    pub client: Client,
    _controllers: Vec<Process>,
}

impl Management {
    /// Starts it. The provider's machines find the API server that it imitates at `address`; nothing here uses that one.
    pub fn start(address: IpAddr) -> Management {
        let cluster = Cluster::start();
        let client = cluster.client(&Stop::new()).within(PATIENCE);
        client.wait_ready(&mut |_| {}).unwrap();
        fs::write(cluster.path("management.conf"), cluster.kubeconfig()).unwrap();
        let mut management = Management {
            client,
            // the role of core consists of the roles that this controller collects
            _controllers: vec![cluster.start_controllers("clusterrole-aggregation-controller")],
            cluster,
        };
        let built = fetched("cluster-api.sh");
        for (part, namespace) in [("core", "capi"), ("provider", "capd")] {
            let process = management.run(&built, part, namespace, address);
            management._controllers.push(process);
        }
        management
    }

    /// Applies the manifests of a part, and starts its program.
    fn run(&self, built: &Path, part: &str, namespace: &str, address: IpAddr) -> Process {
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = port.local_addr().unwrap().port();
        let manifests = fs::read_to_string(built.join(part).with_extension("yaml")).unwrap();
        let mut objects = yaml::documents(&manifests).unwrap();
        objects.retain(|object| !OF_PODS.iter().any(|kind| object["kind"] == *kind));
        let url = format!("https://127.0.0.1:{port}");
        let (ca, _) = self.cluster.ca();
        let bundle = BASE64_STANDARD.encode(&ca);
        for object in &mut objects {
            call_webhooks_at(object, &url, &bundle);
        }
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        let file = self.cluster.path(&format!("{part}.json"));
        fs::write(&file, list.to_string()).unwrap();
        let file = file.display().to_string();
        // their descriptions are longer than an annotation may be
        self.kubectl(&["apply", "--server-side", "--filename", &file]);

        let account = format!("system:serviceaccount:{namespace}-system:{namespace}-manager");
        let user = self
            .cluster
            .kubeconfig_of(&account, "system:serviceaccounts", &ca);
        let kubeconfig = self.cluster.path(&format!("{part}.conf"));
        fs::write(&kubeconfig, user).unwrap();
        let words = [
            format!("POD_IP={address}"),
            built.join(part).display().to_string(),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--webhook-port={port}"),
            format!("--webhook-cert-dir={}", self.cluster.path("").display()),
            "--webhook-cert-name=apiserver.crt".to_owned(),
            "--webhook-key-name=apiserver.key".to_owned(),
            "--health-addr=127.0.0.1:0".to_owned(),
            "--diagnostics-address=127.0.0.1:0".to_owned(),
            "--insecure-diagnostics".to_owned(),
        ];
        self.cluster
            .start_program(part, Path::new("/usr/bin/env"), &words)
    }

    /// Runs kubectl as an administrator, until it succeeds: webhooks answer only after the start of their program.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(kubectl());
        command.args(arguments).arg("--kubeconfig");
        command.arg(self.cluster.path("management.conf"));
        let end = Instant::now() + PATIENCE;
        loop {
            let output = command.output().unwrap();
            if output.status.success() {
                return String::from_utf8(output.stdout).unwrap();
            }
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(Instant::now() < end, "kubectl {arguments:?}: {errors}");
            thread::sleep(Duration::from_millis(500));
        }
    }

    /// Returns the names of the Machines of the MachineDeployment.
    pub fn workers(&self) -> Vec<String> {
        let workers = Selector::labels("cluster.x-k8s.io/deployment-name=workers");
        let machines = MACHINES.in_namespace("default");
        let machines = self.client.list(&machines, &workers).unwrap().items;
        machines.iter().map(|one| name(one).to_owned()).collect()
    }

    pub fn machine(&self, name: &str) -> Value {
        let machine = MACHINES.in_namespace("default").named(name);
        self.client.get(&machine).unwrap()
    }

    /// Gives a machine its address, as a network would. Waits until the provider has made the machine.
    pub fn address(&self, name: &str, address: IpAddr) {
        let provided = PROVIDED.in_namespace("default").named(name);
        eventually_within(120, &format!("the provider makes {name}"), || {
            let machine = self.client.find(&provided).unwrap().unwrap_or_default();
            machine["status"]["initialization"]["provisioned"] == true
        });
        let addresses = json!([{"type": "InternalIP", "address": address}]);
        self.client
            .merge(
                &provided.subresource("status"),
                &json!({"status": {"addresses": addresses}}),
            )
            .unwrap();
    }

    /// Says that this Machine goes first, as the cluster-autoscaler does.
    pub fn choose(&self, name: &str) {
        let machine = MACHINES.in_namespace("default").named(name);
        let chosen = ("cluster.x-k8s.io/delete-machine", "yes");
        self.client.annotate(&machine, &[chosen]).unwrap();
    }

    /// Returns all objects of Cluster API and its provider, and all Secrets and ConfigMaps, as JSON, with the contents of Secrets decoded.
    pub fn all_objects(&self) -> String {
        let definitions = self.client.list(&DEFINITIONS.all(), &Selector::default());
        let mut kinds: Vec<_> = definitions
            .unwrap()
            .items
            .iter()
            .map(|definition| name(definition).to_owned())
            .collect();
        kinds.extend(["secrets", "configmaps", "events"].map(str::to_owned));
        let all = ["get", &kinds.join(","), "--all-namespaces", "--output=json"];
        let all = self.kubectl(&all);
        let mut list: Value = serde_json::from_str(&all).unwrap();
        for object in list["items"].as_array_mut().unwrap() {
            let Some(data) = (object["kind"] == "Secret")
                .then(|| object["data"].as_object_mut())
                .flatten()
            else {
                continue;
            };
            for value in data.values_mut() {
                let bytes = BASE64_STANDARD.decode(value.as_str().unwrap()).unwrap();
                *value = String::from_utf8_lossy(&bytes).into();
            }
        }
        list.to_string()
    }
}

impl Drop for Management {
    fn drop(&mut self) {
        if thread::panicking() {
            for part in ["core", "provider"] {
                let log = self.cluster.path(&format!("{part}.log"));
                let log = fs::read_to_string(log).unwrap_or_default();
                let lines: Vec<_> = log.lines().collect();
                println!("--- {part}");
                println!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
            }
        }
    }
}

/// Returns the path of kubectl.
pub fn kubectl() -> PathBuf {
    kube_apiserver::build(&["kubectl"]).join("kubectl")
}

/// Replaces the Service of each webhook by a URL, because a Service needs pods.
fn call_webhooks_at(value: &mut Value, url: &str, bundle: &str) {
    match value {
        Value::Object(map) => {
            if let Some(path) = map.get("service").and_then(|it| it.get("path")) {
                let url = format!("{url}{}", path.as_str().unwrap());
                map.remove("service");
                map.insert("url".into(), url.into());
                map.insert("caBundle".into(), bundle.into());
            }
            map.values_mut()
                .for_each(|value| call_webhooks_at(value, url, bundle));
        }
        Value::Array(list) => list
            .iter_mut()
            .for_each(|value| call_webhooks_at(value, url, bundle)),
        _ => {}
    }
}
