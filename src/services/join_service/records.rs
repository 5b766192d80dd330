//! Decides which machine may have which disk and which name, by the records ([`MachineRecord`]) of earlier
//! tickets.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::cleaner::{Cleaner, CleanerTask};
use crate::cluster::node_status::NodeStatus;
use crate::cluster::refusal::TicketRefusal;
use crate::cluster::{Cluster, TOKEN_VALIDITY};
use base::time;
use base::uuid::Uuid;
use kubernetes::client::{CONFIG_MAPS, Client, version_of};
use kubernetes::removed_nodes;
use kubernetes::{
    NAMESPACE,
    machine_record::{
        DISK_RECORD_PREFIX, MachineRecord, NODE_RECORD_PREFIX, name_of_node, write_if_absent,
    },
};

/// The maximum number of disks or names of one machine. It has one of each, but they may be
/// replaced.
const MAX_PER_MACHINE: usize = 8;
/// The maximum number of records of disks, sufficient for a large old cluster. A ticket that needs
/// a further one is refused.
const MAX_DISK_RECORDS: usize = 20_000;
/// How long a ticket blocks another one for the same node. A node asks every join service at once
/// and uses the first ticket; another one, with a new token, would only invalidate the first.
const JUST_ISSUED_AGE: Duration = Duration::from_secs(5);
/// The reason of that refusal.
pub const JUST_ISSUED: &str = "just-made";
/// How often a write is tried again after a conflict with another replica.
const TRIES: usize = 4;

/// The result of [`write`].
pub struct Written {
    /// The new record.
    pub record: MachineRecord,
    /// The record before, if there was one.
    pub before: Option<MachineRecord>,
}

/// Where the records of disks are: in the cluster, or in files ([`super::file_records`]).
pub trait DiskRecords {
    /// Returns the records that contain this disk.
    fn of_disk(&self, disk: &Uuid) -> Result<Vec<Arc<MachineRecord>>, TicketRefusal>;
    /// Counts the records of disks: those of this machine, and all.
    fn count(&self, machine: &str) -> Result<(usize, usize), TicketRefusal>;
    /// Returns where the operator finds the record of this name, or all records with `*`.
    fn place(&self, name: &str) -> String;
}

impl DiskRecords for Cluster {
    fn of_disk(&self, disk: &Uuid) -> Result<Vec<Arc<MachineRecord>>, TicketRefusal> {
        Ok(self.records_of_disk(disk.as_str()))
    }

    fn count(&self, machine: &str) -> Result<(usize, usize), TicketRefusal> {
        let of_machine = self.count_of_machine(DISK_RECORD_PREFIX, machine);
        Ok((of_machine, self.count_of_disks()))
    }

    fn place(&self, name: &str) -> String {
        place(name)
    }
}

/// Returns where the cluster has a record.
fn place(name: &str) -> String {
    format!("ConfigMap {NAMESPACE}/{name}")
}

/// Checks that this machine may have the key of this disk.
pub fn check_disk(
    store: &dyn DiskRecords,
    disk: &Uuid,
    machine: Option<&str>,
) -> Result<(), TicketRefusal> {
    let records = store.of_disk(disk)?;
    match records.iter().find(|record| record.is_of_other(machine)) {
        None => {
            let mut records = records.iter();
            records.try_for_each(|record| check_open(record, || store.place(&record.name)))
        }
        Some(record) => {
            let message = "this disk belongs to another machine; if it was moved on purpose, empty the `machine` field of the \
                           record that the join service's log names";
            Err(
                TicketRefusal::denied("disk-of-other", message).with_details(format!(
                    "{} names another machine",
                    store.place(&record.name)
                )),
            )
        }
    }
}

/// Refuses a machine whose evidence was refused when it was a member, if the watch of attestation
/// closes disks.
fn check_open(record: &MachineRecord, place: impl Fn() -> String) -> Result<(), TicketRefusal> {
    let Some(since) = record.refused else {
        return Ok(());
    };
    let message = format!(
        "the evidence of this machine has been refused since {}, when it was a member; if it may come back, remove the \
         field `refused` of the record that the join service's log names",
        time::seconds(since)
    );
    Err(TicketRefusal::denied("refused-before", message).with_details(place()))
}

