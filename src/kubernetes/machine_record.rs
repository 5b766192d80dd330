//! Records of which machine has which disk, and which node it is. Each is one small ConfigMap. A
//! node that boots again must be the recorded machine, and no other machine gets the key of its
//! disk or its name.
//!
//! ```text
//! join-node-NAME   by a join ticket       data: node, disk, machine, addresses, hostKey, principals, token,
//!                                               nodeUID, role, issued, image
//!                  by an init             the same without a token, written by the node itself
//!                  by the watch of attestation    data: generation, and refused if it closes disks
//! join-disk-UUID   by a rejoin ticket for a disk without a record, while migration is on,
//!                  or by the operator     data: disk, machine
//! ```
//!
//! A node's record is replaced when the machine joins again with another disk, so there is one
//! record for each name. To give a name to another machine, the operator deletes the record. To
//! give a disk to another machine, the operator empties the field `machine`, and the next machine
//! with the disk is recorded. A disk without a record is not a state disk, unless migration is on.

use std::net::IpAddr;
use std::time::SystemTime;

use serde_json::{Value, json};

use super::NAMESPACE;
use super::client::{self, CONFIG_MAPS, Client, Selector};
use super::objects::ConfigMap;
use base::time;
use base::uuid::Uuid;

/// The name prefix of a node's record.
pub const NODE_RECORD_PREFIX: &str = "join-node-";
/// The name prefix of a disk's record.
pub const DISK_RECORD_PREFIX: &str = "join-disk-";
/// The selector of the label that each record has.
pub const RECORDS: &str = "firstlight/record=machine";
/// The role of a control plane's record. A worker's has no role.
const CONTROL_PLANE: &str = "control-plane";
/// The Lease in kube-system of the control plane whose turn it is to join.
pub const TURN: &str = "join-control-plane";
/// The machine in the record of a disk that opens nowhere: no machine has this name.
pub const NO_MACHINE: &str = "none";
const YES: &str = "yes";

/// A record. An empty field is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct MachineRecord {
    /// The name of the ConfigMap.
    pub name: String,
    /// The name of the node.
    pub node: String,
    /// The UUID of the state disk.
    pub disk: String,
    /// The machine's identity by attestation.
    pub machine: String,
    /// The addresses in the kubelet's certificate. Empty in a record from before this field
    /// existed.
    pub addresses: Vec<IpAddr>,
    /// The public host key of sshd as a line, and the names in its certificate. Empty in a record
    /// from before these fields existed.
    pub host_key: String,
    /// See [`MachineRecord::host_key`].
    pub principals: Vec<String>,
    /// The identifier of the bootstrap token, which is not secret.
    pub token: String,
    /// The SHA-256 of the SubjectPublicKeyInfo of the kubelet's first client certificate, hexadecimal. A reader of all Secrets has the token,
    /// too, but not this key. Empty if the machine, of an earlier version, chooses its key later.
    pub client_key: String,
    /// The UID of the Node object that existed before the ticket.
    pub node_uid: String,
    /// Whether the node is a control plane.
    pub control_plane: bool,
    /// Whether the machine's source address was that of the machine with this name in the cloud's
    /// list.
    pub direct: bool,
    /// The ID of the policy's image whose registers the machine had at its last ticket, also at one
    /// of a reboot. Empty if none is known.
    pub image: String,
    /// The generation of the state disk at its last evidence. An older copy of the disk does not
    /// know it. Empty if none is known, or if an operator accepts the disk as it is.
    pub generation: String,
    /// When the ticket was issued.
    pub issued: Option<SystemTime>,
    /// Since when the machine's evidence has been refused, if that closes its disk. An operator, or
    /// evidence that is accepted, removes it.
    pub refused: Option<SystemTime>,
    /// The resourceVersion for an update.
    pub version: String,
}

impl MachineRecord {
    /// Creates the record of a new join ticket, or, with an empty token, of an init. `node_uid` is
    /// the UID of the existing Node object, or empty.
    pub fn of_node(
        node: &str,
        disk: &Uuid,
        machine: Option<&str>,
        token: &str,
        node_uid: &str,
    ) -> MachineRecord {
        MachineRecord {
            name: name_of_node(node),
            node: node.into(),
            disk: disk.to_string(),
            machine: machine.unwrap_or_default().into(),
            token: token.into(),
            node_uid: node_uid.into(),
            // A record stores whole seconds.
            issued: time::parse(&time::seconds(SystemTime::now())),
            ..MachineRecord::default()
        }
    }

