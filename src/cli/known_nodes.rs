//! Keeps the nodes of a cluster in the state file while its API server works. When all nodes were
//! off, `firstlight recover --all` finds their addresses and attestation keys there.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use super::error::Error;
use super::objects::is_control_plane;
use super::state::{KnownNode, MAX_ADDRESSES, MAX_NODES, State};
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client, NODES, Selector};
use kubernetes::machine_record::{MachineRecord, RECORDS};
use kubernetes::services;
use machines::Role;
use serde_json::{Value, json};
use verifier::KeyName;

/// The kinds of addresses, in the order in which they are tried.
const KINDS: [&str; 2] = ["InternalIP", "ExternalIP"];

/// Replaces the nodes in the state file by those of the cluster. Without a state file it does
/// nothing; a failure is only a warning.
pub fn keep(client: &Client, path: &Path) {
    if let Err(error) = save(client, path) {
        log::warn!(
            "{}: the nodes of the cluster are not saved for a recovery: {error}",
            path.display()
        );
    }
}

fn save(client: &Client, path: &Path) -> Result<(), Error> {
    let Some(state) = State::find(path)? else {
        return Ok(());
    };
    match services::present_salt(client)? {
        // the cluster has no join service yet
        None => return Ok(()),
        Some(salt) if salt == state.measurement_salt => {}
        Some(_) => {
            return Err(Error::content(
                "the kubeconfig is of another cluster than this state file",
            ));
        }
    }
    let nodes = list(client)?;
    State::change(path, |state| {
        state.nodes = nodes;
        state.nodes_listed = Some(SystemTime::now());
    })?;
    Ok(())
}

/// Returns the nodes of the cluster, control planes first, with the keys in their records.
fn list(client: &Client) -> Result<Vec<KnownNode>, Error> {
    let nodes = client.list_keeping(&NODES.all(), &Selector::default(), only_needed)?;
    let records = Selector {
        labels: RECORDS.into(),
        ..Selector::default()
    };
    let records = client.list(&CONFIG_MAPS.in_namespace(NAMESPACE), &records)?;
    let records = records.items.iter().filter_map(MachineRecord::read);
    let keys: BTreeMap<String, KeyName> = records
        .filter_map(|record| Some((record.node, record.machine.parse().ok()?)))
        .collect();
    let mut nodes: Vec<KnownNode> = nodes.items.iter().map(|node| read(node, &keys)).collect();
    nodes.sort_by(|one, other| {
        let key = |node: &KnownNode| (node.role != Role::ControlPlane, node.name.clone());
        key(one).cmp(&key(other))
    });
    nodes.truncate(MAX_NODES);
    Ok(nodes)
}

/// The list of the images on a node is most of its object.
fn only_needed(node: Value) -> Value {
    json!({
        "metadata": {"name": node["metadata"]["name"], "labels": node["metadata"]["labels"]},
        "status": {"addresses": node["status"]["addresses"]},
    })
}

fn read(node: &Value, keys: &BTreeMap<String, KeyName>) -> KnownNode {
    let name = node["metadata"]["name"].as_str().unwrap_or_default();
    let all = node["status"]["addresses"].as_array();
    let of_kind = |kind: &'static str| {
        let all = all.into_iter().flatten();
        all.filter(move |address| address["type"] == kind)
            .filter_map(|address| address["address"].as_str())
    };
    KnownNode {
        name: name.into(),
        role: match is_control_plane(node) {
            true => Role::ControlPlane,
            false => Role::Worker,
        },
        addresses: KINDS
            .into_iter()
            .flat_map(of_kind)
            .map(str::to_owned)
            .take(MAX_ADDRESSES)
            .collect(),
        key: keys.get(name).copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::objects::CONTROL_PLANE;
    use super::*;

    #[test]
    fn internal_addresses_come_first() {
        let key: KeyName = "ab".repeat(32).parse().unwrap();
        let keys = BTreeMap::from([("n".to_owned(), key)]);
        let addresses = json!([
            {"type": "Hostname", "address": "n"},
            {"type": "ExternalIP", "address": "203.0.113.5"},
            {"type": "InternalIP", "address": "10.0.0.5"},
            {"type": "InternalIP", "address": "fd00::5"},
        ]);
        let node = json!({
            "metadata": {"name": "n", "labels": {CONTROL_PLANE: ""}},
            "status": {"addresses": addresses, "images": ["much"]},
        });
        let expected = KnownNode {
            name: "n".into(),
            role: Role::ControlPlane,
            addresses: ["10.0.0.5", "fd00::5", "203.0.113.5"]
                .map(str::to_owned)
                .into(),
            key: Some(key),
        };
        assert_eq!(read(&only_needed(node), &keys), expected);
        assert_eq!(read(&json!({}), &keys).role, Role::Worker);
    }
}
