//! A software TPM on loopback, and tpm2-tools as a second opinion about it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// swtpm takes this long to start on no machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// One machine's TPM. It keeps its keys over [`Swtpm::reboot`], and its PCRs do not.
pub struct Swtpm {
    state: TempDir,
    port: u16,
    process: Child,
}

impl Swtpm {
    pub fn start() -> Swtpm {
        let state = TempDir::new().unwrap();
        // between choosing ports and using them another test may take them
        for _ in 0..50 {
            let port = free_pair();
            if let Some(process) = run(&state, port) {
                return Swtpm { state, port, process };
            }
        }
        panic!("swtpm does not start: is it installed?");
    }

    /// As `firstlight`, and tpm2-tools, take it.
    pub fn location(&self) -> String {
        format!("swtpm:host=127.0.0.1,port={}", self.port)
    }

    /// Power off and on.
    #[allow(dead_code)] // not by every test
    pub fn reboot(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(process) = run(&self.state, self.port) {
                self.process = process;
                return;
            }
            assert!(Instant::now() < end, "swtpm does not come back");
        }
    }

    /// Runs one of tpm2-tools against this TPM; gives its standard output.
    #[allow(dead_code)] // not by every test
    pub fn tool(&self, name: &str, arguments: &[&str]) -> String {
        let output = Command::new(name).args(arguments).env("TPM2TOOLS_TCTI", self.location()).output().unwrap();
        assert!(output.status.success(), "{name} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn run(state: &TempDir, port: u16) -> Option<Child> {
    // a descriptor that this process left open in it would keep another TPM's conversation open for ever
    let close_all =
        "for fd in /proc/self/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval \"exec $fd>&-\"; done; exec \"$@\"";
    let mut process = Command::new("bash")
        .args(["-c", close_all, "bash", "swtpm"])
        .args(["socket", "--tpm2", "--flags", "not-need-init,startup-clear", "--tpmstate"])
        .arg(format!("dir={}", state.path().display()))
        .args(["--server", &format!("type=tcp,port={port},bindaddr=127.0.0.1")])
        .args(["--ctrl", &format!("type=tcp,port={},bindaddr=127.0.0.1", port + 1)])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if process.try_wait().ok()?.is_some() {
            return None;
        }
        if listens(port) && listens(port + 1) {
            return Some(process);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = process.kill();
    None
}

/// Asked of the kernel: swtpm takes a connection that comes and goes for its client, and may hang over it.
fn listens(port: u16) -> bool {
    let listening = format!("0100007F:{port:04X} 00000000:0000 0A");
    std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&listening)
}

/// Two ports in a row that nobody has now.
fn free_pair() -> u16 {
    loop {
        let first = TcpListener::bind(address(0)).unwrap().local_addr().unwrap().port();
        if first < u16::MAX && TcpListener::bind(address(first + 1)).is_ok() {
            return first;
        }
    }
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}
