//! `firstlight version`: the version of this program.

use base::program;
use clap::Args;
use serde_json::json;

use crate::shell::{error::Error, output::Output};

/// Print the version, and the commit that it was built from
///
/// `firstlight --version` and `-V` are the same.
#[derive(Args)]
#[command(after_help = "Example:\n  firstlight version -o json")]
pub struct Options {
    /// The form of the output.
    #[command(flatten)]
    pub output: Output,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    options.output.json(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("FIRSTLIGHT_COMMIT"),
    }))?;
    options.output.say(program::version("firstlight"))
}
