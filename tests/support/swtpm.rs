//! A software TPM on loopback, and tpm2-tools to check its state independently.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Time limit for the start of swtpm.
const PATIENCE: Duration = Duration::from_secs(20);

/// SHA-256 of the two events that a firmware measures: "Calling EFI Application from Boot Option" into PCR 4, and then four zero
/// bytes into each of PCR 1 to 7 (TCG PC Client Platform Firmware Profile, EV_EFI_ACTION and EV_SEPARATOR).
const CALLING: [u8; 32] = [
    0x3d, 0x67, 0x72, 0xb4, 0xf8, 0x4e, 0xd4, 0x75, 0x95, 0xd7, 0x2a, 0x2c, 0x4c, 0x5f, 0xfd, 0x15,
    0xf5, 0xbb, 0x72, 0xc7, 0x50, 0x7f, 0xe2, 0x6f, 0x2a, 0xae, 0xe2, 0xc6, 0x9d, 0x56, 0x33, 0xba,
];
const SEPARATOR: [u8; 32] = [
    0xdf, 0x3f, 0x61, 0x98, 0x04, 0xa9, 0x2f, 0xdb, 0x40, 0x57, 0x19, 0x2d, 0xc4, 0x3d, 0xd7, 0x48,
    0xea, 0x77, 0x8a, 0xdc, 0x52, 0xbc, 0x49, 0x8c, 0xe8, 0x05, 0x24, 0xc0, 0x14, 0xb8, 0x11, 0x19,
];
/// PCR 4 of the SHA-256 bank after both events.
pub const PCR_4: [u8; 32] = [
    0x7a, 0x94, 0xff, 0xe8, 0xa7, 0x72, 0x9a, 0x56, 0x6d, 0x3d, 0x3c, 0x57, 0x7f, 0xcb, 0x4b, 0x6b,
    0x1e, 0x67, 0x1f, 0x31, 0x54, 0x03, 0x75, 0xf8, 0x0e, 0xae, 0x63, 0x82, 0xab, 0x78, 0x5e, 0x35,
];
/// TPM2_PCR_Extend (TPM 2.0 part 3, §22.2) for the SHA-256 bank: its bytes before the number of the PCR, and those between this
/// number and the digest. It has the size of the command, a session with an empty password, and one SHA-256 digest.
const EXTEND: [u8; 10] = [0x80, 2, 0, 0, 0, 65, 0, 0, 1, 0x82];
const ONE_DIGEST: [u8; 19] = [
    0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0x0b,
];

/// The TPM of one machine, whose firmware has measured the start of a boot loader. [`Swtpm::reboot`] keeps its keys and resets its PCRs.
pub struct Swtpm {
    state: PathBuf,
    /// The folder of the state, which is deleted with this value; `None` if it is the caller's.
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
        // another test may take the ports before swtpm does
        for _ in 0..50 {
            let port = free_pair(address);
            if let Some(process) = run(&state, address, port) {
                measure_firmware(address, port);
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

    /// Switches the power off and on, and measures what a firmware does.
    #[allow(dead_code)] // not used by every test
    pub fn reboot(&mut self) {
        self.reset();
        measure_firmware(self.address, self.port);
    }

    /// Switches the power off and on. The PCRs then have the values that they have with a firmware that does not use the TPM, or
    /// none of its banks.
    #[allow(dead_code)] // not used by every test
    pub fn reset(&mut self) {
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

/// Forwards between programs and a TPM, on two ports of its own: one for commands, one for swtpm's control channel. Its threads end
/// with the test.
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
    // a descriptor that a child process inherits would keep the connection of another TPM open
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

/// Measures into the SHA-256 bank what a firmware does before it starts a boot loader.
fn measure_firmware(address: Ipv4Addr, port: u16) {
    let mut tpm = TcpStream::connect((address, port)).unwrap();
    tpm.set_read_timeout(Some(PATIENCE)).unwrap();
    // PCR 0 stays zero: tests with the events of a cloud's firmware extend it
    let separators = (1..8u32).map(|pcr| (pcr, SEPARATOR));
    for (pcr, event) in [(4, CALLING)].into_iter().chain(separators) {
        let command = [&EXTEND[..], &pcr.to_be_bytes(), &ONE_DIGEST, &event].concat();
        tpm.write_all(&command).unwrap();
        // the header: tag, size, code; then an empty parameter area and the session's answer
        let mut response = [0; 19];
        tpm.read_exact(&mut response).unwrap();
        assert_eq!(response[6..10], [0; 4], "PCR {pcr}");
    }
}

/// Returns whether swtpm listens, from the socket table of the kernel, because a test connection can make swtpm hang.
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
