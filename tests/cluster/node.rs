//! A node in namespaces of this machine (native.sh), with its TPM.

use std::cell::RefCell;
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use base::crypto::{KEY_LEN, Secret};
use base::time;
use disk::luks;
use disk::state_disk::handover;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tempfile::TempDir;
use verifier::qemu_vtpm;

use crate::network::{BRIDGE, HOST, Network};
use crate::program::Program;
use crate::swtpm::Swtpm;
use crate::{text, wait_for};

pub const ROOT: &str = support::ROOT;
/// The file in place of the state disk, in the node.
const DISK: &str = "/run/state.img";
/// The components in the node's image.
const COMPONENTS: &str = "/usr/lib/firstlight/components";
/// The upgrade of a node, as docs/day-two/upgrade.md has it.
const UPGRADE: &str =
    "systemd-run --quiet --wait --pipe --collect --unit=firstlight-upgrade bootstrapper upgrade";

/// One machine; all machines of a test share a network.
pub struct Node {
    dir: TempDir,
    logs: PathBuf,
    name: String,
    /// The last octet of its address.
    number: u8,
    booted: (Instant, SystemTime),
    pub is_control_plane: bool,
    process: RefCell<Child>,
    tpm: RefCell<Swtpm>,
    network: &'static Network,
}

impl Node {
    /// Starts a fresh machine with a formatted disk, as its initramfs leaves it; `name` is its name in the metadata.
    pub fn boot(network: &'static Network, test: &str, name: &str, role: &str) -> Node {
        let image = PathBuf::from(tool("node-image.sh", &[]));
        let cache = image.parent().unwrap();
        let dir = TempDir::with_prefix_in("cluster.", cache).unwrap();
        let status = Command::new("cp")
            .arg("--sparse=always")
            .arg(image.join("state.img"))
            .arg(dir.path().join("disk"))
            .status()
            .unwrap();
        assert!(status.success());

        let dir_of = |path: &str| dir.path().join(path);
        symlink(image.join("system.img"), dir_of("system")).unwrap();
        fs::create_dir_all(dir_of("files/usr/bin")).unwrap();
        let bootstrapper = Path::new(ROOT).join("target/dist/bootstrapper");
        fs::copy(bootstrapper, dir_of("files/usr/bin/bootstrapper")).unwrap();
        fs::write(dir_of("state.img"), "").unwrap();
        let number = network.add(name, role);
        let logs = Path::new(ROOT).join("target/cluster").join(test).join(name);
        fs::create_dir_all(&logs).unwrap();
        let booted = now();
        let is_control_plane = role == "ControlPlane";
        let name = name.to_lowercase().replace('_', "-");
        let process = RefCell::new(start(dir.path(), &logs, &name, number));
        let tpm = Swtpm::start_at(HOST);
        let key = qemu_vtpm::VARIANT
            .key_name(&tpm.location().parse().unwrap())
            .unwrap()
            .unwrap();
        network.keys.lock().unwrap().push(key.to_string());
        let tpm = RefCell::new(tpm);
        let node = Node {
            dir,
            logs,
            name,
            number,
            booted,
            is_control_plane,
            process,
            tpm,
            network,
        };
        node.put_new_disk();
        node
    }

