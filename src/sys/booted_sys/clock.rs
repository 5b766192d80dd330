//! Whether a time service has set the clock.

use std::io;
use std::mem;

/// Returns whether the kernel takes its clock for synchronized: a time service has set it and has
/// cleared `STA_UNSYNC` (adjtimex(2)). Without further updates the kernel sets the flag again after 9
/// hours. Changes nothing.
pub fn is_synchronized() -> io::Result<bool> {
    // SAFETY: timex has only integers, for which zero is valid; `modes` 0 changes nothing.
    let mut state: libc::timex = unsafe { mem::zeroed() };
    // SAFETY: `state` is a timex that outlives the call, and the call writes only to it.
    sys::check(unsafe { libc::adjtimex(&mut state) })?;
    Ok(state.status & libc::STA_UNSYNC == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_may_ask_whether_the_clock_is_synchronized() {
        is_synchronized().unwrap();
    }
}
