//! What exists of the nodes that are to be removed, and whether they may be.

use std::fmt::Write;
use std::net::IpAddr;
use std::str::FromStr;

use kubernetes::NAMESPACE;
use kubernetes::client::{
    CONFIG_MAPS, Client, JOINING_NODES, NODES, SECRETS, Selector, VOLUME_ATTACHMENTS,
};
use kubernetes::control_planes::{ControlPlanes, is_labelled};
use kubernetes::machine_record::{self, MachineRecord, NO_MACHINE};
use kubernetes::objects::{JoiningNode, NodeObject, SecretObject, VolumeAttachment};
use kubernetes::services;
use serde_json::{Value, json};
use verifier::{KeyName, Policy};

use super::kubelet::Kubelet;
use crate::nodes::{
    drain::{Permitted, Pods},
    etcd_members::{Etcd, EtcdPlace, Member, Quorum, host, removal, shown},
};
use crate::shell::{
    error::Error,
    progress::{Progress, printable},
};

/// What exists of one node.
pub struct Leaving {
    /// Its name.
    pub name: String,
    /// The Node.
    pub node: Option<NodeObject>,
    /// The record that binds name and disk to the machine.
    pub record: Option<MachineRecord>,
    /// The records of further disks of the machine.
    pub disks: Vec<MachineRecord>,
    /// The names of the Secrets of its bootstrap tokens.
    pub tokens: Vec<String>,
    /// Constellation's object about its join.
    pub joining: Option<JoiningNode>,
    /// Its pods.
    pub pods: Pods,
    /// The volumes that are attached to it.
    pub volumes: Vec<String>,
    /// Its members of etcd: none, or one.
    pub members: Vec<Member>,
    /// Members of etcd without a name at an address that another node has too: whose they are is not known.
    pub doubtful: Vec<(Member, String)>,
    /// The record by which another machine has the disk.
    pub given: Option<MachineRecord>,
    /// What its kubelet answers; `None` without a Node.
    pub kubelet: Option<Kubelet>,
    /// Whether the policy in force names the attestation key of the machine; `None` if the policy names keys, and the record that says
    /// which is that of the machine does not exist.
    pub is_key_in_policy: Option<bool>,
}

impl Leaving {
    fn read(client: &Client, name: &str, permitted: Permitted) -> Result<Leaving, Error> {
        let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
        let node = client.find_as(&NODES.named(name))?;
        let record = client.find_as(&maps.named(&machine_record::name_of_node(name)))?;
        let joining: Option<JoiningNode> = client.find_as(&JOINING_NODES.named(name))?;
        let tokens = client.list_keeping(
            &SECRETS.in_namespace(NAMESPACE),
            &Selector::labels(&format!("firstlight/node={name}")),
            |secret: SecretObject| secret.metadata.name,
        )?;
        let volumes = client.list_keeping(
            &VOLUME_ATTACHMENTS.all(),
            &Selector::default(),
            |attachment: VolumeAttachment| attachment.spec,
        )?;
        let volumes = volumes.items.into_iter().filter(|it| it.node_name == name);
        Ok(Leaving {
            name: name.into(),
            pods: match node {
                Some(_) => Pods::of(client, name, permitted)?,
                None => Pods::default(),
            },
            node,
            record: record.as_ref().and_then(MachineRecord::read),
            disks: vec![],
            tokens: tokens.items,
            joining: joining.filter(|it| it.spec.name == name),
            volumes: volumes
                .map(|it| it.source.persistent_volume_name.unwrap_or_default())
                .collect(),
            members: vec![],
            doubtful: vec![],
            given: None,
            kubelet: None,
            is_key_in_policy: Some(false),
        })
    }

    /// Returns whether the node is a control plane: its record says so, or etcd has a member of it, whose record may be gone.
    pub fn is_control_plane(&self) -> bool {
        self.is_recorded() || !self.members.is_empty()
    }

    fn is_recorded(&self) -> bool {
        self.record.as_ref().is_some_and(|it| it.control_plane)
    }

