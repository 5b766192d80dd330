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

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cluster::apply::{grants_of, until};
use crate::shell::{error::Error, files::is_standard_input, output::Output, progress::Progress};
use crate::workspace::{
    kubeconfig::{self, KubeconfigOption},
    master_secret::{SecretOptions, SecretSource},
    options::time,
};
use clap::Args;
use facts::Facts;
use kubernetes::services::migration::Migration;
use record::{MigrationRecord, MoveStep};
pub use record::{MoveStep as Step, progress};
use serde_json::json;
use steps::Move;
pub use steps::{IMAGE_OF_FIRSTLIGHT, moves_nodes};
use wanted::{Options, Task, Wanted, WantedPolicy};
use workspace::{KUBECONFIG_FILE, MASTER_SECRET_FILE, Workspace};

/// The time limit of a request to the API server.
const REQUEST: Duration = Duration::from_secs(120);

/// Move a cluster of Constellation to Firstlight
///
/// `plan` reads the cluster and the files of Constellation's command in the present folder, its workspace. It changes
/// nothing, and prints what a move changes, what stays and who patches it from now on, what cannot be kept, and what
/// blocks it. The exit code is 0 if nothing blocks the move. docs/migration.md leads through a move.
///
/// `apply` moves the cluster, in the steps save, services, policy and nodes; with --end also the last one, after
/// which nothing of the old forms is accepted. It stops at the first failure. Run it again to continue, also on
/// another machine with the kubeconfig and the master secret: options that are not given are those of the earlier
/// run.
///
/// `undo` restores what the move has changed, and says what stays. It refuses after an upgrade of Kubernetes.
#[derive(Debug, Args)]
#[command(
    mut_arg("master_secret", |it| it.default_value(MASTER_SECRET_FILE)),
    mut_arg("kubeconfig", |it| it.help(format!("The administrator's kubeconfig; without it $KUBECONFIG, or else {KUBECONFIG_FILE}"))),
    after_help = "Examples:
  firstlight migrate plan
  firstlight migrate plan --policy new.json --image r.example/services:1 --node-image ami-01 --migrate-until 2027-01-31
  firstlight migrate apply --policy new.json --image r.example/services:1 --node-image ami-01 --migrate-until 2027-01-31
  firstlight migrate apply --end
  firstlight migrate undo",
)]
pub(crate) struct CommandLine {
    /// What to do
    action: Task,
    /// The attestation policy of the new image, as `firstlight measure` prints it (JSON)
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// A container image with /join-service, /key-service and /member-controller
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// The new image of the nodes as the cloud names it, for Constellation's node operator; not for QEMU and
    /// OpenStack
    #[arg(long, value_name = "NAME")]
    node_image: Option<String>,
    /// The last day, as 2027-01-31, on which disks of Constellation open without a record
    #[arg(long, value_name = "DATE", value_parser = until)]
    migrate_until: Option<Migration>,
    /// The last day, such as 2027-01-31, on which the key service still gives keys of volumes to Constellation's CSI
    /// drivers, which show no token; or never
    #[arg(long, value_name = "DATE", value_parser = until)]
    old_clients_until: Option<Migration>,
    /// The keys that each client of the key service may get (docs/services.md); by default those of the join service
    #[arg(long, value_name = "CALLER=CLASS,..;..", value_parser = grants_of)]
    grants: Option<String>,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    #[command(flatten)]
    secret: SecretOptions,
    /// With apply: also do the last step
    #[arg(long)]
    end: bool,
    /// Every node was started with the image, also those that cannot prove it to this command; for clouds in which no
    /// node operator moves them
    #[arg(long)]
    nodes_moved: bool,
    /// Record that this node is a control plane, if it has no record because it joined before records existed; may be
    /// repeated
    #[arg(long, value_name = "NODE")]
    record_control_plane: Vec<String>,
    /// The limit until the services are ready, and for the node operator to move one node, as 45m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "45m")]
    timeout: Duration,
    #[command(flatten)]
    output: Output,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let other = match self.action {
            Task::Plan | Task::Undo if self.end => Some("--end"),
            Task::Plan if self.nodes_moved => Some("--nodes-moved"),
            _ => None,
        };
        if let Some(name) = other {
            return Err(Error::Usage(format!("{name} is not for this action")));
        }
        let master_secret = self.secret.source();
        let is_input = |path: &Path| self.action != Task::Plan && is_standard_input(path);
        if matches!(&master_secret, SecretSource::File(path) if is_input(path)) {
            return Err(Error::Usage(
                "--master-secret -: each step reads it again, so it must be a file, a store or shares"
                    .into(),
            ));
        }
        Ok(Options {
            action: self.action,
            wanted: Wanted {
                policy: self.policy.as_deref().map(WantedPolicy::read).transpose()?,
                image: self.image,
                node_image: self.node_image,
                migration: self.migrate_until,
                old_clients: self.old_clients_until,
                grants: self.grants,
            },
            kubeconfig: self.kubeconfig.paths_or(KUBECONFIG_FILE),
            master_secret,
            control_planes: self.record_control_plane,
            end: self.end,
            nodes_moved: self.nodes_moved,
            output: self.output,
            timeout: self.timeout,
        })
    }
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
fn after(record: &MigrationRecord) -> &'static str {
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
