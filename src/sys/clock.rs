//! Time since power-on, and whether a time service has set the clock.

use std::io;
use std::mem;
use std::time::Duration;

use super::check;

/// Returns `CLOCK_BOOTTIME` (clock_gettime(2)): the time since the kernel started, including sleep.
/// Setting the wall clock does not change it.
pub fn since_boot() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec that outlives the call, and the call writes only to it.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut now) };
    // The call fails only for an unknown clock; this one exists since Linux 2.6.39.
    debug_assert_eq!(rc, 0);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Returns whether the kernel considers its clock synchronized: a time service has set it and has
/// cleared `STA_UNSYNC` (adjtimex(2)). Without further updates the kernel sets the flag again after 9
/// hours. Changes nothing.
pub fn is_synchronized() -> io::Result<bool> {
    // SAFETY: timex has only integers, for which zero is valid; `modes` 0 changes nothing.
    let mut state: libc::timex = unsafe { mem::zeroed() };
    // SAFETY: `state` is a timex that outlives the call, and the call writes only to it.
    check(unsafe { libc::adjtimex(&mut state) })?;
    Ok(state.status & libc::STA_UNSYNC == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_since_boot_goes_forward_and_agrees_with_the_kernel() {
        let (first, second) = (since_boot(), since_boot());
        assert!(second >= first);
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        assert!(
            (second.as_secs_f64() - uptime).abs() < 60.0,
            "{second:?} against {uptime}"
        );
    }

    #[test]
    fn everybody_may_ask_whether_the_clock_is_synchronized() {
        is_synchronized().unwrap();
    }
}
