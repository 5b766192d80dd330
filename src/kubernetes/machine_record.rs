//! Which machine has which disk, and which node it became: one small ConfigMap each, so that a node that boots again is the
//! machine that it was, and nobody else gets the key of its disk or its name.
//!
//! ```text
//! join-node-NAME   of a join ticket       data: node, disk, machine, addresses, hostKey, principals, token,
//!                                               nodeUID, role, issued
//!                  of an init             the same without a token, by the node itself
//! join-disk-UUID   of a rejoin ticket, while migration is on, for a disk that no join ticket was made for,
//!                  or of the operator: data: disk, machine
//! ```
//!
//! A node's record is replaced when the machine joins anew, with another disk; so there are as many as names. An operator who
//! gives a name to another machine deletes the record; one who gives a disk empties its `machine`, and the next machine that
//! comes with the disk is recorded. A disk without a record is no state disk, unless migration is on.

use std::net::IpAddr;
use std::time::SystemTime;

use serde_json::{Value, json};

use super::NAMESPACE;
use super::client::{self, CONFIG_MAPS, Client};
use base::time;
use kms::Uuid;

/// The name of a node's record begins so.
pub const OF_NODE: &str = "join-node-";
/// The name of a disk's record begins so.
pub const OF_DISK: &str = "join-disk-";
/// The role of a record, which is a worker's without one.
const CONTROL_PLANE: &str = "control-plane";
const YES: &str = "yes";

/// One of them. What is empty is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Record {
    /// Of the ConfigMap.
    pub name: String,
    /// Of the node.
    pub node: String,
    /// The disk's UUID.
    pub disk: String,
    /// What attestation calls the machine.
    pub machine: String,
    /// Those that its kubelet got a certificate for; none where the record is older than this field.
    pub addresses: Vec<IpAddr>,
    /// The line of its sshd's key, and the names that this was certified for; empty where the record is older than this.
    pub host_key: String,
    /// See there.
    pub principals: Vec<String>,
    /// The identifier of the bootstrap token, which is not its secret half.
    pub token: String,
    /// Of the Node object that there was before the ticket.
    pub node_uid: String,
    /// Whether the ticket was a control plane's.
    pub control_plane: bool,
    /// Whether the machine called from the address that the cloud says is that of this name.
    pub direct: bool,
    /// When the ticket was made.
    pub issued: Option<SystemTime>,
    /// The API's, to replace it by.
    pub version: String,
}

impl Record {
    /// Of a join ticket that is about to be made, or, without a token, of an init. `node_uid` is that of the Node object that
    /// there is already, or empty.
    pub fn of_node(
        node: &str,
        disk: &Uuid,
        machine: Option<&str>,
        token: &str,
        node_uid: &str,
    ) -> Record {
        Record {
            name: name_of_node(node),
            node: node.into(),
            disk: disk.to_string(),
            machine: machine.unwrap_or_default().into(),
            token: token.into(),
            node_uid: node_uid.into(),
            // to the second, as it will be read
            issued: time::parse(&time::seconds(SystemTime::now())),
            ..Record::default()
        }
    }

    /// Of a rejoin ticket.
    pub fn of_disk(disk: &Uuid, machine: &str) -> Record {
        let name = format!("{OF_DISK}{disk}");
        Record {
            name,
            disk: disk.to_string(),
            machine: machine.into(),
            ..Record::default()
        }
    }

    /// Whether a ConfigMap of this name is one.
    pub fn is_name(name: &str) -> bool {
        name.starts_with(OF_NODE) || name.starts_with(OF_DISK)
    }

