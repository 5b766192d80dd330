//! How a command prints its result: `-o text` for people, `-o json` for programs. docs/cli.md
//! describes the JSON of each command.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use zeroize::Zeroizing;

use crate::shell::{error::Error, progress::lines, usage::Given};
use base::options::Opt;

/// The option.
pub const OUTPUT: Opt = Opt::value("output", "FORMAT", "text for people, or JSON for programs")
    .one_of(&NAMES)
    .or("text")
    .short('o');
const NAMES: [&str; 2] = ["text", "json"];

/// Whether the command has printed a result.
static HAS_PRINTED: AtomicBool = AtomicBool::new(false);

/// The form of a command's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Lines for people, each printed as soon as it is true.
    Text,
    /// One JSON value at the end.
    Json,
}

impl Output {
    /// Returns the form that the command line asks for.
    pub fn of(given: &Given) -> Result<Output, Error> {
        if given.one_of("output", &NAMES)? == "json" {
            Ok(Output::Json)
        } else {
            Ok(Output::Text)
        }
    }

    /// Prints a line for people; nothing if the output is JSON.
    pub fn say(self, line: impl Display) -> Result<(), Error> {
        match self {
            Output::Text => say(line),
            Output::Json => Ok(()),
        }
    }

    /// Prints the result for programs; nothing if the output is text.
    pub fn json(self, value: &Value) -> Result<(), Error> {
        match self {
            Output::Text => Ok(()),
            Output::Json => say(format_args!("{value:#}")),
        }
    }
}

/// Prints a result on standard output.
pub fn say(result: impl Display) -> Result<(), Error> {
    say_all(&format!("{result}\n"))
}

/// Prints complete lines on standard output, for people or as JSON. Escapes characters that a
/// terminal does not show as they are, in the same way as JSON.
pub fn say_all(text: &str) -> Result<(), Error> {
    // the text may be a share of the master secret
    print(&Zeroizing::new(lines(text)))
}

/// Prints an error for programs, if the command line asks for JSON and the command has printed none.
pub fn failed(given: &Given, error: &Error) {
    let has_option = (given.command().options.iter()).any(|option| option.name == OUTPUT.name);
    let is_json = has_option && matches!(Output::of(given), Ok(Output::Json));
    if is_json && !HAS_PRINTED.load(Ordering::Relaxed) {
        // if standard output is closed, nobody reads it
        let _ = Output::Json.json(&error.json());
    }
}

/// Prints text without escaping: the caller has already escaped any text that came from others.
pub fn print(text: &str) -> Result<(), Error> {
    HAS_PRINTED.store(true, Ordering::Relaxed);
    let written = io::stdout().write_all(text.as_bytes());
    written.map_err(|error| Error::failed(format!("standard output: {error}")))
}
