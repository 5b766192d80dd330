//! The ioctls of `/dev/mapper/control` (linux/dm-ioctl.h). A message is a `struct dm_ioctl`; to
//! load a table, a `struct dm_target_spec` and its parameters follow.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use zeroize::Zeroizing;

use super::error::Error;
use sys::block;
use sys::device_mapper::{DmCommand, HEADER_LEN, command};

// offsets of the fields of struct dm_ioctl
const VERSION: Range<usize> = 0..12;
const DATA_START: Range<usize> = 16..20;
const TARGET_COUNT: Range<usize> = 20..24;
const FLAGS: Range<usize> = 28..32;
const EVENT_NR: Range<usize> = 32..36;
const DEV: Range<usize> = 40..48;
const NAME: Range<usize> = 48..176;
const UUID: Range<usize> = 176..305;

/// `sizeof(struct dm_target_spec)` in bytes: start and length in sectors (u64), status, offset of
/// the next (u32), type (16 bytes).
const TARGET_SPEC_LEN: usize = 40;

/// The oldest version of the interface that has all commands used here. The kernel accepts every
/// 4.x up to its own version.
const INTERFACE_VERSION: [u32; 3] = [4, 0, 0];

/// Makes the kernel wipe its copies of the buffer.
const DM_SECURE_DATA_FLAG: u32 = 1 << 15;

/// Tells the device-mapper rules of udev to act on this event, and not on a later change of the
/// disk below (DM_UDEV_PRIMARY_SOURCE_FLAG of libdevmapper, in the upper half of the event number).
const UDEV_PRIMARY_SOURCE: u32 = 0x0040 << 16;
/// The flags of libdevmapper for a device below another device: udev runs no rules of a subsystem,
/// does not probe for a file system and makes no link
/// (DM_UDEV_DISABLE_{SUBSYSTEM,DISK,OTHER}_RULES_FLAG). A probe would read sectors never written.
const UDEV_HIDDEN: u32 = (0x0002 | 0x0004 | 0x0008) << 16;

/// Number of tries and the pause between them to remove a busy device, which udev may have open: 5
/// s in total, as in libdevmapper.
const REMOVE_ATTEMPTS: u32 = 50;
const REMOVE_INTERVAL: Duration = Duration::from_millis(100);

/// The open control node.
pub(super) struct Control(File);

/// The programs that may use a new device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Audience {
    Everyone,
    /// A part of another mapping.
    Nobody,
}

impl Control {
    pub fn open() -> Result<Control, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/mapper/control");
        file.map(Control).map_err(Error::Control)
    }

    /// Returns the UUID of the device `name`; `None` if the device does not exist.
    pub fn uuid(&self, name: &str) -> Result<Option<String>, Error> {
        let mut message = Message::new(name);
        match self.run(DmCommand::DevStatus, &mut message) {
            Ok(()) => Ok(Some(message.string(UUID))),
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            Err(error) => Err(kernel(name, "report the status", error)),
        }
    }

    /// Creates a device without a table. The device is removed on drop, unless [`Device::keep`] was
    /// called.
    pub fn create(&self, name: &str, uuid: &str) -> Result<Device<'_>, Error> {
        let mut message = Message::new(name);
        message.set_string(UUID, uuid);
        self.run(DmCommand::DevCreate, &mut message)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => Error::AlreadyActive(name.into()),
                _ => kernel(name, "create the device", error),
            })?;
        let number = decode_device_number(message.u64(DEV));
        Ok(Device {
            control: self,
            name: name.into(),
            number,
            kept: false,
        })
    }

    /// Removes a device and its node in `/dev/mapper`.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        for attempt in 1.. {
            let mut message = Message::new(name);
            message.set_u32(EVENT_NR, UDEV_PRIMARY_SOURCE);
            match self.run(DmCommand::DevRemove, &mut message) {
                Ok(()) => break,
                Err(error) if error.raw_os_error() != Some(libc::EBUSY) => {
                    return Err(kernel(name, "remove the device", error));
                }
                Err(_) if attempt == REMOVE_ATTEMPTS => {
                    return Err(Error::InUse(name.into()));
                }
                Err(_) => thread::sleep(REMOVE_INTERVAL),
            }
        }
        // udev may have removed the node, or udev may not run
        let _ = fs::remove_file(node(name));
        Ok(())
    }

    fn run(&self, operation: DmCommand, message: &mut Message) -> io::Result<()> {
        command(&self.0, operation, &mut message.0)
    }
}

