//! The operator's command.

use std::process::ExitCode;

use base::program;
use sys::wiping::Wiping;

/// Wipes freed memory, so that no copy of a secret stays in a buffer of a library.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

fn main() -> ExitCode {
    program::main("firstlight", &cli::help(), cli::run)
}
