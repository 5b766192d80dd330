//! A node in namespaces of this machine (native.sh), with its TPM, its metadata service and its operator.

use std::cell::RefCell;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firstlight::crypto::{KEY_LEN, Secret, cluster_id, derive_key};
use firstlight::luks;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::metadata::MetadataServer;
use crate::program::Program;
use crate::swtpm::Swtpm;
use crate::{PATIENCE, text, wait_within};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const INIT_SECRET: &str = "correct_horse%battery@staple";
const DISK: &str = "/var/lib/state.img";

pub struct Node {
    dir: TempDir,
    logs: PathBuf,
    address: Ipv4Addr,
    gateway: Ipv4Addr,
    kubernetes: PathBuf,
    booted: Instant,
    process: RefCell<Child>,
    tpm: RefCell<Swtpm>,
    metadata: MetadataServer,
}

impl Node {
    /// A fresh one with a formatted disk, as its initramfs leaves it.
    pub fn boot(name: &str) -> Node {
        let image = PathBuf::from(tool("node-image.sh", &[])).join("disk.img");
        let kubernetes = PathBuf::from(tool("kubernetes.sh", &["kubeadm", "kubelet", "kubectl"]));
        let cache = image.parent().and_then(Path::parent).unwrap();
        let dir = TempDir::with_prefix_in("cluster.", cache).unwrap();
        let status =
            Command::new("cp").arg("--sparse=always").arg(image).arg(dir.path().join("disk")).status().unwrap();
        assert!(status.success());

        // a /30 of its own, whoever else runs this; not in 10.96.0.0/12, where the services are
        static NODES: AtomicU32 = AtomicU32::new(0);
        let number = std::process::id() * 2 + NODES.fetch_add(1, Ordering::Relaxed);
        let (third, fourth) = ((number % 256) as u8, (number / 256 % 64 * 4) as u8);
        let (gateway, address) = (Ipv4Addr::new(10, 89, third, fourth + 1), Ipv4Addr::new(10, 89, third, fourth + 2));
        let logs = Path::new(ROOT).join("target/cluster").join(name);
        fs::create_dir_all(&logs).unwrap();
        let booted = Instant::now();
        let process = start(dir.path(), &logs, address, gateway);

        let metadata = MetadataServer::start(SocketAddr::from((gateway, 8080)));
        let me = json!({"Name": "Control_Plane-0", "ProviderID": "", "Role": "ControlPlane", "VPCIP": address});
        metadata.set_self(&me.to_string());
        metadata.set_peers(&json!([me]).to_string());
        metadata.set_endpoint(&address.to_string());
        metadata.set_init_secret_hash(&bcrypt::hash(INIT_SECRET, 4).unwrap());
        let tpm = RefCell::new(Swtpm::start_at(gateway));
        let process = RefCell::new(process);
        let node = Node { dir, logs, address, gateway, kubernetes, booted, process, tpm, metadata };
        node.put("/usr/bin/bootstrapper", &fs::read(Path::new(ROOT).join("target/dist/bootstrapper")).unwrap(), 0o755);
        node.put_new_disk();
        node
    }

    pub fn since_boot(&self) -> Duration {
        self.booted.elapsed()
    }

    /// Power off and on, but for the TPM: its PCR 15 says, as after an unlock, that the node belongs to a cluster.
    pub fn reboot(&mut self) {
        end(&mut self.process.borrow_mut());
        fs::remove_file(self.dir.path().join("pid")).unwrap();
        self.booted = Instant::now();
        *self.process.borrow_mut() = start(self.dir.path(), &self.logs, self.address, self.gateway);
    }

    /// `bootstrapper run`, as a unit of the node's systemd.
    pub fn start_bootstrapper(&self) {
        self.sh(&format!(
            "systemd-run --quiet --unit bootstrapper --property RemainAfterExit=no --collect /usr/bin/bootstrapper run \
             --csp qemu --variant qemu-vtpm --metadata http://{}:8080 --tpm {} --disk {DISK} --components /opt/components",
            self.gateway,
            self.tpm.borrow().location()
        ));
    }

    /// Our services' image, as if it had been pulled; its name.
    pub fn import_services(&self) -> String {
        let archive = Path::new(ROOT).join("target/dist/firstlight-image.tar");
        self.put("/run/services.tar", &fs::read(archive).unwrap(), 0o600);
        let said = self.sh("ctr --namespace k8s.io images import /run/services.tar && rm /run/services.tar");
        let name = said.split_whitespace().find(|word| word.starts_with("firstlight.local/"));
        name.unwrap_or_else(|| panic!("no image was imported: {said}")).to_owned()
    }

