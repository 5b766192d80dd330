//! `firstlight migrate`: moves a cluster of Constellation to Firstlight.
//!
//! `facts` reads the cluster, `workspace` the files of Constellation's command, `wanted` the options, `parts` knows Constellation's programs, and `plan` says
//! what a move changes and what blocks it.

mod facts;
mod parts;
mod plan;
mod wanted;
mod workspace;

use std::path::PathBuf;

use super::apply::{grants_of, until};
use super::error::Error;
use super::kubeconfig::{self, kubeconfigs_of};
use super::master_secret::{SHARE_FILE, master_secret_of};
use super::options::time;
use super::output::{OUTPUT, Output};
use super::progress::Progress;
use super::usage::{Command, Given, Operand, suggestion};
use base::options::Opt;
use base::program;
use facts::Facts;
use wanted::{Options, PolicyFile, Task, Wanted};
use workspace::{KUBECONFIG_FILE, MASTER_SECRET_FILE, Workspace};

/// The words of the operand.
const ACTIONS: [&str; 1] = ["plan"];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "migrate",
    summary: "move a cluster of Constellation to Firstlight",
    about: &[
        "`plan` reads the cluster and the files of Constellation's command in the present folder, its workspace. It changes nothing, and \
         prints what a move changes, what stays and who patches it from now on, what cannot be kept, and what blocks it. The exit code \
         is 0 if nothing blocks the move. docs/migration.md leads through a move.",
    ],
    operand: Some(Operand {
        value: "plan",
        words: &ACTIONS,
        is_needed: true,
        help: "what to do",
    }),
    options: &[
        Opt::value(
            "policy",
            "FILE",
            "the attestation policy of the new image, as `firstlight measure` prints it (JSON)",
        ),
        Opt::value(
            "image",
            "IMAGE",
            "a container image with /join-service and /key-service",
        ),
        Opt::value(
            "node-image",
            "NAME",
            "the new image of the nodes as the cloud names it, for Constellation's node operator; not for QEMU and OpenStack",
        ),
        Opt::value(
            "migrate-until",
            "DATE",
            "the last day, as 2027-01-31, on which disks of Constellation open without a record",
        ),
        Opt::value(
            "old-clients-until",
            "DATE",
            "the last day, as 2027-01-31, on which the key service gives keys of volumes to CSI drivers of Constellation, which \
             show no token, or never",
        ),
        Opt::value(
            "grants",
            "CALLER=CLASS,..;..",
            "the keys that each client of the key service may get (docs/services.md); by default those of the join service",
        ),
        Opt::value(
            "kubeconfig",
            "FILE",
            "the administrator's kubeconfig; without it $KUBECONFIG if it is set, as for kubectl, or else the default",
        )
        .or(KUBECONFIG_FILE),
        Opt::value(
            "master-secret",
            "FILE",
            "the cluster's master secret; - is standard input; storage://.. is a wrapped one in a store (docs/kms.md)",
        )
        .or(MASTER_SECRET_FILE),
        SHARE_FILE,
        Opt::value(
            "timeout",
            "TIME",
            "the limit for each request to the API server, as 90s, 10m or 1h",
        )
        .or("2m"),
        OUTPUT,
    ],
    examples: &[
        "firstlight migrate plan",
        "firstlight migrate plan --policy policy.json --image registry.example.com/firstlight:0.1.0 \
         --migrate-until 2027-01-31 --old-clients-until 2027-01-31 -o json",
    ],
    run: |given| run(&options(given)?),
};

fn options(given: &Given) -> Result<Options, Error> {
    let action = given.operand()?;
    let action = match &*action {
        "plan" => Task::Plan,
        other => {
            let suggestion = suggestion("", other, ACTIONS);
            return Err(Error::Usage(format!(
                "there is no action {other:?}{suggestion}"
            )));
        }
    };
    let text = |name: &str| given.value(name).map(program::text).transpose();
    let policy = given.value("policy").map(PathBuf::from);
    Ok(Options {
        action,
        wanted: Wanted {
            policy: policy.map(|path| PolicyFile::read(&path)).transpose()?,
            image: text("image")?,
            node_image: text("node-image")?,
            migration: until(given, "migrate-until")?,
            old_clients: until(given, "old-clients-until")?,
            grants: grants_of(given)?,
        },
        kubeconfig: kubeconfigs_of(given),
        master_secret: master_secret_of(given)?,
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let client = kubeconfig::client(&options.kubeconfig)?.within(options.timeout);
    let progress = Progress::on_stderr();
    progress.phase(format!("waiting for the API server {}", client.server()));
    client.wait_ready(&mut |why| progress.line(why))?;
    match options.action {
        Task::Plan => {
            progress.phase("reading the cluster");
            let facts = Facts::read(&client)?;
            let workspace = Workspace::read(&options.master_secret);
            drop(progress);
            plan::plan(&facts, &workspace, &options.wanted).print(options.output)
        }
    }
}