/// A device that this process created. It is removed on drop, unless [`Device::keep`] was called.
pub(super) struct Device<'c> {
    control: &'c Control,
    name: String,
    number: (u32, u32),
    kept: bool,
}

impl Device<'_> {
    /// Loads a table with one target.
    pub fn load(&self, target: &str, sectors: u64, parameters: &[u8]) -> io::Result<()> {
        self.load_all(target, &[(sectors, parameters)])
    }

    /// Loads a table with targets of one type, one after the other from sector 0 on: the sectors and the
    /// parameters of each. [`Device::resume`] activates it. The target type interprets the parameters now,
    /// and may already write to the disk below. All copies of them are wiped.
    pub fn load_all(&self, target: &str, table: &[(u64, &[u8])]) -> io::Result<()> {
        let mut message = Message::with_table(&self.name, target, table);
        message.set_u32(FLAGS, DM_SECURE_DATA_FLAG);
        self.control.run(DmCommand::TableLoad, &mut message)
    }

    /// Removes a table that was loaded and not activated.
    pub fn clear(&self) -> Result<(), Error> {
        let mut message = Message::new(&self.name);
        self.control
            .run(DmCommand::TableClear, &mut message)
            .map_err(|error| kernel(&self.name, "remove a loaded table", error))
    }

    /// Activates the loaded table, notifies udev, and makes sure that the node in `/dev/mapper`
    /// exists.
    pub fn resume(&self, audience: Audience) -> Result<(), Error> {
        let mut message = Message::new(&self.name);
        // without DM_SUSPEND_FLAG the command means resume
        message.set_u32(FLAGS, DM_SECURE_DATA_FLAG);
        let hidden = if audience == Audience::Nobody {
            UDEV_HIDDEN
        } else {
            0
        };
        message.set_u32(EVENT_NR, UDEV_PRIMARY_SOURCE | hidden);
        self.control
            .run(DmCommand::DevSuspend, &mut message)
            .map_err(|error| kernel(&self.name, "activate the device", error))?;
        self.make_node()
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns `(major, minor)`.
    pub fn number(&self) -> (u32, u32) {
        self.number
    }

    /// Keeps the device and returns its path.
    pub fn keep(mut self) -> PathBuf {
        self.kept = true;
        node(&self.name)
    }

    /// Makes the link that udev also makes, so that the link exists with and without udev.
    /// cryptsetup finds devices by this link.
    fn make_node(&self) -> Result<(), Error> {
        let node = node(&self.name);
        if block::number(&node).is_ok_and(|number| number == self.number) {
            return Ok(());
        }
        // a stale link of an earlier device with this name
        let _ = fs::remove_file(&node);
        let target = format!("../dm-{}", self.number.1);
        match std::os::unix::fs::symlink(target, &node) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(Error::of_disk(&node, "make the link of the device", error))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = self.control.remove(&self.name)
        {
            log::warn!("cannot remove the failed disk mapping: {error}");
        }
    }
}

fn node(name: &str) -> PathBuf {
    Path::new("/dev/mapper").join(name)
}

pub(super) fn kernel(name: &str, doing: &str, error: io::Error) -> Error {
    Error::Failed(format!(
        "/dev/mapper/{name}: the kernel cannot {doing}: {error}; the kernel log (dmesg) gives the reason"
    ))
}

/// If the module of the table's target is missing, adds this to the kernel's error.
pub(super) fn refused(module: &str, error: io::Error) -> io::Error {
    if Path::new("/sys/module").join(module).exists() {
        return error;
    }
    let hint = format!("the kernel module {module} is not loaded: the initrd may lack it");
    io::Error::new(error.kind(), format!("{error}; {hint}"))
}

/// Returns the name of a device in a table: `major:minor`. Unlike a path, it always means the same
/// device and needs no node.
pub(super) fn table_name((major, minor): (u32, u32)) -> String {
    format!("{major}:{minor}")
}

/// Decodes a device number; the inverse of huge_encode_dev in the kernel (linux/kdev_t.h).
fn decode_device_number(encoded: u64) -> (u32, u32) {
    let encoded = encoded as u32;
    (
        (encoded & 0x000f_ff00) >> 8,
        (encoded & 0xff) | ((encoded >> 12) & 0x000f_ff00),
    )
}

