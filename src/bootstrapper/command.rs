//! Runs other programs for the set-up, above all kubeadm. Each line that a program prints is reported at once. A stop or the
//! deadline ends the program and all that it started. An error contains the program's last lines.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::job::without_tokens;
use base::crypto::Secret;
use base::stop::Stop;

/// Interval of the checks for a stop and the deadline.
const TICK: Duration = Duration::from_millis(100);
/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(5);
/// How long output is read after the program's end; it may come from processes that the program left running.
const DRAIN: Duration = Duration::from_millis(500);
/// Maximum bytes of a line; the rest becomes the next line.
const MAX_LINE: usize = 2000;
/// Maximum number of last lines in an error.
const LAST_WORDS: usize = 12;
/// Maximum bytes that [`output`] reads: a kubeconfig has about 6 KiB.
const MAX_OUTPUT: u64 = 1 << 20;

/// Why a program did not succeed.
#[derive(Debug)]
pub enum Error {
    /// The program could not be started.
    Start(String, io::Error),
    /// The program failed: its name, its exit status, its last lines.
    Failed(String, ExitStatus, Vec<String>),
    /// The program took longer than the limit and was ended: its name, the limit, its last lines.
    Late(String, Duration, Vec<String>),
    /// The program was ended because this node is stopping.
    Stopped(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lines, end) = match self {
            Error::Start(program, error) => {
                return write!(f, "{program} could not be started: {error}");
            }
            Error::Stopped(program) => {
                return write!(f, "{program} was ended because this node is stopping");
            }
            Error::Failed(program, status, lines) => match (status.code(), status.signal()) {
                (Some(code), _) => (lines, format!("{program} failed with exit code {code}")),
                (_, signal) => (
                    lines,
                    format!(
                        "{program} was killed by signal {}",
                        signal.unwrap_or_default()
                    ),
                ),
            },
            Error::Late(program, limit, lines) => (
                lines,
                format!(
                    "{program} took longer than {} s and was ended",
                    limit.as_secs()
                ),
            ),
        };
        f.write_str(&end)?;
        if !lines.is_empty() {
            write!(f, "; its last lines:\n{}", lines.join("\n"))?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Runs `command` until it succeeds within `limit`; `tell` gets each line of its standard output and error.
pub fn run(
    command: &mut Command,
    limit: Duration,
    stop: &Stop,
    tell: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    let (mut running, lines) = Running::start(command, true)?;
    running.finish(&lines, limit, stop, tell)
}

/// Runs `command` like [`run`], but returns its standard output, which may be secret; `tell` gets only standard error.
pub fn output(
    command: &mut Command,
    limit: Duration,
    stop: &Stop,
    tell: &mut dyn FnMut(&str),
) -> Result<Secret, Error> {
    let (mut running, lines) = Running::start(command, false)?;
    let stdout = running.child.stdout.take();
    let name = running.name.clone();
    thread::scope(move |scope| {
        // dropped before the scope waits for the reader, so that the program has ended and closed its output
        let mut running = running;
        let reader = thread::Builder::new()
            .name("command-output".into())
            .spawn_scoped(scope, || {
                let mut bytes = Vec::with_capacity(64 << 10); // a vector that grows leaves copies behind
                stdout
                    .map(|stdout| stdout.take(MAX_OUTPUT).read_to_end(&mut bytes))
                    .transpose()
                    .map(|_| Secret::new(bytes))
            });
        let reader = reader.map_err(|error| Error::Start(name.clone(), error))?;
        running.finish(&lines, limit, stop, tell)?;
        match reader.join() {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(error)) => Err(Error::Start(name, error)),
            Err(_) => Err(Error::Start(
                name,
                io::Error::other("its output was not read"),
            )),
        }
    })
}

struct Running {
    /// The program with its subcommands, without options and their values.
    name: String,
    child: Child,
}

impl Running {
    fn start(
        command: &mut Command,
        follow_stdout: bool,
    ) -> Result<(Running, Receiver<String>), Error> {
        let name = name(command);
        let spawned = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // so that a signal also reaches the program's own children
            .process_group(0)
            .spawn();
        let mut child = spawned.map_err(|error| Error::Start(name.clone(), error))?;
        let (sender, lines) = mpsc::channel();
        let stderr = child
            .stderr
            .take()
            .map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
        let stdout = child
            .stdout
            .take_if(|_| follow_stdout)
            .map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
        // from here on every way out ends the child
        let running = Running { name, child };
        for pipe in stderr.into_iter().chain(stdout) {
            let sender = sender.clone();
            let reader = thread::Builder::new()
                .name("command-lines".into())
                .spawn(move || read_lines(pipe, &sender));
            reader.map_err(|error| Error::Start(running.name.clone(), error))?;
        }
        Ok((running, lines))
    }

    fn finish(
        &mut self,
        lines: &Receiver<String>,
        limit: Duration,
        stop: &Stop,
        tell: &mut dyn FnMut(&str),
    ) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        let mut last = VecDeque::new();
        let mut take = |line: String| {
            let line = without_tokens(&line);
            tell(&line);
            last.push_back(line);
            if last.len() > LAST_WORDS {
                last.pop_front();
            }
        };
        let failed = |error| Error::Start(self.name.clone(), error);
        let status = loop {
            match lines.recv_timeout(TICK) {
                Ok(line) => take(line),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => drop(stop.wait(TICK)),
            }
            if let Some(status) = self.child.try_wait().map_err(failed)? {
                break status;
            }
            if stop.is_stopped() {
                return Err(Error::Stopped(self.name.clone()));
            }
            if Instant::now() >= deadline {
                return Err(Error::Late(self.name.clone(), limit, last.into()));
            }
        };
        while let Ok(line) = lines.recv_timeout(DRAIN) {
            take(line);
        }
        match status.success() {
            true => Ok(()),
            false => Err(Error::Failed(self.name.clone(), status, last.into())),
        }
    }
}

