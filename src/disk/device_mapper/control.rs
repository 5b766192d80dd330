//! The messages of `/dev/mapper/control`: `struct dm_ioctl`, for a table followed by `struct dm_target_spec` and its parameters
//! (linux/dm-ioctl.h).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use zeroize::Zeroizing;

use super::Error;
use sys::block;
use sys::device_mapper::{Command, HEADER_LEN, command};

// where the fields of struct dm_ioctl lie
const VERSION: Range<usize> = 0..12;
const DATA_START: Range<usize> = 16..20;
const TARGET_COUNT: Range<usize> = 20..24;
const FLAGS: Range<usize> = 28..32;
const EVENT_NR: Range<usize> = 32..36;
const DEV: Range<usize> = 40..48;
const NAME: Range<usize> = 48..176;
const UUID: Range<usize> = 176..305;

/// `sizeof(struct dm_target_spec)`: start and length in sectors (u64), status, offset of the next (u32), type (16 bytes).
const TARGET_SPEC_LEN: usize = 40;

/// The interface's oldest version that has all we use; the kernel accepts every 4.x up to its own.
const INTERFACE_VERSION: [u32; 3] = [4, 0, 0];

const DM_ACTIVE_PRESENT_FLAG: u32 = 1 << 5;
/// The kernel wipes its copy of the buffer, and asks for a wiped bounce buffer where it uses one.
const DM_SECURE_DATA_FLAG: u32 = 1 << 15;

/// Goes to udev with the event: this one, and not a later change of the disk below, is what its device-mapper rules are to act on
/// (DM_UDEV_PRIMARY_SOURCE_FLAG of libdevmapper, in the upper half of the event number).
const UDEV_PRIMARY_SOURCE: u32 = 0x0040 << 16;
/// As libdevmapper's flags for a device below another: no rule of a subsystem, no probing for a file system, no link
/// (DM_UDEV_DISABLE_{SUBSYSTEM,DISK,OTHER}_RULES_FLAG). A probe would read sectors that were never written.
const UDEV_HIDDEN: u32 = (0x0002 | 0x0004 | 0x0008) << 16;

/// How often, and how far apart, removal of a busy device is tried: udev may be looking at it. 5 s in all, as libdevmapper does.
const REMOVE_ATTEMPTS: u32 = 50;
const REMOVE_INTERVAL: Duration = Duration::from_millis(100);

/// The open control node.
pub(super) struct Control(File);

/// What the kernel says of a device.
#[derive(Debug)]
pub(super) struct Status {
    /// whether a table is in use (and not merely loaded)
    pub active: bool,
    pub uuid: String,
}

/// Who is to notice a new device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Audience {
    Everyone,
    /// a part of another mapping
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

    /// `None` if there is no device of that name.
    pub fn status(&self, name: &str) -> Result<Option<Status>, Error> {
        let mut message = Message::new(name);
        match self.run(Command::DevStatus, &mut message) {
            Ok(()) => Ok(Some(Status {
                active: message.u32(FLAGS) & DM_ACTIVE_PRESENT_FLAG != 0,
                uuid: message.string(UUID),
            })),
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            Err(error) => Err(kernel(name, "tell the status", error)),
        }
    }

    /// A new device without a table. Dropped without [`Device::keep`], it is removed again.
    pub fn create(&self, name: &str, uuid: &str) -> Result<Device<'_>, Error> {
        let mut message = Message::new(name);
        message.set_string(UUID, uuid);
        self.run(Command::DevCreate, &mut message)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => Error::AlreadyActive { name: name.into() },
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

    /// Removes a device and its node.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        for attempt in 1.. {
            let mut message = Message::new(name);
            message.set_u32(EVENT_NR, UDEV_PRIMARY_SOURCE);
            match self.run(Command::DevRemove, &mut message) {
                Ok(()) => break,
                Err(error) if error.raw_os_error() != Some(libc::EBUSY) => {
                    return Err(kernel(name, "remove the device", error));
                }
                Err(_) if attempt == REMOVE_ATTEMPTS => {
                    return Err(Error::InUse { name: name.into() });
                }
                Err(_) => thread::sleep(REMOVE_INTERVAL),
            }
        }
        // udev may have been faster, or not be running
        let _ = fs::remove_file(node(name));
        Ok(())
    }

    fn run(&self, operation: Command, message: &mut Message) -> io::Result<()> {
        command(&self.0, operation, &mut message.0)
    }
}

/// A device that we created and have not promised to keep yet.
pub(super) struct Device<'c> {
    control: &'c Control,
    name: String,
    number: (u32, u32),
    kept: bool,
}

