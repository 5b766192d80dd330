//! The kernel's key retention service (keyrings(7)), which keeps a disk key where no program can
//! read it.

use std::ffi::CString;
use std::io;
use std::marker::PhantomData;

use super::check;

// linux/keyctl.h
const KEY_SPEC_THREAD_KEYRING: i32 = -1;
const KEYCTL_REVOKE: i32 = 3;
const KEYCTL_UNLINK: i32 = 9;

/// A key of type `logon` in the thread's own keyring. No program in user space can read it back,
/// not even this one. dm-crypt finds it by its description if the same thread loads the table.
/// Dropping it revokes the key and removes it from the keyring.
#[derive(Debug)]
pub struct LogonKey {
    serial: i32,
    // A key belongs to its thread, because each thread has a keyring of its own.
    not_send: PhantomData<*const ()>,
}

impl LogonKey {
    /// Adds a key (add_key(2)). `description` must begin with `service:`, for any service. `ENOSYS`
    /// means that the kernel has no keyrings.
    pub fn add(description: &str, payload: &[u8]) -> io::Result<LogonKey> {
        let description = CString::new(description)?;
        // SAFETY: both strings are valid C strings, and the payload's pointer comes with its
        // length; the kernel only reads.
        let serial = check(unsafe {
            libc::syscall(
                libc::SYS_add_key,
                c"logon".as_ptr(),
                description.as_ptr(),
                payload.as_ptr(),
                payload.len(),
                KEY_SPEC_THREAD_KEYRING,
            )
        })?;
        Ok(LogonKey {
            serial: serial as i32,
            not_send: PhantomData,
        })
    }
}

impl Drop for LogonKey {
    fn drop(&mut self) {
        // Errors are ignored: the keyring itself ends with its thread.
        // SAFETY: these two operations of keyctl(2) take only integers.
        unsafe {
            libc::syscall(libc::SYS_keyctl, KEYCTL_REVOKE, self.serial);
            libc::syscall(
                libc::SYS_keyctl,
                KEYCTL_UNLINK,
                self.serial,
                KEY_SPEC_THREAD_KEYRING,
            );
        }
    }
}
