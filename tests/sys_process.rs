//! `sys::signal` and `sys::process` change the whole process: tested apart from the library's unit tests, which share one.

use std::time::{Duration, Instant};

use firstlight::sys::{process, signal};

#[test]
fn wait_ends_at_the_timeout_and_at_once_after_sigterm() {
    let termination = signal::on_termination().unwrap();
    assert!(!termination.wait(Duration::from_millis(5)));
    let start = Instant::now();
    let waiter = std::thread::spawn(move || termination.wait(Duration::from_secs(30)));
    std::thread::sleep(Duration::from_millis(20));
    // SAFETY: a signal to ourselves that we handle.
    unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
    assert!(waiter.join().unwrap());
    assert!(start.elapsed() < Duration::from_secs(20));
    assert!(termination.requested());
    assert!(termination.wait(Duration::ZERO));
}

#[test]
fn core_dumps_are_off_afterwards() {
    process::forbid_core_dumps().unwrap();
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"]);
    // SAFETY: PR_GET_DUMPABLE takes no further argument.
    assert_eq!(unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }, 0);
}
