//! What a rollout will do, and where it is: texts for people, JSON for programs.

use std::fmt::Write;

use serde_json::{Value, json};

use super::decide::{ClusterFacts, Seen};
use super::record::{Goal, RolloutRecord, RolloutState, Way};
use crate::shell::progress::printable;

/// A node that is left, and the pods on it.
pub struct NodePods {
    /// The name of the node.
    pub node: String,
    /// How many pods are evicted.
    pub evicted: usize,
}

/// A name for each image.
pub type ImageNames = Vec<(String, String)>;

/// Returns the name of an image for people.
fn name_of(id: &str, names: &ImageNames) -> String {
    match names.iter().find(|(known, _)| known == id) {
        Some((_, name)) if !name.is_empty() => printable(name),
        Some(_) => "the first image".into(),
        None if id.is_empty() => "unknown".into(),
        None => format!("another image ({})", printable(id)),
    }
}

/// Returns what the nodes get, a phrase.
pub fn goal(record: &RolloutRecord) -> String {
    match &record.goal {
        Goal::Image { ids, name, .. } => {
            format!(
                "the image {} ({})",
                printable(name),
                printable(&ids.join(", "))
            )
        }
        Goal::Kubernetes { version, .. } => format!("Kubernetes {version}"),
    }
}

/// Returns what `start` would do.
pub fn plan(
    record: &RolloutRecord,
    replace_command: &[String],
    cluster: &ClusterFacts,
    pods: &[NodePods],
    names: &ImageNames,
    blocks: &[String],
) -> String {
    let mut text = format!("Rollout of {}\n", goal(record));
    // writing to a string does not fail
    if let Goal::Image { old, .. } = &record.goal {
        let old: Vec<_> = old.iter().map(|id| name_of(id, names)).collect();
        let _ = writeln!(
            text,
            "Policy: first accepts the new image, too; at the end no longer {}",
            old.join(", ")
        );
    }
    text += &match (&record.goal, &record.way) {
        (Goal::Kubernetes { .. }, _) => {
            "Each node runs `bootstrapper upgrade`, by a pod\n".to_owned()
        }
        (_, Way::InPlace(words)) => format!(
            "Each node runs `{}`, by a pod, and reboots\n",
            printable(&words.join(" "))
        ),
        (_, Way::Replaced) => {
            let who = match replace_command {
                [] => "You, or another program, replace".to_owned(),
                words => format!("`{}` replaces", printable(&words.join(" "))),
            };
            format!(
                "{who} the machine of each worker when it is drained; new machines of its group must have the new image. Before a control plane it stops\n"
            )
        }
    };
    let left = record.left(cluster);
    if left.is_empty() {
        text += "Every node has it already.\n";
    } else {
        text += "The nodes, in this order:\n";
    }
    let width = left.iter().map(|node| node.name.chars().count()).max();
    let width = width.unwrap_or_default();
    for node in left {
        let of_node = pods.iter().find(|it| it.node == node.name);
        let evicted = of_node.map_or(0, |it| it.evicted);
        let _ = writeln!(
            text,
            "  {:width$}  {:13}  {:8}  {}  {evicted} pods move",
            printable(&node.name),
            role(node),
            if node.is_ready { "Ready" } else { "NotReady" },
            has(node, record, names),
        );
    }
    for block in blocks {
        let _ = writeln!(text, "Blocks: {}", printable(block));
    }
    text
}

fn role(node: &Seen) -> &'static str {
    if node.is_control_plane {
        "control-plane"
    } else {
        "worker"
    }
}

/// Returns what a node has now.
fn has(node: &Seen, record: &RolloutRecord, names: &ImageNames) -> String {
    match record.goal {
        Goal::Image { .. } => name_of(&node.image, names),
        Goal::Kubernetes { .. } => printable(&node.kubelet),
    }
}

/// Returns where the rollout is.
pub fn status(
    record: &RolloutRecord,
    cluster: &ClusterFacts,
    driver: Option<&str>,
    names: &ImageNames,
) -> String {
    let total = cluster.nodes.len();
    let have = total - record.left(cluster).len();
    let mut text = format!(
        "Rollout of {}: {have} of {total} nodes have it\n",
        goal(record)
    );
    text += &match (&record.state, driver) {
        (RolloutState::Running, Some(driver)) => format!("{} drives it\n", printable(driver)),
        (RolloutState::Running, None) => {
            "It was cut off: `firstlight rollout continue` goes on\n".to_owned()
        }
        (RolloutState::Paused, _) => {
            "It is paused: `firstlight rollout continue` goes on\n".to_owned()
        }
        (RolloutState::Stopped(why), _) => format!(
            "It has stopped: {}\n`firstlight rollout continue` tries again; `firstlight rollout abort` ends it\n",
            crate::shell::progress::block(why)
        ),
        (RolloutState::Aborted, _) => "It was aborted\n".to_owned(),
        (RolloutState::Done, _) => "It is done\n".to_owned(),
    };
    if let Some(node) = record.node.as_ref().filter(|_| !record.is_over()) {
        // writing to a string does not fail
        let _ = writeln!(
            text,
            "Now: {} {}",
            printable(&node.name),
            node.step.phrase()
        );
    }
    for node in &cluster.nodes {
        let _ = writeln!(
            text,
            "  {}  {}  {}  {}",
            printable(&node.name),
            role(node),
            if node.is_ready { "Ready" } else { "NotReady" },
            has(node, record, names)
        );
    }
    text
}

/// Returns the plan or the status for programs.
pub fn json(
    record: &RolloutRecord,
    cluster: &ClusterFacts,
    pods: &[NodePods],
    names: &ImageNames,
    blocks: &[String],
) -> Value {
    let state = match &record.state {
        RolloutState::Running => "running",
        RolloutState::Paused => "paused",
        RolloutState::Stopped(_) => "stopped",
        RolloutState::Aborted => "aborted",
        RolloutState::Done => "done",
    };
    let why = match &record.state {
        RolloutState::Stopped(why) => Some(why),
        _ => None,
    };
    let nodes = cluster.nodes.iter().map(|node| {
        let of_node = pods.iter().find(|it| it.node == node.name);
        json!({
            "name": node.name,
            "role": role(node),
            "ready": node.is_ready,
            "image": (!node.image.is_empty()).then(|| node.image.clone()),
            "imageName": (!node.image.is_empty()).then(|| name_of(&node.image, names)),
            "kubelet": node.kubelet,
            "done": record.goal.is_reached(node),
            "moves": of_node.map(|it| it.evicted),
        })
    });
    let left = record.left(cluster);
    let order: Vec<_> = left.iter().map(|node| node.name.as_str()).collect();
    let mut goal = json!(record.goal);
    for members in goal
        .as_object_mut()
        .into_iter()
        .flat_map(|it| it.values_mut())
    {
        if let Some(members) = members.as_object_mut() {
            members.remove("policy");
        }
    }
    json!({
        "goal": goal,
        "way": record.way,
        "state": state,
        "why": why,
        "node": record.node.as_ref().map(|node| json!({"name": node.name, "step": node.step})),
        "nodes": nodes.collect::<Vec<Value>>(),
        "order": order,
        "blocks": blocks,
    })
}
