//! Runs one of our programs: its output line by line, its exit code. The program is killed on drop.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The programs of a release.
pub const PROGRAMS: [&str; 7] = [
    "unlock",
    "bootstrapper",
    "join-service",
    "key-service",
    "member-controller",
    "firstlight",
    "firstlight-volume",
];

/// Time limit of one step, also on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The prefixes of the variables that Cargo sets for a package (The Cargo Book, "Environment variables Cargo sets for crates").
const OF_PACKAGE: [&str; 6] = [
    "CARGO_MANIFEST_",
    "CARGO_PKG_",
    "CARGO_CRATE_NAME",
    "CARGO_BIN_",
    "CARGO_PRIMARY_PACKAGE",
    "OUT_DIR",
];
/// Interval between two checks whether a program has ended.
const TICK: Duration = Duration::from_millis(100);

/// Returns a command that runs Cargo without the variables that describe the package of the running test. Cargo builds a library
/// again if a variable has changed that its build script reads, and these scripts read variables of the same names.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if OF_PACKAGE.iter().any(|prefix| name.starts_with(prefix)) {
            cargo.env_remove(&*name);
        }
    }
    cargo
}

/// Returns the path of one of our programs, in the build profile of the test: `unlock`, `bootstrapper`, `join-service`,
/// `key-service`, `firstlight`, `firstlight-volume`. Cargo does not build programs of other packages for a test, so the first call builds them.
/// Below [`with_programs_of`] it is one of that folder.
pub fn built(name: &str) -> PathBuf {
    let others = OTHERS.with_borrow(|folder| folder.as_ref().map(|folder| folder.join(name)));
    if let Some(program) = others {
        assert!(program.is_file(), "there is no {}", program.display());
        return program;
    }
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        // the running test is .../TARGET/debug/deps/TEST-HASH
        let this = std::env::current_exe().unwrap();
        let folder = this.ancestors().nth(2).unwrap();
        let mut cargo = cargo();
        cargo.current_dir(crate::ROOT).args([
            "build",
            "--quiet",
            "--locked",
            "--offline",
            "--workspace",
            "--bins",
        ]);
        if folder
            .file_name()
            .is_some_and(|profile| profile == "release")
        {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "{cargo:?} failed");
        folder.to_owned()
    });
    let program = folder.join(name);
    assert!(
        Path::new(&program).is_file(),
        "there is no {}",
        program.display()
    );
    program
}

thread_local! {
    /// The folder from which [`built`] takes programs in this thread.
    static OTHERS: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

/// Calls `make`, which gets programs of this folder from [`built`].
pub fn with_programs_of<T>(folder: &Path, make: impl FnOnce() -> T) -> T {
    let before = OTHERS.replace(Some(folder.into()));
    let made = make();
    OTHERS.set(before);
    made
}

/// A running program. It is killed on drop.
pub struct Program {
    name: String,
    child: Mutex<Child>,
    output: Arc<(Mutex<Output>, Condvar)>,
}

/// What a program printed so far.
#[derive(Default)]
struct Output {
    /// The lines of stdout and stderr, in the order in which they were read.
    both: String,
    stdout: String,
}

impl Program {
    pub fn start(command: &mut Command) -> Program {
        let name = format!("{command:?}");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let output = Arc::new((Mutex::new(Output::default()), Condvar::new()));
        collect(child.stdout.take().unwrap(), output.clone(), true);
        collect(child.stderr.take().unwrap(), output.clone(), false);
        Program {
            name,
            child: Mutex::new(child),
            output,
        }
    }

    /// Returns the output so far, of both streams.
    pub fn output(&self) -> String {
        // a test that fails in `expect` prints the output
        let output = self.output.0.lock();
        output.unwrap_or_else(PoisonError::into_inner).both.clone()
    }

    /// Returns what the program printed to stdout so far. The lines of a document stay together here: in
    /// [`Program::output`] a line of stderr may be between them.
    pub fn stdout(&self) -> String {
        self.output.0.lock().unwrap().stdout.clone()
    }

    /// Waits until a line contains `text`, and returns that line.
    pub fn expect(&self, text: &str) -> String {
        self.expect_within(text, PATIENCE)
    }

    /// Waits as [`Program::expect`] does, with another time limit.
    pub fn expect_within(&self, text: &str, time: Duration) -> String {
        let end = Instant::now() + time;
        let mut output = self.output.0.lock().unwrap();
        loop {
            if let Some(line) = output.both.lines().find(|line| line.contains(text)) {
                return line.into();
            }
            // the readers may receive the last lines after the end of the program
            let ended = self
                .child
                .lock()
                .unwrap()
                .try_wait()
                .unwrap()
                .is_some_and(|_| Arc::strong_count(&self.output) == 1);
            let waits = !ended && Instant::now() < end;
            assert!(
                waits,
                "{}: no line with {text:?}; it printed:\n{}",
                self.name, output.both
            );
            output = self.output.1.wait_timeout(output, TICK).unwrap().0;
        }
    }

    /// Waits for the end of the program.
    pub fn exit(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.lock().unwrap().try_wait().unwrap() {
                self.wait_for_readers();
                return status;
            }
            assert!(
                Instant::now() < end,
                "{} did not end; it printed:\n{}",
                self.name,
                self.output()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until both streams are read to their ends, at most a second: a child of the program may keep them open.
    fn wait_for_readers(&self) {
        let end = Instant::now() + Duration::from_secs(1);
        while Arc::strong_count(&self.output) > 1 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        let status = Command::new("kill")
            .arg(self.id().to_string())
            .status()
            .unwrap();
        assert!(status.success());
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.child.lock().unwrap().id()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
        if std::thread::panicking() {
            eprintln!("--- {} printed:\n{}", self.name, self.output());
        }
    }
}

fn collect(
    stream: impl Read + Send + 'static,
    output: Arc<(Mutex<Output>, Condvar)>,
    is_stdout: bool,
) {
    std::thread::spawn(move || {
        let mut lines = BufReader::new(stream);
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|n| n > 0) {
            let mut said = output.0.lock().unwrap();
            said.both.push_str(&line);
            if is_stdout {
                said.stdout.push_str(&line);
            }
            drop(said);
            output.1.notify_all();
            line.clear();
        }
    });
}

/// A server of another make, whose first line is `listening ADDRESS`. It ends when its standard input does: when this is dropped.
pub struct Peer {
    process: Child,
    pub address: SocketAddr,
}

impl Peer {
    pub fn start(command: &mut Command) -> Peer {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening ");
        let address = address.expect("its first line is its address");
        let address = address.parse().unwrap();
        // the output must be read, or a full pipe would block the server
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        Peer { process, address }
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Runs a program. Returns what it printed, or `None` if it failed.
pub fn printed(command: &mut Command) -> Option<String> {
    let output = command.output().unwrap();
    let is_good = output.status.success();
    is_good.then(|| String::from_utf8(output.stdout).unwrap())
}

/// Runs `firstlight measure`: the exit code, standard output, standard error.
pub fn measure(args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(built("firstlight"));
    let output = command.arg("measure").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (said, errors) = (text(output.stdout), text(output.stderr));
    (output.status.code().unwrap(), said, errors)
}

/// Runs a program that must succeed. It has no standard input if the caller sets none.
pub fn run(command: &mut Command) -> process::Output {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}:\n{said}{errors}");
    output
}
