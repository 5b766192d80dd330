//! Records of disks in a folder, for a join service without Kubernetes: which machine has which disk.
//!
//! ```text
//! DIR/UUID.json    {"disk": "UUID", "machine": "..."}    the fields of a ConfigMap join-disk-UUID
//! DIR/lock         only one join service uses the folder
//! ```
//!
//! The service reads a file at each request, so an operator may change it at any time. It writes the
//! record before it gives out the first key of a disk, and durably: no power failure and no second
//! request makes two machines the owner of one disk. A file that cannot be read opens nothing.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::records::{self, DiskRecords};
use crate::cluster::refusal::TicketRefusal;
use base::sync::lock;
use base::uuid::Uuid;
use kubernetes::machine_record::{DISK_RECORD_PREFIX, MachineRecord};
use kubernetes::objects::ConfigMap;
use kubernetes::services::migration::Migration;

const LOCK: &str = "lock";
const SUFFIX: &str = ".json";
/// The maximum size of a record. The service writes about 150 bytes.
const MAX_LEN: u64 = 16 << 10;
/// The mode of a record, which contains no secret: its owner and group may read it.
const MODE: u32 = 0o640;

/// The mode of a record that root writes: the service is another user.
const OPERATORS_MODE: u32 = 0o644;

/// Records this machine as the owner of this disk, whatever the record said. Its other fields stay. A join
/// service may use the folder meanwhile.
pub fn accept(dir: &Path, disk: &Uuid, machine: &str) -> io::Result<PathBuf> {
    let path = dir.join(format!("{disk}{SUFFIX}"));
    let found = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        read => Some(read?),
    };
    // a damaged record opens nothing, and has nothing to keep
    let found = found.and_then(|bytes| fields(&bytes, disk).ok());
    let mut fields = found.unwrap_or_else(|| json!({}));
    fields["disk"] = disk.as_str().into();
    fields["machine"] = machine.into();
    base::file::replace(&path, format!("{fields}\n").as_bytes(), OPERATORS_MODE)?;
    Ok(path)
}

/// The records in a folder.
pub struct FileRecords {
    dir: PathBuf,
    /// Until when a disk without a record is recorded for the machine that asks first.
    enrolling: Migration,
    /// The lock of the folder. It is held while one request reads and writes.
    locked: Mutex<File>,
}

impl FileRecords {
    /// Uses the records in this folder, which must exist. Fails if another join service uses it.
    pub fn open(dir: &Path, enrolling: Migration) -> io::Result<FileRecords> {
        let at = dir.join(LOCK);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(at)?;
        match file.try_lock() {
            Ok(()) => Ok(FileRecords {
                dir: dir.into(),
                enrolling,
                locked: Mutex::new(file),
            }),
            Err(TryLockError::WouldBlock) => {
                Err(io::Error::other("another join service uses this folder"))
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Checks that this machine may have the key of this disk. Changes nothing.
    pub fn check(&self, disk: &Uuid, machine: Option<&str>) -> Result<(), TicketRefusal> {
        let _locked = lock(&self.locked);
        self.decide(disk, machine).map(drop)
    }

    /// Checks this again, and records the machine if the disk has no owner. Returns a remark for the
    /// operator, or an empty one.
    pub fn claim(&self, disk: &Uuid, machine: Option<&str>) -> Result<&'static str, TicketRefusal> {
        let _locked = lock(&self.locked);
        let Some(record) = self.decide(disk, machine)? else {
            return Ok("");
        };
        let path = self.path(disk);
        // the fields that an operator has added stay
        let mut fields = self.read(disk)?.unwrap_or_else(|| json!({}));
        fields["disk"] = disk.as_str().into();
        fields["machine"] = record.machine.into();
        base::file::replace(&path, format!("{fields}\n").as_bytes(), MODE)
            .map_err(|error| failed(&path, &error))?;
        Ok("the machine is now recorded as the owner of this disk")
    }

    /// Returns the record that has to be written, if any.
    fn decide(
        &self,
        disk: &Uuid,
        machine: Option<&str>,
    ) -> Result<Option<MachineRecord>, TicketRefusal> {
        if machine.is_none() {
            let message = "this machine proves no identity, so no disk can be recorded as its own";
            return Err(TicketRefusal::denied("unproven", message));
        }
        let accepts_new = self.enrolling.is_on(SystemTime::now());
        if !accepts_new && self.read(disk)?.is_none() {
            // not in the refusal: its line is JSON, whose quotes and escapes a shell reads in another way
            log::info!(
                "to give the disk {disk} to the refused machine, run: join-service --accept {disk}={} --records {}",
                machine.unwrap_or_default(),
                self.dir.display()
            );
            let message = "there is no record of this disk: if it is a new disk, its key broker's operator accepts it (see \
                           \"A new disk\" in docs/standalone.md)";
            return Err(TicketRefusal::denied("disk-unknown", message));
        }
        records::check_rejoin(self, disk, machine, accepts_new)
    }

    fn path(&self, disk: &Uuid) -> PathBuf {
        self.dir.join(format!("{disk}{SUFFIX}"))
    }

    /// Returns the fields of a disk's record; `None` if there is no record.
    fn read(&self, disk: &Uuid) -> Result<Option<Value>, TicketRefusal> {
        let path = self.path(disk);
        let read = || {
            let mut bytes = Vec::new();
            File::open(&path)?
                .take(MAX_LEN + 1)
                .read_to_end(&mut bytes)?;
            Ok::<_, io::Error>(bytes)
        };
        match read() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => read
                .and_then(|bytes| fields(&bytes, disk))
                .map(Some)
                .map_err(|error| failed(&path, &error)),
        }
    }

    fn record(&self, disk: &Uuid) -> Result<Option<MachineRecord>, TicketRefusal> {
        let record = |fields: Value| {
            let texts = fields.as_object().into_iter().flatten();
            let texts = texts.filter_map(|(name, it)| Some((name.clone(), it.as_str()?.into())));
            let mut map = ConfigMap {
                data: texts.collect(),
                ..ConfigMap::default()
            };
            map.metadata.name = format!("{DISK_RECORD_PREFIX}{disk}");
            MachineRecord::read(&map)
        };
        Ok(self.read(disk)?.and_then(record))
    }

    /// Returns the disks that have a record.
    fn disks(&self) -> io::Result<Vec<Uuid>> {
        let mut disks = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            let uuid = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
            disks.extend(uuid.and_then(Uuid::parse));
        }
        Ok(disks)
    }
}

