//! clock_gettime(2).

use std::time::Duration;

/// Time since the machine booted, suspension included (`CLOCK_BOOTTIME`).
pub fn since_boot() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid, writable timespec; the call keeps no reference to it
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    // fails only for an unknown clock or a bad pointer
    assert_eq!(result, 0, "every kernel since 2.6.39 has CLOCK_BOOTTIME");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_since_boot_grows() {
        let first = since_boot();
        std::thread::sleep(Duration::from_millis(2));
        assert!(since_boot() > first && first > Duration::ZERO);
    }
}
