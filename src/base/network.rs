//! What counts as one peer when places, turns and delays are shared.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

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

#[cfg(test)]
mod tests {
    use super::*;

    fn network(address: &str) -> Network {
        address.parse::<IpAddr>().unwrap().into()
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
