//! The commands of `firstlight` and their options.

use std::ffi::OsString;
use std::path::PathBuf;

use base::options::table;
use base::program::{FAILED, USAGE};
use clap::error::ErrorKind;
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand, value_parser};
use collateral::FetchSettings;

use crate::cluster::{apply, cluster_id, init, metadata, recover, status, timeline};
use crate::migrate;
use crate::nodes::{doctor, etcd, node, operator, rollout, upgrade};
use crate::secrets::{hash_secret, share, ssh, wrap};
use crate::shell::{
    completions,
    config::CONFIG,
    error::{ATTESTATION_REFUSED, Error, UNREACHABLE},
    man,
    output::Output,
    version,
};
use crate::trust::{collateral as fetch, components, explain, measure, policy, roots, verify};
use crate::workspace::sources::SourceOptions;

/// Makes a Kubernetes cluster of confidential virtual machines, and recovers it
#[derive(Parser)]
#[command(name = "firstlight", disable_version_flag = true, term_width = 120, args_override_self = true, after_help = further_help())]
struct Firstlight {
    /// Print the version
    #[arg(short = 'V', long)]
    version: bool,
    #[command(flatten)]
    output: Output,
    #[command(subcommand)]
    command: Option<Command>,
}

/// A command, in the order of an operator's work.
#[derive(Subcommand)]
pub enum Command {
    Init(init::CommandLine),
    Apply(apply::CommandLine),
    Status(status::CommandLine),
    Doctor(doctor::CommandLine),
    Recover(recover::CommandLine),
    Upgrade(upgrade::CommandLine),
    Rollout(rollout::CommandLine),
    #[command(alias = "machine")]
    Node(node::CommandLine),
    Etcd(etcd::CommandLine),
    Migrate(migrate::CommandLine),
    Logs(operator::logs::CommandLine),
    Support(operator::support::CommandLine),
    Kubeconfig(operator::kubeconfig::CommandLine),
    Operator(operator::people::CommandLine),
    Ssh(ssh::Options),
    Verify(verify::CommandLine),
    Explain(explain::CommandLine),
    Policy(policy::CommandLine),
    Roots(roots::Options),
    Collateral(fetch::Options),
    Measure(Box<measure::CommandLine>),
    Components(components::CommandLine),
    Metadata(metadata::CommandLine),
    Timeline(timeline::Options),
    Share(share::Options),
    Wrap(wrap::Options),
    Unwrap(wrap::Unwrap),
    HashSecret(hash_secret::Options),
    ClusterId(cluster_id::Options),
    Completions(completions::Options),
    Man(man::Options),
    Version(version::Options),
}

/// The groups of commands in the help: the first command of each, and its title.
const GROUPS: [(&str, &str); 6] = [
    ("init", "The life of a cluster"),
    ("logs", "Nodes without a shell"),
    ("verify", "Trust"),
    ("measure", "Images and machines"),
    ("share", "Secrets"),
    ("completions", "The program itself"),
];

/// The help of a command: one line for each option, below the paragraphs of its description.
const TEMPLATE: &str =
    "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// The exit codes, each with its meaning.
const EXIT_CODES: [(u8, &str); 11] = [
    (0, "success"),
    (FAILED, "the command failed, or the node refused"),
    (USAGE, "the arguments are invalid"),
    (
        ATTESTATION_REFUSED,
        "attestation refused: the node does not meet the policy; the text names the register, expected and got",
    ),
    (
        UNREACHABLE,
        "the node could not be reached, or did not answer in time",
    ),
    (
        status::report::WAITS_FOR_KEY,
        "status, recover --all: the node waits for the key of its disk",
    ),
    (
        status::report::FRESH,
        "status, recover --all: the node belongs to no cluster",
    ),
    (
        status::report::OTHER_CLUSTER,
        "status, recover --all: the node is a member of another cluster, or the ID of your cluster is unknown",
    ),
    (
        status::report::UNPROVEN,
        "status: only a join service answers, which proves nothing about its node",
    ),
    (
        doctor::FOUND,
        "doctor: a check has found an error or a warning",
    ),
    (130, "SIGINT has ended the command; 143 if it was SIGTERM"),
];

/// Returns the end of the program's help.
fn further_help() -> String {
    let codes = EXIT_CODES.map(|(code, what)| (code.to_string(), what.to_owned()));
    format!(
        "Exit codes:\n{}
Example, from a node's first boot to its recovery:
  firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt --kubernetes-version v1.36.4
  firstlight recover --endpoint 10.42.1.100 --policy policy.json --status
  firstlight recover --endpoint 10.42.1.100 --policy policy.json
  firstlight ssh --key ~/.ssh/id_ed25519.pub",
        table(codes)
    )
}

/// Returns the program as the structs of the options declare it.
pub fn declared() -> clap::Command {
    Firstlight::command().arg(
        Arg::new(CONFIG)
            .long(CONFIG)
            .global(true)
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .help("A file with defaults of these options; by default firstlight.toml in the present folder, if it exists"),
    )
}

/// Returns the program with the form of its help.
fn program() -> clap::Command {
    let program = declared();
    let mut commands = String::new();
    for command in program.get_subcommands() {
        let name = command.get_name();
        if let Some((_, title)) = GROUPS.iter().find(|(first, _)| *first == name) {
            commands.push_str(&format!("\n{title}:\n"));
        }
        let about = command.get_about().map(ToString::to_string);
        commands.push_str(&format!("  {name:11}  {}\n", about.unwrap_or_default()));
    }
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{commands}\nOptions:\n{{options}}{{after-help}}"
    );
    program.help_template(template).mut_subcommands(|command| {
        let long = command.get_long_about().map(ToString::to_string);
        let paragraphs = long.and_then(|it| Some(it.split_once("\n\n")?.1.to_owned()));
        // a longer description would also change the form of the list of options
        let command = command.long_about(None).help_template(TEMPLATE);
        match paragraphs {
            Some(paragraphs) => command.before_help(paragraphs),
            None => command,
        }
    })
}

