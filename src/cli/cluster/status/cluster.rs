//! The state of all nodes of a cluster: the API server lists them, and each node proves its own
//! state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::SystemTime;

use base::text::hex;
use base::time::seconds;
use serde_json::{Value, json};
use verifier::KeyName;

use super::ends::{EndingCertificate, day, ending};
use super::inquiry::Inquiry;
use super::report::{FRESH, OTHER_CLUSTER, ReportedState, UNPROVEN, WAITS_FOR_KEY};
use super::served::Validity;
use super::view::{self, API_SERVER, ETCD, ETCD_PEER, KUBELET, NodeView, SecretAccess, View};
use super::waiting::{WaitingFor, waiting};
use crate::shell::{
    error::{ATTESTATION_REFUSED, Error, UNREACHABLE},
    output::{Output, say_all},
    progress::printable,
};

/// The exit codes of nodes that are not members, the most severe first: the cluster's exit code is
/// that of its worst node.
const SEVERITY: [u8; 6] = [
    ATTESTATION_REFUSED,
    OTHER_CLUSTER,
    UNPROVEN,
    FRESH,
    WAITS_FOR_KEY,
    UNREACHABLE,
];

/// Asks all nodes, and prints a table of them.
pub fn run(inquiry: &Inquiry, kubeconfigs: &[PathBuf], output: Output) -> Result<(), Error> {
    let view = view::gather(inquiry, kubeconfigs, SecretAccess::Skip).map_err(|it| it.error)?;
    let now = SystemTime::now();
    let waiting = waiting(&view, now);
    match output {
        Output::Text => {
            let parts = [
                text(&view.nodes),
                more(&view, inquiry),
                of_cluster(&view, &waiting, now),
            ];
            let parts: Vec<String> = parts.into_iter().filter(|it| !it.is_empty()).collect();
            say_all(&parts.join("\n"))?;
        }
        Output::Json => output.json(&to_json(&view, &waiting, inquiry, now))?,
    }
    result(&view.nodes)
}

/// Returns the result of the whole command: success if each node is a member of the cluster.
fn result(nodes: &[NodeView]) -> Result<(), Error> {
    let states: Vec<ReportedState> = nodes.iter().map(|node| node.report.state()).collect();
    let others = nodes
        .iter()
        .zip(&states)
        .filter(|(_, state)| state.code != 0);
    let named: Vec<String> = others
        .map(|(node, state)| format!("{} ({})", printable(&node.listed.name), state.name))
        .collect();
    let worst = SEVERITY
        .into_iter()
        .find(|code| states.iter().any(|state| state.code == *code));
    match worst {
        None => Ok(()),
        Some(code) => {
            let text = format!(
                "{} of {} nodes are not members: {}",
                named.len(),
                nodes.len(),
                named.join(", ")
            );
            Err(Error::State(code, text))
        }
    }
}

/// Returns a table of the nodes, followed by details about each node that is not a member or has no network plugin.
fn text(nodes: &[NodeView]) -> String {
    let heads = ["NODE", "ADDRESS", "ROLE", "KUBERNETES", "STATE"].map(str::to_owned);
    let rows = nodes.iter().map(|NodeView { listed, report, .. }| {
        let ready = if listed.is_ready { "Ready" } else { "NotReady" };
        [
            printable(&listed.name),
            printable(&listed.address),
            listed.role().to_owned(),
            printable(&format!("{ready} {}", listed.version)),
            report.state().name.to_owned(),
        ]
    });
    let mut text = table(heads, rows);
    for NodeView { listed, report, .. } in nodes {
        if report.state().code != 0 {
            // writing to a string does not fail
            let _ = write!(text, "\n{}:\n{}", printable(&listed.name), report.servers());
        }
    }
    for sentence in nodes
        .iter()
        .filter_map(|node| node.listed.no_network.as_ref())
    {
        let _ = writeln!(text, "\n{}", printable(sentence));
    }
    if let Some(warning) = nodes.iter().find_map(|node| node.report.warning()) {
        let _ = writeln!(text, "\n{warning}");
    }
    for (key, names) in shared_keys(nodes) {
        let names = printable(&names.join(", "));
        let _ = writeln!(
            text,
            "\nOne machine answers for several nodes ({names}), with the attestation key {key}"
        );
    }
    text
}

/// Returns a table: the heads, then the rows, each column as wide as its longest cell.
fn table<const COLUMNS: usize>(
    heads: [String; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) -> String {
    let rows: Vec<[String; COLUMNS]> = [heads].into_iter().chain(rows).collect();
    let widths: [usize; COLUMNS] = std::array::from_fn(|column| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    });
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths);
        let cells: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Returns a table of what each node proves about itself now, its last ticket and its disk according to its record, and when its