    /// The initramfs of the next boot: the node's disk and its TPM, as they are after the power was off, and the cluster's
    /// own join service. It ends when the key has opened the disk, since what is in a file cannot be mapped. By another name
    /// and address: a machine that is off lets nobody in, so it asks all but itself.
    pub fn unlock(&self) -> Program {
        self.tpm.borrow_mut().reboot();
        let me = json!({"Name": "control-plane-1", "ProviderID": "", "Role": "ControlPlane", "VPCIP": self.gateway});
        self.metadata.set_self(&me.to_string());
        let disk = self.dir.path().join("rebooted.img");
        let pid = text(&self.dir.path().join("pid"));
        fs::copy(format!("/proc/{}/root{DISK}", pid.trim()), &disk).unwrap();
        let mut command = Command::new(Path::new(ROOT).join("target/dist/bootstrapper"));
        command.args(["unlock", "--csp", "qemu", "--variant", "qemu-vtpm"]);
        command.args(["--metadata", &format!("http://{}:8080", self.gateway)]);
        command.args(["--tpm", &self.tpm.borrow().location(), "--listen", "127.0.0.1", "--disk"]).arg(disk);
        command.arg("--mount").arg(self.dir.path().join("mount"));
        Program::start(&mut command)
    }

    /// `firstlight init` for a cluster, in the operator's folder.
    pub fn init(&self, more: &[&str]) -> Program {
        self.init_in(".", more)
    }

    /// The same in another folder: another operator, with secrets of their own.
    pub fn init_in(&self, folder: &str, more: &[&str]) -> Program {
        let folder = self.dir.path().join(folder);
        fs::create_dir_all(&folder).unwrap();
        let policy = json!({"measurements": {"15": {"expected": "00".repeat(32), "warnOnly": false}}});
        let mut command = Command::new(Path::new(ROOT).join("target/dist/firstlight"));
        command.current_dir(folder).args(["init", "--endpoint", &self.address.to_string(), "--policy"]);
        command.arg(self.operators_file("policy.json", &policy.to_string()));
        command.arg("--init-secret").arg(self.operators_file("init-secret", INIT_SECRET));
        command.arg("--components").arg(self.operators_file("components.json", &self.components().to_string()));
        command.args(["--kubernetes-version", &self.version(), "--pod-cidr", "10.244.0.0/24"]);
        Program::start(command.args(more))
    }

    /// A file that only the operator reads.
    pub fn operators_file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    /// As an operator who starts over.
    pub fn remove_operators_files(&self) {
        for name in ["firstlight-mastersecret.json", "firstlight-state.json", "firstlight-cluster.log"] {
            let _ = fs::remove_file(self.dir.path().join(name));
        }
    }

    /// Its PCRs are zero again.
    pub fn power_cycle_the_tpm(&self) {
        self.tpm.borrow_mut().reboot();
    }

    fn version(&self) -> String {
        format!("v{}", self.kubernetes.to_str().unwrap().rsplit_once("-v").unwrap().1)
    }

    /// As a release has them; the node finds them in its image.
    fn components(&self) -> Value {
        let version = self.version();
        let component = |name: &str| {
            let sha256 = digest(&SHA256, &fs::read(self.kubernetes.join("bin").join(name)).unwrap());
            json!({
                "url": format!("https://dl.k8s.io/{version}/bin/linux/amd64/{name}"),
                "hash": format!("sha256:{}", hex(sha256.as_ref())),
                "install_path": format!("/run/state/bin/{name}"),
            })
        };
        json!(["kubelet", "kubeadm", "kubectl"].map(component))
    }

    /// PCR 15 holds the ID of the cluster of the operator's files.
    pub fn assert_measured(&self) {
        let read = |name: &str| serde_json::from_str::<Value>(&text(&self.dir.path().join(name))).unwrap();
        let bytes = |value: &Value| STANDARD.decode(value.as_str().unwrap()).unwrap();
        let (master, state) = (read("firstlight-mastersecret.json"), read("firstlight-state.json"));
        let secret =
            derive_key(&bytes(&master["key"]), &bytes(&master["salt"]), "key-measurementSecret", KEY_LEN).unwrap();
        let salt: [u8; 32] = bytes(&state["measurementSalt"]).try_into().unwrap();
        let id = cluster_id(&secret, &salt);
        assert_eq!(state["clusterID"].as_str().unwrap(), hex(&id));
        let extended = digest(&SHA256, &[&[0; 32], digest(&SHA256, &id).as_ref()].concat());
        let pcr = self.tpm.borrow().tool("tpm2_pcrread", &["sha256:15"]).to_lowercase();
        assert!(pcr.contains(&hex(extended.as_ref())), "{pcr}");
    }

