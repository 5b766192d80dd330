//! `firstlight migrate`: moves a cluster of Constellation to Firstlight.
//!
//! `facts` reads the cluster, `workspace` the files of Constellation's command, and `wanted` has the options. `parts` knows Constellation's
//! programs, and `plan` says what a move changes and what blocks it. `steps` does the steps of a move, of which `nodes` waits for the nodes,
//! `undo` restores, and `record` says how far the move is.

mod facts;
mod nodes;
mod parts;
mod plan;
mod record;
mod steps;
mod undo;
mod wanted;
mod workspace;

use std::path::PathBuf;
use std::time::Duration;

use crate::cluster::apply::{RECORD_CONTROL_PLANE, grants_of, until};
use crate::shell::{
    error::Error,
    output::{OUTPUT, Output},
    progress::Progress,
    usage::{Command, Given, Operand, suggestion},
};
use crate::workspace::{
    kubeconfig::{self, KUBECONFIG, kubeconfigs_of},
    master_secret::{MASTER_SECRET, SHARE_FILE, master_secret_of},
    options::time,
};
use base::options::Opt;
use base::program;
use facts::Facts;
use record::{MoveStep, Record};
pub use record::{MoveStep as Step, progress};
use serde_json::json;
use steps::Move;
pub use steps::{IMAGE_OF_FIRSTLIGHT, moves_nodes};
use wanted::{Options, PolicyFile, Task, Wanted};
use workspace::{KUBECONFIG_FILE, MASTER_SECRET_FILE, Workspace};

/// The time limit of a request to the API server.
const REQUEST: Duration = Duration::from_secs(120);
/// The words of the operand.
const ACTIONS: [&str; 3] = ["plan", "apply", "undo"];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "migrate",
    summary: "move a cluster of Constellation to Firstlight",
    about: &[
        "`plan` reads the cluster and the files of Constellation's command in the present folder, its workspace. It changes nothing, and \
         prints what a move changes, what stays and who patches it from now on, what cannot be kept, and what blocks it. The exit code \
         is 0 if nothing blocks the move. docs/migration.md leads through a move.",
        "`apply` moves the cluster, in the steps save, services, policy and nodes; with --end also the last one, after which nothing of the \
         old forms is accepted. It stops at the first failure. Run it again to continue, also on another machine with the kubeconfig and the \
         master secret: options that are not given are those of the earlier run.",
        "`undo` restores what the move has changed, and says what stays. It refuses after an upgrade of Kubernetes.",
    ],
    operand: Some(Operand {
        value: "plan|apply|undo",
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
        KUBECONFIG.or(KUBECONFIG_FILE),
        MASTER_SECRET.or(MASTER_SECRET_FILE),
        SHARE_FILE,
        Opt::flag("end", "apply: also do the last step"),
        Opt::flag(
            "nodes-moved",
            "every node was started with the image, also those that cannot prove it to this command; for clouds in which no node operator \
             moves them",
        ),
        RECORD_CONTROL_PLANE,
        Opt::value(
            "timeout",
            "TIME",
            "the limit until the services are ready, and for the node operator to move one node, as 45m or 1h",
        )
        .or("45m"),
        OUTPUT,
    ],
    examples: &[
        "firstlight migrate plan",
        "firstlight migrate plan --policy new.json --image r.example/services:1 --node-image ami-01 --migrate-until 2027-01-31",
        "firstlight migrate apply --policy new.json --image r.example/services:1 --node-image ami-01 --migrate-until 2027-01-31",
        "firstlight migrate apply --end",
        "firstlight migrate undo",
    ],
    run: |given| run(&options(given)?),
};

fn options(given: &Given) -> Result<Options, Error> {
    let action = given.operand()?;
    let action = match &*action {
        "plan" => Task::Plan,
        "apply" => Task::Apply,
        "undo" => Task::Undo,
        other => {
            let suggestion = suggestion("", other, ACTIONS);
            return Err(Error::Usage(format!(
                "there is no action {other:?}{suggestion}"
            )));
        }
    };
    let others: &[&str] = match action {
        Task::Plan => &["end", "nodes-moved"],
        Task::Apply => &[],
        Task::Undo => &["end"],
    };
    if let Some(name) = others.iter().find(|name| given.has(name)) {
        return Err(Error::Usage(format!("--{name} is not for this action")));
    }
    if action != Task::Plan && given.value("master-secret").is_some_and(|path| path == "-") {
        return Err(Error::Usage(
            "--master-secret -: each step reads it again, so it must be a file, a store or shares"
                .into(),
        ));
    }
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
        control_planes: given.texts("record-control-plane")?,
        end: given.has("end"),
        nodes_moved: given.has("nodes-moved"),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let client = kubeconfig::client(&options.kubeconfig)?.within(REQUEST);
    let progress = Progress::on_stderr();
    progress.phase(format!("waiting for the API server {}", client.server()));
    client.wait_ready(&mut |why| progress.line(why))?;
    let the_move = || Move::new(&client, options, &progress);
    match options.action {
        Task::Plan => {
            progress.phase("reading the cluster");
            let facts = Facts::read(&client)?;
            let workspace = Workspace::read(&options.master_secret);
            drop(progress);
            plan::plan(&facts, &workspace, &options.wanted).print(options.output)
        }
        Task::Apply => {
            let record = the_move()?.apply()?;
            let done = record.done.name();
            options.output.json(
                &json!({"done": done, "begun": record.begun.name(), "record": record::FILE}),
            )?;
            options.output.say(after(&record))
        }
        Task::Undo => {
            let stays = the_move()?.undo()?;
            options.output.json(&json!({ "stays": stays }))?;
            options.output.say(format!(
                "the move is undone. What stays: {}",
                stays.join("; ")
            ))
        }
    }
}

/// Returns what comes after the steps that are done.
fn after(record: &Record) -> &'static str {
    match record.done {
        MoveStep::End => {
            "the move is complete: nothing of the old forms is accepted. `firstlight migrate undo` can still go back, until Kubernetes is \
             upgraded; docs/migration.md says what to remove"
        }
        _ if record.begun == MoveStep::End => {
            "the last step has begun and is not done: some old forms are accepted, and others are not. Run `firstlight migrate apply --end`"
        }
        _ => {
            "the cluster runs Firstlight, and still accepts the old forms. Move the data of volumes to another driver, see whether all works, \
             and then run `firstlight migrate apply --end`"
        }
    }
}
