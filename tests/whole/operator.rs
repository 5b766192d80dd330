//! An operator with `firstlight`, kubectl and Helm, and a folder for the files.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use machine::{dist, script};
use serde_json::{Value, json};
use support::boot_image::run;
use support::program::Program;
use tempfile::TempDir;

use crate::node::{Node, image, output, policy};
use crate::release::Release;
use crate::servers::{OLDER, WEB, WORKLOAD, cni_plugins, older_programs};
use crate::{INIT_SECRET, PATIENCE};

const IMAGE: &str = concat!("firstlight.local/services:", env!("CARGO_PKG_VERSION"));
const POLICY: [&str; 2] = ["--policy", "policy.json"];
const LOSES_PODS: [&str; 2] = ["--delete-emptydir-data", "--delete-unmanaged-pods"];
/// The kubeconfig of [`Operator::accept_certificates_of_the_future`].
const UNVERIFIED: &str = "unverified.conf";
/// The limit for one request to the API server.
const REQUEST: &str = "120s";

/// Returns a node in the form NAME=ADDRESS.
fn at(node: &Node) -> String {
    format!("{}={}", node.name(), node.address())
}

/// Returns the value of PCR 11 in a policy, which tells images apart.
pub fn pcr_11(policy: &Value) -> &Value {
    &policy["measurements"]["11"]["expected"]
}

pub struct Operator {
    folder: TempDir,
    kubernetes: PathBuf,
    started: Instant,
    address: String,
}

impl Operator {
    /// An operator of a cluster whose first node is `first`.
    pub fn new(first: &Node) -> Operator {
        let kubernetes = script("tools/kubernetes.sh", &[]).unwrap().into();
        let operator = Operator {
            folder: TempDir::new().unwrap(),
            kubernetes,
            started: Instant::now(),
            address: first.address(),
        };
        operator.file("policy.json", &policy(&image(), &[]));
        operator.file("init-secret", INIT_SECRET);
        let older =
            older_programs().map(|path| (format!("http://{WEB}/{}", file_name(&path)), path));
        operator.components("components.json", older);
        let version = operator.version();
        let newer = ["kubelet", "kubeadm", "kubectl"].map(|name| {
            let url = format!("https://dl.k8s.io/{version}/bin/linux/amd64/{name}");
            (url, operator.kubernetes.join("bin").join(name))
        });
        operator.components("components-newer.json", newer);
        operator
    }

    /// Adds a machine's TPM to the policy.
    pub fn accept(&self, key: &str) {
        self.firstlight(&["policy", "add-key", "policy.json", key]);
    }

    /// Adds the TPM of a machine that was switched on to the policy, and waits until the machine has joined.
    pub fn admit(&self, node: &mut Node) {
        node.wait_for_line(" attestation-key: ");
        self.accept(&node.attestation_key());
        self.apply_policy();
        node.wait_for_line(" complete:");
    }

    /// `firstlight init`, until our services run.
    pub fn init(&self, first: &Node) {
        let addons = Path::new(&script("tools/flannel.sh", &[]).unwrap()).join("addons.yaml");
        self.firstlight(&[
            "init",
            "--verbose",
            "--timeout",
            "90m",
            "--endpoint",
            &self.address,
            "--policy",
            "policy.json",
            "--init-secret",
            "init-secret",
            "--components",
            "components.json",
            "--kubernetes-version",
            OLDER,
            "--pod-cidr",
            "10.244.0.0/16",
            "--image",
            IMAGE,
            "--addons",
            &addons.to_string_lossy(),
        ]);
        first.lap("init has ended");
    }

    /// `firstlight recover`: the only control plane gets the key of its disk from the operator.
    pub fn recover(&self, node: &Node) {
        self.firstlight(&[
            "recover",
            "--endpoint",
            &node.address(),
            "--policy",
            "policy.json",
        ]);
        node.lap("recovered");
    }

    /// Returns a log of the node.
    pub fn logs(&self, node: &Node, more: &[&str]) -> String {
        let log = self.said(&[&["logs", &node.address()], more, &POLICY].concat());
        println!("firstlight logs {}: {} bytes", more.join(" "), log.len());
        log
    }

