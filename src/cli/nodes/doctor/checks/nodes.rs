//! The nodes: what they prove, what Kubernetes says of them, and what is recorded of them.

use std::collections::BTreeMap;
use std::time::Duration;

use verifier::refusal::Kind;

use super::super::diagnosis::Diagnosis;
use super::super::gathered::Gathered;
use crate::cluster::{
    status::cluster::shared_keys,
    status::objects::{ObjectList, UNINITIALIZED},
    status::report::{StatusReport, Unjudged},
    status::view::NodeView,
};
use crate::shell::progress::human;
use kubernetes::machine_record::MachineRecord;

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
    if let Some(of_all) = of_all(facts) {
        return vec![of_all];
    }
    let mut found: Vec<Diagnosis> = facts
        .view
        .nodes
        .iter()
        // without the ID of the cluster each node is of another one: the check `state` says so
        .filter(|it| it.report.cluster.is_some() || it.report.state().name != "other-cluster")
        .filter_map(|node| of_report(facts, node))
        .collect();
    for (key, names) in shared_keys(&facts.view.nodes) {
        found.push(Diagnosis::error(
            names.join(", "),
            format!("one machine answers for these nodes, with the attestation key {key}"),
            "correct the addresses of the nodes, or remove the one that no machine has: firstlight node remove NAME (docs/day-two/remove-node.md)",
        ));
    }
    found
}

/// Returns one finding if no node proves anything for one reason: that is seldom the nodes' fault.
fn of_all(facts: &Gathered) -> Option<Diagnosis> {
    let nodes = &facts.view.nodes;
    let first = nodes.first()?;
    let are = |test: &dyn Fn(&NodeView) -> bool| nodes.len() > 1 && nodes.iter().all(test);
    let all = format!("all {} nodes", nodes.len());
    let why = format!("{}: {}", first.listed.name, reason(&first.report));
    let file = facts.policy_file.display();
    for cause in [Unjudged::Collateral, Unjudged::Variant] {
        if are(&|node| node.report.unjudged() == Some(cause)) {
            return Some(Diagnosis::warning(
                all,
                format!("none could be judged: {why}"),
                advice_of(cause, facts),
            ));
        }
    }
    if are(&|node| node.report.refusal().is_some()) {
        return Some(Diagnosis::error(
            all,
            format!("none meets the policy in {file}: {why}"),
            format!(
                "first make sure that {file} is the policy of this cluster (firstlight policy show {file}), then look at one node: \
                 firstlight explain {} --policy {file} (docs/refusals.md)",
                first.listed.address
            ),
        ));
    }
    if are(&|node| is_foreign(facts, node)) {
        return Some(Diagnosis::warning(
            all,
            "no program of Firstlight answers on them, and they have no records: they are probably nodes of Constellation",
            "firstlight migrate plan shows how to move them (docs/migration.md)",
        ));
    }
    if are(&|node| node.report.state().name == "unreachable") {
        return Some(Diagnosis::warning(
            all,
            format!("none answers this machine, so nothing is known of what they run: {why}"),
            "run the command where ports 9000 and 9999 of the nodes can be reached",
        ));
    }
    None
}

/// Returns what the first server says, without its address.
fn reason(report: &StatusReport) -> String {
    match report.refusal() {
        // one line for each register
        Some(why) => why.text.lines().next().unwrap_or_default().to_owned(),
        None => {
            let (servers, state) = (report.servers(), report.state());
            let first = servers.lines().next().unwrap_or(&state.text);
            first.trim().to_owned()
        }
    }
}

/// Returns whether a node looks like one of Constellation: Kubernetes takes it for ready, it has no record, and its machine says
/// that no program listens on our ports.
fn is_foreign(facts: &Gathered, node: &NodeView) -> bool {
    let objects = &facts.view.objects;
    node.listed.is_ready
        && node.report.is_closed()
        && objects.has(ObjectList::Maps)
        && objects.record_of(&node.listed.name).is_none()
}

fn advice_of(cause: Unjudged, facts: &Gathered) -> String {
    match cause {
        Unjudged::Collateral => "run the command where the servers of AMD and Intel can be reached, without --offline, or give it a \
                                 folder that has what is missing: --collateral FILE (docs/collateral.md)"
            .into(),
        Unjudged::Variant => format!(
            "the command expects {}: give --attestation-variant, or the policy of these machines (docs/attestation.md)",
            facts.variant.name
        ),
    }
}

