//! The start of a program, its lines, and its end by itself, a time limit or a stop.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use crate::stop::Stop;

/// Interval of the checks for the program's end, a stop and the time limit while the program prints
/// nothing.
const TICK: Duration = Duration::from_millis(100);
/// The same interval after the program has closed its output: it ends very soon.
const SHORT_TICK: Duration = Duration::from_millis(5);
/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(5);
/// How long output is read after the program's end. A process that has left the group may keep the
/// output open.
pub const DRAIN: Duration = Duration::from_secs(1);
/// Maximum bytes of a line; the rest becomes the next line.
const MAX_LINE: usize = 2000;
/// Maximum number of lines that wait to be reported. A program that prints faster has to wait.
pub const MAX_WAITING: usize = 64;
/// Maximum number of last lines in an error.
const LAST_LINES: usize = 12;

/// A program that did not succeed.
#[derive(Debug)]
pub struct Error {
    /// The program with its subcommands, without options and their values.
    pub program: String,
    /// Why it did not succeed.
    pub cause: ChildFailure,
    /// The last lines of its output; empty if it printed nothing.
    pub last_lines: Vec<String>,
}

/// Why a program did not succeed.
#[derive(Debug)]
pub enum ChildFailure {
    /// The program could not be started.
    Start(io::Error),
    /// The program ended with an exit code that is not zero, or was killed by a signal.
    Failed(ExitStatus),
    /// The program took longer than this limit and was ended.
    Late(Duration),
    /// The program was ended because of the stop.
    Stopped,
    /// The program succeeded, but its output could not be read as a whole.
    Output(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = &self.program;
        match &self.cause {
            ChildFailure::Start(error) => write!(f, "{program} could not be started: {error}")?,
            ChildFailure::Failed(status) => match (status.code(), status.signal()) {
                (Some(code), _) => write!(f, "{program} failed with exit code {code}")?,
                (_, signal) => write!(
                    f,
                    "{program} was killed by signal {}",
                    signal.unwrap_or_default()
                )?,
            },
            ChildFailure::Late(limit) => write!(
                f,
                "{program} took longer than {} s and was ended",
                limit.as_secs()
            )?,
            ChildFailure::Stopped => {
                return write!(f, "{program} was ended because this node is stopping");
            }
            ChildFailure::Output(error) => {
                write!(f, "the output of {program} is not complete: {error}")?
            }
        }
        if !self.last_lines.is_empty() {
            write!(f, "; its last lines:\n{}", self.last_lines.join("\n"))?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Runs `command` with `input` as its standard input until it succeeds within `limit`; `tell` gets
/// each line of its standard output and error.
pub fn run(
    command: &mut Command,
    input: Stdio,
    limit: Duration,
    stop: &Stop,
    tell: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    let mut running = Running::start(command, input)?;
    let (sender, lines) = mpsc::sync_channel(MAX_WAITING);
    let of_stderr = sender.clone();
    running.read(
        |child| child.stdout.take(),
        move |pipe| send_lines(pipe, &sender),
    )?;
    running.read(
        |child| child.stderr.take(),
        move |pipe| send_lines(pipe, &of_stderr),
    )?;
    running.finish(lines, limit, stop, tell)
}

/// A program that runs. Dropping it ends the program and its process group.
pub struct Running {
    name: String,
    child: Child,
    /// The child was waited for: its process ID may already belong to another process.
    is_reaped: bool,
}

impl Running {
    /// Starts `command` with pipes for its output, as the leader of a process group.
    pub fn start(command: &mut Command, input: Stdio) -> Result<Running, Error> {
        let name = name(command);
        let spawned = command
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // a signal to the group also reaches the program's own children
            .process_group(0)
            .spawn();
        match spawned {
            Ok(child) => Ok(Running {
                name,
                child,
                is_reaped: false,
            }),
            Err(error) => Err(Error {
                program: name,
                cause: ChildFailure::Start(error),
                last_lines: vec![],
            }),
        }
    }

    /// Calls `read` with a pipe of the child, on a thread of its own. `read` must return when the pipe
    /// is closed, or when nobody takes what it reads.
    pub fn read<P: Send + 'static>(
        &mut self,
        take: impl FnOnce(&mut Child) -> Option<P>,
        read: impl FnOnce(P) + Send + 'static,
    ) -> Result<(), Error> {
        let Some(pipe) = take(&mut self.child) else {
            return Ok(());
        };
        let thread = thread::Builder::new().name("child-output".into());
        match thread.spawn(move || read(pipe)) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.error(ChildFailure::Start(error), VecDeque::new())),
        }
    }

