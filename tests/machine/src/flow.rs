//! The machine of the demo with all that is around it: the services of its cluster on the host, the operator's command, and
//! what it takes from power-on to a disk that opens by itself.

use super::initramfs::{self, Overlay};
use super::metadata::MetadataServer;
use super::program::Program;
use super::timeline::{self, Event};
use super::vm::{Firmware, GUEST, HOST, Machine, Vm};
use super::{Context, Failure, Result, dist, free_port};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// What the operator and the node share before the node is initialised.
const INIT_SECRET: &str = "correct-horse-battery-staple";
/// Where the operator's command keeps the master secret, unless told otherwise.
pub const MASTER_SECRET: &str = "firstlight-mastersecret.json";
/// Ports of the node: its InitServer, its recovery server.
pub const INIT: u16 = 9000;
pub const RECOVERY: u16 = 9999;
/// Where a node expects the metadata service and the control planes' join services.
const METADATA: u16 = 8080;
const JOIN: u16 = 30090;
/// Loaded machines emulate slowly.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The machine of the demo and everything around it.
pub struct Setting {
    /// The node.
    pub machine: Machine,
    /// What tells the node who it is.
    pub metadata: MetadataServer,
    services: Vec<Program>,
    join_port: u16,
}

impl Setting {
    /// A machine with a blank disk; the metadata service is up, the cluster's services are not, since there is no cluster.
    pub fn new(name: &str, disk: u64) -> Result<Setting> {
        Setting::with(name, disk, &Overlay::default())
    }

    /// The same with something added to its initramfs.
    pub fn with(name: &str, disk: u64, overlay: &Overlay) -> Result<Setting> {
        let metadata = MetadataServer::start(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let node = instance("control-plane-0", GUEST);
        metadata.set_self(&node);
        metadata.set_peers(&format!("[{node},{}]", instance("control-plane-1", HOST)));
        metadata.set_endpoint(HOST);
        metadata.set_init_secret_hash(&bcrypt::hash(INIT_SECRET, 10).context("hash the init secret")?);

        let join_port = free_port()?;
        let mut machine = Machine::new(name)?;
        machine.firmware = Firmware::Uefi;
        machine.open_ports = vec![INIT, RECOVERY];
        machine.host_ports = [(METADATA, metadata.address.port()), (JOIN, join_port)].into();
        machine.add_disk("state", disk)?;
        initramfs::build(&machine.initramfs(), &["bootstrapper"], overlay)?;

        let setting = Setting { machine, metadata, services: Vec::new(), join_port };
        fs::create_dir(setting.path("config")).context("make the join service's folder")?;
        setting.write("config/attestationConfig", setting.machine.policy()?.as_bytes())?;
        setting.write("policy.json", setting.machine.policy()?.as_bytes())?;
        setting.write("init-secret", INIT_SECRET.as_bytes())?;
        Ok(setting)
    }

    /// A file of the operator's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.machine.folder().join(name)
    }

    /// Writes a file of the operator's folder that nobody else may read.
    pub fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, content).context(&format!("write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).context("make a file private")
    }

    /// Runs the operator's command against a port of the node, in the operator's folder.
    pub fn operator(&self, vm: &Vm, command: &str, port: u16, arguments: &[&str]) -> Result<Output> {
        let forwarded = vm.ports.get(&port).ok_or_else(|| Failure(format!("port {port} is not forwarded")))?;
        Command::new(dist("firstlight")?)
            .current_dir(self.machine.folder())
            .args([
                command,
                "--endpoint",
                &format!("127.0.0.1:{forwarded}"),
                "--policy",
                "policy.json",
                "--timeout",
                "90s",
            ])
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .context("run firstlight")
    }

    /// `firstlight init`: makes the node the first of a cluster, and returns what the command printed.
    pub fn init(&self, vm: &Vm) -> Result<String> {
        succeeded("firstlight init", self.operator(vm, "init", INIT, &["--init-secret", "init-secret"])?)
    }

    /// `firstlight recover`: brings the master secret.
    pub fn recover(&self, vm: &Vm) -> Result<String> {
        succeeded("firstlight recover", self.operator(vm, "recover", RECOVERY, &[])?)
    }

    /// `firstlight recover --status`: what the node waits for.
    pub fn recovery_status(&self, vm: &Vm) -> Result<String> {
        succeeded("firstlight recover --status", self.operator(vm, "recover", RECOVERY, &["--status"])?)
    }

    /// Starts key service and join service, as another control plane of the cluster runs them.
    pub fn start_services(&mut self) -> Result<()> {
        let file = fs::read(self.path(MASTER_SECRET)).context("read the master secret")?;
        let file: serde_json::Value = serde_json::from_slice(&file).context("read the master secret")?;
        for (field, name) in [("key", "mastersecret"), ("salt", "salt")] {
            let value = STANDARD.decode(file[field].as_str().unwrap_or_default()).context("read the master secret")?;
            self.write(name, &value)?;
        }
        let keys = format!("127.0.0.1:{}", free_port()?);
        let key_service = Program::start(
            Command::new(dist("key-service")?)
                .args(["--clients", "any", "--listen", &keys, "--master-secret"])
                .arg(self.path("mastersecret"))
                .arg("--salt")
                .arg(self.path("salt")),
        );
        let join_service = Program::start(
            Command::new(dist("join-service")?)
                .args(["--key-service", &keys, "--key-service-auth", "none", "--attestation-variant", "qemu-vtpm"])
                .args(["--listen", &format!("127.0.0.1:{}", self.join_port), "--config"])
                .arg(self.path("config")),
        );
        key_service.expect("serving data keys");
        join_service.expect("letting nodes in");
        self.services = vec![key_service, join_service];
        Ok(())
    }

    /// Stops them.
    pub fn stop_services(&mut self) {
        self.services.clear();
    }

    /// What they printed.
    pub fn services_said(&self) -> String {
        self.services.iter().map(Program::output).collect()
    }
}

