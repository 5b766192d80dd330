//! Why an update is not written.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ssh::signature;

use super::version::{ImageVersion, NAMESPACE};

/// Why an update is not written, or not completely.
#[derive(Debug)]
pub enum Error {
    /// This machine's image has no slots.
    NoSlots,
    /// The disk lacks a partition.
    Partition(String),
    /// The image accepts no updates.
    NoKey,
    /// The signature is refused.
    Signature(signature::Error),
    /// The list is wrong.
    List(String),
    /// The version is not newer than the running one.
    Older(ImageVersion, ImageVersion),
    /// The running version is not kept yet.
    OnTrial(ImageVersion),
    /// A part is larger than its place.
    Room(&'static str, u64, u64),
    /// The kernel image does not fit to the list or to this machine.
    Image(String),
    /// The policy accepts no machine with the new version: the registers that differ.
    Policy(Vec<String>),
    /// A file of the release cannot be fetched.
    Download(String, String),
    /// The policy of the join services cannot be read.
    NoPolicy(String),
    /// A part is damaged or ends too early.
    Content(&'static str, String),
    /// The EFI system partition or the image cannot be read or changed.
    Disk(image::Error),
    /// A file cannot be read or written.
    Io(PathBuf, io::Error),
}

impl Error {
    /// Names the file.
    pub(super) fn io(path: &Path, error: io::Error) -> Error {
        Error::Io(path.into(), error)
    }
}

impl From<image::Error> for Error {
    fn from(error: image::Error) -> Error {
        Error::Disk(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoSlots => f.write_str(
                "this machine does not run an image with slots, as `make mkosi` builds: replace the machine instead",
            ),
            Error::Partition(name) => write!(f, "the disk of the image has no partition {name}"),
            Error::NoKey => f.write_str(
                "this image accepts no updates: it has no update-key= in its settings",
            ),
            Error::Signature(error) => write!(
                f,
                "the signature of the update's list is refused: {error}. Sign it with a key of update-key= in the running image: \
                 ssh-keygen -Y sign -n {NAMESPACE}"
            ),
            Error::List(why) => write!(f, "the list of the update: {why}"),
            Error::Older(offered, running) => write!(
                f,
                "{offered} is not newer than the running version {running}; to go back, build the old content with a newer VERSION"
            ),
            Error::OnTrial(running) => write!(
                f,
                "the running version {running} is still on trial, and the update would overwrite the version to go back to: wait until the \
                 trial ends"
            ),
            Error::Room(what, size, room) => write!(
                f,
                "the {what} has {size} bytes, but the slot has room for {room}: replace the machine by one with the new image"
            ),
            Error::Image(why) => write!(f, "the kernel image of the update: {why}"),
            Error::Policy(differences) => write!(
                f,
                "the join services would refuse this machine after the update, so nothing was written: add the new image to the policy \
                 first (firstlight rollout does this). {}",
                differences.join("; ")
            ),
            Error::Content(part, why) => write!(
                f,
                "{part} was damaged on the way: {why}. The machine boots the running version; run the update again"
            ),
            Error::Download(url, why) => write!(f, "{url}: {why}"),
            Error::NoPolicy(why) => write!(
                f,
                "the policy of the join services cannot be read, so this node may be refused after the update; nothing was written: {why}. \
                 If the node has no right to read it, firstlight apply gives it the right"
            ),
            Error::Disk(error) => error.fmt(f),
            Error::Io(path, error) => write!(f, "cannot access {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for Error {}
