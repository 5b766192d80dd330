//! Control over threads and limits of this process.

use std::io;

use sys::check;

/// Returns the user as whom the process acts (geteuid(2)).
pub fn user() -> u32 {
    // SAFETY: geteuid(2) takes no argument, and always succeeds.
    unsafe { libc::geteuid() }
}

/// Gives a thread the highest priority for disk I/O: class real time, level 0 (ioprio_set(2)).
/// `EPERM` without CAP_SYS_ADMIN, `ESRCH` if the thread has ended.
pub fn prioritize_io(thread: u32) -> io::Result<()> {
    const IOPRIO_CLASS_RT: libc::c_long = 1;
    const IOPRIO_CLASS_SHIFT: libc::c_long = 13;
    let priority = IOPRIO_CLASS_RT << IOPRIO_CLASS_SHIFT;
    // SAFETY: ioprio_set(2) takes only integers.
    check(unsafe {
        libc::syscall(
            libc::SYS_ioprio_set,
            IOPRIO_WHO_PROCESS,
            libc::c_long::from(thread),
            priority,
        )
    })?;
    Ok(())
}

/// Returns a thread's priority for disk I/O: the class, shifted left by 13 bits, and the level in
/// it (ioprio_get(2)).
pub fn io_priority(thread: u32) -> io::Result<i64> {
    // SAFETY: ioprio_get(2) takes only integers.
    check(unsafe {
        libc::syscall(
            libc::SYS_ioprio_get,
            IOPRIO_WHO_PROCESS,
            libc::c_long::from(thread),
        )
    })
}

/// Addresses one thread instead of a group or a user (ioprio_set(2)).
const IOPRIO_WHO_PROCESS: libc::c_long = 1;

/// Raises this process's limit of open descriptors to its hard limit (setrlimit(2) RLIMIT_NOFILE)
/// and returns that.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one rlimit to a valid reference.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one rlimit from a valid reference.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) })?;
    Ok(limit.rlim_max)
}