/// The metadata service's description of a control-plane machine.
fn instance(name: &str, address: &str) -> String {
    serde_json::json!({
        "Name": name, "ProviderID": format!("qemu:///hostname/{name}"), "Role": "ControlPlane", "VPCIP": address,
        "SecondaryIPRange": "", "AliasIPRanges": null,
    })
    .to_string()
}

fn succeeded(what: &str, output: Output) -> Result<String> {
    let text = [output.stderr, output.stdout].concat();
    let text = String::from_utf8_lossy(&text).lines().map(|line| format!("\n           {line}")).collect::<String>();
    if output.status.success() {
        Ok(text)
    } else {
        Err(Failure(format!("{what} ended with {}: {text}", output.status)))
    }
}

/// What the demo tells while it goes on; the boot tests pass it by.
pub type Tell<'a> = &'a dyn Fn(&str);

/// The demo: first boot, init, a reboot that opens the disk by itself, a reboot that the operator has to help. Each `tell`
/// is a step; an error ends it. Returns the timeline of each boot.
pub fn demo(setting: &mut Setting, tell: Tell) -> Result<Vec<(String, Vec<Event>)>> {
    let mut timelines = Vec::new();

    tell("first boot: the disk is blank");
    let (vm, cluster) = first_boot(setting, tell)?;
    timelines.push(shut_down("first boot and init", vm)?);

    tell("reboot, with the cluster's join service up");
    setting.start_services()?;
    let vm = setting.machine.boot()?;
    let vm = member_again(vm, " ticket:", &cluster)
        .context(&format!("rejoin; the services said\n{}", setting.services_said()))?;
    tell("the machine proved what it runs and got its key; the file written before the reboot is there");
    timelines.push(shut_down("reboot: rejoin", vm)?);

    tell("reboot, with the join service stopped");
    setting.stop_services();
    let mut vm = setting.machine.boot()?;
    let waiting = vm.console.wait_for(" waiting:", PATIENCE)?;
    tell(&format!("the node says on its console:\n           {}", waiting.text));
    tell(&format!("firstlight recover --status said:{}", setting.recovery_status(&vm)?));
    tell(&format!("the operator brings the master secret; firstlight recover said:{}", setting.recover(&vm)?));
    let vm = member_again(vm, " key-slot:", &cluster)?;
    tell("the disk opened; the file is there");
    timelines.push(shut_down("reboot: recovery", vm)?);
    Ok(timelines)
}

/// The first boot, and the operator's init; leaves a file on the disk. Returns the machine and its PCR 15.
pub fn first_boot(setting: &mut Setting, tell: Tell) -> Result<(Vm, String)> {
    let mut vm = setting.machine.boot()?;
    vm.console.wait_for(" formatted:", PATIENCE)?;
    vm.console.wait_for(" mounted:", PATIENCE)?;
    vm.console.wait_for(" ready:", PATIENCE)?;
    tell("the disk is formatted and mounted, the OS runs; the operator initialises the node");
    tell(&format!("firstlight init said:{}", setting.init(&vm)?));
    vm.console.wait_for(" complete:", PATIENCE)?;
    vm.command("echo written before the reboot >/run/state/proof && sync", PATIENCE)?;
    let cluster = pcr15(&mut vm)?;
    if cluster.bytes().all(|b| b == b'0') {
        return Err(Failure("the node is initialised, but its PCR 15 is zero".to_owned()));
    }
    Ok((vm, cluster))
}

/// Waits until the node has opened its disk, as `event` announces, and belongs to the same cluster with the same files.
pub fn member_again(mut vm: Vm, event: &str, cluster: &str) -> Result<Vm> {
    vm.console.wait_for(event, PATIENCE)?;
    vm.console.wait_for(" mounted:", PATIENCE)?;
    vm.console.wait_for(" ready:", PATIENCE)?;
    let proof = vm.command("cat /run/state/proof", PATIENCE)?;
    let now = pcr15(&mut vm)?;
    if proof != "written before the reboot" || now != cluster {
        return Err(Failure(format!("the file says {proof:?}; PCR 15 is {now}, expected {cluster}")));
    }
    Ok(vm)
}

fn pcr15(vm: &mut Vm) -> Result<String> {
    vm.command("cat /sys/class/tpm/tpm0/pcr-sha256/15", PATIENCE)
}

pub fn shut_down(title: &str, mut vm: Vm) -> Result<(String, Vec<Event>)> {
    let events = timeline::events(&vm.console.lines());
    vm.shut_down(PATIENCE)?;
    Ok((title.to_owned(), events))
}
