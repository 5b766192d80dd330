//! The commands of `firstlight` and their options.

use base::program::{FAILED, USAGE};

use crate::cluster::{apply, cluster_id, init, metadata, recover, status, timeline};
use crate::migrate;
use crate::nodes::{doctor, etcd, node, operator, rollout, upgrade};
use crate::secrets::{hash_secret, share, ssh, wrap};
use crate::shell::{
    completions,
    error::{ATTESTATION_REFUSED, UNREACHABLE},
    man,
    output::OUTPUT,
    usage::{HELP, Program, VERSION},
    version,
};
use crate::trust::{collateral, components, explain, measure, policy, roots, verify};

/// The program with all its commands.
pub const PROGRAM: Program = Program {
    name: "firstlight",
    summary: "makes a Kubernetes cluster of confidential virtual machines, and recovers it",
    commands: &[
        init::COMMAND,
        apply::COMMAND,
        status::COMMAND,
        doctor::COMMAND,
        recover::COMMAND,
        upgrade::COMMAND,
        rollout::COMMAND,
        node::COMMAND,
        etcd::COMMAND,
        migrate::COMMAND,
        operator::logs::COMMAND,
        operator::support::COMMAND,
        operator::kubeconfig::COMMAND,
        operator::people::COMMAND,
        ssh::COMMAND,
        verify::COMMAND,
        explain::COMMAND,
        policy::COMMAND,
        roots::COMMAND,
        collateral::COMMAND,
        measure::COMMAND,
        components::COMMAND,
        metadata::COMMAND,
        timeline::COMMAND,
        share::COMMAND,
        wrap::WRAP,
        wrap::UNWRAP,
        hash_secret::COMMAND,
        cluster_id::COMMAND,
        completions::COMMAND,
        man::COMMAND,
        version::COMMAND,
    ],
    groups: &[
        ("init", "The life of a cluster"),
        ("logs", "Nodes without a shell"),
        ("verify", "Trust"),
        ("measure", "Images and machines"),
        ("share", "Secrets"),
        ("completions", "The program itself"),
    ],
    options: &[HELP, VERSION, OUTPUT],
    exit_codes: &[
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
    ],
    examples: (
        "from a node's first boot to its recovery",
        &[
            "firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt \
             --kubernetes-version v1.36.4",
            "firstlight recover --endpoint 10.42.1.100 --policy policy.json --status",
            "firstlight recover --endpoint 10.42.1.100 --policy policy.json",
            "firstlight ssh --key ~/.ssh/id_ed25519.pub",
        ],
    ),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_examples_and_every_option_a_use() {
        for command in PROGRAM.commands {
            assert!(!command.examples.is_empty(), "{}", command.name);
            assert!(
                command
                    .examples
                    .iter()
                    .all(|line| line.contains(&format!("firstlight {}", command.name)))
            );
            // a shell interprets ? and &
            assert!(
                command
                    .examples
                    .iter()
                    .all(|line| !line.contains(" kms://")),
                "{}",
                command.name
            );
            for option in command.options {
                assert!(
                    !option.help.is_empty() && !option.help.ends_with('.'),
                    "--{}",
                    option.name
                );
                assert!(
                    !option.is_needed || option.default.is_none(),
                    "--{}",
                    option.name
                );
            }
        }
    }

    #[test]
    fn help_shows_each_command_in_its_group() {
        let help = PROGRAM.help();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text}: {help}"));
        for (first, title) in PROGRAM.groups {
            assert!(at(&format!("\n{title}:\n  {first} ")) > 0);
        }
        assert_eq!(PROGRAM.groups[0].0, PROGRAM.commands[0].name);
        assert!(at("\n  rollout ") < at("\nNodes without a shell:"));
        assert!(at("\n  ssh ") < at("\nTrust:"));
    }

    #[test]
    fn every_line_of_help_fits_a_wide_terminal() {
        let program = &PROGRAM;
        for text in program
            .commands
            .iter()
            .map(|command| command.help(program))
            .chain([PROGRAM.help()])
        {
            for line in text.lines() {
                assert!(line.len() <= 120, "{line}");
            }
        }
    }
}