/// A buffer for one command, wiped on drop. It never grows, so no copy of a key remains in freed
/// memory.
struct Message(Zeroizing<Vec<u8>>);

impl Message {
    fn new(name: &str) -> Message {
        Message::of_len(HEADER_LEN, name)
    }

    fn with_table(name: &str, target: &str, table: &[(u64, &[u8])]) -> Message {
        // a zero byte ends the parameters; the length of a target is a multiple of 8
        let spec_len =
            |parameters: &[u8]| (TARGET_SPEC_LEN + parameters.len() + 1).next_multiple_of(8);
        let specs: usize = table.iter().map(|row| spec_len(row.1)).sum();
        let mut message = Message::of_len(HEADER_LEN + specs, name);
        message.set_u32(TARGET_COUNT, table.len() as u32);
        let (mut specs, mut start) = (&mut message.0[HEADER_LEN..], 0);
        for (sectors, parameters) in table {
            let spec;
            (spec, specs) = specs.split_at_mut(spec_len(parameters));
            spec[..8].copy_from_slice(&u64::to_ne_bytes(start));
            spec[8..16].copy_from_slice(&sectors.to_ne_bytes());
            let next = spec.len() as u32;
            spec[20..24].copy_from_slice(&next.to_ne_bytes());
            spec[24..24 + target.len()].copy_from_slice(target.as_bytes());
            spec[TARGET_SPEC_LEN..TARGET_SPEC_LEN + parameters.len()].copy_from_slice(parameters);
            start += sectors;
        }
        message
    }

    fn of_len(len: usize, name: &str) -> Message {
        let mut message = Message(Zeroizing::new(vec![0; len]));
        for (number, at) in INTERFACE_VERSION.iter().zip(VERSION.step_by(4)) {
            message.0[at..at + 4].copy_from_slice(&number.to_ne_bytes());
        }
        message.set_u32(DATA_START, HEADER_LEN as u32);
        message.set_string(NAME, name);
        message
    }

    fn u64(&self, field: Range<usize>) -> u64 {
        u64::from_ne_bytes(self.0[field].try_into().expect("a field of 8 bytes"))
    }

    fn set_u32(&mut self, field: Range<usize>, value: u32) {
        self.0[field].copy_from_slice(&value.to_ne_bytes());
    }

    fn string(&self, field: Range<usize>) -> String {
        let bytes = self.0[field]
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// Sets a text field, and truncates a longer value.
    fn set_string(&mut self, field: Range<usize>, value: &str) {
        let len = value.len().min(field.len() - 1);
        self.0[field.start..field.start + len].copy_from_slice(&value.as_bytes()[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_message_has_the_layout_of_the_kernel_headers() {
        let crypt = &b"capi:x :96:logon:y 0 254:0 0"[..];
        let message = Message::with_table("state", "crypt", &[(483_712, crypt), (8, b"254:1 0")]);
        assert_eq!(message.0[TARGET_COUNT], 2_u32.to_ne_bytes());
        assert_eq!(message.0[DATA_START], 312_u32.to_ne_bytes());
        assert_eq!(message.string(NAME), "state");
        let (spec, second) = message.0[312..].split_at(72);
        assert_eq!(spec[..8], [0; 8]);
        assert_eq!(spec[8..16], 483_712_u64.to_ne_bytes());
        assert_eq!(spec[20..24], (spec.len() as u32).to_ne_bytes());
        assert_eq!(&spec[24..40], b"crypt\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(&spec[40..68], b"capi:x :96:logon:y 0 254:0 0");
        assert_eq!(spec[68..], [0; 4]);
        assert_eq!(second[..8], 483_712_u64.to_ne_bytes());
        assert_eq!(second[8..16], 8_u64.to_ne_bytes());
        assert_eq!(second[20..24], 48_u32.to_ne_bytes());
        assert_eq!(&second[40..], b"254:1 0\0");
    }

    #[test]
    fn device_numbers_beyond_one_byte_decode() {
        assert_eq!(decode_device_number(0xfe01), (254, 1));
        // minor 0x12345 of major 0x103
        assert_eq!(decode_device_number(0x1231_0345), (0x103, 0x12345));
    }

    #[test]
    fn a_name_that_is_too_long_is_truncated() {
        let message = Message::new(&"n".repeat(200));
        assert_eq!(message.string(NAME).len(), 127);
        assert_eq!(message.string(UUID), "");
    }
}
