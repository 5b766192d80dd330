//! Which UUIDs belong to state disks, by the join service's records ([`MachineRecord`]).
//!
//! Keys of volumes and of state disks share one name space. An attacker could present a clone of a
//! control plane's disk as a volume, to open it with a volume's key. So a client with access to
//! keys of volumes only does not get the key of a recorded disk.
//!
//! Most records are named after nodes, so each request needs the list of all records. Concurrent
//! requests share the next list, but a list that began before a request is not used for it. No key
//! is issued while the API server does not answer: a volume can wait, because its pod needs the API
//! server anyway.

use base::sync::{lock, wait_timeout};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::metrics::{Histogram, Registry};
use base::uuid::Uuid;
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client, Error, Selector};
use kubernetes::machine_record::MachineRecord;
use kubernetes::objects::ConfigMap;
use rpc::grpc::{Code, Status};

/// The timeout of one page of a list with its retries, and of waiting for another request's list.
/// Clients wait for 5 s.
const TIME: Duration = Duration::from_secs(3);

/// Lists the records of state disks.
pub struct Disks {
    client: Client,
    last: Mutex<List>,
    /// Notified when a list ends.
    changed: Condvar,
    seconds: Histogram,
}

#[derive(Default)]
struct List {
    /// Whether a request is reading the next list.
    is_pending: bool,
    /// When the last list began; `None` before the first.
    began: Option<Instant>,
    records: Option<Arc<Records>>,
}

/// The name of the record of each state disk.
type Records = HashMap<Uuid, String>;

impl Disks {
    /// Creates a client of the API server. It needs permission to list the ConfigMaps of
    /// [`NAMESPACE`].
    pub fn new(client: &Client, registry: &Registry) -> Disks {
        let help = "Time in which the API server listed the records of state disks.";
        Disks {
            client: client.within(TIME),
            last: Mutex::default(),
            changed: Condvar::new(),
            seconds: registry.add("firstlight_key_disk_records_seconds", help),
        }
    }

    /// Refuses the UUID of a state disk. Refuses any UUID while the records are not available.
    pub fn refuse_state_disk(&self, uuid: &Uuid) -> Result<(), Status> {
        match self.records()?.get(uuid) {
            None => Ok(()),
            Some(record) => Err(Status::new(
                Code::PermissionDenied,
                format!(
                    "this UUID belongs to a state disk, not to a volume: see ConfigMap {NAMESPACE}/{record}"
                ),
            )),
        }
    }

    /// Returns the records as of the time of this call or later.
    fn records(&self) -> Result<Arc<Records>, Status> {
        let asked = Instant::now();
        let mut last = self.lock();
        loop {
            if last.began.is_some_and(|began| began >= asked) {
                return last.records.clone().ok_or_else(unavailable);
            }
            if !last.is_pending {
                break;
            }
            let left = (asked + TIME).saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(unavailable());
            }
            last = wait_timeout(&self.changed, last, left);
        }
        last.is_pending = true;
        drop(last);
        // The destructor also runs after a panic, so that no request waits for this list for ever.
        let mut pending = Pending {
            disks: self,
            began: Instant::now(),
            records: None,
        };
        match self.seconds.time(|| list(&self.client)) {
            Ok(records) => pending.records = Some(Arc::new(records)),
            Err(error) => log::error!("cannot list the cluster's state disks: {error}"),
        }
        pending.records.clone().ok_or_else(unavailable)
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        lock(&self.last)
    }
}

/// A running list. Its end notifies the waiting requests.
struct Pending<'a> {
    disks: &'a Disks,
    began: Instant,
    records: Option<Arc<Records>>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        *self.disks.lock() = List {
            is_pending: false,
            began: Some(self.began),
            records: self.records.take(),
        };
        self.disks.changed.notify_all();
    }
}

fn list(client: &Client) -> Result<Records, Error> {
    let maps = client.list_keeping(
        &CONFIG_MAPS.in_namespace(NAMESPACE),
        &Selector::default(),
        disks_and_name,
    )?;
    Ok(maps.items.into_iter().flatten().collect())
}

/// Reduces a record to its disks, each with the name of the record, because a cluster may have
/// thousands, and other ConfigMaps are large.
fn disks_and_name(map: ConfigMap) -> Vec<(Uuid, String)> {
    let disks = |record: MachineRecord| {
        let disks = record.disks();
        disks.map(|disk| (disk, record.name.clone())).collect()
    };
    MachineRecord::read(&map).map_or(vec![], disks)
}

fn unavailable() -> Status {
    Status::new(
        Code::Unavailable,
        "cannot check at the moment whether this UUID belongs to a state disk: try again",
    )
}
