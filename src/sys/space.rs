//! Space for a file that is written later, also when the disk is full by then.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::check;

/// Allocates the first `bytes` of the file, whose size stays (fallocate(2), `FALLOC_FL_KEEP_SIZE`).
pub fn reserve(file: &File, bytes: i64) -> io::Result<()> {
    let (fd, mode) = (file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE);
    // SAFETY: fallocate(2) takes only integers.
    check(unsafe { libc::fallocate(fd, mode, 0, bytes as _) })?;
    Ok(())
}
