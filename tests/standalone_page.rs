//! docs/standalone.md as a new reader follows it: two machines with a Debian 12, one of them the key broker, and the commands of the
//! page in the page's order. The volume opens at a reboot; not without the broker, and not under another policy. Neither stops the boot.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use machine::vm::{Firmware, HOST, Machine, Source, Vm};
use machine::{Context, Failure, Result, root, script};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(1800);
/// The port of a key broker.
const PORT: u16 = 30090;
/// What a command in a machine may have on its line: half of what a terminal takes.
const PART: usize = 2000;

/// The commands of the page.
struct Page(String);

impl Page {
    fn read() -> Result<Page> {
        let path = root().join("docs/standalone.md");
        let page = std::fs::read_to_string(path).context("read the page")?;
        Ok(Page(page))
    }

    /// Returns the block of commands with these words.
    fn block(&self, words: &str) -> Result<String> {
        let blocks = self.0.split("```sh\n").skip(1);
        let mut blocks = blocks.filter_map(|rest| rest.split("```").next());
        let found = blocks.find(|block| block.contains(words));
        found
            .map(str::to_owned)
            .ok_or_else(|| Failure(format!("the page has no block with {words:?}")))
    }
}

/// Replaces what the reader has to fill in.
fn fill(block: &str, from: &str, to: &str) -> Result<String> {
    if block.contains(from) {
        Ok(block.replace(from, to))
    } else {
        Err(Failure(format!("{from:?} is not in {block}")))
    }
}

/// Runs commands in the machine's folder /root as a reader does; the first one that fails is an error.
fn run(vm: &mut Vm, commands: &str) -> Result<String> {
    put(vm, "/tmp/commands", commands)?;
    let said = vm.command(
        "bash -euo pipefail -c 'cd; . /tmp/commands' </dev/null",
        PATIENCE,
    )?;
    println!("{commands}---\n{said}\n---");
    Ok(said)
}

/// Writes a file in the machine.
fn put(vm: &mut Vm, path: &str, content: &str) -> Result<()> {
    let content = STANDARD.encode(content);
    vm.command(&format!("rm -f {path}"), PATIENCE)?;
    for at in (0..content.len()).step_by(PART) {
        let part = &content[at..content.len().min(at + PART)];
        vm.command(&format!("echo {part} | base64 -d >> {path}"), PATIENCE)?;
    }
    Ok(())
}

/// A machine with the Debian, which was never switched on.
fn new(name: &str, files: &Path) -> Result<Machine> {
    let mut machine = Machine::new(name)?;
    machine.firmware = Firmware::Uefi;
    machine.memory = 1024;
    machine.source = Source::KernelFile(files.join("vmlinuz"));
    // an emulated processor may be slow
    machine.command_line += " root=LABEL=root rw systemd.default_timeout_start_sec=1800";
    std::fs::copy(files.join("initrd.img"), machine.initramfs()).context("copy the initrd")?;
    machine.add_copy_of_disk("root", &files.join("root.disk"))?;
    Ok(machine)
}

fn boot(machine: &mut Machine) -> Result<Vm> {
    let mut vm = machine.boot()?;
    vm.console.wait_for("the console is ready", PATIENCE)?;
    Ok(vm)
}

