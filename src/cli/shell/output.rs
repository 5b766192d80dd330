//! How a command prints its result: `-o text` for people, `-o json` for programs. docs/cli.md
//! describes the JSON of each command.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, ValueEnum, value_parser};
use serde_json::Value;
use zeroize::Zeroizing;

use crate::shell::{error::Error, progress::lines};

/// The name of the option.
pub const OUTPUT: &str = "output";

/// Whether the command has printed a result.
static HAS_PRINTED: AtomicBool = AtomicBool::new(false);

/// The form of a command's result: lines, each printed as soon as it is true, or one JSON value at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Text,
    Json,
}

impl Args for Output {
    fn augment_args(command: Command) -> Command {
        let option = Arg::new(OUTPUT).short('o').long(OUTPUT);
        let option = option.value_name("FORMAT").default_value("text");
        command.arg(
            option
                .value_parser(value_parser!(Output))
                .help("Text for people, or JSON for programs"),
        )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Output::augment_args(command)
    }
}

impl FromArgMatches for Output {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Output, clap::Error> {
        let given = matches.get_one(OUTPUT).copied();
        Ok(given.unwrap_or(Output::Text))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Output::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Output {
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

/// Returns whether the arguments ask for JSON, also if they are wrong otherwise.
pub fn wants_json(arguments: &[OsString]) -> bool {
    let texts: Vec<_> = arguments.iter().map(|it| it.to_string_lossy()).collect();
    let mut form = None;
    for (index, text) in texts.iter().enumerate() {
        let value = match &**text {
            "--" => break,
            "-o" | "--output" => texts.get(index + 1).map(|next| &**next),
            other => (other.strip_prefix("--output=")).or_else(|| other.strip_prefix("-o")),
        };
        form = value.map(|it| it.trim_start_matches('=')).or(form);
    }
    form == Some("json")
}

/// Prints an error for programs, unless the command has printed a result.
pub fn failed(error: &Error) {
    if !HAS_PRINTED.load(Ordering::Relaxed) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_form_of_the_arguments_counts() {
        for (args, expected) in [
            ("-o json verify", true),
            ("verify --fast -o=json", true),
            ("verify -ojson", true),
            ("verify --timeout soon --output json", true),
            ("-o json verify --output=text", false),
            ("verify -- --output=json", false),
            ("verify -o", false),
        ] {
            let args: Vec<OsString> = args.split(' ').map(Into::into).collect();
            assert_eq!(wants_json(&args), expected, "{args:?}");
        }
    }
}
