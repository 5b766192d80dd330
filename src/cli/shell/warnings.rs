//! Writes the warnings of the operator's command to standard error in the form of its other
//! sentences: without the time since the machine's start, and without module names.

use std::io::{self, Write};

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::shell::progress::block;

struct Warnings;

/// Starts to write warnings and errors. Only the first call has an effect.
pub fn init() {
    if log::set_logger(&Warnings).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}

impl Log for Warnings {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            // standard error may be closed
            let _ = io::stderr().lock().write_all(line(record).as_bytes());
        }
    }

    fn flush(&self) {}
}

fn line(record: &Record) -> String {
    let level = match record.level() {
        Level::Error => "error",
        _ => "warning",
    };
    format!(
        "firstlight: {level}: {}\n",
        block(&record.args().to_string())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_one_sentence_of_the_program() {
        let record = |level, text: &str| {
            let args = format_args!("{text}");
            line(
                &Record::builder()
                    .level(level)
                    .target("cli::trust::roots")
                    .args(args)
                    .build(),
            )
        };
        assert_eq!(
            record(Level::Warn, "a.pem is old"),
            "firstlight: warning: a.pem is old\n"
        );
        assert_eq!(
            record(Level::Error, "a\nfirstlight: forged\u{1b}[2J"),
            "firstlight: error: a\n    firstlight: forged\\u001b[2J\n"
        );
    }
}