/// Returns the command in the arguments, and its name.
pub fn parse(arguments: &[OsString]) -> Result<(String, Command), Error> {
    let mut program = program();
    let matches = program.try_get_matches_from_mut(arguments)?;
    let given = Firstlight::from_arg_matches(&matches).map_err(|it| it.format(&mut program))?;
    let name = matches.subcommand_name().unwrap_or("version").to_owned();
    match given.command {
        Some(command) => Ok((name, command)),
        None if given.version => {
            let output = given.output;
            Ok((name, Command::Version(version::Options { output })))
        }
        None => {
            let missing = program.error(ErrorKind::MissingSubcommand, "a command is missing");
            Err(missing.into())
        }
    }
}

/// Returns the error of this command: a wrong use with a hint at the command's help.
pub fn error_of(name: &str, error: Error) -> Error {
    let mut program = program();
    program.build();
    match program.find_subcommand_mut(name) {
        Some(command) => error.of(command),
        None => error,
    }
}

impl Command {
    /// Runs the command.
    pub fn run(self) -> Result<(), Error> {
        let sources = match &self {
            Command::Init(it) => &it.policy.sources,
            Command::Status(it) => &it.policy.sources,
            Command::Doctor(it) => &it.policy.sources,
            Command::Recover(it) => &it.policy.sources,
            Command::Node(it) => &it.control.operator.sources,
            Command::Etcd(it) => &it.operator.sources,
            Command::Logs(it) => &it.operator.sources,
            Command::Support(it) => &it.operator.sources,
            Command::Kubeconfig(it) => &it.operator.sources,
            Command::Operator(it) => &it.operator.sources,
            Command::Verify(it) => &it.policy.sources,
            Command::Explain(it) => &it.sources,
            _ => &SourceOptions::default(),
        };
        match &self {
            Command::Collateral(options) => options.set_sources()?,
            _ => sources.set(FetchSettings::default())?,
        }
        match self {
            Command::Init(it) => init::run(&it.options()?),
            Command::Apply(it) => apply::run(&it.options()?),
            Command::Status(it) => status::run(&it.options()?),
            Command::Doctor(it) => doctor::run(&it.options()?),
            Command::Recover(it) => recover::run(it),
            Command::Upgrade(it) => upgrade::run(&it.options()?),
            Command::Rollout(it) => rollout::run(&it.options()?),
            Command::Node(it) => node::run(it),
            Command::Etcd(it) => etcd::run(&it),
            Command::Migrate(it) => migrate::run(&it.options()?),
            Command::Logs(it) => operator::logs::run(&it),
            Command::Support(it) => operator::support::run(&it),
            Command::Kubeconfig(it) => operator::kubeconfig::run(&it),
            Command::Operator(it) => operator::people::run(&it),
            Command::Ssh(it) => ssh::run(&it),
            Command::Verify(it) => verify::run(&it.options()?),
            Command::Explain(it) => explain::run(&it.options()?),
            Command::Policy(it) => policy::run(&it.options()?),
            Command::Roots(it) => roots::run(it.output),
            Command::Collateral(it) => fetch::run(&it),
            Command::Measure(it) => measure::run(&it.options()?),
            Command::Components(it) => components::run(&it.options()?),
            Command::Metadata(it) => metadata::run(it.options()?),
            Command::Timeline(it) => timeline::run(&it),
            Command::Share(it) => share::run(&it),
            Command::Wrap(it) => wrap::wrap(&it),
            Command::Unwrap(it) => wrap::unwrap(&it),
            Command::HashSecret(it) => hash_secret::run(&it),
            Command::ClusterId(it) => cluster_id::run(&it),
            Command::Completions(it) => completions::run(&it, declared()),
            Command::Man(_) => man::run(declared()),
            Command::Version(it) => version::run(&it),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_examples_and_every_option_a_use() {
        program().debug_assert();
        for command in program().get_subcommands() {
            let name = command.get_name();
            let examples = command.get_after_help().map(ToString::to_string);
            let examples = examples.unwrap_or_default();
            let mut lines = examples.lines().skip(1).peekable();
            assert!(lines.peek().is_some(), "{name}");
            for line in lines {
                assert!(line.contains(&format!("firstlight {name}")), "{line}");
                // a shell interprets ? and &
                assert!(!line.contains(" kms://"), "{line}");
            }
            for arg in command.get_arguments() {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(!help.is_empty() && !help.ends_with('.'), "{name} {arg}");
                assert!(arg.get_long_help().is_none(), "{name} {arg}");
            }
        }
    }

    #[test]
    fn help_shows_each_command_in_its_group() {
        let help = program().render_help().to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text}: {help}"));
        for (first, title) in GROUPS {
            assert!(at(&format!("\n{title}:\n  {first} ")) > 0);
        }
        assert!(at("\n  rollout ") < at("\nNodes without a shell:"));
        assert!(at("\n  ssh ") < at("\nTrust:"));
    }

    #[test]
    fn every_line_of_help_fits_a_wide_terminal() {
        let mut program = program();
        program.build();
        let mut helps = vec![program.render_help()];
        helps.extend(
            program
                .get_subcommands_mut()
                .map(clap::Command::render_long_help),
        );
        for text in helps {
            for line in text.to_string().lines() {
                assert!(line.len() <= 120, "{line}");
            }
        }
    }
}
