//! Compares how long three programs take to unlock a disk in an initrd: Firstlight with its whole attested exchange, clevis with
//! tang, and systemd-cryptsetup with its TPM token. The guest, the kernel, dracut, and the network by systemd-networkd are the
//! same.
//!
//! `cargo bench --bench unlockers` makes the initrds with tools/compare-initrds.sh, which prints their sizes, and boots each three
//! times. A time ends when systemd counts the unit that unlocks the disk as started. For Firstlight that includes the mount and the
//! measurement into PCR 15. It needs `make build`'s programs. With emulation in place of KVM, compare the columns and not the times.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use machine::flow::{self, FRESH_NODE, PATIENCE, Setting};
use machine::initramfs::{self, Overlay};
use machine::vm::{Machine, Vm};
use machine::{Context, Failure, Result, dist, root, script};

const BOOTS: usize = 3;
const DISK: u64 = 64 << 20;
/// The port at which a guest finds tang, and the UUID of the disks. tools/compare-initrds.sh has written them into the disks' headers.
const TANG: u16 = 7500;
const UUID: &str = "5ec1e7a0-0000-4000-8000-000000000001";
const CLOUD: &str = "constel.csp=qemu constel.attestation-variant=qemu-vtpm";
const CRYPTSETUP: &str = "systemd-cryptsetup@state.service";

fn main() -> ExitCode {
    // `cargo test --all-targets` also calls benches, without --bench. That must not boot a machine.
    if !std::env::args().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    match compare() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn compare() -> Result<()> {
    let folder = root().join("target/unlockers");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).context("make a folder for the initrds")?;
    let folder = fs::canonicalize(folder).context("find the folder of the initrds")?;
    let made = Command::new(root().join("tools/compare-initrds.sh"))
        .args([&dist("unlock")?, &folder])
        .status()
        .context("run tools/compare-initrds.sh")?;
    if !made.success() {
        return Err(Failure(format!(
            "tools/compare-initrds.sh ended with {made}"
        )));
    }
    script(
        "initramfs/os-disk.sh",
        &[&folder.join("root.disk"), &dist("bootstrapper")?],
    )?;

    println!(
        "\n| seconds until the disk is unlocked | from network-online | from the first address | from the start of its unit |"
    );
    println!("|---|---:|---:|---:|");
    row(
        "Firstlight, with the attested exchange",
        firstlight(&folder)?,
    );
    row("clevis with tang", clevis(&folder)?);
    row("systemd-cryptsetup with its TPM2 token", token(&folder)?);
    Ok(())
}

fn firstlight(folder: &Path) -> Result<Vec<Times>> {
    let unit = "firstlight-unlock.service";
    let machine = machine(folder, "firstlight", CLOUD, &report(unit)?)?;
    let mut setting = Setting::around(machine, DISK, FRESH_NODE)?;
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    setting.start_services()?;
    let boot = |_| {
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for(" ticket:", PATIENCE)?;
        times(vm)
    };
    (0..BOOTS).map(boot).collect()
}

fn clevis(folder: &Path) -> Result<Vec<Times>> {
    let words = format!("rd.luks.name={UUID}=state");
    let mut machine = machine(folder, "clevis", &words, &report(CRYPTSETUP)?)?;
    machine.add_copy_of_disk("state", &folder.join("clevis.disk"))?;
    machine.host_ports = [(TANG, serve_tang(folder.join("tangd"))?)].into();
    (0..BOOTS).map(|_| times(machine.boot()?)).collect()
}

/// Only the machine's own TPM can make the token, so a boot before the others makes it.
fn token(folder: &Path) -> Result<Vec<Times>> {
    let words = format!("rd.luks.name={UUID}=state rd.luks.options={UUID}=tpm2-device=auto");
    let mut machine = machine(folder, "token", "rd.luks=0", &enrolment(folder)?)?;
    machine.add_copy_of_disk("state", &folder.join("token.disk"))?;
    let mut vm = machine.boot()?;
    vm.console.wait_for("the token is made", PATIENCE)?;
    vm.wait_off(PATIENCE)?;
    drop(vm);

    machine.command_line = machine.command_line.replace("rd.luks=0", &words);
    initrd(folder, "token", &machine, &report(CRYPTSETUP)?)?;
    (0..BOOTS).map(|_| times(machine.boot()?)).collect()
}

/// A machine that boots the initrd `name`.
fn machine(folder: &Path, name: &str, words: &str, overlay: &Overlay) -> Result<Machine> {
    let mut machine = Machine::new(&format!("unlockers-{name}"))?;
    machine.memory = 1024;
    let root = "root=LABEL=root rw rootfstype=ext4 init=/sbin/init";
    machine.command_line = format!("{} {root} {words}", machine.command_line);
    machine.add_copy_of_disk("root", &folder.join("root.disk"))?;
    initrd(folder, name, &machine, overlay)?;
    Ok(machine)
}

fn initrd(folder: &Path, name: &str, machine: &Machine, overlay: &Overlay) -> Result<()> {
    fs::copy(folder.join(name), machine.initramfs()).context("copy an initrd")?;
    initramfs::append(&machine.initramfs(), overlay)
}

