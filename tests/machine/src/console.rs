//! The serial line of a machine: stores every line with its time, and waits for lines.

use super::{Failure, Result, timeline};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The lines of a console that are printed at once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// None.
    Nothing,
    /// The steps of a boot (`timeline`).
    Steps,
    /// All.
    Everything,
}

/// A line of the console, without carriage returns and colours.
#[derive(Clone, Debug)]
pub struct Line {
    /// Time since QEMU was started.
    pub at: Duration,
    /// Its text.
    pub text: String,
}

#[derive(Default)]
struct Said {
    lines: Vec<Line>,
    ended: bool,
}

/// The console's lines so far; a thread reads further lines until the machine has ended.
pub struct Console {
    said: Arc<(Mutex<Said>, Condvar)>,
    reader: Option<JoinHandle<()>>,
    /// The lines before this one were already waited for.
    next: usize,
    errors: PathBuf,
}

impl Console {
    /// Reads `from` to its end; each line also goes to `log`, and the lines that are to be shown go to standard output. `errors` is
    /// a file with what QEMU itself says; a wait that reaches its limit shows this text.
    pub fn new(
        from: impl Read + Send + 'static,
        mut log: impl Write + Send + 'static,
        show: Show,
        errors: PathBuf,
    ) -> Console {
        let said = Arc::new((Mutex::new(Said::default()), Condvar::new()));
        let (start, shared) = (Instant::now(), said.clone());
        let reader = std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut raw = Vec::new();
            while matches!(from.read_until(b'\n', &mut raw), Ok(1..)) {
                let line = Line {
                    at: start.elapsed(),
                    text: without_control(&raw),
                };
                raw.clear();
                let _ = writeln!(log, "[{:8.3}] {}", line.at.as_secs_f64(), line.text);
                match (show, timeline::parse(&line.text)) {
                    (Show::Everything, _) => println!("    | {}", line.text),
                    (Show::Steps, Some(step)) => println!("    | {step}"),
                    (Show::Steps, None) | (Show::Nothing, _) => {}
                }
                lock(&shared.0).lines.push(line);
                shared.1.notify_all();
            }
            lock(&shared.0).ended = true;
            shared.1.notify_all();
        });
        Console {
            said,
            reader: Some(reader),
            next: 0,
            errors,
        }
    }

    /// Returns all lines so far.
    pub fn lines(&self) -> Vec<Line> {
        lock(&self.said.0).lines.clone()
    }

    /// The next line that contains `text`, after the one that the last wait found. Gives up when the machine is gone,
    /// when it says that it failed, or after `limit`.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> Result<Line> {
        self.wait_until(&format!("the line {text:?}"), limit, |line| {
            line.contains(text)
        })
    }

    /// The next line that `wanted` accepts; `what` names it in the error.
    pub fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Line> {
        let deadline = Instant::now() + limit;
        let shared = self.said.clone();
        let (mutex, changed) = &*shared;
        let mut said = lock(mutex);
        loop {
            while let Some(line) = said.lines.get(self.next) {
                self.next += 1;
                if wanted(&line.text) {
                    return Ok(line.clone());
                }
                if is_fatal(&line.text) {
                    return Err(self.gave_up("the machine failed", what, &said));
                }
            }
            if said.ended {
                return Err(self.gave_up("the machine is gone", what, &said));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.gave_up(&format!("{} s went by", limit.as_secs()), what, &said));
            }
            said = changed
                .wait_timeout(said, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn gave_up(&self, why: &str, what: &str, said: &Said) -> Failure {
        let errors = std::fs::read_to_string(&self.errors).unwrap_or_default();
        let mut last: Vec<&str> = said
            .lines
            .iter()
            .rev()
            .take(25)
            .rev()
            .map(|line| line.text.as_str())
            .collect();
        last.extend(errors.lines());
        Failure(format!(
            "{why} while waiting for {what}; the last lines of console and QEMU:\n    {}",
            last.join("\n    ")
        ))
    }

    /// Waits for the reading thread, which ends with the machine.
    pub fn join(&mut self) {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn lock(said: &Mutex<Said>) -> MutexGuard<'_, Said> {
    said.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `initramfs/init` prints `failed:` before it powers the machine off.
fn is_fatal(text: &str) -> bool {
    text.contains("Kernel panic - not syncing")
        || (text.starts_with("firstlight[init]") && text.contains("failed:"))
}

/// Removes carriage returns, escape sequences and other control characters.
fn without_control(raw: &[u8]) -> String {
    let mut out = String::new();
    let text = String::from_utf8_lossy(raw);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            if chars.next_if(|&c| c == '[').is_some() {
                while chars.next().is_some_and(|c| !c.is_ascii_alphabetic()) {}
            }
        } else if !c.is_control() || c == '\t' {
            out.push(c);
        }
    }
    out
}

#[test]
fn a_line_loses_its_carriage_return_and_colours() {
    assert_eq!(
        without_control(b"\x1b[!p\x1b[1;31mred\x1b[0m\tend\r\n"),
        "red\tend"
    );
}

#[test]
fn waiting_ends_when_the_machine_is_gone_or_failed() {
    let mut console = Console::new(
        &b"one\ntwo\n"[..],
        std::io::sink(),
        Show::Nothing,
        PathBuf::new(),
    );
    assert_eq!(
        console
            .wait_for("two", Duration::from_secs(5))
            .unwrap()
            .text,
        "two"
    );
    assert!(
        console
            .wait_for("one", Duration::from_secs(5))
            .unwrap_err()
            .0
            .contains("is gone")
    );
    let mut console = Console::new(
        &b"firstlight[init] 1.0s failed: no disk\nthree\n"[..],
        std::io::sink(),
        Show::Nothing,
        PathBuf::new(),
    );
    assert!(
        console
            .wait_for("three", Duration::from_secs(5))
            .unwrap_err()
            .0
            .contains("failed: no disk")
    );
}
