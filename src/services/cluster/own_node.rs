//! Whether the node of this pod is a control plane. A service on another node must not issue
//! tickets, approve certificates or sign attestation results: the label that puts its pods onto
//! nodes can be written by each account that may patch the status of Nodes.

use std::time::Duration;

use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client};
use kubernetes::machine_record::{MachineRecord, name_of_node};

/// How often the record is read until it says so.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// Returns why this node is not known to be a control plane; `None` if its record says that it is
/// one.
pub fn why_not_control_plane(api: &Client, node: &str) -> Option<String> {
    let name = name_of_node(node);
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(&name);
    let found = api.find(&at);
    let record = match found {
        Ok(map) => map.as_ref().and_then(MachineRecord::read),
        Err(error) => return Some(format!("its record cannot be read: {error}")),
    };
    match record {
        Some(record) if record.control_plane && record.node == node => None,
        Some(_) => Some(format!(
            "its record, the ConfigMap {NAMESPACE}/{name}, is that of a worker"
        )),
        None => Some(format!(
            "there is no ConfigMap {NAMESPACE}/{name}: firstlight apply writes the records of control planes"
        )),
    }
}
