//! The record of operators' calls. A call that cannot be written down is refused.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use booted_base::time;
use rpc::grpc::{Call, Code, Status};
use serde_json::json;

use super::callers::Operator;
use base::sync::lock;

/// Below the mount point of the state disk: one JSON object a line, the last call last.
const FILE: &str = "firstlight/operator-calls";
/// A longer file becomes the older one.
const MAX: u64 = 4 << 20;

/// The file of calls, and the one before it with the ending `.1`.
pub struct CallRecord {
    path: PathBuf,
    writing: Mutex<()>,
}

impl CallRecord {
    /// Uses the state disk that is mounted at `root`.
    pub fn of(root: &Path) -> CallRecord {
        CallRecord {
            path: root.join(FILE),
            writing: Mutex::new(()),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a call down, durably, and into the log.
    pub fn add(&self, call: &Call, operator: &Operator, what: &str) -> Result<(), Status> {
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
            log::warn!("{path}: {error}");
            Status::new(
                Code::Internal,
                format!("the node cannot write the call down, so it does nothing: {path}: {error}"),
            )
        })
    }

    fn append(&self, line: &str) -> io::Result<()> {
        let _alone = lock(&self.writing);
        match fs::metadata(&self.path) {
            Ok(there) if there.len() > MAX => {
                fs::rename(&self.path, self.path.with_extension("1"))?
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.path.parent().map_or(Ok(()), fs::create_dir_all)?;
            }
            _ => {}
        }
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.path)?;
        file.write_all(line.as_bytes())?;
        file.sync_all()
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
        let older = fs::metadata(record.path().with_extension("1")).unwrap();
        assert_eq!(older.len(), 4 * line.len() as u64);
        assert_eq!(fs::read_to_string(record.path()).unwrap(), "last\n");
    }

    #[test]
    fn a_record_that_cannot_be_written_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("firstlight"), b"a file").unwrap();
        assert!(CallRecord::of(root.path()).append("x\n").is_err());
    }
}
