//! The upper device: a table of type `crypt`, and how it gets the key.

use std::io;

use zeroize::Zeroizing;

use super::control::{Audience, Control, Device, kernel, refused, table_name};
use super::error::Error;
use super::integrity::Lower;
use super::mapping::{HMAC_SHA256_LEN, Mapping, SECTOR};
use sys::block;
use sys::keyring::LogonKey;

/// Options of dm-crypt that Constellation uses: the thread that submits the I/O also encrypts and
/// decrypts, without a work queue.
const NO_WORKQUEUES: [&str; 2] = ["no_read_workqueue", "no_write_workqueue"];
/// The kernel's name of the algorithm that encrypts and authenticates a sector.
pub(super) const AEAD: &str = "authenc(hmac(sha256),xts(aes))";
/// Maximum length of a name. It leaves room for `_dif` and for the prefix in the UUID field
/// (DM_UUID_LEN is 129; `CRYPT-INTEGRITY-`, 32 digits, a dash).
const NAME_MAX: usize = 64;

/// The cipher of a mapping in kernel notation. Values of this type exist only for a mapping that
/// was checked.
#[derive(Debug)]
pub(super) struct Cipher {
    specification: String,
}

impl Cipher {
    /// Checks every value of `mapping` that is part of a table.
    pub fn of(mapping: &Mapping) -> Result<Cipher, Error> {
        let invalid =
            |reason: String| Error::Failed(format!("cannot map {:?}: {reason}", mapping.name));
        let name_character = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if mapping.name.is_empty()
            || mapping.name.len() > NAME_MAX
            || !mapping.name.chars().all(name_character)
        {
            return Err(invalid(format!(
                "a name consists of 1 to {NAME_MAX} letters, digits, '_', '-' or '.'"
            )));
        }
        if matches!(mapping.name, "." | ".." | "control") {
            return Err(invalid("this name is reserved in /dev/mapper".into()));
        }
        if mapping.plain_uuid().is_none() {
            return Err(invalid(format!("{:?} is not a UUID", mapping.luks_uuid)));
        }
        let sector_size = u64::from(mapping.sector_size);
        if !matches!(sector_size, 512 | 1024 | 2048 | 4096) {
            return Err(invalid(format!(
                "sector size {sector_size} instead of 512, 1024, 2048 or 4096"
            )));
        }
        if !mapping.data_offset.is_multiple_of(4096) {
            return Err(invalid(format!(
                "data offset {} is not a multiple of 4096",
                mapping.data_offset
            )));
        }
        if mapping.cipher != "aes-xts-plain64" {
            return Err(invalid(format!(
                "cipher {:?} instead of \"aes-xts-plain64\"",
                mapping.cipher
            )));
        }
        let (specification, authentication_len) = match mapping.integrity {
            None => ("aes-xts-plain64".into(), 0),
            Some("hmac(sha256)") => (format!("capi:{AEAD}-plain64"), HMAC_SHA256_LEN),
            Some(other) => {
                return Err(invalid(format!(
                    "integrity {other:?} instead of \"hmac(sha256)\""
                )));
            }
        };
        // XTS uses two AES keys (IEEE 1619)
        if ![32 + authentication_len, 64 + authentication_len].contains(&mapping.key.len()) {
            let expected = 64 + authentication_len;
            return Err(invalid(format!(
                "a volume key of {} bytes instead of {expected}",
                mapping.key.len()
            )));
        }
        Ok(Cipher { specification })
    }
}

/// Maps dm-crypt directly on the disk.
pub(super) fn map_disk<'c>(
    control: &'c Control,
    mapping: &Mapping,
    cipher: &Cipher,
) -> Result<Device<'c>, Error> {
    let failed = |doing, error| Error::of_disk(mapping.device, doing, error);
    let number =
        block::number(mapping.device).map_err(|error| failed("find the block device", error))?;
    let file =
        std::fs::File::open(mapping.device).map_err(|error| failed("open the disk", error))?;
    let bytes = block::size(&file).map_err(|error| failed("read the size of the disk", error))?;
    let sector_size = u64::from(mapping.sector_size);
    let data = bytes.saturating_sub(mapping.data_offset) / sector_size * sector_size;
    if data == 0 {
        let error = io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("the disk has {bytes} bytes"),
        );
        return Err(failed("map the segment at the data offset", error));
    }
    map(
        control,
        mapping,
        cipher,
        data / SECTOR,
        &format!("{} {}", table_name(number), mapping.data_offset / SECTOR),
        None,
    )
}

/// Maps dm-crypt on the integrity device.
pub(super) fn map_over<'c>(
    control: &'c Control,
    mapping: &Mapping,
    cipher: &Cipher,
    lower: &Lower,
) -> Result<Device<'c>, Error> {
    let tag = format!("integrity:{HMAC_SHA256_LEN}:aead");
    map(
        control,
        mapping,
        cipher,
        lower.sectors,
        &format!("{} 0", lower.device.table_name()),
        Some(tag),
    )
}

