//! Determines what is on the disk and what to do with it. Three kinds of disk are formatted: a
//! blank disk, a state disk that belongs to no cluster, and a disk whose format Constellation did
//! not complete. Any other disk that is not a state disk is refused with the reason.

use std::fs::File;
use std::io;
use std::path::Path;

use super::{Error, filesystem};
use crate::device_mapper::may_hold_data;
use crate::luks::{DATA_OFFSET, DiskState, Header, Integrity, Probe, probe};
use sys::block;

/// The kind of a disk.
pub enum DiskKind {
    /// A disk to be formatted, and the reason.
    New(&'static str),
    /// A disk whose format by Constellation was interrupted before it got its token: to be marked,
    /// and then formatted.
    Interrupted(Box<Header>),
    /// The disk of a node that has been a member of a cluster.
    Initialized(Box<Header>),
}

/// The minimum size of a state disk in bytes: header, superblock, journal and tags, and a file system.
const MIN_SIZE: u64 = DATA_OFFSET + (1 << 20) + filesystem::MIN_SIZE;

/// Classifies the disk that is open as `device`; `path` appears in errors. Refuses a disk on which no boot
/// can succeed before it is written, and before the node asks for its key.
pub fn classify(device: &mut File, path: &Path) -> Result<DiskKind, Error> {
    let disk = classify_content(device, path)?;
    let is_new = !matches!(disk, DiskKind::Initialized(_));
    let why = match is_new && block::size(device).is_ok_and(|size| size < MIN_SIZE) {
        _ if block::is_read_only(device) => "the disk is read-only: attach it for writing",
        true => "the disk is smaller than 49 MiB, the minimum of a state disk: attach a larger one",
        false => return Ok(disk),
    };
    Err(Error::Io("use", path.into(), io::Error::other(why)))
}

fn classify_content(device: &mut File, path: &Path) -> Result<DiskKind, Error> {
    match probe(device).map_err(|error| Error::Luks(path.into(), error))? {
        Probe::Blank => Ok(DiskKind::New("blank")),
        Probe::Unfinished => Ok(DiskKind::New("an earlier format was interrupted")),
        Probe::Unknown(what) => Err(Error::Foreign(path.into(), what)),
        // the power failed while Constellation formatted the disk: no key opens it, so no data can
        // be lost
        Probe::Luks(header) if header.is_keyless() => {
            Ok(DiskKind::New("formatted before, but without a keyslot"))
        }
        Probe::Luks(header) => {
            header
                .check_ours(Integrity::Required)
                .map_err(|error| Error::Luks(path.into(), error))?;
            match header.state() {
                DiskState::Initialized => {
                    if !header.is_marked() {
                        log::warn!(
                            "{0}: the header names a cluster, but token 0 says that the disk is new: the host or another program changed \
                             it. The disk keeps its content and waits for its key. To discard the content, find the token \
                             firstlight-cluster with `cryptsetup luksDump {0}`, remove it with `cryptsetup token remove --token-id NUMBER \
                             {0}`, and boot again",
                            path.display()
                        );
                    }
                    Ok(DiskKind::Initialized(Box::new(header)))
                }
                DiskState::Uninitialized => Ok(DiskKind::New(
                    "formatted before, but never part of a cluster",
                )),
                DiskState::Unmarked => unmarked(device, path, header),
            }
        }
    }
}

/// Classifies a disk with a keyslot and without a token. It is either a format by Constellation
/// that was interrupted while it wiped the disk, or a volume of Constellation's storage driver,
/// which is made in the same way and never gets a token. Neither key is known here, so the decision
/// depends on what was written to the disk.
fn unmarked(device: &mut File, path: &Path, header: Header) -> Result<DiskKind, Error> {
    if !header.is_unmarked_format() {
        return Err(Error::Unmarked(
            path.into(),
            "its header differs from that of a new state disk".into(),
        ));
    }
    match may_hold_data(device, DATA_OFFSET) {
        Ok(None) => Ok(DiskKind::Interrupted(Box::new(header))),
        Ok(Some(why)) => Err(Error::Unmarked(path.into(), why)),
        Err(error) => Err(Error::Io("read", path.into(), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_too_small_is_refused_before_it_is_written() {
        for (mib, fits) in [
            (18, false),
            (24, false),
            (32, false),
            (48, false),
            (49, true),
        ] {
            let mut file = tempfile::tempfile().unwrap();
            file.set_len(mib << 20).unwrap();
            match (classify(&mut file, Path::new("/dev/x")), fits) {
                (Ok(DiskKind::New("blank")), true) => {}
                (Err(why), false) => {
                    let expected = "cannot use /dev/x: the disk is smaller than 49 MiB";
                    assert!(why.to_string().starts_with(expected), "{why}");
                }
                (other, _) => panic!("{mib} MiB: {:?}", other.map(drop)),
            }
        }
    }

    #[test]
    fn a_small_disk_with_other_content_is_refused_for_its_content() {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(18 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"XFSB", 0).unwrap();
        let why = classify(&mut file, Path::new("/dev/x"))
            .err()
            .unwrap()
            .to_string();
        assert!(
            why.contains("holds an XFS file system. Nothing was written"),
            "{why}"
        );
    }
}
