//! Deletes the records of workers whose machines no longer exist, and counts those of control planes.
//!
//! A cloud's controller deletes the Node of a machine that was deleted, for example when an autoscaler
//! needs fewer machines. The record of that node ([`MachineRecord`]) is deleted here:
//!
//! ```text
//! no Node has its name, and its token has expired ─► ask the cloud ─► the cloud has no such machine, running or not
//!                                                                      for `grace`: close the disk, delete a worker's record
//! ```
//!
//! The record of a control plane stays until `firstlight node remove`, since its member of etcd may still count for the majority. This
//! program does not remove the member: it would act on the word of the cloud alone, and each member that is wrongly removed brings etcd
//! nearer to its end.
//!
//! The Node alone proves nothing: an administrator may delete it, or drain a machine that boots again. The
//! cloud alone proves nothing either: a list may be late. A disk without a record stays closed, so a machine that comes
//! back with its disk is refused, and one with an empty disk joins like a new one. While disks without
//! a record are opened (migration), no record is deleted.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::cluster::Cluster;
use crate::cluster::constellation as joining_node;
use crate::cluster::instances::Instances;
use crate::cluster::joined::Joined;
use crate::metrics::Registry;
use base::uuid::Uuid;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, CONFIG_MAPS, Client};
use kubernetes::machine_record::{self, MachineRecord, NO_MACHINE};
use kubernetes::services::migration::Migration;

/// The timeout of one call of the API.
const TIMEOUT: Duration = Duration::from_secs(5);

/// When machines are looked for, and when their records are deleted.
#[derive(Clone, Copy)]
pub struct Times {
    /// The pause between two checks. Each asks for two lists of the cloud.
    pub pause: Duration,
    /// How long a machine must be missing: a cloud's list can lack machines for some time, while a part of the cloud fails.
    pub grace: Duration,
}

impl Default for Times {
    fn default() -> Times {
        Times {
            pause: Duration::from_secs(300),
            grace: Duration::from_secs(3600),
        }
    }
}

/// What the checks need.
struct DeletedMachines {
    client: Client,
    cluster: Arc<Cluster>,
    instances: Arc<Instances>,
    migration: Migration,
    grace: Duration,
    /// The records whose machines are missing, and since when.
    missing: HashMap<String, Instant>,
    /// The records of control planes about which the log has a warning.
    warned: HashSet<String>,
    /// The number of control planes whose machines no longer exist.
    lost: Arc<AtomicUsize>,
}

/// What happened to a record.
#[derive(Debug, PartialEq, Eq)]
pub enum RecordOutcome {
    /// It is deleted.
    Deleted,
    /// It is that of a control plane: it stays.
    Kept,
    /// It has changed: nothing happened.
    Changed,
}

/// Starts the thread of the checks. It ends when the client is stopped.
pub fn start(
    client: &Client,
    cluster: &Arc<Cluster>,
    instances: &Arc<Instances>,
    migration: Migration,
    Times { pause, grace }: Times,
    registry: &Registry,
) -> io::Result<Joined> {
    let lost = Arc::new(AtomicUsize::new(0));
    let shown = lost.clone();
    registry.gauge_of(
        "firstlight_join_lost_control_planes",
        "Control planes whose machines no longer exist: firstlight node remove.",
        &[],
        move || Some(shown.load(Ordering::Relaxed) as f64),
    );
    let mut machines = DeletedMachines {
        client: client.within(TIMEOUT),
        cluster: cluster.clone(),
        instances: instances.clone(),
        migration,
        grace,
        missing: HashMap::new(),
        warned: HashSet::new(),
        lost,
    };
    let run = move || {
        while !machines.client.stopped_within(pause) {
            machines.check();
        }
    };
    let thread = thread::Builder::new().name("deleted-machines".into());
    thread.spawn(run).map(Joined::from)
}

