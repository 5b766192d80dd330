//! `firstlight`, the operator's command. Each command has a file or folder with the struct of
//! its options, from which clap makes the parser, the help, the completions and the manual page; `commands`
//! lists the commands. They are in folders, and the modules of a
//! folder use only those of the folders above it in this list:
//!
//! - `shell`: the frame of the program. `config` adds defaults from a file to the arguments, `progress` shows what a command waits for.
//! - `workspace`: the operator's files, and the ways to a node and to the API server.
//! - `trust`: images, policies, evidence.
//! - `cluster`: a cluster's life, from `init` to `status` and `recover`.
//! - `migrate`: the move of a cluster of Constellation.
//! - `secrets`: what comes from the master secret.
//! - `nodes`: changes of a running cluster and of its nodes.
//!
//! Results go to standard output, everything else to standard error. The kind of an [`Error`] decides
//! the exit code.

pub mod cluster;
mod commands;
mod migrate;
pub mod nodes;
mod secrets;
mod shell;
pub mod trust;
pub mod workspace;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use sys::process;

use shell::{config, interrupt, output, warnings};

pub use shell::error::{ATTESTATION_REFUSED, Error, UNREACHABLE};

/// Runs the command that the arguments of the process name, and returns the exit code.
pub fn main() -> ExitCode {
    warnings::init();
    transport::dial::remember();
    let mut arguments = env::args_os().collect();
    let Err(error) = run(&mut arguments) else {
        return ExitCode::SUCCESS;
    };
    let code = error.exit_code();
    if code != 0 && output::wants_json(&arguments) {
        output::failed(&error);
    }
    error.print();
    ExitCode::from(code)
}

fn run(arguments: &mut Vec<OsString>) -> Result<(), Error> {
    // this process's memory contains the master secret
    process::keep_memory_private()
        .map_err(|error| Error::failed(format!("cannot keep memory out of core dumps: {error}")))?;
    config::complete(&commands::declared(), arguments)?;
    let (name, command) = commands::parse(arguments)?;
    // this command waits for signals itself
    if name != "metadata" {
        interrupt::watch(name.clone())?;
    }
    command
        .run()
        .map_err(|error| commands::error_of(&name, error))
}
