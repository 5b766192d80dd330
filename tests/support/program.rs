//! One of our programs, run as its users run it: its output line by line, its exit code, never left behind.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Nothing in these tests takes longer, on a loaded machine either.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// How often a program's end is looked for.
const TICK: Duration = Duration::from_millis(100);

/// One of our programs, as the test that asks is built: `unlock`, `bootstrapper`, `join-service`, `key-service`, `firstlight`.
/// Cargo makes the programs of other packages for no test, so the first who asks has it make them.
pub fn built(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        // .../TARGET/debug/deps/TEST-HASH is what runs now
        let this = std::env::current_exe().unwrap();
        let folder = this.ancestors().nth(2).unwrap();
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
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

/// A running program; killed when dropped.
pub struct Program {
    name: String,
    child: Mutex<Child>,
    output: Arc<(Mutex<String>, Condvar)>,
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
        let output = Arc::new((Mutex::new(String::new()), Condvar::new()));
        collect(child.stdout.take().unwrap(), output.clone());
        collect(child.stderr.take().unwrap(), output.clone());
        Program {
            name,
            child: Mutex::new(child),
            output,
        }
    }

    /// What it has printed so far, on both streams.
    pub fn output(&self) -> String {
        // a test that fails in `expect` still wants to see it
        self.output
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits until a line contains `text`, and gives that line.
    pub fn expect(&self, text: &str) -> String {
        self.expect_within(text, PATIENCE)
    }

    /// The same for what takes long.
    pub fn expect_within(&self, text: &str, time: Duration) -> String {
        let end = Instant::now() + time;
        let mut output = self.output.0.lock().unwrap();
        loop {
            if let Some(line) = output.lines().find(|line| line.contains(text)) {
                return line.into();
            }
            // the readers may be a moment behind its end
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
                "{}: no line with {text:?}; it printed:\n{output}",
                self.name
            );
            output = self.output.1.wait_timeout(output, TICK).unwrap().0;
        }
    }

    /// Waits for its end.
    pub fn exit(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.lock().unwrap().try_wait().unwrap() {
                // the readers see the end of the pipes at the same time; give them a moment
                std::thread::sleep(Duration::from_millis(50));
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

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        let status = Command::new("kill")
            .arg(self.id().to_string())
            .status()
            .unwrap();
        assert!(status.success());
    }

    /// The process.
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

fn collect(stream: impl Read + Send + 'static, output: Arc<(Mutex<String>, Condvar)>) {
    std::thread::spawn(move || {
        let mut lines = BufReader::new(stream);
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|n| n > 0) {
            output.0.lock().unwrap().push_str(&line);
            output.1.notify_all();
            line.clear();
        }
    });
}
