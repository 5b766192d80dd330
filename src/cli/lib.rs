//! `firstlight`, the operator's command. Each command has a file or folder, which begins with the
//! table of its options; `commands` lists the commands. They are in folders, and the modules of a
//! folder use only those of the folders above it in this list:
//!
//! - `shell`: the frame of the program. `usage` reads the tables of options, `completions` and `man`
//!   print them, `progress` shows what a command waits for.
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

use std::ffi::OsString;

use base::program::{self, Failure};
use lexopt::prelude::*;
use sys::process;

use shell::{config, interrupt, output, usage, warnings};
use workspace::sources;

pub use shell::error::{ATTESTATION_REFUSED, Error, UNREACHABLE};

/// Commands with another name than before.
const RENAMED: [(&str, &str); 1] = [("machine", "node")];

/// Returns the text that `--help` prints.
pub fn help() -> String {
    commands::PROGRAM.help()
}

/// Runs the command that the arguments name.
pub fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    warnings::init();
    transport::dial::remember();
    // this process's memory contains the master secret
    process::keep_memory_private().map_err(|error| {
        Failure::failed(format!("cannot keep memory out of core dumps: {error}"))
    })?;
    let program = &commands::PROGRAM;
    let command = |name: OsString| {
        let name = program::text(name)?;
        let names = program.commands.iter().map(|command| command.name);
        let found = program.commands.iter().find(|command| command.name == name);
        found.ok_or_else(|| {
            let suggestion = match RENAMED.iter().find(|(former, _)| *former == name) {
                Some((_, now)) => format!("; it is {now} now"),
                None => usage::suggestion("", &name, names),
            };
            Failure::Usage(format!("there is no command {name:?}{suggestion}"))
        })
    };
    let mut before = usage::Values::new();
    let command = loop {
        match args.next()? {
            Some(Value(name)) if name == "help" => {
                let about = match args.next()? {
                    Some(Value(name)) => command(name)?,
                    Some(other) => return Err(other.unexpected().into()),
                    None => return Err(Failure::Help),
                };
                return Err(match args.next()? {
                    Some(more) => more.unexpected().into(),
                    None => Failure::HelpOn(about.help(program)),
                });
            }
            Some(Value(name)) => break command(name)?,
            Some(Long("help") | Short('h')) => return Err(Failure::Help),
            Some(Long("version") | Short('V')) => break command("version".into())?,
            Some(Long("output") | Short('o')) => before.push((output::OUTPUT.name, args.value()?)),
            Some(Long(unknown)) => {
                let known = ["help", "version", output::OUTPUT.name];
                let suggestion = usage::suggestion("--", unknown, known);
                let text = format!("there is no option --{unknown} before a command{suggestion}");
                return Err(Failure::Usage(text));
            }
            Some(other) => return Err(other.unexpected().into()),
            None => return Err(Failure::Usage("a command is missing".into())),
        }
    };
    let run = || {
        let given = command.parse(program, before, args, config::defaults)?;
        // this command waits for signals itself
        if command.name != "metadata" {
            interrupt::watch(command.name)?;
        }
        sources::set(&given)?;
        (command.run)(&given).inspect_err(|error| output::failed(&given, error))
    };
    run().map_err(|error: Error| error.of_command(command.name))
}