    /// Returns whether etcd has to be asked for members of this node. The label of the Node proves nothing, but asking does no harm.
    fn may_be_member(&self) -> bool {
        let is_gone = self.node.is_none() && self.record.is_none();
        is_gone || self.is_recorded() || self.node.as_ref().is_some_and(is_labelled)
    }

    /// Returns whether the machine runs for sure: its kubelet has answered.
    pub fn runs(&self) -> bool {
        self.kubelet == Some(Kubelet::Answers)
    }

    /// Returns whether its pods can be evicted: only a kubelet that reaches the API server says that they have ended.
    pub fn drains(&self) -> bool {
        self.runs() && self.node.as_ref().is_some_and(|node| !node.is_silent())
    }

    /// Returns the addresses of the machine.
    pub fn addresses(&self) -> Vec<String> {
        let node = self.node.iter().flat_map(|it| &it.status.addresses);
        let node = node.map(|it| it.address.clone());
        let record = self.record.iter().flat_map(|it| &it.addresses);
        let mut all: Vec<_> = node.chain(record.map(ToString::to_string)).collect();
        all.sort();
        all.dedup();
        all
    }

    fn ips(&self) -> Vec<IpAddr> {
        let addresses = self.addresses();
        addresses.iter().filter_map(|it| it.parse().ok()).collect()
    }

    /// Returns the identity of the machine by attestation, if it is recorded.
    pub fn machine(&self) -> Option<&str> {
        let machine = self.record.as_ref().map(|it| it.machine.as_str());
        machine.filter(|it| !it.is_empty())
    }

    fn is_nothing(&self) -> bool {
        self.node.is_none()
            && self.record.is_none()
            && self.tokens.is_empty()
            && self.members.is_empty()
            && self.doubtful.is_empty()
            && self.joining.is_none()
    }
}

/// Returns the first node other than these with this address, by its Node or by the record of its ticket.
fn other_at(
    names: &[String],
    member: &Member,
    nodes: &[NodeObject],
    records: &[MachineRecord],
) -> Option<String> {
    let of_node = |node: &NodeObject| -> Vec<IpAddr> {
        let all = node.status.addresses.iter();
        all.filter_map(|it| it.address.parse().ok()).collect()
    };
    let by_node = nodes
        .iter()
        .map(|it| (it.metadata.name.as_str(), of_node(it)));
    let by_record = records
        .iter()
        .map(|it| (it.node.as_str(), it.addresses.clone()));
    let mut others = by_node
        .chain(by_record)
        .filter(|(name, _)| !name.is_empty() && !names.iter().any(|it| it == name));
    let (name, _) = others.find(|(_, addresses)| member.is_at(addresses))?;
    Some(name.to_owned())
}

/// The whole plan.
pub struct RemovalPlan<'a> {
    /// The nodes, in the order of the command line.
    pub nodes: Vec<Leaving>,
    /// Where etcd is asked; `None` if none of the nodes was a control plane, or the cluster has another etcd.
    pub etcd: Option<Etcd<'a>>,
    /// All members of etcd, if it was asked.
    pub members: Vec<Member>,
    /// The records of all machines.
    records: Vec<MachineRecord>,
    /// Why etcd was not asked.
    note: Option<String>,
    /// The address of the API server in kubeadm's configuration: usually the load balancer.
    endpoint: String,
}

