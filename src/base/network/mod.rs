//! What programs share about the network: what counts as one peer when capacity, turns and delays are shared, names that become
//! addresses, requests.

pub mod request;
pub mod resolver;
pub mod semaphore;

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// An IPv4 address or an IPv6 /64 network. A machine chooses the lower half of its IPv6 address
/// itself (RFC 4291 §2.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(IpAddr);

impl Network {
    /// The network of peers whose address is unknown.
    pub const UNKNOWN: Network = Network(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
}

impl From<IpAddr> for Network {
    fn from(address: IpAddr) -> Network {
        // A socket for both IP versions shows an IPv4 peer with a mapped address (RFC 4291
        // §2.5.5.2).
        Network(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            address => address,
        })
    }
}

/// Returns the address on which a server listens by default: `::`, which accepts IPv4 too, or
/// `0.0.0.0` if the machine has no IPv6, or `::` accepts only IPv6 (sysctl `bindv6only`).
pub fn any_address() -> IpAddr {
    match fs::read("/proc/sys/net/ipv6/bindv6only") {
        Ok(setting) if setting.starts_with(b"0") => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}

/// Returns the address of a peer in the form that is shown and compared: an IPv4 address instead of
/// a mapped one.
pub fn canonical(peer: SocketAddr) -> SocketAddr {
    match peer.ip().to_canonical() {
        IpAddr::V4(address) => (address, peer.port()).into(),
        IpAddr::V6(_) => peer,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn network(address: &str) -> Network {
        address.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn a_server_on_the_default_address_is_reached_by_both_ip_versions() {
        let server = TcpListener::bind((any_address(), 0)).unwrap();
        let port = server.local_addr().unwrap().port();
        for own in ["127.0.0.1", "::1"] {
            let own: IpAddr = own.parse().unwrap();
            // a machine without IPv6 does not have ::1 either
            if TcpListener::bind((own, 0)).is_ok() {
                TcpStream::connect((own, port)).unwrap();
                let (_, peer) = server.accept().unwrap();
                assert_eq!(canonical(peer).ip(), own);
            }
        }
    }

    #[test]
    fn an_ipv6_64_is_one_peer_and_each_ipv4_address_is_one() {
        assert_eq!(network("2001:db8::1"), network("2001:db8::ffff:0:0:2"));
        assert_ne!(network("2001:db8::1"), network("2001:db8:0:1::1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
        assert_ne!(network("::ffff:192.0.2.1"), network("::ffff:192.0.2.2"));
    }
}
