//! The size of a mounted ext4 file system.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::check;

// _IOW('f', 16, __u64) of fs/ext4/ext4.h
const EXT4_IOC_RESIZE_FS: u32 = 0x4008_6610;

/// Resizes the mounted file system that has the directory or file `at` to this number of blocks
/// (the kernel's Documentation/admin-guide/ext4.rst). The kernel reads the last block first.
pub fn resize(at: &File, blocks: u64) -> io::Result<()> {
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64 from the given pointer; other file systems return an
    // error.
    check(unsafe { libc::ioctl(at.as_raw_fd(), EXT4_IOC_RESIZE_FS as _, &blocks) })?;
    Ok(())
}