impl<'a> RemovalPlan<'a> {
    /// Reads what exists.
    pub fn read(
        client: &'a Client,
        progress: &Progress,
        names: &[String],
        permitted: Permitted,
    ) -> Result<RemovalPlan<'a>, Error> {
        let read = |name: &String| Leaving::read(client, name, permitted);
        let nodes = names.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let mut plan = RemovalPlan {
            nodes,
            etcd: None,
            members: vec![],
            records: vec![],
            note: None,
            endpoint: client.server().to_owned(),
        };
        plan.add_records(client)?;
        plan.check_others(client)?;
        if plan.nodes.iter().any(Leaving::may_be_member) {
            plan.ask_etcd(client, progress, names)?;
        }
        for node in &mut plan.nodes {
            if node.is_nothing() {
                return Err(Error::Refused(format!(
                    "nothing is left of a node {:?}: no Node, record, token or member of etcd; if it was never one, see `kubectl \
                     get nodes`",
                    node.name
                )));
            }
            if let Some(object) = &node.node {
                progress.phase(format!("asking the kubelet of {}", node.name));
                node.kubelet = Some(Kubelet::ask(client, object, node.record.as_ref())?);
            }
        }
        Ok(plan)
    }

    /// Adds the records of disks, and whether the policy names the machines.
    fn add_records(&mut self, client: &Client) -> Result<(), Error> {
        let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
        let all = client.list_as(&maps, &Selector::labels(machine_record::RECORDS))?;
        self.records = all.items.iter().filter_map(MachineRecord::read).collect();
        let policy = services::present_policy(client)?;
        // a policy that cannot be read, such as one of Constellation, names no key
        let policy = policy.and_then(|text| Policy::from_json(&text).ok());
        let keys = policy.map(|it| it.keys().clone()).unwrap_or_default();
        for node in &mut self.nodes {
            let disk = node.record.as_ref().and_then(|it| it.disks().next());
            let is_own = |it: &&MachineRecord| Some(it.machine.as_str()) == node.machine();
            let of_disks = || self.records.iter().filter(|it| it.node.is_empty());
            let is_given = |it: &&MachineRecord| {
                it.disks().any(|own| Some(own) == disk)
                    && it.is_of_other(node.machine())
                    && it.machine != NO_MACHINE
            };
            let (disks, given) = (
                of_disks().filter(is_own).cloned().collect(),
                of_disks().find(is_given).cloned(),
            );
            let key = node.machine().map(|it| KeyName::from_str(it).ok());
            node.is_key_in_policy = match key {
                Some(key) => Some(key.is_some_and(|key| keys.contains(&key))),
                None if keys.is_empty() || node.record.is_some() => Some(false),
                None => None,
            };
            (node.disks, node.given) = (disks, given);
        }
        Ok(())
    }

    /// Refuses to remove the last control plane. Only those count that a record names.
    pub fn check_others(&self, client: &Client) -> Result<(), Error> {
        let planes = ControlPlanes::read(client)?;
        let is_leaving = |name: &str| self.nodes.iter().any(|it| it.name == name);
        let is_claimed = || planes.labelled.iter().any(|name| is_leaving(name));
        if let Some(why) = planes.unrecorded().filter(|_| is_claimed()) {
            return Err(Error::Refused(why.into()));
        }
        let leaving = planes.proven.iter().filter(|it| is_leaving(&it.name));
        match leaving.count() {
            0 => Ok(()),
            count if count < planes.proven.len() => Ok(()),
            count => Err(Error::Refused(format!(
                "of the {count} control planes none would be left: a cluster needs one. To give up the whole cluster, delete its \
                 machines and their disks"
            ))),
        }
    }

    /// Refuses if etcd has no member of a control plane that stays: it joins just now, or somebody else has answered than etcd.
    fn check_members(&self, client: &Client) -> Result<(), Error> {
        let planes = ControlPlanes::read(client)?;
        let is_leaving = |name: &str| self.nodes.iter().any(|it| it.name == name);
        let is_member = |name: &str| self.members.iter().any(|it| it.name == name);
        let missing: Vec<_> = (planes.proven.iter().map(|it| it.name.as_str()))
            .filter(|name| !is_leaving(name) && !is_member(name))
            .collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(Error::Refused(format!(
                "etcd has no member of {}, which is a control plane by its record: wait until it has joined, or remove it, too",
                printable(&missing.join(", "))
            )))
        }
    }

    fn ask_etcd(
        &mut self,
        client: &'a Client,
        progress: &Progress,
        names: &[String],
    ) -> Result<(), Error> {
        match Etcd::find(client, names)? {
            EtcdPlace::There(etcd) => {
                self.members = etcd.members(progress)?;
                self.etcd = Some(*etcd);
                self.check_members(client)?;
                let all = client.list_as(&NODES.all(), &Selector::default())?;
                for node in &mut self.nodes {
                    let ips = node.ips();
                    for member in self.members.iter().filter(|it| it.is_of(&node.name, &ips)) {
                        let other = other_at(names, member, &all.items, &self.records);
                        match other.filter(|_| member.name.is_empty()) {
                            Some(other) => node.doubtful.push((member.clone(), other)),
                            None => node.members.push(member.clone()),
                        }
                    }
                }
                Ok(())
            }
            EtcdPlace::OnlyOn(nodes) => {
                let nodes = printable(&nodes.join(", "));
                let why = format!(
                    "no other control plane has an etcd that is ready (etcd's pods are on {nodes})"
                );
                if !self.nodes.iter().any(Leaving::is_control_plane) {
                    self.note = Some(format!("not asked: {why}"));
                    return Ok(());
                }
                Err(Error::Refused(format!(
                    "{why}: start one again, so that it can remove the member"
                )))
            }
            EtcdPlace::Elsewhere => {
                self.note =
                    Some("etcd runs in no pod of kubeadm: its members stay as they are".into());
                Ok(())
            }
        }
    }

    /// Returns the members of etcd that have to be removed, in this order.
    pub fn removal(&self) -> Result<Vec<Member>, Error> {
        let gone = self.nodes.iter().flat_map(|it| &it.members).map(|it| it.id);
        removal(&self.members, &gone.collect::<Vec<_>>())
    }

    /// Refuses what would fail later.
    pub fn check(&self, server: &str, drains: bool, machines_off: bool) -> Result<(), Error> {
        let host = host(server);
        let is_own = |it: &&Leaving| it.is_control_plane() && it.addresses().contains(&host);
        if let Some(own) = self.nodes.iter().find(is_own) {
            return Err(Error::Refused(format!(
                "the kubeconfig's server {server} is {} itself, whose API server ends with its etcd: use a kubeconfig with the \
                 address of the load balancer, or of another control plane",
                own.name
            )));
        }
        self.removal()?;
        for node in &self.nodes {
            if drains && node.drains() {
                node.pods.check(&node.name)?;
            }
            if let Some(fault) = node.kubelet.as_ref().and_then(Kubelet::fault)
                && !machines_off
            {
                return Err(Error::Refused(format!(
                    "the kubelet of {} does not answer ({}), and nobody can tell from here whether its machine runs: its pods would start \
                     a second time elsewhere. Make sure that the machine is powered off, or deleted, and say so: --machines-off",
                    node.name,
                    printable(fault)
                )));
            }
        }
        Ok(())
    }

    /// Returns the plan for people.
    pub fn text(&self, drains: bool) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            self.describe(&mut text, node, drains);
        }
        text
    }

    fn describe(&self, out: &mut String, leaving: &Leaving, drains: bool) {
        let role = if leaving.is_control_plane() {
            "control plane"
        } else {
            "worker"
        };
        let addresses = leaving.addresses().join(", ");
        // writing to a string does not fail
        let _ = writeln!(
            out,
            "{}: a {role} at {}",
            leaving.name,
            printable(&addresses)
        );
        let mut row = |name: &str, value: String| {
            let _ = writeln!(out, "  {name:<9} {}", printable(&value));
        };
        row(
            "machine",
            match leaving.kubelet.as_ref().map(Kubelet::fault) {
                None => "its Node is deleted already".into(),
                Some(None) => "runs: power it off when this command asks for it".into(),
                Some(Some(why)) => format!(
                    "does not answer ({why}): make sure that it is off, because its pods start elsewhere"
                ),
            },
        );
        if leaving.node.is_some() {
            let pods = &leaving.pods;
            let (moved, rest) = (pods.evicted.len() + pods.refused.len(), pods.staying);
            let text = if drains && leaving.drains() {
                format!(
                    "{moved} are evicted; {rest} end with the machine (DaemonSets, static pods)"
                )
            } else {
                format!("{} end with the machine", moved + rest)
            };
            row("pods", text);
        }
        for member in &leaving.members {
            row("etcd", self.member(member));
        }
        if let Some(note) = self.note.as_ref().filter(|_| leaving.is_control_plane()) {
            row("etcd", note.clone());
        }
        for record in leaving.record.iter().chain(&leaving.disks) {
            let end = match &leaving.given {
                Some(other) if !record.node.is_empty() => {
                    format!("stays open to the machine of {}", other.name)
                }
                _ => "is closed for ever".into(),
            };
            row(
                "record",
                format!("{}: the disk {} {end}", record.name, record.disk),
            );
        }
        for token in &leaving.tokens {
            row("token", token.clone());
        }
        if !leaving.volumes.is_empty() {
            row(
                "volumes",
                format!(
                    "{} are attached; their keys stay",
                    leaving.volumes.join(", ")
                ),
            );
        }
        for what in self.by_hand(leaving) {
            row("by hand", what);
        }
    }

    fn member(&self, member: &Member) -> String {
        let others = self.members.iter().filter(|it| it.id != member.id);
        let after = Quorum::of(others);
        let fault = match &member.fault {
            Some(fault) => format!(" ({fault})"),
            None => String::new(),
        };
        format!(
            "member {} {}{fault}; without it {} of {} answer, and {} are needed",
            member.id(),
            shown(member),
            after.healthy,
            after.voters,
            after.needed
        )
    }

    /// Returns what is left to the operator.
    pub fn by_hand(&self, leaving: &Leaving) -> Vec<String> {
        let mut all = Vec::new();
        if leaving.is_control_plane() {
            all.push(format!(
                "take it out of the load balancer of {}, if that does not watch the API servers itself",
                self.endpoint
            ));
        }
        let then = "then firstlight apply --policy policy.json --skip-phases services";
        match leaving.is_key_in_policy {
            Some(false) => {}
            Some(true) => all.push(format!(
                "the policy names its attestation key: firstlight policy remove-key policy.json {}, {then}",
                leaving.machine().unwrap_or_default()
            )),
            None => all.push(format!(
                "its record, which says which attestation key it had, is deleted already: if the policy still names this key, \
                 firstlight policy remove-key policy.json KEY, {then}"
            )),
        }
        for (member, other) in &leaving.doubtful {
            all.push(format!(
                "the member {} of etcd, which has never started, stays, because {other} has its address too: if {other} does not join with \
                 it, remove {other} as well",
                shown(member)
            ));
        }
        all.push("take the machine out of the list of machines or delete it in the cloud, and delete its disk".into());
        all
    }

    /// Returns the plan for programs.
    pub fn json(&self) -> Value {
        let nodes = self.nodes.iter().map(|it| {
            let records = it.record.iter().chain(&it.disks);
            json!({
                "name": it.name,
                "role": if it.is_control_plane() { "control-plane" } else { "worker" },
                "addresses": it.addresses(),
                "node": it.node.is_some(),
                "runs": it.runs(),
                "evicted": it.pods.evicted.len(),
                "notPermitted": it.pods.refused,
                "members": it.members.iter().map(Member::id).collect::<Vec<_>>(),
                "records": records.map(|it| &it.name).collect::<Vec<_>>(),
                "tokens": it.tokens,
                "volumes": it.volumes,
                "byHand": self.by_hand(it),
            })
        });
        let quorum = Quorum::of(&self.members);
        json!({
            "nodes": nodes.collect::<Vec<_>>(),
            "etcd": self.etcd.as_ref().map(|_| json!({
                "voters": quorum.voters, "healthy": quorum.healthy, "needed": quorum.needed,
            })),
        })
    }
}