/// Checks that this machine may have the key of this disk when it boots again. Returns the record
/// that has to be written then, if any. `accepts_new`: whether a disk without a record opens, too.
pub fn check_rejoin(
    store: &dyn DiskRecords,
    disk: &Uuid,
    machine: Option<&str>,
    accepts_new: bool,
) -> Result<Option<MachineRecord>, TicketRefusal> {
    check_disk(store, disk, machine)?;
    let records = store.of_disk(disk)?;
    match (
        records.iter().find(|record| record.machine.is_empty()),
        machine,
    ) {
        _ if records.is_empty() && !accepts_new => Err(TicketRefusal::denied(
            "disk-unknown",
            "there is no record of this disk: it is not a state disk of this cluster; if it is an old disk from before \
             records existed, see \"Disks from before\" in docs/join.md",
        )),
        (None, Some(machine)) if records.is_empty() => {
            check_new_disk(store, disk, machine).map(Some)
        }
        // The operator has released the disk for the next machine that requests it.
        (Some(record), Some(machine)) => Ok(Some(MachineRecord {
            machine: machine.into(),
            ..MachineRecord::clone(record)
        })),
        _ => Ok(None),
    }
}

/// Returns the record that has to be written after a rejoin ticket: `record`, or that of the node, if
/// the node's image is not the recorded one.
pub fn with_image(
    cluster: &Cluster,
    disk: &Uuid,
    image: String,
    record: Option<MachineRecord>,
) -> Option<MachineRecord> {
    let changed = || {
        let records = cluster.records_of_disk(disk.as_str());
        let mut of_nodes = records.iter().filter(|record| !record.node.is_empty());
        let changed = of_nodes.find(|record| record.image != image)?;
        Some(MachineRecord::clone(changed))
    };
    let record = record.or_else(changed)?;
    Some(MachineRecord { image, ..record })
}

/// Returns a record for a disk without one. Refuses a machine that has too many disks, because each
/// leaves a record.
fn check_new_disk(
    store: &dyn DiskRecords,
    disk: &Uuid,
    machine: &str,
) -> Result<MachineRecord, TicketRefusal> {
    let (of_machine, all) = store.count(machine)?;
    let place = || store.place(&format!("{DISK_RECORD_PREFIX}*"));
    if of_machine >= MAX_PER_MACHINE {
        let message = format!(
            "this machine has had {of_machine} disks; if they no longer belong to it, delete the records that the join \
             service's log names"
        );
        return Err(TicketRefusal::denied("too-many-disks", message)
            .with_details(format!("{} with machine {machine}", place())));
    }
    check_not_full(all, place)?;
    Ok(MachineRecord::of_disk(disk, machine))
}

/// Refuses a further record of a disk if there are too many. Without a record, any machine would
/// get the key of that disk.
fn check_not_full(all: usize, place: impl Fn() -> String) -> Result<(), TicketRefusal> {
    if all < MAX_DISK_RECORDS {
        return Ok(());
    }
    let message = format!(
        "there are {all} records of disks, and no further one is accepted: delete those of disks that no longer exist"
    );
    Err(TicketRefusal::missing("too-many-records", message).with_details(place()))
}

/// Refuses a machine that an operator has removed, and the name of its node. `name` is the one that the machine
/// asks for, if it asks for one.
pub fn check_not_removed(
    cluster: &Cluster,
    name: Option<&str>,
    machine: Option<&str>,
) -> Result<(), TicketRefusal> {
    let by_name = name.filter(|name| cluster.removed(name).is_some());
    let by_machine = || machine.and_then(|machine| cluster.removed_of_machine(machine));
    let Some(node) = by_name.map(str::to_owned).or_else(by_machine) else {
        return Ok(());
    };
    let message = format!(
        "the node {node} was removed from this cluster: neither its machine nor another one of its name is admitted until \
         an operator runs `firstlight node readmit {node}`"
    );
    let place = format!("ConfigMap {NAMESPACE}/{}", removed_nodes::CONFIG_MAP);
    Err(TicketRefusal::denied("removed", message).with_details(place))
}

/// A machine that asks for a name.
#[derive(Debug, Clone, Copy)]
pub struct Claimant<'a> {
    /// The machine's identity by attestation.
    pub machine: Option<&'a str>,
    /// Whether its source address was verified, as in [`MachineRecord`].
    pub direct: bool,
}

