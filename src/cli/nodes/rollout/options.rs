//! The options of the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kubernetes::parameters::KubernetesVersion;

use super::record::{UPDATE, Way};
use crate::nodes::drain::{DrainOptions, Permitted};
use crate::shell::{error::Error, output::Output};
use crate::trust::components::{self, ListExceptions, Servers};
use crate::workspace::{kubeconfig::KubeconfigOption, options::time, state::STATE_FILE};

/// Bring an image or a version of Kubernetes to the nodes, one after the other
///
/// `plan` shows what `start` would do, and what blocks it. `start` shows it, too, asks, and then does it: the policy
/// accepts both images; one node after the other is cordoned, drained, changed, and must prove the new image and be
/// Ready; at the end the old image leaves the policy. It stops at the first failure, and the other nodes stay as they
/// are.
///
/// The cluster has the record of the rollout (ConfigMap kube-system/firstlight-rollout), so any operator can continue
/// it: `continue` goes on after a stop, `pause` stops it when the present node is done, and `abort` ends it. `status`
/// shows where it is.
///
/// A node gets the image in place, by a command of its own and a reboot, or is replaced by another machine
/// (--replaced). A version of Kubernetes is always installed in place. No step needs a shell on a node.
#[derive(Debug, Args)]
#[command(mut_arg("accept_components", |it| it.requires("components")), after_help = "Examples:
  firstlight measure image.raw | firstlight rollout plan --policy -
  firstlight rollout start --policy new.json
  firstlight rollout start --policy new.json --replace-command 'kubectl --context mgmt delete machine {node}'
  firstlight rollout start --kubernetes v1.34.5 --components components.json
  firstlight rollout status
  firstlight rollout continue")]
pub(crate) struct CommandLine {
    /// What to do
    action: Verb,
    /// With plan and start: the policy of the new image, as `firstlight measure` prints it (JSON); - is standard input
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// With plan and start: bring this version of Kubernetes to the nodes, as v1.34.5, instead of an image; v1.34 without
    /// a patch number means the patch of the list
    #[arg(long, value_name = "VERSION")]
    kubernetes: Option<String>,
    /// With plan and start: the list of programs of this version, as `firstlight components` makes it
    #[arg(long, value_name = "FILE")]
    components: Option<PathBuf>,
    #[command(flatten)]
    exceptions: ListExceptions,
    /// With plan and start: what brings the image to a node, run on it by systemd; words are separated by
    /// spaces; by default /usr/bin/bootstrapper update
    #[arg(long, value_name = "COMMAND")]
    node_command: Option<String>,
    /// With plan and start: the machine of each node is replaced by one with the new image, by you or by another program
    #[arg(long)]
    replaced: bool,
    /// With plan, start and continue: asks for the replacement of a node, run here for each node, with {node} in place of its
    /// name
    #[arg(long, value_name = "COMMAND")]
    replace_command: Option<String>,
    /// Go on although the API server does not answer while a control plane restarts; needed in clusters with one or two
    /// control planes
    #[arg(long)]
    accept_downtime: bool,
    #[command(flatten)]
    drain: DrainOptions,
    /// How long the command on a node may take, and then its return
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30m")]
    node_timeout: Duration,
    /// Do not ask before the first change
    #[arg(long)]
    yes: bool,
    /// The state file; with it a node that no join service has seen is asked for its evidence
    #[arg(long, value_name = "FILE", default_value = STATE_FILE)]
    state: PathBuf,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    #[command(flatten)]
    output: Output,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Verb {
    Plan,
    Start,
    Continue,
    Status,
    Pause,
    Abort,
}

/// What a new rollout brings to the nodes.
#[derive(Debug)]
pub enum NewGoal {
    /// The image of this policy; `-` is standard input.
    Image(PathBuf),
    /// A version of Kubernetes, and the list of its components with the faults that it may have.
    Kubernetes(KubernetesVersion, PathBuf, ListExceptions),
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// What to do.
    pub action: Verb,
    /// What the nodes get; needed by plan and start.
    pub wanted: Option<NewGoal>,
    /// How they get it.
    pub way: Way,
    /// What asks for the replacement of a machine, a word each, run on this machine; empty if the operator does it.
    pub replace_command: Vec<String>,
    /// As in the record; continue adds them.
    pub accepts_downtime: bool,
    /// Which pods may be evicted; continue adds what is permitted here to the record.
    pub permitted: Permitted,
    /// The limit for the pods of a node.
    pub drain_limit: Duration,
    /// The limit for a command on a node, and for its return.
    pub node_limit: Duration,
    /// Whether the operator need not be asked.
    pub is_agreed: bool,
    /// The state file.
    pub state: PathBuf,
    /// The administrator's kubeconfigs.
    pub kubeconfig: Vec<PathBuf>,
    /// The form of the output.
    pub output: Output,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let is_new = matches!(self.action, Verb::Plan | Verb::Start);
        let of_start = [
            ("policy", self.policy.is_some()),
            ("kubernetes", self.kubernetes.is_some()),
            ("components", self.components.is_some()),
            ("node-command", self.node_command.is_some()),
            ("replaced", self.replaced),
        ];
        if let Some((name, _)) = of_start.iter().find(|(_, given)| *given && !is_new) {
            return Err(Error::Usage(format!(
                "--{name} belongs to a new rollout: plan or start"
            )));
        }
        let wanted = match (self.policy, self.kubernetes, self.components) {
            (Some(policy), None, None) => Some(NewGoal::Image(policy)),
            (None, Some(version), Some(list)) => {
                let servers = Servers::default();
                let version = components::version(&version, Some(&list), &servers, Duration::ZERO)?;
                Some(NewGoal::Kubernetes(version, list, self.exceptions))
            }
            (None, None, None) if !is_new => None,
            _ => {
                return Err(Error::Usage(
                    "give --policy for an image, or --kubernetes with --components".into(),
                ));
            }
        };
        let is_replaced = self.replaced || self.replace_command.is_some();
        if is_replaced && matches!(wanted, Some(NewGoal::Kubernetes(..))) {
            return Err(Error::Usage(
                "a version of Kubernetes is installed in place: omit --replaced and --replace-command"
                    .into(),
            ));
        }
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        let way = if is_replaced {
            Way::Replaced
        } else {
            Way::InPlace(words(self.node_command.as_deref().unwrap_or(UPDATE)))
        };
        if let Way::InPlace(words) = &way
            && words.first().is_none_or(|word| !word.starts_with('/'))
        {
            return Err(Error::Usage(
                "--node-command: expected a command that begins with the path of a program, as /usr/bin/update".into(),
            ));
        }
        Ok(Options {
            action: self.action,
            wanted,
            way,
            replace_command: words(&self.replace_command.unwrap_or_default()),
            accepts_downtime: self.accept_downtime,
            permitted: self.drain.permitted,
            drain_limit: self.drain.drain_timeout,
            node_limit: self.node_timeout,
            is_agreed: self.yes,
            state: self.state,
            kubeconfig: self.kubeconfig.paths(),
            output: self.output,
        })
    }
}
