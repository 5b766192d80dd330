//! The state of all nodes of a cluster: the API server lists them, and each node proves its own
//! state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::slice::from_ref;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use base::sync::lock;
use base::text::hex;
use kubernetes::client::{self, Client, NODES, Selector};
use kubernetes::readiness;
use kubernetes::services;
use serde_json::{Value, json};
use verifier::KeyName;

use super::inquiry::Inquiry;
use super::report::{FRESH, OTHER_CLUSTER, Report, State, UNPROVEN, WAITS_FOR_KEY};
use crate::error::{ATTESTATION_REFUSED, Error, UNREACHABLE};
use crate::kubeconfig;
use crate::output::{Output, say_all};
use crate::progress::printable;

/// The number of nodes that are asked at the same time.
pub const AT_ONCE: usize = 64;
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

/// A node according to Kubernetes, that is, according to its kubelet.
pub struct Listed {
    /// The name of the Node.
    pub name: String,
    /// The first internal address, or else the first external one, or else the name, which DNS may
    /// resolve.
    address: String,
    /// Whether kubeadm has made it a control plane.
    pub is_control_plane: bool,
    /// Whether its kubelet says that it is ready.
    pub is_ready: bool,
    /// A sentence if it has no network plugin.
    no_network: Option<String>,
    /// The version of the kubelet.
    pub version: String,
}

/// A node, and what its evidence proves.
pub type Asked = (Listed, Report);

/// Asks all nodes, and prints a table of them.
pub fn run(inquiry: &Inquiry, kubeconfigs: &[PathBuf], output: Output) -> Result<(), Error> {
    let (listed, old_clients) = list(inquiry, kubeconfigs)?;
    let nodes = ask_all(inquiry, listed)?;
    match (output, old_clients) {
        (Output::Text, None) => say_all(&text(&nodes))?,
        (Output::Text, Some(until)) => say_all(&format!(
            "{}\nClients without a token get keys of volumes through {}; end it: firstlight apply --old-clients-until never\n",
            text(&nodes),
            printable(&until)
        ))?,
        (Output::Json, until) => {
            let mut all = to_json(&nodes, inquiry);
            all["oldClientsUntil"] = until.into();
            output.json(&all)?;
        }
    }
    result(&nodes)
}

/// Returns the nodes, and through which day clients without a token get keys, if they do.
fn list(
    inquiry: &Inquiry,
    kubeconfigs: &[PathBuf],
) -> Result<(Vec<Listed>, Option<String>), Error> {
    let client = kubeconfig::client(kubeconfigs)?;
    let left = inquiry.deadline.saturating_duration_since(Instant::now());
    let client = client.within(left);
    let all = listed(&client).and_then(|nodes| Ok((nodes, services::old_clients_until(&client)?)));
    all.map(|(nodes, until)| (nodes, until.filter(|until| !until.is_empty())))
        .map_err(|error| {
        let is_refused = error.code().is_some();
        let text = format!(
            "cannot list the nodes of the cluster: {error}; to ask a node without the API server, name it: \
             firstlight status HOST"
        );
        match is_refused {
            true => Error::Refused(text),
            false => Error::Unreachable(text),
        }
    })
}

/// Returns the nodes of a cluster.
pub fn listed(client: &Client) -> Result<Vec<Listed>, client::Error> {
    let listed = client.list_keeping(&NODES.all(), &Selector::default(), without_images)?;
    Ok(listed.items.iter().map(Listed::read).collect())
}

/// The list of the images on a node is most of its object.
fn without_images(mut node: Value) -> Value {
    if let Some(status) = node["status"].as_object_mut() {
        status.remove("images");
    }
    node
}

impl Listed {
    fn read(node: &Value) -> Listed {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = |list: &str| node["status"][list].as_array().into_iter().flatten();
        let address = |kind: &str| {
            all("addresses")
                .find(|address| address["type"] == kind)
                .map(|address| text(&address["address"]))
        };
        Listed {
            name: text(&node["metadata"]["name"]),
            address: address("InternalIP")
                .or_else(|| address("ExternalIP"))
                .unwrap_or_else(|| text(&node["metadata"]["name"])),
            is_control_plane: !node["metadata"]["labels"]["node-role.kubernetes.io/control-plane"]
                .is_null(),
            is_ready: all("conditions")
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "True"),
            no_network: readiness::without_network(from_ref(node)).pop(),
            version: text(&node["status"]["nodeInfo"]["kubeletVersion"]),
        }
    }

    /// Returns the role as text.
    pub fn role(&self) -> &'static str {
        match self.is_control_plane {
            true => "control-plane",
            false => "worker",
        }
    }
}

