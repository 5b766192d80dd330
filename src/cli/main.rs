//! The operator's command.

use std::process::ExitCode;

use sys::keeping::WipingAllocator;

/// Wipes freed memory, so that no copy of a secret stays in a buffer of a library, and keeps some for
/// the next allocation.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

fn main() -> ExitCode {
    cli::main()
}