fn of_report(facts: &Gathered, node: &NodeView) -> Option<Diagnosis> {
    let (report, listed) = (&node.report, &node.listed);
    let state = report.state();
    let (name, address) = (&listed.name, &listed.address);
    let file = facts.policy_file.display();
    let why = format!("{}: {}", state.name, reason(report));
    match (state.name, report.unjudged()) {
        ("member", _) => None,
        (_, Some(cause)) => {
            let text = format!("it could not be judged: {}", reason(report));
            let advice = advice_of(cause, facts);
            Some(match cause {
                Unjudged::Collateral => Diagnosis::note(name, text, advice),
                // of a cluster with one variant
                Unjudged::Variant => Diagnosis::warning(name, text, advice),
            })
        }
        ("refused", None) => Some(Diagnosis::error(
            name,
            format!("it does not meet the policy: {}", reason(report)),
            of_refusal(facts, node),
        )),
        ("waits-for-key", _) => Some(Diagnosis::error(
            name,
            why,
            format!(
                "read what it waits for: firstlight recover --endpoint {address} --policy {file} --status (docs/troubleshooting.md)"
            ),
        )),
        ("unreachable", _) if is_foreign(facts, node) => Some(Diagnosis::warning(
            name,
            "no program of Firstlight answers on it, and it has no record: it is probably a node of Constellation",
            "firstlight migrate plan shows how to move it (docs/migration.md)",
        )),
        // Kubernetes hears its kubelet, so it runs
        ("unreachable", _) if listed.is_ready => Some(Diagnosis::warning(
            name,
            why,
            format!(
                "run the command where ports 9000 and 9999 of {address} can be reached; if they can, look at the log of its bootstrapper \
                 (docs/troubleshooting.md)"
            ),
        )),
        ("unreachable", _) => Some(Diagnosis::error(
            name,
            why,
            "look at its console (docs/boot.md): the machine is off, still starts, or has lost its network",
        )),
        ("unproven", _) => Some(Diagnosis::warning(
            name,
            "only its join service answers, so the node proves nothing",
            "if it is a node of Constellation, replace it by one of Firstlight (docs/migration.md)",
        )),
        ("fresh", _) => Some(Diagnosis::error(
            name,
            why,
            "the machine was made again and has not joined yet: look at its console (docs/boot.md)",
        )),
        _ => Some(Diagnosis::error(
            name,
            why,
            format!(
                "make sure that --state or --cluster-id is of this cluster; if it is, the Node is of a machine that was made again: \
                 firstlight node remove {name} (docs/day-two/remove-node.md)"
            ),
        )),
    }
}

/// Returns what to do about a node that is refused. A machine is not condemned by a reason that an update explains.
fn of_refusal(facts: &Gathered, node: &NodeView) -> String {
    let file = facts.policy_file.display();
    match node.report.refusal().map(|why| why.kind) {
        Some(Kind::Measurement) => format!(
            "find out what differs: firstlight explain {} --policy {file} (docs/refusals.md)",
            node.listed.address
        ),
        Some(Kind::Machine) => format!(
            "if you know why the machine or its key is new: firstlight policy add-key {file} KEY, then apply it (docs/day-two/hardware.md)"
        ),
        Some(Kind::Outdated) => {
            "update the firmware of the host, or lower the minimum in the policy if you accept the risk (docs/day-two/hardware.md)".into()
        }
        Some(Kind::Expired) => {
            "check the clock of this machine, then let the command fetch newer collateral, without --offline (docs/collateral.md)".into()
        }
        _ => "look the reason up (docs/refusals.md#kinds-of-refusals)".into(),
    }
}

