//! `firstlight etcd snapshot`: saves the objects of the cluster in a file of the operator. `firstlight etcd restore` brings them back.
//!
//! `snapshot` makes etcd save them on a control plane, `download` brings them here, compares etcd's own hash and shows that they are of this
//! cluster, and `signer` signs them.

mod download;
mod restore;
mod signer;
mod snapshot;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::nodes::operator::session::{Operator, OperatorOptions};
use crate::shell::{error::Error, output::Output};
use crate::workspace::{kubeconfig::KubeconfigOption, master_secret::SecretSource, options::time};
use snapshot::Options;

/// Save the objects of the cluster in a file, or bring them back
///
/// snapshot shows the plan, asks, and then: lets etcd of a control plane save a snapshot, by a Job for some seconds;
/// brings it here through the API server and the kubelet; compares the hash that etcd added; looks for what it has
/// written into the cluster just before; and deletes the Job and the file on the control plane. A control plane is
/// what a record says is one, not a label.
///
/// With the master secret it also writes FILE.signature, which says what the snapshot is of. restore verifies it.
/// Keep both files.
///
/// The file contains every Secret of the cluster in plaintext. It is created with mode 0600, and only if it is
/// complete.
///
/// restore is for a cluster whose etcd has lost its majority. It sends the snapshot to the control plane that is
/// left. This node checks that no other etcd runs, shows who signed the snapshot and which rights it changes, asks,
/// and makes etcd a cluster of one member with the objects of the snapshot. The node is verified, and the operator
/// proves to have the master secret, or a certificate by it. Run again after an interruption, it goes on; --undo
/// gives etcd its old data again until it has succeeded (docs/day-two/etcd.md).
#[derive(Debug, Args)]
#[command(
    mut_arg("master_secret", |it| it.default_value(None).help(SECRET_MEANS)),
    after_help = "Examples:
  firstlight etcd snapshot snapshot.db --dry-run
  firstlight etcd snapshot snapshot.db --yes --master-secret firstlight-mastersecret.json
  firstlight etcd restore snapshot.db --node control-plane-2
  firstlight etcd restore --undo --node control-plane-2=10.42.1.102",
)]
pub(crate) struct CommandLine {
    /// What to do
    action: EtcdAction,
    /// The file of the snapshot; snapshot makes it, restore --undo needs none
    #[arg(required_unless_present = "undo")]
    file: Option<PathBuf>,
    /// Do not ask
    #[arg(long)]
    yes: bool,
    /// Show the plan, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// With restore: the control plane that is left, with its address if the state file does not have it
    #[arg(long, value_name = "NAME[=HOST]", required_if_eq("action", "restore"))]
    node: Option<String>,
    /// With restore: give etcd its old data again
    #[arg(long, conflicts_with = "file")]
    undo: bool,
    /// With restore: accept a snapshot without a signature if it has this SHA-256, which `etcd snapshot` printed: you
    /// vouch for the file
    #[arg(long, value_name = "SHA256")]
    unsigned: Option<String>,
    #[command(flatten)]
    pub operator: OperatorOptions,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1h")]
    timeout: Duration,
}

/// The help text of `--master-secret`.
const SECRET_MEANS: &str = "The master secret, with which the snapshot is signed, and which proves the operator \
                            [default: firstlight-mastersecret.json, with which snapshot signs only if it exists]";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EtcdAction {
    Snapshot,
    Restore,
}

/// Runs the command.
pub fn run(given: &CommandLine) -> Result<(), Error> {
    match given.action {
        EtcdAction::Snapshot => snapshot::run(&given.of_snapshot()?),
        EtcdAction::Restore => {
            let options = given.of_restore()?;
            restore::run(&options, &Operator::of(&given.operator, given.timeout)?)
        }
    }
}

impl CommandLine {
    fn of_restore(&self) -> Result<restore::Options, Error> {
        if self.output == Output::Json {
            return Err(Error::Usage("restore prints text, no JSON".into()));
        }
        let node = self.node.as_deref().unwrap_or_default();
        let (name, at) = node.split_once('=').unwrap_or((node, node));
        Ok(restore::Options {
            file: self.file.clone(),
            node: (name.into(), at.into()),
            is_dry_run: self.dry_run,
            is_agreed: self.yes,
            unsigned: self.unsigned.clone().unwrap_or_default(),
        })
    }

    fn of_snapshot(&self) -> Result<Options, Error> {
        let of_restore = [
            ("node", self.node.is_some()),
            ("undo", self.undo),
            ("unsigned", self.unsigned.is_some()),
            ("certificate", self.operator.certificate.is_some()),
        ];
        if let Some((name, _)) = of_restore.iter().find(|(_, given)| *given) {
            return Err(Error::Usage(format!("--{name} is for restore")));
        }
        let secret = &self.operator.secret;
        Ok(Options {
            file: self.file.clone().unwrap_or_default(),
            is_agreed: self.yes,
            is_dry_run: self.dry_run,
            secret: match secret.source() {
                SecretSource::File(path) if secret.master_secret.is_none() && !path.exists() => {
                    None
                }
                source => Some(source),
            },
            state: self.operator.cluster.state.clone(),
            kubeconfig: self.kubeconfig.paths(),
            output: self.output,
            timeout: self.timeout,
        })
    }
}
