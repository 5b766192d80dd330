//! Tests `sys::process`, which changes settings of the whole process. The unit tests of the library share a process, so this test
//! has one of its own.

use sys::process;

#[test]
fn core_dumps_are_off_afterwards() {
    process::keep_memory_private().unwrap();
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .unwrap();
    assert_eq!(
        core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(),
        ["0", "0"]
    );
    // SAFETY: PR_GET_DUMPABLE takes no further argument.
    assert_eq!(unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }, 0);
}
