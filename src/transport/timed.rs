//! A connection with a time limit for all of its reads and writes together.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A socket whose calls fail with `TimedOut` after the deadline, also if the peer sends byte by byte.
pub struct Timed {
    /// The connected socket.
    pub socket: TcpStream,
    /// The end of all calls.
    pub deadline: Instant,
}

/// Returns the time until a deadline as the time-out of a socket. Fails with `TimedOut` after the deadline.
pub fn left(deadline: Instant) -> io::Result<Option<Duration>> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(io::ErrorKind::TimedOut.into())
    } else {
        Ok(Some(left))
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(left(self.deadline)?)?;
        self.socket.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(left(self.deadline)?)?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}
