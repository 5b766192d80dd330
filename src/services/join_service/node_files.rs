//! The operator's files for new nodes: a directory with a file for each, usually the Secret
//! `join-node-files`, which Kubernetes mounts there.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::cluster::refusal::TicketRefusal;
use kubernetes::node_files::{self, MAX_BYTES, MAX_FILES};
use proto::join::ControlPlaneCertOrKey;

/// The directory where the Secret is mounted.
pub const DIRECTORY: &str = "/var/node-files";
/// The link to the directory of the files in a mounted Secret. The kubelet replaces it when the Secret
/// changes (Kubernetes, AtomicWriter).
const PRESENT: &str = "..data";

/// The directory of the files. It is read for each ticket, because the operator may change them.
pub struct NodeFiles(PathBuf);

impl NodeFiles {
    /// Uses this directory, which need not exist.
    pub fn new(directory: &Path) -> NodeFiles {
        NodeFiles(directory.into())
    }

    /// Reads the files, in the order of their names. A node must not join without a file that it
    /// needs, so a file that cannot be sent refuses the ticket.
    pub fn read(&self) -> Result<Vec<ControlPlaneCertOrKey>, TicketRefusal> {
        let refuse = |error: &dyn std::fmt::Display| {
            let details = format!("cannot send the files in {}: {error}", self.0.display());
            let message = "the operator's files for new nodes cannot be sent: see the log of the join service";
            TicketRefusal::missing("node-files", message).with_details(details)
        };
        let files = self.list().map_err(|error| refuse(&error))?;
        node_files::check(files.iter().map(|file| (&*file.name, file.data.len())))
            .map_err(|error| refuse(&error))?;
        Ok(files)
    }

    fn list(&self) -> io::Result<Vec<ControlPlaneCertOrKey>> {
        // all files are those of one version of the Secret
        let present = match fs::canonicalize(self.0.join(PRESENT)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.0.clone(),
            present => present?,
        };
        let entries = match fs::read_dir(present) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut files = Vec::new();
        // one file and one byte more than are sent show that there are too many
        let mut room = MAX_BYTES as u64 + 1;
        for entry in entries.take(MAX_FILES + 1) {
            let path = entry?.path();
            let mut data = Zeroizing::new(Vec::new());
            room -= File::open(&path)?.take(room).read_to_end(&mut data)? as u64;
            let name = path.file_name().unwrap_or_default();
            files.push(ControlPlaneCertOrKey {
                name: name.to_string_lossy().into_owned(),
                data: std::mem::take(&mut *data),
            });
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn read(directory: &Path) -> Result<Vec<(String, Vec<u8>)>, TicketRefusal> {
        let files = NodeFiles::new(directory).read()?;
        let pair = |file: &ControlPlaneCertOrKey| (file.name.clone(), file.data.clone());
        Ok(files.iter().map(pair).collect())
    }

    #[test]
    fn a_mounted_secret_is_read_as_it_is_at_one_moment() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(read(&path.join("none")), Ok(vec![]));
        assert_eq!(read(path), Ok(vec![]));
        // as the kubelet's AtomicWriter lays it out
        for (version, content) in [("..1", "old"), ("..2", "new")] {
            fs::create_dir(path.join(version)).unwrap();
            fs::write(path.join(version).join("token"), content).unwrap();
            fs::write(path.join(version).join(".dockerconfigjson"), "{}").unwrap();
        }
        symlink("..2", path.join(PRESENT)).unwrap();
        symlink("..data/token", path.join("token")).unwrap();
        let expected = vec![
            (".dockerconfigjson".to_owned(), b"{}".to_vec()),
            ("token".to_owned(), b"new".to_vec()),
        ];
        assert_eq!(read(path), Ok(expected));
    }

    #[test]
    fn files_that_cannot_be_sent_refuse_the_ticket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        fs::write(path.join("large"), vec![0; MAX_BYTES]).unwrap();
        let refused = read(path).unwrap_err();
        assert_eq!(refused.reason, "node-files");
        assert!(
            refused.details.contains("bytes with their names"),
            "{refused}"
        );
        for name in ["a", "b"] {
            fs::copy(path.join("large"), path.join(name)).unwrap();
        }
        // the service holds no more of all three than shows that they are too large
        let refused = read(path).unwrap_err();
        let held = MAX_BYTES + 1 + "large".len() + "a".len() + "b".len();
        let expected = format!("{held} bytes with their names");
        assert!(refused.details.contains(&expected), "{refused}");
        for name in ["a", "b", "large"] {
            fs::remove_file(path.join(name)).unwrap();
        }
        fs::create_dir(path.join("folder")).unwrap();
        let refused = read(path).unwrap_err();
        assert!(refused.details.contains("directory"), "{refused}");
        fs::remove_dir(path.join("folder")).unwrap();
        for n in 0..=MAX_FILES {
            fs::write(path.join(n.to_string()), "x").unwrap();
        }
        let refused = read(path).unwrap_err();
        assert!(refused.details.contains("65 files"), "{refused}");
    }
}
