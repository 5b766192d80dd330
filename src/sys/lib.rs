//! The raw system calls and `unsafe` blocks of all programs; one file per subject. Each function is
//! safe to call and returns [`std::io::Error`] from `errno`. It names the manual page or kernel header
//! from which its constants come.
#![allow(unsafe_code)]

pub mod activation;
pub mod block;
pub mod cipher;
pub mod clock;
pub mod device_mapper;
pub mod ext4;
pub mod interfaces;
pub mod keeping;
pub mod keyring;
pub mod mount;
pub mod net;
pub mod nvme;
pub mod poll;
pub mod power;
pub mod process;
pub mod sev_guest;
pub mod signal;
pub mod space;
pub mod terminal;
pub mod wiping;

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Converts the return value of a C function: -1 means that `errno` has the error.
fn check<T: Into<i64> + Copy>(returned: T) -> io::Result<T> {
    if returned.into() == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(returned)
    }
}

/// Converts a path for the kernel. `InvalidInput` for a path with a zero byte.
fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}
