//! Faults that keep a machine from opening its disk. The console names each within seconds, and no operating system starts while
//! the disk is closed.

use super::{
    CLOUD, DRACUT, DRACUT_13, INITRAMFS_TOOLS, INITRAMFS_TOOLS_13, INITRAMFS_TOOLS_UBUNTU, Maker,
    NETWORK_MANAGER, setting,
};
use bootstrapper::state::state_disk::set_peers;
use disk::luks::Peers;
use machine::flow::{self, PATIENCE, Setting};
use machine::initramfs::Overlay;
use machine::vm::{CARD, HOST, HOST_IPV6, Network, Vm};
use machine::{Context, Failure, Result, free_port};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use support::swtpm::Swtpm;

/// Ports of the metadata service and of a control plane's join service, as a node knows them.
const METADATA: u16 = 8080;
const JOIN: u16 = 30090;
/// Locked by the machine that uses the join service's port of `::1` and the DNS port of `127.0.0.1`; only one can.
static PORTS: Mutex<()> = Mutex::new(());

/// A test of `$what` with each initrd, whose machine and console have the name `$name`.
macro_rules! with_each {
    ($what:ident: $($test:ident $name:literal $maker:expr),+ $(,)?) => {
        mod $what {
            use super::*;
            $(
                #[test]
                #[ignore = "boots a machine: make test-images"]
                fn $test() -> Result<()> {
                    super::$what($name, $maker)
                }
            )+
        }
    };
}

with_each! { names_what_a_new_machine_lacks:
    dracut "dracut-new" DRACUT,
    debian_13s_dracut "dracut-13-new" DRACUT_13,
    network_manager "network-manager-new" NETWORK_MANAGER,
    initramfs_tools "initramfs-tools-new" INITRAMFS_TOOLS,
    debian_13s_initramfs_tools "initramfs-tools-13-new" INITRAMFS_TOOLS_13,
    ubuntus_initramfs_tools "initramfs-tools-ubuntu-new" INITRAMFS_TOOLS_UBUNTU,
}

with_each! { names_what_keeps_a_member_from_its_key:
    dracut "dracut-member" DRACUT,
    debian_13s_dracut "dracut-13-member" DRACUT_13,
    network_manager "network-manager-member" NETWORK_MANAGER,
    initramfs_tools "initramfs-tools-member" INITRAMFS_TOOLS,
    debian_13s_initramfs_tools "initramfs-tools-13-member" INITRAMFS_TOOLS_13,
    ubuntus_initramfs_tools "initramfs-tools-ubuntu-member" INITRAMFS_TOOLS_UBUNTU,
}

with_each! { says_what_is_strange:
    dracut "dracut-strange" DRACUT,
    debian_13s_dracut "dracut-13-strange" DRACUT_13,
    network_manager "network-manager-strange" NETWORK_MANAGER,
    initramfs_tools "initramfs-tools-strange" INITRAMFS_TOOLS,
    debian_13s_initramfs_tools "initramfs-tools-13-strange" INITRAMFS_TOOLS_13,
    ubuntus_initramfs_tools "initramfs-tools-ubuntu-strange" INITRAMFS_TOOLS_UBUNTU,
}

with_each! { starts_no_system_and_no_shell_when_unlock_crashes:
    dracut "dracut-crash" DRACUT,
    debian_13s_dracut "dracut-13-crash" DRACUT_13,
    initramfs_tools "initramfs-tools-crash" INITRAMFS_TOOLS,
    debian_13s_initramfs_tools "initramfs-tools-13-crash" INITRAMFS_TOOLS_13,
    ubuntus_initramfs_tools "initramfs-tools-ubuntu-crash" INITRAMFS_TOOLS_UBUNTU,
}

with_each! { does_what_onfail_says:
    dracut "dracut-onfail" DRACUT,
    debian_13s_dracut "dracut-13-onfail" DRACUT_13,
    initramfs_tools "initramfs-tools-onfail" INITRAMFS_TOOLS,
    debian_13s_initramfs_tools "initramfs-tools-13-onfail" INITRAMFS_TOOLS_13,
    ubuntus_initramfs_tools "initramfs-tools-ubuntu-onfail" INITRAMFS_TOOLS_UBUNTU,
}

