//! Whether the node of this pod is a control plane. A program on another node must not issue
//! tickets, approve certificates or sign attestation results: the label that puts its pods onto
//! nodes can be written by each account that may patch the status of Nodes.

use std::time::Duration;

use crate::key_service::tokens;
use base::program::Failure;
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client};
use kubernetes::machine_record::{MachineRecord, name_of_node};
use sys::signal::StopSignals;

/// How often the record is read until it says so.
const INTERVAL: Duration = Duration::from_secs(5);

/// Waits until the record of this pod's node says that it is a control plane. Until then the program
/// listens nowhere, so the pod is not ready. Returns whether it may start; false after a signal.
pub fn wait_until_control_plane(api: &Client, signals: &StopSignals) -> Result<bool, Failure> {
    let Some(node) = tokens::own_node() else {
        log::warn!(
            "CANNOT CHECK WHETHER THIS NODE IS A CONTROL PLANE: the token of this pod's account does not name the node"
        );
        return Ok(true);
    };
    while let Some(why) = why_not_control_plane(api, &node) {
        log::error!(
            "this service does not start yet: the node {node} is not known to be a control plane: {why}; trying again in {} s",
            INTERVAL.as_secs()
        );
        let waited = signals.wait_for(INTERVAL);
        if let Some(signal) = waited.map_err(Failure::failed)? {
            log::info!("{signal}: stopped before the service started");
            return Ok(false);
        }
    }
    log::info!("the record of the node {node} says that it is a control plane");
    Ok(true)
}

/// Returns why this node is not known to be a control plane; `None` if its record says that it is
/// one.
fn why_not_control_plane(api: &Client, node: &str) -> Option<String> {
    let name = name_of_node(node);
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(&name);
    let found = api.find_as(&at);
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
