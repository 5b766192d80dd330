//! Which UUIDs are those of state disks, by the join service's records ([`records`]).
//!
//! The keys of volumes and of state disks are of one name space, so a clone of a control plane's disk that is presented as a
//! volume would open for whoever mounts volumes. So nobody who asks for keys of volumes gets that of a disk with a record.
//!
//! Most records are named after nodes, so all are read, for each question: callers that ask meanwhile share the next list. No
//! list is used for a question that came after it began, and nothing is given while the API server does not answer: a volume can
//! wait for it, since a pod needs it anyway.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use kms::Uuid;
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client, Error, Selector};
use kubernetes::machine_record::Record;
use metrics::{Histogram, Registry};
use rpc::grpc::{Code, Status};

#[cfg(doc)]
use crate::join_service::records;

/// For a page of a list, tries included, and for those that wait for another's list; callers wait for 5 s.
const TIME: Duration = Duration::from_secs(3);

/// Asks the API server.
pub struct Disks {
    client: Client,
    last: Mutex<List>,
    /// A list ended.
    changed: Condvar,
    seconds: Histogram,
}

#[derive(Default)]
struct List {
    /// Somebody is reading the next one.
    is_pending: bool,
    /// When it began; none before the first.
    began: Option<Instant>,
    records: Option<Arc<Records>>,
}

/// The name of the record of each state disk.
type Records = HashMap<Uuid, String>;

impl Disks {
    /// Asks by this client, which may list the ConfigMaps of [`NAMESPACE`].
    pub fn new(client: &Client, registry: &Registry) -> Disks {
        let help = "Time that the API server took to list the records of state disks.";
        Disks {
            client: client.within(TIME),
            last: Mutex::default(),
            changed: Condvar::new(),
            seconds: registry.add("firstlight_key_disk_records_seconds", help),
        }
    }

    /// Refuses a UUID that is a state disk's, and any while that is not known.
    pub fn refuse_state_disk(&self, uuid: &Uuid) -> Result<(), Status> {
        match self.records()?.get(uuid) {
            None => Ok(()),
            Some(record) => Err(Status::new(
                Code::PermissionDenied,
                format!(
                    "this UUID is a state disk's, and no volume's: see ConfigMap {NAMESPACE}/{record}"
                ),
            )),
        }
    }

    /// As of now or later.
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
            last = self
                .changed
                .wait_timeout(last, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        last.is_pending = true;
        drop(last);
        // also where a panic passes through here, nobody waits for ever
        let mut pending = Pending {
            disks: self,
            began: Instant::now(),
            records: None,
        };
        match self.seconds.time(|| list(&self.client)) {
            Ok(records) => pending.records = Some(Arc::new(records)),
            Err(error) => log::error!("it is not known which disks are state disks: {error}"),
        }
        pending.records.clone().ok_or_else(unavailable)
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        // every change of it is whole
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A list under way; when it ends, those that wait for it are told.
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
    let pairs = maps.items.iter().filter_map(Value::as_array).flatten();
    let of_pair = |pair: &Value| {
        Some((
            Uuid::parse(pair[0].as_str()?)?,
            pair[1].as_str()?.to_owned(),
        ))
    };
    Ok(pairs.filter_map(of_pair).collect())
}

/// Of a record, each disk with the record's name: a cluster may have thousands of records, and other ConfigMaps are large.
fn disks_and_name(map: Value) -> Value {
    let pairs = |record: Record| {
        record
            .disks()
            .map(|disk| json!([disk.as_str(), record.name]))
            .collect()
    };
    Record::read(&map).map_or(Value::Null, pairs)
}

fn unavailable() -> Status {
    Status::new(
        Code::Unavailable,
        "it cannot be checked at the moment that no state disk has this UUID: try again",
    )
}
