//! `firstlight`, the operator's command. Each command has a file, which begins with the table of its
//! options; `commands` lists the commands. `usage` reads the tables, and `completions` and `man`
//! print them. The commands share the operator's `files`, `connect`, which reaches a node,
//! `progress`, which shows the progress of a command that waits, and `options`, which has the
//! options that belong to no other file.
//!
//! Results go to standard output, everything else to standard error. The kind of an [`Error`] decides
//! the exit code.

mod addons;
mod apply;
pub mod chart;
mod cluster_api;
mod cluster_id;
mod collateral;
mod commands;
mod completions;
mod components;
mod config;
mod connect;
mod consent;
mod doctor;
pub mod drain;
mod error;
mod etcd;
pub mod etcd_members;
pub mod explain;
mod files;
mod hash_secret;
mod init;
mod interrupt;
mod keeping;
mod known_nodes;
mod kubeconfig;
mod launch_digest;
mod launch_endorsement;
mod lock;
mod man;
mod master_secret;
mod measure;
mod measure_image;
mod metadata;
mod migrate;
pub mod node;
mod objects;
mod operator;
mod options;
mod output;
pub mod policy;
mod progress;
mod recover;
mod rollout;
mod roots;
mod share;
pub mod shares;
mod sources;
mod ssh;
mod state;
mod status;
pub mod timeline;
mod upgrade;
mod usage;
pub mod verify;
mod version;
mod warnings;
mod wrap;

use std::ffi::OsString;

use base::program::{self, Failure};
use lexopt::prelude::*;
use sys::process;

pub use error::{ATTESTATION_REFUSED, Error, UNREACHABLE};

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
