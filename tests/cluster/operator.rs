//! An operator with `firstlight` and kubectl, and a folder for the files.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use base::crypto::{KEY_LEN, cluster_id, derive_key};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use support::swtpm::PCR_4;
use tempfile::TempDir;

use crate::node::{Node, ROOT, hex, tool};
use crate::program::{Program, printed};
use crate::{INIT_SECRET, text};

pub struct Operator {
    dir: TempDir,
    kubernetes: PathBuf,
}

/// Returns the policy that the cluster's nodes meet: their firmware starts, and measures, nothing.
pub fn policy() -> String {
    let enforced = |value: &[u8]| json!({"expected": hex(value), "warnOnly": false});
    json!({"measurements": {"4": enforced(&PCR_4), "15": enforced(&[0; 32])}}).to_string()
}

impl Operator {
    pub fn new() -> Operator {
        let kubernetes = PathBuf::from(tool("kubernetes.sh", &["kubeadm", "kubelet", "kubectl"]));
        let dir = TempDir::new().unwrap();
        symlink(tool("helm.sh", &[]), dir.path().join("helm")).unwrap();
        Operator { dir, kubernetes }
    }

    /// `firstlight`, which finds the real Helm, in the folder with the operator's files.
    fn firstlight(&self) -> Command {
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new(Path::new(ROOT).join("target/dist/firstlight"));
        command
            .env("PATH", format!("{}:{path}", self.dir.path().display()))
            .env("HELM_CACHE_HOME", self.dir.path().join("helm-cache"))
            .current_dir(self.dir.path());
        command
    }

    /// Writes the list of add-ons: the network plugin, with the backend that the kernel of this machine has.
    fn addons(&self) -> PathBuf {
        let flannel = PathBuf::from(tool("flannel.sh", &[]));
        let list = text(&flannel.join("addons.yaml"));
        let chart = format!("chart: {}", flannel.join("chart").display());
        let list = list
            .replace("chart: chart", &chart)
            .replace("backend: wireguard", "backend: vxlan");
        assert!(list.contains(&chart) && list.contains("vxlan"), "{list}");
        self.file("addons.yaml", &list)
    }

    /// Installs the add-ons in a cluster that has none.
    pub fn apply_addons(&self) -> Program {
        let mut command = self.firstlight();
        command.args(["apply", "--policy", "policy.json", "--addons"]);
        command.arg(self.addons());
        Program::start(command.args(["--skip-phases", "policy,services"]))
    }

    /// Starts `firstlight init` for the node, with a network plugin.
    pub fn init_with_network(&self, node: &Node, more: &[&str]) -> Program {
        let list = self.addons();
        self.init(
            node,
            &[&["--addons", list.to_str().unwrap()], more].concat(),
        )
    }

    /// Starts `firstlight init` for the node.
    pub fn init(&self, node: &Node, more: &[&str]) -> Program {
        let mut command = self.firstlight();
        command.args([
            "init",
            "--endpoint",
            &node.address().to_string(),
            "--policy",
        ]);
        let mut policy: Value = serde_json::from_str(&policy()).unwrap();
        policy["require"] = "strong".into();
        command.arg(self.file("policy.json", &policy.to_string()));
        command
            .arg("--init-secret")
            .arg(self.file("init-secret", INIT_SECRET));
        command
            .arg("--components")
            .arg(self.file("components.json", &self.components().to_string()));
        command.args([
            "--kubernetes-version",
            &self.version(),
            "--pod-cidr",
            "10.244.0.0/16",
        ]);
        command.args(["--attestation-key", &node.attestation_key()]);
        Program::start(command.args(more))
    }

    /// Starts `firstlight recover` for the node at this address, with the files of the init.
    pub fn recover(&self, node: Ipv4Addr, more: &[&str]) -> Program {
        let mut command = self.firstlight();
        command.args(["recover", "--endpoint", &node.to_string()]);
        Program::start(command.args(["--policy", "policy.json"]).args(more))
    }

    /// Returns the exit code of `firstlight status` for the node at this address, or for all nodes of the cluster.
    pub fn status(&self, node: Option<Ipv4Addr>) -> Option<i32> {
        let mut command = self.firstlight();
        command
            .args(["status", "--policy", "policy.json"])
            .args(node.map(|address| address.to_string()));
        let output = command.output().unwrap();
        print!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        output.status.code()
    }

    /// Runs `firstlight` with the administrator's kubeconfig; returns what it prints.
    pub fn run(&self, arguments: &[&str]) -> String {
        let mut command = self.firstlight();
        let mut program = Program::start(command.args(arguments));
        assert!(program.exit().success(), "{}", program.output());
        program.output()
    }

    /// The same, if it succeeds; shows what it says.
    pub fn try_run(&self, arguments: &[&str]) -> Option<String> {
        let mut command = self.firstlight();
        let mut program = Program::start(command.args(arguments));
        let is_done = program.exit().success();
        println!("{}", program.output());
        is_done.then(|| program.output())
    }

    /// Returns the path of a file of the operator.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts `firstlight rollout`.
    pub fn rollout(&self, arguments: &[&str]) -> Program {
        let mut command = self.firstlight();
        command.arg("rollout").args(arguments);
        Program::start(&mut command)
    }