fn starts_no_system_and_no_shell_when_unlock_crashes(name: &str, maker: Maker) -> Result<()> {
    let mut overlay = Overlay::default();
    let crashes = *b"#!/bin/sh\necho unlock crashes >/dev/console\nkill -SEGV $$\n";
    overlay.file("/usr/lib/firstlight/unlock", 0o755, crashes);
    let mut setting = setting(name, maker, CLOUD, &overlay)?;
    // for initramfs-tools this word forbids the shell, which must be forbidden also without the word
    let command_line = setting.machine.command_line.replace("panic=-1", "");
    setting.machine.command_line = command_line;
    let mut vm = setting.machine.boot()?;
    vm.console.wait_for("unlock crashes", PATIENCE)?;
    // a shell would wait for input; QEMU ends when the machine restarts
    vm.wait_off(PATIENCE)?;
    no_system(&vm)
}

/// A machine without a TPM restarts, or does what the kernel command line asks for.
fn does_what_onfail_says(name: &str, maker: Maker) -> Result<()> {
    let mut setting = setting(name, maker, CLOUD, &Overlay::default())?;
    setting.machine.tpm = false;
    let why = "error: this machine has no TPM";

    let mut vm = boot(&mut setting, "")?;
    said(&mut vm, why)?;
    said(&mut vm, "it restarts in 10 s")?;
    // QEMU ends when the machine restarts
    vm.wait_off(PATIENCE)?;
    no_system(&vm)?;

    let mut vm = boot(&mut setting, "firstlight.onfail=wait")?;
    said(&mut vm, why)?;
    said(&mut vm, "it waits; correct the cause, then reset it")?;
    // for people who read its console later
    said(&mut vm, why)?;
    no_system(&vm)?;
    vm.cut_power();

    // with this word, initramfs-tools restarts the machine instead of starting a shell
    let command_line = setting.machine.command_line.replace("panic=-1", "");
    setting.machine.command_line = command_line;
    // without a password of root, dracut 106 opens a shell only if it is forced to
    let forced = "SYSTEMD_SULOGIN_FORCE=1";
    let shell = format!("firstlight.onfail=shell rd.shell=1 {forced}");
    let mut vm = boot(&mut setting, &shell)?;
    said(&mut vm, "the initrd decides")?;
    // what is typed before the shell is ready may be lost
    let answer = (0..10).find_map(|_| {
        vm.type_line("echo shell-$((6*7))").ok()?;
        let limit = Duration::from_secs(30);
        vm.console.wait_for("shell-42", limit).ok()
    });
    if answer.is_none() {
        return Err(Failure(format!("{name}: no shell answers")));
    }
    no_system(&vm)
}

/// Each boot lacks one thing less: first the TPM, then a correct setting, then the kernel's modules for the disk, then the disk
/// itself in time.
fn names_what_a_new_machine_lacks(name: &str, maker: Maker) -> Result<()> {
    let words = format!("{CLOUD} firstlight.onfail=poweroff");
    let mut setting = setting(name, maker, &words, &Overlay::default())?;

    setting.machine.tpm = false;
    stays_closed(&mut setting, "", &["error: this machine has no TPM"])?;
    setting.machine.tpm = true;

    let wrong = "firstlight.onfial=wait";
    let why = "error: kernel command line: firstlight.onfial is not a setting";
    stays_closed(&mut setting, wrong, &[why])?;

    // Ubuntu's kernel has `loop` built in
    let is_built_in = |module: &&str| *module == "loop" && name.contains("ubuntu");
    let modules = ["loop", "dm_integrity", "dm_crypt"].into_iter();
    for module in modules.filter(|module| !is_built_in(module)) {
        let why = format!("the kernel module {module} is not loaded: the initrd may lack it");
        stays_closed(&mut setting, &format!("module_blacklist={module}"), &[&why])?;
    }

    setting.machine.unplugged = vec!["state".to_owned()];
    let mut vm = setting.machine.boot()?;
    let late = "waiting: for a disk with serial number \"state\"";
    let after_20_s = |line: &str| {
        let seconds = line
            .rsplit_once(" since ")
            .and_then(|(_, time)| time.strip_suffix(" s"));
        line.contains(late) && seconds.is_some_and(|n| n.parse().is_ok_and(|n: u32| n >= 20))
    };
    vm.console
        .wait_until("20 s without a disk", PATIENCE, after_20_s)?;
    no_system(&vm)?;
    vm.plug("state")?;
    for step in [" formatted:", " mounted:", " ready:"] {
        vm.console.wait_for(step, PATIENCE)?;
    }
    Ok(())
}

