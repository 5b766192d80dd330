//! The machine of the demo with its surroundings: the services of its cluster on the host, the operator's command, and
//! the steps from power-on to a disk that opens by itself.

use super::initramfs::{self, Overlay};
use super::story::Story;
use super::timeline::{self, Event};
use super::vm::{Firmware, GUEST, HOST, Machine, Vm};
use super::{Context, Failure, Result, dist, free_port};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use image::BootLog;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use support::metadata::MetadataServer;
use support::program::Program;

/// The init secret, which the operator and the node share before the init.
pub const INIT_SECRET: &str = "correct-horse-battery-staple";
/// The default file of the master secret.
pub const MASTER_SECRET: &str = "firstlight-mastersecret.json";
/// Ports of the node: its InitServer, its recovery server.
pub const INIT: u16 = 9000;
pub const RECOVERY: u16 = 9999;
/// The addresses at which a node expects the metadata service and the control planes' join services.
const METADATA: u16 = 8080;
const JOIN: u16 = 30090;
/// The words that the host of the demo adds to the kernel's command line.
const TAMPERING: &str = " init=/bin/sh";
/// Exit codes of the operator's command.
const ATTESTATION_REFUSED: i32 = 3;
const FRESH: i32 = 6;
const MEMBER: i32 = 0;
/// The policy of machines with SeaBIOS, which measures neither kernel nor initrd: it requires only a fresh node.
pub const FRESH_NODE: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;
/// Time limit of a step; emulation is slow on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The machine of the demo and everything around it.
pub struct Setting {
    /// The node.
    pub machine: Machine,
    /// The metadata service, which tells the node its identity.
    pub metadata: MetadataServer,
    services: Vec<Program>,
    join_port: u16,
}

impl Setting {
    /// A machine with a blank disk; the metadata service runs, but the cluster's services do not, because there is no cluster yet.
    pub fn new(name: &str, disk: u64) -> Result<Setting> {
        Setting::with(name, disk, &Overlay::default())
    }

    /// Such a machine with additional files in its initramfs.
    pub fn with(name: &str, disk: u64, overlay: &Overlay) -> Result<Setting> {
        let mut machine = Machine::new(name)?;
        machine.firmware = Firmware::Uefi;
        initramfs::build(&machine.initramfs(), &["unlock", "bootstrapper"], overlay)?;
        let policy = machine.policy()?;
        Setting::around(machine, disk, &policy)
    }

    /// Returns the services and the operator of `machine`, which meets `policy`; adds the blank state disk.
    pub fn around(mut machine: Machine, disk: u64, policy: &str) -> Result<Setting> {
        let metadata = MetadataServer::start(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let node = instance("control-plane-0", GUEST);
        metadata.set_self(&node);
        metadata.set_peers(&format!("[{node},{}]", instance("control-plane-1", HOST)));
        metadata.set_endpoint(HOST);
        metadata
            .set_init_secret_hash(&bcrypt::hash(INIT_SECRET, 10).context("hash the init secret")?);

        let join_port = free_port()?;
        machine.open_ports = vec![INIT, RECOVERY];
        machine.host_ports = [(METADATA, metadata.address.port()), (JOIN, join_port)].into();
        machine.add_disk("state", disk)?;

        let setting = Setting {
            machine,
            metadata,
            services: Vec::new(),
            join_port,
        };
        fs::create_dir(setting.path("config")).context("make the join service's folder")?;
        setting.write("config/attestationConfig", policy.as_bytes())?;
        setting.write("policy.json", policy.as_bytes())?;
        setting.write("init-secret", INIT_SECRET.as_bytes())?;
        Ok(setting)
    }

    /// A file of the operator's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.machine.folder().join(name)
    }

