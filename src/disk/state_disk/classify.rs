//! Determines what is on the disk and what to do with it. Three kinds of disk are formatted: a
//! blank disk, a state disk that belongs to no cluster, and a disk whose format Constellation did
//! not complete. Any other disk that is not a state disk is refused with the reason.

use std::fs::File;
use std::path::Path;

use super::Error;
use crate::device_mapper::may_hold_data;
use crate::luks::{DATA_OFFSET, DiskState, Header, Integrity, Probe, probe};

/// The kind of a disk.
pub enum Disk {
    /// A disk to be formatted, and the reason.
    New(&'static str),
    /// A disk whose format by Constellation was interrupted before it got its token: to be marked,
    /// and then formatted.
    Interrupted(Box<Header>),
    /// The disk of a node that has been a member of a cluster.
    Initialized(Box<Header>),
}

/// Classifies the disk that is open as `device`; `path` appears in errors.
pub fn classify(device: &mut File, path: &Path) -> Result<Disk, Error> {
    match probe(device).map_err(|error| Error::Luks(path.into(), error))? {
        Probe::Blank => Ok(Disk::New("blank")),
        Probe::Unfinished => Ok(Disk::New("an earlier format was interrupted")),
        Probe::Unknown(what) => Err(Error::Foreign(path.into(), what)),
        // the power failed while Constellation formatted the disk: no key opens it, so no data can
        // be lost
        Probe::Luks(header) if header.is_keyless() => {
            Ok(Disk::New("formatted before, but without a keyslot"))
        }
        Probe::Luks(header) => {
            header
                .check_ours(Integrity::Required)
                .map_err(|error| Error::Luks(path.into(), error))?;
            match header.state() {
                DiskState::Initialized => {
                    if !header.is_marked() {
                        log::warn!(
                            "{0}: the header names a cluster, but token 0 does not mark the disk as a member's: the host or another \
                             program changed it. The disk is not formatted, and waits for its key. To give its content \
                             up, find the token firstlight-cluster with `cryptsetup luksDump {0}`, remove it with `cryptsetup token remove \
                             --token-id NUMBER {0}`, and boot again",
                            path.display()
                        );
                    }
                    Ok(Disk::Initialized(Box::new(header)))
                }
                DiskState::Uninitialized => {
                    Ok(Disk::New("formatted before, but never part of a cluster"))
                }
                DiskState::Unmarked => unmarked(device, path, header),
            }
        }
    }
}

/// Classifies a disk with a keyslot and without a token. It is either a format by Constellation
/// that was interrupted while it wiped the disk, or a volume of Constellation's storage driver,
/// which is made in the same way and never gets a token. Neither key is known here, so the decision
/// depends on what was written to the disk.
fn unmarked(device: &mut File, path: &Path, header: Header) -> Result<Disk, Error> {
    if !header.is_unmarked_format() {
        return Err(Error::Unmarked(
            path.into(),
            "its header is not what a format writes".into(),
        ));
    }
    match may_hold_data(device, DATA_OFFSET) {
        Ok(None) => Ok(Disk::Interrupted(Box::new(header))),
        Ok(Some(why)) => Err(Error::Unmarked(path.into(), why)),
        Err(error) => Err(Error::Io("reading", path.into(), error)),
    }
}
