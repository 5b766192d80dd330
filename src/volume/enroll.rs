//! Enrolment: gives a LUKS2 volume a keyslot whose key the key broker has.
//!
//! ```text
//! --format     ask for the key of a new UUID ─► volume key ─► format, recovery key in keyslot 0 ─┐
//! --key-file   ask for the key of the volume's UUID ─► volume key from the checked copy ─────────┴► add keyslot ─► add token ─► settings
//! ```
//!
//! The keyslot is made for the volume key that this program has made, or has read from the checked copy of the header: a host can
//! show the next program another header, whose volume key it knows.
//!
//! Nothing is written to the device before the key has arrived. All checks come before the request, because the broker then records the
//! disk. A failure or a signal removes the new keyslot of a present volume. After a power failure the same command enrolls a present
//! volume: it skips the completed steps. A new volume is enrolled as a present one, with its recovery key, which is shown before it is
//! used.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base::crypto::Secret;
use base::stop::Stop;
use base::uuid::Uuid;
use zeroize::Zeroizing;

use super::broker;
use super::cryptsetup::{Luks, VolumeKey, keyslots_of};
use super::error::Error;
use super::recovery_key;
use super::settings::{self, Folders, Volume};

/// The maximum size of a key file. cryptsetup accepts larger ones, but a pipe must hold it.
pub const MAX_KEY: u64 = 32 << 10;

/// The request of the operator.
pub struct Enrollment {
    /// The name of the volume in crypttab.
    pub name: String,
    /// The settings, without the UUID.
    pub volume: Volume,
    /// Whether a new volume is made.
    pub format: bool,
    /// A file with a key that opens the present volume; `-` is the standard input.
    pub key_file: Option<PathBuf>,
    /// The folders of this program.
    pub folders: Folders,
}

/// The result of an enrolment.
pub struct Enrolled {
    /// The LUKS UUID.
    pub uuid: Uuid,
    /// Our keyslot.
    pub keyslot: u32,
}

impl Enrollment {
    /// Runs the steps of the module's picture. `tell` shows the recovery key of a new volume to the
    /// operator.
    pub fn run(
        mut self,
        stop: &Stop,
        tell: impl FnOnce(&str) -> io::Result<()>,
    ) -> Result<Enrolled, Error> {
        settings::check_name(&self.name)?;
        let device = self.volume.device.clone();
        let device = device.ok_or_else(|| Error::Setting("--device is missing".into()))?;
        let luks = Luks::new(&device, stop);
        let before = Volume::find(&self.folders.volumes, &self.name)?;
        let uuid = self.uuid(&luks, before.as_ref())?;
        let own = self.key_file.as_deref().map(read_key).transpose()?;
        let header = Removed(self.temporary("header"));
        let copy = if self.format {
            None
        } else {
            Some(luks.copy(&header.0, &uuid)?)
        };
        if let Some(copy) = &copy {
            check_key(copy, &device, own.as_deref())?;
        }
        self.volume.uuid = Some(uuid.clone());
        log::info!("asking the key broker for the key of {uuid}");
        let key = broker::key(&self.volume, Box::new(|_| Ok(())), stop)?;
        let mut added = None;
        let keyslot = match &copy {
            None => self.make(&luks, &uuid, &key, tell)?,
            Some(copy) => match (copy.keyslot(key.expose())?, &own) {
                // the command was run before
                (Some(keyslot), _) => keyslot,
                (None, Some(own)) => {
                    let volume_key = copy.volume_key(own, &self.temporary("key"))?;
                    added = Some(Added::new(&device, &key));
                    add(&luks, &volume_key, &key)?
                }
                (None, None) => return Err(key_file_is_missing(&device)),
            },
        };
        luks.mark(keyslot)?;
        self.keep_device(&device);
        self.volume.keyslot = Some(keyslot);
        // how long this command waits says nothing about a boot
        self.volume.timeout = before.and_then(|before| before.timeout);
        self.volume.write(&self.folders.volumes, &self.name)?;
        added.into_iter().for_each(Added::keep);
        Ok(Enrolled { uuid, keyslot })
    }

    /// Makes the new volume, and returns the keyslot with the broker's key.
    fn make(
        &self,
        luks: &Luks,
        uuid: &Uuid,
        key: &Secret,
        tell: impl FnOnce(&str) -> io::Result<()>,
    ) -> Result<u32, Error> {
        let recovery = recovery_key::new();
        let volume_key = VolumeKey::new(&self.temporary("key"))?;
        // the device may have been used while the broker was asked
        self.check_blank(luks)?;
        // before the volume has this key, so that no failure leaves a key that nobody knows
        tell(&recovery).map_err(Error::Output)?;
        luks.format(uuid, &volume_key, recovery.as_bytes())?;
        // the header has it from here on
        drop(Removed(self.planned()));
        add(luks, &volume_key, key)
    }

    /// Returns the path of a file in memory. Names of volumes do not begin with a dot.
    fn temporary(&self, what: &str) -> PathBuf {
        self.folders.headers.join(format!(".{}.{what}", self.name))
    }

    /// Returns the file with the UUID of a new volume that is not made yet.
    fn planned(&self) -> PathBuf {
        self.folders.volumes.join(format!(".{}.uuid", self.name))
    }

