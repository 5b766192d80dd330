//! The common part of all programs' `main`: arguments in, one library call, exit code out.
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

use crate::logger;

/// The reason why a program ends before its work is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// `--help`: the usage goes to standard output; exit code 0.
    Help,
    /// `--version`: exit code 0.
    Version,
    /// The arguments are wrong. This text and a hint at `--help` go to standard error; exit code
    /// [`USAGE`].
    Usage(String),
    /// The work failed. The sentence goes to standard error; the exit code is [`FAILED`] unless
    /// another one has a meaning.
    Failed(u8, String),
}

/// Exit code of a failure without an exit code of its own.
pub const FAILED: u8 = 1;
/// Exit code of wrong arguments.
pub const USAGE: u8 = 2;

impl Failure {
    /// Creates the failure for an error without an exit code of its own.
    pub fn failed(error: impl Display) -> Self {
        Failure::Failed(FAILED, error.to_string())
    }
}

impl From<lexopt::Error> for Failure {
    fn from(error: lexopt::Error) -> Self {
        Failure::Usage(error.to_string())
    }
}

/// Runs `program` with the arguments of the process and turns its result into output and exit code.
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
        // If standard output is closed, its reader does not want the text.
        Err(Failure::Help) => print(usage),
        Err(Failure::Version) => print(&format!("{}\n", version(name))),
        Err(Failure::Usage(what)) => {
            complain(name, &what, &format!("\nTry `{name} --help`."));
            USAGE
        }
        Err(Failure::Failed(code, what)) => {
            complain(name, &what, "");
            code
        }
    };
    ExitCode::from(code)
}

/// Returns the version of a program, and the commit if the build knows it: `firstlight 0.2.0
/// (0123456789ab, 2026-11-22)`.
pub fn version(name: &str) -> String {
    let commit = option_env!("FIRSTLIGHT_COMMIT").map(|commit| format!(" ({commit})"));
    let commit = commit.unwrap_or_default();
    format!("{name} {}{commit}", env!("CARGO_PKG_VERSION"))
}

/// Writes to standard error why the program ends; control characters are escaped, but not in `next`.
pub fn complain(name: &str, what: &str, next: &str) {
    let mut text = format!("{name}: ");
    logger::push_escaped(&mut text, what);
    // If standard error is closed, there is no other place to report that.
    let _ = writeln!(io::stderr(), "{text}{next}");
}

/// Returns the value of an option as text. Errors if it is not UTF-8.
pub fn text(value: OsString) -> Result<String, Failure> {
    value
        .into_string()
        .map_err(|value| Failure::Usage(format!("{value:?} is not UTF-8")))
}

/// Parses the value of the option `--name`. Errors with the option and the value.
pub fn parsed<T>(name: &str, value: OsString) -> Result<T, Failure>
where
    T: std::str::FromStr,
    T::Err: Display,
{
    let value = text(value)?;
    value.parse().map_err(|error| wrong(name, &value, &error))
}

/// Not generic, so that each type that is parsed adds few bytes to a program.
fn wrong(name: &str, value: &str, error: &dyn Display) -> Failure {
    Failure::Usage(format!("--{name} {value:?}: {error}"))
}