    /// kubectl on the operator's machine, with the kubeconfig that init brought.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Option<String> {
        let mut command = Command::new(self.kubernetes.join("bin/kubectl"));
        command.arg("--kubeconfig").arg(self.dir.path().join("firstlight-admin.conf"));
        let output = command.args(["--request-timeout", "30s"]).args(arguments).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(arguments).unwrap_or_else(|| panic!("kubectl {arguments:?} failed"))
    }

    /// Shell commands, as root in the node; `None` when they fail.
    pub fn try_sh(&self, commands: &str) -> Option<String> {
        let pid = text(&self.dir.path().join("pid"));
        let mut command = Command::new("timeout");
        command.args(["120", "nsenter", "--target", pid.trim(), "--all", "sh", "-c", commands]).current_dir("/");
        let output = command.stdin(Stdio::null()).output().unwrap();
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn sh(&self, commands: &str) -> String {
        self.try_sh(commands).unwrap_or_else(|| panic!("in the node, this failed: {commands}"))
    }

    pub fn wait_for(&self, what: &str, done: impl FnMut() -> bool) {
        wait_within(PATIENCE, what, done);
    }

    /// Of all processes of the node, in MiB; shared pages count by their share.
    pub fn memory(&self) -> u64 {
        let sum = self.sh("cat /proc/[0-9]*/smaps_rollup 2>/dev/null | awk '/^Pss:/{s+=$2}END{print int(s/1024)}'");
        sum.trim().parse().unwrap()
    }

    fn put(&self, path: &str, content: &[u8], mode: u32) {
        let pid = text(&self.dir.path().join("pid"));
        let path = PathBuf::from(format!("/proc/{}/root{path}", pid.trim()));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// A formatted disk and its passphrase, as the initramfs leaves them.
    pub fn put_new_disk(&self) {
        let path = self.dir.path().join("state.img");
        let _ = fs::remove_file(&path);
        let passphrase = Secret::random(KEY_LEN);
        let mut disk = fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        disk.set_len(64 << 20).unwrap();
        luks::format(&mut disk, &Secret::random(luks::VOLUME_KEY_LEN), &passphrase).unwrap();
        self.put(DISK, &fs::read(&path).unwrap(), 0o600);
        self.put("/run/cryptsetup-keys.d/state.key", passphrase.expose(), 0o400);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = |name: &str, commands: &str| {
                let _ = fs::write(self.logs.join(name), self.try_sh(commands).unwrap_or_default());
            };
            log("journal", "journalctl --no-pager --output short-monotonic");
            log("pods", "cd /var/log/pods && tail -n 50 */*/*.log");
            eprintln!("what the node says is in {}", self.logs.display());
        }
        end(&mut self.process.borrow_mut());
    }
}

/// Boots the disk in `dir` until its systemd is up.
fn start(dir: &Path, logs: &Path, address: Ipv4Addr, gateway: Ipv4Addr) -> Child {
    let console = logs.join("console");
    let out = fs::File::options().create(true).append(true).open(&console).unwrap();
    let mut command = Command::new(Path::new(ROOT).join("tests/cluster/native.sh"));
    command.arg(dir).arg(dir.join("disk")).args([address.to_string(), gateway.to_string()]);
    command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out).process_group(0);
    let mut process = command.spawn().unwrap();
    let is_up = || {
        let Ok(pid) = fs::read_to_string(dir.join("pid")) else { return false };
        let mut command = Command::new("nsenter");
        command.args(["--target", pid.trim(), "--all", "systemctl", "is-system-running"]).current_dir("/");
        let output = command.stdin(Stdio::null()).output().unwrap();
        ["running", "degraded"].contains(&String::from_utf8_lossy(&output.stdout).trim())
    };
    wait_within(PATIENCE, "the node's systemd", || {
        assert!(process.try_wait().unwrap().is_none(), "the node ended: {}", text(&console));
        is_up()
    });
    process
}

/// The script takes the node down, and what it has made.
fn end(process: &mut Child) {
    let _ = Command::new("kill").arg(process.id().to_string()).status();
    let _ = process.wait();
}

/// What a tool of the project prints: a path.
fn tool(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(Path::new(ROOT).join("tools").join(name)).args(arguments).output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
