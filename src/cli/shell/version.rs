//! `firstlight version`: the version of this program.

use base::program;
use serde_json::json;

use crate::shell::{
    error::Error,
    output::{OUTPUT, Output},
    usage::Command,
};

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "version",
    summary: "print the version, and the commit that it was built from",
    about: &["`firstlight --version` and `-V` are the same."],
    operand: None,
    options: &[OUTPUT],
    examples: &["firstlight version -o json"],
    run: |given| run(Output::of(given)?),
};

/// Runs the command.
pub fn run(output: Output) -> Result<(), Error> {
    output.json(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("FIRSTLIGHT_COMMIT"),
    }))?;
    output.say(program::version("firstlight"))
}
