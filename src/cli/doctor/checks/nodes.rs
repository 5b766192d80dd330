//! The nodes: what they prove, what Kubernetes says of them, and what is recorded of them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::diagnosis::Diagnosis;
use super::super::gathered::Gathered;
use crate::progress::human;
use crate::status::cluster::shared_keys;
use crate::status::objects::UNINITIALIZED;
use crate::status::report::Report;
use crate::status::view::NodeView;

/// How long after its ticket a machine may need to become a node: the token of the ticket is valid
/// for a quarter of an hour.
const JOINING: Duration = Duration::from_secs(30 * 60);
/// How far clocks may be apart, in seconds. The time of an answer is in whole seconds.
const CLOCKS: i64 = 5;
/// How old the last heartbeat of a ready node can be at most: the patience of Kubernetes (50 s), and
/// the time that the command takes.
const HEARTBEAT: i64 = 120;

/// Each node proves that it is a member of the cluster, and no two are one machine.
pub fn attestation(facts: &Gathered) -> Vec<Diagnosis> {
    let nodes = &facts.view.nodes;
    let all_are =
        |state: &str| nodes.len() > 1 && nodes.iter().all(|node| node.report.state().name == state);
    if all_are("refused") {
        return vec![Diagnosis::error(
            "all nodes",
            "none meets the policy in your file",
            "check the file, --attestation-variant and the access to collateral first, then explain the registers of one node \
             (docs/refusals.md)",
        )];
    }
    if all_are("unreachable") {
        return vec![Diagnosis::warning(
            "all nodes",
            "none answers this machine, so nothing is known of what they run",
            "run the command where ports 9000 and 9999 of the nodes can be reached; nodes of Constellation do not answer there",
        )];
    }
    let mut found: Vec<Diagnosis> = nodes
        .iter()
        // without the ID of the cluster each node is of another one: the check `state` says so
        .filter(|it| it.report.cluster.is_some() || it.report.state().name != "other-cluster")
        .filter_map(|node| of_report(&node.listed.name, &node.report))
        .collect();
    for (key, names) in shared_keys(&facts.view.nodes) {
        found.push(Diagnosis::error(
            names.join(", "),
            format!("one machine answers for these nodes, with the attestation key {key}"),
            "correct the addresses of the nodes, or remove the Node that no machine has (docs/day-two/remove-node.md)",
        ));
    }
    found
}

fn of_report(node: &str, report: &Report) -> Option<Diagnosis> {
    let state = report.state();
    let servers = report.servers();
    let mut reasons = servers
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    let why = reasons.next().unwrap_or(state.text);
    let error = |advice: &str| {
        Some(Diagnosis::error(
            node,
            format!("{}: {why}", state.name),
            advice,
        ))
    };
    match state.name {
        "member" => None,
        "refused" => Some(Diagnosis::error(
            node,
            format!(
                "it does not meet the policy: {}",
                reasons.next().unwrap_or(why)
            ),
            "compare the reason with docs/refusals.md: a register that differs is explained by firstlight explain, lacking collateral by --offline or the network",
        )),
        "waits-for-key" => error(
            "read what it waits for: firstlight recover --endpoint NODE --policy FILE --status (docs/troubleshooting.md)",
        ),
        "unreachable" => error(
            "look at its console (docs/boot.md), and whether this machine reaches ports 9000 and 9999 of the node",
        ),
        "unproven" => Some(Diagnosis::warning(
            node,
            "only its join service answers, so the node proves nothing",
            "if it is a node of Constellation, replace it by one of Firstlight (docs/migration.md)",
        )),
        _ => error(
            "remove the Node of a machine that was made again, or give --state or --cluster-id of this cluster (docs/day-two/remove-node.md)",
        ),
    }
}

