//! `firstlight machine`: restarts machines of nodes or a unit on them, switches them off, or resets them.

use base::options::Opt;
use base::program;
use booted_proto::operator::{Action, CONTROL, ControlRequest, ControlResponse};
use serde_json::json;

use super::logs::unit;
use super::session::{CERTIFICATE, KEY, Operator, POLICY};
use crate::connect::ATTESTATION_KEY;
use crate::consent;
use crate::error::Error;
use crate::master_secret::{MASTER_SECRET, SHARE_FILE};
use crate::options::{TIMEOUT, VARIANT};
use crate::output::{OUTPUT, Output};
use crate::progress::Progress;
use crate::sources::{KEPT, OFFLINE};
use crate::state::{CLUSTER_ID, CLUSTER_STATE};
use crate::usage::{Command, Given, Operand, suggestion};

const ACTIONS: [&str; 4] = ["reboot", "shutdown", "reset", "restart"];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "machine",
    summary: "restart or reset the machine of a node, or switch it off",
    about: &[
        "reboot and shutdown end the programs of the machine by systemd; pods move only if you drain the node before (kubectl drain). \
         restart restarts one unit, as containerd. reset destroys the data of the machine: its state disk is formatted at the next \
         boot, and it joins as a new node. Run `firstlight node remove` before, with which etcd and the cluster forget the node.",
        "The node is verified, and the operator proves to have the master secret, or a certificate by it, as in `firstlight logs`. The \
         API server need not run. A machine acts only if it is the node that the command names.",
    ],
    operand: Some(Operand {
        value: "reboot|shutdown|reset|restart NODE..",
        words: &ACTIONS,
        is_needed: true,
        help: "the names of the nodes, as in kubectl get nodes; with NAME=HOST[:PORT] the command asks the node there",
    }),
    options: &[
        Opt::value(
            "unit",
            "UNIT",
            "with restart: the unit of systemd, as containerd or kubelet.service",
        ),
        Opt::flag("yes", "do not ask before a reset"),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        ATTESTATION_KEY,
        CLUSTER_STATE,
        CLUSTER_ID,
        MASTER_SECRET,
        SHARE_FILE,
        CERTIFICATE,
        KEY,
        OUTPUT,
        TIMEOUT.or("6m"),
    ],
    examples: &[
        "firstlight machine restart worker-0 --unit containerd",
        "firstlight machine reboot worker-0 worker-1",
        "firstlight machine reset worker-2=10.42.1.102",
    ],
    run,
};

fn run(given: &Given) -> Result<(), Error> {
    let word = given.operand()?;
    let action = match word.as_str() {
        "reboot" => Action::Reboot,
        "shutdown" => Action::PowerOff,
        "reset" => Action::Reset,
        "restart" => Action::RestartUnit,
        other => {
            let end = suggestion("", other, ACTIONS);
            return Err(Error::Usage(format!("there is no action {other:?}{end}")));
        }
    };
    let unit = match (action, given.has("unit")) {
        (Action::RestartUnit, true) => unit(&given.text("unit")?),
        (Action::RestartUnit, false) => {
            return Err(Error::Usage(
                "restart needs --unit, as --unit containerd".into(),
            ));
        }
        (_, true) => return Err(Error::Usage("--unit is for the action restart".into())),
        (_, false) => String::new(),
    };
    let mut nodes: Vec<String> = vec![];
    for node in given.further().iter().cloned().map(program::text) {
        nodes.push(node?);
    }
    if nodes.is_empty() {
        return Err(Error::Usage(format!(
            "expected firstlight machine {word} NODE.."
        )));
    }
    let (operator, output) = (Operator::of(given)?, Output::of(given)?);
    if action == Action::Reset && !given.has("yes") {
        let question = format!("Destroy the data of {}?", nodes.join(", "));
        consent::ask(&question, "--yes")?;
    }
    let mut done = vec![];
    for given in &nodes {
        let (node, at) = given.split_once('=').unwrap_or((given, given));
        let progress = Progress::on_stderr();
        let session = operator.connect(at, &progress)?;
        progress.phase(format!("{word} of {node}"));
        let answer: ControlResponse = session.call(|channel, caller, options| {
            let request = ControlRequest {
                caller: Some(caller),
                action: action.into(),
                unit: unit.clone(),
                node: node.to_owned(),
            };
            channel.unary(CONTROL, &request, options)
        })?;
        drop(progress);
        output.say(match action {
            Action::Reboot => format!("{}: restarts", answer.node),
            Action::PowerOff => format!("{}: switches itself off", answer.node),
            Action::Reset => format!("{}: restarts, and formats its state disk", answer.node),
            _ => format!("{}: {unit} is restarted", answer.node),
        })?;
        done.push(answer.node);
    }
    output.json(&json!({"action": word, "nodes": done}))
}
