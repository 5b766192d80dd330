//! Takes the socket that systemd has opened for a service: sd_listen_fds(3).

use std::env;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::check;

/// The number of the first descriptor that is passed (SD_LISTEN_FDS_START).
const FIRST: i32 = 3;

/// Returns the one unix socket that systemd passed to this process. Errors: `NotFound` if it passed
/// none or several, `InvalidInput` if it is of another kind, and after the first call
/// `AlreadyExists`.
pub fn listener() -> io::Result<UnixListener> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let passed = |name| env::var(name).ok()?.parse().ok();
    // systemd sets the process ID, because a child process inherits the environment
    if passed("LISTEN_PID") != Some(process::id()) || passed("LISTEN_FDS") != Some(1) {
        return Err(io::ErrorKind::NotFound.into());
    }
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    // SAFETY: fcntl(2) F_SETFD takes only integers. It fails if the descriptor is not open.
    check(unsafe { libc::fcntl(FIRST, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: the descriptor is open, systemd passed it to this process (LISTEN_PID), and it is
    // taken only once.
    let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(FIRST) });
    listener.local_addr()?;
    Ok(listener)
}
