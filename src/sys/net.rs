//! Sockets: connect(2) with a deadline that another thread can cut short, and the size of send
//! buffers.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::check;

/// Maximum time until a cancelled connect notices the cancellation.
const TICK: Duration = Duration::from_millis(100);

/// Connects to `address` before `deadline`. Unlike [`TcpStream::connect_timeout`], it checks
/// `cancelled` ten times per second. Errors are those of connect(2), `TimedOut`, or `Interrupted`
/// after a cancellation.
pub fn connect(
    address: SocketAddr,
    deadline: Instant,
    cancelled: &dyn Fn() -> bool,
) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket(2) takes no pointers.
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: `fd` is a new descriptor without another owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    match start_connect(&socket, address) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            wait_connected(&socket, deadline, cancelled)?
        }
        Err(error) => return Err(error),
    }
    let stream = TcpStream::from(socket);
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn start_connect(socket: &OwnedFd, address: SocketAddr) -> io::Result<()> {
    let result = match address {
        SocketAddr::V4(v4) => {
            let name = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(v4.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            let len = size_of_val(&name) as libc::socklen_t;
            // SAFETY: `name` is a sockaddr_in of `len` bytes and outlives the call.
            unsafe { libc::connect(socket.as_raw_fd(), (&raw const name).cast(), len) }
        }
        SocketAddr::V6(v6) => {
            let name = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: v6.scope_id(),
            };
            let len = size_of_val(&name) as libc::socklen_t;
            // SAFETY: `name` is a sockaddr_in6 of `len` bytes and outlives the call.
            unsafe { libc::connect(socket.as_raw_fd(), (&raw const name).cast(), len) }
        }
    };
    check(result)?;
    Ok(())
}

fn wait_connected(
    socket: &OwnedFd,
    deadline: Instant,
    cancelled: &dyn Fn() -> bool,
) -> io::Result<()> {
    loop {
        if cancelled() {
            return Err(io::Error::new(
                io::ErrorKind::Interrupted,
                "connecting was stopped",
            ));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"));
        }
        let mut poll = libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        let milliseconds = left.min(TICK).as_millis().max(1) as libc::c_int;
        // SAFETY: `poll` is one valid, writable pollfd.
        let ready = unsafe { libc::poll(&mut poll, 1, milliseconds) };
        match ready {
            0 => {}
            n if n > 0 => return Ok(()),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Limits what the kernel buffers for a peer that does not read to twice `bytes` (SO_SNDBUF,
/// socket(7)). Accepted sockets inherit the limit from the listening one.
pub fn limit_send_buffer(socket: &impl AsRawFd, bytes: u32) -> io::Result<()> {
    let length = size_of::<u32>() as libc::socklen_t;
    // SAFETY: `bytes` is an int of four bytes that outlives the call.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            std::ptr::from_ref(&bytes).cast(),
            length,
        )
    })?;
    Ok(())
}

/// Returns the addresses of a host name; one that is mapped into IPv6 becomes an IPv4 address. Blocks
/// for as long as the system's resolver takes.
pub fn resolve(host: &str) -> io::Result<Vec<IpAddr>> {
    let addresses = (host, 0).to_socket_addrs()?;
    let addresses = addresses.map(|address| address.ip().to_canonical());
    Ok(addresses.collect())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn one_address_has_one_form() {
        for host in ["192.0.2.1", "::ffff:192.0.2.1", "::ffff:c000:201"] {
            assert_eq!(resolve(host).unwrap(), [IpAddr::from([192, 0, 2, 1])]);
        }
    }

    #[test]
    fn connects_over_both_families_to_a_blocking_socket() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else {
                continue;
            };
            let mut near = connect(listener.local_addr().unwrap(), soon(), &|| false).unwrap();
            let (mut far, _) = listener.accept().unwrap();
            far.write_all(b"x").unwrap();
            near.read_exact(&mut [0]).unwrap();
        }
    }

    #[test]
    fn a_closed_port_is_refused() {
        let address = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        assert_eq!(
            connect(address, soon(), &|| false).unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
    }

    #[test]
    fn a_hanging_connect_ends_by_deadline_and_by_cancellation() {
        // A listener with a full backlog answers no SYN.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // SAFETY: listen(2) takes no pointers; this shrinks the backlog of a listening socket.
        unsafe { libc::listen(listener.as_raw_fd(), 0) };
        let address = listener.local_addr().unwrap();
        let short = || Instant::now() + Duration::from_millis(150);
        let mut held = vec![];
        let timed_out = loop {
            match connect(address, short(), &|| false) {
                Ok(stream) => held.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(timed_out.kind(), io::ErrorKind::TimedOut);
        assert_eq!(
            connect(address, soon(), &|| true).unwrap_err().kind(),
            io::ErrorKind::Interrupted
        );
    }
}