    /// Deletes the kubeconfig, and gets another one from the control plane.
    pub fn replace_kubeconfig(&self, control_plane: &Node) {
        fs::remove_file(self.folder.path().join("firstlight-admin.conf")).unwrap();
        self.firstlight(&[&["kubeconfig", &control_plane.address()], &POLICY[..]].concat());
    }

    /// Makes kubectl accept any certificate of the API server from now on: by the clock of this machine, the real one is not valid yet.
    /// kubectl still sends its own certificate.
    pub fn accept_certificates_of_the_future(&self) {
        let kubeconfig = self.folder.path().join("firstlight-admin.conf");
        let text = fs::read_to_string(kubeconfig).unwrap();
        let lines = text.lines().map(
            |line| match line.split_once("certificate-authority-data:") {
                Some((indent, _)) => format!("{indent}insecure-skip-tls-verify: true\n"),
                None => format!("{line}\n"),
            },
        );
        self.file(UNVERIFIED, &lines.collect::<String>());
    }

    /// `firstlight node` with this action for the node.
    pub fn machine(&self, node: &Node, action: &[&str]) {
        let node = at(node);
        let arguments = [&["node", action[0], &node], &action[1..], &POLICY].concat();
        self.firstlight(&arguments);
    }

    /// `firstlight recover --all`.
    pub fn recover_all(&self) {
        self.firstlight(&["recover", "--all", "--timeout", "30m", POLICY[0], POLICY[1]]);
    }

    /// `firstlight etcd snapshot`.
    pub fn save_etcd(&self) {
        self.firstlight(&[
            "etcd",
            "snapshot",
            "snapshot.db",
            "--yes",
            "--timeout",
            "20m",
        ]);
    }

    /// `firstlight etcd restore` on the control plane that is left.
    pub fn restore_etcd(&self, left: &Node) {
        let left = at(left);
        let restore = ["etcd", "restore", "snapshot.db", "--node", &left];
        let rest = ["--timeout", "30m", "--yes"];
        self.firstlight(&[&restore[..], &rest, &POLICY].concat());
    }

    /// Waits until the API server answers.
    pub fn wait_for_the_api(&self) {
        self.wait_for("the API", || self.kubectl("get --raw /readyz"));
    }

    /// Waits until the API server does not answer any more.
    pub fn wait_for_the_end_of_the_api(&self) {
        self.wait_for("the end of the API", || {
            match self.kubectl("get --raw /readyz") {
                Ok(said) => Err(said),
                Err(_) => Ok(()),
            }
        });
    }

    /// `firstlight node remove` for a machine that is off.
    pub fn remove(&self, name: &str) {
        self.wait_for(&format!("the removal of {name}"), || {
            let remove = ["node", "remove", name, "--machines-off", "--yes"];
            output(&mut self.command(&[&remove[..], &LOSES_PODS].concat()))
        });
    }

    /// `firstlight node reset`: the machine joins again with a blank disk.
    pub fn reset(&self, node: &mut Node) {
        self.machine(node, &["reset", "--yes"]);
        node.wait_for_end();
        node.power_on();
        node.wait_for_line(" complete:");
    }

    /// Starts `firstlight rollout` for this image.
    pub fn roll_out(&self, release: &Release) -> Program {
        let mut policy = self.policy();
        self.file("release.json", &release.policy.to_string());
        // the operator's own policy accepts both, until the end
        policy["alsoAccepted"] = json!([release.policy]);
        self.file("policy.json", &policy.to_string());
        let start = ["rollout", "start", "--yes", "--policy", "release.json"];
        let rest = [&["--accept-downtime"], &LOSES_PODS[..]].concat();
        Program::start(&mut self.command(&[&start[..], &rest].concat()))
    }

