//! Every raw system call and `unsafe` block of the crate (but the TPM bindings'), one file a subject. Each function is safe
//! to call, returns [`std::io::Error`] from `errno`, and names the manual page or kernel header that its constants come from.
#![allow(unsafe_code)]

pub mod block;
pub mod clock;
pub mod device_mapper;
pub mod file;
pub mod interfaces;
pub mod keyring;
pub mod mount;
pub mod net;
pub mod poll;
pub mod process;
pub mod signal;
pub mod wiping;

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A C return value as a `Result`: -1 means that `errno` says why.
fn check<T: Into<i64> + Copy>(returned: T) -> io::Result<T> {
    if returned.into() == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(returned)
    }
}

/// A path as the kernel takes it. `InvalidInput` for a path that contains a zero byte.
fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}
