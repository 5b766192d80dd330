//! The ioctl of `/dev/mapper/control` (linux/dm-ioctl.h). This module makes the call safe;
//! [`disk::device_mapper`] fills and reads the buffers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::check;

/// Size in bytes of `struct dm_ioctl`, with which every buffer starts.
pub const HEADER_LEN: usize = 312;
/// Offset of `dm_ioctl.data_size`: the number of bytes of the buffer, including the header, that
/// the kernel may read and write.
pub const DATA_SIZE_AT: usize = 12;

/// The used commands with their numbers in linux/dm-ioctl.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum DmCommand {
    DevCreate = 3,
    DevRemove = 4,
    DevSuspend = 6,
    DevStatus = 7,
    TableLoad = 9,
    TableClear = 10,
}

/// Runs one command on `/dev/mapper/control`. `buffer` holds a `struct dm_ioctl` and its payload,
/// and receives the answer. This function sets `data_size`.
///
/// # Panics
/// If `buffer` is shorter than the header. This is a mistake of the caller; no input can cause it.
pub fn command(control: &File, command: DmCommand, buffer: &mut [u8]) -> io::Result<()> {
    assert!(
        buffer.len() >= HEADER_LEN,
        "a device-mapper buffer starts with a whole struct dm_ioctl"
    );
    let data_size =
        u32::try_from(buffer.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    buffer[DATA_SIZE_AT..DATA_SIZE_AT + 4].copy_from_slice(&data_size.to_ne_bytes());
    // _IOWR(DM_IOCTL = 0xfd, command, struct dm_ioctl)
    let request = 0xc000_0000_u32 | (HEADER_LEN as u32) << 16 | 0xfd << 8 | command as u32;
    // SAFETY: the kernel reads and writes at most `data_size` bytes at the pointer, which `buffer`
    // holds and borrows exclusively. Any other device does not know a request of type 0xfd and
    // answers ENOTTY.
    check(unsafe { libc::ioctl(control.as_raw_fd(), request as _, buffer.as_mut_ptr()) })?;
    Ok(())
}