    /// `firstlight rollout` to the version of Kubernetes that the image has.
    pub fn roll_out_kubernetes(&self) {
        let version = self.version();
        let list = [
            "--kubernetes",
            &version,
            "--components",
            "components-newer.json",
        ];
        let start = [&["rollout", "start", "--yes"][..], &list, &LOSES_PODS].concat();
        let mut said = output(&mut self.command(&start));
        for _ in 0..4 {
            // a Job of kubeadm has 15 s for this, which is little without KVM: docs/day-two/upgrade.md
            let Err(why) = &said else { break };
            assert!(why.contains("upgrade-health-check"), "{why}");
            println!("{why}");
            said = output(&mut self.command(&["rollout", "continue", "--yes"]));
        }
        println!("{}", said.unwrap());
    }

    /// Ends a rollout that has stopped.
    pub fn abort_rollout(&self) {
        self.firstlight(&["rollout", "abort", "--yes"]);
    }

    /// Accepts only the image of this policy from now on.
    pub fn accept_only(&self, image: &Value) {
        let mut policy = image.clone();
        policy["attestationKeys"] = self.policy()["attestationKeys"].take();
        self.file("policy.json", &policy.to_string());
    }

    /// Returns the policy of the file.
    pub fn policy(&self) -> Value {
        let text = fs::read_to_string(self.folder.path().join("policy.json"));
        serde_json::from_str(&text.unwrap()).unwrap()
    }

    /// Checks that the join services accept the image of this policy and no other one.
    pub fn expect_only(&self, image: &Value) {
        let config = self.wait_for("the policy in force", || {
            self.kubectl("get configmap join-config --namespace kube-system --output jsonpath={.data.attestationConfig}")
        });
        let config: Value = serde_json::from_str(&config).unwrap();
        assert!(config["alsoAccepted"].is_null(), "{config}");
        assert_eq!(pcr_11(&config), pcr_11(image));
    }

    /// Checks that each kubelet, and each API server, has the version of the image.
    pub fn expect_newer_kubernetes(&self) {
        let version = self.version();
        for node in self.list("nodes").unwrap() {
            assert_eq!(node["status"]["nodeInfo"]["kubeletVersion"], *version);
        }
        let said = self.kubectl("get --raw /version").unwrap();
        assert!(said.contains(&version), "{said}");
    }

    /// Checks that the server certificates at these ports of the node are valid for more than this many days.
    pub fn expect_certificates(&self, node: &Node, ports: &[u16], days: u32) {
        for port in ports {
            let address = format!("{}:{port}", node.address());
            let script = r#"openssl s_client -connect "$1" </dev/null 2>/dev/null | openssl x509 -noout -enddate -checkend "$2""#;
            let mut shell = Command::new("sh");
            shell.args(["-c", script, "sh", &address, &(days * 86400).to_string()]);
            let said = self.wait_for(&format!("the certificate of {address}"), || {
                output(&mut shell)
            });
            println!("{}", said.trim());
        }
    }

    /// Writes an object with this name.
    pub fn write(&self, name: &str) {
        self.change(&format!("create configmap {name} --from-literal is={name}"));
    }

    /// Returns whether the object is there.
    pub fn has(&self, name: &str) -> bool {
        let list = self.wait_for("the list of objects", || self.list("configmaps"));
        list.iter().any(|it| it["metadata"]["name"] == name)
    }

    /// Copies the operator's files into a folder below this one.
    pub fn save(&self, folder: &Path) {
        machine::write_log::copy(self.folder.path(), &folder.join("operator")).unwrap();
    }

    /// Gives the operator the files that were saved.
    pub fn load(&self, folder: &Path) {
        machine::write_log::copy(&folder.join("operator"), self.folder.path()).unwrap();
    }

