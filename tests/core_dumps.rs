//! Tests `sys::process`, which changes settings of the whole process. The unit tests of the library share a process, so this test
//! has one of its own.

use sys::process;

#[test]
fn core_dumps_are_off_afterwards() {
    process::keep_memory_private().unwrap();
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    support::secrets::assert_no_core_dumps(&limits);
    // SAFETY: PR_GET_DUMPABLE takes no further argument.
    assert_eq!(unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }, 0);
}
