//! Stop signals: a thread waits for SIGTERM and SIGINT instead of handling them.

use std::time::{Duration, Instant};
use std::{fmt, io, mem, ptr};

/// SIGTERM and SIGINT, blocked for the thread that creates this value and for all threads that it
/// starts later. So they stay pending until [`StopSignals::wait`] takes them. `main` must create it
/// before any other thread runs.
pub struct StopSignals(libc::sigset_t);

/// A signal that asks the program to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGTERM, from a service manager.
    Term,
    /// SIGINT, from the keyboard.
    Int,
}

impl fmt::Display for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StopSignal::Term => "SIGTERM",
            StopSignal::Int => "SIGINT",
        })
    }
}

impl StopSignals {
    /// Blocks both signals (pthread_sigmask(3)).
    pub fn block() -> io::Result<StopSignals> {
        // SAFETY: a sigset_t is plain data for which zeros are a valid value; sigemptyset then
        // initializes it.
        let mut set: libc::sigset_t = unsafe { mem::zeroed() };
        // SAFETY: `set` outlives the three calls, and the signal numbers exist.
        unsafe {
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGTERM);
            libc::sigaddset(&mut set, libc::SIGINT);
        }
        // SAFETY: `set` is initialized, and the old mask is not requested.
        match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, ptr::null_mut()) } {
            0 => Ok(StopSignals(set)),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Sleeps until one of the signals arrives, or for this time (sigtimedwait(2)); `None` if none
    /// arrived.
    pub fn wait_for(&self, time: Duration) -> io::Result<Option<StopSignal>> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout = libc::timespec {
                tv_sec: left.as_secs() as _,
                tv_nsec: left.subsec_nanos() as _,
            };
            // SAFETY: the set is initialized, the information is not requested, and `timeout`
            // outlives the call.
            match unsafe { libc::sigtimedwait(&self.0, ptr::null_mut(), &timeout) } {
                libc::SIGINT => return Ok(Some(StopSignal::Int)),
                libc::SIGTERM => return Ok(Some(StopSignal::Term)),
                _ => {}
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN) => return Ok(None),
                Some(libc::EINTR) => {}
                _ => return Err(error),
            }
        }
    }

    /// Sleeps until one of the signals arrives (sigwait(3)).
    pub fn wait(&self) -> io::Result<StopSignal> {
        let mut signal = 0;
        // SAFETY: the set is initialized, and `signal` outlives the call.
        match unsafe { libc::sigwait(&self.0, &mut signal) } {
            0 if signal == libc::SIGINT => Ok(StopSignal::Int),
            0 => Ok(StopSignal::Term),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_before_the_wait_is_not_lost() {
        // The test needs a thread of its own, because the mask stays; the signal is sent only to
        // that thread.
        std::thread::spawn(|| {
            let signals = StopSignals::block().unwrap();
            // SAFETY: the thread signals itself.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGTERM) };
            assert_eq!(signals.wait().unwrap(), StopSignal::Term);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_wait_ends_with_a_signal_or_with_its_time() {
        // The test needs a thread of its own, because the mask stays; the signal is sent only to
        // that thread.
        std::thread::spawn(|| {
            let signals = StopSignals::block().unwrap();
            let moment = Duration::from_millis(10);
            assert_eq!(signals.wait_for(moment).unwrap(), None);
            // SAFETY: the thread signals itself.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGINT) };
            let signal = signals.wait_for(Duration::from_secs(60)).unwrap();
            assert_eq!(signal, Some(StopSignal::Int));
        })
        .join()
        .unwrap();
    }
}
