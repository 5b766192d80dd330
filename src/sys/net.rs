//! Sockets: connect(2) with a deadline that another thread can cut short, waiting for several
//! sockets, names, and the size of send buffers.

use std::ffi::CString;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::check;

/// Maximum time until a cancelled connect notices the cancellation.
const TICK: Duration = Duration::from_millis(100);

/// A TCP connection that is being made.
pub struct Connecting(OwnedFd);

impl Connecting {
    /// Begins to connect. Errors are those of connect(2) that it reports at once.
    pub fn begin(address: SocketAddr) -> io::Result<Connecting> {
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
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(Connecting(socket)),
        }
    }

    /// Returns the connection after the socket became writable, or the error of connect(2). Its reads
    /// and writes block.
    pub fn finish(self) -> io::Result<TcpStream> {
        let stream = TcpStream::from(self.0);
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl AsFd for Connecting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Connects to `address` before `deadline`. Unlike [`TcpStream::connect_timeout`], it checks
/// `cancelled` ten times per second. Errors are those of connect(2), `TimedOut`, or `Interrupted`
/// after a cancellation.
pub fn connect(
    address: SocketAddr,
    deadline: Instant,
    cancelled: &dyn Fn() -> bool,
) -> io::Result<TcpStream> {
    let connecting = Connecting::begin(address)?;
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
        if wait(&[Wait::ToWrite(connecting.as_fd())], left.min(TICK))?[0] {
            return connecting.finish();
        }
    }
}

/// An event that a thread waits for.
pub enum Wait<'a> {
    /// Until a socket has data or an error.
    ToRead(BorrowedFd<'a>),
    /// Until a socket is connected or has an error.
    ToWrite(BorrowedFd<'a>),
}

/// Waits until one of these is ready or `timeout` has passed. Returns which are ready.
pub fn wait(waits: &[Wait<'_>], timeout: Duration) -> io::Result<Vec<bool>> {
    let mut polled: Vec<libc::pollfd> = waits.iter().map(Wait::polled).collect();
    let milliseconds = timeout.as_micros().div_ceil(1000).min(i32::MAX as u128) as libc::c_int;
    // SAFETY: `polled` has this number of valid, writable entries.
    let ready = unsafe {
        libc::poll(
            polled.as_mut_ptr(),
            polled.len() as libc::nfds_t,
            milliseconds,
        )
    };
    match check(ready) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        // after an error poll(2) has not written what is ready
        Err(_) => Ok(vec![false; waits.len()]),
        Ok(_) => Ok(polled.iter().map(|it| it.revents != 0).collect()),
    }
}

impl Wait<'_> {
    fn polled(&self) -> libc::pollfd {
        let (fd, events) = match self {
            Wait::ToRead(fd) => (fd, libc::POLLIN),
            Wait::ToWrite(fd) => (fd, libc::POLLOUT),
        };
        libc::pollfd {
            fd: fd.as_raw_fd(),
            events,
            revents: 0,
        }
    }
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

/// A version of IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpVersion {
    /// IPv4: records of type A.
    V4,
    /// IPv6: records of type AAAA.
    V6,
}

/// Why the C library's resolver found no address of one IP version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookupError {
    /// A name server answered that the name does not exist, or has no such address.
    Nothing,
    /// No name server gave a usable answer.
    NoAnswer,
    /// The text is not a name.
    Invalid,
}

/// Returns the addresses of a host of one IP version (getaddrinfo(3)). Blocks for as long as the C
/// library waits for name servers.
///
/// musl fails if the answer for one of two versions is wrong, so each version needs a call of its own.
pub fn lookup(host: &str, version: IpVersion) -> Result<Vec<SocketAddr>, LookupError> {
    let name = CString::new(host.as_bytes().to_vec()).map_err(|_| LookupError::Invalid)?;
    // SAFETY: addrinfo is integers and pointers, for all of which zero is valid.
    let mut hints: libc::addrinfo = unsafe { std::mem::zeroed() };
    hints.ai_socktype = libc::SOCK_STREAM;
    hints.ai_family = match version {
        IpVersion::V4 => libc::AF_INET,
        IpVersion::V6 => libc::AF_INET6,
    };
    let mut list = std::ptr::null_mut();
    // SAFETY: `name` and `hints` are valid and outlive the call, which sets `list` if it returns 0.
    let code = unsafe { libc::getaddrinfo(name.as_ptr(), std::ptr::null(), &hints, &mut list) };
    match code {
        0 => {}
        libc::EAI_NONAME | libc::EAI_NODATA => return Err(LookupError::Nothing),
        _ => return Err(LookupError::NoAnswer),
    }
    let mut found = vec![];
    let mut next = list;
    // SAFETY: each entry is valid until freeaddrinfo, and the last one's `ai_next` is null.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: the entries have addresses of the family of `hints`.
        found.push(unsafe { socket_address(entry.ai_addr, version) });
        next = entry.ai_next;
    }
    // SAFETY: `list` comes from getaddrinfo, and no entry of it is used any more.
    unsafe { libc::freeaddrinfo(list) };
    Ok(found)
}

/// Converts an address, with port 0.
///
/// # Safety
///
/// `address` points to a sockaddr_in or a sockaddr_in6, as `version` says.
unsafe fn socket_address(address: *const libc::sockaddr, version: IpVersion) -> SocketAddr {
    match version {
        IpVersion::V4 => {
            // SAFETY: the caller passes a sockaddr_in.
            let name = unsafe { &*address.cast::<libc::sockaddr_in>() };
            (Ipv4Addr::from(name.sin_addr.s_addr.to_ne_bytes()), 0).into()
        }
        IpVersion::V6 => {
            // SAFETY: the caller passes a sockaddr_in6.
            let name = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let address = Ipv6Addr::from(name.sin6_addr.s6_addr);
            match address.to_ipv4_mapped() {
                Some(address) => (address, 0).into(),
                None => SocketAddrV6::new(address, 0, 0, name.sin6_scope_id).into(),
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
        let v4 = Ok(vec!["192.0.2.1:0".parse().unwrap()]);
        assert_eq!(lookup("192.0.2.1", IpVersion::V4), v4);
        for mapped in ["::ffff:192.0.2.1", "::ffff:c000:201"] {
            assert_eq!(lookup(mapped, IpVersion::V6), v4);
        }
        let v6 = Ok(vec!["[2001:db8::1]:0".parse().unwrap()]);
        assert_eq!(lookup("2001:db8::1", IpVersion::V6), v6);
        assert_eq!(lookup("a\0b", IpVersion::V4), Err(LookupError::Invalid));
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
        let nobody = "127.0.0.1:1".parse().unwrap();
        assert_eq!(
            connect(nobody, soon(), &|| false).unwrap_err().kind(),
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
