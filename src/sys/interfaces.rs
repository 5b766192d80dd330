//! The addresses of this machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::check;

/// Returns the IPv4 and IPv6 addresses of all interfaces, in the kernel's order (getifaddrs(3)).
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: `first` is a valid place for the pointer to the list that the call creates.
    check(unsafe { libc::getifaddrs(&mut first) })?;
    let mut found = vec![];
    let mut next = first;
    while !next.is_null() {
        // SAFETY: `next` is not null, so it is an entry of the list, which is not freed yet.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: `ifa_addr` is not null, so it is an address that lives as long as the list; each
        // address starts with its family.
        match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: an address of this family is a sockaddr_in.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                found.push(IpAddr::V4(Ipv4Addr::from(
                    address.sin_addr.s_addr.to_ne_bytes(),
                )));
            }
            libc::AF_INET6 => {
                // SAFETY: an address of this family is a sockaddr_in6.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                found.push(IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr)));
            }
            _ => {}
        }
    }
    // SAFETY: `first` comes from getifaddrs and is not freed yet; no reference into the list is
    // left.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_among_the_addresses() {
        assert!(
            addresses()
                .unwrap()
                .contains(&IpAddr::V4(Ipv4Addr::LOCALHOST))
        );
    }
}
