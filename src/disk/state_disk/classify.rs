//! What is on the disk, and what to do about it. Only a blank disk, one of ours that belongs to no cluster, or one whose format
//! the old system never finished is ever formatted; everything else that does not fit is refused with what is wrong.

use std::fs::File;
use std::path::Path;

use super::Error;
use crate::device_mapper::may_hold_data;
use crate::luks::{Header, Integrity, Probe, State, probe};

/// What a disk is to us.
pub enum Disk {
    /// To be formatted, and why.
    New(&'static str),
    /// The old system's format was cut off before it marked the disk. To be marked, and then formatted.
    CutOff(Box<Header>),
    /// The disk of a node that has been part of a cluster.
    Initialised(Box<Header>),
}

/// Looks at the disk behind `device`; `path` is for the errors.
pub fn classify(device: &mut File, path: &Path) -> Result<Disk, Error> {
    match probe(device).map_err(|error| Error::Luks(path.into(), error))? {
        Probe::Blank => Ok(Disk::New("blank")),
        Probe::Unfinished => Ok(Disk::New("a format of it was cut short")),
        Probe::Unknown(what) => Err(Error::Foreign(path.into(), what)),
        // where the old system lost power while it formatted: no key opens it, so there is nothing to lose
        Probe::Luks(header) if header.is_keyless() => {
            Ok(Disk::New("formatted before, but never given a key"))
        }
        Probe::Luks(header) => {
            check(&header, path)?;
            match header.state() {
                State::Initialised => Ok(Disk::Initialised(Box::new(header))),
                State::Uninitialised => {
                    Ok(Disk::New("formatted before, but never part of a cluster"))
                }
                State::Unmarked => unmarked(device, path, header),
            }
        }
    }
}

/// A disk with a keyslot and without a token: a format of the old system that was cut off while it wiped the disk; or a volume of
/// its storage driver, which is made in the same way and never gets a token. Both keys are unknown here, so what was written tells.
fn unmarked(device: &mut File, path: &Path, header: Header) -> Result<Disk, Error> {
    if !header.is_unmarked_format() {
        return Err(Error::Unmarked(
            path.into(),
            "its header is not as a format leaves it".into(),
        ));
    }
    let geometry = header
        .geometry()
        .map_err(|error| Error::Luks(path.into(), error))?;
    match may_hold_data(device, geometry.data_offset) {
        Ok(None) => Ok(Disk::CutOff(Box::new(header))),
        Ok(Some(why)) => Err(Error::Unmarked(path.into(), why)),
        Err(error) => Err(Error::Io("reading", path.into(), error)),
    }
}

/// The verified header of a disk that must be one of ours.
pub fn ours(device: &mut File, path: &Path) -> Result<Header, Error> {
    match probe(device).map_err(|error| Error::Luks(path.into(), error))? {
        Probe::Luks(header) => check(&header, path).map(|()| header),
        Probe::Blank | Probe::Unfinished => {
            Err(Error::Foreign(path.into(), "no LUKS2 header".into()))
        }
        Probe::Unknown(what) => Err(Error::Foreign(path.into(), what)),
    }
}

fn check(header: &Header, path: &Path) -> Result<(), Error> {
    header
        .check_ours(Integrity::Required)
        .map_err(|error| Error::Luks(path.into(), error))
}
