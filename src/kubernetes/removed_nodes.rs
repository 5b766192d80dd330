//! The nodes that `firstlight node remove` has removed: ConfigMap `join-removed-nodes` in kube-system.
//!
//! ```text
//! data:  NAME: TIME MACHINE     the node's name; when it was removed; its machine's identity by attestation, if known
//! ```
//!
//! Kubernetes cannot revoke the client certificate of a kubelet. While such a certificate is valid, a removed
//! kubelet could make its Node again and renew the certificate. So an entry stays until an operator deletes it, and
//! until then the name and the machine get no ticket, no kubelet of this name gets a certificate, and an
//! admission policy can refuse the Node (`name in params.data`).

use std::collections::HashMap;
use std::time::SystemTime;

use serde_json::{Value, json};

use super::NAMESPACE;
use super::client::{self, CONFIG_MAPS, Client, Object};
use super::objects::ConfigMap;
use base::time;

/// The name of the ConfigMap.
pub const CONFIG_MAP: &str = "join-removed-nodes";

/// The removed nodes, by their names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemovedNodes {
    nodes: HashMap<String, RemovedNode>,
}

/// What is known of a removed node. An empty field is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemovedNode {
    /// When it was removed, as RFC 3339.
    pub since: String,
    /// The machine's identity by attestation.
    pub machine: String,
}

impl RemovedNodes {
    /// Reads the ConfigMap. Each key closes its name, whatever its value is.
    pub fn read(map: &ConfigMap) -> RemovedNodes {
        let nodes = map.data.iter().map(|(name, value)| {
            let mut words = value.split_whitespace();
            let mut next = || words.next().unwrap_or_default().to_owned();
            let (since, machine) = (next(), next());
            (name.clone(), RemovedNode { since, machine })
        });
        RemovedNodes {
            nodes: nodes.collect(),
        }
    }

    /// Returns the removed node of this name.
    pub fn of_name(&self, name: &str) -> Option<&RemovedNode> {
        self.nodes.get(name)
    }

    /// Returns the name of a removed node whose machine this was.
    pub fn of_machine(&self, machine: &str) -> Option<&str> {
        let mut of_machine = self.nodes.iter().filter(|(_, it)| it.machine == machine);
        let (name, _) = of_machine.find(|_| !machine.is_empty())?;
        Some(name)
    }
}

/// Returns the place of the ConfigMap.
pub fn object() -> Object {
    CONFIG_MAPS.in_namespace(NAMESPACE).named(CONFIG_MAP)
}

/// Reads the removed nodes.
pub fn find(api: &Client) -> Result<RemovedNodes, client::Error> {
    let map = api.find_as(&object())?;
    Ok(map.as_ref().map(RemovedNodes::read).unwrap_or_default())
}

/// Adds a node. An entry that exists keeps its time, and its machine unless it has none.
pub fn add(api: &Client, node: &str, machine: &str) -> Result<(), client::Error> {
    let empty = json!({"metadata": {
        "name": CONFIG_MAP, "labels": {"app.kubernetes.io/part-of": "firstlight"},
    }});
    api.create_if_absent(&CONFIG_MAPS.in_namespace(NAMESPACE), &empty)?;
    let now = time::seconds(SystemTime::now());
    let change = |map: ConfigMap, _: &Value| {
        let before = RemovedNodes::read(&map).of_name(node).cloned();
        let before = before.unwrap_or_default();
        let since = if before.since.is_empty() {
            &now
        } else {
            &before.since
        };
        let machine = if before.machine.is_empty() {
            machine
        } else {
            &before.machine
        };
        let entry = format!("{since} {machine}");
        let is_new = map.data.get(node).map(String::as_str) != Some(entry.trim_end());
        is_new.then(|| json!({"data": {node: entry.trim_end()}}))
    };
    api.modify_as(&object(), change)
}

/// Deletes the entry of a node. Returns whether there was one.
pub fn readmit(api: &Client, node: &str) -> Result<bool, client::Error> {
    if find(api)?.of_name(node).is_none() {
        return Ok(false);
    }
    let mut was_there = false;
    api.modify_as(&object(), |map: ConfigMap, _| {
        was_there = map.data.contains_key(node);
        was_there.then(|| json!({"data": {node: null}}))
    })?;
    Ok(was_there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_node_is_found_by_its_name_and_by_its_machine() {
        let map = json!({"data": {
            "worker-1": "2026-11-28T20:00:00Z a1b2", "worker-2": "2026-11-28T20:00:00Z", "worker-3": "",
        }});
        let removed = RemovedNodes::read(&serde_json::from_value(map).unwrap());
        let since = |name| removed.of_name(name).map(|it| it.since.as_str());
        assert_eq!(since("worker-1"), Some("2026-11-28T20:00:00Z"));
        // a key without a value closes the name, too
        for name in ["worker-2", "worker-3"] {
            assert!(since(name).is_some(), "{name}");
        }
        assert_eq!(since("worker-5"), None);
        assert_eq!(removed.of_machine("a1b2"), Some("worker-1"));
        assert_eq!(
            (removed.of_machine(""), removed.of_machine("b")),
            (None, None)
        );
        assert_eq!(
            RemovedNodes::read(&ConfigMap::default()),
            RemovedNodes::default()
        );
    }
}