/// Kubernetes takes each node for ready, and schedules pods on it.
pub fn ready(facts: &Gathered) -> Vec<Diagnosis> {
    let mut found = vec![];
    for node in facts.view.nodes.iter().map(|node| &node.listed) {
        if !node.is_ready && node.no_network.is_none() {
            found.push(Diagnosis::error(
                &node.name,
                format!("Kubernetes takes it for not ready: {}", node.why_not),
                format!("kubectl describe node {} shows since when; the state that it proves is the next hint", node.name),
            ));
        }
        for trouble in &node.troubles {
            found.push(Diagnosis::warning(
                &node.name,
                format!("its kubelet reports {trouble}"),
                "free what is short, or give the machine more: pods are evicted from it",
            ));
        }
        if node.is_cordoned {
            found.push(Diagnosis::note(
                &node.name,
                "it is cordoned: no new pods are scheduled on it",
                format!(
                    "when the work on it is done: kubectl uncordon {}",
                    node.name
                ),
            ));
        }
    }
    found
}

/// Each node has a network plugin.
pub fn network_plugin(facts: &Gathered) -> Vec<Diagnosis> {
    let nodes = facts.view.nodes.iter();
    let without = nodes.filter(|node| node.listed.no_network.is_some());
    without
        .map(|node| {
            Diagnosis::error(
                &node.listed.name,
                "no network plugin is installed: pods that are not on the host's network do not start there",
                "install one: firstlight apply --addons FILE, or look at the pods of the one that you have (docs/addons.md)",
            )
        })
        .collect()
}

/// A cloud controller manager has seen each node that waits for it.
pub fn cloud_controller(facts: &Gathered) -> Vec<Diagnosis> {
    let nodes = facts.view.nodes.iter();
    let waiting = nodes.filter(|node| node.listed.taints.iter().any(|it| it == UNINITIALIZED));
    waiting
        .map(|node| {
            Diagnosis::error(
                &node.listed.name,
                format!("it waits for a cloud controller manager, with the taint {UNINITIALIZED}: no pods start there"),
                "install the cloud controller manager, or read its log (docs/clouds/controller-manager.md)",
            )
        })
        .collect()
}

/// Each node has a record of its machine, and each record a node.
pub fn records(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let is_node = |name: &str| facts.view.nodes.iter().any(|node| node.listed.name == name);
    let mut found = vec![];
    for node in facts.view.nodes.iter().map(|node| &node.listed) {
        let Some(record) = objects.record_of(&node.name) else {
            found.push(Diagnosis::warning(
                &node.name,
                "no record says which machine it is: it joined without a ticket of this join service, and cannot renew its certificate",
                "if it is a node of Constellation, restart it while migration is on (docs/join.md#disks-from-before); if you do not know it, remove it",
            ));
            continue;
        };
        if record.control_plane != node.is_control_plane && !record.token.is_empty() {
            let role = |is: bool| if is { "control plane" } else { "worker" };
            found.push(Diagnosis::warning(
                &node.name,
                format!(
                    "it joined as a {}, and its Node says that it is a {}",
                    role(record.control_plane),
                    role(node.is_control_plane)
                ),
                "find out who changed the label node-role.kubernetes.io/control-plane, or remove the node (docs/day-two/remove-node.md)",
            ));
        }
    }
    let mut of_disk: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for record in objects
        .records
        .iter()
        .filter(|record| !record.node.is_empty())
    {
        if !record.disk.is_empty() {
            of_disk.entry(&record.disk).or_default().push(&record.node);
        }
        let is_new = record
            .issued
            .is_some_and(|issued| facts.age(issued) < JOINING);
        if !is_node(&record.node) && !is_new {
            found.push(Diagnosis::warning(
                format!("ConfigMap kube-system/{}", record.name),
                "a machine was admitted under this name, and there is no such Node: its disk can still be opened",
                "if the node is gone for good, delete the record (docs/day-two/remove-node.md); if not, look at its console (docs/boot.md)",
            ));
        }
    }
    for (disk, nodes) in of_disk.iter().filter(|(_, nodes)| nodes.len() > 1) {
        found.push(Diagnosis::warning(
            nodes.join(", "),
            format!("these nodes have one state disk, {disk}: it was copied, or a record is old"),
            "delete the record of the node that no longer exists, and give each machine a blank disk of its own",
        ));
    }
    for joining in &objects.joining {
        let is_over = joining
            .deadline
            .is_some_and(|deadline| deadline < facts.now);
        if is_over && !is_node(&joining.node) {
            found.push(Diagnosis::note(
                format!("JoiningNode {}", joining.node),
                "its time is over, and there is no such Node",
                "delete it, after a look at the console of the machine (docs/boot.md)",
            ));
        }
    }
    found
}

