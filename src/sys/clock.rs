//! Time since power-on.

use std::time::Duration;

/// `CLOCK_BOOTTIME` of clock_gettime(2): time since the kernel started, sleep included; not moved by anyone who sets the
/// wall clock.
pub fn since_boot() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec that lives through the call, which writes nothing else.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut now) };
    // fails only for a clock that the kernel does not have; this one is there since 2.6.39
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