    /// `firstlight support`: the archive has no key and no token.
    pub fn collect_facts(&self, nodes: &[&Node]) {
        let addresses: Vec<String> = nodes.iter().map(|node| node.address()).collect();
        let mut arguments = vec!["support"];
        arguments.extend(addresses.iter().map(String::as_str));
        self.firstlight(&[&arguments[..], &POLICY].concat());
        let facts = output(
            Command::new("tar")
                .args([
                    "--extract",
                    "--to-stdout",
                    "--file",
                    "firstlight-support.tar.gz",
                ])
                .current_dir(self.folder.path()),
        );
        let facts = facts.unwrap();
        println!("firstlight support: {} bytes", facts.len());
        assert!(facts.contains("bootstrapper") && facts.contains("/run/state"));
        let secret = fs::read_to_string(self.folder.path().join("firstlight-mastersecret.json"));
        let secret: Value = serde_json::from_str(&secret.unwrap()).unwrap();
        for secret in ["PRIVATE KEY", INIT_SECRET, secret["key"].as_str().unwrap()] {
            assert!(!facts.contains(secret));
        }
    }

    /// Gives the present policy to the join service.
    pub fn apply_policy(&self) {
        self.firstlight(&[
            "apply",
            "--policy",
            "policy.json",
            "--skip-phases",
            "services",
            "--timeout",
            "30m",
        ]);
    }

    /// Waits until this number of nodes is Ready, and each pod of the system runs that is not on another node.
    pub fn wait_for_nodes(&self, number: usize) {
        let is_true = |list: &Value, kind: &str| {
            let conditions = list["status"]["conditions"].as_array();
            conditions.is_some_and(|all| {
                all.iter()
                    .any(|it| it["type"] == kind && it["status"] == "True")
            })
        };
        self.wait_for(&format!("{number} nodes that are ready"), || {
            let nodes = self.list("nodes")?;
            let ready = nodes.iter().filter(|node| is_true(node, "Ready")).count();
            (ready == number)
                .then_some(())
                .ok_or(format!("{ready} are ready"))
        });
        let is_off = |pod: &Value, nodes: &[Value]| {
            let node = nodes
                .iter()
                .find(|it| it["metadata"]["name"] == pod["spec"]["nodeName"]);
            node.is_some_and(|node| !is_true(node, "Ready"))
        };
        self.wait_for("all pods of the system", || {
            let nodes = self.list("nodes")?;
            let pods =
                self.list("pods --all-namespaces --field-selector metadata.namespace!=default")?;
            let late: Vec<String> = pods
                .iter()
                .filter(|pod| !is_true(pod, "Ready") && !is_off(pod, &nodes))
                .map(|pod| format!("{} is {}", pod["metadata"]["name"], pod["status"]["phase"]))
                .collect();
            if late.is_empty() {
                Ok(())
            } else {
                Err(late.join(", "))
            }
        });
        if let Ok(list) = self.kubectl("get nodes,pods --all-namespaces --output wide") {
            println!("{list}");
        }
    }

    /// What users of a cluster with one node do.
    pub fn allow_workloads_on_control_planes(&self) {
        self.change("taint nodes --all node-role.kubernetes.io/control-plane:NoSchedule-");
    }

    /// A Deployment and a Service of the user: a web server that answers with the name of its pod and of its node.
    pub fn deploy(&self) {
        let serve = "mkdir -p /www && echo $NAME on $NODE >/www/index.html && exec /busybox httpd -f -p 8080 -h /www";
        let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
        let labels = json!({"app": "web"});
        let container = json!({
            "name": "web", "image": WORKLOAD, "command": ["/busybox", "sh", "-c", serve.replace("mkdir", "/busybox mkdir")],
            "env": [field("NAME", "metadata.name"), field("NODE", "spec.nodeName")],
            "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "timeoutSeconds": 30},
        });
        let spread = json!([{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": labels}}]);
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
                "replicas": 1, "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container], "topologySpreadConstraints": spread}}}},
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
                "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]}},
        ]});
        let file = self.file("web.json", &objects.to_string());
        self.change(&format!("apply --filename {}", file.display()));
        self.wait_for_replicas();
    }

    /// Two new pods of the Deployment, one on each node: a pod that runs does not move.
    pub fn deploy_on_each_node(&self) {
        self.change("scale deployment/web --replicas 0");
        self.change("scale deployment/web --replicas 2");
        self.wait_for_replicas();
    }

    fn wait_for_replicas(&self) {
        self.wait_for("the Deployment", || {
            self.kubectl("rollout status deployment/web --timeout 60s")
        });
    }