    /// Returns the node's name in Kubernetes.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn address(&self) -> Ipv4Addr {
        address(self.number)
    }

    pub fn since_boot(&self) -> Duration {
        self.booted.0.elapsed()
    }

    /// Returns the time of its start, in full seconds as in Kubernetes.
    pub fn booted(&self) -> SystemTime {
        time::parse(&time::seconds(self.booted.1)).unwrap()
    }

    /// Deletes the machine as a cloud does: its power is cut, and the list of machines lacks it.
    pub fn delete(&mut self) {
        self.power_off();
        self.network.remove(self.address());
        fs::remove_file(self.dir.path().join("disk")).unwrap();
    }

    /// Switches the power off and on, except for the TPM, whose PCR 15 keeps the cluster's ID as after an unlock.
    pub fn reboot(&mut self) {
        end(&mut self.process.borrow_mut());
        fs::remove_file(self.dir.path().join("pid")).unwrap();
        self.booted = now();
        *self.process.borrow_mut() = start(self.dir.path(), &self.logs, &self.name, self.number);
    }

    /// Starts `bootstrapper` as an image does. It accepts services that run its own image on the machines of this test.
    pub fn start_bootstrapper(&self) {
        let nobody =
            json!({"measurements": {"4": "11".repeat(32)}, "name": "no image of this test"});
        self.accept_services(&nobody.to_string());
    }

    /// Starts the bootstrapper again, and lets it accept join services on machines of this test that meet this policy.
    pub fn accept_services(&self, policy: &str) {
        const FILE: &str = "/etc/firstlight/services.json";
        let mut policy: Value = serde_json::from_str(policy).unwrap();
        policy["attestationKeys"] = json!(*self.network.keys.lock().unwrap());
        self.put(FILE, policy.to_string().as_bytes(), 0o644);
        self.start_with(&format!("service-policy={FILE}"));
    }

    /// Starts `bootstrapper` as a launch template does: the settings name only the cluster.
    pub fn start_as_member_of(&self, cluster_id: &[u8]) {
        self.start_with(&format!("cluster-id={}", hex(cluster_id)));
    }

    fn start_with(&self, setting: &str) {
        let settings = format!(
            "csp=qemu\nvariant=qemu-vtpm\ntpm={}\ndisk={DISK}\ncomponents={COMPONENTS}\nrequire=strong\n{setting}\n",
            self.tpm.borrow().location()
        );
        self.put("/etc/firstlight/node.conf", settings.as_bytes(), 0o644);
        self.put("/run/start-bootstrapper", b"", 0o644);
        self.sh("systemctl restart bootstrapper");
    }

    /// Returns the name of the TPM's attestation key from the node's console.
    pub fn attestation_key(&self) -> String {
        let said =
            "journalctl --boot --unit bootstrapper --output cat | grep -m 1 'attestation-key: '";
        let end = Instant::now() + crate::PATIENCE;
        loop {
            if let Some(line) = self.try_sh(said) {
                return line
                    .rsplit(' ')
                    .next()
                    .unwrap_or_default()
                    .trim()
                    .to_owned();
            }
            assert!(
                Instant::now() < end,
                "{} does not name its attestation key",
                self.name
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Imports our services' image, as if it had been pulled; returns its name.
    pub fn import_services(&self) -> String {
        let archive = Path::new(ROOT).join("target/dist/firstlight-image.tar");
        self.put("/run/services.tar", &fs::read(archive).unwrap(), 0o600);
        let said = self
            .sh("ctr --namespace k8s.io images import /run/services.tar && rm /run/services.tar");
        let name = said
            .split_whitespace()
            .find(|word| word.starts_with("firstlight.local/"));
        name.unwrap_or_else(|| panic!("no image was imported: {said}"))
            .to_owned()
    }

    /// Cuts the power; when it is back, the TPM's PCRs are zero.
    pub fn power_off(&mut self) {
        self.keep_state_disk();
        end(&mut self.process.borrow_mut());
        // a node that did not come up has none
        let _ = fs::remove_file(self.dir.path().join("pid"));
        self.tpm.borrow_mut().reboot();
    }

    /// Returns whether its systemd has shut it down.
    pub fn has_ended(&self) -> bool {
        self.process.borrow_mut().try_wait().unwrap().is_some()
    }

    /// Returns a file of the state disk of a node that is off.
    pub fn read_disk(&self, file: &str) -> String {
        let output = Command::new("debugfs")
            .args(["-R", &format!("cat /{file}")])
            .arg(self.dir.path().join("disk"))
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Cuts the power, if it is on, and measures an image into PCR 4 as firmware and boot loader do in the next boot.
    pub fn measure_in_next_boot(&mut self, image: &str) {
        self.power_off();
        let measured = format!("4:sha256={}", image.repeat(32));
        self.tpm.borrow().tool("tpm2_pcrextend", &[&measured]);
    }

    /// Runs the initramfs of a node that was off, at its own address. It ends when a key has opened the disk, since a disk in a
    /// file cannot be mapped.
    pub fn start_initramfs(&mut self) -> Program {
        self.booted = now();
        let mut command = Command::new(Path::new(ROOT).join("tests/cluster/initramfs.sh"));
        command.args([BRIDGE, &HOST.to_string(), &self.number.to_string()]);
        self.start_unlock(command, Ipv4Addr::UNSPECIFIED, &["--require", "strong"])
    }

    /// Completes the boot after the initramfs has ended: measures the cluster's ID into PCR 15.
    pub fn boot_on(&mut self, cluster_id: &[u8]) {
        let digest = hex(digest(&SHA256, cluster_id).as_ref());
        self.tpm
            .borrow()
            .tool("tpm2_pcrextend", &[&format!("15:sha256={digest}")]);
        *self.process.borrow_mut() = start(self.dir.path(), &self.logs, &self.name, self.number);
    }

    /// Runs the initramfs of the next boot of the only control plane while that still runs, with another name and address: a
    /// node asks all control planes except itself. Its TPM is also that of the join service, which cannot prove itself after the reset.
    pub fn unlock_as_another(&self) -> Program {
        self.network.set_host("another", "ControlPlane", HOST);
        self.tpm.borrow_mut().reboot();
        self.keep_state_disk();
        self.start_unlock(Command::new("env"), Ipv4Addr::LOCALHOST, &[])
    }

    /// Returns the state disk as the initramfs finds it.
    fn keep_state_disk(&self) {
        let at = |name: &str| self.dir.path().join(name);
        fs::copy(at("state.img"), at("rebooted.img")).unwrap();
    }

    /// `unlock`, run by `command`.
    fn start_unlock(&self, mut command: Command, listen: Ipv4Addr, more: &[&str]) -> Program {
        command.arg(Path::new(ROOT).join("target/dist/unlock"));
        command.args([
            "--csp",
            "qemu",
            "--variant",
            "qemu-vtpm",
            "--tpm",
            &self.tpm.borrow().location(),
        ]);
        command
            .args(["--listen", &listen.to_string(), "--disk"])
            .arg(self.dir.path().join("rebooted.img"));
        command.arg("--mount").arg(self.dir.path().join("mount"));
        Program::start(command.args(more))
    }

    /// Formats the disk, as the next boot does with a disk that is marked for reset.
    pub fn format_the_disk(&self) {
        self.sh("rm -rf /run/state/bin/* /run/state/kubernetes/*");
    }

    /// Resets the TPM, so that its PCRs are those after the firmware again.
    pub fn power_cycle_the_tpm(&self) {
        self.tpm.borrow_mut().reboot();
    }

    /// Extends PCR 4, as if another boot loader had been started.
    pub fn alter(&self) {
        self.tpm.borrow().tool(
            "tpm2_pcrextend",
            &[&format!("4:sha256={}", "a1".repeat(32))],
        );
    }

    /// Replaces kubeadm by a script that kills the first `kubeadm join` when it has written etcd's manifest, and fails as kubeadm does
    /// if etcd's answer is late.
    pub fn interrupt_join(&self) {
        let real = format!("{COMPONENTS}/kubeadm.real");
        self.sh(&format!("mv {COMPONENTS}/kubeadm {real}"));
        let script = format!(
            "#!/run/sh\n\
             [ \"$1\" = join ] && [ ! -e /run/interrupted ] || exec {real} \"$@\"\n\
             touch /run/interrupted\n\
             {real} \"$@\" & \n\
             while kill -0 $!; do\n\
             [ ! -e /etc/kubernetes/manifests/etcd.yaml ] || kill $!\n\
             sleep 0.1\n\
             done\n\
             echo 'error execution phase etcd-join: context deadline exceeded' >&2; exit 1\n"
        );
        self.put(&format!("{COMPONENTS}/kubeadm"), script.as_bytes(), 0o755);
    }

    /// Checks that PCR 15 holds this cluster's ID.
    pub fn assert_measured(&self, cluster_id: &[u8]) {
        let extended = digest(
            &SHA256,
            &[&[0; 32], digest(&SHA256, cluster_id).as_ref()].concat(),
        );
        let pcr = self
            .tpm
            .borrow()
            .tool("tpm2_pcrread", &["sha256:15"])
            .to_lowercase();
        assert!(pcr.contains(&hex(extended.as_ref())), "{pcr}");
    }

    /// Runs shell commands as root in the node; `None` when they fail.
    pub fn try_sh(&self, commands: &str) -> Option<String> {
        let output = self.enter("120", commands);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(said)
    }

    /// Runs shell commands as root in the node, for at most this number of seconds.
    fn enter(&self, seconds: &str, commands: &str) -> Output {
        let pid = text(&self.dir.path().join("pid"));
        let mut command = Command::new("timeout");
        command
            .args([
                seconds,
                "nsenter",
                "--target",
                pid.trim(),
                "--all",
                "/run/sh",
                "-c",
                commands,
            ])
            .current_dir("/");
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// Puts the programs and images of another version of Kubernetes into the node's image, instead of a download; `images` is the
    /// folder of tools/kubernetes-next.sh.
    pub fn provide(&self, images: &Path) {
        for name in ["kubeadm", "kubelet", "kubectl"] {
            let program = fs::read(images.with_file_name("bin").join(name)).unwrap();
            self.put(&format!("{COMPONENTS}/{name}"), &program, 0o755);
        }
        let of_control_plane = [
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
        ];
        let names = of_control_plane.iter().filter(|_| self.is_control_plane);
        for name in names.chain(&["coredns", "kube-proxy", "pause"]) {
            let archive = fs::read(images.join(format!("{name}.tar"))).unwrap();
            self.put("/run/image.tar", &archive, 0o600);
            self.sh("ctr --namespace k8s.io images import /run/image.tar && rm /run/image.tar");
        }
    }

    /// Runs `bootstrapper upgrade` with this list; returns what it prints, also if it fails.
    pub fn upgrade(&self, list: &Value) -> Result<String, String> {
        self.upgrade_beside("", list)
    }

    fn upgrade_beside(&self, other: &str, list: &Value) -> Result<String, String> {
        self.put("/run/components.json", list.to_string().as_bytes(), 0o600);
        let output = self.enter(
            "900",
            &format!("{other} {UPGRADE} < /run/components.json 2>&1"),
        );
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            Ok(said)
        } else {
            Err(said)
        }
    }

    /// Runs [`upgrade`](Node::upgrade), and kills it with the programs that it has started as soon as this shell condition holds.
    pub fn interrupt_upgrade(&self, when: &str, list: &Value) {
        let kill = "systemctl kill --signal KILL firstlight-upgrade";
        let look = format!("if {when}; then {kill}; break; fi; sleep 0.05");
        let beside = format!("(while kill -0 $$ 2>/dev/null; do {look}; done) &");
        let said = self.upgrade_beside(&beside, list).unwrap_err();
        println!("{said}and is killed");
        assert!(!said.contains("bootstrapper: "), "it has failed: {said}");
    }

    /// Runs `bootstrapper restore-etcd` with these arguments, and kills it as soon as the shell condition holds; returns what it prints, also
    /// if it fails.
    pub fn restore_etcd(&self, arguments: &str, kill_when: &str) -> Result<String, String> {
        let beside = format!("(until {kill_when}; do sleep 0.02; done; kill -KILL $pid) & ");
        let command =
            format!("bootstrapper restore-etcd {arguments} 2>&1 & pid=$!; {beside}wait $pid");
        let output = self.enter("1500", &command);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            Ok(said)
        } else {
            Err(said)
        }
    }

    pub fn sh(&self, commands: &str) -> String {
        self.try_sh(commands)
            .unwrap_or_else(|| panic!("in the node, this failed: {commands}"))
    }

    /// Waits until its bootstrapper has stopped, or answers as a member; returns its output.
    pub fn wait_for_bootstrapper(&self) -> String {
        let run =
            "_SYSTEMD_INVOCATION_ID=$(systemctl show --property InvocationID --value bootstrapper)";
        let done = format!(
            "! systemctl is-active bootstrapper || journalctl {run} --output cat | grep -q ': .firstlight status. is answered'"
        );
        wait_for("a member, or the bootstrapper's end", || {
            self.try_sh(&done).is_some()
        });
        self.sh("journalctl --boot --unit bootstrapper --output cat")
    }

    /// Returns the memory of all processes of the node, in MiB; shared pages count in proportion.
    pub fn memory(&self) -> u64 {
        let sum = self.sh("cat /proc/[0-9]*/smaps_rollup 2>/dev/null | awk '/^Pss:/{s+=$2}END{print int(s/1024)}'");
        sum.trim().parse().unwrap()
    }

    /// Writes a file into the node.
    pub fn put(&self, path: &str, content: &[u8], mode: u32) {
        let pid = text(&self.dir.path().join("pid"));
        let path = PathBuf::from(format!("/proc/{}/root{path}", pid.trim()));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Makes a formatted disk and its passphrase, as the initramfs leaves them.
    pub fn put_new_disk(&self) {
        let path = self.dir.path().join("state.img");
        let passphrase = Secret::random(KEY_LEN);
        let mut disk = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        disk.set_len(64 << 20).unwrap();
        let header = luks::format(
            &mut disk,
            &Secret::random(luks::VOLUME_KEY_LEN),
            &passphrase,
        )
        .unwrap();
        let key_file = self.dir.path().join("state.key");
        handover::leave(&key_file, &passphrase, &header).unwrap();
        for name in ["state.key", "state.header"] {
            let content = fs::read(self.dir.path().join(name)).unwrap();
            self.put(&format!("/run/cryptsetup-keys.d/{name}"), &content, 0o400);
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = |name: &str, commands: &str| {
                // a machine that is gone says nothing, and another one may have its name and folder
                if let Some(said) = self.try_sh(commands) {
                    let _ = fs::write(self.logs.join(name), said);
                }
            };
            log("journal", "journalctl --no-pager --output short-monotonic");
            log("pods", "cd /var/log/pods && tail -n 50 */*/*.log");
            eprintln!("what the node says is in {}", self.logs.display());
        }
        end(&mut self.process.borrow_mut());
    }
}

fn now() -> (Instant, SystemTime) {
    (Instant::now(), SystemTime::now())
}

fn address(number: u8) -> Ipv4Addr {
    let [a, b, c, _] = HOST.octets();
    Ipv4Addr::new(a, b, c, number)
}

/// Boots the disk in `dir` until its systemd is up.
fn start(dir: &Path, logs: &Path, name: &str, number: u8) -> Child {
    let console = logs.join("console");
    let out = fs::File::options()
        .create(true)
        .append(true)
        .open(&console)
        .unwrap();
    let mut command = Command::new(Path::new(ROOT).join("tests/cluster/native.sh"));
    command
        .arg(dir)
        .args([name, BRIDGE, &HOST.to_string(), &number.to_string()]);
    command
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out)
        .process_group(0);
    let mut process = command.spawn().unwrap();
    let is_up = || {
        let Ok(pid) = fs::read_to_string(dir.join("pid")) else {
            return false;
        };
        let mut command = Command::new("nsenter");
        command
            .args([
                "--target",
                pid.trim(),
                "--all",
                "systemctl",
                "is-system-running",
            ])
            .current_dir("/");
        let output = command.stdin(Stdio::null()).output().unwrap();
        ["running", "degraded"].contains(&String::from_utf8_lossy(&output.stdout).trim())
    };
    wait_for("the node's systemd", || {
        assert!(
            process.try_wait().unwrap().is_none(),
            "the node ended: {}",
            text(&console)
        );
        is_up()
    });
    process
}

/// The script stops the node, and removes what it has made.
fn end(process: &mut Child) {
    // after its end, another process may have its number
    if process.try_wait().unwrap().is_some() {
        return;
    }
    let _ = Command::new("kill").arg(process.id().to_string()).status();
    let _ = process.wait();
}

/// Runs a tool of the project; returns the path that it prints.
pub fn tool(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(Path::new(ROOT).join("tools").join(name))
        .args(arguments)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
