//! Maps an encrypted disk as a block device: dm-crypt, on top of dm-integrity if sectors are
//! authenticated. The mapping is set up with the kernel's ioctls (linux/dm-ioctl.h, the kernel's
//! Documentation/admin-guide/device-mapper/{dm-crypt,dm-integrity}.rst).
//!
//! Tables and names of the two upper devices are those that cryptsetup 2.6 gives a LUKS2 device, and the
//! UUIDs those of 2.8. `status` and `close` of cryptsetup 2.6 to 2.8 work on our mappings, and each
//! program reads what the other wrote:
//!
//! ```text
//!   /dev/mapper/NAME       crypt      encrypts a sector and computes its 32-byte tag (authenc: AES-XTS, HMAC-SHA256)
//!          |
//!   /dev/mapper/NAME_dif   integrity  stores sector and tag together, through its journal
//!          |
//!   /dev/mapper/NAME_disk  linear     the disk, with a copy of its dm-integrity superblock in memory (loop) in the place of it
//!          |
//!   the disk               header up to the data offset | dm-integrity superblock | journal | tags and data, interleaved
//! ```
//!
//! Without integrity, the crypt device lies directly on the disk, from the data offset on.
//!
//! With integrity **a sector that was never written cannot be read**: its tag does not match, the
//! read fails with `EIO`, and the kernel logs `INTEGRITY AEAD ERROR`. The user of a mapping opened
//! with [`FirstUse::Create`] must write a sector before it reads the sector.
//!
//! The key is passed to the kernel as a `logon` key in the keyring of the calling thread. User
//! space cannot read such a key back, and it is revoked as soon as dm-crypt has its copy.
//!
//! Files: `mapping` has the parameters of a mapping, `control` the ioctls, `integrity` the lower
//! device and its superblock, `crypt` the upper device and its key; `journal` determines whether
//! the lower device was ever used.

mod control;
mod crypt;
mod error;
mod integrity;
mod journal;
mod mapping;

use std::path::PathBuf;

use control::Control;
pub use error::Error;
use integrity::SUBDEVICE;
pub use integrity::{FORMATTED, SUPERBLOCK_LEN, other_byte};
pub use journal::may_hold_data;
pub use mapping::{FirstUse, Mapping};

/// Maps the disk and returns the path of the block device, `/dev/mapper/NAME`, which exists on
/// return. After a failure nothing is mapped.
///
/// Does not read the data: a wrong key fails at the first read. Requires Linux 5.12 or later with
/// the modules `dm_mod`, `dm_crypt` and, with integrity, `dm_integrity`, `authenc` and `loop`.
///
/// # Errors
/// [`Error::AlreadyActive`] if the name is in use, or if a killed process left a device below the mapping
/// ([`close`] removes it); the existing mapping and the disk are not changed.
pub fn open(mapping: &Mapping, first_use: FirstUse) -> Result<PathBuf, Error> {
    let (length, expected) = (mapping.key.len(), mapping.geometry.key_size);
    if length != expected {
        return Err(Error::Failed(format!(
            "cannot map {:?}: the volume key has {length} bytes, expected {expected}",
            mapping.name
        )));
    }
    let control = Control::open()?;
    if control.uuid(mapping.name)?.is_some() {
        return Err(Error::AlreadyActive(mapping.name.into()));
    }
    if !mapping.geometry.has_integrity {
        return Ok(crypt::map_disk(&control, mapping)?.keep());
    }
    let lower = integrity::map(&control, mapping, first_use)?;
    let upper = crypt::map_over(&control, mapping, &lower)?;
    lower.device.keep();
    lower.disk.keep();
    Ok(upper.keep())
}

/// Makes the kernel prepare the cipher of a disk with integrity; for this the kernel starts
/// modprobe about ten times. A program can call this while it waits for the key; then [`open`] is
/// faster. Needs the module `algif_aead`, and unloads it afterwards.
pub fn prepare() -> std::io::Result<()> {
    sys::cipher::make_aead(crypt::AEAD)?;
    sys::cipher::unload_interface();
    Ok(())
}

/// How the UUID of a LUKS2 mapping begins.
const CRYPT: &[&str] = &["CRYPT-LUKS2-"];
/// How that of its integrity device begins; cryptsetup 2.6 uses the first form.
const INTEGRITY: &[&str] = &["CRYPT-INTEGRITY-", SUBDEVICE];

/// Removes the mapping and the devices below it. Waits up to 5 s while another program (udev) has
/// it open. All written data is durable on return.
///
/// # Errors
/// [`Error::NotActive`] if the mapping does not exist; [`Error::InUse`] while it is mounted or
/// open; [`Error::NotOurs`] if a device of that name is not a LUKS2 mapping.
pub fn close(name: &str) -> Result<(), Error> {
    let control = Control::open()?;
    let mut is_active = false;
    for (name, prefixes) in [
        (name, CRYPT),
        (&integrity::lower_name(name), INTEGRITY),
        (&integrity::disk_name(name), &[SUBDEVICE]),
    ] {
        if let Some(uuid) = control.uuid(name)? {
            require_ours(name, &uuid, prefixes)?;
            control.remove(name)?;
            is_active = true;
        }
    }
    if is_active {
        Ok(())
    } else {
        Err(Error::NotActive(name.into()))
    }
}

/// Returns an error unless the UUID of the device `name` has one of these prefixes and ends with the
/// name.
fn require_ours(name: &str, uuid: &str, prefixes: &[&str]) -> Result<(), Error> {
    let is_known = prefixes.iter().any(|prefix| uuid.starts_with(prefix));
    if is_known && uuid.ends_with(&format!("-{name}")) {
        Ok(())
    } else {
        Err(Error::NotOurs(name.into(), uuid.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mappings_of_that_kind_and_name_are_ours() {
        const UUID: &str = "6e3dd92b087f4aea9f25403a3d282404";
        let is_ours = |uuid: &str| require_ours("state_dif", uuid, INTEGRITY).is_ok();
        assert!(is_ours(&format!("CRYPT-INTEGRITY-{UUID}-state_dif")));
        assert!(is_ours(&format!("CRYPT-SUBDEV-{UUID}-state_dif")));
        for foreign in [
            String::new(),
            "LVM-state_dif".into(),
            "CRYPT-PLAIN-state_dif".into(),
            format!("CRYPT-LUKS2-{UUID}-state_dif"),
            format!("CRYPT-SUBDEV-{UUID}-other"),
        ] {
            assert!(!is_ours(&foreign), "{foreign}");
        }
        let is_ours = |uuid: &str| require_ours("state", uuid, CRYPT).is_ok();
        assert!(is_ours(&format!("CRYPT-LUKS2-{UUID}-state")));
        for foreign in [
            "LVM-state".into(),
            "CRYPT-PLAIN-state".into(),
            format!("CRYPT-SUBDEV-{UUID}-state"),
            format!("CRYPT-LUKS2-{UUID}-other"),
        ] {
            assert!(!is_ours(&foreign), "{foreign}");
        }
    }
}