    /// A pod, on this node if it is given, asks the Service by its name until an answer has each of these words.
    pub fn ask(&self, name: &str, node: Option<&str>, words: &[&str]) {
        // busybox's wget, linked with glibc, ends with a segmentation fault on the emulated processor
        let ask = r#"for i in $(/busybox seq 300); do
            address=$(/busybox nslookup web.default.svc.cluster.local | /busybox awk '/^Address: /{print $2}')
            (echo 'GET / HTTP/1.0'; echo; /busybox sleep 3) | /busybox nc "$address" 80
        done"#;
        let container =
            json!({"name": "ask", "image": WORKLOAD, "command": ["/busybox", "sh", "-c", ask]});
        let mut spec = json!({"restartPolicy": "Never", "containers": [container]});
        if let Some(node) = node {
            spec["nodeName"] = node.into();
        }
        let pod =
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
        let file = self.file("ask.json", &pod.to_string());
        self.change(&format!("apply --filename {}", file.display()));
        let said = self.wait_for(&format!("an answer to {name}"), || {
            let said = self.kubectl(&format!("logs {name}"))?;
            let answer = said
                .lines()
                .find(|line| words.iter().all(|word| line.contains(word)));
            answer
                .map(str::to_owned)
                .ok_or(format!("its answers: {said}"))
        });
        println!("{name}: {said}");
        self.change(&format!("delete pod {name} --now"));
    }

