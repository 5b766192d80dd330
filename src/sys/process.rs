//! Protection of this process's memory, control over processes and threads, and limits.

use std::io;

use super::check;

/// Prevents core dumps and ptrace by others, and makes root the owner of `/proc/self` (prctl(2)
/// PR_SET_DUMPABLE, setrlimit(2) RLIMIT_CORE). Both calls are necessary, because a core_pattern
/// that pipes to a program ignores the limit. execve(2) resets this, so each program calls it
/// itself.
pub fn keep_memory_private() -> io::Result<()> {
    // SAFETY: PR_SET_DUMPABLE takes only integers.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) })?;
    let none = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel reads one rlimit from a valid reference.
    check(unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) })?;
    Ok(())
}

/// Keeps all present and future memory of the process out of swap (mlockall(2)). Pages are locked
/// when they are first touched (MCL_ONFAULT), so that untouched thread stacks cost nothing.
/// `ENOMEM` or `EPERM` if RLIMIT_MEMLOCK forbids it.
pub fn lock_memory() -> io::Result<()> {
    // MCL_ONFAULT of linux/mman.h (asm-generic); libc lacks it for musl.
    const MCL_ONFAULT: i32 = 4;
    // SAFETY: mlockall(2) takes only flags.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | MCL_ONFAULT) })?;
    Ok(())
}

/// Sends a signal to all processes of a group (kill(2)); `ESRCH` if there are none left.
pub fn signal_group(group: u32, signal: i32) -> io::Result<()> {
    let group = i32::try_from(group)
        .ok()
        .filter(|group| *group > 1)
        .ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: kill(2) takes only integers; the group is neither our own (0) nor all processes (-1).
    check(unsafe { libc::kill(-group, signal) })?;
    Ok(())
}

/// Returns whether a child process has ended (waitid(2)). The child stays a zombie, so its number
/// cannot become that of another process or group yet. `ECHILD` if it is not our child.
pub fn has_ended(child: u32) -> io::Result<bool> {
    // SAFETY: all bits zero is a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel writes one siginfo_t to a valid reference.
    check(unsafe { libc::waitid(libc::P_PID, child, &mut info, options) })?;
    // SAFETY: waitid(2) fills in si_pid, and leaves zero there if the child has not ended.
    Ok(unsafe { info.si_pid() } != 0)
}

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
