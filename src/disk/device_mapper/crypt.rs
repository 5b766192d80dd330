//! The upper device: a table of type `crypt`, and how it gets the key.

use std::io;

use zeroize::Zeroizing;

use super::control::{Audience, Control, Device, kernel, refused, table_name};
use super::error::Error;
use super::integrity::Lower;
use super::mapping::{HMAC_SHA256_LEN, Mapping, SECTOR};
use crate::luks::{DATA_OFFSET, SECTOR_SIZE};
use sys::block;
use sys::keyring::LogonKey;

/// Options of dm-crypt that Constellation uses: the thread that submits the I/O also encrypts and
/// decrypts, without a work queue.
const NO_WORKQUEUES: [&str; 2] = ["no_read_workqueue", "no_write_workqueue"];
/// The kernel's name of the algorithm that encrypts and authenticates a sector.
pub(super) const AEAD: &str = "authenc(hmac(sha256),xts(aes))";

/// Maps dm-crypt directly on the disk.
pub(super) fn map_disk<'c>(control: &'c Control, mapping: &Mapping) -> Result<Device<'c>, Error> {
    let failed = |doing, error| Error::of_disk(mapping.device, doing, error);
    let number =
        block::number(mapping.device).map_err(|error| failed("find the block device", error))?;
    let file =
        std::fs::File::open(mapping.device).map_err(|error| failed("open the disk", error))?;
    let bytes = block::size(&file).map_err(|error| failed("read the size of the disk", error))?;
    let sector_size = u64::from(SECTOR_SIZE);
    let data = bytes.saturating_sub(DATA_OFFSET) / sector_size * sector_size;
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
        data / SECTOR,
        &format!("{} {}", table_name(number), DATA_OFFSET / SECTOR),
    )
}

/// Maps dm-crypt on the integrity device.
pub(super) fn map_over<'c>(
    control: &'c Control,
    mapping: &Mapping,
    lower: &Lower,
) -> Result<Device<'c>, Error> {
    map(
        control,
        mapping,
        lower.sectors,
        &format!("{} 0", table_name(lower.device.number())),
    )
}

fn map<'c>(
    control: &'c Control,
    mapping: &Mapping,
    sectors: u64,
    below: &str,
) -> Result<Device<'c>, Error> {
    let mut options: Vec<String> = NO_WORKQUEUES.map(String::from).into();
    options.push(format!("sector_size:{SECTOR_SIZE}"));
    let before = if mapping.geometry.has_integrity {
        options.push(format!("integrity:{HMAC_SHA256_LEN}:aead"));
        format!("capi:{AEAD}-plain64 ")
    } else {
        "aes-xts-plain64 ".into()
    };
    // the initialization vector counts from 0 at the start of the segment (LUKS2 iv_tweak)
    let after = format!(" 0 {below} {} {}", options.len(), options.join(" "));

    let uuid = mapping.plain_uuid();
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
    let description = format!(
        "cryptsetup:{}-d{}",
        mapping.geometry.uuid, mapping.geometry.digest_id
    );
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
        "/dev/mapper/{}: the kernel's dm-crypt takes no key from the keyring ({unsupported}), so \
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_the_table_is_hexadecimal() {
        assert_eq!(
            table_with_key(b"c ", &[0x00, 0xa5, 0xff], b" 0").as_slice(),
            b"c 00a5ff 0"
        );
    }
}
