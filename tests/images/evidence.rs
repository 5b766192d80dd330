//! The sandbox of firstlight-evidence.service, as a real systemd makes it, on a member of a cluster. The unchanged unit proves the
//! machine to a join service, and to the service's callers. With a drop-in that only replaces the program, the test shows which
//! actions the rest of the unit permits: those that a confidential machine and a cloud need, and no others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use machine::flow::{self, FRESH_NODE, PATIENCE, Setting};
use machine::initramfs::Overlay;
use machine::vm::{Firmware, Vm};
use machine::{Context, Failure, Result, dist, root, script};
use serde_json::Value;
use support::boot_image::run;

use super::{CLOUD, DISK, Maker, SYSTEMD_252, SYSTEMD_257_LINUX_6_12, machine};

const SERVICE: &str = "firstlight-evidence.service";
/// The ports of the join service in the machine: for nodes, and for callers that request a document by HTTP.
const JOIN: u16 = 30090;
const DOCUMENTS: u16 = 30080;
/// The answers of Google's metadata service about a machine.
const METADATA: [(&str, &str); 3] = [
    ("instance/zone", "projects/7/zones/europe-west3-b"),
    ("instance/name", "node-1"),
    ("project/project-id", "example"),
];
/// The NV index at which machines of Google have the template of their attestation key, and such a template.
const TEMPLATE_INDEX: &str = "0x01c10001";
const TEMPLATE: &str = r"\0\1\0\x0b\0\5\0\x72\0\0\0\x10\0\x14\0\x0b\x8\0\0\0\0\0\0\0";

/// systemd 252 on Linux 6.1, which has no configfs-tsm: a report is a request to the device, and another driver answers in place of
/// the hardware's.
#[test]
#[ignore = "boots a machine: make test-images"]
fn the_sandbox_of_systemd_252_has_what_evidence_needs_and_no_more() -> Result<()> {
    let (setting, mut vm) = member("evidence-252", SYSTEMD_252)?;
    sandbox(&setting, &mut vm, "/dev/sev-guest: Not a tty")
}

/// systemd 257 on Linux 6.12, which has configfs-tsm. Nothing makes reports there, so each request is refused by the kernel.
#[test]
#[ignore = "boots a machine: make test-images"]
fn the_sandbox_of_systemd_257_has_what_evidence_needs_and_no_more() -> Result<()> {
    let (setting, mut vm) = member("evidence-257", SYSTEMD_257_LINUX_6_12)?;
    vm.command("modprobe -d /run/tools tsm", PATIENCE)?;
    sandbox(&setting, &mut vm, "No such device or address")
}

/// `no_hardware` is the reason why there is no report of SEV-SNP.
fn sandbox(setting: &Setting, vm: &mut Vm, no_hardware: &str) -> Result<()> {
    proves_the_machine(setting, vm)?;
    each_attempt(vm)?;
    asks_the_metadata_service(vm)?;
    asks_the_hardware(vm, no_hardware)
}

/// A member of a cluster with the programs and modules of the test, and with the parts of a cloud and of a confidential machine: a
/// metadata service, configfs, and another driver as the device of SEV-SNP.
fn member(name: &str, maker: Maker) -> Result<(Setting, Vm)> {
    let os = root().join(format!("target/images/systemd-{}.disk", maker.suite));
    let bootstrapper = dist("bootstrapper")?;
    let disk = [Path::new(maker.suite), &os, &bootstrapper];
    script("tools/systemd-disk.sh", &disk)?;
    let mut machine = machine(name, maker, CLOUD, &Overlay::default())?;
    // this firmware leaves an event log
    machine.firmware = Firmware::Uefi;
    machine.add_copy_of_disk("root", &os)?;
    machine.add_copy_of_disk("tools", &tools(machine.folder(), maker.kernel)?)?;
    let mut setting = Setting::around(machine, DISK, FRESH_NODE)?;
    setting.machine.open_ports.extend([JOIN, DOCUMENTS]);
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    for command in [
        "systemctl --version | head -n 1",
        "mkdir /run/tools && mount -o ro /dev/disk/by-id/virtio-tools /run/tools",
        "modprobe -d /run/tools null_blk nr_devices=0 && modprobe -d /run/tools dummy",
        // udev sees its module, and systemd mounts it
        "timeout 60 sh -c 'until mountpoint -q /sys/kernel/config; do sleep 1; done'",
        "mknod -m 600 /dev/sev-guest c $(stat -c '0x%t 0x%T' /dev/cpu_dma_latency)",
        "ip link add metadata type dummy && ip link set metadata up",
        "ip address add 169.254.169.254/32 dev metadata",
        "systemd-run --quiet busybox httpd -f -p 169.254.169.254:80 -h /run/tools/metadata",
        "systemd-run --quiet busybox httpd -f -p [::1]:80 -h /run/tools/metadata",
    ] {
        println!("  {}", vm.command(command, PATIENCE)?);
    }
    Ok((setting, vm))
}