/// Each node has the addresses with which it joined.
pub fn addresses(facts: &Gathered) -> Vec<Diagnosis> {
    let mut found = vec![];
    for node in facts.view.nodes.iter().map(|node| &node.listed) {
        let record = facts.view.objects.record_of(&node.name);
        // a record from before has none
        let Some(record) = record.filter(|it| !it.addresses.is_empty()) else {
            continue;
        };
        let recorded: Vec<String> = record.addresses.iter().map(ToString::to_string).collect();
        let new: Vec<&str> = node
            .internal
            .iter()
            .map(String::as_str)
            .filter(|address| !recorded.iter().any(|it| it == address))
            .collect();
        if !new.is_empty() {
            found.push(Diagnosis::warning(
                &node.name,
                format!("it has the address {}, and joined with {}", new.join(", "), recorded.join(", ")),
                "if the cloud does not know the new address, the kubelet gets no certificate for it: let the node join again (docs/certificates.md)",
            ));
        }
    }
    found
}

/// The clocks of the nodes and of this machine agree.
pub fn clocks(facts: &Gathered) -> Vec<Diagnosis> {
    let ahead: BTreeMap<&str, i64> = facts
        .view
        .nodes
        .iter()
        .filter_map(|node| Some((node.listed.name.as_str(), said_by(node)?)))
        .collect();
    let ahead = match ahead.is_empty() {
        true => by_heartbeats(facts),
        false => ahead,
    };
    let mut sorted: Vec<i64> = ahead.values().copied().collect();
    sorted.sort_unstable();
    let Some(median) = sorted.get(sorted.len() / 2).copied() else {
        return vec![];
    };
    let side = |seconds: i64| {
        let time = human(Duration::from_secs(seconds.unsigned_abs()));
        match seconds > 0 {
            true => format!("{time} ahead of"),
            false => format!("{time} behind"),
        }
    };
    let mut found = vec![];
    for (name, seconds) in &ahead {
        let apart = seconds - median;
        if apart.abs() > CLOCKS {
            found.push(Diagnosis::error(
                *name,
                format!("its clock is {} most other nodes", side(apart)),
                "let the machine set its clock (chrony, systemd-timesyncd): certificates, tokens and leases depend on it",
            ));
        }
    }
    if median.abs() > CLOCKS {
        found.push(Diagnosis::warning(
            "this machine",
            format!("the clocks of the cluster are {} it", side(median)),
            "set the clock of this machine, then run the command again: what it says about dates depends on it",
        ));
    }
    found
}

/// Returns how many seconds a node's clock is ahead of the clock of this machine, as its kubelet or
/// API server said. A server that is not of the cluster may say anything.
fn said_by(node: &NodeView) -> Option<i64> {
    node.servers.each().into_iter().find_map(|(_, served)| {
        let served = served.as_ref()?.as_ref().ok()?;
        served.ahead.filter(|_| served.distrust.is_none())
    })
}

/// Returns the same from the last heartbeats. They can be as old as [`HEARTBEAT`], so only more than
/// that says anything.
fn by_heartbeats(facts: &Gathered) -> BTreeMap<&str, i64> {
    let beats = facts.view.objects.heartbeats.iter();
    let ready = facts.view.nodes.iter().filter(|node| node.listed.is_ready);
    let ready: Vec<&str> = ready.map(|node| node.listed.name.as_str()).collect();
    beats
        .filter(|(name, _)| ready.contains(&name.as_str()))
        .map(|(name, at)| {
            let ahead = match at.duration_since(facts.now) {
                Ok(ahead) => ahead.as_secs() as i64,
                Err(behind) => -(behind.duration().as_secs() as i64),
            };
            let is_usual = (-HEARTBEAT..=0).contains(&ahead);
            (name.as_str(), if is_usual { 0 } else { ahead })
        })
        .collect()
}
