//! The operator's command.

use std::process::ExitCode;

use base::program;
use sys::wiping::Wiping;

/// Copies of secrets do not outlive their use in buffers of libraries.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

fn main() -> ExitCode {
    program::main("firstlight", &cli::help(), cli::run)
}