/// Asks the nodes, many at the same time. Returns them sorted by name.
pub fn ask_all(inquiry: &Inquiry, nodes: Vec<Listed>) -> Result<Vec<Asked>, Error> {
    let workers = nodes.len().min(AT_ONCE);
    let left = Mutex::new(nodes);
    let asked = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(node) = lock(&left).pop() {
                    let report = inquiry.ask(&node.address);
                    lock(&asked).push(report.map(|report| (node, report)));
                }
            });
        }
    });
    let asked = std::mem::take(&mut *lock(&asked));
    let mut asked = asked.into_iter().collect::<Result<Vec<Asked>, _>>()?;
    asked.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
    Ok(asked)
}

/// Returns the result of the whole command: success if each node is a member of the cluster.
fn result(nodes: &[Asked]) -> Result<(), Error> {
    let states: Vec<State> = nodes.iter().map(|(_, report)| report.state()).collect();
    let others = nodes
        .iter()
        .zip(&states)
        .filter(|(_, state)| state.code != 0);
    let named: Vec<String> = others
        .map(|((node, _), state)| format!("{} ({})", printable(&node.name), state.name))
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
fn text(nodes: &[Asked]) -> String {
    let heads = ["NODE", "ADDRESS", "ROLE", "KUBERNETES", "STATE"].map(str::to_owned);
    let rows = nodes.iter().map(|(node, report)| {
        let ready = match node.is_ready {
            true => "Ready",
            false => "NotReady",
        };
        [
            printable(&node.name),
            printable(&node.address),
            node.role().to_owned(),
            printable(&format!("{ready} {}", node.version)),
            report.state().name.to_owned(),
        ]
    });
    let rows: Vec<[String; 5]> = [heads].into_iter().chain(rows).collect();
    let widths: [usize; 4] = std::array::from_fn(|column| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    });
    let mut text = String::new();
    for [name, address, role, kubernetes, state] in &rows {
        let [a, b, c, d] = widths;
        // writing to a string does not fail
        let _ = writeln!(
            text,
            "{name:a$}  {address:b$}  {role:c$}  {kubernetes:d$}  {state}"
        );
    }
    for (node, report) in nodes {
        if report.state().code != 0 {
            let _ = write!(text, "\n{}:\n{}", printable(&node.name), report.servers());
        }
    }
    for sentence in nodes
        .iter()
        .filter_map(|(node, _)| node.no_network.as_ref())
    {
        let _ = writeln!(text, "\n{}", printable(sentence));
    }
    if let Some(warning) = nodes.iter().find_map(|(_, report)| report.warning()) {
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

/// Returns the attestation keys that several nodes share, each with the nodes' names.
fn shared_keys(nodes: &[Asked]) -> Vec<(KeyName, Vec<&str>)> {
    let mut nodes_of: BTreeMap<KeyName, Vec<&str>> = BTreeMap::new();
    for (node, report) in nodes {
        let keys: BTreeSet<KeyName> = report.keys().collect();
        for key in keys {
            nodes_of.entry(key).or_default().push(&node.name);
        }
    }
    nodes_of
        .into_iter()
        .filter(|(_, names)| names.len() > 1)
        .collect()
}

/// Returns the JSON for programs. docs/cli.md describes it.
fn to_json(nodes: &[Asked], inquiry: &Inquiry) -> Value {
    let each = nodes.iter().map(|(node, report)| {
        json!({
            "name": node.name,
            "address": node.address,
            "role": node.role(),
            "ready": node.is_ready,
            "network": node.no_network.is_none(),
            "kubelet": node.version,
            "status": report.json(None),
        })
    });
    json!({
        "cluster": inquiry.cluster.map(|id| hex(&id)),
        "nodes": each.collect::<Vec<Value>>(),
    })
}
