//! Shows how long the steps of a boot took: `firstlight timeline` and `firstlight status
//! --timeline`.
//!
//! The source is the boot record of a node, or any text with the same lines, such as a console log
//! or the journal. It may come from an untrusted machine, so texts are limited in size and contain
//! no control characters.

use std::fs;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

pub use crate::cluster::chart::BootPart;
use crate::cluster::chart::{svg, text};
use crate::shell::{
    error::Error,
    files::{self, FileError},
    output::{Output, say_all},
};
use clap::Args;
use serde_json::{Value, json};

/// Maximum number of events of a boot; a record has room for a few hundred.
const MAX_EVENTS: usize = 1000;
/// Maximum number of characters of an event's text.
const MAX_TEXT: usize = 120;
/// Maximum time since the kernel's start in seconds, about 3 years.
const MAX_TIME: f64 = 1e8;
/// If an event is earlier than the previous one by more than this, in seconds, it belongs to
/// another boot. Events of two threads may be in the wrong order.
const OTHER_BOOT: f64 = 1.0;
/// The beginning of the report of a wait for another machine or person.
const OTHERS: [&str; 4] = [
    "for a key",
    "for a cluster",
    "for the init secret",
    "for the operator",
];
/// Columns of a chart that is written to a file.
const COLUMNS: usize = 100;

/// Draw how long each step of a boot took
///
/// Draws the events of a boot as a chart: for each step, when it ended after the kernel's start, how long it took, a
/// bar, and the event that ended it. The events are those of FILE: a node's /run/firstlight/timeline, a log of its
/// console, or its journal. If the file has several boots, the last one is drawn.
///
/// `firstlight status --timeline` asks a running node for the same record.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight timeline console.log --svg boot.svg
  firstlight timeline - < boot-record")]
