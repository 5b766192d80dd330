//! Ranges of addresses.

use std::fmt;
use std::net::IpAddr;

/// A range of addresses: an address and the number of its leading bits that count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    address: IpAddr,
    bits: u32,
}

impl Range {
    /// Parses `ADDRESS/BITS`.
    pub fn parse(text: &str) -> Option<Range> {
        let (address, bits) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.parse().ok().filter(|bits| *bits <= most)?;
        Some(Range { address, bits })
    }

    /// Returns whether the range has this address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let differ = match (self.address, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
            _ => return false,
        };
        differ >= self.bits
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_the_addresses_with_its_leading_bits() {
        for (range, inside, outside) in [
            ("10.0.0.0/16", "10.0.255.1", "10.1.0.0"),
            ("10.0.0.7/32", "10.0.0.7", "10.0.0.6"),
            ("0.0.0.0/0", "203.0.113.1", "::1"),
            ("2001:db8::/56", "2001:db8:0:ff::1", "2001:db8:0:100::"),
        ] {
            let range = Range::parse(range).unwrap();
            assert!(range.contains(inside.parse().unwrap()), "{range} {inside}");
            assert!(
                !range.contains(outside.parse().unwrap()),
                "{range} {outside}"
            );
        }
        for bad in [
            "",
            "10.0.0.0",
            "10.0.0.0/33",
            "x/8",
            "::/129",
            "10.0.0.0/-1",
        ] {
            assert_eq!(Range::parse(bad), None, "{bad}");
        }
    }
}