    /// A privileged pod breaks its machine: the script runs as root among the machine's processes, with its files in /host.
    pub fn harm(&self, node: &Node, name: &str, script: &str) {
        let mount =
            json!({"name": "host", "mountPath": "/host", "mountPropagation": "HostToContainer"});
        let container = json!({
            "name": name, "image": WORKLOAD, "command": ["/busybox", "sh", "-c", script],
            "securityContext": {"privileged": true}, "volumeMounts": [mount],
        });
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
            "nodeName": node.name(), "hostPID": true, "restartPolicy": "Never", "containers": [container],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        }});
        let file = self.file("harm.json", &pod.to_string());
        self.change(&format!("apply --filename {}", file.display()));
    }

    /// Deletes the pod that did harm.
    pub fn end_harm(&self, name: &str) {
        self.change(&format!("delete pod {name} --now"));
    }

    /// Waits until `firstlight doctor` finds this, or does not find it any more.
    pub fn wait_for_diagnosis(&self, text: &str, is_expected: bool) {
        let what = if is_expected {
            format!("the diagnosis: {text}")
        } else {
            format!("the end of: {text}")
        };
        self.wait_for(&what, || {
            let output = self.command(&[&["doctor"], &POLICY[..]].concat()).output();
            let said = String::from_utf8_lossy(&output.unwrap().stdout).into_owned();
            // without this the API server has not answered, and nothing is known
            let is_complete = said.contains(" nodes");
            if is_complete && said.contains(text) == is_expected {
                Ok(())
            } else {
                Err(said)
            }
        });
    }

    /// `firstlight node clean`. Returns its report.
    pub fn clean(&self, node: &Node) -> String {
        let report = self.said(&[&["node", "clean", &at(node)], &POLICY[..]].concat());
        println!("{report}");
        report
    }

    /// Writes objects one after the other, and cuts the power of the only control plane between two of them. Returns the names of
    /// those that the API server has confirmed.
    pub fn cut_power_while_writing(&self, node: &mut Node) -> Vec<String> {
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let names = (0..).map(|number| format!("written-{number}"));
                names
                    .take_while(|name| {
                        self.kubectl(&format!("create configmap {name} --from-literal is={name}"))
                            .is_ok()
                    })
                    .collect::<Vec<_>>()
            });
            thread::sleep(Duration::from_secs(30));
            node.cut_power();
            println!("the power is cut");
            writer.join().unwrap()
        })
    }

    /// Checks that these objects are there.
    pub fn expect_written(&self, names: &[String]) {
        assert!(!names.is_empty(), "nothing was written");
        let there = self.wait_for("the list of objects", || self.list("configmaps"));
        for name in names {
            let found = there.iter().find(|it| it["metadata"]["name"] == *name);
            assert_eq!(
                found.map(|it| &it["data"]["is"]),
                Some(&json!(name)),
                "{name} is lost or changed"
            );
        }
        println!(
            "all {} objects that were written before the power was cut are there",
            names.len()
        );
    }

    /// Repeats a change until the API server confirms it: on a slow machine kubectl gives up after 10 s without an answer to its TLS
    /// handshake. What a lost attempt has removed already is "not found".
    fn change(&self, arguments: &str) {
        self.wait_for(arguments, || match self.kubectl(arguments) {
            Err(why) if why.contains("not found") => Ok(String::new()),
            other => other,
        });
    }

    fn list(&self, what: &str) -> Result<Vec<Value>, String> {
        let text = self.kubectl(&format!("get {what} --output json"))?;
        let list: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    fn kubectl(&self, arguments: &str) -> Result<String, String> {
        let [kubeconfig, unverified] =
            ["firstlight-admin.conf", UNVERIFIED].map(|name| self.folder.path().join(name));
        let kubeconfig = if unverified.exists() {
            unverified
        } else {
            kubeconfig
        };
        output(
            Command::new(self.kubernetes.join("bin/kubectl"))
                .arg("--kubeconfig")
                .arg(kubeconfig)
                .args(["--request-timeout", REQUEST])
                .args(arguments.split(' ')),
        )
    }

    /// Runs a command of `firstlight`, which prints what it does.
    fn firstlight(&self, arguments: &[&str]) {
        let status = self.command(arguments).status().unwrap();
        assert!(
            status.success(),
            "firstlight {} ended with {status}",
            arguments[0]
        );
    }

    /// Runs a command of `firstlight`, and returns its standard output.
    fn said(&self, arguments: &[&str]) -> String {
        output(&mut self.command(arguments)).unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let helm = PathBuf::from(script("tools/helm.sh", &[]).unwrap());
        let path = env::var("PATH").unwrap();
        let path = format!("{}:{path}", helm.parent().unwrap().display());
        let mut command = Command::new(dist("firstlight").unwrap());
        command.current_dir(self.folder.path()).env("PATH", path);
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// Repeats an action until it succeeds; the error is that of the last try.
    fn wait_for<T>(&self, what: &str, mut action: impl FnMut() -> Result<T, String>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            let why = match action() {
                Ok(value) => {
                    let since = self.started.elapsed().as_secs_f64();
                    println!("{since:7.1} s of the test: {what}");
                    return value;
                }
                Err(why) => why,
            };
            assert!(
                Instant::now() < end,
                "no {what} within {} s: {why}",
                PATIENCE.as_secs()
            );
            thread::sleep(Duration::from_secs(2));
        }
    }

    /// Writes a file that only the operator can read.
    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn version(&self) -> String {
        let folder = self.kubernetes.to_str().unwrap();
        format!("v{}", folder.rsplit_once("-v").unwrap().1)
    }

    /// Writes a list of components with these programs by their URLs, as for a release, and with the CNI plugins. A node finds the
    /// programs of the version in its image, and downloads all others.
    fn components(&self, file: &str, programs: impl IntoIterator<Item = (String, PathBuf)>) {
        let component = |url: &str, path: &Path, to: &str| {
            let sum = run(Command::new("sha256sum").arg(path));
            json!({"url": url, "hash": format!("sha256:{}", &sum[..64]), "install_path": to})
        };
        let programs = programs.into_iter().map(|(url, path)| {
            component(&url, &path, &format!("/run/state/bin/{}", file_name(&path)))
        });
        let mut list: Vec<Value> = programs.collect();
        let plugins = cni_plugins();
        let url = format!("http://{WEB}/{}", file_name(&plugins));
        let mut plugins = component(&url, &plugins, "/opt/cni/bin");
        plugins["extract"] = true.into();
        list.push(plugins);
        self.file(file, &Value::from(list).to_string());
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}