impl Drop for Running {
    /// Ends the program and its children: first by SIGTERM, then by SIGKILL.
    fn drop(&mut self) {
        let is_running = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        if !is_running(&mut self.child) {
            return;
        }
        // the process group has the child's number, and exists as long as any process in it
        let _ = sys::process::signal_group(self.child.id(), libc::SIGTERM);
        let end = Instant::now() + GRACE;
        while is_running(&mut self.child) && Instant::now() < end {
            thread::sleep(TICK);
        }
        let _ = sys::process::signal_group(self.child.id(), libc::SIGKILL);
        let _ = self.child.wait();
    }
}

/// Returns the words up to the first option, such as `kubeadm init phase preflight`.
fn name(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words
        .map(|word| word.to_string_lossy())
        .take_while(|word| !word.starts_with('-'));
    words.collect::<Vec<_>>().join(" ")
}

/// Sends each line without control characters, until the pipe or the receiver is closed.
fn read_lines(pipe: Box<dyn Read + Send>, sender: &Sender<String>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        match pipe
            .by_ref()
            .take(MAX_LINE as u64)
            .read_until(b'\n', &mut line)
        {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text: String = String::from_utf8_lossy(&line)
            .trim_end()
            .chars()
            .filter(|c| !c.is_control())
            .collect();
        if !text.is_empty() && sender.send(text).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn run_sh(script: &str, limit: Duration, stop: &Stop) -> (Result<(), Error>, Vec<String>) {
        let mut told = vec![];
        let result = run(&mut sh(script), limit, stop, &mut |line| {
            told.push(line.to_owned())
        });
        (result, told)
    }

    #[test]
    fn each_line_of_both_streams_is_told() {
        let (result, mut told) = run_sh(
            "echo one; echo two >&2; printf 'thr\\033ee'",
            LONG,
            &Stop::new(),
        );
        result.unwrap();
        told.sort();
        assert_eq!(told, ["one", "three", "two"]);
    }

    #[test]
    fn a_failure_says_what_failed_how_and_its_last_words() {
        let (result, _) = run_sh(
            "for i in $(seq 100); do echo line $i; done; exit 7",
            LONG,
            &Stop::new(),
        );
        let text = result.unwrap_err().to_string();
        assert!(
            text.starts_with("sh failed with exit code 7; its last lines:\nline 89\n"),
            "{text}"
        );
        assert!(text.ends_with("line 100"), "{text}");
        let (result, _) = run_sh("kill -9 $$", LONG, &Stop::new());
        assert_eq!(result.unwrap_err().to_string(), "sh was killed by signal 9");
        let mut none = Command::new("/nonexistent/program");
        let error = run(&mut none, LONG, &Stop::new(), &mut |_| {})
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("/nonexistent/program could not be started"),
            "{error}"
        );
    }

    #[test]
    fn the_deadline_and_a_stop_end_it_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!(
            "sleep 3600 & echo $! >{}; echo started; wait",
            pid.display()
        );
        // a zombie counts as gone: there may be no process that reaps it
        let is_gone = || {
            let pid = std::fs::read_to_string(&pid).unwrap();
            let status = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            status.map_or(true, |status| status.contains(") Z "))
        };
        let is_gone = || {
            (0..100).any(|_| {
                is_gone() || {
                    thread::sleep(TICK);
                    false
                }
            })
        };
        let (result, _) = run_sh(&script, Duration::from_millis(300), &Stop::new());
        assert!(matches!(result, Err(Error::Late(..))), "{result:?}");
        assert!(is_gone());

        let stop = Stop::new();
        let result = run(&mut sh(&script), LONG, &stop, &mut |_| stop.stop());
        assert!(matches!(result, Err(Error::Stopped(_))), "{result:?}");
        assert!(is_gone());
    }

    #[test]
    fn the_deadline_ends_what_is_read_too() {
        let late = output(
            &mut sh("exec sleep 3600"),
            Duration::from_millis(300),
            &Stop::new(),
            &mut |_| (),
        );
        assert!(matches!(late, Err(Error::Late(..))));
    }

    #[test]
    fn output_is_returned_and_not_told() {
        let mut told = vec![];
        let script = "echo secret; echo working >&2";
        let bytes = output(&mut sh(script), LONG, &Stop::new(), &mut |line| {
            told.push(line.to_owned())
        })
        .unwrap();
        assert_eq!(bytes.expose(), b"secret\n");
        assert_eq!(told, ["working"]);
    }

    #[test]
    fn endless_lines_and_bytes_that_are_no_text_are_cut() {
        let (result, told) = run_sh(
            "head -c 100000 /dev/zero | tr '\\0' a; printf '\\377\\n'",
            LONG,
            &Stop::new(),
        );
        result.unwrap();
        assert!(told.len() >= 50 && told.iter().all(|line| line.len() <= MAX_LINE + 3));
    }

    #[test]
    fn a_program_is_named_without_its_options() {
        let mut command = Command::new("kubeadm");
        command.args([
            "init",
            "phase",
            "certs",
            "all",
            "--config",
            "/run/kubeadm.yaml",
        ]);
        assert_eq!(name(&command), "kubeadm init phase certs all");
        assert_eq!(name(&sh("echo a")), "sh");
    }
}