pub struct Options {
    /// The file with the events; - is standard input
    #[arg(value_name = "FILE")]
    record: PathBuf,
    /// Also write the chart as an SVG picture to this file, which is replaced if it exists
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Runs `firstlight timeline`.
pub fn run(options: &Options) -> Result<(), Error> {
    let record = if options.record.as_os_str() == "-" {
        files::read_open(&options.record, io::stdin())
    } else {
        files::read(&options.record)
    };
    let record = record?;
    let name = options.record.display().to_string();
    let record = String::from_utf8_lossy(&record);
    match options.output {
        Output::Text => show(&name, &record, options.svg.as_deref()),
        Output::Json => {
            let steps = steps_of(&name, &record)?;
            options.output.json(&json(&record))?;
            (options.svg.iter()).try_for_each(|picture| draw(&steps, picture))
        }
    }
}

/// Returns the events of the last boot in a record, for programs.
pub fn json(record: &str) -> Value {
    let event = |event: &BootEvent| json!({"stage": event.stage, "seconds": event.at, "event": event.name, "text": event.text});
    events(record).iter().map(event).collect()
}

/// Writes a chart as a picture.
pub fn draw(steps: &[BootPart], picture: &Path) -> Result<(), Error> {
    Ok(fs::write(picture, svg(steps))
        .map_err(|error| FileError::Io("write", picture.into(), error))?)
}

fn steps_of(name: &str, record: &str) -> Result<Vec<BootPart>, Error> {
    let steps = steps(&events(record));
    if !steps.is_empty() {
        Ok(steps)
    } else {
        let error = "has no events of a boot: expected lines as `firstlight[unlock]    3.214s mapped: /dev/mapper/state`";
        Err(Error::content(format!("{name} {error}")))
    }
}

/// Prints the chart of a record, and also writes it as a picture if a file is given. `name` is the
/// source of the record.
pub fn show(name: &str, record: &str, picture: Option<&Path>) -> Result<(), Error> {
    let steps = steps_of(name, record)?;
    say_all(&text(&steps, columns()))?;
    picture.map_or(Ok(()), |picture| draw(&steps, picture))
}

/// Returns the width of the terminal; if the output is not a terminal, the width that the user has
/// set.
fn columns() -> usize {
    let said = std::env::var("COLUMNS").ok();
    let terminal = io::stdout()
        .is_terminal()
        .then(|| sys::terminal::columns(io::stdout().as_fd()));
    (terminal.flatten())
        .or_else(|| said?.parse().ok())
        .unwrap_or(COLUMNS)
}

/// An event of a boot.
#[derive(Debug, Clone, PartialEq)]
pub struct BootEvent {
    /// The program: `init`, `unlock` or `run`.
    pub stage: &'static str,
    /// Seconds since the kernel's start.
    pub at: f64,
    /// The event's name, as `mapped`.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// Reads the events of the last boot in a record, a console log or a journal, sorted by time.
/// Ignores all other lines.
pub fn events(record: &str) -> Vec<BootEvent> {
    let mut events: Vec<BootEvent> = vec![];
    for event in record.lines().filter_map(event) {
        if (events.last()).is_some_and(|last| event.at < last.at - OTHER_BOOT) {
            events.clear();
        }
        if events.len() < MAX_EVENTS {
            events.push(event);
        }
    }
    events.sort_by(|a, b| a.at.total_cmp(&b.at));
    events
}

/// Reads a line, with or without the prefix of systemd: `[   30.378931] unlock[230]: `.
fn event(line: &str) -> Option<BootEvent> {
    let line = match line.split_once("]: ") {
        Some((_, rest)) if rest.starts_with("firstlight[") => rest,
        _ => line,
    };
    let (stage, rest) = line.strip_prefix("firstlight[")?.split_once(']')?;
    let (at, rest) = rest.trim_start().split_once("s ")?;
    let (name, text) = rest.split_once(':').unwrap_or((rest, ""));
    let is_name = |c: char| c.is_ascii_lowercase() || c == '-';
    let name = name.trim_end();
    let digits = at.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let at: f64 = at.parse().ok()?;
    let event = BootEvent {
        stage: ["init", "unlock", "run"]
            .into_iter()
            .find(|it| *it == stage)?,
        at,
        name: plain(name),
        text: plain(text.trim()),
    };
    (digits && at <= MAX_TIME && !name.is_empty() && name.chars().all(is_name)).then_some(event)
}

/// Returns the first characters of a text, with `?` for each character that is not printable ASCII:
/// a chart needs characters of one width.
fn plain(text: &str) -> String {
    let shown = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
    text.chars().take(MAX_TEXT).map(shown).collect()
}

/// Returns the time between the events as steps. An event ends a step, except for a phase, which
/// begins one. A report of a wait ends a step only if nothing follows it.
pub fn steps(events: &[BootEvent]) -> Vec<BootPart> {
    let mut steps = vec![];
    let (mut from, mut phase, mut is_wait) = (0.0, None, false);
    for (number, event) in events.iter().enumerate() {
        let is_last = number + 1 == events.len();
        let begins = event.name == "phase" && phase.is_none();
        match event.name.as_str() {
            "waiting" => is_wait |= OTHERS.iter().any(|other| event.text.starts_with(other)),
            // the little work before a phase counts as part of that phase
            "phase" if begins => phase = Some(&event.text),
            _ => {}
        }
        if event.name == "memory" || (event.name == "waiting" || begins) && !is_last {
            continue;
        }
        let what = match (phase, event.stage, event.name.as_str()) {
            (Some(phase), ..) => format!("phase: {phase}"),
            (None, "init", "start") => "kernel".into(),
            (None, "unlock", "start") => "kernel and initrd".into(),
            (None, "run", "start") => "operating system".into(),
            (None, _, name) if event.text.is_empty() => name.into(),
            (None, _, name) => format!("{name}: {}", event.text),
        };
        steps.push(BootPart {
            stage: event.stage,
            what,
            from,
            to: event.at,
            is_wait,
        });
        phase = (event.name == "phase").then_some(&event.text);
        is_wait = match event.name.as_str() {
            "ready" => event.text.starts_with("waiting for"),
            "ticket" | "key-slot" | "locked" | "member" => false,
            _ => is_wait,
        };
        from = event.at;
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::{corpus, mutations};

    const RECORD: &str = "\
firstlight[unlock]    2.310s start: firstlight 0.1.0
firstlight[unlock]    2.402s disk: /dev/vdb: it is blank: formatting it
firstlight[unlock]    3.214s mapped: /dev/mapper/state
firstlight[unlock]    5.000s mounted: /run/state
firstlight[run]    9.100s start: firstlight 0.1.0
firstlight[run]    9.300s ready: waiting for the operator's init on 0.0.0.0:9000
firstlight[run]   19.300s waiting: for a ticket or the operator's init, 10 s so far
firstlight[run]   99.250s quote: 9000 bytes in 30 ms
firstlight[run]   99.300s locked: this node belongs to a cluster from here on
firstlight[run]   99.301s phase: state disk
firstlight[run]   99.801s committed: the state disk has its permanent key
firstlight[run]   99.802s phase: kubeadm init
firstlight[run]  107.800s complete: this node comes back by itself after a reboot
firstlight[run]  107.801s memory: at most 9000 kB resident
";

    #[test]
    fn an_event_ends_a_step_and_a_phase_begins_one() {
        let steps = steps(&events(RECORD));
        let shown: Vec<_> = steps
            .iter()
            .map(|step| {
                (
                    step.what.as_str(),
                    (step.took() * 1000.0).round(),
                    step.is_wait,
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("kernel and initrd", 2310.0, false),
                ("disk: /dev/vdb: it is blank: formatting it", 92.0, false),
                ("mapped: /dev/mapper/state", 812.0, false),
                ("mounted: /run/state", 1786.0, false),
                ("operating system", 4100.0, false),
                (
                    "ready: waiting for the operator's init on 0.0.0.0:9000",
                    200.0,
                    false
                ),
                ("quote: 9000 bytes in 30 ms", 89950.0, true),
                (
                    "locked: this node belongs to a cluster from here on",
                    50.0,
                    true
                ),
                ("phase: state disk", 501.0, false),
                ("phase: kubeadm init", 7999.0, false),
            ]
        );
    }

    #[test]
    fn a_boot_that_has_not_ended_shows_what_it_does() {
        let of = |record: &str| steps(&events(record)).pop().unwrap();
        let (phase, _) = RECORD.split_once("firstlight[run]  107.8").unwrap();
        assert_eq!(of(phase).what, "phase: kubeadm init");
        let start = "firstlight[unlock] 2.0s start: x\n";
        let wait = of(&format!(
            "{start}firstlight[unlock] 12.0s waiting: for a key of disk 01\n"
        ));
        assert_eq!(
            (wait.what.as_str(), wait.took(), wait.is_wait),
            ("waiting: for a key of disk 01", 10.0, true)
        );
    }

    #[test]
    fn a_console_and_a_journal_are_read_too_and_only_their_last_boot() {
        let log = "\u{1b}[0m[    1.0] Linux\r\n\
                   firstlight[unlock]   10.000s start: the boot before\r\n\
                   [    3.3] unlock[230]: firstlight[unlock]    3.214s start: firstlight\r\n\
                   Nov 22 17:00:00 node unlock[230]: firstlight[unlock]    3.500s disk: /dev/vdb\n\
                   firstlight[init] 3.6s os\n";
        let events = events(log);
        let names: Vec<_> = events.iter().map(|event| event.name.as_str()).collect();
        assert_eq!(names, ["start", "disk", "os"]);
        assert_eq!(
            (events[0].at, events[0].text.as_str()),
            (3.214, "firstlight")
        );
    }

    #[test]
    fn what_is_no_event_is_no_event() {
        for line in [
            "",
            "firstlight[other] 1.0s start: x",
            "firstlight[run] -1.0s start: x",
            "firstlight[run] infs start: x",
            "firstlight[run] NaNs start: x",
            "firstlight[run] 1e9s start: x",
            "firstlight[run] 999999999999.0s start: x",
            "firstlight[run] 1.0s Start it: x",
            "    firstlight[run] 1.0s start: the words of a peer",
        ] {
            assert_eq!(events(line), [], "{line}");
        }
    }

    #[test]
    fn a_hostile_record_cannot_drive_the_terminal_and_makes_a_chart_of_limited_size() {
        let line = "firstlight[run] 1.0s start: \u{1b}[2J\u{202e}<script>&\"\u{7f}ä";
        let one = steps(&events(&format!("{line}{}", "x".repeat(10_000))));
        let chart = text(&one, 80);
        assert!(chart.lines().all(|line| line.len() <= 80), "{chart}");
        let many: String = (0..50_000)
            .map(|n| format!("firstlight[run] {n}.0s x: y\n"))
            .collect();
        assert_eq!(steps(&events(&many)).len(), MAX_EVENTS);
        for variant in mutations(RECORD.as_bytes(), 2000) {
            check(&variant);
        }
        for (_, input) in corpus("timeline") {
            check(&input);
        }
    }

    fn check(record: &[u8]) {
        let steps = steps(&events(&String::from_utf8_lossy(record)));
        for columns in [0, 40, 100, 500] {
            let chart = text(&steps, columns);
            assert!(
                chart.bytes().all(|b| matches!(b, b' '..=b'~' | b'\n')),
                "{chart}"
            );
            assert!(chart.lines().all(|line| line.len() <= columns.max(60)));
        }
        let picture = svg(&steps);
        assert!(picture.bytes().all(|b| matches!(b, b' '..=b'~' | b'\n')));
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    }
}