/// first certificate ends.
fn more(view: &View, inquiry: &Inquiry) -> String {
    if view.nodes.is_empty() {
        return String::new();
    }
    let heads = [
        "NODE",
        "IMAGE",
        "VARIANT",
        "JOINED",
        "DISK",
        "FIRST CERTIFICATE ENDS",
    ];
    let none = || "-".to_owned();
    let rows = view.nodes.iter().map(|node| {
        let record = view.objects.record_of(&node.listed.name);
        let image = node.report.image();
        let certificates = node.servers.certificates();
        let first = certificates.min_by_key(|(_, validity)| validity.until);
        let ends =
            |(server, validity): (_, Validity)| format!("{} ({server})", day(validity.until));
        [
            printable(&node.listed.name),
            image.map_or_else(none, printable),
            image.map_or_else(none, |_| inquiry.variant.name.to_owned()),
            record.and_then(|it| it.issued).map_or_else(none, day),
            record.map_or_else(none, |it| printable(&it.disk)),
            first.map_or_else(none, ends),
        ]
    });
    table(heads.map(str::to_owned), rows)
}

/// Returns lines about the whole cluster: what ends, what waits, what could not be read.
fn of_cluster(view: &View, waiting: &[WaitingFor], now: SystemTime) -> String {
    let mut text = String::new();
    let authorities = view.authorities.iter();
    let operator = view
        .operator
        .iter()
        .map(|it| ("operator's certificate", *it));
    for (what, validity) in authorities.copied().chain(operator) {
        // writing to a string does not fail
        let _ = writeln!(text, "The {what} ends on {}", day(validity.until));
    }
    for EndingCertificate {
        object, text: what, ..
    } in ending(view, now)
    {
        let object = printable(&object);
        let _ = writeln!(
            text,
            "Look at it soon (firstlight doctor): {object}: {what}"
        );
    }
    for node in &view.nodes {
        if node.report.has_set_clock() == Some(false) {
            let name = printable(&node.listed.name);
            let _ = writeln!(
                text,
                "Look at it soon (firstlight doctor): {name}: no time service has set its clock"
            );
        }
    }
    for WaitingFor {
        object, text: what, ..
    } in waiting
    {
        let _ = writeln!(text, "{} waits for {}", printable(object), printable(what));
    }
    for (_, why) in &view.objects.unread {
        let _ = writeln!(text, "Not shown: {}", printable(why));
    }
    if let Some(until) = view.old_clients_until() {
        let _ = writeln!(
            text,
            "Clients without a token get keys of volumes through {}; end it: firstlight apply --old-clients-until never",
            printable(&until)
        );
    }
    text
}

/// Returns the attestation keys that several nodes share, each with the nodes' names.
pub fn shared_keys(nodes: &[NodeView]) -> Vec<(KeyName, Vec<&str>)> {
    let mut nodes_of: BTreeMap<KeyName, Vec<&str>> = BTreeMap::new();
    for NodeView { listed, report, .. } in nodes {
        let keys: BTreeSet<KeyName> = report.keys().collect();
        for key in keys {
            nodes_of.entry(key).or_default().push(&listed.name);
        }
    }
    nodes_of
        .into_iter()
        .filter(|(_, names)| names.len() > 1)
        .collect()
}

/// Returns the JSON for programs. docs/cli.md describes it.
fn to_json(view: &View, waiting: &[WaitingFor], inquiry: &Inquiry, now: SystemTime) -> Value {
    let each = view.nodes.iter().map(|node| {
        let listed = &node.listed;
        let record = view.objects.record_of(&listed.name);
        let ends: BTreeMap<_, _> = node.servers.certificates().collect();
        let end = |server| ends.get(server).map(|it: &Validity| seconds(it.until));
        json!({
            "name": listed.name,
            "address": listed.address,
            "role": listed.role(),
            "ready": listed.is_ready,
            "network": listed.no_network.is_none(),
            "kubelet": listed.version,
            "image": node.report.image(),
            "variant": node.report.image().map(|_| inquiry.variant.name),
            "joined": record.and_then(|it| it.issued).map(seconds),
            "disk": record.map(|it| &it.disk),
            "certificates": {
                "kubelet": end(KUBELET), "apiServer": end(API_SERVER), "etcd": end(ETCD), "etcdPeer": end(ETCD_PEER),
            },
            "status": node.report.json(None),
        })
    });
    let authorities = view.authorities.iter();
    let authorities =
        authorities.map(|(what, validity)| json!({"name": what, "ends": seconds(validity.until)}));
    json!({
        "cluster": inquiry.cluster.map(|id| hex(&id)),
        "nodes": each.collect::<Vec<Value>>(),
        "authorities": authorities.collect::<Vec<Value>>(),
        "operatorCertificate": view.operator.map(|it| seconds(it.until)),
        "ending": ending(view, now).iter().map(EndingCertificate::json).collect::<Vec<Value>>(),
        "waiting": waiting.iter().map(WaitingFor::json).collect::<Vec<Value>>(),
        "unread": view.objects.unread.iter().map(|(_, why)| why).collect::<Vec<_>>(),
        "oldClientsUntil": view.old_clients_until(),
    })
}
