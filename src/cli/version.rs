//! `firstlight version`: the version of this program.

use base::program::{self, Failure};
use serde_json::json;

use super::output::Output;

/// Runs the command.
pub fn run(output: Output) -> Result<(), Failure> {
    output.json(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("FIRSTLIGHT_COMMIT"),
    }))?;
    output.say(program::version("firstlight"))
}
