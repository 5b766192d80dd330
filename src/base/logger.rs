//! The logger behind the `log` facade: lines on standard error.
//!
//! ```text
//! [   12.345678] WARN  join_service: 10.42.1.7: attestation refused: ..
//! ```
//!
//! or, with [`Format::Json`], one JSON object a line:
//!
//! ```text
//! {"ts":1795432100.123456,"level":"warn","logger":"join_service","msg":"10.42.1.7: attestation refused: ..","uptime":12.345678}
//! ```
//!
//! The time in a text line is the time since boot. It needs no correct clock and matches the
//! kernel's own lines on a console. One record is one write, so that lines of two threads do not
//! mix. Characters that are not visible are escaped, because texts may come from peers. The second
//! and further lines of a record are indented, so that none looks like a record of its own.

use std::io::{self, Write as _};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use log::{Level, LevelFilter, Log, Metadata, Record};

use sys::clock;

use crate::text;

/// The crates of this project, separated by spaces; all others are libraries.
const OURS: &str = "atls attest base bootstrapper cli cloud cloud_api collateral disk endorsement hardware \
    http image keywrap kubernetes node proto refusal roots rpc services ssh sys tee tls tpm \
    transport unlock verifier volume";
/// The level for libraries; their other records help only in debugging.
const FOREIGN_LEVEL: LevelFilter = LevelFilter::Warn;

/// The form of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For collectors of logs: the keys `ts` (seconds since 1970), `level`, `logger`, `msg` and
    /// `uptime` (seconds since boot). The first four are those of zap, with which Constellation
    /// logs.
    Json,
}

impl FromStr for Format {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Format::Text),
            "json" => Ok(Format::Json),
            _ => Err("expected text or json"),
        }
    }
}

/// Starts to log records of `level` and above; of libraries only warnings and errors. Only the
/// first call has an effect.
pub fn init(level: LevelFilter, format: Format) {
    static LOGGER: OnceLock<Stderr> = OnceLock::new();
    let logger = LOGGER.get_or_init(|| Stderr { level, format });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
}

struct Stderr {
    level: LevelFilter,
    format: Format,
}

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata) -> bool {
        // The target of a program's own records is its name, with `_` instead of `-`.
        let is_ours = match metadata.target().split_once("::") {
            Some((name, _)) => OURS.split(' ').any(|ours| ours == name),
            None => true,
        };
        metadata.level()
            <= if is_ours {
                self.level
            } else {
                self.level.min(FOREIGN_LEVEL)
            }
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            let (uptime, message) = (clock::since_boot(), record.args().to_string());
            let line = match self.format {
                Format::Text => line(uptime, record.level(), record.target(), &message),
                Format::Json => {
                    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                    json_line(
                        now.unwrap_or_default(),
                        uptime,
                        record.level(),
                        record.target(),
                        &message,
                    )
                }
            };
            // If the log cannot be written, there is no other place to report that.
            let _ = io::stderr().lock().write_all(line.as_bytes());
        }
    }

    fn flush(&self) {}
}

fn line(since_boot: Duration, level: Level, target: &str, message: &str) -> String {
    let mut line = format!(
        "[{:5}.{:06}] {level:<5} {target}: ",
        since_boot.as_secs(),
        since_boot.subsec_micros()
    );
    push_escaped(&mut line, message);
    line.push('\n');
    line
}

fn json_line(
    since_1970: Duration,
    uptime: Duration,
    level: Level,
    target: &str,
    message: &str,
) -> String {
    let seconds = |time: Duration| format!("{}.{:06}", time.as_secs(), time.subsec_micros());
    let mut line = format!(
        "{{\"ts\":{},\"level\":\"{}\",\"logger\":\"",
        seconds(since_1970),
        level.as_str().to_ascii_lowercase()
    );
    push_json(&mut line, target);
    line.push_str("\",\"msg\":\"");
    push_json(&mut line, message.trim_end());
    line.push_str(&format!("\",\"uptime\":{}}}\n", seconds(uptime)));
    line
}

/// Appends a text to a string of JSON (RFC 8259 §7). All characters that are not visible are
/// escaped, also those that JSON permits.
fn push_json(line: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '"' | '\\' => line.extend(['\\', c]),
            '\n' => line.push_str("\\n"),
            c => text::push(line, c),
        }
    }
}

/// Appends a text that may come from a peer to a line of a log or console. The text can neither
/// look like a line of its own nor control the terminal.
pub(crate) fn push_escaped(line: &mut String, text: &str) {
    for c in text.trim_end().chars() {
        match c {
            '\n' => line.push_str("\n    "),
            '\t' => line.push('\t'),
            c => text::push(line, c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_time_level_module_and_message() {
        assert_eq!(
            line(
                Duration::from_micros(12_345_678),
                Level::Warn,
                "services::join_service",
                "no ticket"
            ),
            "[   12.345678] WARN  services::join_service: no ticket\n"
        );
    }

    #[test]
    fn a_message_can_neither_forge_a_record_nor_control_the_terminal() {
        let forged = line(
            Duration::ZERO,
            Level::Info,
            "x",
            "a\n[    0.000000] ERROR y: b\x1b[2J\r\u{9b}1m",
        );
        assert_eq!(
            forged,
            "[    0.000000] INFO  x: a\n    [    0.000000] ERROR y: b\\u001b[2J\\u000d\\u009b1m\n"
        );
    }

    #[test]
    fn a_line_of_json_has_the_whole_message_as_one_string() {
        let message = "a \"b\"\\c\n\t\u{1b}[2J\u{9b}\u{0}é\u{202e}\u{e0041}\n";
        let line = json_line(
            Duration::new(1_795_432_100, 123_456_000),
            Duration::from_micros(12_345_678),
            Level::Warn,
            "services::join_service",
            message,
        );
        assert!(line.ends_with('\n') && line.lines().count() == 1, "{line}");
        assert!(line.trim_end().chars().all(text::is_visible), "{line}");
        let read: serde_json::Value = serde_json::from_str(&line).unwrap();
        let expected = serde_json::json!({
            "ts": 1_795_432_100.123456,
            "level": "warn",
            "logger": "services::join_service",
            "msg": message.trim_end(),
            "uptime": 12.345678,
        });
        assert_eq!(read, expected);
    }

    #[test]
    fn libraries_log_only_warnings_and_errors() {
        let logger = Stderr {
            level: LevelFilter::Debug,
            format: Format::Text,
        };
        fn is_enabled(logger: &Stderr, target: &str, level: Level) -> bool {
            logger.enabled(&Metadata::builder().target(target).level(level).build())
        }
        let enabled = |target: &str, level| is_enabled(&logger, target, level);
        assert!(enabled("kms", Level::Debug) && enabled("bootstrapper", Level::Debug));
        let crates = std::fs::read_dir(std::path::Path::new(support::ROOT).join("src")).unwrap();
        for name in crates.map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
            assert!(enabled(&format!("{name}::part"), Level::Debug), "{name}");
        }
        assert!(!enabled("ureq::run", Level::Debug) && enabled("ureq::run", Level::Warn));
    }
}