/// Each boot lacks another thing: the metadata service, DHCP, a driver for its network card. Without a join service the operator
/// brings the key. It gets the key with a static address by a name, and with IPv6 only.
fn names_what_keeps_a_member_from_its_key(name: &str, maker: Maker) -> Result<()> {
    let mut setting = setting(name, maker, CLOUD, &Overlay::default())?;
    let (mut vm, cluster) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    flow::recovered(&mut setting, &cluster)?.cut_power();
    setting.start_services()?;
    let gives_up = "firstlight.timeout=25 firstlight.onfail=poweroff";
    let no_key = "error: no key for the state disk in time: ";

    // the disk's header has the address of the join service, so the boot needs no metadata service
    let metadata = setting.machine.host_ports.insert(METADATA, free_port()?);
    opens(&mut setting, "", " network: 10.42.0.15")?;
    forget_peers(&setting)?;
    let named = "load balancer: metadata: GET http://10.42.0.1:8080/endpoint: ";
    stays_closed(&mut setting, gives_up, &[named, no_key])?;
    setting
        .machine
        .host_ports
        .extend(metadata.map(|port| (METADATA, port)));

    setting.machine.network = Network::Nobody;
    stays_closed(
        &mut setting,
        gives_up,
        &["network: no IP address yet: ", no_key],
    )?;
    setting.machine.network = Network::Ipv4;

    // Ubuntu's kernel has the driver built in
    let without_driver = format!(
        "{gives_up} modprobe.blacklist=virtio_net initcall_blacklist=virtio_net_driver_init"
    );
    let named = "network: no network card works: no driver for virtio";
    stays_closed(&mut setting, &without_driver, &[named, no_key])?;

    let _only_one = PORTS.lock().unwrap_or_else(PoisonError::into_inner);
    setting.metadata.set_endpoint("lb.test");
    setting.metadata.set_peers("[]");
    forget_peers(&setting)?;
    let name_server = NameServer::start()?;
    let fixed = "net.ifnames=0 ip=10.42.0.77::10.42.0.2:255.255.0.0::eth0:none:10.42.0.2";
    opens(&mut setting, fixed, " network: 10.42.0.77")?;
    drop(name_server);

    setting.machine.network = Network::Ipv6;
    setting.metadata.set_endpoint(HOST_IPV6);
    forget_peers(&setting)?;
    let metadata = Relay::start(0, setting.metadata.address.port())?;
    let _join_service = Relay::start(JOIN, setting.machine.host_ports[&JOIN])?;
    let port = metadata.address.port();
    let words = format!("firstlight.metadata=http://[{HOST_IPV6}]:{port}");
    opens(&mut setting, &words, " network: fd42:")
}

