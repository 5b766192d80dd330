//! `firstlight node reboot|shutdown|restart|clean|reset`: what a node does with its machine, with a unit, or with its disk.

use std::time::Duration;

use base::options::Opt;
use base::program;
use proto::operator::{Action, CONTROL, ControlRequest, ControlResponse};
use serde_json::json;

use super::absence::Absence;
use super::logs::unit;
use super::session::Operator;
use super::update::ImageRelease;
use crate::shell::{
    consent,
    error::Error,
    output::Output,
    progress::{Progress, lines},
    usage::Given,
};

/// The actions, which are the node's own.
pub const ACTIONS: [&str; 6] = ["reboot", "shutdown", "restart", "clean", "reset", UPDATE];
/// The action that sends a release of the image.
const UPDATE: &str = "update";
/// The unit that an operator restarts.
pub const UNIT: Opt = Opt::value(
    "unit",
    "UNIT",
    "with restart: the unit of systemd, as containerd or kubelet.service",
);
/// The release that an operator sends.
pub const RELEASE: Opt = Opt::value(
    "release",
    "FOLDER",
    "with update: the release, with the signature of its list",
);
/// How long a node may take to answer.
const LIMIT: Duration = Duration::from_secs(6 * 60);

/// Has the nodes do this, one after the other.
pub fn run(word: &str, given: &Given) -> Result<(), Error> {
    let action = match word {
        UPDATE => return update(given),
        "reboot" => Action::Reboot,
        "shutdown" => Action::PowerOff,
        "reset" => Action::Reset,
        "clean" => Action::Clean,
        _ => Action::RestartUnit,
    };
    let unit = match (action, given.has("unit")) {
        (Action::RestartUnit, true) => unit(&given.text("unit")?),
        (Action::RestartUnit, false) => {
            return Err(Error::Usage(
                "restart needs --unit, as --unit containerd".into(),
            ));
        }
        _ => String::new(),
    };
    let nodes = nodes(given, word)?;
    let (operator, output) = (Operator::of(given)?.within(LIMIT), Output::of(given)?);
    if action == Action::Reset && !given.has("yes") {
        let question = format!("Destroy the data of {}?", nodes.join(", "));
        consent::ask(&question, "firstlight status")?;
    }
    let leaves = matches!(action, Action::Reboot | Action::PowerOff);
    let absence = if leaves && !given.has("skip-drain") {
        Absence::of(given, &output)?
    } else {
        None
    };
    let mut done = vec![];
    for given in &nodes {
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

/// Returns the nodes of the command line.
fn nodes(given: &Given, word: &str) -> Result<Vec<String>, Error> {
    let nodes = given.further().iter().cloned().map(program::text);
    let nodes: Vec<String> = nodes.collect::<Result<_, _>>()?;
    if nodes.is_empty() {
        Err(Error::Usage(format!(
            "expected firstlight node {word} NODE.."
        )))
    } else {
        Ok(nodes)
    }
}

fn update(given: &Given) -> Result<(), Error> {
    if !given.has("release") {
        return Err(Error::Usage("update needs --release FOLDER".into()));
    }
    let nodes = nodes(given, UPDATE)?;
    let release = ImageRelease::read(&given.path("release"), &given.path("policy"))?;
    let (operator, output) = (Operator::of(given)?, Output::of(given)?);
    let mut done = vec![];
    for given in &nodes {
        let (node, at) = given.split_once('=').unwrap_or((given, given));
        let progress = Progress::on_stderr();
        let session = operator.connect(at, &progress)?;
        drop(progress);
        release.send(&session, node, output)?;
        done.push(json!({"name": node, "report": ""}));
    }
    output.json(&json!({"action": UPDATE, "nodes": done}))
}
