//! Metrics from `/proc/self`.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use super::Registry;
use sys::clock;

/// The unit of times in `/proc`: since Linux 2.6 it is a hundredth of a second (USER_HZ),
/// independent of the kernel's own clock.
const TICKS_A_SECOND: f64 = 100.0;

impl Registry {
    /// Adds the kernel's data about this process, under the names that all Prometheus libraries
    /// use, and the version.
    pub fn add_process(&self) {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        self.gauge_of(
            "firstlight_build_info",
            "Always 1; the label is the program's version.",
            &version,
            || Some(1.0),
        );
        self.counter_of(
            "process_cpu_seconds_total",
            "User and system processor time.",
            &[],
            || {
                // User and system time are the fields 14 and 15 (proc_pid_stat(5)).
                Some((stat(14)? + stat(15)?) / TICKS_A_SECOND)
            },
        );
        self.gauge_of(
            "process_resident_memory_bytes",
            "Resident memory.",
            &[],
            || status("VmRSS:"),
        );
        self.gauge_of("process_threads", "Number of threads.", &[], || {
            status("Threads:")
        });
        self.gauge_of(
            "process_open_fds",
            "Number of open file descriptors.",
            &[],
            || {
                // The directory itself is open while it is read.
                Some(
                    fs::read_dir("/proc/self/fd")
                        .ok()?
                        .count()
                        .saturating_sub(1) as f64,
                )
            },
        );
        let start = start_time();
        self.gauge_of(
            "process_start_time_seconds",
            "Start time of the process since 1970.",
            &[],
            move || start,
        );
    }
}

/// Returns the start time by the current wall clock: setting the clock moves it.
fn start_time() -> Option<f64> {
    // Field 22 is the start time since boot.
    let age = clock::since_boot().as_secs_f64() - stat(22)? / TICKS_A_SECOND;
    Some(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .ok()?
            .as_secs_f64()
            - age,
    )
}

/// Returns a field of `/proc/self/stat`, counted from 1. Fields up to the program's name are not
/// available.
fn stat(field: usize) -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name is in parentheses and may contain any characters.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(field.checked_sub(3)?)?.parse().ok()
}

/// Returns a number from `/proc/self/status` in its unit.
fn status(name: &str) -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let mut words = status
        .lines()
        .find_map(|line| line.strip_prefix(name))?
        .split_whitespace();
    let number: f64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") {
        number * 1024.0
    } else {
        number
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_measured() {
        let registry = Registry::new();
        registry.add_process();
        let text = registry.render();
        let value = |name: &str| -> f64 {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(&format!("{name} ")));
            line.unwrap_or_else(|| panic!("{name}:\n{text}"))
                .parse()
                .unwrap()
        };
        assert!((1e5..1e11).contains(&value("process_resident_memory_bytes")));
        assert!((1.0..1e4).contains(&value("process_threads")));
        assert!((1.0..1e6).contains(&value("process_open_fds")));
        assert!((0.0..1e6).contains(&value("process_cpu_seconds_total")));
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        assert!((now - 1e5..=now + 1.0).contains(&value("process_start_time_seconds")));
    }
}