/// A name that does not resolve; a card that comes late, with another name and without a link; a card without a route before the
/// right one; a TPM that accepts no more passwords; a wrong clock and no source of random numbers. Only the name and the TPM keep
/// the machine from its key.
fn says_what_is_strange(name: &str, maker: Maker) -> Result<()> {
    let mut overlay = Overlay::default();
    let link = *b"[Match]\nMACAddress=52:54:00:12:34:56\n[Link]\nName=wan0\n";
    overlay.file("/etc/systemd/network/10-wan.link", 0o644, link);
    let mut setting = setting(name, maker, CLOUD, &overlay)?;
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    setting.start_services()?;

    setting.metadata.set_endpoint("lb.invalid");
    setting.metadata.set_peers("[]");
    forget_peers(&setting)?;
    let gives_up = "firstlight.timeout=35 firstlight.onfail=poweroff";
    let named = "load balancer: cannot resolve the name lb.invalid: no usable answer: asked name server 10.42.0.3, ";
    let no_key = "error: no key for the state disk in time: ";
    stays_closed(&mut setting, gives_up, &[named, no_key])?;
    setting.metadata.set_endpoint(HOST);

    setting.machine.unplugged = vec![CARD.to_owned()];
    let mut vm = boot(&mut setting, "")?;
    said(&mut vm, "network: this machine has no network card")?;
    vm.plug(CARD)?;
    vm.set_link(false)?;
    said(&mut vm, "network: no IP address yet: wan0 has no link")?;
    vm.set_link(true)?;
    is_opened(vm, " network: 10.42.0.15")?;
    setting.machine.unplugged.clear();

    setting.machine.card_without_route = true;
    opens(&mut setting, "", " network: 10.")?;
    setting.machine.card_without_route = false;

    setting.machine.clock = Some("1970-01-01T00:00:10".to_owned());
    setting.machine.random = false;
    lock_out(&Swtpm::start_in(&setting.machine.tpm_state()))?;
    // systemd sets a clock that is behind to the time of its own build
    let clock = match maker.system {
        "initramfs-tools" => " clock: 1970-01-01T",
        _ => " clock: 20",
    };
    let why = "the TPM is in DA lockout mode (response code 0x921). A program tried wrong";
    stays_closed(&mut setting, gives_up, &[clock, why, no_key])?;
    let tpm = Swtpm::start_in(&setting.machine.tpm_state());
    tpm.tool("tpm2_dictionarylockout", &["--clear-lockout"]);
    tpm.tool("tpm2_shutdown", &["--clear"]);
    drop(tpm);
    opens(&mut setting, "", " network: 10.42.0.15")
}

/// Puts a TPM into lockout by a wrong password: for a day it accepts none of an object or index that counts failures.
fn lock_out(tpm: &Swtpm) -> Result<()> {
    let limits = [
        "--max-tries=1",
        "--recovery-time=86400",
        "--lockout-recovery-time=86400",
    ];
    tpm.tool(
        "tpm2_dictionarylockout",
        &[&["--setup-parameters"][..], &limits].concat(),
    );
    let index = [
        "0x1500001",
        "--size=4",
        "--attributes=authread|authwrite",
        "--index-auth=right",
    ];
    tpm.tool("tpm2_nvdefine", &index);
    let refused = Command::new("tpm2_nvread")
        .args(["0x1500001", "--auth=wrong"])
        .env("TPM2TOOLS_TCTI", tpm.location())
        .output()
        .context("run tpm2_nvread")?;
    assert!(!refused.status.success());
    let state = tpm.tool("tpm2_getcap", &["properties-variable"]);
    let is_locked = |line: &str| line.split_ascii_whitespace().eq(["inLockout:", "1"]);
    assert!(state.lines().any(is_locked), "{state}");
    tpm.tool("tpm2_shutdown", &["--clear"]);
    Ok(())
}

/// Boots with `words` on the kernel command line: the machine says each of `named`, in this order, and switches itself off.
fn stays_closed(setting: &mut Setting, words: &str, named: &[&str]) -> Result<()> {
    let mut vm = boot(setting, words)?;
    for text in named {
        said(&mut vm, text)?;
    }
    let what = "the state disk stays closed, so this machine does not boot: it powers off";
    vm.console.wait_for(what, PATIENCE)?;
    vm.wait_off(PATIENCE)?;
    no_system(&vm)
}

/// Boots with `words` on the kernel command line: the machine says `network`, and opens its disk.
fn opens(setting: &mut Setting, words: &str, network: &str) -> Result<()> {
    let vm = boot(setting, words)?;
    is_opened(vm, network)
}

/// Removes the addresses of join services from the disk's header, so that only the metadata service has them. The machine is off.
fn forget_peers(setting: &Setting) -> Result<()> {
    let written = set_peers(&setting.path("state.disk"), &Peers::default());
    written
        .map(drop)
        .map_err(|error| Failure(error.to_string()))
}