    /// Creates the record of a rejoin ticket.
    pub fn of_disk(disk: &Uuid, machine: &str) -> MachineRecord {
        let name = format!("{DISK_RECORD_PREFIX}{disk}");
        MachineRecord {
            name,
            disk: disk.to_string(),
            machine: machine.into(),
            ..MachineRecord::default()
        }
    }

    /// Returns whether a ConfigMap of this name is a record.
    pub fn is_name(name: &str) -> bool {
        name.starts_with(NODE_RECORD_PREFIX) || name.starts_with(DISK_RECORD_PREFIX)
    }

    /// Reads a record from a ConfigMap; `None` if it is no record.
    pub fn read(map: &ConfigMap) -> Option<MachineRecord> {
        let name = &map.metadata.name;
        if !MachineRecord::is_name(name) {
            return None;
        }
        let text = |field: &str| map.text(field).to_owned();
        Some(MachineRecord {
            name: name.clone(),
            node: text("node"),
            disk: text("disk"),
            machine: text("machine"),
            addresses: (map.text("addresses").split(','))
                .filter_map(|address| address.parse().ok())
                .collect(),
            host_key: text("hostKey"),
            principals: (map.text("principals").split(','))
                .filter(|name| !name.is_empty())
                .map(Into::into)
                .collect(),
            token: text("token"),
            client_key: text("clientKey"),
            node_uid: text("nodeUID"),
            control_plane: map.text("role") == CONTROL_PLANE,
            direct: map.text("direct") == YES,
            image: text("image"),
            generation: text("generation"),
            issued: time::parse(map.text("issued")),
            // a text that is no time closes the disk, too
            refused: Some(map.text("refused"))
                .filter(|since| !since.is_empty())
                .map(|since| time::parse(since).unwrap_or(SystemTime::UNIX_EPOCH)),
            version: map.metadata.resource_version.clone(),
        })
    }

    /// Returns the record's disk, from its data or its name. An operator may have written it in
    /// upper case.
    pub fn disks(&self) -> impl Iterator<Item = Uuid> {
        let of_name = self
            .name
            .strip_prefix(DISK_RECORD_PREFIX)
            .and_then(Uuid::parse);
        Uuid::parse(self.disk.trim()).into_iter().chain(of_name)
    }

    /// Returns the ConfigMap of the record.
    pub fn to_object(&self) -> Value {
        let mut metadata = json!({
            "name": self.name, "labels": {"app.kubernetes.io/part-of": "firstlight", "firstlight/record": "machine"},
        });
        if !self.version.is_empty() {
            metadata["resourceVersion"] = self.version.as_str().into();
        }
        let mut data = json!({"disk": self.disk, "machine": self.machine});
        let mut put = |field: &str, value: &str| data[field] = value.into();
        if let Some(since) = self.refused {
            put("refused", &time::seconds(since));
        }
        if !self.node.is_empty() {
            let addresses = self.addresses.iter().map(IpAddr::to_string);
            put("node", &self.node);
            put("addresses", &addresses.collect::<Vec<_>>().join(","));
            put("hostKey", &self.host_key);
            put("principals", &self.principals.join(","));
            put("token", &self.token);
            put("nodeUID", &self.node_uid);
            put(
                "issued",
                &self.issued.map(time::seconds).unwrap_or_default(),
            );
            let role = if self.control_plane {
                CONTROL_PLANE
            } else {
                ""
            };
            let direct = if self.direct { YES } else { "" };
            for (field, value) in [
                ("clientKey", &*self.client_key),
                ("role", role),
                ("direct", direct),
                ("image", &*self.image),
                ("generation", &*self.generation),
            ] {
                if !value.is_empty() {
                    put(field, value);
                }
            }
        }
        json!({"metadata": metadata, "data": data})
    }

