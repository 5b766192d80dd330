//! Who counts as one peer where places, turns and delays are shared out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An IPv4 address, or an IPv6 /64: the lower half of an IPv6 address is whatever the machine chooses (RFC 4291 §2.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(IpAddr);

impl Network {
    /// The one for peers whose address is not known.
    pub const UNKNOWN: Network = Network(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
}

impl From<IpAddr> for Network {
    fn from(address: IpAddr) -> Network {
        // an IPv4 peer of a socket that listens on both has a mapped address (RFC 4291 §2.5.5.2)
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
