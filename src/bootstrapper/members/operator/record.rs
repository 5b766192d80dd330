//! The record of operators' calls. A call that cannot be written down is refused.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use base::time;
use rpc::grpc::{Call, Code, Status};
use serde_json::json;
use sys::space;

use super::callers::OperatorCaller;
use super::files::LogFile;
use base::sync::lock;

/// Below the mount point of the state disk: one JSON object a line, the last call last.
const FILE: &str = "firstlight/operator-calls";
/// A longer file becomes the older one.
const MAX: u64 = 4 << 20;
/// Bytes that are allocated for the file, with its last entry: on a full disk, operators must still be able to repair the node.
const RESERVED: i64 = (MAX as i64) + (64 << 10);

/// The file of calls, and the one before it with the ending `.1`.
pub struct CallRecord {
    path: PathBuf,
    writing: Mutex<()>,
}

impl CallRecord {
    /// Uses the state disk that is mounted at `root`, and reserves the space of the file.
    pub fn of(root: &Path) -> CallRecord {
        let record = CallRecord {
            path: root.join(FILE),
            writing: Mutex::new(()),
        };
        if let Err(error) = record.open() {
            log::warn!(
                "cannot open the record of operators' calls {}: {error}",
                record.path.display()
            );
        }
        record
    }

    /// Returns the files, for a reader.
    pub fn files(&self) -> LogFile {
        LogFile {
            present: self.path.clone(),
            is_older: |name| name == "operator-calls.1",
        }
    }

    /// Writes a call down, durably, and into the log.
    pub fn add(&self, call: &Call, operator: &OperatorCaller, what: &str) -> Result<(), Status> {
        let from = call.peer().map(|peer| peer.ip().to_string());
        let from = from.unwrap_or_default();
        log::info!(
            "operator {:?} ({}) from {from}: {what}",
            operator.name,
            operator.key
        );
        let entry = json!({
            "time": time::seconds(SystemTime::now()),
            "operator": operator.name,
            "key": operator.key,
            "from": from,
            "call": what,
        });
        self.append(&format!("{entry}\n")).map_err(|error| {
            let path = self.path.display();
            log::warn!("cannot record an operator's call in {path}: {error}");
            Status::new(
                Code::Internal,
                format!("the node refuses the call, because it cannot record it: {path}: {error}"),
            )
        })
    }

    fn append(&self, line: &str) -> io::Result<()> {
        let _alone = lock(&self.writing);
        let mut file = self.open()?;
        file.write_all(line.as_bytes())?;
        file.sync_all()
    }

    fn open(&self) -> io::Result<File> {
        match fs::metadata(&self.path) {
            Ok(there) if there.len() > MAX => {
                fs::rename(&self.path, self.path.with_extension("1"))?
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.path.parent().map_or(Ok(()), fs::create_dir_all)?;
            }
            _ => {}
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.path)?;
        // without it the file can be written until the disk is full
        let _ = space::reserve(&file, RESERVED);
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_record_becomes_the_older_one_and_no_line_is_lost_between_them() {
        let root = tempfile::tempdir().unwrap();
        let record = CallRecord::of(root.path());
        let line = format!("{}\n", "x".repeat(1 << 20));
        for _ in 0..4 {
            record.append(&line).unwrap();
        }
        record.append("last\n").unwrap();
        let older = fs::metadata(record.path.with_extension("1")).unwrap();
        assert_eq!(older.len(), 4 * line.len() as u64);
        assert_eq!(fs::read_to_string(&record.path).unwrap(), "last\n");
    }

    /// The disk is a file system in memory, in mounts of the test's own.
    #[test]
    fn a_call_is_written_down_on_a_full_disk() {
        const DISK: &str = "FIRSTLIGHT_TEST_DISK";
        if let Some(disk) = std::env::var_os(DISK) {
            let record = CallRecord::of(Path::new(&disk));
            let mut other = File::create(Path::new(&disk).join("other")).unwrap();
            let part = [7; 4096];
            while other.write_all(&part).is_ok() {}
            let full = record.append("a call\n");
            let others = fs::write(Path::new(&disk).join("new"), b"a file");
            assert_eq!(others.unwrap_err().kind(), ErrorKind::StorageFull);
            return full.unwrap();
        }
        let root = tempfile::tempdir().unwrap();
        let status = std::process::Command::new("unshare")
            .args(["--map-root-user", "--mount", "sh", "-ec"])
            .arg("mount -t tmpfs -o size=8m none \"$1\"; shift; exec \"$@\"")
            .arg("sh")
            .arg(root.path())
            .arg(std::env::current_exe().unwrap())
            .arg("a_call_is_written_down_on_a_full_disk")
            .env(DISK, root.path())
            .status();
        assert!(status.unwrap().success());
    }

    #[test]
    fn a_record_that_cannot_be_written_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("firstlight"), b"a file").unwrap();
        assert!(CallRecord::of(root.path()).append("x\n").is_err());
    }
}
