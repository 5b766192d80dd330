//! What is on the disk, and what to do about it. Only a blank disk, or one of ours that belongs to no cluster, is ever
//! formatted; everything else that does not fit is refused with what is wrong.

use std::fs::File;
use std::path::Path;

use super::Error;
use crate::luks::{Header, Probe, probe};

/// What a disk is to us.
pub enum Disk {
    /// To be formatted, and why.
    New(&'static str),
    /// The disk of a node that has been part of a cluster.
    Initialized(Box<Header>),
}

/// Looks at the disk behind `device`; `path` is for the errors.
pub fn classify(device: &mut File, path: &Path) -> Result<Disk, Error> {
    match probed(device, path)? {
        None => Ok(Disk::New("the disk is blank")),
        Some(header) if header.initialized() => {
            header.check_ours().map_err(|error| Error::Luks(path.into(), error))?;
            Ok(Disk::Initialized(Box::new(header)))
        }
        Some(header) => {
            if header.was_made_by_us() {
                Ok(Disk::New("the disk was formatted before, and never became part of a cluster"))
            } else {
                Err(Error::Foreign(path.into(), "a LUKS2 device without the mark of a state disk".into()))
            }
        }
    }
}

/// The verified header of a disk that must be one of ours.
pub fn ours(device: &mut File, path: &Path) -> Result<Header, Error> {
    let header = probed(device, path)?.ok_or_else(|| Error::Foreign(path.into(), "nothing at all".into()))?;
    header.check_ours().map_err(|error| Error::Luks(path.into(), error))?;
    Ok(header)
}

fn probed(device: &mut File, path: &Path) -> Result<Option<Header>, Error> {
    match probe(device).map_err(|error| Error::Luks(path.into(), error))? {
        Probe::Blank => Ok(None),
        Probe::Luks(header) => Ok(Some(header)),
        Probe::Unknown(what) => Err(Error::Foreign(path.into(), what)),
    }
}
