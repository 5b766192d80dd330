//! The administrator's commands for an enrolled volume: show it, and remove the key broker's keyslot.

use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;

use base::stop::Stop;
use base::text::hex;

use super::cryptsetup::{Luks, keyslots_of};
use super::error::Error;
use super::serve;
use super::settings::{Folders, Volume};

/// Returns the names of the volumes that have settings.
pub fn names(folders: &Folders) -> Result<Vec<String>, Error> {
    let failed = |error| Error::File(folders.volumes.clone(), error);
    let entries = match fs::read_dir(&folders.volumes) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(failed(error)),
    };
    let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
    let names: Result<Vec<_>, _> = names.collect();
    let names = names.map_err(failed)?.into_iter();
    let names = names.filter_map(|name| name.into_string().ok());
    // that of a new volume that is not made yet
    let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort();
    Ok(names)
}

/// Describes a volume, and returns whether the next boot can open it as far as this machine knows.
pub fn status(
    folders: &Folders,
    name: &str,
    crypttab: &Path,
    stop: &Stop,
) -> Result<(String, bool), Error> {
    let volume = Volume::read(&folders.volumes, name)?;
    let device = volume.header();
    let is_open = Path::new("/dev/mapper").join(name).exists();
    let keyslots = Luks::new(&device, stop).metadata().map(|metadata| {
        let keyslots: Vec<&str> = keyslots_of(&metadata).collect();
        keyslots.join(", ")
    });
    let (keyslots, has_keyslot) = match keyslots {
        Ok(numbers) if numbers.is_empty() => ("none: enroll it again".into(), false),
        Ok(numbers) => (numbers, true),
        Err(error) => (error.to_string(), false),
    };
    let (table, is_in_table) = match serve::check_crypttab(folders, name, crypttab) {
        Ok(()) => ("has its line".into(), true),
        Err(error) => (error.to_string(), false),
    };
    let id = volume.cluster.map(|id| hex(&id.0)).unwrap_or_default();
    let mut text = format!("{name}: {}\n", if is_open { "open" } else { "closed" });
    for (what, value) in [
        ("device", device.display().to_string()),
        ("key broker", volume.brokers.join(", ")),
        ("cluster-id", id),
        ("keyslot", keyslots),
        ("crypttab", table),
    ] {
        // writing to a string never fails
        let _ = writeln!(text, "  {what:<11}{value}");
    }
    Ok((text, has_keyslot && is_in_table))
}

/// Removes the keyslot and the token of the key broker, and then the settings of the volume. After a power failure it continues.
pub fn remove(folders: &Folders, name: &str, stop: &Stop) -> Result<Volume, Error> {
    let volume = Volume::read(&folders.volumes, name)?;
    Luks::new(&volume.header(), stop).unmark(volume.keyslot)?;
    let path = folders.volumes.join(name);
    fs::remove_file(&path).map_err(|error| Error::File(path, error))?;
    Ok(volume)
}