impl DiskRecords for FileRecords {
    fn of_disk(&self, disk: &Uuid) -> Result<Vec<Arc<MachineRecord>>, TicketRefusal> {
        Ok(self.record(disk)?.into_iter().map(Arc::new).collect())
    }

    fn count(&self, machine: &str) -> Result<(usize, usize), TicketRefusal> {
        let disks = self.disks().map_err(|error| failed(&self.dir, &error))?;
        // a damaged record of another disk must not close this one
        let is_own = |disk: &&Uuid| {
            let record = self.record(disk).ok().flatten();
            record.is_some_and(|record| record.machine == machine)
        };
        Ok((disks.iter().filter(is_own).count(), disks.len()))
    }

    fn place(&self, name: &str) -> String {
        let disk = name.strip_prefix(DISK_RECORD_PREFIX).unwrap_or(name);
        self.dir
            .join(format!("{disk}{SUFFIX}"))
            .display()
            .to_string()
    }
}

/// Parses the record of this disk. An empty file is no record: it may be what a damaged file system
/// has left, and the disk would open in any machine.
pub fn fields(bytes: &[u8], disk: &Uuid) -> io::Result<Value> {
    let wrong = |text: String| Err(io::Error::other(text));
    if bytes.len() as u64 > MAX_LEN {
        return wrong(format!("it has more than {MAX_LEN} bytes"));
    }
    let fields: Value = serde_json::from_slice(bytes)?;
    let Some(object) = fields.as_object() else {
        return wrong("expected an object with the field \"machine\"".into());
    };
    // a misspelt field would give the disk to the next machine
    if !object.contains_key("machine") {
        return wrong(
            "the field \"machine\" is missing; an empty one means the next machine".into(),
        );
    }
    if let Some((name, _)) = object.iter().find(|(_, value)| !value.is_string()) {
        return wrong(format!("the field {name:?}: expected a text"));
    }
    match object.get("disk").and_then(Value::as_str) {
        Some(other) if Uuid::parse(other).as_ref() != Some(disk) => wrong(format!(
            "the field \"disk\": expected {disk}, got {other:?}"
        )),
        _ => Ok(fields),
    }
}