/// A unit that starts after `unit` and prints systemd's times of `unit`, in seconds since the kernel started.
fn report(unit: &str) -> Result<Overlay> {
    let script = format!(
        "#!/bin/sh\n\
         show() {{ echo \"FIGURE $1 $(systemctl show --value --property=\"$3\" \"$2\")\" >/dev/console; }}\n\
         show start {unit} ExecMainStartTimestampMonotonic\n\
         show online network-online.target ActiveEnterTimestampMonotonic\n\
         journalctl -o short-monotonic -u systemd-networkd | sed -n 's/^\\[ *\\([0-9]*\\)\\.\\([0-9]*\\)\\].*DHCPv4 address.*/FIGURE address \\1\\2/p' >/dev/console\n\
         show unlocked {unit} ActiveEnterTimestampMonotonic\n"
    );
    let mut overlay = Overlay::default();
    unit_before_root(
        &mut overlay,
        &script,
        &format!(
            "After={unit} network-online.target\n\
             Wants=network-online.target systemd-networkd.service systemd-networkd-wait-online.service\n"
        ),
    );
    // the network of all initrds is that of Firstlight's module
    let network = "initramfs/dracut/95firstlight/zz-firstlight.network";
    let network = fs::read(root().join(network)).context("read the network's settings")?;
    overlay.file("/etc/systemd/network/zz-firstlight.network", 0o644, network);
    Ok(overlay)
}

/// A unit that makes a token of the machine's TPM for the disk, and switches off.
fn enrolment(folder: &Path) -> Result<Overlay> {
    let debian = script(
        "tools/debian.sh",
        &[Path::new("bookworm"), Path::new("others")],
    )?;
    let program = Path::new(&debian).join("root/usr/bin/systemd-cryptenroll");
    let program = fs::read(program).context("read systemd-cryptenroll")?;
    let key = fs::read(folder.join("key")).context("read the disk's key")?;
    let script = "#!/bin/sh\n\
        modprobe dm-crypt; udevadm wait /dev/disk/by-id/virtio-state /dev/tpmrm0\n\
        systemd-cryptenroll --unlock-key-file=/key --tpm2-device=auto --tpm2-pcrs=7 /dev/disk/by-id/virtio-state \
        >/dev/console 2>&1 && echo the token is made >/dev/console\n\
        systemctl --force --force poweroff\n";
    let mut overlay = Overlay::default();
    overlay
        .file("/usr/bin/systemd-cryptenroll", 0o755, program)
        .file("/key", 0o600, key);
    unit_before_root(&mut overlay, script, "After=sysinit.target\n");
    Ok(overlay)
}

/// Adds a script that runs before the initrd counts the root file system as mounted.
fn unit_before_root(overlay: &mut Overlay, script: &str, order: &str) {
    let unit = format!(
        "[Unit]\nDefaultDependencies=no\nBefore=initrd-root-fs.target\n{order}\
         [Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bench\n"
    );
    overlay
        .file("/bench", 0o755, script)
        .file("/etc/systemd/system/bench.service", 0o644, unit)
        .file(
            "/etc/systemd/system/initrd-root-fs.target.d/bench.conf",
            0o644,
            "[Unit]\nRequires=bench.service\n",
        );
}

/// Serves tang on a port of the host, with a process for each connection. Returns the port.
fn serve_tang(program: PathBuf) -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listen for tang")?;
    let port = listener.local_addr().context("listen for tang")?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let Ok(output) = stream.try_clone() else {
                continue;
            };
            let (input, output) = (
                std::os::fd::OwnedFd::from(stream),
                std::os::fd::OwnedFd::from(output),
            );
            let mut tangd = Command::new(&program);
            tangd.stdin(input).stdout(output).stderr(Stdio::null());
            if let Ok(mut tangd) = tangd.spawn() {
                thread::spawn(move || tangd.wait());
            }
        }
    });
    Ok(port)
}

/// Microseconds since the kernel started.
#[derive(Clone, Copy)]
struct Times {
    start: Option<u64>,
    online: Option<u64>,
    address: Option<u64>,
    unlocked: u64,
}

fn times(mut vm: Vm) -> Result<Times> {
    vm.console.wait_for("FIGURE unlocked ", PATIENCE)?;
    let lines = vm.console.lines();
    let time = |name: &str| {
        let prefix = format!("FIGURE {name} ");
        let line = lines
            .iter()
            .find_map(|line| line.text.strip_prefix(&prefix));
        line.and_then(|time| time.trim().parse().ok())
            .filter(|time| *time != 0)
    };
    Ok(Times {
        start: time("start"),
        online: time("online"),
        address: time("address"),
        unlocked: time("unlocked")
            .ok_or_else(|| Failure("the disk was not unlocked".to_owned()))?,
    })
}

/// Prints the median of each column, and its range. A boot without the event of an address used no network.
fn row(what: &str, times: Vec<Times>) {
    let column = |from: &dyn Fn(&Times) -> Option<u64>| {
        let seconds = |times: &Times| Some((times.unlocked as f64 - from(times)? as f64) / 1e6);
        let Some(mut all) = times.iter().map(seconds).collect::<Option<Vec<f64>>>() else {
            return "".to_owned();
        };
        all.sort_by(f64::total_cmp);
        format!(
            "{:.2} ({:.2} to {:.2})",
            all[all.len() / 2],
            all[0],
            all[all.len() - 1]
        )
    };
    let online = column(&|times| times.address.and(times.online));
    println!(
        "| {what} | {online} | {} | {} |",
        column(&|times| times.address),
        column(&|times| times.start)
    );
}