/// Makes a disk with the modules of a kernel, the join service with its policy, and the files of Google's metadata service.
fn tools(folder: &Path, kernel: &str) -> Result<PathBuf> {
    let (tree, disk) = (folder.join("tools"), folder.join("tools.ext4"));
    let kernel = script("tools/kernel.sh", &[Path::new(kernel)])?;
    let file = |name: &str, content: &str| {
        let path = tree.join(name);
        let made = fs::create_dir_all(path.parent().unwrap_or(&tree));
        made.and_then(|()| fs::write(path, content))
            .context("write a file")
    };
    file("config/attestationConfig", FRESH_NODE)?;
    for (name, value) in METADATA {
        file(
            &format!("metadata/computeMetadata/v1/{name}"),
            &format!("{value}\n"),
        )?;
    }
    run(Command::new("cp")
        .arg("-a")
        .arg(format!("{kernel}/lib"))
        .arg(&tree));
    run(Command::new("cp").arg(dist("join-service")?).arg(&tree));
    run(Command::new("/sbin/mke2fs")
        .args(["-q", "-t", "ext4", "-d"])
        .args([&tree, &disk])
        .arg("256M"));
    Ok(disk)
}

/// The unchanged unit.
fn proves_the_machine(setting: &Setting, vm: &mut Vm) -> Result<()> {
    // as with the package tpm-udev
    same(&vm.command("stat -c %U /dev/tpmrm0", PATIENCE)?, "tss")?;
    let state = format!("systemctl is-active {SERVICE} || true");
    same(&vm.command(&state, PATIENCE)?, "inactive")?;
    start_join_service(vm, "qemu-vtpm")?;
    let document = document(vm)?;
    same(&vm.command(&state, PATIENCE)?, "active")?;
    if document["Attestation"]["event_log"]
        .as_str()
        .is_none_or(str::is_empty)
    {
        return Err(Failure(format!("the event log is not in {document}")));
    }
    println!("{}", setting.verify(vm, JOIN)?);
    Ok(())
}

/// Actions that a program may take in the sandbox.
const MAY: [&str; 6] = [
    "mkdir /sys/kernel/config/nullb/probe && rmdir /sys/kernel/config/nullb/probe",
    "busybox wget -q -O - http://169.254.169.254/computeMetadata/v1/instance/zone",
    "busybox wget -q -O - http://[::1]/computeMetadata/v1/instance/zone",
    ": <>/dev/tpmrm0",
    ": <>/dev/tpm0",
    ": <>/dev/sev-guest",
];
/// Actions that it may not take, and the expected errors.
const MAY_NOT: [(&str, &str); 8] = [
    (": >/sys/block/vda/queue/read_ahead_kb", READ_ONLY),
    (
        "mkdir /sys/fs/cgroup/probe && rmdir /sys/fs/cgroup/probe",
        READ_ONLY,
    ),
    (": >/proc/sys/vm/swappiness", READ_ONLY),
    (": >/etc/probe", READ_ONLY),
    (": >/run/probe-file", READ_ONLY),
    (": >/run/state/probe", READ_ONLY),
    (": </dev/vda", "Operation not permitted"),
    ("ip link", "Address family not supported by protocol"),
];
const READ_ONLY: &str = "Read-only file system";

