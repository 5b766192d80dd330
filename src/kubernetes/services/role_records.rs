//! The records of control planes in a cluster that has none: one of Constellation, or of a version
//! before records. The services serve only on nodes whose record says that they are control planes, so
//! `apply` writes these records first.
//!
//! A label of a Node is no proof, because agents on other nodes may write it. The addresses of the
//! Service `kubernetes` are: each API server keeps its own address there. Where that does not help, the
//! operator names the node.

use std::net::IpAddr;

use super::super::client::{self, Client, ENDPOINT_SLICES, NODES, Selector};
use super::super::control_planes::is_labelled;
use super::super::machine_record::{self, MachineRecord, name_of_node};
use super::super::objects::{EndpointSlice, NodeObject};

/// Why the roles of nodes are not settled.
#[derive(Debug)]
pub(super) enum Error {
    /// The API server refused a request or did not answer.
    Api(client::Error),
    /// These nodes have the label of control planes, and nothing proves that they are.
    Unproven(Vec<String>),
}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        Error::Api(error)
    }
}

/// Writes the records that are missing. `named` are nodes for which the operator vouches: they get a
/// record in any case. Changes nothing in a dry run, nor if a node with the label of a control plane is
/// not proven to be one: the DaemonSets would put the services' pods there, with the right to write
/// records and to approve certificates.
pub(super) fn write(
    client: &Client,
    named: &[String],
    is_dry_run: bool,
    report: &mut dyn FnMut(String),
) -> Result<(), Error> {
    let records = machine_record::of_nodes(client)?;
    let record_of = |node: &Node| records.iter().find(|it| it.node == node.name);
    let is_old = !records.iter().any(|record| record.control_plane);
    let nodes = client.list_keeping(&NODES.all(), &Selector::default(), Node::read)?;
    let nodes = nodes.items;
    let is_candidate = |node: &Node| is_old && node.has_label && record_of(node).is_none();
    let servers = if nodes.iter().any(is_candidate) {
        api_servers(client)?
    } else {
        vec![]
    };
    let (mut missing, mut unproven) = (vec![], vec![]);
    for node in &nodes {
        match record_of(node) {
            Some(record) if record.control_plane => {}
            None if named.contains(&node.name) => missing.push(node),
            _ if !node.has_label => {}
            None if is_old && node.runs_api_server(&nodes, &servers) => missing.push(node),
            _ => unproven.push(node.name.clone()),
        }
    }
    if !unproven.is_empty() {
        return Err(Error::Unproven(unproven));
    }
    for node in missing {
        report(format!("{} is recorded as a control plane", node.name));
        if !is_dry_run {
            machine_record::write_if_absent(client, &node.record())?;
        }
    }
    Ok(())
}

/// What a Node claims.
struct Node {
    name: String,
    has_label: bool,
    addresses: Vec<IpAddr>,
}

impl Node {
    fn read(object: NodeObject) -> Node {
        let internal = object.addresses("InternalIP");
        Node {
            has_label: is_labelled(&object),
            addresses: internal.filter_map(|it| it.parse().ok()).collect(),
            name: object.metadata.name,
        }
    }

    /// Returns whether an API server has an address of this node, and no other node claims it.
    fn runs_api_server(&self, nodes: &[Node], servers: &[IpAddr]) -> bool {
        let others = || nodes.iter().filter(|other| other.name != self.name);
        self.addresses.iter().any(|address| {
            servers.contains(address) && !others().any(|other| other.addresses.contains(address))
        })
    }

    /// Returns a record of the role. The machine and its disk are unknown.
    fn record(&self) -> MachineRecord {
        MachineRecord {
            name: name_of_node(&self.name),
            node: self.name.clone(),
            control_plane: true,
            addresses: self.addresses.clone(),
            ..MachineRecord::default()
        }
    }
}

/// Returns the addresses of the API servers, as they write them.
fn api_servers(client: &Client) -> Result<Vec<IpAddr>, client::Error> {
    let slice = ENDPOINT_SLICES.in_namespace("default").named("kubernetes");
    let slice: EndpointSlice = client.find_as(&slice)?.unwrap_or_default();
    let endpoints = slice.endpoints.iter().flatten();
    let addresses = endpoints.flat_map(|endpoint| &endpoint.addresses);
    Ok(addresses.filter_map(|it| it.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::super::super::control_planes::ROLE_LABEL;
    use super::*;
    use serde_json::{from_value, json};

    #[test]
    fn a_label_makes_no_control_plane_without_an_api_server_at_an_address_of_its_own() {
        let node = |name: &str, address: &str| {
            let node = json!({
                "metadata": {"name": name, "labels": {ROLE_LABEL: ""}},
                "status": {"addresses": [{"type": "InternalIP", "address": address}]},
            });
            Node::read(from_value(node).unwrap())
        };
        let servers: Vec<IpAddr> = vec!["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
        let nodes = [
            node("cp-1", "10.0.0.1"),
            node("cp-2", "10.0.0.2"),
            node("worker", "10.0.0.9"),
            node("thief", "10.0.0.2"),
        ];
        let proven = nodes
            .iter()
            .filter(|it| it.runs_api_server(&nodes, &servers));
        let names: Vec<_> = proven.map(|it| &*it.name).collect();
        assert_eq!(names, ["cp-1"]);
        let record = nodes[0].record();
        assert!(record.control_plane && record.machine.is_empty());
        let map = from_value(record.to_object()).unwrap();
        assert_eq!(MachineRecord::read(&map), Some(record));
    }
}