    /// Returns whether the node joined with this address. An IPv4-mapped IPv6 address counts as the
    /// IPv4 address.
    pub fn has_address(&self, address: IpAddr) -> bool {
        let mut own = self.addresses.iter();
        own.any(|own| own.to_canonical() == address.to_canonical())
    }

    /// Returns whether the record belongs to another machine. A record without a machine belongs to
    /// none.
    pub fn is_of_other(&self, machine: Option<&str>) -> bool {
        !self.machine.is_empty() && machine != Some(self.machine.as_str())
    }
}

/// Returns the name of a node's record.
pub fn name_of_node(node: &str) -> String {
    format!("{NODE_RECORD_PREFIX}{node}")
}

/// Returns the records of all nodes, in the order of their names.
///
/// Which node is a control plane is decided by these records only. The label
/// `node-role.kubernetes.io/control-plane` can be written by each account that may patch the status
/// of Nodes, such as that of a network plugin.
pub fn of_nodes(api: &Client) -> Result<Vec<MachineRecord>, client::Error> {
    let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
    let read = |map: ConfigMap| MachineRecord::read(&map);
    let all = api.list_keeping(&maps, &Selector::labels(RECORDS), read)?;
    let records = all.items.into_iter().flatten();
    let mut of_nodes: Vec<_> = records
        .filter(|record| record.name == name_of_node(&record.node))
        .collect();
    of_nodes.sort_by(|a, b| a.node.cmp(&b.node));
    Ok(of_nodes)
}

/// Writes the record of a rejoin ticket, unless another one has been written meanwhile.
pub fn write_rejoin(api: &Client, record: &MachineRecord) -> Result<(), client::Error> {
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
pub fn write_if_absent(api: &Client, record: &MachineRecord) -> Result<(), client::Error> {
    api.create_if_absent(&CONFIG_MAPS.in_namespace(NAMESPACE), &record.to_object())
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(map: Value) -> Option<MachineRecord> {
        MachineRecord::read(&serde_json::from_value(map).unwrap())
    }

    #[test]
    fn a_record_comes_back_as_it_was_written() {
        let disk = Uuid::parse("00000000-0000-0000-0000-000000000002").unwrap();
        let mut written = MachineRecord::of_node("n", &disk, Some("m"), "abcdef", "u");
        (written.version, written.control_plane, written.direct) = ("7".into(), true, true);
        written.image = "ab".repeat(16);
        written.generation = "12-9f86d081884c7d65".into();
        assert_eq!(read(written.to_object()).as_ref(), Some(&written));
        written.refused = written.issued;
        written.addresses = vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
        assert_eq!(read(written.to_object()), Some(written));
        let disk = MachineRecord::of_disk(
            &Uuid::parse("00000000-0000-0000-0000-000000000001").unwrap(),
            "m",
        );
        assert_eq!(read(disk.to_object()), Some(disk));
        assert_eq!(read(json!({"metadata": {"name": "join-config"}})), None);
    }

    #[test]
    fn a_record_is_of_the_disk_in_its_data_and_of_that_in_its_name() {
        let (one, two) = (
            "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22",
            "00000000-0000-0000-0000-000000000002",
        );
        let disks = |name: &str, data: Value| {
            let record = read(json!({"metadata": {"name": name}, "data": data})).unwrap();
            record
                .disks()
                .map(|disk| disk.to_string())
                .collect::<Vec<_>>()
        };
        let (of_one, of_two) = (
            format!("{DISK_RECORD_PREFIX}{one}"),
            format!("{DISK_RECORD_PREFIX}{two}"),
        );
        assert_eq!(
            disks("join-node-n", json!({"disk": one.to_uppercase()})),
            [one]
        );
        assert_eq!(disks("join-node-n", json!({"disk": "none"})), [""; 0]);
        assert_eq!(disks(&of_one, json!({})), [one]);
        let refused = |data: Value| {
            let map = json!({"metadata": {"name": "join-node-n"}, "data": data});
            read(map).unwrap().refused.is_some()
        };
        assert!(refused(json!({"refused": "by hand"})));
        assert!(!refused(json!({"refused": ""})) && !refused(json!({})));
        assert_eq!(disks(&of_two, json!({"disk": one})), [one, two]);
    }
}