impl Device<'_> {
    /// Gives the device a table of one target that starts at sector 0, to be used from [`Device::resume`] on. The kernel's part
    /// that the target type names interprets `parameters`, and may write to the disk below already. Every copy of `parameters`
    /// on the way is wiped.
    pub fn load(&self, target: &str, sectors: u64, parameters: &[u8]) -> io::Result<()> {
        let mut message = Message::with_table(&self.name, target, sectors, parameters);
        message.set_u32(FLAGS, DM_SECURE_DATA_FLAG);
        self.control.run(Command::TableLoad, &mut message)
    }

    /// Takes back a table that was loaded and not resumed.
    pub fn clear(&self) -> Result<(), Error> {
        let mut message = Message::new(&self.name);
        self.control
            .run(Command::TableClear, &mut message)
            .map_err(|error| kernel(&self.name, "drop a loaded table", error))
    }

    /// Puts the loaded table to use, tells udev, and makes sure that the node is there.
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
            .run(Command::DevSuspend, &mut message)
            .map_err(|error| kernel(&self.name, "start the device", error))?;
        self.make_node()
    }

    /// How a table above names this device.
    pub fn table_name(&self) -> String {
        table_name(self.number)
    }

    /// Leaves the device in place for good.
    pub fn keep(mut self) -> PathBuf {
        self.kept = true;
        node(&self.name)
    }

    /// The link that udev would make, so that it does not matter who is first. cryptsetup finds the devices of a mapping by it.
    fn make_node(&self) -> Result<(), Error> {
        let node = node(&self.name);
        if block::number(&node).is_ok_and(|number| number == self.number) {
            return Ok(());
        }
        // a stale one, of a device of that name that went without udev
        let _ = fs::remove_file(&node);
        let target = format!("../dm-{}", self.number.1);
        match std::os::unix::fs::symlink(target, &node) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(Error::Disk {
                device: node,
                doing: "make the device's link",
                error,
            }),
            _ => Ok(()),
        }
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = self.control.remove(&self.name)
        {
            log::warn!("a mapping that failed is left behind: {error}");
        }
    }
}

fn node(name: &str) -> PathBuf {
    Path::new("/dev/mapper").join(name)
}

pub(super) fn kernel(name: &str, doing: &'static str, error: io::Error) -> Error {
    Error::Kernel {
        name: name.into(),
        doing,
        error,
    }
}

/// A device as a table names it: `major:minor`. Unlike a path it cannot change its meaning, nor does it need a node.
pub(super) fn table_name((major, minor): (u32, u32)) -> String {
    format!("{major}:{minor}")
}

/// The inverse of the kernel's huge_encode_dev (linux/kdev_t.h).
fn decode_device_number(encoded: u64) -> (u32, u32) {
    let encoded = encoded as u32;
    (
        (encoded & 0x000f_ff00) >> 8,
        (encoded & 0xff) | ((encoded >> 12) & 0x000f_ff00),
    )
}

/// A buffer for one command; wiped on drop. Never grows, so no copy of a key stays behind.
struct Message(Zeroizing<Vec<u8>>);

impl Message {
    fn new(name: &str) -> Message {
        Message::of_len(HEADER_LEN, name)
    }

    fn with_table(name: &str, target: &str, sectors: u64, parameters: &[u8]) -> Message {
        // a zero byte ends the parameters; the next target, and so the end, lies on a multiple of 8
        let spec_len = (TARGET_SPEC_LEN + parameters.len() + 1).next_multiple_of(8);
        let mut message = Message::of_len(HEADER_LEN + spec_len, name);
        message.set_u32(TARGET_COUNT, 1);
        let spec = &mut message.0[HEADER_LEN..];
        spec[8..16].copy_from_slice(&sectors.to_ne_bytes());
        spec[20..24].copy_from_slice(&(spec_len as u32).to_ne_bytes());
        spec[24..24 + target.len()].copy_from_slice(target.as_bytes());
        spec[TARGET_SPEC_LEN..TARGET_SPEC_LEN + parameters.len()].copy_from_slice(parameters);
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

    fn u32(&self, field: Range<usize>) -> u32 {
        u32::from_ne_bytes(self.0[field].try_into().expect("a field of 4 bytes"))
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

    /// Longer ones are cut, with room for the zero byte; [`super::crypt::Cipher::of`] refuses such names before.
    fn set_string(&mut self, field: Range<usize>, value: &str) {
        let len = value.len().min(field.len() - 1);
        self.0[field.start..field.start + len].copy_from_slice(&value.as_bytes()[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_message_is_what_the_kernels_headers_describe() {
        let message =
            Message::with_table("state", "crypt", 483_712, b"capi:x :96:logon:y 0 254:0 0");
        assert_eq!(message.0.len() % 8, 0);
        assert_eq!(message.u32(TARGET_COUNT), 1);
        assert_eq!(message.u32(DATA_START), 312);
        assert_eq!(message.string(NAME), "state");
        let spec = &message.0[312..];
        assert_eq!(spec[..8], [0; 8]);
        assert_eq!(spec[8..16], 483_712_u64.to_ne_bytes());
        assert_eq!(spec[20..24], (spec.len() as u32).to_ne_bytes());
        assert_eq!(&spec[24..40], b"crypt\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(&spec[40..68], b"capi:x :96:logon:y 0 254:0 0");
        assert_eq!(spec[68..], [0; 4]);
    }

    #[test]
    fn device_numbers_beyond_one_byte_decode() {
        assert_eq!(decode_device_number(0xfe01), (254, 1));
        // minor 0x12345 of major 0x103
        assert_eq!(decode_device_number(0x1231_0345), (0x103, 0x12345));
    }

    #[test]
    fn a_name_too_long_is_cut_before_the_end_of_its_field() {
        let message = Message::new(&"n".repeat(200));
        assert_eq!(message.string(NAME).len(), 127);
        assert_eq!(message.string(UUID), "");
    }
}
