//! The operator's command.

use std::process::ExitCode;

use firstlight::{cli, program};

fn main() -> ExitCode {
    program::main("firstlight", &cli::help(), cli::run)
}
