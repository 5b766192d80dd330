//! Asks a node itself for the image that it runs, where no join service has seen it: the only control plane of a cluster has its disk
//! opened by `firstlight recover`.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use kubernetes::client::Client;
use kubernetes::machine_record;
use kubernetes::services;
use verifier::{Image, Policy, Variant};

use super::decide::{ClusterFacts, Seen};
use super::record::{Goal, NodeStep, RolloutRecord, Way};
use crate::cluster::{status::inquiry::Inquiry, status::listed::listed};
use crate::shell::error::Error;
use crate::trust::policy::only_images;
use crate::workspace::{connect::and_known, state::State};

/// How often a node is asked.
const INTERVAL: Duration = Duration::from_secs(20);
/// How long a node is asked.
const QUESTION: Duration = Duration::from_secs(10);

/// Asks nodes that no join service has seen.
pub struct Prover {
    /// The operator's state file, without which the cluster of a node is unknown.
    state: Option<State>,
    asked: Option<Instant>,
}

impl Prover {
    /// Uses this state file, if it exists.
    pub fn new(state: &Path) -> Prover {
        Prover {
            state: State::find(state).ok().flatten(),
            asked: None,
        }
    }

    /// Adds what nodes have proved to this command. Asks the node that comes back, now and then.
    pub fn add(
        &mut self,
        client: &Client,
        record: &mut RolloutRecord,
        cluster: &mut ClusterFacts,
    ) -> Result<(), Error> {
        let Goal::Image { ids, .. } = record.goal.clone() else {
            return Ok(());
        };
        let is_proved = |node: &Seen| record.proved.get(&node.name) == Some(&state_of(node));
        if let (Some(node), Way::InPlace(_)) = (&record.node, &record.way)
            && node.step == NodeStep::Return
            && let Some(seen) = cluster.nodes.iter().find(|it| it.name == node.name)
            && seen.is_ready
            && !ids.contains(&seen.image)
            && !is_proved(seen)
            && self.asked.is_none_or(|asked| asked.elapsed() >= INTERVAL)
        {
            self.asked = Some(Instant::now());
            if self.proves(client, seen, &ids)? {
                record.proved.insert(seen.name.clone(), state_of(seen));
            }
        }
        add_proved(record, cluster);
        Ok(())
    }

    /// Returns whether a node proves that it runs this image and is a member of the cluster.
    fn proves(&self, client: &Client, node: &Seen, ids: &[String]) -> Result<bool, Error> {
        let Some(state) = &self.state else {
            return Ok(false);
        };
        let variant = services::present_variant(client)?.unwrap_or_default();
        let variant = Variant::named(&variant).map_err(Error::content)?;
        let policy = services::present_policy(client)?.unwrap_or_default();
        let has_goal = |image: &Image| ids.iter().any(|id| **id == **image.id());
        let only = only_images(&policy, variant, has_goal)?;
        let only = Policy::from_json(&only).map_err(Error::content)?;
        let policy = and_known(only, state.attestation_keys.iter().copied())?;
        let records = machine_record::of_nodes(client)?;
        // The evidence shows a machine with the image. That it is this node shows the address in its record, not that in its Node.
        let mut records = records.iter().filter(|it| it.node == node.name);
        let mut is_own = |address: &str| {
            let address: Option<IpAddr> = address.parse().ok();
            records.any(|it| address.is_some_and(|address| it.has_address(address)))
        };
        let listed = listed(client)?;
        let inquiry = Inquiry {
            variant,
            policy: &policy,
            cluster: state.cluster_id,
            deadline: Instant::now() + QUESTION,
        };
        match listed.iter().find(|it| it.name == node.name) {
            Some(found) if is_own(&found.address) => {
                Ok(inquiry.ask(&found.address)?.state().code == 0)
            }
            _ => Ok(false),
        }
    }
}

/// Adds the image that nodes have proved to a command that drove this rollout.
pub fn add_proved(record: &RolloutRecord, cluster: &mut ClusterFacts) {
    let Goal::Image { ids, .. } = &record.goal else {
        return;
    };
    for node in &mut cluster.nodes {
        if record.proved.get(&node.name) == Some(&state_of(node)) {
            node.image = ids.first().cloned().unwrap_or_default();
        }
    }
}

/// Returns a text that changes when the node boots again or gets a ticket with another image: then its proof is void.
fn state_of(node: &Seen) -> String {
    format!("{} {}", node.boot, node.image)
}