/// Kubernetes takes each node for ready, and schedules pods on it.
pub fn ready(facts: &Gathered) -> Vec<Diagnosis> {
    let mut found = vec![];
    for node in facts.view.nodes.iter().map(|node| &node.listed) {
        if !node.is_ready && node.no_network.is_none() {
            found.push(Diagnosis::error(
                &node.name,
                format!("Kubernetes reports it as not ready: {}", node.why_not),
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
                format!(
                    "install one: {}; or look at the pods of the one that you have (docs/addons.md)",
                    facts.apply_without("policy,services", "--addons FILE")
                ),
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

/// Tells that no record names a control plane, as in a cluster of an earlier version.
fn unrecorded(facts: &Gathered) -> Option<Diagnosis> {
    let objects = &facts.view.objects;
    let has_planes = objects.records.iter().any(|it| it.control_plane);
    let is_known = has_planes || !objects.has(ObjectList::Maps) || facts.view.nodes.is_empty();
    (!is_known).then(|| {
        Diagnosis::error(
            "the control planes",
            "no record says which nodes are control planes, so no command asks one about etcd",
            format!("{} writes the records", facts.apply("")),
        )
    })
}

/// The record of a machine whose Node does not exist.
fn without_node(record: &MachineRecord) -> Diagnosis {
    let what = if record.control_plane {
        "a control plane was admitted under this name, and there is no such Node: its member of etcd may still count for \
        the majority"
    } else {
        "a machine was admitted under this name, and there is no such Node: its disk can still be opened"
    };
    Diagnosis::warning(
        format!("ConfigMap kube-system/{}", record.name),
        what,
        format!(
            "if the machine is gone for good: firstlight node remove {} (docs/day-two/remove-node.md); if not, look at its console \
             (docs/boot.md)",
            record.node
        ),
    )
}

/// Each node has a record of its machine, and each record a node.
pub fn records(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let is_node = |name: &str| facts.view.nodes.iter().any(|node| node.listed.name == name);
    let mut found: Vec<Diagnosis> = unrecorded(facts).into_iter().collect();
    for node in facts.view.nodes.iter().map(|node| &node.listed) {
        let Some(record) = objects.record_of(&node.name) else {
            found.push(Diagnosis::warning(
                &node.name,
                "no record says which machine it is: it joined without a ticket of this join service, and cannot renew its certificate",
                "if you know it, record it (docs/watch.md#nodes-without-a-record); if you do not know it, remove it",
            ));
            continue;
        };
        if record.control_plane != node.is_labelled && !record.token.is_empty() {
            let role = |is: bool| if is { "control plane" } else { "worker" };
            found.push(Diagnosis::warning(
                &node.name,
                format!(
                    "it joined as a {}, and its Node says that it is a {}",
                    role(record.control_plane),
                    role(node.is_labelled)
                ),
                format!(
                    "find out who changed the label node-role.kubernetes.io/control-plane, or firstlight node remove {} \
                     (docs/day-two/remove-node.md)",
                    node.name
                ),
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
            found.push(without_node(record));
        }
    }
    for (disk, nodes) in of_disk.iter().filter(|(_, nodes)| nodes.len() > 1) {
        found.push(Diagnosis::warning(
            nodes.join(", "),
            format!("these nodes have one state disk, {disk}: it was copied, or a record is old"),
            "kubectl -n kube-system delete configmap join-node-NAME of the node that no longer exists (firstlight node remove would close the \
             disk of the other one, too), and give each machine a blank disk of its own",
        ));
    }
    for joining in &objects.joining {
        let is_over = joining
            .deadline
            .is_some_and(|deadline| deadline < facts.now);
        if is_over && !is_node(&joining.node) {
            found.push(Diagnosis::note(
                format!("JoiningNode {}", joining.node),
                "it has expired, and there is no Node of this name",
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

/// What to do about a clock. docs/images/clock.md
const TIME_SERVICE: &str = "look at its time service (firstlight logs NODE --unit chrony) and let it reach its time servers, or name others \
     (the setting time-servers); an image of your own needs chrony or systemd-timesyncd";

/// The clocks of the nodes and of this machine agree, and each node has a time service.
pub fn clocks(facts: &Gathered) -> Vec<Diagnosis> {
    let ahead: BTreeMap<&str, i64> = facts
        .view
        .nodes
        .iter()
        .filter_map(|node| Some((node.listed.name.as_str(), said_by(node)?)))
        .collect();
    let ahead = if ahead.is_empty() {
        by_heartbeats(facts)
    } else {
        ahead
    };
    let mut sorted: Vec<i64> = ahead.values().copied().collect();
    sorted.sort_unstable();
    let Some(median) = sorted.get(sorted.len() / 2).copied() else {
        return vec![];
    };
    let side = |seconds: i64| {
        let time = human(Duration::from_secs(seconds.unsigned_abs()));
        if seconds > 0 {
            format!("{time} ahead of")
        } else {
            format!("{time} behind")
        }
    };
    let mut found = vec![];
    for (name, seconds) in &ahead {
        let apart = seconds - median;
        if apart.abs() > CLOCKS {
            found.push(Diagnosis::error(
                *name,
                format!("its clock is {} most other nodes", side(apart)),
                format!("certificates, tokens and leases depend on it. {TIME_SERVICE}"),
            ));
        }
    }
    for node in &facts.view.nodes {
        if node.report.has_set_clock() == Some(false) {
            found.push(Diagnosis::warning(
                &node.listed.name,
                "no time service has set its clock, so its host alone decides what time it is",
                TIME_SERVICE,
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
