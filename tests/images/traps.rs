//! What keeps a machine from its disk: each is named on the console within seconds, and no operating system starts while the disk
//! is closed.

use super::{CLOUD, DRACUT, INITRAMFS_TOOLS, Maker, setting};
use machine::flow::{self, PATIENCE, Setting};
use machine::initramfs::Overlay;
use machine::vm::{HOST_IPV6, Network, Vm};
use machine::{Context, Failure, Result, free_port};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Ports of the metadata service and of a control plane's join service, as a node knows them.
const METADATA: u16 = 8080;
const JOIN: u16 = 30090;
/// Held by the one machine that reaches the join service's port of `::1`.
static IPV6: Mutex<()> = Mutex::new(());

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_dracut_names_what_a_new_machine_lacks() -> Result<()> {
    new_machine_lacks("dracut-new", DRACUT)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_initramfs_tools_names_what_a_new_machine_lacks() -> Result<()> {
    new_machine_lacks("initramfs-tools-new", INITRAMFS_TOOLS)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_dracut_names_what_keeps_a_member_from_its_key() -> Result<()> {
    member_lacks("dracut-member", DRACUT)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_initramfs_tools_names_what_keeps_a_member_from_its_key() -> Result<()> {
    member_lacks("initramfs-tools-member", INITRAMFS_TOOLS)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn no_system_and_no_shell_start_when_unlock_crashes() -> Result<()> {
    for (name, maker) in [
        ("dracut-crash", DRACUT),
        ("initramfs-tools-crash", INITRAMFS_TOOLS),
    ] {
        let mut overlay = Overlay::default();
        let crashes = *b"#!/bin/sh\necho unlock crashes >/dev/console\nkill -SEGV $$\n";
        overlay.file("/usr/lib/firstlight/unlock", 0o755, crashes);
        let mut setting = setting(name, maker, CLOUD, &overlay)?;
        // for initramfs-tools it forbids the shell, which is to be forbidden without it
        let command_line = setting.machine.command_line.replace("panic=-1", "");
        setting.machine.command_line = command_line;
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for("unlock crashes", PATIENCE)?;
        // a shell would wait for input; QEMU ends when the machine restarts
        vm.wait_off(PATIENCE)?;
        no_system(&vm)?;
    }
    Ok(())
}

/// The TPM, then a right setting, then a disk in time.
fn new_machine_lacks(name: &str, maker: Maker) -> Result<()> {
    let words = format!("{CLOUD} firstlight.onfail=poweroff");
    let mut setting = setting(name, maker, &words, &Overlay::default())?;

    setting.machine.tpm = false;
    stays_closed(&mut setting, "", &["error: this machine has no TPM"])?;
    setting.machine.tpm = true;

    let wrong = "firstlight.onfial=wait";
    let why = "error: kernel command line: firstlight.onfial is not a setting";
    stays_closed(&mut setting, wrong, &[why])?;

    setting.machine.unplugged = vec!["state".to_owned()];
    let mut vm = setting.machine.boot()?;
    let late = "waiting: for a disk with serial number \"state\"";
    vm.console.wait_for(late, PATIENCE)?;
    no_system(&vm)?;
    vm.plug("state")?;
    for step in [" formatted:", " mounted:", " ready:"] {
        vm.console.wait_for(step, PATIENCE)?;
    }
    Ok(())
}

/// The metadata service, then DHCP, then a driver for its network card. It gets the key with a static address, and with IPv6 only.
fn member_lacks(name: &str, maker: Maker) -> Result<()> {
    let mut setting = setting(name, maker, CLOUD, &Overlay::default())?;
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    setting.start_services()?;
    let gives_up = "firstlight.timeout=25 firstlight.onfail=poweroff";
    let no_key = "error: no key for the state disk in time: ";

    let metadata = setting.machine.host_ports.insert(METADATA, free_port()?);
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
        &["network: no address yet: ", no_key],
    )?;
    setting.machine.network = Network::Ipv4;

    let without_driver = format!("{gives_up} modprobe.blacklist=virtio_net");
    let named = "network: no network card works: no driver for virtio";
    stays_closed(&mut setting, &without_driver, &[named, no_key])?;

    let fixed = "net.ifnames=0 ip=10.42.0.77::10.42.0.2:255.255.0.0::eth0:none";
    opens(&mut setting, fixed, " network: 10.42.0.77")?;

    let _only_one = IPV6.lock().unwrap_or_else(PoisonError::into_inner);
    setting.machine.network = Network::Ipv6;
    setting.metadata.set_endpoint(HOST_IPV6);
    setting.metadata.set_peers("[]");
    let metadata = Relay::start(0, setting.metadata.address.port())?;
    let _join_service = Relay::start(JOIN, setting.machine.host_ports[&JOIN])?;
    let port = metadata.address.port();
    let words = format!("firstlight.metadata=http://[{HOST_IPV6}]:{port}");
    opens(&mut setting, &words, " network: fd42:")
}

/// Boots with `words` on the kernel command line: the machine says each of `named`, in this order, and switches itself off.
fn stays_closed(setting: &mut Setting, words: &str, named: &[&str]) -> Result<()> {
    let mut vm = boot(setting, words)?;
    for text in named {
        let line = vm.console.wait_for(text, PATIENCE)?;
        println!("  {}", line.text);
    }
    let what = "the state disk stays closed, so this machine does not boot: it powers off";
    vm.console.wait_for(what, PATIENCE)?;
    vm.wait_off(PATIENCE)?;
    no_system(&vm)
}

/// Boots with `words` on the kernel command line: the machine says `network`, and opens its disk.
fn opens(setting: &mut Setting, words: &str, network: &str) -> Result<()> {
    let mut vm = boot(setting, words)?;
    for text in [network, " ticket:", " mounted:"] {
        let line = vm.console.wait_for(text, PATIENCE)?;
        println!("  {}", line.text);
    }
    vm.cut_power();
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
                // where nobody listens, the guest sees the connection closed at once
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