    /// Of a ConfigMap, if it is one.
    pub fn read(map: &Value) -> Option<Record> {
        let text = |pointer: &str| {
            map.pointer(pointer)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let name = text("/metadata/name");
        Record::is_name(&name).then(|| Record {
            name,
            node: text("/data/node"),
            disk: text("/data/disk"),
            machine: text("/data/machine"),
            addresses: text("/data/addresses")
                .split(',')
                .filter_map(|address| address.parse().ok())
                .collect(),
            host_key: text("/data/hostKey"),
            principals: text("/data/principals")
                .split(',')
                .filter(|name| !name.is_empty())
                .map(Into::into)
                .collect(),
            token: text("/data/token"),
            node_uid: text("/data/nodeUID"),
            control_plane: text("/data/role") == CONTROL_PLANE,
            direct: text("/data/direct") == YES,
            issued: time::parse(&text("/data/issued")),
            version: text("/metadata/resourceVersion"),
        })
    }

    /// The disks that it is of: by its data, which an operator may have written in upper case, and by its name.
    pub fn disks(&self) -> impl Iterator<Item = Uuid> {
        let of_name = self.name.strip_prefix(OF_DISK).and_then(Uuid::parse);
        Uuid::parse(self.disk.trim()).into_iter().chain(of_name)
    }

    /// The ConfigMap.
    pub fn to_object(&self) -> Value {
        let mut metadata = json!({
            "name": self.name, "labels": {"app.kubernetes.io/part-of": "firstlight", "firstlight/record": "machine"},
        });
        if !self.version.is_empty() {
            metadata["resourceVersion"] = self.version.as_str().into();
        }
        let mut data = json!({"disk": self.disk, "machine": self.machine});
        if !self.node.is_empty() {
            data["node"] = self.node.as_str().into();
            data["addresses"] = self
                .addresses
                .iter()
                .map(IpAddr::to_string)
                .collect::<Vec<_>>()
                .join(",")
                .into();
            data["hostKey"] = self.host_key.as_str().into();
            data["principals"] = self.principals.join(",").into();
            data["token"] = self.token.as_str().into();
            data["nodeUID"] = self.node_uid.as_str().into();
            if self.control_plane {
                data["role"] = CONTROL_PLANE.into();
            }
            if self.direct {
                data["direct"] = YES.into();
            }
            data["issued"] = self.issued.map(time::seconds).unwrap_or_default().into();
        }
        json!({"metadata": metadata, "data": data})
    }

    /// Whether the record is of another machine than this one. One that says none is of nobody in particular.
    pub fn is_of_other(&self, machine: Option<&str>) -> bool {
        !self.machine.is_empty() && machine != Some(self.machine.as_str())
    }
}

/// The name of a node's record.
pub fn name_of_node(node: &str) -> String {
    format!("{OF_NODE}{node}")
}

/// Writes the record of a rejoin ticket, unless there is another one meanwhile.
pub fn write_of_rejoin(api: &Client, record: &Record) -> Result<(), client::Error> {
    if record.version.is_empty() {
        return write_if_absent(api, record);
    }
    match api.update(
        &CONFIG_MAPS.in_namespace(NAMESPACE).named(&record.name),
        &record.to_object(),
    ) {
        Err(error) if !error.is_conflict() && !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// Writes the record of a disk, unless there is one.
pub fn write_if_absent(api: &Client, record: &Record) -> Result<(), client::Error> {
    api.create_if_absent(&CONFIG_MAPS.in_namespace(NAMESPACE), &record.to_object())
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_was_written() {
        let disk = Uuid::parse("00000000-0000-0000-0000-000000000002").unwrap();
        let mut written = Record::of_node("n", &disk, Some("m"), "abcdef", "u");
        (written.version, written.control_plane, written.direct) = ("7".into(), true, true);
        assert_eq!(Record::read(&written.to_object()).as_ref(), Some(&written));
        written.addresses = vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
        assert_eq!(Record::read(&written.to_object()), Some(written));
        let disk = Record::of_disk(
            &Uuid::parse("00000000-0000-0000-0000-000000000001").unwrap(),
            "m",
        );
        assert_eq!(Record::read(&disk.to_object()), Some(disk));
        assert_eq!(
            Record::read(&json!({"metadata": {"name": "join-config"}})),
            None
        );
    }

    #[test]
    fn a_record_is_of_the_disk_in_its_data_and_of_that_in_its_name() {
        let (one, two) = (
            "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22",
            "00000000-0000-0000-0000-000000000002",
        );
        let disks = |name: &str, data: Value| {
            let record = Record::read(&json!({"metadata": {"name": name}, "data": data})).unwrap();
            record
                .disks()
                .map(|disk| disk.to_string())
                .collect::<Vec<_>>()
        };
        let (of_one, of_two) = (format!("{OF_DISK}{one}"), format!("{OF_DISK}{two}"));
        assert_eq!(
            disks("join-node-n", json!({"disk": one.to_uppercase()})),
            [one]
        );
        assert_eq!(disks("join-node-n", json!({"disk": "none"})), [""; 0]);
        assert_eq!(disks(&of_one, Value::Null), [one]);
        assert_eq!(
            disks(&of_two, json!({"disk": one, "machine": 7})),
            [one, two]
        );
    }
}