    /// Writes a file that only the operator can read.
    pub fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    /// Runs `firstlight upgrade` to this version with this list.
    pub fn upgrade(&self, version: &str, list: &Value, more: &[&str]) -> Program {
        self.file("upgrade.json", &list.to_string());
        let mut command = self.firstlight();
        command.args(["upgrade", version, "--components", "upgrade.json"]);
        let mut upgrade = Program::start(command.args(more));
        assert!(upgrade.exit().success(), "{}", upgrade.output());
        upgrade
    }

    fn version(&self) -> String {
        version(&self.kubernetes)
    }

    /// Returns the list of components of the cluster's version.
    pub fn components(&self) -> Value {
        components(&self.kubernetes)
    }

    /// Derived from the files that init wrote, which name the same cluster.
    pub fn cluster_id(&self) -> Vec<u8> {
        let read =
            |name: &str| serde_json::from_str::<Value>(&text(&self.dir.path().join(name))).unwrap();
        let bytes = |value: &Value| STANDARD.decode(value.as_str().unwrap()).unwrap();
        let (master, state) = (
            read("firstlight-mastersecret.json"),
            read("firstlight-state.json"),
        );
        let secret = derive_key(
            &bytes(&master["key"]),
            &bytes(&master["salt"]),
            "key-measurementSecret",
            KEY_LEN,
        )
        .unwrap();
        let salt: [u8; 32] = bytes(&state["measurementSalt"]).try_into().unwrap();
        let id = cluster_id(&secret, &salt);
        assert_eq!(state["clusterID"].as_str().unwrap(), hex(&id));
        id.to_vec()
    }

    /// Runs kubectl on the operator's machine, with the init's kubeconfig.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Option<String> {
        let mut command = Command::new(self.kubernetes.join("bin/kubectl"));
        command
            .arg("--kubeconfig")
            .arg(self.dir.path().join("firstlight-admin.conf"));
        printed(command.args(["--request-timeout", "30s"]).args(arguments))
    }

    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(arguments)
            .unwrap_or_else(|| panic!("kubectl {arguments:?} failed"))
    }

    /// Makes an object whose survival [`Operator::expect_kept`] checks.
    pub fn keep(&self) {
        self.kubectl(&["create", "configmap", "kept", "--from-literal", "is=there"]);
    }

    pub fn expect_kept(&self) {
        let field = "jsonpath={.data.is}";
        let kept = self.kubectl(&["get", "configmap", "kept", "--output", field]);
        assert_eq!(kept, "there");
    }

    /// Returns the logs of all join services.
    pub fn logs_of_join_services(&self) -> String {
        let command = "logs --namespace kube-system --selector k8s-app=join-service --tail -1";
        self.kubectl(&command.split(' ').collect::<Vec<_>>())
    }
}

/// Returns the version of the programs in this folder of tools/kubernetes.sh.
pub fn version(kubernetes: &Path) -> String {
    let folder = kubernetes.to_str().unwrap();
    format!("v{}", folder.rsplit_once("-v").unwrap().1)
}

/// Returns the list of these components as for a release; the node finds them in its image.
pub fn components(kubernetes: &Path) -> Value {
    let version = version(kubernetes);
    let component = |name: &str| {
        let program = fs::read(kubernetes.join("bin").join(name)).unwrap();
        json!({
            "url": format!("https://dl.k8s.io/{version}/bin/linux/amd64/{name}"),
            "hash": format!("sha256:{}", hex(digest(&SHA256, &program).as_ref())),
            "install_path": format!("/run/state/bin/{name}"),
        })
    };
    let plugins = PathBuf::from(tool("node-image.sh", &[])).join("cni-plugins.tgz");
    let plugins = json!({
        "url": "https://components.invalid/cni-plugins.tgz",
        "hash": format!("sha256:{}", hex(digest(&SHA256, &fs::read(plugins).unwrap()).as_ref())),
        "install_path": "/opt/cni/bin",
        "extract": true,
    });
    let [kubelet, kubeadm, kubectl] = ["kubelet", "kubeadm", "kubectl"].map(component);
    let mut list = json!([kubelet, kubeadm, kubectl, plugins]);
    accept_cgroup_v1(&mut list);
    list
}

/// Lets Kubernetes from v1.35 on run on a host with cgroup v1. The kubelet's setting is a patch, as a user can install it. kubeadm
/// refuses such a host whatever the kubelet's settings are, so the component is a script that runs the kubeadm of the node's image
/// without this check. Hosts with cgroup v2 get the script too: [`Node::interrupt_join`] replaces the kubeadm that it runs.
fn accept_cgroup_v1(list: &mut Value) {
    let kubeadm = "#!/run/sh\n\
        case \"$1 $2 $3\" in\n\
        'upgrade apply'* | 'upgrade node'* | 'join '* | 'init phase preflight'*) ignore=1 ;;\n\
        'init phase'*) ignore= ;;\n\
        'init '*) ignore=1 ;;\n\
        *) ignore= ;;\n\
        esac\n\
        exec /usr/lib/firstlight/components/kubeadm \"$@\" ${ignore:+--ignore-preflight-errors=SystemVerification}\n";
    put_script(&mut list[1], kubeadm);
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return;
    }
    let patch = STANDARD.encode("failCgroupV1: false\n");
    list.as_array_mut().unwrap().push(json!({
        "url": format!("data:;base64,{patch}"),
        "install_path": "/opt/kubernetes/patches/kubeletconfiguration0+merge.yaml",
    }));
}

/// Makes a component a shell script.
pub fn put_script(component: &mut Value, script: &str) {
    component["hash"] = json!("");
    component["url"] = json!(format!("data:;base64,{}", STANDARD.encode(script)));
}
