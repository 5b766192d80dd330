//! The events of a boot on the console, one line per event, in a format for people and tests.
//!
//! ```text
//! firstlight[unlock]    3.214s mapped: /dev/mapper/state
//! ```
//!
//! The same lines are kept in the record of the boot, a file of limited size that the programs of
//! the initramfs and of the booted system append to.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::logger;
use crate::stop::Stop;
use sys::clock;

/// The time after which the console says what the program waits for.
const SILENCE: Duration = Duration::from_secs(2);
/// Interval between two reports of the same wait.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum bytes of the record of a boot. A boot without long waits has about 3 KiB.
pub const RECORD_BYTES: usize = 32 << 10;
/// Maximum bytes of a line of the record.
const RECORD_LINE: usize = 300;
/// The events that repeat while something is missing. They fill at most half of the record, so that
/// the events after a long wait have room.
const REPEATED: [&str; 3] = ["waiting", "quote", "refused"];

/// Prints the events of one run of a program: the only lines that may leave the machine. They
/// contain phases, refusals and peers, but no secrets and no output of other programs.
#[derive(Clone, Copy)]
pub struct Timeline {
    stage: &'static str,
    /// A second output, which lives as long as the process.
    also: Option<&'static File>,
    /// The record of the boot, likewise.
    record: Option<&'static File>,
}

impl Timeline {
    /// Creates a timeline whose lines are marked with `stage`, e.g. `unlock` or `run`.
    pub fn new(stage: &'static str) -> Timeline {
        Timeline {
            stage,
            also: None,
            record: None,
        }
    }

    /// Also appends the events to the file at `path`: a console, a port to the host, or the pipe of
    /// a log shipper. A file that nobody reads blocks nothing; the lines that it does not accept
    /// are lost.
    pub fn also_to(self, path: &Path) -> io::Result<Timeline> {
        let file = File::options()
            .append(true)
            .create(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        Ok(Timeline {
            also: Some(Box::leak(Box::new(file))),
            ..self
        })
    }

    /// Also appends the events to the record of this boot at `path`, up to [`RECORD_BYTES`] in all:
    /// the first line of each.
    pub fn recorded_at(self, path: &Path) -> io::Result<Timeline> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(path)?;
        Ok(Timeline {
            record: Some(Box::leak(Box::new(file))),
            ..self
        })
    }

    /// Returns the record of this boot, at most [`RECORD_BYTES`]; empty if none is kept.
    pub fn record(&self) -> io::Result<String> {
        let mut bytes = vec![0; RECORD_BYTES];
        let length = match self.record {
            Some(record) => record.read_at(&mut bytes, 0)?,
            None => 0,
        };
        Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }

    /// Prints an event: `name` is a word of letters and dashes, `text` its description. The text
    /// must hold no secrets, because the host reads the console of a confidential VM. It may
    /// contain text from a peer, which cannot look like another event.
    pub fn event(&self, name: &str, text: impl Display) {
        // A node without a console still boots; `println!` would panic.
        let line = self.line(clock::since_boot(), name, &text.to_string());
        let _ = io::stdout().write_all(line.as_bytes());
        if let Some(mut also) = self.also {
            let _ = also.write_all(line.as_bytes());
        }
        if let Some(record) = self.record {
            let _ = keep(record, name, &line);
        }
    }

    /// Does `work`, which may hang: it uses the TPM, a disk or the network. If it takes longer than
    /// 2 s, and every 10 s after that, prints the event `waiting` with a description, e.g. `the TPM
    /// at device:/dev/tpmrm0 to extend PCR 15`.
    pub fn waiting_for<T>(&self, what: impl Display + Sync, work: impl FnOnce() -> T) -> T {
        let over = Stop::new();
        thread::scope(|scope| {
            let watch = thread::Builder::new().name("waiting".into());
            // Without the thread, the work is done but not reported.
            let _ = watch.spawn_scoped(scope, || self.report_wait(&what, &over));
            let _ended = over.stop_on_drop();
            work()
        })
    }

    fn report_wait(&self, what: &dyn Display, over: &Stop) {
        let (since, mut pause) = (Instant::now(), SILENCE);
        while !over.wait(pause) {
            let seconds = since.elapsed().as_secs();
            self.event("waiting", format_args!("for {what}, {seconds} s so far"));
            pause = REPORT_INTERVAL;
        }
    }

    fn line(&self, since_boot: Duration, name: &str, text: &str) -> String {
        // whole numbers: the formatting of floating-point numbers has 8 KB
        let (seconds, millis) = (since_boot.as_secs(), since_boot.subsec_millis());
        let mut line = format!(
            "firstlight[{}] {seconds:4}.{millis:03}s {name}: ",
            self.stage
        );
        logger::push_escaped(&mut line, text);
        line.push('\n');
        line
    }