    /// Waits for the end of the program, the limit or the stop, and reports the lines meanwhile.
    pub fn finish(
        mut self,
        lines: Receiver<String>,
        limit: Duration,
        stop: &Stop,
        tell: &mut dyn FnMut(&str),
    ) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        let mut last = VecDeque::new();
        let mut take = |line: String| {
            tell(&line);
            if last.len() == LAST_LINES {
                last.pop_front();
            }
            last.push_back(line);
        };
        let ended_by_us = loop {
            match lines.recv_timeout(TICK) {
                Ok(line) => take(line),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => drop(stop.wait(SHORT_TICK)),
            }
            if self.has_ended() {
                break None;
            }
            if stop.is_stopped() {
                break Some(ChildFailure::Stopped);
            }
            if Instant::now() >= deadline {
                break Some(ChildFailure::Late(limit));
            }
        };
        let status = self.end();
        let until = Instant::now() + DRAIN;
        while let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            take(line);
        }
        match (ended_by_us, status) {
            (None, Ok(status)) if status.success() => Ok(()),
            (Some(cause), _) => Err(self.error(cause, last)),
            (None, Ok(status)) => Err(self.error(ChildFailure::Failed(status), last)),
            (None, Err(error)) => Err(self.error(ChildFailure::Output(error), last)),
        }
    }

    fn has_ended(&self) -> bool {
        // an error means that there is no such child any more
        sys::process::has_ended(self.child.id()).unwrap_or(true)
    }

    /// Ends the program if it runs, first by SIGTERM, then by SIGKILL; also kills the rest of its
    /// group.
    fn end(&mut self) -> io::Result<ExitStatus> {
        // the group has the child's process ID, which stays reserved until `wait`
        let signal = |signal| drop(sys::process::signal_group(self.child.id(), signal));
        if !self.has_ended() {
            signal(libc::SIGTERM);
            let until = Instant::now() + GRACE;
            while !self.has_ended() && Instant::now() < until {
                thread::sleep(SHORT_TICK);
            }
        }
        signal(libc::SIGKILL);
        let status = self.child.wait();
        self.is_reaped = true;
        status
    }

    fn error(&self, cause: ChildFailure, last: VecDeque<String>) -> Error {
        Error {
            program: self.name.clone(),
            cause,
            last_lines: last.into(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_reaped {
            let _ = self.end();
        }
    }
}

/// Returns the words up to the first option, such as `kubeadm init phase preflight`.
pub fn name(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words
        .map(|word| word.to_string_lossy())
        .take_while(|word| !word.starts_with('-'));
    words.collect::<Vec<_>>().join(" ")
}

/// Sends each line without control characters, until the pipe or the receiver is closed.
pub fn send_lines(pipe: impl Read, sender: &SyncSender<String>) {
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
            .filter(|c| crate::text::is_visible(*c))
            .collect();
        if !text.is_empty() && sender.send(text).is_err() {
            return;
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub const LONG: Duration = Duration::from_secs(60);
    pub const BRIEF: Duration = Duration::from_millis(300);

    pub fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn run_sh(script: &str, limit: Duration) -> (Result<(), Error>, Vec<String>) {
        let mut told = vec![];
        let mut tell = |line: &str| told.push(line.to_owned());
        let result = run(
            &mut sh(script),
            Stdio::null(),
            limit,
            &Stop::new(),
            &mut tell,
        );
        (result, told)
    }

    /// A file with a process ID.
    struct PidFile(tempfile::TempDir);

    impl PidFile {
        fn new() -> PidFile {
            PidFile(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> String {
            self.0.path().join("pid").display().to_string()
        }

        /// Waits until the process has ended. A zombie counts: there may be no process that reaps
        /// it.
        fn has_ended(&self) -> bool {
            let pid = std::fs::read_to_string(self.path()).unwrap();
            let stat = format!("/proc/{}/stat", pid.trim());
            let ended = || std::fs::read_to_string(&stat).map_or(true, |it| it.contains(") Z "));
            (0..100).any(|_| {
                let ended = ended();
                if !ended {
                    thread::sleep(TICK);
                }
                ended
            })
        }
    }

    #[test]
    fn each_line_of_both_streams_is_told() {
        let (result, mut told) = run_sh("echo one; echo two >&2; printf 'thr\\033ee'", LONG);
        result.unwrap();
        told.sort();
        assert_eq!(told, ["one", "three", "two"]);
    }

    #[test]
    fn a_failure_gives_the_exit_code_and_the_last_lines() {
        let (result, _) = run_sh("for i in $(seq 100); do echo line $i; done; exit 7", LONG);
        let error = result.unwrap_err();
        assert!(matches!(&error.cause, ChildFailure::Failed(status) if status.code() == Some(7)));
        assert_eq!(error.last_lines.len(), LAST_LINES);
        let text = error.to_string();
        assert!(
            text.starts_with("sh failed with exit code 7; its last lines:\nline 89\n"),
            "{text}"
        );
        assert!(text.ends_with("line 100"), "{text}");
    }

    #[test]
    fn a_program_that_a_signal_killed_says_which_signal() {
        let (result, _) = run_sh("kill -9 $$", LONG);
        assert_eq!(result.unwrap_err().to_string(), "sh was killed by signal 9");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let mut none = Command::new("/nonexistent/program");
        let error = run(&mut none, Stdio::null(), LONG, &Stop::new(), &mut |_| {}).unwrap_err();
        assert!(matches!(&error.cause, ChildFailure::Start(_)), "{error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with("/nonexistent/program could not be started: No such file"),
            "{text}"
        );
    }

    #[test]
    fn the_time_limit_ends_the_program_and_its_children() {
        let pid = PidFile::new();
        let (result, _) = run_sh(
            &format!("sleep 3600 & echo $! >{}; echo started; wait", pid.path()),
            BRIEF,
        );
        let error = result.unwrap_err();
        assert!(matches!(error.cause, ChildFailure::Late(_)), "{error:?}");
        assert_eq!(error.last_lines, ["started"]);
        assert!(pid.has_ended());
    }

    #[test]
    fn a_stop_ends_the_program_and_its_children() {
        let (pid, stop) = (PidFile::new(), Stop::new());
        let script = format!("sleep 3600 & echo $! >{}; echo started; wait", pid.path());
        let error = run(&mut sh(&script), Stdio::null(), LONG, &stop, &mut |_| {
            stop.stop()
        })
        .unwrap_err();
        assert!(matches!(error.cause, ChildFailure::Stopped), "{error:?}");
        assert!(pid.has_ended());
    }

    #[test]
    fn a_program_that_ignores_sigterm_is_killed() {
        let (result, told) = run_sh("trap '' TERM; echo ready; while :; do :; done", BRIEF);
        assert_eq!(told, ["ready"]);
        assert!(matches!(result.unwrap_err().cause, ChildFailure::Late(_)));
    }

    #[test]
    fn a_child_that_the_program_leaves_behind_is_killed() {
        let pid = PidFile::new();
        // the child keeps the pipes open
        let (result, told) = run_sh(
            &format!("sleep 3600 & echo $! >{}; echo done", pid.path()),
            LONG,
        );
        result.unwrap();
        assert_eq!(told, ["done"]);
        assert!(pid.has_ended());
    }

    #[test]
    fn a_process_that_left_the_group_and_keeps_the_pipes_blocks_nothing() {
        let pid = PidFile::new();
        let script = format!(
            "setsid sh -c 'echo $$ >{0}; exec sleep 3600' & while [ ! -s {0} ]; do :; done; echo done",
            pid.path()
        );
        let (result, told) = run_sh(&script, LONG);
        result.unwrap();
        assert_eq!(told, ["done"]);
        let number = std::fs::read_to_string(pid.path()).unwrap();
        sys::process::signal_group(number.trim().parse().unwrap(), libc::SIGKILL).unwrap();
    }

    #[test]
    fn a_flood_of_output_is_bounded() {
        let mut count = 0;
        let error = run(
            &mut sh("while :; do echo flood; done"),
            Stdio::null(),
            BRIEF,
            &Stop::new(),
            &mut |_| count += 1,
        )
        .unwrap_err();
        assert!(matches!(error.cause, ChildFailure::Late(_)), "{error:?}");
        assert!(count > LAST_LINES);
        assert_eq!(error.last_lines, ["flood"; LAST_LINES]);
    }

    #[test]
    fn endless_lines_and_bytes_that_are_no_text_are_cut() {
        let (result, told) = run_sh(
            "head -c 100000 /dev/zero | tr '\\0' a; printf '\\377\\n'",
            LONG,
        );
        result.unwrap();
        assert!(told.len() >= 50 && told.iter().all(|line| line.len() <= MAX_LINE + 3));
    }

    #[test]
    fn the_standard_input_is_the_given_file_or_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("input");
        std::fs::write(&path, "words\n").unwrap();
        let mut told = vec![];
        let mut tell = |line: &str| told.push(line.to_owned());
        let input = std::fs::File::open(&path).unwrap();
        for input in [input.into(), Stdio::null()] {
            run(&mut sh("cat"), input, LONG, &Stop::new(), &mut tell).unwrap();
        }
        assert_eq!(told, ["words"]);
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
