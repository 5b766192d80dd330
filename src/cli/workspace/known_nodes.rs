//! Keeps the nodes of a cluster in the state file while its API server works. When all nodes were
//! off, `firstlight recover --all` finds their addresses and attestation keys there.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use crate::shell::error::Error;
use crate::workspace::state::{KnownNode, MAX_ADDRESSES, MAX_NODES, State};
use base::machines::Role;
use kubernetes::client::{Client, NODES, Selector};
use kubernetes::control_planes::is_labelled;
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::objects::NodeObject;
use kubernetes::services;

/// The kinds of addresses, in the order in which they are tried.
const KINDS: [&str; 2] = ["InternalIP", "ExternalIP"];

/// Replaces the nodes in the state file by those of the cluster. Without a state file it does
/// nothing; a failure is only a warning.
pub fn keep(client: &Client, path: &Path) {
    if let Err(error) = save(client, path) {
        log::warn!(
            "{}: cannot save the nodes of the cluster for a later recovery: {error}",
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
    let nodes = client.list_as::<NodeObject>(&NODES.all(), &Selector::default())?;
    let records = machine_record::of_nodes(client)?;
    let records = records.into_iter().map(|it| (it.node.clone(), it));
    let records: BTreeMap<String, MachineRecord> = records.collect();
    let mut nodes: Vec<KnownNode> = nodes
        .items
        .iter()
        .map(|node| read(node, &records))
        .collect();
    nodes.sort_by(|one, other| {
        let key = |node: &KnownNode| (node.role != Role::ControlPlane, node.name.clone());
        key(one).cmp(&key(other))
    });
    nodes.truncate(MAX_NODES);
    Ok(nodes)
}

fn read(node: &NodeObject, records: &BTreeMap<String, MachineRecord>) -> KnownNode {
    let name = &node.metadata.name;
    let record = records.get(name);
    // The label only stands in for a record that an old cluster lacks: the role orders a recovery, and each node proves itself in it.
    let is_control_plane = record.map_or_else(|| is_labelled(node), |it| it.control_plane);
    KnownNode {
        name: name.clone(),
        role: if is_control_plane {
            Role::ControlPlane
        } else {
            Role::Worker
        },
        addresses: KINDS
            .into_iter()
            .flat_map(|kind| node.addresses(kind))
            .map(str::to_owned)
            .take(MAX_ADDRESSES)
            .collect(),
        key: record.and_then(|it| it.machine.parse().ok()),
    }
}

#[cfg(test)]
mod tests {
    use kubernetes::control_planes::ROLE_LABEL;
    use serde_json::json;
    use verifier::KeyName;

    use super::*;

    #[test]
    fn internal_addresses_come_first() {
        let key: KeyName = "ab".repeat(32).parse().unwrap();
        let record = MachineRecord {
            machine: key.to_string(),
            control_plane: true,
            ..MachineRecord::default()
        };
        let of = |record: MachineRecord| BTreeMap::from([("n".to_owned(), record)]);
        let addresses = json!([
            {"type": "Hostname", "address": "n"},
            {"type": "ExternalIP", "address": "203.0.113.5"},
            {"type": "InternalIP", "address": "10.0.0.5"},
            {"type": "InternalIP", "address": "fd00::5"},
        ]);
        let node = json!({
            "metadata": {"name": "n", "labels": {ROLE_LABEL: ""}},
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
        let node: NodeObject = serde_json::from_value(node).unwrap();
        assert_eq!(read(&node, &of(record)), expected);
        let empty = NodeObject::default();
        assert_eq!(read(&empty, &BTreeMap::new()).role, Role::Worker);
        // a label does not change what a record says
        assert_eq!(
            read(&node, &of(MachineRecord::default())).role,
            Role::Worker
        );
        assert_eq!(read(&node, &BTreeMap::new()).role, Role::ControlPlane);
    }
}