    /// Prints the peak of this process's resident memory (proc_pid_status(5), `VmHWM`).
    pub fn peak_memory(&self) {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if let Some(peak) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
            self.event("memory", format_args!("at most {} resident", peak.trim()));
        }
    }
}

/// Appends the first line of an event to the record, if it has room.
fn keep(mut record: &File, name: &str, event: &str) -> io::Result<()> {
    let line = event.lines().next().unwrap_or_default();
    let mut ends = (0..=RECORD_LINE.min(line.len())).rev();
    let end = ends.find(|end| line.is_char_boundary(*end));
    let line = &line[..end.unwrap_or_default()];
    let limit = if REPEATED.contains(&name) {
        RECORD_BYTES / 2
    } else {
        RECORD_BYTES
    };
    // one call, since several threads append
    let line = format!("{line}\n");
    if record.metadata()?.len() + line.len() as u64 > limit as u64 {
        Ok(())
    } else {
        record.write_all(line.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_also_go_to_a_second_output_which_never_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("events");
        let timeline = Timeline::new("run").also_to(&file).unwrap();
        timeline.event("phase", "one");
        timeline.event("phase", "two");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(
            text.lines().count() == 2 && text.contains("s phase: one\n"),
            "{text}"
        );

        let pipe = dir.path().join("pipe");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        assert!(
            Timeline::new("run").also_to(&pipe).is_err(),
            "opening a pipe without a reader fails at once"
        );
        let _reader = File::options().read(true).write(true).open(&pipe).unwrap();
        let timeline = Timeline::new("run").also_to(&pipe).unwrap();
        for _ in 0..5000 {
            timeline.event(
                "phase",
                "a line that is long enough for the pipe to be full after some thousands of them",
            );
        }
    }

    #[test]
    fn the_record_keeps_a_line_of_each_event_and_has_room_after_a_long_wait() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("firstlight/timeline");
        let read = || fs::read_to_string(&file).unwrap();
        let unlock = Timeline::new("unlock").recorded_at(&file).unwrap();
        unlock.event("disk", format_args!("two\nlines of {}", "ä".repeat(500)));
        unlock.event("error", "ä".repeat(500));
        let text = read();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("s disk: two"), "{text}");
        assert!(lines[1].len() <= RECORD_LINE && lines[1].ends_with('ä'));
        assert_eq!(lines.len(), 2);

        for _ in 0..1000 {
            unlock.event("waiting", "for a key of disk 0123, 3600 s so far");
        }
        assert!(read().len() <= RECORD_BYTES / 2);
        unlock.event("mounted", "/run/state");
        let run = Timeline::new("run").recorded_at(&file).unwrap();
        run.event("start", "firstlight");
        let text = read();
        assert!(
            text.contains("s mounted: /run/state\nfirstlight[run] "),
            "{text}"
        );
        assert_eq!(run.record().unwrap(), text);
        for _ in 0..1000 {
            run.event("phase", "a phase that is entered again and again");
        }
        assert!(read().len() <= RECORD_BYTES);
    }

    #[test]
    fn a_wait_is_reported_while_it_lasts_and_only_if_it_is_long() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("events");
        let timeline = Timeline::new("run").also_to(&file).unwrap();
        let said = || std::fs::read_to_string(&file).unwrap();
        assert_eq!(timeline.waiting_for("a short work", || 7), 7);
        timeline.waiting_for(format!("the disk {}", "/dev/vdb"), || {
            while said().is_empty() {
                thread::sleep(Duration::from_millis(10));
            }
        });
        let said = said();
        assert!(
            said.contains(" waiting: for the disk /dev/vdb, ") && said.lines().count() == 1,
            "{said}"
        );
    }

    #[test]
    fn the_report_of_a_wait_ends_with_a_panic_of_the_work() {
        let work = || Timeline::new("run").waiting_for("a defect", || panic!("a defect"));
        assert!(std::panic::catch_unwind(work).is_err());
    }

    #[test]
    fn a_peers_words_cannot_forge_an_event() {
        let timeline = Timeline::new("unlock");
        let line = |text| timeline.line(Duration::from_millis(3214), "waiting", text);
        assert_eq!(
            line("for a key"),
            "firstlight[unlock]    3.214s waiting: for a key\n"
        );
        assert_eq!(
            line("no\nfirstlight[unlock]    3.300s mounted: /run/state\r\x1b[2J"),
            "firstlight[unlock]    3.214s waiting: no\n    firstlight[unlock]    3.300s mounted: /run/state\\u000d\\u001b[2J\n"
        );
    }
}
