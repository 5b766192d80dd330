//! A raw disk image: its EFI system partition, and the program that the firmware starts from it.

use std::io::{Read, Seek};

use super::digest::Digest;
use super::error::Error;
use super::fat::Fat;
use super::gpt::Gpt;
use super::pe::Pe;
use super::uki::{MEASURES_TAGGED_ON_TDX, Surroundings, Uki, major, systemd_program};

/// The program that the firmware starts if no variable names another one (UEFI specification
/// §3.5.1.1).
const DEFAULT: [&str; 2] = ["EFI/BOOT/BOOTX64.EFI", "EFI/BOOT/BOOTAA64.EFI"];
/// Where systemd-boot looks for images and for entries (UAPI group, "Boot Loader Specification").
const IMAGES: &str = "EFI/Linux";
const ENTRIES: &str = "loader/entries";
/// The first version of systemd-boot that measures its configuration.
const MEASURES_CONFIGURATION: u32 = 255;

/// A disk image, reduced to the measured parts.
pub struct Disk {
    /// The event of the partition table.
    pub partition_table: Digest,
    /// The boot manager that starts the image, if any.
    pub boot_manager: Option<BootManager>,
    /// The path of the image.
    pub path: String,
    /// The image.
    pub uki: Uki,
}

/// systemd-boot.
pub struct BootManager {
    /// Its digest.
    pub image: Digest,
    /// The digest of the boot manager's configuration, if it measures that.
    pub configuration: Option<Digest>,
    /// Whether it measures that on TDX machines, too: its event is a tagged event (NEWS of systemd
    /// 261).
    pub measures_on_tdx: bool,
}

impl Disk {
    /// Reads a disk image. `chosen` is the path on the EFI system partition of the unified kernel
    /// image that boots; without it there must be only one. `profile` is the ID or the number of
    /// the image's profile that boots.
    pub fn read(
        mut disk: impl Read + Seek,
        chosen: Option<&str>,
        profile: Option<&str>,
    ) -> Result<Disk, Error> {
        let table = Gpt::read(&mut disk)?;
        let (start, _) = table.esp()?;
        let found = Fat::open(disk, start)
            .and_then(|mut esp| find(&mut esp, chosen, None, profile, table.event()));
        found.map_err(|error| error.within("EFI system partition"))
    }

    /// Returns the paths of the unified kernel images between which systemd-boot chooses on a disk;
    /// empty if it also has entries of other kinds, or if the disk has no systemd-boot.
    pub fn choices(mut disk: impl Read + Seek) -> Result<Vec<String>, Error> {
        let table = Gpt::read(&mut disk)?;
        let (start, _) = table.esp()?;
        let mut esp = Fat::open(disk, start)?;
        let default = esp.read(DEFAULT[0])?.unwrap_or_default();
        let program = Pe::parse(&default).ok().as_ref().and_then(systemd_program);
        let is_manager = program.is_some_and(|(name, _)| name == "systemd-boot");
        if is_manager && names_of(&mut esp, ENTRIES, &[".conf"])?.is_empty() {
            names(&mut esp, IMAGES, &[".efi"])
        } else {
            Ok(vec![])
        }
    }

    /// Reads a disk image whose boot manager will start the unified kernel image `added`, which is
    /// not on it yet.
    pub fn with(mut disk: impl Read + Seek, added: &[u8]) -> Result<Disk, Error> {
        let table = Gpt::read(&mut disk)?;
        let (start, _) = table.esp()?;
        let path = format!("{IMAGES}/added.efi");
        let found = Fat::open(disk, start)
            .and_then(|mut esp| find(&mut esp, Some(&path), Some(added), None, table.event()));
        let found = found.map_err(|error| error.within("EFI system partition"))?;
        match found.boot_manager {
            Some(_) => Ok(found),
            None => Err(Error::Unsupported(format!(
                "{} is not systemd-boot, so it starts no other image",
                DEFAULT[0]
            ))),
        }
    }
}