impl DeletedMachines {
    /// Deletes the records of machines that have been missing for long enough.
    fn check(&mut self) {
        let now = SystemTime::now();
        let is_known = self.cluster.is_known_within(Duration::ZERO);
        if !is_known || self.migration.is_on(now) {
            return self.missing.clear();
        }
        let records = self.cluster.records_without_node(now);
        if records.is_empty() {
            self.lost.store(0, Ordering::Relaxed);
            return self.missing.clear();
        }
        let existing = match self.instances.existing() {
            // without any machine, the list also lacks the one that runs this program: it is wrong
            Some(Ok(existing)) if !existing.is_empty() => existing,
            Some(Err(error)) => {
                log::warn!(
                    "cannot list the cloud's machines, so records of deleted machines stay: {error}"
                );
                return self.missing.clear();
            }
            _ => return self.missing.clear(),
        };
        let now = Instant::now();
        let mut lost = 0;
        for record in missing(&mut self.missing, records, &existing, now, self.grace) {
            match delete(&self.client, &record, self.cluster.has_joining_nodes()) {
                Ok(RecordOutcome::Deleted) => log::info!(
                    "deleted ConfigMap {NAMESPACE}/{}: the cloud has no machine {}, and Kubernetes has no Node of this name",
                    record.name,
                    record.node
                ),
                Ok(RecordOutcome::Kept) => {
                    lost += 1;
                    if self.warned.insert(record.name.clone()) {
                        log::warn!(
                            "the cloud has no machine {0}, and Kubernetes has no Node of this name. It was a control plane: its etcd \
                             member may still count for the majority. Run `firstlight node remove {0}`",
                            record.node
                        );
                    }
                }
                // another replica was faster, or the record has changed
                Ok(RecordOutcome::Changed) | Err(client::Error::Stopped) => {}
                Err(error) => {
                    log::warn!("cannot delete the record of a deleted machine yet: {error}")
                }
            }
        }
        self.lost.store(lost, Ordering::Relaxed);
    }
}

/// Deletes the record of a worker if it is unchanged, and records that no machine has its disk. Where
/// Constellation's objects about nodes exist, deletes that of the node. The record of a control plane
/// stays.
pub fn delete(
    client: &Client,
    record: &MachineRecord,
    has_joining_nodes: bool,
) -> Result<RecordOutcome, client::Error> {
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(&record.name);
    let Some(map) =
        (client.find_as(&at)?).filter(|map| MachineRecord::read(map).as_ref() == Some(record))
    else {
        return Ok(RecordOutcome::Changed);
    };
    if record.control_plane {
        return Ok(RecordOutcome::Kept);
    }
    // Without a record, the key service would take the disk, or a copy of it, for a volume.
    if let Some(disk) = Uuid::parse(&record.disk) {
        let closed = MachineRecord::of_disk(&disk, NO_MACHINE);
        machine_record::write_if_absent(client, &closed)?;
    }
    if !client.delete_as(&at, &map.metadata)? {
        return Ok(RecordOutcome::Changed);
    }
    if has_joining_nodes {
        joining_node::delete(client, &record.node, &record.node)?;
    }
    Ok(RecordOutcome::Deleted)
}

/// Notes which of these records have no existing machine. Returns those that have had none for `grace`.
fn missing(
    since: &mut HashMap<String, Instant>,
    records: Vec<Arc<MachineRecord>>,
    existing: &HashSet<String>,
    now: Instant,
    grace: Duration,
) -> Vec<Arc<MachineRecord>> {
    let mut records = records;
    records.retain(|record| !existing.contains(&record.node));
    let before = std::mem::take(since);
    for record in &records {
        let at = before.get(&record.name).copied().unwrap_or(now);
        since.insert(record.name.clone(), at);
    }
    records.retain(|record| now.duration_since(since[&record.name]) >= grace);
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_deleted_after_its_machine_was_missing_in_each_list_for_an_hour() {
        let records = || {
            ["a", "b"].map(|node| {
                Arc::new(MachineRecord {
                    name: format!("join-node-{node}"),
                    node: node.into(),
                    ..MachineRecord::default()
                })
            })
        };
        let start = Instant::now();
        let grace = Times::default().grace;
        let mut since = HashMap::new();
        let mut check = |minute: u64, existing: &[&str]| -> Vec<String> {
            let existing = existing.iter().map(|name| (*name).to_owned()).collect();
            let now = start + Duration::from_secs(60 * minute);
            let gone = missing(&mut since, records().into(), &existing, now, grace);
            gone.iter().map(|record| record.node.clone()).collect()
        };
        assert_eq!(check(0, &["a", "b"]), [""; 0]);
        assert_eq!(check(20, &["b"]), [""; 0]);
        assert_eq!(check(79, &["b"]), [""; 0]);
        // the machine is in a list again: the time begins again
        assert_eq!(check(80, &["a", "b"]), [""; 0]);
        assert_eq!(check(100, &["b"]), [""; 0]);
        assert_eq!(check(159, &["b"]), [""; 0]);
        assert_eq!(check(160, &["b"]), ["a"]);
        assert_eq!(check(161, &["c"]), ["a"]);
        assert_eq!(check(221, &["c"]), ["a", "b"]);
    }
}
