//! What `/proc/self` tells of this process.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use super::Registry;
use sys::clock;

/// Since Linux 2.6 what user space sees is in hundredths of a second (USER_HZ), whatever the kernel's own clock.
const TICKS_A_SECOND: f64 = 100.0;

pub(super) fn register(registry: &Registry) {
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    registry.gauge_of(
        "firstlight_build_info",
        "Always 1; the label has the version.",
        &version,
        || Some(1.0),
    );
    registry.counter_of(
        "process_cpu_seconds_total",
        "Processor time, of user and system.",
        &[],
        || {
            // user and system time are the fields 14 and 15 (proc_pid_stat(5))
            Some((stat(14)? + stat(15)?) / TICKS_A_SECOND)
        },
    );
    registry.gauge_of(
        "process_resident_memory_bytes",
        "Memory that is resident.",
        &[],
        || status("VmRSS:"),
    );
    registry.gauge_of("process_threads", "Threads.", &[], || status("Threads:"));
    registry.gauge_of("process_open_fds", "Open file descriptors.", &[], || {
        // the folder itself is open while it is read
        Some(
            fs::read_dir("/proc/self/fd")
                .ok()?
                .count()
                .saturating_sub(1) as f64,
        )
    });
    let start = start_time();
    registry.gauge_of(
        "process_start_time_seconds",
        "When the process started, since 1970.",
        &[],
        move || start,
    );
}

/// By the wall clock as it is now: whoever sets it later does not move a time that is past.
fn start_time() -> Option<f64> {
    // the start, since boot, is field 22
    let age = clock::since_boot().as_secs_f64() - stat(22)? / TICKS_A_SECOND;
    Some(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .ok()?
            .as_secs_f64()
            - age,
    )
}

/// A field of `/proc/self/stat`, counted from 1; those up to the program's name cannot be asked for.
fn stat(field: usize) -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // the name is in parentheses and may have anything in it
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(field.checked_sub(3)?)?.parse().ok()
}

/// A number of `/proc/self/status`, with its unit.
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