fn is_opened(mut vm: Vm, network: &str) -> Result<()> {
    for text in [network, " ticket:", " mounted:"] {
        said(&mut vm, text)?;
    }
    vm.cut_power();
    Ok(())
}

fn said(vm: &mut Vm, text: &str) -> Result<()> {
    let line = vm.console.wait_for(text, PATIENCE)?;
    println!("  {}", line.text);
    Ok(())
}

fn boot(setting: &mut Setting, words: &str) -> Result<Vm> {
    let usual = setting.machine.command_line.clone();
    setting.machine.command_line = format!("{usual} {words}");
    let vm = setting.machine.boot();
    setting.machine.command_line = usual;
    vm
}

fn no_system(vm: &Vm) -> Result<()> {
    let lines = vm.console.lines();
    let started = |text: &str| text.contains("firstlight[init]") || text.contains(" mounted:");
    match lines.iter().find(|line| started(&line.text)) {
        None => Ok(()),
        Some(line) => Err(Failure(format!(
            "the disk should stay closed: {}",
            line.text
        ))),
    }
}

/// A DNS server (RFC 1035) on port 53 of `127.0.0.1`, for which the tests need root, until it is dropped. A guest reaches it at
/// 10.42.0.2. Each name has the address [`HOST`].
struct NameServer {
    socket: UdpSocket,
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    fn start() -> Result<NameServer> {
        let socket =
            UdpSocket::bind((Ipv4Addr::LOCALHOST, 53)).context("serve DNS on 127.0.0.1")?;
        let is_ended = Arc::new(AtomicBool::new(false));
        let (serving, ended) = (socket.try_clone().context("serve DNS")?, is_ended.clone());
        let thread = thread::spawn(move || {
            let mut query = [0; 512];
            while let Ok((length, guest)) = serving.recv_from(&mut query)
                && !ended.load(Ordering::Relaxed)
            {
                let _ = serving.send_to(&answer(&query[..length]), guest);
            }
        });
        Ok(NameServer {
            socket,
            is_ended,
            thread: Some(thread),
        })
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.is_ended.store(true, Ordering::Relaxed);
        let _ = self
            .socket
            .local_addr()
            .map(|own| self.socket.send_to(&[], own));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Repeats the question; one of type A has an answer, which names the question by its place in the message.
fn answer(query: &[u8]) -> Vec<u8> {
    let end = query[12..]
        .iter()
        .position(|byte| *byte == 0)
        .map_or(0, |at| 12 + at + 5);
    let is_a = query[..end].ends_with(&[0, 1, 0, 1]);
    let header = [
        query[0],
        query[1],
        0x81,
        0x80,
        0,
        1,
        0,
        u8::from(is_a),
        0,
        0,
        0,
        0,
    ];
    let mut answer = [&header, &query[12..end]].concat();
    if is_a {
        let address = HOST.parse().unwrap_or(Ipv4Addr::UNSPECIFIED).octets();
        answer.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        answer.extend_from_slice(&address);
    }
    answer
}

/// Relays from a port of `::1` to a port of `127.0.0.1` until it is dropped.
struct Relay {
    address: SocketAddr,
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// `port` 0: a free one.
    fn start(port: u16, to: u16) -> Result<Relay> {
        let listener = TcpListener::bind(SocketAddr::from((Ipv6Addr::LOCALHOST, port)))
            .context(&format!("listen on port {port} of ::1"))?;
        let address = listener.local_addr().context("find the port")?;
        let is_ended = Arc::new(AtomicBool::new(false));
        let ended = is_ended.clone();
        let thread = thread::spawn(move || {
            for guest in listener.incoming().flatten() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                // if no server listens there, the guest sees the connection closed at once
                if let Ok(host) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)) {
                    both_ways(&guest, &host);
                }
            }
        });
        Ok(Relay {
            address,
            is_ended,
            thread: Some(thread),
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.is_ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn both_ways(guest: &TcpStream, host: &TcpStream) {
    for (from, to) in [(guest, host), (host, guest)] {
        if let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) {
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
        }
    }
}
