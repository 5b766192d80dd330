//! `firstlight node reboot|shutdown|restart|clean|reset`: what a node does with its machine, with a unit, or with its disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use proto::operator::{Action, CONTROL, ControlRequest, ControlResponse};
use serde_json::json;

use super::absence::Absence;
use super::logs::unit;
use super::session::{Operator, OperatorOptions};
use super::update::ImageRelease;
use crate::nodes::drain::DrainOptions;
use crate::shell::{
    consent,
    error::Error,
    output::Output,
    progress::{Progress, lines},
};
use crate::workspace::{kubeconfig::KubeconfigOption, options::time};

/// How a machine is told what to do.
#[derive(Debug, Args)]
pub struct ControlOptions {
    /// Do not ask before a change
    #[arg(long)]
    pub yes: bool,
    /// Evict no pods: they end with the machine; reboot and shutdown do not ask the API server
    #[arg(long)]
    pub skip_drain: bool,
    #[command(flatten)]
    pub drain: DrainOptions,
    /// With restart: the unit of systemd, as containerd or kubelet.service
    #[arg(long, value_name = "UNIT", required_if_eq("action", "restart"))]
    pub unit: Option<String>,
    /// With update: the release, with the signature of its list
    #[arg(long, value_name = "FOLDER", required_if_eq("action", "update"))]
    pub release: Option<PathBuf>,
    #[command(flatten)]
    pub kubeconfig: KubeconfigOption,
    #[command(flatten)]
    pub operator: OperatorOptions,
    #[command(flatten)]
    pub output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1h")]
    pub timeout: Duration,
}

/// How long a node may take to answer.
const LIMIT: Duration = Duration::from_secs(6 * 60);

/// Has the nodes do this, one after the other. `word` is the action's name on the command line.
pub fn run(
    action: Action,
    word: &str,
    nodes: &[String],
    given: &ControlOptions,
) -> Result<(), Error> {
    let unit = given.unit.as_deref().map(unit).unwrap_or_default();
    let operator = Operator::of(&given.operator, given.timeout)?.within(LIMIT);
    let output = given.output;
    if action == Action::Reset && !given.yes {
        let question = format!("Destroy the data of {}?", nodes.join(", "));
        consent::ask(&question, "firstlight status")?;
    }
    let leaves = matches!(action, Action::Reboot | Action::PowerOff);
    let absence = if leaves && !given.skip_drain {
        let (kubeconfig, drain) = (&given.kubeconfig, &given.drain);
        Absence::of(kubeconfig, drain, given.timeout, given.yes, &given.output)?
    } else {
        None
    };
    let mut done = vec![];
    for given in nodes {
        let (node, at) = given.split_once('=').unwrap_or((given, given));
        let moved = match &absence {
            Some(absence) => absence.before(node)?,
            None => None,
        };
        let request = ControlRequest {
            caller: None,
            action: action.into(),
            unit: unit.clone(),
            node: node.to_owned(),
        };
        let answer = ask(&operator, at, word, &request).map_err(|error| match &moved {
            Some(moved) => error.with_text(|text| format!("{text}. {}", moved.stays_cordoned())),
            None => error,
        })?;
        output.say(match action {
            Action::Reboot => format!("{}: restarts", answer.node),
            Action::PowerOff => format!("{}: switches itself off", answer.node),
            Action::Reset => format!("{}: restarts, and formats its state disk", answer.node),
            // no control characters of names that tenants have chosen
            Action::Clean => format!("{}:\n{}", answer.node, lines(&answer.report)),
            _ => format!("{}: {unit} is restarted", answer.node),
        })?;
        match (&absence, &moved) {
            (Some(absence), Some(moved)) if action == Action::Reboot => absence.after(moved)?,
            (_, Some(moved)) => output.say(moved.stays_cordoned())?,
            _ => {}
        }
        done.push(json!({"name": answer.node, "report": answer.report}));
    }
    output.json(&json!({"action": word, "nodes": done}))
}

fn ask(
    operator: &Operator,
    at: &str,
    word: &str,
    request: &ControlRequest,
) -> Result<ControlResponse, Error> {
    let progress = Progress::on_stderr();
    let session = operator.connect(at, &progress)?;
    progress.phase(format!("{word} of {}", request.node));
    session.call(|channel, caller, options| {
        let request = ControlRequest {
            caller: Some(caller),
            ..request.clone()
        };
        channel.unary(CONTROL, &request, options)
    })
}

/// Sends the release to the nodes, one after the other.
pub fn update(nodes: &[String], release: &Path, given: &ControlOptions) -> Result<(), Error> {
    let release = ImageRelease::read(release, &given.operator.policy)?;
    let (operator, output) = (Operator::of(&given.operator, given.timeout)?, given.output);
    let mut done = vec![];
    for given in nodes {
        let (node, at) = given.split_once('=').unwrap_or((given, given));
        let progress = Progress::on_stderr();
        let session = operator.connect(at, &progress)?;
        drop(progress);
        release.send(&session, node, output)?;
        done.push(json!({"name": node, "report": ""}));
    }
    output.json(&json!({"action": "update", "nodes": done}))
}
