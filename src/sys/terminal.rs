//! The terminal of a program that talks to a person.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns the number of columns of a terminal (`TIOCGWINSZ`, tty_ioctl(4)); `None` if `file` is no terminal, or does not know.
pub fn columns(file: BorrowedFd) -> Option<usize> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: `size` is a winsize that outlives the call, and the call writes only to it.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
    (rc == 0 && size.ws_col > 0).then_some(size.ws_col.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_has_no_columns() {
        let file = File::open("/proc/self/status").unwrap();
        assert_eq!(columns(file.as_fd()), None);
    }
}
