//! A software TPM on loopback, and tpm2-tools to check its state independently.

use std::io::Read;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Time limit for the start of swtpm.
const PATIENCE: Duration = Duration::from_secs(20);

/// The TPM of one machine. [`Swtpm::reboot`] keeps its keys and resets its PCRs.
pub struct Swtpm {
    state: PathBuf,
    /// Deletes the state, unless it is the caller's.
    _folder: Option<TempDir>,
    address: Ipv4Addr,
    port: u16,
    process: Child,
}

impl Swtpm {
    pub fn start() -> Swtpm {
        Swtpm::start_at(Ipv4Addr::LOCALHOST)
    }

    /// Starts a TPM on an address of this machine.
    pub fn start_at(address: Ipv4Addr) -> Swtpm {
        let folder = TempDir::new().unwrap();
        Swtpm::run(folder.path().to_owned(), Some(folder), address)
    }

    /// Starts a TPM whose state is in a folder of the caller.
    pub fn start_in(folder: &Path) -> Swtpm {
        Swtpm::run(folder.to_owned(), None, Ipv4Addr::LOCALHOST)
    }

    fn run(state: PathBuf, folder: Option<TempDir>, address: Ipv4Addr) -> Swtpm {
        // another test may use the ports before swtpm does
        for _ in 0..50 {
            let port = free_pair(address);
            if let Some(process) = run(&state, address, port) {
                return Swtpm {
                    state,
                    _folder: folder,
                    address,
                    port,
                    process,
                };
            }
        }
        panic!("swtpm does not start: is it installed?");
    }

    /// Returns the location in the notation of `firstlight` and tpm2-tools.
    pub fn location(&self) -> String {
        format!("swtpm:host={},port={}", self.address, self.port)
    }

    /// Switches the power off and on.
    #[allow(dead_code)] // not used by every test
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

    /// Runs a program of tpm2-tools with this TPM; returns its standard output.
    #[allow(dead_code)] // not used by every test
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

/// Stands between programs and a TPM, on two ports of its own: commands, and swtpm's control channel. Its threads end with the test.
pub struct Proxy {
    port: u16,
}

impl Proxy {
    /// `serve` gets the sockets of each connection for commands: that of the program, and one to the TPM.
    pub fn between(
        tpm: &Swtpm,
        mut serve: impl FnMut(TcpStream, TcpStream) + Send + 'static,
    ) -> Proxy {
        let to = move |port: u16| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let listen = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let theirs = tpm.port;
        let (commands, control, port) = loop {
            let port = free_pair(Ipv4Addr::LOCALHOST);
            if let (Ok(commands), Ok(control)) = (listen(port), listen(port + 1)) {
                break (commands, control, port);
            }
        };
        std::thread::spawn(move || {
            for client in commands.incoming() {
                serve(client.unwrap(), to(theirs));
            }
        });
        std::thread::spawn(move || {
            for client in control.incoming() {
                let (mut client, mut server) = (client.unwrap(), to(theirs + 1));
                let mut back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut back.0, &mut back.1));
                let _ = std::io::copy(&mut client, &mut server);
                let _ = server.shutdown(Shutdown::Both);
            }
        });
        Proxy { port }
    }

    /// Returns the location in the notation of `firstlight` and tpm2-tools.
    pub fn location(&self) -> String {
        format!("swtpm:host={},port={}", Ipv4Addr::LOCALHOST, self.port)
    }
}

/// Reads a command or response: tag, total length, code, the rest.
pub fn message(peer: &mut TcpStream) -> Option<Vec<u8>> {
    let mut message = vec![0; 10];
    peer.read_exact(&mut message).ok()?;
    let len = u32::from_be_bytes(message[2..6].try_into().unwrap());
    message.resize(len as usize, 0);
    peer.read_exact(&mut message[10..]).ok()?;
    Some(message)
}

fn run(state: &Path, address: Ipv4Addr, port: u16) -> Option<Child> {
    // an inherited descriptor would keep the connection of another TPM open
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
        .arg(format!("dir={}", state.display()))
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

/// Returns whether swtpm listens, from the socket table of the kernel: a test connection may hang swtpm.
fn listens(address: Ipv4Addr, port: u16) -> bool {
    // the address in network byte order, read as a number
    let listening = format!(
        "{:08X}:{port:04X} 00000000:0000 0A",
        u32::from_ne_bytes(address.octets())
    );
    std::fs::read_to_string("/proc/net/tcp")
        .unwrap()
        .contains(&listening)
}

/// Returns the first of two consecutive free ports.
fn free_pair(address: Ipv4Addr) -> u16 {
    let bind = |port| TcpListener::bind(SocketAddr::from((address, port)));
    loop {
        let first = bind(0).unwrap().local_addr().unwrap().port();
        if first < u16::MAX && bind(first + 1).is_ok() {
            return first;
        }
    }
}

/// Makes the state of a new TPM in `state`, as a vendor does: with endorsement keys (RSA with 2048 bits, P-384) whose certificates
/// are from the local authority in the folder `authority`, which is made if it does not exist.
pub fn manufacture(state: &Path, authority: &Path) {
    std::fs::create_dir_all(authority).unwrap();
    let file = |name: &str| authority.join(name).display().to_string();
    let (signing_key, certificate, serial) = (
        file("signing-key.pem"),
        file("certificate.pem"),
        file("serial"),
    );
    let local = format!(
        "statedir = {}\nsigningkey = {signing_key}\nissuercert = {certificate}\ncertserial = {serial}\n",
        authority.display()
    );
    std::fs::write(file("local.conf"), local).unwrap();
    std::fs::write(file("local.options"), "").unwrap();
    let setup = format!(
        "create_certs_tool = {}\ncreate_certs_tool_config = {}\ncreate_certs_tool_options = {}\n",
        local_authority(),
        file("local.conf"),
        file("local.options")
    );
    std::fs::write(file("setup.conf"), setup).unwrap();
    let output = Command::new("swtpm_setup")
        .args(["--tpm2", "--create-ek-cert", "--overwrite", "--tpmstate"])
        .arg(state)
        .args(["--config", &file("setup.conf")])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "swtpm_setup: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Returns the certificate of the root above the local authority in a folder: PEM.
pub fn root_of(authority: &Path) -> String {
    std::fs::read_to_string(authority.join("swtpm-localca-rootca-cert.pem")).unwrap()
}

/// Returns the certificate of the local authority in a folder, which signs the certificates of TPMs: PEM.
pub fn issuer_of(authority: &Path) -> String {
    std::fs::read_to_string(authority.join("certificate.pem")).unwrap()
}

/// Returns the program of the local authority, whose folder differs between distributions.
fn local_authority() -> &'static str {
    let paths = [
        "/usr/bin/swtpm_localca",
        "/usr/share/swtpm/swtpm-localca",
        "/usr/lib/swtpm/swtpm-localca",
    ];
    let found = paths.into_iter().find(|path| Path::new(path).exists());
    found.expect("swtpm_localca: is it installed?")
}
