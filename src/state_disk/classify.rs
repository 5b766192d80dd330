//! What is on the disk, and what to do about it. Only a blank disk, or one of ours that belongs to no cluster, is ever
//! formatted; everything else that does not fit is refused with what is wrong.

use std::fs::File;
use std::path::Path;

use super::Error;
use crate::luks::{Header, Integrity, Probe, State, probe};

/// What a disk is to us.
pub enum Disk {
    /// To be formatted, and why.
    New(&'static str),
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
        Probe::Luks(header) if header.is_keyless() => Ok(Disk::New("formatted before, but never given a key")),
        Probe::Luks(header) => {
            check(&header, path)?;
            match header.state() {
                State::Initialised => Ok(Disk::Initialised(Box::new(header))),
                State::Uninitialised => Ok(Disk::New("formatted before, but never part of a cluster")),
                // a volume of the cluster's storage driver looks like this
                State::Unmarked => {
                    Err(Error::Foreign(path.into(), "a LUKS2 device without the mark of a state disk".into()))
                }
            }
        }
    }
}

/// The verified header of a disk that must be one of ours.
pub fn ours(device: &mut File, path: &Path) -> Result<Header, Error> {
    match probe(device).map_err(|error| Error::Luks(path.into(), error))? {
        Probe::Luks(header) => check(&header, path).map(|()| header),
        Probe::Blank | Probe::Unfinished => Err(Error::Foreign(path.into(), "no LUKS2 header".into())),
        Probe::Unknown(what) => Err(Error::Foreign(path.into(), what)),
    }
}

fn check(header: &Header, path: &Path) -> Result<(), Error> {
    header.check_ours(Integrity::Required).map_err(|error| Error::Luks(path.into(), error))
}
