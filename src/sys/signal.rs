//! The wish to stop: SIGTERM and SIGINT as a flag to ask and a descriptor to wait for.
//!
//! The handler does the two things that are allowed in one (signal-safety(7)): it stores an atomic and writes to an eventfd,
//! which from then on stays readable for every thread that polls it.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use super::check;

static REQUESTED: AtomicBool = AtomicBool::new(false);
static EVENT: AtomicI32 = AtomicI32::new(-1);
static TERMINATION: OnceLock<Termination> = OnceLock::new();

/// Says whether the process was asked to stop. There is one a process; copies are free.
#[derive(Clone, Copy, Debug)]
pub struct Termination {
    event: RawFd,
}

/// Takes over SIGTERM and SIGINT (sigaction(2)); further calls give the same answer.
pub fn on_termination() -> io::Result<Termination> {
    if let Some(termination) = TERMINATION.get() {
        return Ok(*termination);
    }
    // SAFETY: takes integers only; the descriptor is never closed, so it stays valid in the handler.
    let event = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
    // a second thread in this function at the same time leaks one descriptor and uses the first one's
    let termination = *TERMINATION.get_or_init(|| Termination { event });
    EVENT.store(termination.event, Ordering::SeqCst);
    for signal in [libc::SIGTERM, libc::SIGINT] {
        install(signal)?;
    }
    Ok(termination)
}

fn install(signal: i32) -> io::Result<()> {
    // SAFETY: all zeroes is a valid sigaction (empty mask, no flags); the handler is async-signal-safe, see above.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as extern "C" fn(i32) as usize;
        // waits are by poll(2), which returns EINTR regardless; everything else shall go on
        action.sa_flags = libc::SA_RESTART;
        check(libc::sigaction(signal, &action, std::ptr::null_mut()))?;
    }
    Ok(())
}

extern "C" fn handle(_signal: i32) {
    REQUESTED.store(true, Ordering::SeqCst);
    let one = 1_u64;
    // SAFETY: write(2) is async-signal-safe and reads 8 bytes of a live variable. It may change errno: saved and restored.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(EVENT.load(Ordering::SeqCst), (&raw const one).cast(), 8);
        *libc::__errno_location() = errno;
    }
}

impl Termination {
    /// Whether SIGTERM or SIGINT came.
    pub fn requested(&self) -> bool {
        REQUESTED.load(Ordering::SeqCst)
    }

    /// Sleeps until `timeout` is over or a stop is requested; true in the latter case.
    pub fn wait(&self, timeout: Duration) -> bool {
        let end = std::time::Instant::now() + timeout;
        while !self.requested() {
            let left = end.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                break;
            }
            // rounded up, or the last part of a millisecond would be a busy loop
            let milliseconds = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            let mut poll = libc::pollfd { fd: self.event, events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd, and its number; an error (EINTR) leads to another look at flag and clock.
            unsafe { libc::poll(&mut poll, 1, milliseconds) };
        }
        self.requested()
    }

    /// Readable from the moment on that a stop is requested: for a poll(2) beside sockets. Do not read from it.
    pub fn descriptor(&self) -> BorrowedFd<'static> {
        // SAFETY: the eventfd is never closed.
        unsafe { BorrowedFd::borrow_raw(self.event) }
    }
}
