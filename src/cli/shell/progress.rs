//! The progress of a command that waits: what it waits for, for how long, and each new reason.
//!
//! On a terminal, the last line counts the seconds. In a log, a line repeats every half minute what
//! the command waits for.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use base::text;

/// Interval at which the line on a terminal is redrawn.
const TICK: Duration = Duration::from_secs(1);
/// Interval at which the line in a log is repeated.
const REPEAT: Duration = Duration::from_secs(30);

/// Owns the thread that writes. Dropping it ends the thread, which leaves the cursor at the
/// beginning of a line.
pub struct Progress {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

enum Command {
    Phase(String),
    Line(String),
}

impl Progress {
    /// Shows the progress on standard error.
    pub fn on_stderr() -> Progress {
        Progress::new(io::stderr(), io::stderr().is_terminal())
    }

    fn new(out: impl Write + Send + 'static, terminal: bool) -> Progress {
        let (commands, received) = mpsc::channel();
        let mut painter = Painter {
            out,
            terminal,
            phase: None,
            last_line: String::new(),
        };
        let thread = thread::Builder::new()
            .name("progress".into())
            .spawn(move || {
                loop {
                    match received.recv_timeout(painter.interval()) {
                        Ok(Command::Phase(text)) => painter.begin(text),
                        Ok(Command::Line(text)) => painter.line(text),
                        Err(RecvTimeoutError::Timeout) => painter.tick(),
                        Err(RecvTimeoutError::Disconnected) => return painter.clear(),
                    }
                }
            });
        // without a thread the command works, but shows no progress
        Progress {
            commands: Some(commands),
            thread: thread.ok(),
        }
    }

    /// Begins a phase, such as `waiting for 10.0.0.1:9000`; its seconds count from now.
    pub fn phase(&self, text: impl Into<String>) {
        self.send(Command::Phase(text.into()));
    }

    /// Prints a line that is not overwritten later. Does not repeat a line that is equal to the
    /// previous one.
    pub fn line(&self, text: impl Into<String>) {
        self.send(Command::Line(text.into()));
    }

    fn send(&self, command: Command) {
        if let Some(commands) = &self.commands {
            // this fails only if the thread does not exist
            let _ = commands.send(command);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // a panic of this thread does not change the command's result
            let _ = thread.join();
        }
    }
}

struct Painter<W> {
    out: W,
    terminal: bool,
    phase: Option<(String, Instant)>,
    last_line: String,
}

impl<W: Write> Painter<W> {
    fn interval(&self) -> Duration {
        if self.terminal { TICK } else { REPEAT }
    }

    fn begin(&mut self, text: String) {
        self.phase = Some((text, Instant::now()));
        self.tick();
    }

    fn line(&mut self, text: String) {
        if self.last_line == text {
            return;
        }
        self.clear();
        self.write(&format!("{}\n", block(&text)));
        self.last_line = text;
        if self.terminal {
            self.tick();
        }
    }

    fn tick(&mut self) {
        let Some((text, since)) = &self.phase else {
            return;
        };
        let text = match since.elapsed().as_secs() {
            0 => format!("{text} .."),
            seconds => format!("{text} .. {}", human(Duration::from_secs(seconds))),
        };
        // a line that wraps cannot be redrawn
        let text = if self.terminal {
            format!("\r\x1b[K{:.79}", printable(&text))
        } else {
            format!("{}\n", printable(&text))
        };
        self.write(&text);
    }

    fn clear(&mut self) {
        if self.terminal && self.phase.is_some() {
            self.write("\r\x1b[K");
        }
    }

    fn write(&mut self, text: &str) {
        // an error means that standard error is closed, and nobody reads it
        let _ = self
            .out
            .write_all(text.as_bytes())
            .and_then(|()| self.out.flush());
    }
}

/// Returns a peer's text for a terminal, on one line: line breaks, control, invisible and
/// reordering characters are escaped.
pub fn printable(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    text.chars().for_each(|c| text::push(&mut line, c));
    line
}

/// Returns a text for a terminal that consists of our own lines and peers' texts. Lines after the
/// first are indented, so that none looks like one of ours.
pub fn block(text: &str) -> String {
    lines(text).replace('\n', "\n    ")
}

/// Returns our own text for a terminal; peers' texts in it are on one line each ([`printable`]).
pub fn lines(text: &str) -> String {
    let mut lines = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => lines.push(c),
            c => text::push(&mut lines, c),
        }
    }
    lines
}

/// Returns a time for people, in whole seconds: `45 s`, `2 min 5 s`, `1 h 0 min`.
pub fn human(time: Duration) -> String {
    match (time + Duration::from_millis(500)).as_secs() {
        s @ ..60 => format!("{s} s"),
        s @ 60..3600 if s % 60 == 0 => format!("{} min", s / 60),
        s @ 60..3600 => format!("{} min {} s", s / 60, s % 60),
        s => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn shown(terminal: bool, act: impl FnOnce(Progress)) -> String {
        let screen = Screen::default();
        act(Progress::new(screen.clone(), terminal));
        String::from_utf8(screen.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_log_gets_plain_lines_and_no_repetition() {
        let text = shown(false, |progress| {
            progress.phase("waiting for x");
            progress.line("refused");
            progress.line("refused");
            progress.line("timed out");
        });
        assert_eq!(text, "waiting for x ..\nrefused\ntimed out\n");
    }

    #[test]
    fn a_terminal_gets_one_line_that_counts() {
        let text = shown(true, |progress| {
            progress.phase("waiting for x");
            progress.line("refused");
            thread::sleep(TICK + TICK / 4);
        });
        assert!(
            text.starts_with("\r\x1b[Kwaiting for x ..\r\x1b[Krefused\n\r\x1b[Kwaiting for x .."),
            "{text:?}"
        );
        assert!(text.contains("\r\x1b[Kwaiting for x .. 1 s"), "{text:?}");
        assert!(text.ends_with("\r\x1b[K"), "{text:?}");
    }

    #[test]
    fn what_a_peer_says_cannot_drive_the_terminal() {
        let hostile = "a\x1b[2Jb\r\u{9b}\u{202e}c\nnode: attested";
        assert_eq!(
            shown(false, |progress| progress.line(hostile)),
            "a\\u001b[2Jb\\u000d\\u009b\\u202ec\n    node: attested\n"
        );
        for terminal in [false, true] {
            let phase = shown(terminal, |progress| progress.phase(hostile));
            let phase = phase
                .trim_start_matches("\r\x1b[K")
                .trim_end_matches("\r\x1b[K");
            assert_eq!(
                phase.trim_end(),
                "a\\u001b[2Jb\\u000d\\u009b\\u202ec\\u000anode: attested .."
            );
        }
    }

    #[test]
    fn times_are_for_people() {
        let human = |s| human(Duration::from_secs(s));
        assert_eq!(
            [human(59), human(60), human(125), human(3661)],
            ["59 s", "1 min", "2 min 5 s", "1 h 1 min"]
        );
        // round: with a limit of 3 s, slightly less than 3 s have passed
        assert_eq!(super::human(Duration::from_millis(2_990)), "3 s");
    }
}
