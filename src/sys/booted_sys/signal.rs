//! Waits for stop signals for a limited time.

use std::time::{Duration, Instant};
use std::{io, ptr};

use sys::signal::{StopSignal, StopSignals};

/// Sleeps until one of the signals arrives, or for this time (sigtimedwait(2)); `None` if none
/// arrived.
pub fn wait_for(signals: &StopSignals, time: Duration) -> io::Result<Option<StopSignal>> {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = libc::timespec {
            tv_sec: left.as_secs() as _,
            tv_nsec: left.subsec_nanos() as _,
        };
        // SAFETY: the set is initialized, the information is not requested, and `timeout`
        // outlives the call.
        match unsafe { libc::sigtimedwait(signals.set(), ptr::null_mut(), &timeout) } {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_a_signal_or_with_its_time() {
        // The test needs a thread of its own, because the mask stays; the signal is sent only to
        // that thread.
        std::thread::spawn(|| {
            let signals = StopSignals::block().unwrap();
            let moment = Duration::from_millis(10);
            assert_eq!(wait_for(&signals, moment).unwrap(), None);
            // SAFETY: the thread signals itself.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGINT) };
            let signal = wait_for(&signals, Duration::from_secs(60)).unwrap();
            assert_eq!(signal, Some(StopSignal::Int));
        })
        .join()
        .unwrap();
    }
}