fn find<D: Read + Seek>(
    esp: &mut Fat<D>,
    chosen: Option<&str>,
    added: Option<&[u8]>,
    profile: Option<&str>,
    partition_table: Digest,
) -> Result<Disk, Error> {
    let mut default = None;
    for path in DEFAULT {
        if let Some(bytes) = esp.read(path)? {
            default = Some((path, bytes));
            break;
        }
    }
    let manager = match &default {
        Some((path, bytes)) => {
            let pe = Pe::parse(bytes).map_err(|error| error.within(path))?;
            match systemd_program(&pe) {
                Some((name, version)) if name == "systemd-boot" => {
                    let measures = |since| major(&version).is_some_and(|major| major >= since);
                    let configuration = if measures(MEASURES_CONFIGURATION) {
                        esp.read("loader/loader.conf")?
                    } else {
                        None
                    };
                    let image = pe.authenticode().map_err(|error| error.within(path))?;
                    Some(BootManager {
                        image,
                        configuration: configuration.map(|text| Digest::of(&[&text])),
                        measures_on_tdx: measures(MEASURES_TAGGED_ON_TDX),
                    })
                }
                Some((name, _)) if name == "systemd-stub" => None,
                _ if chosen.is_some() => None,
                _ => {
                    return Err(Error::Unsupported(format!(
                        "{path} is neither a unified kernel image nor systemd-boot. Behind shim and GRUB, PCR 8 and 9 depend on \
                         each command that GRUB runs on the machine: measure a booted machine, and pin PCR 4, 7 and 14"
                    )));
                }
            }
        }
        None => None,
    };
    let path = match (chosen, &manager, &default) {
        (Some(path), _, _) => path.replace('\\', "/").trim_start_matches('/').to_owned(),
        (None, None, Some((path, _))) => (*path).to_owned(),
        (None, Some(_), _) => only_image(esp)?,
        (None, None, None) => {
            return Err(Error::NotFound(format!(
                "there is no {}; name the image that the firmware's boot option starts (--uki)",
                DEFAULT[0]
            )));
        }
    };
    let default = match added {
        Some(bytes) => Some((path.as_str(), bytes.to_vec())),
        None => default,
    };
    let bytes = match default.filter(|(default, _)| default.eq_ignore_ascii_case(&path)) {
        Some((_, bytes)) => bytes,
        None => esp
            .read(&path)?
            .ok_or_else(|| Error::NotFound(format!("there is no {path}")))?,
    };
    let surroundings = surroundings(esp, &path)?;
    let uki =
        Uki::parse(&bytes, Some(&surroundings), profile).map_err(|error| error.within(&path))?;
    Ok(Disk {
        partition_table,
        boot_manager: manager,
        path,
        uki,
    })
}

/// Returns the path of the image that systemd-boot finds; there must be only one.
fn only_image<D: Read + Seek>(esp: &mut Fat<D>) -> Result<String, Error> {
    let names = names(esp, IMAGES, &[".efi"])?;
    let entries = names_of(esp, ENTRIES, &[".conf"])?;
    match (&names[..], entries.first()) {
        ([only], None) => Ok(only.clone()),
        ([], None) => {
            let text = format!("systemd-boot finds no image in {IMAGES}");
            Err(Error::NotFound(text))
        }
        ([], Some(entry)) => Err(Error::Unsupported(format!(
            "systemd-boot starts {ENTRIES}/{entry}: expected a unified kernel image in {IMAGES}"
        ))),
        (several, _) => Err(Error::Ambiguous(format!(
            "systemd-boot chooses between {}{}: name the one that boots (--uki)",
            several.join(", "),
            entries
                .iter()
                .map(|entry| format!(", {ENTRIES}/{entry}"))
                .collect::<String>()
        ))),
    }
}

/// Returns the other files on the partition that change the registers of the image at this path.
fn surroundings<D: Read + Seek>(esp: &mut Fat<D>, path: &str) -> Result<Surroundings, Error> {
    let mut sidecars = Vec::new();
    let folders = [
        (format!("{path}.extra.d"), &[".efi", ".cred", ".raw"][..]),
        ("loader/addons".to_owned(), &[".efi"]),
        ("loader/credentials".to_owned(), &[".cred"]),
        ("loader/extensions".to_owned(), &[".raw"]),
    ];
    for (folder, endings) in folders {
        sidecars.extend(names(esp, &folder, endings)?);
    }
    let seed = esp.find("loader/random-seed")?;
    Ok(Surroundings {
        sidecars,
        is_seed_read_only: seed.is_some_and(|seed| seed.is_read_only),
    })
}

/// Returns the paths of the files in a folder whose names have this suffix; empty if the folder
/// does not exist.
fn names<D: Read + Seek>(
    esp: &mut Fat<D>,
    folder: &str,
    endings: &[&str],
) -> Result<Vec<String>, Error> {
    let names = names_of(esp, folder, endings)?;
    Ok(names
        .into_iter()
        .map(|name| format!("{folder}/{name}"))
        .collect())
}

fn names_of<D: Read + Seek>(
    esp: &mut Fat<D>,
    folder: &str,
    endings: &[&str],
) -> Result<Vec<String>, Error> {
    let mut names: Vec<String> = esp
        .list(folder)?
        .unwrap_or_default()
        .into_iter()
        .filter(|entry| !entry.is_directory)
        .map(|entry| entry.name.escape_debug().to_string())
        .filter(|name| {
            let name = name.to_ascii_lowercase();
            endings.iter().any(|ending| name.ends_with(ending))
        })
        .collect();
    names.sort_unstable();
    Ok(names)
}
