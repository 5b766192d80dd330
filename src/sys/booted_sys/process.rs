//! Control over threads and limits of this process.

use std::io;

use sys::check;

/// Returns the user as whom the process acts (geteuid(2)).
pub fn user() -> u32 {
    // SAFETY: geteuid(2) takes no argument, and always succeeds.
    unsafe { libc::geteuid() }
}

/// The highest priority for disk I/O: class real time (IOPRIO_CLASS_RT), shifted left by
/// IOPRIO_CLASS_SHIFT, and level 0 (linux/ioprio.h).
pub const HIGHEST_IO_PRIORITY: i64 = 1 << 13;

/// Gives a thread the highest priority for disk I/O (ioprio_set(2)), unless it has ended.
/// `EPERM` without CAP_SYS_ADMIN.
pub fn prioritize_io(thread: u32) -> io::Result<()> {
    // SAFETY: ioprio_set(2) takes only integers.
    let set = check(unsafe {
        libc::syscall(
            libc::SYS_ioprio_set,
            IOPRIO_WHO_PROCESS,
            libc::c_long::from(thread),
            HIGHEST_IO_PRIORITY,
        )
    });
    match set {
        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
        _ => Ok(()),
    }
}

/// Returns a thread's priority for disk I/O, in the form of [`HIGHEST_IO_PRIORITY`]
/// (ioprio_get(2)). `ESRCH` if the thread has ended.
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
