//! One thread waits for many descriptors: epoll(7), and an eventfd(2) to wake it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::check;

/// Maximum number of descriptors that one [`Poller::wait`] reports; the next one reports the
/// others.
const BATCH: usize = 256;
/// The token of the poller's own eventfd.
const WAKE: u64 = u64::MAX;

/// Waits until one of its descriptors is readable.
pub struct Poller {
    epoll: OwnedFd,
    waker: OwnedFd,
}

impl Poller {
    /// Creates a poller without descriptors. Errors if no file descriptor is free.
    pub fn new() -> io::Result<Poller> {
        // SAFETY: epoll_create1(2) takes only flags.
        let epoll = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: `epoll` is a new descriptor without another owner.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        // SAFETY: eventfd(2) takes only integers.
        let waker = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: `waker` is a new descriptor without another owner.
        let waker = unsafe { OwnedFd::from_raw_fd(waker) };
        let poller = Poller { epoll, waker };
        poller.control(libc::EPOLL_CTL_ADD, &poller.waker, libc::EPOLLIN, WAKE)?;
        Ok(poller)
    }

    /// Makes one [`Poller::wait`] report `token` (not `u64::MAX`) when `fd` is readable, closed by
    /// its peer or failed; at once if it is so already. After one report, the descriptor is not
    /// watched until the next call. Closing it also ends the watch.
    pub fn watch_once(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLONESHOT;
        match self.control(libc::EPOLL_CTL_MOD, fd, events, token) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                self.control(libc::EPOLL_CTL_ADD, fd, events, token)
            }
            result => result,
        }
    }

    fn control(&self, operation: i32, fd: &impl AsFd, events: i32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        // SAFETY: both descriptors are open, and the kernel reads one epoll_event from a valid
        // pointer.
        check(unsafe {
            libc::epoll_ctl(
                self.epoll.as_raw_fd(),
                operation,
                fd.as_fd().as_raw_fd(),
                &raw mut event,
            )
        })?;
        Ok(())
    }

    /// Ends the current [`Poller::wait`], or else the next one.
    pub fn wake(&self) {
        let one = 1u64;
        // SAFETY: write(2) reads eight bytes from a valid pointer. It fails only after 2^64-2
        // unnoticed wakes.
        unsafe {
            libc::write(
                self.waker.as_raw_fd(),
                (&raw const one).cast(),
                size_of::<u64>(),
            )
        };
    }

    /// Sleeps until a descriptor is ready, [`Poller::wake`] is called or `timeout` has passed
    /// (rounded up to milliseconds). Puts the tokens of ready descriptors into `ready`.
    pub fn wait(&self, ready: &mut Vec<u64>, timeout: Duration) -> io::Result<()> {
        ready.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let timeout = timeout.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32;
        // SAFETY: the kernel writes at most BATCH events to `events`.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                BATCH as i32,
                timeout,
            )
        };
        let count = match check(count) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            count => count? as usize,
        };
        for event in &events[..count] {
            match event.u64 {
                WAKE => self.clear(),
                token => ready.push(token),
            }
        }
        Ok(())
    }

    fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: read(2) writes eight bytes to a valid pointer; the descriptor does not block.
        unsafe {
            libc::read(
                self.waker.as_raw_fd(),
                (&raw mut count).cast(),
                size_of::<u64>(),
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    const SOON: Duration = Duration::from_secs(10);
    const NOW: Duration = Duration::ZERO;

    #[test]
    fn a_descriptor_is_reported_once_per_watch() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let (poller, mut ready) = (Poller::new().unwrap(), Vec::new());
        poller.watch_once(&far, 7).unwrap();
        poller.wait(&mut ready, NOW).unwrap();
        assert!(ready.is_empty());
        near.write_all(b"x").unwrap();
        poller.wait(&mut ready, SOON).unwrap();
        assert_eq!(ready, [7]);
        poller.wait(&mut ready, NOW).unwrap();
        assert!(ready.is_empty(), "once");
        poller.watch_once(&far, 8).unwrap();
        poller.wait(&mut ready, SOON).unwrap();
        assert_eq!(ready, [8], "the descriptor was ready before");
        drop(far);
        poller.wait(&mut ready, NOW).unwrap();
        assert!(ready.is_empty());
    }

    #[test]
    fn a_wake_ends_the_current_or_the_next_wait_and_no_other() {
        let (poller, mut ready) = (Poller::new().unwrap(), Vec::new());
        poller.wake();
        poller.wake();
        poller.wait(&mut ready, SOON).unwrap();
        let started = Instant::now();
        poller.wait(&mut ready, Duration::from_millis(30)).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(30));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| poller.wait(&mut ready, SOON));
            std::thread::sleep(Duration::from_millis(20));
            poller.wake();
            waiting.join().unwrap().unwrap();
        });
        assert!(started.elapsed() < SOON);
    }
}