#[test]
#[ignore = "boots machines: make test-standalone"]
fn a_reader_of_the_page_gets_a_volume_that_opens_at_each_boot() -> Result<()> {
    let page = Page::read()?;
    let version = env!("CARGO_PKG_VERSION");
    let package = |name: &str| root().join(format!("target/deb/{name}_{version}_amd64.deb"));
    let packages = ["firstlight", "firstlight-volume", "firstlight-broker"].map(package);
    let files = root().join("target/images/stock");
    let mut arguments = vec![files.as_path()];
    arguments.extend(packages.iter().map(PathBuf::as_path));
    script("tools/stock-disk.sh", &arguments)?;

    let mut host = new("standalone-broker", &files)?;
    host.open_ports = vec![PORT];
    let mut broker = boot(&mut host)?;
    let mut machine = new("standalone", &files)?;
    machine.add_disk("data", 64 * MIB)?;
    let port = *broker
        .ports
        .get(&PORT)
        .ok_or_else(|| Failure("no port".into()))?;
    machine.host_ports.insert(PORT, port);
    let mut vm = boot(&mut machine)?;

    if !page.0.contains(JOURNAL) {
        return Err(Failure(format!("the page does not have {JOURNAL}")));
    }
    // the page, from top to bottom
    run(&mut vm, &page.block("firstlight measure")?)?;
    let policy = vm.command("base64 -w0 policy.json; echo", PATIENCE)?;
    let policy = STANDARD.decode(policy.trim()).context("read the policy")?;
    let policy = String::from_utf8_lossy(&policy).into_owned();
    put(&mut broker, "/root/policy.json", &policy)?;
    let said = run(&mut broker, &page.block("firstlight-broker_")?)?;
    let id = said.lines().last().unwrap_or_default().to_owned();
    let enroll = page.block("firstlight-volume enroll")?;
    let enroll = fill(&fill(&enroll, "10.0.0.5", HOST)?, "9c…", &id)?;
    let said = run(&mut vm, &enroll)?;
    let line = said
        .lines()
        .find_map(|line| line.strip_prefix("Line for /etc/crypttab: "));
    let line = line.ok_or_else(|| Failure("there is no line for crypttab".into()))?;
    run(&mut vm, &format!("echo '{line}' >> /etc/crypttab\n"))?;
    run(&mut vm, &page.block("mkfs.ext4")?)?;
    run(&mut vm, "mount /data; echo kept > /data/file\n")?;
    vm.shut_down(PATIENCE)?;
    drop(vm);

    // the next boot
    let mut vm = boot(&mut machine)?;
    until(&mut vm, "findmnt /data")?;
    run(&mut vm, "grep kept /data/file\n")?;
    run(
        &mut vm,
        "firstlight-volume status; ! systemctl --failed --quiet | grep .\n",
    )?;
    // the copy of the header is only there until the volume is open
    run(&mut vm, "! ls /run/firstlight/headers/data\n")?;
    // a volume that opens late is mounted, too
    let limit = "systemctl show --value -p JobRunningTimeoutUSec dev-mapper-data.device";
    run(&mut vm, &format!("{limit} | grep -x infinity\n"))?;
    vm.shut_down(PATIENCE)?;
    drop(vm);

    // without the broker: the console is ready after the boot has finished
    run(&mut broker, "systemctl stop firstlight-join-service\n")?;
    let mut vm = boot(&mut machine)?;
    run(
        &mut vm,
        "systemctl is-active multi-user.target; ! findmnt /data\n",
    )?;
    says(&mut vm, JOURNAL, "; asking again")?;
    // the policy accepts another kernel only
    let mut other: Value = serde_json::from_str(&policy).context("read the policy")?;
    other["measurements"]["9"]["expected"] = "00".repeat(32).into();
    put(
        &mut broker,
        "/etc/firstlight/broker/attestationConfig",
        &other.to_string(),
    )?;
    run(&mut broker, "systemctl start firstlight-join-service\n")?;
    says(&mut vm, JOURNAL, "refused this machine's attestation")?;
    let service = "journalctl -b -u firstlight-join-service";
    says(&mut broker, service, "expected 0000000000")?;
    run(&mut vm, "! findmnt /data\n")?;
    // the right policy again, without a restart of the service
    put(
        &mut broker,
        "/etc/firstlight/broker/attestationConfig",
        &policy,
    )?;
    until(&mut vm, "test -e /dev/mapper/data")?;
    until(&mut vm, "findmnt /data")?;
    vm.shut_down(PATIENCE)
}

/// The command of the page for the journal of the machine.
const JOURNAL: &str = "journalctl -u 'firstlight-volume@*'";

/// Waits until a command in the machine succeeds.
fn until(vm: &mut Vm, command: &str) -> Result<()> {
    let wait = format!("for i in $(seq 600); do ! {command} || exit 0; sleep 1; done; exit 1");
    match vm.command(&wait, PATIENCE) {
        Ok(_) => Ok(()),
        Err(error) => {
            let why = "systemctl --failed; journalctl -b --no-pager | tail -n 60";
            Err(Failure(format!("{error}\n{}", vm.command(why, PATIENCE)?)))
        }
    }
}

/// Waits until the output of a command has this text.
fn says(vm: &mut Vm, command: &str, text: &str) -> Result<()> {
    until(
        vm,
        &format!("{command} --no-pager | grep -m1 -F \"{text}\""),
    )?;
    let said = vm.command(
        &format!("{command} --no-pager | grep -m1 -F \"{text}\""),
        PATIENCE,
    )?;
    println!("{said}");
    Ok(())
}
