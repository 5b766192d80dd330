//! The terminal of a program that talks to a person.

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns the number of columns of a terminal; `None` if `file` is no terminal, or does not know.
pub fn columns(file: BorrowedFd) -> Option<usize> {
    size(file).map(|(columns, _)| columns)
}

/// Returns the numbers of columns and rows of a terminal (`TIOCGWINSZ`, tty_ioctl(4)); `None` if
/// `file` is no terminal, or does not know.
pub fn size(file: BorrowedFd) -> Option<(usize, usize)> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: `size` is a winsize that outlives the call, and the call writes only to it.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
    (rc == 0 && size.ws_col > 0 && size.ws_row > 0)
        .then_some((size.ws_col.into(), size.ws_row.into()))
}

/// The byte that a terminal sends for Ctrl-C (ETX).
const CTRL_C: u8 = 3;

/// The terminal of this process while it does not show what is typed (termios(3)). Dropping it
/// restores the terminal.
pub struct Hidden {
    terminal: File,
    before: libc::termios,
}

impl Hidden {
    /// Opens the terminal and hides what is typed. What was typed before is discarded. Fails if the
    /// process has no terminal.
    pub fn open() -> io::Result<Hidden> {
        let terminal = File::options().read(true).write(true).open("/dev/tty")?;
        // SAFETY: a termios is numbers alone, so all zeros are a valid one.
        let mut before: libc::termios = unsafe { mem::zeroed() };
        // SAFETY: `before` is a termios that outlives the call, and the call writes only to it.
        if unsafe { libc::tcgetattr(terminal.as_raw_fd(), &mut before) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let hidden = Hidden { terminal, before };
        let mut settings = before;
        // Ctrl-C ends a line instead of the process, which would leave the terminal as it is
        settings.c_lflag &= !(libc::ECHO | libc::ISIG);
        settings.c_lflag |= libc::ICANON | libc::ECHONL;
        settings.c_cc[libc::VEOL] = CTRL_C;
        hidden.set(&settings)?;
        Ok(hidden)
    }

    /// Shows the prompt and reads a line into `line`; returns its length with the line break. Fails
    /// at the end of the input, and with [`io::ErrorKind::Interrupted`] at Ctrl-C.
    pub fn ask(&mut self, prompt: &str, line: &mut [u8]) -> io::Result<usize> {
        self.terminal.write_all(prompt.as_bytes())?;
        match self.terminal.read(line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            len if line[..len].contains(&CTRL_C) => Err(io::ErrorKind::Interrupted.into()),
            len => Ok(len),
        }
    }

    fn set(&self, settings: &libc::termios) -> io::Result<()> {
        // SAFETY: `settings` is a termios that outlives the call, which only reads it.
        match unsafe { libc::tcsetattr(self.terminal.as_raw_fd(), libc::TCSAFLUSH, settings) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // the terminal is gone, so the error cannot be shown
        let _ = self.set(&self.before);
    }
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