/// Each attempt succeeds outside of the sandbox.
fn each_attempt(vm: &mut Vm) -> Result<()> {
    let program = [
        "ExecStart=/bin/bash /run/probe",
        // the test waits for it, and receives it
        "Type=oneshot",
        "StandardOutput=truncate:/run/said",
        "StandardError=inherit",
    ];
    run_instead(vm, &program)?;
    let why_not = MAY.iter().map(|command| (*command, None));
    let why_not = why_not.chain(MAY_NOT.iter().map(|(command, why)| (*command, Some(*why))));
    let mut wrong = vec![];
    for (command, why_not) in why_not {
        vm.command(command, PATIENCE)?;
        let inside = format!(
            "echo '{command}' >/run/probe; rm -f /run/said; systemctl start {SERVICE} 2>/dev/null && echo may; cat /run/said"
        );
        let said = vm.command(&inside, PATIENCE)?;
        println!("  {command}: {said}");
        let is_right = match why_not {
            None => said.starts_with("may"),
            Some(why) => said.contains(why),
        };
        if !is_right {
            wrong.push(format!("`{command}`: {said}"));
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(Failure(format!("in the sandbox\n{}", wrong.join("\n"))))
    }
}

/// A machine of Google: its document has the names that the metadata service gives.
fn asks_the_metadata_service(vm: &mut Vm) -> Result<()> {
    let tools = "export TPM2TOOLS_TCTI=device:/dev/tpmrm0";
    let define = "tpm2_nvdefine -C o -s 24 -a 'ownerwrite|ownerread|authread|no_da'";
    let write = format!("printf '{TEMPLATE}' | tpm2_nvwrite -C o -i - {TEMPLATE_INDEX}");
    vm.command(
        &format!("{tools} && {define} {TEMPLATE_INDEX} && {write}"),
        PATIENCE,
    )?;
    serve_evidence_of(vm, "gcp-sev-es")?;
    let document = document(vm)?;
    let info = document["InstanceInfo"].as_str().unwrap_or_default();
    let info = STANDARD.decode(info).context("read the instance info")?;
    let info = String::from_utf8_lossy(&info);
    same(
        &info,
        r#"{"zone":"europe-west3-b","project_id":"example","instance_name":"node-1"}"#,
    )
}

/// A machine of Amazon with SEV-SNP.
fn asks_the_hardware(vm: &mut Vm, no_hardware: &str) -> Result<()> {
    serve_evidence_of(vm, "aws-sev-snp")?;
    match document(vm) {
        Err(Failure(why)) if why.contains(no_hardware) => {
            println!("  {why}");
            Ok(())
        }
        Err(Failure(why)) => Err(Failure(format!("{no_hardware:?} is not in: {why}"))),
        Ok(document) => Err(Failure(format!("there is a document: {document}"))),
    }
}

/// Has the unit run `bootstrapper` for a variant, and starts a join service of this variant.
fn serve_evidence_of(vm: &mut Vm, variant: &str) -> Result<()> {
    let program = format!("ExecStart=/usr/bin/bootstrapper --serve-evidence --variant={variant}");
    run_instead(vm, &[&program])?;
    start_join_service(vm, variant)
}

/// Has the unit run another program, by a drop-in with these lines. All other lines of the unit stay.
fn run_instead(vm: &mut Vm, lines: &[&str]) -> Result<()> {
    let folder = format!("/run/systemd/system/{SERVICE}.d");
    let lines = lines.join("' '");
    for command in [
        // it would start the unit again; after the attempts there is none
        "systemctl stop join || true",
        &format!("systemctl stop {SERVICE} && mkdir -p {folder}"),
        &format!("printf '%s\\n' [Service] ExecStart= '{lines}' >{folder}/program.conf"),
        "systemctl daemon-reload",
    ] {
        vm.command(command, PATIENCE)?;
    }
    Ok(())
}

/// Starts a join service that proves the machine by its host's evidence. It needs no key service until a node comes.
fn start_join_service(vm: &mut Vm, variant: &str) -> Result<()> {
    let command = format!(
        "systemd-run --quiet --collect --unit=join /run/tools/join-service --attestation-variant {variant} --config /run/tools/config \
         --key-service 127.0.0.1:1 --key-service-auth none --evidence /run/firstlight/evidence/socket --listen 0.0.0.0:{JOIN} \
         --verification-http 0.0.0.0:{DOCUMENTS}"
    );
    vm.command(&command, PATIENCE).map(drop)
}

/// Returns the document that the join service gets from its host. The error is the join service's message.
fn document(vm: &mut Vm) -> Result<Value> {
    let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).build().into();
    let nonce = URL_SAFE.encode([7; 32]);
    let url = format!("http://127.0.0.1:{}/?nonce={nonce}", vm.ports[&DOCUMENTS]);
    let end = Instant::now() + Duration::from_secs(60);
    let answer = loop {
        match agent.get(&url).call() {
            // no server listens there yet
            Err(error) if !matches!(error, ureq::Error::StatusCode(_)) && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(500));
            }
            answer => break answer,
        }
    };
    let body = answer.and_then(|mut answer| answer.body_mut().read_to_string());
    let Ok(body) = body else {
        let said = vm.command(
            "journalctl --sync; journalctl --unit=join --output=cat --lines=1",
            PATIENCE,
        )?;
        return Err(Failure(format!("{}: {said}", body.unwrap_err())));
    };
    let answer: Value = serde_json::from_str(&body).context("read the answer")?;
    let document = STANDARD.decode(answer["data"].as_str().unwrap_or_default());
    let document = document.context("read the answer")?;
    serde_json::from_slice(&document).context("read the document")
}

fn same(got: &str, expected: &str) -> Result<()> {
    if got == expected {
        Ok(())
    } else {
        Err(Failure(format!("expected {expected:?}, got {got:?}")))
    }
}
