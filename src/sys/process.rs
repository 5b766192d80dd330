//! What the kernel may do with this process.

use std::io;

/// No core dump, and no other process of the same user may read this one's memory: it holds keys (prctl(2)
/// `PR_SET_DUMPABLE`, setrlimit(2) `RLIMIT_CORE`).
pub fn keep_memory_private() -> io::Result<()> {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `none` lives through the call, which only reads it.
    if unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: this option takes one integer and touches no memory of ours.
    if unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
