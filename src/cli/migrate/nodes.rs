//! Waits until each node runs an image: where Constellation's node operator knows the cloud, it moves them; elsewhere the operator starts
//! each node, and its evidence shows the image.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kubernetes::client::{self, Client, NODES};
use kubernetes::constellation::node_version::{
    self, IMAGE, IMAGE_ANNOTATION, IMAGE_VERSION, NodeVersion,
};
use serde_json::Value;
use verifier::{Policy, Variant};

use super::facts;
use crate::cluster::{status::inquiry::Inquiry, status::listed::listed, status::view};
use crate::shell::{
    error::Error,
    progress::{Progress, human},
};
use crate::workspace::{connect::and_known, state::State};

/// How often the nodes are listed.
const INTERVAL: Duration = Duration::from_secs(2);
/// The time limit of a request while control planes are replaced, which ends connections.
const REQUEST: Duration = Duration::from_secs(30);
/// How long one node is asked for its evidence.
const QUESTION: Duration = Duration::from_secs(10);

/// Lets the node operator bring each node to this image, and waits.
pub fn by_operator(
    client: &Client,
    (image, version): (&str, &str),
    limit: Duration,
    progress: &Progress,
) -> Result<(), Error> {
    let set = [(IMAGE, image), (IMAGE_VERSION, version)];
    let present = NodeVersion::find(client)?;
    if present.is_none_or(|it| set.iter().any(|(name, value)| it.field(name) != *value)) {
        let new = node_version::set(client, &set)?;
        if set.iter().any(|(name, value)| new.field(name) != *value) {
            return Err(Error::Refused(format!(
                "{}: expected the image {image}, got {}: another program changes it",
                node_version::place(),
                new.field(IMAGE)
            )));
        }
        progress.line(format!("NodeVersion: the image is {image}"));
    }
    wait(client, image, limit, progress)
}

/// What a list of nodes says.
#[derive(PartialEq, Eq)]
struct Seen {
    nodes: BTreeMap<String, (bool, bool)>,
    pending: Vec<String>,
    is_outdated: bool,
}

impl Seen {
    fn read(client: &Client, image: &str) -> Result<Seen, client::Error> {
        let nodes = facts::nodes(client)?;
        Ok(Seen {
            nodes: nodes
                .into_iter()
                .map(|node| {
                    let state = (node.has_image(image), node.is_ready);
                    (node.name, state)
                })
                .collect(),
            pending: facts::pending(client)?,
            is_outdated: NodeVersion::find(client)?.is_some_and(|version| version.is_outdated),
        })
    }

    fn is_complete(&self) -> bool {
        let all = self
            .nodes
            .values()
            .all(|(has_image, is_ready)| *has_image && *is_ready);
        all && !self.nodes.is_empty() && self.pending.is_empty() && !self.is_outdated
    }

