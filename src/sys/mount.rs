//! mount(2) and umount2(2).

use std::ffi::CString;
use std::io;
use std::path::Path;

use super::{c_path, check};

/// The flags of mount(2) that we use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flags {
    /// MS_RDONLY.
    pub read_only: bool,
    /// MS_NOSUID and MS_NODEV.
    pub no_devices: bool,
    /// MS_BIND: `source` is a directory that also appears at `target`; file system type and options
    /// are ignored.
    pub bind: bool,
}

impl Flags {
    fn bits(self) -> libc::c_ulong {
        [
            (self.read_only, libc::MS_RDONLY),
            (self.no_devices, libc::MS_NOSUID | libc::MS_NODEV),
            (self.bind, libc::MS_BIND),
        ]
        .into_iter()
        .filter_map(|(set, bits)| set.then_some(bits))
        .fold(0, |all, bits| all | bits)
    }
}

/// Mounts the file system of type `kind` from `source` at the existing directory `target`.
/// `options` are specific to the file system and separated by commas.
pub fn mount(
    source: &Path,
    target: &Path,
    kind: &str,
    flags: Flags,
    options: &str,
) -> io::Result<()> {
    let (source, target) = (c_path(source)?, c_path(target)?);
    let (kind, options) = (CString::new(kind)?, CString::new(options)?);
    // SAFETY: these are four valid C strings that outlive the call; the kernel only reads them.
    check(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags.bits(),
            options.as_ptr().cast(),
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
