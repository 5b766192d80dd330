//! Brings a newer version of the image to this machine: into the slot that does not run. docs/images/update.md
//!
//! ```text
//!  signature ─► version ─► kernel image: digest, registers against the policy ─► no boot from the other slot
//!     ─► root file system and hashes, with their digests ─► kernel image into a file that does not boot ─► name of the file
//! ```
//!
//! Nothing is written before the arrow to the other slot. From then on, every state of the disk boots the running version, until the
//! last step, one write, adds the new one. The same call may follow after a failure at any step.

mod error;
mod place;
mod registers;
mod release;
pub mod remote;
pub mod trial;
mod version;

#[cfg(test)]
mod power_cuts;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;

use image::Image;
use image::slots::{Slots, Writable};
use ssh::key::PublicKey;
use verifier::Policy;

pub use error::Error;
use place::open;
pub use place::{ImageDisk, Words};
pub use release::{MAX_LIST, Part, SignedRelease};
pub use version::{ImageVersion, NAMESPACE};

/// How often systemd-boot tries a new version before it takes the old one.
const TRIES: u32 = 3;

/// An update that somebody offers to this machine.
pub struct Offer<'a> {
    /// The list of the parts.
    pub list: &'a [u8],
    /// Its signature, as ssh-keygen writes it.
    pub signature: &'a str,
    /// The parts one after the other: unified kernel image, root file system, hashes.
    pub content: &'a mut dyn Read,
    /// The policy of the join services; `None` does not compare the registers.
    pub policy: Option<&'a Policy>,
}

/// Writes the update. Returns its version, which the next boot tries.
pub fn run(
    place: &ImageDisk,
    keys: &[PublicKey],
    offer: Offer<'_>,
    say: &mut dyn FnMut(&str),
) -> Result<ImageVersion, Error> {
    run_on(&open, place, keys, offer, say)
}

/// `open` opens a partition.
fn run_on<D: Writable>(
    open: &dyn Fn(&Path) -> Result<D, Error>,
    place: &ImageDisk,
    keys: &[PublicKey],
    offer: Offer<'_>,
    say: &mut dyn FnMut(&str),
) -> Result<ImageVersion, Error> {
    let release = SignedRelease::verify(offer.list, offer.signature, keys)?;
    let running = &place.running.version;
    if !release.version.is_newer_than(running) {
        return Err(Error::Older(release.version, running.clone()));
    }
    let mut esp = open(&place.esp.0)?;
    let mut slots = Slots::read(&mut esp, place.esp.1)?;
    let (old, new) = (running.to_string(), release.version.to_string());
    match slots.of(&old) {
        Some(slot) if slot.tries.is_some() => return Err(Error::OnTrial(running.clone())),
        _ => {}
    }
    check_room(place, &release, slots.room_beside(&old))?;
    say(&format!("{running} -> {new}: the signature is right"));

    let uki = release.image.read_all(offer.content)?;
    check_words(place, &release, &uki)?;
    let disk = File::open(&place.disk).map_err(|error| Error::io(&place.disk, error))?;
    let booted = Image::added(disk, &uki)?;
    if let Some(policy) = offer.policy {
        registers::check(&booted, policy)?;
        say("the policy accepts the registers of the new version");
    }
    drop(booted);

    slots.keep_only(&mut esp, &old)?;
    say("writing the root file system");
    let mut write = |path: &Path, part| write(&mut open(path)?, path, part, offer.content);
    write(&place.root, &release.root)?;
    write(&place.hashes, &release.hashes)?;
    slots.add(&mut esp, &new, &old, &uki, TRIES)?;
    say(&format!("written: the next boot tries {new}"));
    Ok(release.version)
}

fn check_room(place: &ImageDisk, release: &SignedRelease, for_image: u64) -> Result<(), Error> {
    let has_room = |what: &'static str, part: &Part, room: u64| {
        if part.size <= room {
            Ok(())
        } else {
            Err(Error::Room(what, part.size, room))
        }
    };
    has_room("kernel image", &release.image, for_image)?;
    has_room("root file system", &release.root, size(&place.root)?)?;
    has_room("hashes", &release.hashes, size(&place.hashes)?)
}

/// Checks that list and image are of one version, and that this version is found in a slot of its own.
fn check_words(place: &ImageDisk, release: &SignedRelease, uki: &[u8]) -> Result<(), Error> {
    let words = place::Words::of(&Image::command_line(uki)?);
    let words = words.filter(|it| it.version == release.version);
    let words = words.ok_or_else(|| {
        Error::Image(format!(
            "its kernel command line does not name the version {}",
            release.version
        ))
    })?;
    if words.root != place.running.root {
        Ok(())
    } else {
        Err(Error::Image(format!(
            "it finds its root file system by the same {} as the running version: build it with another VERSION",
            words.root
        )))
    }
}

/// Writes a part of the release to a partition.
fn write(
    partition: &mut impl Writable,
    path: &Path,
    part: &Part,
    content: &mut dyn Read,
) -> Result<(), Error> {
    part.read(content, &mut |bytes| {
        partition
            .write_all(bytes)
            .map_err(|error| Error::io(path, error))
    })?;
    partition.sync().map_err(|error| Error::io(path, error))
}

fn size(path: &Path) -> Result<u64, Error> {
    // the size of a device is not in its metadata
    let sought = File::open(path).and_then(|mut file| file.seek(io::SeekFrom::End(0)));
    sought.map_err(|error| Error::io(path, error))
}
