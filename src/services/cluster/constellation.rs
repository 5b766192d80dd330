//! JoiningNodes, a Kubernetes resource of Constellation. Its operator annotates a node that joins
//! with its components, and its join services let one control plane join at a time by the name of
//! the object.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::refusal::TicketRefusal;
use base::time;
use kubernetes::client::{self, Client, JOINING_NODES};
use kubernetes::objects::JoiningNode;

/// The name of the JoiningNode of every control plane.
pub const CONTROL_PLANE: &str = "control-plane";
/// How long a control plane's is valid, and its reservation, as in Constellation.
pub const VALIDITY: Duration = Duration::from_secs(10 * 60);
/// How long a worker's is valid, as in Constellation.
const WORKER_VALIDITY: Duration = Duration::from_secs(48 * 60 * 60);
/// The field manager of Constellation's join service.
const OLD_MANAGER: &str = "join-service";

/// Creates the JoiningNode of a worker. Constellation's operator then annotates the node with its
/// components.
pub fn announce_worker(client: &Client, node: &str, components: &str) -> Result<(), TicketRefusal> {
    let object = object(node, node, components, false);
    let applied = client.apply_as(OLD_MANAGER, &JOINING_NODES.named(node), &object);
    Ok(applied.map(drop)?)
}

/// Deletes the JoiningNode `name` if it belongs to this node.
pub fn delete(client: &Client, name: &str, node: &str) -> Result<(), client::Error> {
    let at = JOINING_NODES.named(name);
    match client.find_as::<JoiningNode>(&at)? {
        // The precondition of the delete protects an object that another replica creates meanwhile.
        Some(found) if found.spec.name == node => client.delete_as(&at, &found.metadata).map(drop),
        _ => Ok(()),
    }
}

/// Returns the name of a node's JoiningNode.
pub fn name(node: &str, control_plane: bool) -> &str {
    if control_plane { CONTROL_PLANE } else { node }
}

/// Creates the object. `name` is the name of the object.
pub fn object(name: &str, node: &str, components: &str, control_plane: bool) -> Value {
    let validity = if control_plane {
        VALIDITY
    } else {
        WORKER_VALIDITY
    };
    json!({
        "apiVersion": JOINING_NODES.api_version(),
        "kind": "JoiningNode",
        "metadata": {"name": name},
        "spec": {
            "name": node, "componentsreference": components, "iscontrolplane": control_plane,
            "deadline": time::seconds(SystemTime::now() + validity),
        },
    })
}
