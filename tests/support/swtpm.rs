//! A software TPM on loopback, and tpm2-tools as a second opinion about it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// swtpm takes this long to start on no machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// One machine's TPM. It keeps its keys over [`Swtpm::reboot`], and its PCRs do not.
pub struct Swtpm {
    state: TempDir,
    address: Ipv4Addr,
    port: u16,
    process: Child,
}

impl Swtpm {
    pub fn start() -> Swtpm {
        Swtpm::start_at(Ipv4Addr::LOCALHOST)
    }

    /// At an address of this machine.
    pub fn start_at(address: Ipv4Addr) -> Swtpm {
        let state = TempDir::new().unwrap();
        // between choosing ports and using them another test may take them
        for _ in 0..50 {
            let port = free_pair(address);
            if let Some(process) = run(&state, address, port) {
                return Swtpm {
                    state,
                    address,
                    port,
                    process,
                };
            }
        }
        panic!("swtpm does not start: is it installed?");
    }

    /// As `firstlight`, and tpm2-tools, take it.
    pub fn location(&self) -> String {
        format!("swtpm:host={},port={}", self.address, self.port)
    }

    /// Power off and on.
    #[allow(dead_code)] // not by every test
    pub fn reboot(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(process) = run(&self.state, self.address, self.port) {
                self.process = process;
                return;
            }
            assert!(Instant::now() < end, "swtpm does not come back");
        }
    }

    /// Runs one of tpm2-tools against this TPM; gives its standard output.
    #[allow(dead_code)] // not by every test
    pub fn tool(&self, name: &str, arguments: &[&str]) -> String {
        let output = Command::new(name)
            .args(arguments)
            .env("TPM2TOOLS_TCTI", self.location())
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{name} {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn run(state: &TempDir, address: Ipv4Addr, port: u16) -> Option<Child> {
    // a descriptor that this process left open in it would keep another TPM's conversation open for ever
    let close_all = "for fd in /proc/self/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval \"exec $fd>&-\"; done; exec \"$@\"";
    let mut process = Command::new("bash")
        .args(["-c", close_all, "bash", "swtpm"])
        .args([
            "socket",
            "--tpm2",
            "--flags",
            "not-need-init,startup-clear",
            "--tpmstate",
        ])
        .arg(format!("dir={}", state.path().display()))
        .args([
            "--server",
            &format!("type=tcp,port={port},bindaddr={address}"),
        ])
        .args([
            "--ctrl",
            &format!("type=tcp,port={},bindaddr={address}", port + 1),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if process.try_wait().ok()?.is_some() {
            return None;
        }
        if listens(address, port) && listens(address, port + 1) {
            return Some(process);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = process.kill();
    None
}

/// Asked of the kernel: swtpm takes a connection that comes and goes for its client, and may hang over it.
fn listens(address: Ipv4Addr, port: u16) -> bool {
    // the address as it lies in memory, in network order, read as a number
    let listening = format!(
        "{:08X}:{port:04X} 00000000:0000 0A",
        u32::from_ne_bytes(address.octets())
    );
    std::fs::read_to_string("/proc/net/tcp")
        .unwrap()
        .contains(&listening)
}

/// Two ports in a row that nobody has now.
fn free_pair(address: Ipv4Addr) -> u16 {
    let bind = |port| TcpListener::bind(SocketAddr::from((address, port)));
    loop {
        let first = bind(0).unwrap().local_addr().unwrap().port();
        if first < u16::MAX && bind(first + 1).is_ok() {
            return first;
        }
    }
}
