//! One of our programs, run as its users run it: its output line by line, its exit code, never left behind.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Nothing in these tests takes longer, on a loaded machine either.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// A running program; killed when dropped.
pub struct Program {
    name: String,
    child: Child,
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
        Program { name, child, output }
    }

    /// What it has printed so far, on both streams.
    pub fn output(&self) -> String {
        // a test that fails in `expect` still wants to see it
        self.output.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until a line contains `text`, and gives that line.
    pub fn expect(&self, text: &str) -> String {
        let end = Instant::now() + PATIENCE;
        let mut output = self.output.0.lock().unwrap();
        loop {
            if let Some(line) = output.lines().find(|line| line.contains(text)) {
                return line.into();
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{}: no line with {text:?} in time; it printed:\n{output}", self.name);
            output = self.output.1.wait_timeout(output, left).unwrap().0;
        }
    }

    /// Waits for its end.
    pub fn exit(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // the readers see the end of the pipes at the same time; give them a moment
                std::thread::sleep(Duration::from_millis(50));
                return status;
            }
            assert!(Instant::now() < end, "{} did not end; it printed:\n{}", self.name, self.output());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        let status = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