    /// Returns the UUID of the present volume, or a new one. Refuses a device that does not fit the
    /// command, and a name whose settings are those of another volume.
    fn uuid(&self, luks: &Luks, before: Option<&Volume>) -> Result<Uuid, Error> {
        let place = luks.device().display();
        let found = luks.uuid()?;
        if let Some(other) = before.and_then(|before| before.uuid.as_ref())
            && found.as_ref() != Some(other)
        {
            let name = &self.name;
            return Err(Error::Setting(format!(
                "the name {name} is already used by the volume {other}, but {place} is another volume: choose another --name, or first run \
                 firstlight-volume remove --name {name}"
            )));
        }
        let refused = match (found, self.format) {
            (Some(uuid), false) => return Ok(uuid),
            (Some(uuid), true) => format!(
                "{place} is already the LUKS2 volume {uuid}: to add a keyslot, omit --format and give --key-file"
            ),
            (None, false) => format!(
                "{place} has no LUKS2 header: --format makes a new volume on a blank device"
            ),
            (None, true) => {
                self.check_blank(luks)?;
                return new_uuid(&self.planned());
            }
        };
        Err(Error::Device(refused))
    }

    /// Refuses a device with content.
    fn check_blank(&self, luks: &Luks) -> Result<(), Error> {
        let Some(at) = luks.content()? else {
            return Ok(());
        };
        let place = luks.device().display();
        Err(Error::Device(format!(
            "{place} is not blank: byte {at} is not zero, and --format would destroy the content. If nobody needs it, overwrite the \
             first and the last 16 MiB with zeros"
        )))
    }

    /// Keeps the device in the settings only if it is a file, which has no link by its UUID.
    fn keep_device(&mut self, device: &Path) {
        if !device.is_file() {
            self.volume.device = None;
        }
    }
}

/// A file that is removed on drop.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A keyslot that was added to a present volume. It is removed on drop, unless [`Added::keep`] was called.
struct Added<'a> {
    device: &'a Path,
    key: Option<&'a Secret>,
}

impl<'a> Added<'a> {
    fn new(device: &'a Path, key: &'a Secret) -> Added<'a> {
        let key = Some(key);
        Added { device, key }
    }

    fn keep(mut self) {
        self.key = None;
    }

    fn remove(&self, key: &Secret) -> Result<(), Error> {
        // a signal may have stopped the program
        let luks = Luks::new(self.device, &Stop::new());
        luks.metadata()?;
        match luks.keyslot(key.expose())? {
            Some(number) => luks.kill(&number.to_string()),
            None => Ok(()),
        }
    }
}

impl Drop for Added<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key
            && let Err(error) = self.remove(key)
        {
            log::warn!("cannot remove the new keyslot: {error}");
        }
    }
}

/// Adds a keyslot with the broker's key. Returns its number.
fn add(luks: &Luks, volume_key: &VolumeKey, key: &Secret) -> Result<u32, Error> {
    luks.add_key(volume_key, key)?;
    let keyslot = luks.keyslot(key.expose())?;
    let text = "the new keyslot does not open: is the device failing?";
    keyslot.ok_or_else(|| Error::Key(text.into()))
}

/// Reads a key, byte by byte, as cryptsetup reads a key file.
fn read_key(file: &Path) -> Result<Zeroizing<Vec<u8>>, Error> {
    let failed = |error| Error::File(file.into(), error);
    let mut key = Zeroizing::new(Vec::with_capacity(MAX_KEY as usize + 1));
    let source: Box<dyn Read> = if file == Path::new("-") {
        Box::new(std::io::stdin())
    } else {
        Box::new(fs::File::open(file).map_err(failed)?)
    };
    source
        .take(MAX_KEY + 1)
        .read_to_end(&mut key)
        .map_err(failed)?;
    if (1..=MAX_KEY).contains(&(key.len() as u64)) {
        Ok(key)
    } else {
        Err(Error::Key(format!(
            "--key-file {}: expected 1 to {MAX_KEY} bytes, got {}",
            file.display(),
            key.len()
        )))
    }
}

/// Fails if this key does not open the volume. Without a key, the volume must have our keyslot.
fn check_key(copy: &Luks, device: &Path, own: Option<&Vec<u8>>) -> Result<(), Error> {
    match own {
        None if keyslots_of(&copy.metadata()?).next().is_none() => Err(key_file_is_missing(device)),
        Some(own) if copy.keyslot(own)?.is_none() => Err(Error::Key(format!(
            "the key of --key-file does not open {}",
            device.display()
        ))),
        _ => Ok(()),
    }
}

fn key_file_is_missing(device: &Path) -> Error {
    let place = device.display();
    Error::Key(format!(
        "--key-file is missing: give a key that opens {place} now"
    ))
}

/// Returns the UUID in this file, or makes it: a random one of the kernel (random(4)). The broker records a
/// disk before it gives the key, so each try asks with the same UUID.
fn new_uuid(planned: &Path) -> Result<Uuid, Error> {
    let random = Path::new("/proc/sys/kernel/random/uuid");
    let read = |path: &Path| fs::read_to_string(path).map(|text| Uuid::parse(text.trim_end()));
    if let Ok(Some(uuid)) = read(planned) {
        return Ok(uuid);
    }
    let failed = |path: &Path, error| Error::File(path.into(), error);
    let uuid = read(random).map_err(|error| failed(random, error))?;
    let uuid = uuid.ok_or_else(|| failed(random, io::ErrorKind::InvalidData.into()))?;
    let folder = planned.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| base::file::replace(planned, uuid.to_string().as_bytes(), 0o644))
        .map_err(|error| failed(planned, error))?;
    Ok(uuid)
}
