//! The helpers of the boot tests and the demo: a virtual machine with a TPM under QEMU, the services around it, and the
//! record of its console. The demo itself is `src/bin/demo.rs`.
//!
//! - `vm`: one computer (its TPM's state, its disks) and one boot of it (QEMU, swtpm, console, forwarded ports)
//! - `console`: the serial line, each line with its time, and waiting for one
//! - `flow`: the machine of the demo, the services and the operator around it, and the demo itself
//! - `initramfs`: the small initramfs of `initramfs/`, and what a test appends to it
//! - `maker`: initrds of dracut and initramfs-tools
//! - `host`: inputs that a host can give a machine in addition to its disks
//! - `story`: the demo's own output, and the duration of each part
//! - `timeline`: the `firstlight[stage] 1.23s event` lines of a boot as a table
//! - `write_log`: what a machine wrote to its disk, and what the disk holds after a power cut
//! - `case`: a shell script that runs inside the machine and prints PASS or FAIL
//!
//! Two simultaneous runs share nothing: each has its own folder, and uses only ports of the host that were free.
#![forbid(unsafe_code)]

pub mod case;
pub mod console;
pub mod flow;
pub mod host;
pub mod initramfs;
pub mod maker;
pub mod story;
pub mod timeline;
pub mod vm;
pub mod write_log;

use std::collections::BTreeSet;
use std::fmt;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The reason why a test or the demo cannot continue: a sentence for the reader of its output.
pub struct Failure(pub String);

/// The result of most functions of this crate.
pub type Result<T> = std::result::Result<T, Failure>;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The same sentence: a test that returns `Result` prints its error by `Debug`.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Adds the attempted action to an error.
pub trait Context<T> {
    /// `what` reads as "cannot `what`: cause".
    fn context(self, what: &str) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: &str) -> Result<T> {
        self.map_err(|cause| Failure(format!("cannot {what}: {cause}")))
    }
}

/// The folder of the checkout.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// One of our programs: as `make build` made it, or from the folder that `FIRSTLIGHT_PROGRAMS` names.
pub fn dist(name: &str) -> Result<PathBuf> {
    let folder = std::env::var_os("FIRSTLIGHT_PROGRAMS");
    let folder = folder.map_or_else(|| root().join("target/dist"), PathBuf::from);
    let path = folder.join(name);
    if path.is_file() {
        Ok(path)
    } else {
        Err(Failure(format!(
            "there is no {}: run `make build` first",
            path.display()
        )))
    }
}

/// An example of the firstlight package without its debug sections, which a case runs in a machine. It is built if it does not exist.
pub fn example(name: &str) -> Result<Vec<u8>> {
    let built = support::program::cargo()
        .current_dir(root())
        .args(["build", "--quiet", "--locked", "--example", name])
        .status()
        .context(&format!("build the example {name}"))?;
    if !built.success() {
        return Err(Failure(format!("the example {name} cannot be built")));
    }
    // .../TARGET/debug/deps/boot-HASH is what runs now
    let this = std::env::current_exe().context("find the folder of the examples")?;
    let folder = this
        .ancestors()
        .nth(2)
        .ok_or_else(|| Failure(format!("{} has no folder above", this.display())))?;
    let stripped = tempfile::NamedTempFile::new().context("make a file")?;
    let strip = Command::new("strip")
        .arg("-o")
        .arg(stripped.path())
        .arg(folder.join("examples").join(name))
        .status()
        .context("run strip")?;
    if !strip.success() {
        return Err(Failure(format!(
            "strip of the example {name} ended with {strip}"
        )));
    }
    std::fs::read(stripped.path()).context(&format!("read the example {name}"))
}

/// Runs a script of the checkout and returns the last line that it printed. Its standard error is shown.
pub fn script(path: &str, arguments: &[&Path]) -> Result<String> {
    let output = Command::new(root().join(path))
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context(&format!("run {path}"))?;
    if !output.status.success() {
        return Err(Failure(format!("{path} ended with {}", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .last()
        .unwrap_or_default()
        .to_owned())
}

/// A port on 127.0.0.1 on which no program listens at this moment, and that this process has not asked for before. Another process
/// may take it first, so the caller must be ready to ask for another port.
pub fn free_port() -> Result<u16> {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("find a free port")?;
        let port = listener.local_addr().context("find a free port")?.port();
        if given.insert(port) {
            return Ok(port);
        }
    }
}