fn map<'c>(
    control: &'c Control,
    mapping: &Mapping,
    cipher: &Cipher,
    sectors: u64,
    below: &str,
    tag: Option<String>,
) -> Result<Device<'c>, Error> {
    let mut options: Vec<String> = NO_WORKQUEUES.map(String::from).into();
    options.extend(tag);
    if u64::from(mapping.sector_size) != SECTOR {
        options.push(format!("sector_size:{}", mapping.sector_size));
    }
    let before = format!("{} ", cipher.specification);
    // the initialization vector counts from 0 at the start of the segment (LUKS2 iv_tweak)
    let after = format!(" 0 {below} {} {}", options.len(), options.join(" "));

    let uuid = mapping.plain_uuid().expect("checked by Cipher::of");
    let device = control.create(
        mapping.name,
        &format!("CRYPT-LUKS2-{uuid}-{}", mapping.name),
    )?;
    load(
        &device,
        mapping,
        sectors,
        before.as_bytes(),
        after.as_bytes(),
    )
    .map_err(|error| {
        let doing = "accept the dm-crypt table";
        kernel(mapping.name, doing, refused("dm_crypt", error))
    })?;
    device.resume(Audience::Everyone)?;
    Ok(device)
}

/// Loads the table with the key in the keyring. If the kernel does not support that, the table
/// contains the key.
fn load(
    device: &Device,
    mapping: &Mapping,
    sectors: u64,
    before: &[u8],
    after: &[u8],
) -> io::Result<()> {
    let description = format!("cryptsetup:{}-d{}", mapping.luks_uuid, mapping.digest);
    let unsupported = match LogonKey::add(&description, mapping.key.expose()) {
        Ok(_key) => {
            let reference = format!(":{}:logon:{description}", mapping.key.len());
            match device.load(
                "crypt",
                sectors,
                &[before, reference.as_bytes(), after].concat(),
            ) {
                // dm-crypt built without CONFIG_KEYS returns this error, as for every invalid
                // parameter
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => error,
                other => return other,
            }
        }
        Err(error) => error,
    };
    device.load(
        "crypt",
        sectors,
        &table_with_key(before, mapping.key.expose(), after),
    )?;
    log::warn!(
        "/dev/mapper/{}: the kernel accepts no key from the keyring ({unsupported}); \
         root can read the disk key with `dmsetup table --showkeys`",
        mapping.name
    );
    Ok(())
}

fn table_with_key(before: &[u8], key: &[u8], after: &[u8]) -> Zeroizing<Vec<u8>> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    // allocates the full capacity first: a vector that grows leaves copies of the key in freed
    // memory
    let mut table = Zeroizing::new(Vec::with_capacity(
        before.len() + 2 * key.len() + after.len(),
    ));
    table.extend_from_slice(before);
    for byte in key {
        table.push(DIGITS[usize::from(byte >> 4)]);
        table.push(DIGITS[usize::from(byte & 15)]);
    }
    table.extend_from_slice(after);
    table
}

/// Returns an error unless the device is a LUKS2 mapping with that name.
pub(super) fn require_ours(name: &str, uuid: &str) -> Result<(), Error> {
    if uuid.starts_with("CRYPT-LUKS2-") && uuid.ends_with(&format!("-{name}")) {
        return Ok(());
    }
    Err(Error::NotOurs {
        name: name.into(),
        uuid: uuid.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use base::crypto::Secret;

    fn mapping(key: &Secret) -> Mapping<'_> {
        Mapping {
            name: "state",
            luks_uuid: "6e3dd92b-087f-4aea-9f25-403a3d282404",
            device: Path::new("/dev/null"),
            data_offset: 16 << 20,
            sector_size: 4096,
            cipher: "aes-xts-plain64",
            integrity: Some("hmac(sha256)"),
            key,
            digest: 0,
        }
    }

    #[test]
    fn only_values_that_fit_a_table_are_accepted() {
        let (key, short) = (Secret::new(vec![7; 96]), Secret::new(vec![7; 65]));
        let good = mapping(&key);
        assert_eq!(
            Cipher::of(&good).unwrap().specification,
            "capi:authenc(hmac(sha256),xts(aes))-plain64"
        );
        let bad = [
            Mapping { name: "", ..good },
            Mapping {
                name: "a b",
                ..good
            },
            Mapping {
                name: "../sda",
                ..good
            },
            Mapping {
                name: "control",
                ..good
            },
            Mapping {
                luks_uuid: "6e3dd92b-087f-4aea-9f25-403a3d28240",
                ..good
            },
            Mapping {
                luks_uuid: "6e3dd92b-087f-4aea-9f25-403a3d2824 4",
                ..good
            },
            Mapping {
                sector_size: 0,
                ..good
            },
            Mapping {
                sector_size: 8192,
                ..good
            },
            Mapping {
                data_offset: 1,
                ..good
            },
            Mapping {
                cipher: "cipher_null-ecb",
                ..good
            },
            Mapping {
                integrity: Some("none"),
                ..good
            },
            Mapping {
                integrity: None,
                ..good
            },
            Mapping {
                key: &short,
                ..good
            },
        ];
        for mapping in bad {
            assert!(
                matches!(Cipher::of(&mapping), Err(Error::Failed(_))),
                "{mapping:?}"
            );
        }
    }

    #[test]
    fn a_key_in_the_table_is_hexadecimal() {
        assert_eq!(
            table_with_key(b"c ", &[0x00, 0xa5, 0xff], b" 0").as_slice(),
            b"c 00a5ff 0"
        );
    }

    #[test]
    fn only_luks2_mappings_of_that_name_are_ours() {
        require_ours(
            "state",
            "CRYPT-LUKS2-6e3dd92b087f4aea9f25403a3d282404-state",
        )
        .unwrap();
        for foreign in [
            "",
            "LVM-abc",
            "CRYPT-LUKS2-6e3dd92b087f4aea9f25403a3d282404-other",
            "CRYPT-PLAIN-state",
        ] {
            assert!(require_ours("state", foreign).is_err(), "{foreign}");
        }
    }
}