/// Checks that this machine may have this name.
pub fn check_name(
    cluster: &Cluster,
    name: &str,
    claimant: Claimant,
    now: SystemTime,
) -> Result<(), TicketRefusal> {
    let at = name_of_node(name);
    let record = cluster.record(&at);
    check_name_against(
        record.as_deref(),
        cluster.node(name).as_ref(),
        claimant,
        now,
    )
    .map_err(|refusal| refusal.with_details(format!("ConfigMap {NAMESPACE}/{at}")))?;
    let Some(machine) = claimant.machine.filter(|_| record.is_none()) else {
        return Ok(());
    };
    // under another name and with an empty disk it is the same machine
    if let Some(closed) = cluster.closed_record_of(machine) {
        check_open(&closed, || place(&closed.name))?;
    }
    match cluster.count_of_machine(NODE_RECORD_PREFIX, machine) {
        of_machine if of_machine >= MAX_PER_MACHINE => {
            let message = format!(
                "this machine has had {of_machine} names; if they no longer belong to it, delete the records that the \
                 join service's log names"
            );
            Err(
                TicketRefusal::denied("too-many-names", message).with_details(format!(
                    "ConfigMaps {NAMESPACE}/{NODE_RECORD_PREFIX}* with machine {machine}"
                )),
            )
        }
        _ => Ok(()),
    }
}

fn check_name_against(
    record: Option<&MachineRecord>,
    node: Option<&NodeStatus>,
    claimant: Claimant,
    now: SystemTime,
) -> Result<(), TicketRefusal> {
    let Claimant { machine, direct } = claimant;
    let age = |record: &MachineRecord| {
        let issued = record.issued.filter(|_| !record.token.is_empty());
        // Another replica's clock may be ahead by less than a ticket's validity. A time further in
        // the future is wrong, and no machine should wait until it passes.
        issued.map_or(Duration::MAX, |issued| {
            now.duration_since(issued)
                .unwrap_or_else(|ahead| ahead.duration())
        })
    };
    match (record, node) {
        // The recorded machine came through a load balancer, so its address was not verified.
        (Some(record), _) if record.is_of_other(machine) && direct && !record.direct => Ok(()),
        (Some(record), node) if record.is_of_other(machine) => {
            let age = age(record);
            match node {
                Some(_) => Err(TicketRefusal::denied(
                    "name-of-other",
                    "a node of this name is another machine; if that machine no longer exists, delete its Node object",
                )),
                None if age < TOKEN_VALIDITY => Err(TicketRefusal::temporary(
                    "name-is-joining",
                    "another machine of this name is joining; if that machine no longer exists, try again later",
                    Duration::from_secs(60),
                )),
                None => Ok(()),
            }
        }
        (Some(record), _) if record.refused.is_some() => check_open(record, || place(&record.name)),
        (Some(record), _) if age(record) < JUST_ISSUED_AGE => {
            let message =
                "a ticket for this node was issued a moment ago: if it did not arrive, try again";
            Err(TicketRefusal::temporary(
                JUST_ISSUED,
                message,
                JUST_ISSUED_AGE,
            ))
        }
        // No record names the node's machine, but that machine is running.
        (_, Some(node))
            if node.ready_since.is_some() && record.is_none_or(|it| lacks_machine(it, machine)) =>
        {
            Err(TicketRefusal::temporary(
                "name-is-ready",
                "a node of this name is Ready; if this machine replaces it, shut that node down first",
                Duration::from_secs(15),
            ))
        }
        _ => Ok(()),
    }
}

/// Returns whether the record has no machine, although the evidence of this one names it: `firstlight apply` or an operator has
/// written the record for a node from before records existed.
fn lacks_machine(record: &MachineRecord, machine: Option<&str>) -> bool {
    record.machine.is_empty() && machine.is_some()
}