    /// Writes a file of the operator's folder that no other user may read.
    pub fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, content).context(&format!("write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).context("make a file private")
    }

    /// Runs the operator's command against a port of the node, in the operator's folder.
    pub fn operator(
        &self,
        vm: &Vm,
        command: &str,
        port: u16,
        arguments: &[&str],
    ) -> Result<Output> {
        let endpoint = format!("127.0.0.1:{}", forwarded(vm, port)?);
        self.firstlight(&[command, "--endpoint", &endpoint])?
            .args(arguments)
            .output()
            .context("run firstlight")
    }

    /// The operator's command in the operator's folder, with the policy there.
    fn firstlight(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(dist("firstlight")?);
        command
            .current_dir(self.machine.folder())
            .args(arguments)
            .args(["--policy", "policy.json", "--timeout", "90s"]);
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// `firstlight init`: makes the node the first of a cluster, and returns what the command printed.
    pub fn init(&self, vm: &Vm) -> Result<String> {
        self.accept(&attestation_key(vm)?)?;
        succeeded(
            "firstlight init",
            // with FRESH_NODE
            self.operator(
                vm,
                "init",
                INIT,
                &["--init-secret", "init-secret", "--require=any"],
            )?,
        )
    }

    /// `firstlight status` of a node that belongs to no cluster yet: whether it meets the policy, by what its TPM signs.
    pub fn status_of_fresh(&self, vm: &Vm, port: u16) -> Result<String> {
        self.status(vm, port, FRESH)
    }

    /// `firstlight status` of a member of the operator's cluster, by what its TPM signs.
    pub fn status_of_member(&self, vm: &Vm, port: u16) -> Result<String> {
        self.status(vm, port, MEMBER)
    }

    fn status(&self, vm: &Vm, port: u16, expected: i32) -> Result<String> {
        let address = format!("127.0.0.1:{}", forwarded(vm, port)?);
        let mut command = self.firstlight(&["status", &address])?;
        let output = command.output().context("run firstlight")?;
        match output.status.code() {
            Some(code) if code == expected => Ok(said(&output)),
            _ => Err(Failure(format!(
                "firstlight status ended with {}: {}",
                output.status,
                said(&output)
            ))),
        }
    }

    /// `firstlight verify`: what a server at a port of the node proves about the operator's cluster.
    pub fn verify(&self, vm: &Vm, port: u16) -> Result<String> {
        let address = format!("127.0.0.1:{}", forwarded(vm, port)?);
        let mut command = self.firstlight(&["verify", &address])?;
        succeeded(
            "firstlight verify",
            command.output().context("run firstlight")?,
        )
    }

    /// Names the machine's attestation key in the policies of operator and join service, in addition to the existing ones.
    pub fn accept(&self, key: &str) -> Result<()> {
        for file in ["policy.json", "config/attestationConfig"] {
            let policy = fs::read(self.path(file)).context("read a policy")?;
            let mut policy: serde_json::Value =
                serde_json::from_slice(&policy).context("read a policy")?;
            match policy["attestationKeys"].as_array_mut() {
                Some(keys) if keys.iter().any(|named| named == key) => {}
                Some(keys) => keys.push(key.into()),
                None => policy["attestationKeys"] = serde_json::json!([key]),
            }
            self.write(file, policy.to_string().as_bytes())?;
        }
        Ok(())
    }

    /// `firstlight recover`: sends the master secret.
    pub fn recover(&self, vm: &Vm) -> Result<String> {
        succeeded(
            "firstlight recover",
            self.operator(vm, "recover", RECOVERY, &[])?,
        )
    }

    /// `firstlight recover --status`: what the node waits for.
    pub fn recovery_status(&self, vm: &Vm) -> Result<String> {
        succeeded(
            "firstlight recover --status",
            self.operator(vm, "recover", RECOVERY, &["--status"])?,
        )
    }

    /// Starts key service and join service, as another control plane of the cluster runs them.
    pub fn start_services(&mut self) -> Result<()> {
        self.start_services_with(&[])
    }

    /// Starts the services with these options of the join service.
    pub fn start_services_with(&mut self, options: &[&str]) -> Result<()> {
        let file = fs::read(self.path(MASTER_SECRET)).context("read the master secret")?;
        let file: serde_json::Value =
            serde_json::from_slice(&file).context("read the master secret")?;
        for (field, name) in [("key", "mastersecret"), ("salt", "salt")] {
            let value = STANDARD
                .decode(file[field].as_str().unwrap_or_default())
                .context("read the master secret")?;
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
                .args([
                    "--key-service",
                    &keys,
                    "--key-service-auth",
                    "none",
                    "--attestation-variant",
                    "qemu-vtpm",
                ])
                .args([
                    "--listen",
                    &format!("127.0.0.1:{}", self.join_port),
                    "--config",
                ])
                .arg(self.path("config"))
                .args(options),
        );
        key_service.expect("serving data keys");
        join_service.expect("serving join requests");
        self.services = vec![key_service, join_service];
        Ok(())
    }

    /// Stops them.
    pub fn stop_services(&mut self) {
        self.services.clear();
    }

    /// Returns what the services printed.
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

/// The port of the host that leads to a port of the node.
fn forwarded(vm: &Vm, port: u16) -> Result<u16> {
    vm.ports
        .get(&port)
        .copied()
        .ok_or_else(|| Failure(format!("port {port} is not forwarded")))
}

/// The name of the TPM's key on the machine's console. By this name, an operator accepts the machine.
pub fn attestation_key(vm: &Vm) -> Result<String> {
    let lines = vm.console.lines();
    let named = lines
        .iter()
        .find_map(|line| line.text.split_once(" attestation-key: "));
    let (_, name) =
        named.ok_or_else(|| Failure("the console does not name the attestation key".to_owned()))?;
    Ok(name.trim().to_owned())
}

fn succeeded(what: &str, output: Output) -> Result<String> {
    if output.status.success() {
        Ok(said(&output))
    } else {
        Err(Failure(format!(
            "{what} ended with {}: {}",
            output.status,
            said(&output)
        )))
    }
}

/// What a command printed on both streams, without the lines that only say that something has begun.
fn said(output: &Output) -> String {
    let streams = [
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&output.stdout),
    ];
    let lines = streams
        .iter()
        .flat_map(|text| text.lines())
        .filter(|line| !line.ends_with(" .."));
    lines.collect::<Vec<_>>().join("\n")
}

/// The demo: first boot, init, a reboot that opens the disk by itself, one with a changed command line that must not open it, and
/// one at which the operator sends the key. An error ends the demo. Returns the name of each boot, and its steps.
pub fn demo(setting: &mut Setting, story: &Story) -> Result<Vec<(&'static str, Vec<Event>)>> {
    let first = first_boot_and_init(setting, story)?;
    let cluster = first.cluster;
    let rejoin = rejoin(setting, story, &cluster)?;
    let tampered = tampered(setting, story)?;
    let recovery = recovery(setting, story, &cluster)?;
    Ok(vec![
        ("first boot and init", first.events),
        ("reboot", rejoin),
        ("tampered reboot", tampered),
        ("reboot with recovery", recovery),
    ])
}

struct First {
    events: Vec<Event>,
    /// PCR 15 of a member.
    cluster: String,
}

fn first_boot_and_init(setting: &mut Setting, story: &Story) -> Result<First> {
    story.part("1. First boot: the disk is blank. Then the operator's init.");
    story.tell(
        "switched on; the firmware measures and starts the kernel, which takes it some seconds",
    );
    let mut vm = new_machine(setting)?;
    story.tell(&format!(
        "its TPM, beside the policy that was computed before:\n{}",
        registers(setting, &mut vm)?
    ));
    let key = attestation_key(&vm)?;
    setting.accept(&key)?;
    story
        .tell(&format!("its console names the TPM's attestation key, and the operator the same in the policy:\n{key}"));
    story.tell("the operator asks what it is: firstlight status verifies what the TPM signed");
    story.tell(&setting.status_of_fresh(&vm, INIT)?);
    story.tell("it meets the policy, so that the operator may give it secrets: firstlight init");
    let (vm, cluster) = member(setting, vm, story)?;
    story.tell(&format!(
        "PCR 15 is the cluster's from here on, and never again a fresh node's:\n{cluster}"
    ));
    Ok(First {
        events: shut_down(vm)?,
        cluster,
    })
}

fn rejoin(setting: &mut Setting, story: &Story, cluster: &str) -> Result<Vec<Event>> {
    story.part("2. Reboot: the cluster's join service gives the key to a machine that proves what it runs.");
    setting.start_services()?;
    story.tell("the join service is up; switched on");
    let vm = member_again(setting.machine.boot()?, " ticket:", cluster).context(&format!(
        "rejoin; the services said\n{}",
        setting.services_said()
    ))?;
    story.tell("the disk opened by itself; the file written before the reboot is there");
    shut_down(vm)
}

/// Machine, TPM and disk are the same. Only the files that the machine boots differ.
fn tampered(setting: &mut Setting, story: &Story) -> Result<Vec<Event>> {
    story.part("3. Tampered reboot: the host adds a word to the kernel's command line.");
    let honest = setting.machine.event_log()?;
    let usual = setting.machine.command_line.clone();
    setting.machine.command_line.push_str(TAMPERING);
    let altered = setting.machine.event_log()?;
    story.tell(&format!(
        "switched on with {:?}",
        setting.machine.command_line
    ));
    let mut vm = setting.machine.boot()?;
    let heard = vm
        .console
        .wait_for("join service 10.42.0.1:30090: ", PATIENCE)?;
    if !heard.text.contains("refused") {
        return Err(Failure(format!(
            "the join service should refuse an altered machine: {}",
            heard.text
        )));
    }
    story.tell(
        "the machine hears that it is refused, and no more; the join service's log says why:",
    );
    let why = format!(
        "PCR 9: expected {}, got {}",
        expected(&honest, 9)?,
        expected(&altered, 9)?
    );
    story.tell(&line_with(&setting.services_said(), &why)?);
    let refused = setting.operator(&vm, "recover", RECOVERY, &[])?;
    if refused.status.code() != Some(ATTESTATION_REFUSED) {
        return Err(Failure(format!(
            "firstlight recover should end with 3: {}: {}",
            refused.status,
            said(&refused)
        )));
    }
    story.tell(
        "the operator does not give it the master secret either: firstlight recover ended with 3",
    );
    story.tell(&line_with(&said(&refused), &why)?);
    story.tell(&format!(
        "the event log has the reason:\n{}",
        changed_entries(&honest, &altered, &said(&refused))?
    ));
    let events = timeline::events(&vm.console.lines());
    if events
        .iter()
        .any(|event| ["key-slot", "mounted"].contains(&event.name.as_str()))
    {
        return Err(Failure("the disk of an altered machine opened".to_owned()));
    }
    story.tell("the disk stays closed; the power is cut, and the command line is what it was");
    vm.cut_power();
    setting.machine.command_line = usual;
    Ok(events)
}

fn recovery(setting: &mut Setting, story: &Story, cluster: &str) -> Result<Vec<Event>> {
    story.part("4. Reboot with the join service stopped: the operator brings the key.");
    setting.stop_services();
    story.tell("switched on");
    let mut vm = setting.machine.boot()?;
    vm.console
        .wait_for(" waiting: for a key of disk", PATIENCE)?;
    story.tell("it waits, and says so to whoever asks: firstlight recover --status");
    story.tell(&setting.recovery_status(&vm)?);
    story.tell("the operator brings the master secret: firstlight recover");
    story.tell(&setting.recover(&vm)?);
    let vm = member_again(vm, " key-slot:", cluster)?;
    story.tell("the disk opened; the file is there");
    shut_down(vm)
}

/// The first boot, and the operator's init; leaves a file on the disk. Returns the machine and its PCR 15.
pub fn first_boot(setting: &mut Setting) -> Result<(Vm, String)> {
    let vm = new_machine(setting)?;
    member(setting, vm, &Story::silent())
}

/// Boots with a blank disk until it waits for init.
pub fn new_machine(setting: &mut Setting) -> Result<Vm> {
    let mut vm = setting.machine.boot()?;
    for step in [" formatted:", " mounted:", " ready:"] {
        vm.console.wait_for(step, PATIENCE)?;
    }
    Ok(vm)
}

/// The operator's init, and a file on the disk. Returns the machine and its PCR 15.
fn member(setting: &Setting, mut vm: Vm, story: &Story) -> Result<(Vm, String)> {
    story.tell(&setting.init(&vm)?);
    vm.console.wait_for(" complete:", PATIENCE)?;
    vm.command(
        "echo written before the reboot >/run/state/proof && sync",
        PATIENCE,
    )?;
    let cluster = pcr(&mut vm, 15)?;
    if cluster.bytes().all(|b| b == b'0') {
        return Err(Failure(
            "the node is initialized, but its PCR 15 is zero".to_owned(),
        ));
    }
    Ok((vm, cluster))
}

/// Waits until the node has opened its disk, as `event` announces, and belongs to the same cluster with the same files.
pub fn member_again(mut vm: Vm, event: &str, cluster: &str) -> Result<Vm> {
    vm.console.wait_for(event, PATIENCE)?;
    let measured = vm.console.wait_for(" measured:", PATIENCE)?;
    let mounted = vm.console.wait_for(" mounted:", PATIENCE)?;
    vm.console.wait_for(" ready:", PATIENCE)?;
    // not mounted read-only either: the kernel prints a line for each mount
    let mounts = vm.command("dmesg | grep -c 'EXT4-fs (dm-.*): mounted'", PATIENCE)?;
    if measured.at > mounted.at || mounts != "1" {
        return Err(Failure(format!(
            "the kernel mounted the disk {mounts} times, and before PCR 15 was set"
        )));
    }
    let proof = vm.command("cat /run/state/proof", PATIENCE)?;
    let now = pcr(&mut vm, 15)?;
    if proof != "written before the reboot" || now != cluster {
        return Err(Failure(format!(
            "the file says {proof:?}; PCR 15 is {now}, expected {cluster}"
        )));
    }
    Ok(vm)
}

/// A reboot without the cluster's services: the operator brings the key.
pub fn recovered(setting: &mut Setting, cluster: &str) -> Result<Vm> {
    setting.stop_services();
    let mut vm = setting.machine.boot()?;
    vm.console
        .wait_for(" waiting: for a key of disk", PATIENCE)?;
    setting.recover(&vm)?;
    member_again(vm, " key-slot:", cluster)
}

/// Prints the most important registers of the machine's TPM, and the policy's verdict on each.
fn registers(setting: &Setting, vm: &mut Vm) -> Result<String> {
    let policy = setting.machine.event_log()?;
    let meaning = [
        (4, "the kernel"),
        (9, "its command line and the initramfs"),
        (15, "the cluster: none yet"),
    ];
    let line = |(number, meaning)| {
        let (got, wanted) = (pcr(vm, number)?, expected(&policy, number)?);
        let verdict = if got == wanted {
            "as in the policy".to_owned()
        } else {
            format!("the policy wants {wanted}")
        };
        Ok(format!("PCR {number:2}  {got}  {verdict}: {meaning}"))
    };
    Ok(meaning
        .into_iter()
        .map(line)
        .collect::<Result<Vec<_>>>()?
        .join("\n"))
}

/// Returns which entries of PCR 9 differ; the refusal must name each by the beginning of its digest.
fn changed_entries(honest: &BootLog, altered: &BootLog, refusal: &str) -> Result<String> {
    let mut lines = Vec::new();
    for (honest, altered) in honest.events(9).zip(altered.events(9)) {
        let [wanted, got] = [honest, altered].map(|event| hex(&event.digest[..4]));
        line_with(refusal, &got)?;
        let verdict = if wanted == got {
            "as it should be".to_owned()
        } else {
            format!("it should be {wanted}..")
        };
        lines.push(format!("{got}.. is {}: {verdict}", altered.what));
    }
    Ok(lines.join("\n"))
}

/// The value that a register will have, in hexadecimal digits.
fn expected(log: &BootLog, pcr: u32) -> Result<String> {
    let value = log.value(pcr).map_err(|missing| Failure(missing.why))?;
    Ok(hex(&value))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The line of `text` that has `wanted` in it.
fn line_with(text: &str, wanted: &str) -> Result<String> {
    let line = text
        .lines()
        .find(|line| line.contains(wanted))
        .map(|line| line.trim().to_owned());
    line.ok_or_else(|| {
        Failure(format!(
            "there should be {wanted:?} in what was said:\n{text}"
        ))
    })
}

fn pcr(vm: &mut Vm, number: u32) -> Result<String> {
    let value = vm.command(
        &format!("cat /sys/class/tpm/tpm0/pcr-sha256/{number}"),
        PATIENCE,
    )?;
    Ok(value.to_ascii_lowercase())
}

/// Shuts the machine down, and returns its steps.
fn shut_down(mut vm: Vm) -> Result<Vec<Event>> {
    let events = timeline::events(&vm.console.lines());
    vm.shut_down(PATIENCE)?;
    Ok(events)
}
