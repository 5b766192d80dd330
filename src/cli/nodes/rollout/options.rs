//! The options of the command line.

use std::path::PathBuf;
use std::time::Duration;

use base::program;
use kubernetes::parameters::Version;

use super::record::Way;
use crate::nodes::drain::Permitted;
use crate::shell::{
    error::Error,
    output::Output,
    usage::{Given, suggestion},
};
use crate::trust::components::{self, Servers};
use crate::workspace::{kubeconfig::kubeconfigs_of, options::time};

/// The words of the operand.
pub const ACTIONS: [&str; 6] = ["plan", "start", "continue", "status", "pause", "abort"];
/// The options of a new rollout.
const OF_START: [&str; 5] = [
    "policy",
    "kubernetes",
    "components",
    "node-command",
    "replaced",
];

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Show what a rollout would do.
    Plan,
    /// Begin one.
    Start,
    /// Go on with the one that has begun.
    Continue,
    /// Show where it is.
    Status,
    /// Stop it when the present node is done.
    Pause,
    /// End it.
    Abort,
}

/// What a new rollout brings to the nodes.
#[derive(Debug)]
pub enum NewGoal {
    /// The image of this policy; `-` is standard input.
    Image(PathBuf),
    /// A version of Kubernetes, and the list of its components.
    Kubernetes(Version, PathBuf),
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

/// Returns the options that the command line gives.
pub fn options(given: &Given) -> Result<Options, Error> {
    let word = given.operand()?;
    let action = match &*word {
        "plan" => Verb::Plan,
        "start" => Verb::Start,
        "continue" => Verb::Continue,
        "status" => Verb::Status,
        "pause" => Verb::Pause,
        "abort" => Verb::Abort,
        other => {
            let suggestion = suggestion("", other, ACTIONS);
            return Err(Error::Usage(format!(
                "there is no action {other:?}{suggestion}"
            )));
        }
    };
    let is_new = matches!(action, Verb::Plan | Verb::Start);
    if let Some(name) = OF_START.iter().find(|name| !is_new && given.has(name)) {
        return Err(Error::Usage(format!(
            "--{name} belongs to a new rollout: plan or start"
        )));
    }
    let path = |name: &str| given.value(name).map(PathBuf::from);
    let wanted = match (
        path("policy"),
        given.value("kubernetes"),
        path("components"),
    ) {
        (Some(policy), None, None) => Some(NewGoal::Image(policy)),
        (None, Some(version), Some(list)) => {
            let (text, servers) = (program::text(version)?, Servers::default());
            let version = components::version(&text, Some(&list), &servers, Duration::ZERO)?;
            Some(NewGoal::Kubernetes(version, list))
        }
        (None, None, None) if !is_new => None,
        _ => {
            return Err(Error::Usage(
                "give --policy for an image, or --kubernetes with --components".into(),
            ));
        }
    };
    let words = |name: &str| -> Result<Vec<String>, Error> {
        let text = given.text(name)?;
        Ok(text.split_whitespace().map(str::to_owned).collect())
    };
    let is_replaced = given.has("replaced") || given.has("replace-command");
    if is_replaced && matches!(wanted, Some(NewGoal::Kubernetes(..))) {
        return Err(Error::Usage(
            "a version of Kubernetes is installed in place: omit --replaced and --replace-command"
                .into(),
        ));
    }
    let way = if is_replaced {
        Way::Replaced
    } else {
        Way::InPlace(words("node-command")?)
    };
    if let Way::InPlace(words) = &way
        && words.first().is_none_or(|word| !word.starts_with('/'))
    {
        return Err(Error::Usage(
            "--node-command: expected a command that begins with the path of a program, as /usr/bin/update".into(),
        ));
    }
    Ok(Options {
        action,
        wanted,
        way,
        replace_command: words("replace-command")?,
        accepts_downtime: given.has("accept-downtime"),
        permitted: Permitted::of(given),
        drain_limit: given.parsed("drain-timeout", time)?,
        node_limit: given.parsed("node-timeout", time)?,
        is_agreed: given.has("yes"),
        state: given.path("state"),
        kubeconfig: kubeconfigs_of(given),
        output: Output::of(given)?,
    })
}