/// Writes the record of a join ticket, unless the node's record belongs to another machine by now.
pub fn write(
    cluster: &Cluster,
    cleaner: &Cleaner,
    client: &Client,
    mut record: MachineRecord,
) -> Result<Written, TicketRefusal> {
    let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
    let at = maps.named(&record.name);
    let mut before = cluster.record(&record.name);
    for _ in 0..TRIES {
        let machine = Some(record.machine.as_str()).filter(|machine| !machine.is_empty());
        let claimant = Claimant {
            machine,
            direct: record.direct,
        };
        check_not_removed(cluster, Some(&record.node), machine)?;
        check_name_against(
            before.as_deref(),
            cluster.node(&record.node).as_ref(),
            claimant,
            SystemTime::now(),
        )?;
        // The machine that gets the name must not get the disk of the machine that had it.
        if let Some(before) = before
            .as_deref()
            .filter(|before| machine.is_some_and(|one| before.is_of_other(Some(one))))
            && before.disk != record.disk
            && let Some(disk) = Uuid::parse(&before.disk)
        {
            check_not_full(cluster.count_of_disks(), || {
                place(&format!("{DISK_RECORD_PREFIX}*"))
            })?;
            let of_disk = MachineRecord {
                refused: before.refused,
                ..MachineRecord::of_disk(&disk, &before.machine)
            };
            write_if_absent(client, &of_disk)?;
        }
        record.version = before
            .as_ref()
            .map(|before| before.version.clone())
            .unwrap_or_default();
        let written = match &before {
            None => client.create(&maps, &record.to_object()),
            Some(_) => client.update(&at, &record.to_object()),
        };
        match written {
            Ok(map) => {
                record.version = version_of(&map).to_owned();
                cluster.store_record(record.clone());
                return Ok(Written {
                    record,
                    before: before.as_deref().cloned(),
                });
            }
            // Another replica was faster, or the watch is late.
            Err(error)
                if error.is_already_exists() || error.is_conflict() || error.is_not_found() =>
            {
                let found = client.find_as(&at)?;
                before = found.as_ref().and_then(MachineRecord::read).map(Arc::new);
            }
            Err(error) => {
                // The API server may have executed the request. If a record existed before, either
                // version is correct.
                if before.is_none() {
                    cleaner.undo(CleanerTask::MachineRecord(record.name, record.token));
                }
                return Err(error.into());
            }
        }
    }
    Err(TicketRefusal::temporary(
        "name-is-joining",
        "another ticket for this node is being issued",
        Duration::from_secs(2),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(machine: &str, age: u64) -> MachineRecord {
        let disk = Uuid::parse("00000000-0000-0000-0000-000000000001").unwrap();
        let mut record = MachineRecord::of_node("n", &disk, Some(machine), "abcdef", "");
        record.issued = record
            .issued
            .map(|issued| issued - Duration::from_secs(age));
        record
    }

    fn indirect(machine: Option<&str>) -> Claimant<'_> {
        Claimant {
            machine,
            direct: false,
        }
    }

    #[test]
    fn a_machine_that_was_refused_as_a_member_gets_neither_its_name_nor_its_disk_again() {
        let closed = MachineRecord {
            refused: Some(SystemTime::UNIX_EPOCH),
            ..record("m", 3600)
        };
        let check = |machine| {
            let claimant = indirect(Some(machine));
            let checked = check_name_against(Some(&closed), None, claimant, SystemTime::now());
            checked.map_err(|refusal| refusal.reason)
        };
        assert_eq!(check("m"), Err("refused-before"));
        // another machine may replace it
        assert_eq!(check("other"), Ok(()));
        let refusal = check_open(&closed, String::new).unwrap_err();
        assert!(refusal.to_string().contains("1970-01-01T00:00:00Z"));
        assert_eq!(check_open(&record("m", 0), String::new), Ok(()));
    }

    #[test]
    fn a_full_store_refuses_the_next_disk() {
        struct Counted(usize, usize);
        impl DiskRecords for Counted {
            fn of_disk(&self, _: &Uuid) -> Result<Vec<Arc<MachineRecord>>, TicketRefusal> {
                Ok(Vec::new())
            }
            fn count(&self, _: &str) -> Result<(usize, usize), TicketRefusal> {
                Ok((self.0, self.1))
            }
            fn place(&self, name: &str) -> String {
                name.into()
            }
        }
        let disk = Uuid::parse("00000000-0000-0000-0000-000000000001").unwrap();
        let check = |of_machine, all| {
            let record = check_new_disk(&Counted(of_machine, all), &disk, "m");
            record
                .map(|record| record.machine)
                .map_err(|refusal| refusal.reason)
        };
        // the numbers that SPECIFICATION.md promises
        assert_eq!(check(0, 19_999), Ok("m".into()));
        assert_eq!(check(0, 20_000), Err("too-many-records"));
        assert_eq!(check(7, 100), Ok("m".into()));
        assert_eq!(check(8, 100), Err("too-many-disks"));
    }

    #[test]
    fn a_verified_machine_replaces_the_record_of_an_unverified_one() {
        let node = NodeStatus {
            uid: "u".into(),
            ..NodeStatus::default()
        };
        let claimant = Claimant {
            machine: Some("other"),
            direct: true,
        };
        for (direct, expected) in [(false, Ok(())), (true, Err("name-of-other"))] {
            let record = MachineRecord {
                direct,
                ..record("m", 1)
            };
            let checked =
                check_name_against(Some(&record), Some(&node), claimant, SystemTime::now());
            assert_eq!(checked.map_err(|refusal| refusal.reason), expected);
        }
    }

    #[test]
    fn an_inits_record_keeps_its_name_as_one_of_a_ticket_does() {
        let disk = Uuid::parse("00000000-0000-0000-0000-000000000001").unwrap();
        let written = MachineRecord::of_node("n", &disk, Some("m"), "", "");
        let object = serde_json::from_value(written.to_object()).unwrap();
        let read = MachineRecord::read(&object).unwrap();
        let node = NodeStatus {
            uid: "u".into(),
            ..NodeStatus::default()
        };
        let check = |machine| {
            check_name_against(
                Some(&read),
                Some(&node),
                indirect(Some(machine)),
                SystemTime::now(),
            )
        };
        assert_eq!(
            check("other").map_err(|refusal| refusal.reason),
            Err("name-of-other")
        );
        // The record has no token, so the machine may ask again at once.
        assert_eq!(check("m"), Ok(()));
    }

    #[test]
    fn a_name_is_its_machines_while_its_node_is_there_or_on_its_way() {
        let (fresh, old) = (record("m", 1), record("m", 3600));
        let node = NodeStatus {
            uid: "u".into(),
            ..NodeStatus::default()
        };
        let check = |record: &MachineRecord, node: Option<&NodeStatus>, machine: Option<&str>| {
            check_name_against(Some(record), node, indirect(machine), SystemTime::now())
                .map_err(|refusal| refusal.reason)
        };
        for node in [None, Some(&node)] {
            assert_eq!(check(&record("m", 7), node, Some("m")), Ok(()));
            assert_eq!(check(&fresh, node, Some("m")), Err(JUST_ISSUED));
        }
        for machine in [None, Some("other")] {
            assert_eq!(check(&old, Some(&node), machine), Err("name-of-other"));
            assert_eq!(check(&fresh, None, machine), Err("name-is-joining"));
            assert_eq!(check(&old, None, machine), Ok(()));
        }
    }

    #[test]
    fn a_replica_whose_clock_is_ahead_delays_other_machines_only_shortly() {
        let check = |ahead: u64, machine: &str| {
            let mut record = record("m", 0);
            record.issued = record
                .issued
                .map(|issued| issued + Duration::from_secs(ahead));
            check_name_against(
                Some(&record),
                None,
                indirect(Some(machine)),
                SystemTime::now(),
            )
            .map_err(|refusal| refusal.reason)
        };
        const YEAR: u64 = 365 * 24 * 60 * 60;
        assert_eq!(
            (check(2, "m"), check(2, "other")),
            (Err(JUST_ISSUED), Err("name-is-joining"))
        );
        assert_eq!(
            (check(600, "m"), check(600, "other")),
            (Ok(()), Err("name-is-joining"))
        );
        assert_eq!((check(YEAR, "m"), check(YEAR, "other")), (Ok(()), Ok(())));
    }

    #[test]
    fn a_record_without_a_machine_protects_the_name_of_a_ready_node_as_no_record_does() {
        let ready = NodeStatus {
            uid: "u".into(),
            ready_since: Some(SystemTime::now()),
            ..NodeStatus::default()
        };
        let role_only = MachineRecord {
            node: "n".into(),
            control_plane: true,
            ..MachineRecord::default()
        };
        let check = |node: &NodeStatus, machine| {
            let claimant = indirect(machine);
            check_name_against(Some(&role_only), Some(node), claimant, SystemTime::now())
                .map_err(|refusal| refusal.reason)
        };
        assert_eq!(check(&ready, Some("m")), Err("name-is-ready"));
        // the evidence of this variant names no machine, so each record is like this
        assert_eq!(check(&ready, None), Ok(()));
        let silent = NodeStatus {
            ready_since: None,
            ..ready.clone()
        };
        assert_eq!(check(&silent, Some("m")), Ok(()));
    }

    #[test]
    fn the_name_of_a_node_without_record_is_free_once_it_is_not_ready() {
        let ready = NodeStatus {
            uid: "u".into(),
            ready_since: Some(SystemTime::now()),
            ..NodeStatus::default()
        };
        let check = |node: &NodeStatus| {
            check_name_against(None, Some(node), indirect(Some("m")), SystemTime::now())
        };
        assert_eq!(check(&ready).unwrap_err().reason, "name-is-ready");
        assert!(
            check(&NodeStatus {
                ready_since: None,
                ..ready
            })
            .is_ok()
        );
    }
}
