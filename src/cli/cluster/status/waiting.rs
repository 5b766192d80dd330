//! What waits in a cluster: requests for certificates, machines that are no nodes yet, nodes that
//! wait for another program.

use std::time::SystemTime;

use serde_json::{Value, json};

use super::objects::{Fate, ObjectList, UNINITIALIZED};
use super::view::View;
use crate::shell::progress::human;

/// Something that waits.
#[derive(Debug, PartialEq, Eq)]
pub struct WaitingFor {
    /// The keyword in JSON.
    pub kind: &'static str,
    /// The node, or the object.
    pub object: String,
    /// For what it waits, as a clause.
    pub text: String,
}

impl WaitingFor {
    /// Returns the JSON for programs.
    pub fn json(&self) -> Value {
        json!({"kind": self.kind, "object": self.object, "for": self.text})
    }
}

/// Returns everything that waits.
pub fn waiting(view: &View, now: SystemTime) -> Vec<WaitingFor> {
    let objects = &view.objects;
    let since = |at: Option<SystemTime>| {
        let age = at.and_then(|at| now.duration_since(at).ok());
        age.map_or_else(String::new, |age| format!(", since {}", human(age)))
    };
    let is_node = |name: &str| view.nodes.iter().any(|node| node.listed.name == name);
    let mut all = vec![];
    let mut add = |kind, object: &str, text: String| {
        let object = object.to_owned();
        all.push(WaitingFor { kind, object, text });
    };
    for request in &objects.requests {
        let what = match request.fate {
            Fate::Pending => "approval",
            Fate::Unsigned => "its signature",
            _ => continue,
        };
        let kind = if request.is_serving {
            "serving"
        } else {
            "client"
        };
        let user = &request.user;
        let since = since(request.made);
        let text = format!("{what} of the {kind} certificate of {user}{since}");
        add("certificate-request", &request.name, text);
    }
    for record in &objects.records {
        if !record.node.is_empty() && !is_node(&record.node) {
            let since = since(record.issued);
            add(
                "record-without-node",
                &record.node,
                format!("a Node: a machine was admitted under this name{since}"),
            );
        }
    }
    for joining in &objects.joining {
        if !is_node(&joining.node) && objects.record_of(&joining.node).is_none() {
            add(
                "joining-node",
                &joining.node,
                "a Node: it has a JoiningNode".into(),
            );
        }
    }
    for node in view.nodes.iter().map(|node| &node.listed) {
        if objects.has(ObjectList::Maps) && objects.record_of(&node.name).is_none() {
            add(
                "node-without-record",
                &node.name,
                "a record of its machine".into(),
            );
        }
        if node.taints.iter().any(|taint| taint == UNINITIALIZED) {
            add(
                "cloud-controller",
                &node.name,
                "a cloud controller manager".into(),
            );
        }
        if node.no_network.is_some() {
            add("network-plugin", &node.name, "a network plugin".into());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kubernetes::machine_record::MachineRecord;

    use super::super::listed::Listed;
    use super::super::objects::{Joining, Objects, SigningRequest};
    use super::super::report::StatusReport;
    use super::super::view::{NodeServers, NodeView};
    use super::*;

    #[test]
    fn each_thing_that_waits_is_named_once() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let record = |node: &str| MachineRecord {
            node: node.into(),
            issued: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(700)),
            ..MachineRecord::default()
        };
        let request = |name: &str, fate: Fate| SigningRequest {
            name: name.into(),
            user: "u".into(),
            fate,
            ..SigningRequest::default()
        };
        let node = |name: &str, taints: &[&str]| NodeView {
            listed: Listed {
                name: name.into(),
                taints: taints.iter().map(|it| (*it).to_owned()).collect(),
                ..Listed::default()
            },
            report: StatusReport {
                address: String::new(),
                answers: vec![],
                cluster: None,
                names_no_keys: false,
                exceptions: Default::default(),
            },
            servers: NodeServers::default(),
        };
        let joining = |node: &str| Joining {
            node: node.into(),
            deadline: None,
        };
        let view = View {
            nodes: vec![node("a", &[UNINITIALIZED]), node("b", &["other"])],
            objects: Objects {
                records: vec![record("a"), record("new")],
                joining: vec![joining("new"), joining("old")],
                requests: vec![
                    request("1", Fate::Pending),
                    request("2", Fate::Unsigned),
                    request("3", Fate::Issued),
                    request("4", Fate::Refused(String::new())),
                ],
                ..Objects::default()
            },
            ..View::default()
        };
        let found = waiting(&view, now);
        let kinds: Vec<_> = found
            .iter()
            .map(|it| (it.kind, it.object.as_str()))
            .collect();
        assert_eq!(
            kinds,
            [
                ("certificate-request", "1"),
                ("certificate-request", "2"),
                ("record-without-node", "new"),
                ("joining-node", "old"),
                ("cloud-controller", "a"),
                ("node-without-record", "b"),
            ]
        );
        assert!(
            found[2].text.ends_with(", since 5 min"),
            "{}",
            found[2].text
        );
        assert_eq!(waiting(&View::default(), now), []);
    }
}
