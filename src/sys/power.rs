//! Ends the running system.

use std::io;

/// Writes all file systems to disk and restarts the machine at once, without its init system
/// (reboot(2)). Returns only on an error.
pub fn reboot() -> io::Error {
    end(libc::RB_AUTOBOOT)
}

/// Writes all file systems to disk and powers the machine off at once, without its init system
/// (reboot(2)). Returns only on an error.
pub fn power_off() -> io::Error {
    end(libc::RB_POWER_OFF)
}

fn end(how: libc::c_int) -> io::Error {
    // SAFETY: neither call takes a pointer; both are made for any process, and reboot(2) checks its
    // right to do so.
    unsafe {
        libc::sync();
        libc::reboot(how);
    }
    io::Error::last_os_error()
}
