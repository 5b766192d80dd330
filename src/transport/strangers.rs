//! Peers that speak another protocol than the server: recognizes it, and limits the log lines about
//! it. Load balancers probe each port every few seconds, and scanners try each port that they find.

use std::collections::HashMap;
use std::mem;
use std::time::{Duration, Instant};

use base::network::Network;

/// Minimum time between two log lines about one peer.
const INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of peers with a counter of their own. All other peers share one counter.
const PEERS: usize = 64;

const HTTP: &str = "it sent an HTTP request";
const PROXY: &str = "it speaks the PROXY protocol: turn it off at the load balancer";
/// The first bytes of connections in other protocols (RFC 9112 §3, RFC 9113 §3.4, RFC 8446 §5.1;
/// HAProxy, "The PROXY protocol", §2).
const KNOWN: [(&[u8], &str); 7] = [
    (b"GET ", HTTP),
    (b"HEAD ", HTTP),
    (b"POST ", HTTP),
    (b"PROXY ", PROXY),
    (b"\r\n\r\n\0\r\nQUIT\n", PROXY),
    (b"PRI * HTTP/2", "it speaks HTTP/2 without TLS"),
    (b"\x16\x03", "it speaks TLS, and this server does not"),
];

/// Returns what a peer speaks whose connection begins with these bytes; `None` if it is not known.
pub fn protocol(bytes: &[u8]) -> Option<&'static str> {
    let known = KNOWN.iter().find(|(start, _)| bytes.starts_with(start));
    known.map(|(_, what)| *what)
}

/// Returns what a log line says of the number of events, if it stands for more than one.
pub fn since_last_line(events: u64) -> String {
    match events {
        1 => String::new(),
        _ => format!("; {events} ended since the last such line"),
    }
}

/// Counts events of peers, so that each peer has at most one log line a minute.
#[derive(Default)]
pub struct Tally(HashMap<Network, Count>);

/// The events of a peer since its last line.
struct Count {
    events: u64,
    logged_at: Instant,
}

impl Tally {
    /// Counts an event. Returns the number of events since the last line about the peer, if it is
    /// time for one.
    pub fn count(&mut self, peer: Network, now: Instant) -> Option<u64> {
        let is_new = |it: &Count| now.saturating_duration_since(it.logged_at) < INTERVAL;
        if self.0.len() >= PEERS && !self.0.contains_key(&peer) {
            self.0.retain(|_, it| is_new(it));
        }
        let is_counted = self.0.len() < PEERS || self.0.contains_key(&peer);
        let peer = if is_counted { peer } else { Network::UNKNOWN };
        match self.0.get_mut(&peer) {
            Some(it) if is_new(it) => {
                it.events += 1;
                None
            }
            known => {
                let before = known.map_or(0, |it| mem::take(&mut it.events));
                let (events, logged_at) = (0, now);
                self.0.insert(peer, Count { events, logged_at });
                Some(before + 1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn peer(number: u32) -> Network {
        IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + number)).into()
    }

    #[test]
    fn a_peer_has_one_line_a_minute_with_the_number_of_its_events() {
        let (mut tally, start) = (Tally::default(), Instant::now());
        let mut at = |peer, seconds| tally.count(peer, start + Duration::from_secs(seconds));
        assert_eq!(at(peer(1), 0), Some(1));
        for second in 1..60 {
            assert_eq!(at(peer(1), second), None);
        }
        assert_eq!(at(peer(2), 59), Some(1));
        assert_eq!(at(peer(1), 60), Some(60));
        assert_eq!(at(peer(1), 61), None);
        assert_eq!(at(peer(1), 3600), Some(2));
    }

    #[test]
    fn many_peers_take_no_memory_and_no_lines() {
        let (mut tally, start) = (Tally::default(), Instant::now());
        let lines = (0..100_000).filter(|number| tally.count(peer(*number), start).is_some());
        assert_eq!(lines.count(), PEERS + 1);
        assert_eq!(tally.0.len(), PEERS + 1);
        // a peer keeps its counter until the minute is over; then another peer can get one
        let later = start + INTERVAL;
        assert_eq!(tally.count(peer(1), later), Some(1));
        assert_eq!(tally.count(peer(500), later), Some(1));
        assert!(tally.0.len() <= PEERS);
    }

    #[test]
    fn protocols_are_known_by_their_first_bytes() {
        for (bytes, expected) in [
            (&b"GET / HTTP/1.0\r\n\r\n"[..], Some(HTTP)),
            (b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", Some(PROXY)),
            (b"PROXY UNKNOWN\r\n", Some(PROXY)),
            (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c", Some(PROXY)),
            (
                b"\x16\x03\x01\x02\0",
                Some("it speaks TLS, and this server does not"),
            ),
            (b"PROXY", None),
            (b"SSH-2.0-x\r\n", None),
            (b"", None),
        ] {
            assert_eq!(protocol(bytes), expected, "{bytes:?}");
        }
    }
}
