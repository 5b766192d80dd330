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
//! Nothing is written before the key is there. If the power fails afterwards, a present volume is
//! enrolled by the same command: it leaves out what is done. So is a new volume, with its recovery key,
//! which is shown before it is used.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base::crypto::Secret;
use base::stop::Stop;
use booted_base::uuid::Uuid;
use zeroize::Zeroizing;

use super::broker;
use super::cryptsetup::{Luks, VolumeKey};
use super::error::Error;
use super::recovery_key;
use super::settings::{self, Folders, Volume};

/// The maximum size of a key file: that of cryptsetup's keys without an option is larger, but a pipe
/// must hold it.
pub const MAX_KEY: u64 = 32 << 10;

/// What the operator wants.
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
        let uuid = self.uuid(&luks)?;
        let key_file = self.key_file.as_deref();
        let own = key_file.map(read_key).transpose()?;
        // names of volumes do not begin with a dot
        let temporary = |what| self.folders.headers.join(format!(".{}.{what}", self.name));
        let header = Removed(temporary("header"));
        let copy = match self.format {
            true => None,
            false => Some(luks.copy(&header.0, &uuid)?),
        };
        if let (Some(own), Some(copy)) = (&own, &copy)
            && copy.keyslot(own)?.is_none()
        {
            let place = device.display();
            let text = format!("the key of --key-file does not open {place}");
            return Err(Error::Key(text));
        }
        self.volume.uuid = Some(uuid.clone());
        log::info!("asking for the key of {uuid}");
        let key = broker::key(&self.volume, Box::new(|_| Ok(())), stop)?;
        let volume_key = temporary("key");
        let keyslot = match (&copy, &own) {
            (None, _) => {
                let recovery = recovery_key::new();
                let volume_key = VolumeKey::new(&volume_key)?;
                // the device may have been used while the broker was asked
                self.check_blank(&luks)?;
                // before the volume has this key, so that no failure leaves a key that nobody knows
                tell(&recovery).map_err(Error::Output)?;
                luks.format(&uuid, &volume_key, recovery.as_bytes())?;
                add(&luks, &volume_key, &key)?
            }
            (Some(copy), own) => match (copy.keyslot(key.expose())?, own) {
                // the command was run before
                (Some(keyslot), _) => keyslot,
                (None, Some(own)) => add(&luks, &copy.volume_key(own, &volume_key)?, &key)?,
                (None, None) => {
                    let place = device.display();
                    let text = format!("--key-file is missing: a key that opens {place} now");
                    return Err(Error::Key(text));
                }
            },
        };
        luks.mark(keyslot)?;
        self.keep_device(&device);
        self.volume.write(&self.folders.volumes, &self.name)?;
        Ok(Enrolled { uuid, keyslot })
    }

    /// Returns the UUID of the present volume, or a new one. Refuses a device that does not fit the
    /// command.
    fn uuid(&self, luks: &Luks) -> Result<Uuid, Error> {
        let place = luks.device().display();
        let refused = match (luks.uuid()?, self.format) {
            (Some(uuid), false) => return Ok(uuid),
            (Some(uuid), true) => format!(
                "{place} is the LUKS2 volume {uuid} already: without --format, and with --key-file, it gets a further keyslot"
            ),
            (None, false) => format!(
                "{place} has no LUKS2 header: --format makes a new volume on a blank device"
            ),
            (None, true) => {
                self.check_blank(luks)?;
                return new_uuid();
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
    let source: Box<dyn Read> = match file == Path::new("-") {
        true => Box::new(std::io::stdin()),
        false => Box::new(fs::File::open(file).map_err(failed)?),
    };
    source
        .take(MAX_KEY + 1)
        .read_to_end(&mut key)
        .map_err(failed)?;
    match (1..=MAX_KEY).contains(&(key.len() as u64)) {
        true => Ok(key),
        false => Err(Error::Key(format!(
            "--key-file {}: expected 1 to {MAX_KEY} bytes, got {}",
            file.display(),
            key.len()
        ))),
    }
}

/// Returns a random UUID, which the kernel makes (random(4)).
fn new_uuid() -> Result<Uuid, Error> {
    let path = Path::new("/proc/sys/kernel/random/uuid");
    let failed = |error| Error::File(path.into(), error);
    let text = fs::read_to_string(path).map_err(failed)?;
    Uuid::parse(text.trim_end()).ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))
}
