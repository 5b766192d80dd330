//! mount(2) and umount2(2).

use std::ffi::CStr;
use std::io;
use std::path::Path;

use super::{c_path, check};

/// Mounts the file system of type `kind` from `source` at the existing directory `target`.
/// The mounted file system may contain device nodes and set-user-ID programs.
pub fn mount(source: &Path, target: &Path, kind: &CStr, read_only: bool) -> io::Result<()> {
    let (source, target) = (c_path(source)?, c_path(target)?);
    let flags = if read_only { libc::MS_RDONLY } else { 0 };
    // SAFETY: these are three valid C strings that outlive the call; the kernel only reads them.
    check(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            std::ptr::null(),
        )
    })?;
    Ok(())
}

/// Unmounts the file system at `target`; `EBUSY` while a file in it is open.
pub fn unmount(target: &Path) -> io::Result<()> {
    let target = c_path(target)?;
    // SAFETY: `target` is a valid C string that outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), 0) })?;
    Ok(())
}
