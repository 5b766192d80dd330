//! The kernel's key retention service (keyrings(7)): a place for a disk key where no program can read it.

use std::ffi::CString;
use std::io;
use std::marker::PhantomData;

use super::check;

// linux/keyctl.h
const KEY_SPEC_THREAD_KEYRING: i32 = -1;
const KEYCTL_REVOKE: i32 = 3;
const KEYCTL_UNLINK: i32 = 9;

/// A key of type `logon` in the thread's own keyring. User space, we included, cannot read it back; dm-crypt finds it by its
/// description when the table is loaded by the same thread. Dropping revokes it and takes it out of the keyring.
#[derive(Debug)]
pub struct LogonKey {
    serial: i32,
    // tied to its thread: another one has another thread keyring
    not_send: PhantomData<*const ()>,
}

impl LogonKey {
    /// Adds a key (add_key(2)). `description` needs a `service:` prefix. `ENOSYS` from a kernel without keyrings.
    pub fn add(description: &str, payload: &[u8]) -> io::Result<LogonKey> {
        let description = CString::new(description)?;
        // SAFETY: both strings are valid C strings and the payload's length is given with its pointer; the kernel only reads.
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
        // Errors change nothing: the keyring itself goes with the thread.
        // SAFETY: keyctl(2) with these two operations takes integers only.
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
