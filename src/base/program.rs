//! What the four programs' mains share: arguments in, one library call, exit code out.
//!
//! ```no_run
//! # use base::program::{self, Failure};
//! # struct Options;
//! # fn parse(_: lexopt::Parser) -> Result<Options, Failure> { Ok(Options) }
//! # fn serve(_: Options) -> Result<(), Failure> { Ok(()) }
//! fn main() -> std::process::ExitCode {
//!     program::main("key-service", "Usage: key-service ..", |args| serve(parse(args)?))
//! }
//! ```

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use log::LevelFilter;

use crate::logger;
use sys::process;
use sys::signal::StopSignals;

/// Why a program ends before its work is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// `--help`: the usage goes to standard output, exit code 0.
    Help,
    /// `--help` after a command: this text instead.
    HelpOn(String),
    /// `--version`: exit code 0.
    Version,
    /// The arguments make no sense: what is wrong, then a hint at `--help`, on standard error; exit code [`USAGE`].
    Usage(String),
    /// The work failed: the sentence goes to standard error, with the given exit code, [`FAILED`] unless it means more.
    Failed(u8, String),
}

/// Exit code of a failure that has none of its own.
pub const FAILED: u8 = 1;
/// Exit code of arguments that make no sense.
pub const USAGE: u8 = 2;

impl Failure {
    /// Of an error that has no exit code of its own.
    pub fn failed(error: impl Display) -> Self {
        Failure::Failed(FAILED, error.to_string())
    }
}

impl From<lexopt::Error> for Failure {
    fn from(error: lexopt::Error) -> Self {
        Failure::Usage(error.to_string())
    }
}

/// Runs `program` on the process's arguments and turns its result into output and exit code.
pub fn main(
    name: &str,
    usage: &str,
    program: impl FnOnce(lexopt::Parser) -> Result<(), Failure>,
) -> ExitCode {
    let print = |text: &str| {
        io::stdout()
            .write_all(text.as_bytes())
            .map_or(FAILED, |()| 0)
    };
    let code = match program(lexopt::Parser::from_env()) {
        Ok(()) => 0,
        // whoever closed standard output does not want the text
        Err(Failure::Help) => print(usage),
        Err(Failure::HelpOn(text)) => print(&text),
        Err(Failure::Version) => print(&format!("{name} {}\n", env!("CARGO_PKG_VERSION"))),
        Err(Failure::Usage(what)) => {
            complain(format_args!("{name}: {what}\nTry `{name} --help`."));
            USAGE
        }
        Err(Failure::Failed(code, what)) => {
            complain(format_args!("{name}: {what}"));
            code
        }
    };
    ExitCode::from(code)
}

/// What a service's main does before it starts a thread: logs from `level` on, keeps its memory to itself, and holds back
/// the signals that ask it to stop until it waits for them.
pub fn prepare_service(level: LevelFilter) -> Result<StopSignals, Failure> {
    logger::init(level);
    process::keep_memory_private().map_err(|error| {
        Failure::failed(format!("cannot keep memory out of core dumps: {error}"))
    })?;
    StopSignals::block().map_err(|error| Failure::failed(format!("cannot block signals: {error}")))
}

/// Waits until the service is asked to stop, and says so in the log.
pub fn wait_until_stopped(signals: &StopSignals, grace: Duration) -> Result<(), Failure> {
    let signal = signals
        .wait()
        .map_err(|error| Failure::failed(format!("cannot wait for signals: {error}")))?;
    log::info!("{signal}: callers have {} s to finish", grace.as_secs());
    Ok(())
}

fn complain(text: impl Display) {
    // there is nowhere else to say that standard error is closed
    let _ = writeln!(io::stderr(), "{text}");
}

/// The value of an option that is text.
pub fn text(value: OsString) -> Result<String, Failure> {
    value
        .into_string()
        .map_err(|value| Failure::Usage(format!("{value:?} is not UTF-8")))
}

/// The value of the option `--name` as any type that is read from text, e.g. an address.
pub fn parsed<T>(name: &str, value: OsString) -> Result<T, Failure>
where
    T: std::str::FromStr,
    T::Err: Display,
{
    let value = text(value)?;
    value
        .parse()
        .map_err(|error| Failure::Usage(format!("--{name} {value:?}: {error}")))
}
