//! How a command prints its result: `-o text` for people, `-o json` for programs. docs/cli.md
//! describes the JSON of each command.

use std::fmt::Display;
use std::io::{self, Write};

use base::program::Failure;
use serde_json::Value;
use zeroize::Zeroizing;

use super::progress::lines;
use super::usage::Given;
use base::options::Opt;

/// The option.
pub const OUTPUT: Opt = Opt::value("output", "FORMAT", "text for people, or JSON for programs")
    .one_of(&NAMES)
    .or("text")
    .short('o');
const NAMES: [&str; 2] = ["text", "json"];

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
    pub fn of(given: &Given) -> Result<Output, Failure> {
        match given.one_of("output", &NAMES)? == "json" {
            true => Ok(Output::Json),
            false => Ok(Output::Text),
        }
    }

    /// Prints a line for people; nothing if the output is JSON.
    pub fn say(self, line: impl Display) -> Result<(), Failure> {
        match self {
            Output::Text => say(line),
            Output::Json => Ok(()),
        }
    }

    /// Prints the result for programs; nothing if the output is text.
    pub fn json(self, value: &Value) -> Result<(), Failure> {
        match self {
            Output::Text => Ok(()),
            Output::Json => say(format_args!("{value:#}")),
        }
    }
}

/// Prints a result on standard output.
pub fn say(result: impl Display) -> Result<(), Failure> {
    say_all(&format!("{result}\n"))
}

/// Prints complete lines on standard output, for people or as JSON. Escapes characters that a
/// terminal does not show as they are, in the same way as JSON.
pub fn say_all(text: &str) -> Result<(), Failure> {
    // the text may be a share of the master secret
    print(&Zeroizing::new(lines(text)))
}

/// Prints text without escaping: the caller has already escaped any text that came from others.
pub fn print(text: &str) -> Result<(), Failure> {
    let written = io::stdout().write_all(text.as_bytes());
    written.map_err(|error| Failure::failed(format!("standard output: {error}")))
}