    /// Returns what is missing.
    fn left(&self) -> String {
        let named = |what: &str, is_one: fn(&(bool, bool)) -> bool| {
            let names = self.nodes.iter().filter(|(_, state)| is_one(state));
            let names: Vec<_> = names.map(|(name, _)| name.as_str()).collect();
            (!names.is_empty()).then(|| format!("{what}: {}", names.join(", ")))
        };
        let pending = (!self.pending.is_empty())
            .then(|| format!("joining or leaving: {}", self.pending.join(", ")));
        let parts = [
            named("with another image", |(has_image, _)| !has_image),
            named("not ready", |(_, is_ready)| !is_ready),
            pending,
            self.is_outdated
                .then(|| "NodeVersion is Outdated".to_owned()),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        parts.join("; ")
    }

    fn moved(&self) -> usize {
        self.nodes
            .values()
            .filter(|(has_image, _)| *has_image)
            .count()
    }
}

/// Waits until each node has the image and is ready. Ends if nothing changes for `limit`.
fn wait(client: &Client, image: &str, limit: Duration, progress: &Progress) -> Result<(), Error> {
    let client = &client.within(REQUEST);
    let mut last: Option<Seen> = None;
    let mut changed = Instant::now();
    loop {
        match Seen::read(client, image) {
            Ok(seen) if seen.is_complete() => {
                progress.line(format!(
                    "all {} nodes have the image {image}",
                    seen.nodes.len()
                ));
                return Ok(());
            }
            Ok(seen) => {
                if last.as_ref() != Some(&seen) {
                    progress.line(format!(
                        "{} of {} nodes have the image; {}",
                        seen.moved(),
                        seen.nodes.len(),
                        seen.left()
                    ));
                    progress.phase("waiting for Constellation's node operator");
                    changed = Instant::now();
                    last = Some(seen);
                }
            }
            Err(client::Error::Stopped) => return Err(client::Error::Stopped.into()),
            // the API server's machine may be the one that is replaced
            Err(error) if changed.elapsed() < limit => progress.line(error.to_string()),
            Err(error) => return Err(error.into()),
        }
        if changed.elapsed() >= limit {
            let left = last.as_ref().map(Seen::left).unwrap_or_default();
            return Err(Error::Unreachable(format!(
                "the nodes have not changed for {}: {left}. Look at the machine's console, and at the logs: kubectl -n kube-system \
                 logs daemonset/join-service and deployment/constellation-operator-controller-manager. Then run the same command again",
                human(limit)
            )));
        }
        if client.stopped_within(INTERVAL) {
            return Err(client::Error::Stopped.into());
        }
    }
}

/// Returns what the kubelet checks of the upgrade agent's socket before it starts the node operator's pod.
pub fn agent_check(client: &Client) -> Result<Option<String>, client::Error> {
    let mut found = client.find(&facts::operator_place())?.unwrap_or_default();
    let check = facts::agent_check(&mut found).and_then(|check| check.as_str().map(str::to_owned));
    Ok(check.filter(|kind| !kind.is_empty()))
}

/// Removes the check of the upgrade agent's socket, or restores it: with it, the node operator's pod does not start on nodes of Firstlight,
/// so that nobody would replace the last nodes.
pub fn check_agent(client: &Client, kind: &str) -> Result<(), client::Error> {
    let change = |deployment: &mut Value| match facts::agent_check(deployment) {
        Some(check) if *check != kind => {
            *check = kind.into();
            true
        }
        _ => false,
    };
    client.modify(&facts::operator_place(), change).map(drop)
}

/// A node, and why it does not run the image.
pub type Left = (String, String);

/// Returns the nodes that do not prove an image of this policy, each with the reason.
pub fn unproven(
    client: &Client,
    variant: &str,
    policy: &str,
    state: &State,
    progress: &Progress,
) -> Result<Vec<Left>, Error> {
    let variant = Variant::named(variant).map_err(Error::content)?;
    let policy = Policy::from_json(policy).map_err(Error::content)?;
    let policy = and_known(policy, state.attestation_keys.iter().copied())?;
    let nodes = listed(client)?;
    progress.phase("asking the nodes for their evidence");
    let rounds = nodes.len().div_ceil(view::AT_ONCE) as u32;
    let inquiry = Inquiry {
        variant,
        policy: &policy,
        cluster: state.cluster_id,
        deadline: Instant::now() + QUESTION * rounds,
    };
    let mut asked = view::ask_all(nodes, |node| {
        let report = inquiry.ask(&node.address)?;
        Ok((node, report))
    })?;
    asked.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
    let left = asked.into_iter().filter_map(|(node, report)| {
        let why = match report.state().code {
            0 if node.is_ready => return None,
            0 => "it runs the image, and is not ready".to_owned(),
            _ => report.reason(),
        };
        Some((format!("{} ({})", node.name, node.role()), why))
    });
    Ok(left.collect())
}

/// Checks that each node has the image according to the node operator.
pub fn check(client: &Client, image: &str) -> Result<(), Error> {
    let seen = Seen::read(client, image)?;
    if seen.is_complete() {
        Ok(())
    } else {
        Err(Error::blocked(format!(
            "some nodes do not run the image {image}: {}",
            seen.left()
        )))
    }
}

/// Records in NodeVersion and at the nodes that every node has the image, for a node operator that is started again: it would replace
/// them otherwise. Without an image in NodeVersion no node operator replaces nodes here.
pub fn settle(client: &Client, image: Option<&str>, version: &str) -> Result<(), Error> {
    let Some(present) = NodeVersion::find(client)? else {
        return Ok(());
    };
    let image = image.filter(|_| present.names_an_image());
    let fields = image.map(|image| (IMAGE, image));
    let fields: Vec<_> = fields
        .into_iter()
        .chain([(IMAGE_VERSION, version)])
        .collect();
    node_version::set(client, &fields)?;
    for node in facts::nodes(client)?.iter().filter(|_| image.is_some()) {
        let image = image.unwrap_or_default();
        client.annotate(&NODES.named(&node.name), &[(IMAGE_ANNOTATION, image)])?;
    }
    Ok(())
}

/// Returns what the operator does with each of these nodes.
pub fn by_hand(left: &[Left]) -> String {
    let mut text = String::from(
        "Start these nodes with the image, one after the other, and wait until each is Ready. Its state disk stays; docs/migration.md \
         has the steps for each cloud:",
    );
    for (node, why) in left {
        text += &format!("\n  {node}: {why}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_is_complete_when_each_node_is_ready_with_the_image_and_nothing_is_pending() {
        let seen = |states: &[(bool, bool)], pending: &[&str], is_outdated| Seen {
            nodes: (states.iter().enumerate())
                .map(|(index, state)| (format!("n{index}"), *state))
                .collect(),
            pending: pending.iter().map(|name| (*name).to_owned()).collect(),
            is_outdated,
        };
        assert!(seen(&[(true, true); 3], &[], false).is_complete());
        for (states, pending, is_outdated, left) in [
            (
                &[(true, true), (false, true)][..],
                &[][..],
                false,
                "with another image: n1",
            ),
            (&[(true, false)], &[], false, "not ready: n0"),
            (&[(true, true)], &["x"], false, "joining or leaving: x"),
            (&[(true, true)], &[], true, "NodeVersion is Outdated"),
            (&[], &[], false, ""),
        ] {
            let seen = seen(states, pending, is_outdated);
            assert!(!seen.is_complete(), "{left}");
            assert_eq!(seen.left(), left);
        }
    }
}
