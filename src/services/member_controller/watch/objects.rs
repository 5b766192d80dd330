//! What the watch writes: condition, label, taint and cordon of a Node, and the fields `refused` and
//! `generation` of the machine's record.

use std::time::SystemTime;

use serde_json::{Value, json};

use super::decide::WatchReason;
use crate::cluster::node_status::{ATTESTED, Attested, CORDONED, LABEL, NodeStatus, TAINT};
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, CONFIG_MAPS, Client, NODES};
use kubernetes::machine_record::MachineRecord;
use kubernetes::objects::{ConfigMap, NodeObject};

/// The field manager of the condition: each field of ours that a later write omits would be removed.
const MANAGER: &str = "firstlight-watch";

/// Writes the condition. The time of its last change stays if its status does.
pub fn write_condition(
    client: &Client,
    name: &str,
    node: &NodeStatus,
    (status, reason): (&str, &WatchReason),
) -> Result<(), client::Error> {
    let now = time::seconds(SystemTime::now());
    let before = &node.attested;
    let since = if before.condition[0] == status && !before.since.is_empty() {
        &before.since
    } else {
        &now
    };
    let condition = json!({
        "type": ATTESTED, "status": status, "reason": reason.word, "message": reason.message,
        "lastHeartbeatTime": now, "lastTransitionTime": since,
    });
    let object = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": node.uid},
        "status": {"conditions": [condition]},
    });
    let at = NODES.named(name).subresource("status");
    client.apply_as(MANAGER, &at, &object).map(drop)
}

/// Writes label, taint and cordon.
pub fn write_node(
    client: &Client,
    name: &str,
    uid: &str,
    wanted: &Attested,
) -> Result<(), client::Error> {
    let change = |node: NodeObject, whole: &Value| {
        let present = Attested::read(&node);
        let is_wanted = (&present.label, &present.taint) == (&wanted.label, &wanted.taint)
            && (present.is_cordoned, present.has_cordoned)
                == (wanted.is_cordoned, wanted.has_cordoned);
        (node.metadata.uid == uid && !is_wanted).then(|| fields(whole, wanted))
    };
    client.modify_as(&NODES.named(name), change)
}

/// Returns the fields of a Node that are ours, and all its taints: a merge replaces their list.
fn fields(node: &Value, wanted: &Attested) -> Value {
    let taints = node["spec"]["taints"].as_array().cloned();
    let mut taints = taints.unwrap_or_default();
    taints.retain(|taint| taint["key"] != TAINT);
    if let Some(value) = &wanted.taint {
        taints.push(json!({"key": TAINT, "value": value, "effect": "NoSchedule"}));
    }
    let cordoned = wanted.has_cordoned.then_some("attestation");
    json!({
        "metadata": {"labels": {LABEL: wanted.label}, "annotations": {CORDONED: cordoned}},
        "spec": {"taints": taints, "unschedulable": wanted.is_cordoned},
    })
}

/// Notes in the machine's record that it is refused, or no longer.
pub fn write_record(
    client: &Client,
    record: &MachineRecord,
    is_refused: bool,
) -> Result<(), client::Error> {
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(&record.name);
    let change = |map: ConfigMap, _: &Value| {
        let it = MachineRecord::read(&map)?;
        let is_due = it.machine == record.machine && it.refused.is_some() != is_refused;
        let since = is_refused.then(|| time::seconds(SystemTime::now()));
        is_due.then(|| json!({"data": {"refused": since}}))
    };
    client.modify_as(&at, change)
}

/// Records the generation of the machine's state disk. If the record has changed since the machine was
/// asked, it stays as it is.
pub fn write_generation(
    client: &Client,
    record: &MachineRecord,
    generation: &str,
) -> Result<(), client::Error> {
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(&record.name);
    let change = |map: ConfigMap, _: &Value| {
        let it = MachineRecord::read(&map)?;
        let is_same = (&it.machine, &it.disk, &it.generation)
            == (&record.machine, &record.disk, &record.generation);
        is_same.then(|| json!({"data": {"generation": generation}}))
    };
    client.modify_as(&at, change)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_fields_of_a_node_are_changed() {
        let mut node = json!({
            "metadata": {"name": "n", "labels": {"a": "b"}},
            "spec": {"podCIDR": "10.0.0.0/24", "taints": [{"key": "x", "effect": "NoExecute"}]},
        });
        let before = node.clone();
        let wanted = Attested {
            label: Some("false".into()),
            taint: Some("refused".into()),
            is_cordoned: true,
            has_cordoned: true,
            ..Attested::default()
        };
        let change = |node: &mut Value, wanted: &Attested| {
            let fields = fields(node, wanted);
            client::merge(node, fields);
            let read = serde_json::from_value(node.clone()).unwrap();
            assert_eq!(Attested::read(&read), *wanted);
        };
        change(&mut node, &wanted);
        assert_eq!(node["metadata"]["labels"]["a"], "b");
        assert_eq!(node["spec"]["taints"][0], before["spec"]["taints"][0]);
        change(&mut node, &Attested::default());
        assert_eq!(node["spec"]["taints"], before["spec"]["taints"]);
        assert_eq!(node["metadata"]["labels"], before["metadata"]["labels"]);
        assert_eq!(node["spec"]["podCIDR"], "10.0.0.0/24");
    }
}