fn failed(path: &Path, error: &io::Error) -> TicketRefusal {
    TicketRefusal::internal("records", format!("cannot use {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const DISK: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22";

    fn disk(last: u8) -> Uuid {
        Uuid::parse(&format!("00000000-0000-0000-0000-0000000000{last:02x}")).unwrap()
    }

    fn until(day: &str) -> Migration {
        day.parse().unwrap()
    }

    fn claim(records: &FileRecords, disk: &Uuid, machine: &str) -> Result<(), &'static str> {
        let checked = records.check(disk, Some(machine));
        let claimed = records.claim(disk, Some(machine)).map(drop);
        assert_eq!(checked, claimed);
        claimed.map_err(|refusal| refusal.reason)
    }

    #[test]
    fn the_first_machine_that_asks_has_the_disk_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let open = |day| FileRecords::open(dir.path(), until(day)).unwrap();
        let records = open("9000-01-01");
        assert_eq!(claim(&records, &disk(1), "a"), Ok(()));
        assert_eq!(claim(&records, &disk(1), "b"), Err("disk-of-other"));
        assert_eq!(claim(&records, &disk(1), "a"), Ok(()));
        assert!(FileRecords::open(dir.path(), until("")).is_err(), "locked");
        drop(records);
        let records = open("");
        assert_eq!(claim(&records, &disk(1), "b"), Err("disk-of-other"));
        assert_eq!(claim(&records, &disk(1), "a"), Ok(()));
        // enrolling is over
        assert_eq!(claim(&records, &disk(2), "a"), Err("disk-unknown"));
        assert_eq!(
            records.check(&disk(1), None).unwrap_err().reason,
            "unproven"
        );
        let refusal = records.claim(&disk(1), Some("b")).unwrap_err();
        let path = dir.path().join(format!("{}.json", disk(1)));
        assert!(
            refusal.details.starts_with(path.to_str().unwrap()),
            "{refusal}"
        );
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            format!("{{\"disk\":\"{}\",\"machine\":\"a\"}}\n", disk(1))
        );
    }

    #[test]
    fn an_operator_accepts_moves_and_closes_a_disk_by_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let records = FileRecords::open(dir.path(), until("")).unwrap();
        let write = |text: &str| {
            fs::write(dir.path().join(format!("{}.json", disk(3))), text).unwrap();
        };
        write(r#"{"machine": "a"}"#);
        assert_eq!(claim(&records, &disk(3), "b"), Err("disk-of-other"));
        assert_eq!(claim(&records, &disk(3), "a"), Ok(()));
        assert_eq!(claim(&records, &disk(3), "b"), Err("disk-of-other"));
        write(r#"{"machine": "", "note": "moved"}"#);
        assert_eq!(claim(&records, &disk(3), "b"), Ok(()));
        assert_eq!(claim(&records, &disk(3), "a"), Err("disk-of-other"));
        let fields = records.read(&disk(3)).unwrap().unwrap();
        assert_eq!(fields["note"], "moved");
        write(r#"{"machine": "none"}"#);
        assert_eq!(claim(&records, &disk(3), "b"), Err("disk-of-other"));
        write(r#"{"machine": "b", "refused": "2026-11-27T00:00:00Z"}"#);
        assert_eq!(claim(&records, &disk(3), "b"), Err("refused-before"));
    }

    #[test]
    fn an_operator_accepts_a_disk_by_the_program_whatever_its_record_was() {
        let dir = tempfile::tempdir().unwrap();
        let records = FileRecords::open(dir.path(), until("")).unwrap();
        let path = dir.path().join(format!("{}.json", disk(4)));
        for (before, note) in [
            (None, Value::Null),
            // what a shell makes of a command inside a JSON line
            (Some("{\\\"machine\\\":\\\"a\\\"}\n"), Value::Null),
            (Some(""), Value::Null),
            (Some(r#"{"machine": "b", "note": "moved"}"#), "moved".into()),
        ] {
            let _ = fs::remove_file(&path);
            if let Some(text) = before {
                fs::write(&path, text).unwrap();
            }
            assert!(claim(&records, &disk(4), "a").is_err(), "{before:?}");
            assert_eq!(accept(dir.path(), &disk(4), "a").unwrap(), path);
            assert_eq!(claim(&records, &disk(4), "a"), Ok(()), "{before:?}");
            assert_eq!(claim(&records, &disk(4), "b"), Err("disk-of-other"));
            assert_eq!(records.read(&disk(4)).unwrap().unwrap()["note"], note);
        }
        assert!(accept(&dir.path().join("none"), &disk(4), "a").is_err());
    }

    #[test]
    fn a_machine_has_at_most_eight_disks() {
        let dir = tempfile::tempdir().unwrap();
        let records = FileRecords::open(dir.path(), until("9000-01-01")).unwrap();
        fs::write(dir.path().join(format!("{}.json", disk(99))), "").unwrap();
        for number in 0..8 {
            assert_eq!(claim(&records, &disk(number), "a"), Ok(()));
        }
        assert_eq!(claim(&records, &disk(8), "a"), Err("too-many-disks"));
        assert_eq!(claim(&records, &disk(8), "b"), Ok(()));
    }

    #[test]
    fn a_record_that_cannot_be_read_opens_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let records = FileRecords::open(dir.path(), until("9000-01-01")).unwrap();
        let path = dir.path().join(format!("{}.json", disk(1)));
        let long = format!("{{\"machine\":\"{}\"}}", "a".repeat(MAX_LEN as usize));
        let other = format!(r#"{{"disk":"{}","machine":""}}"#, disk(2));
        for text in [
            "",
            "[]",
            "{}",
            "{",
            r#"{"machne": ""}"#,
            r#"{"machine": 7}"#,
            &long,
            &other,
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(claim(&records, &disk(1), "a"), Err("records"), "{text:.40}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(claim(&records, &disk(1), "a"), Err("records"));
    }

    #[test]
    fn a_hostile_record_never_panics_and_never_names_another_disk() {
        let disk = Uuid::parse(DISK).unwrap();
        let valid = format!(r#"{{"disk": "{DISK}", "machine": "ab12", "refused": ""}}"#);
        for bytes in mutations(valid.as_bytes(), 20_000) {
            if let Ok(fields) = fields(&bytes, &disk)
                && let Some(named) = fields.get("disk").and_then(Value::as_str)
            {
                assert_eq!(named.to_ascii_lowercase(), DISK);
            }
        }
    }
}
