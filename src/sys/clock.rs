//! Time since power-on.

use std::time::Duration;

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
}
