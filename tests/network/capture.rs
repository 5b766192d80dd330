//! Reads what QEMU recorded of a network: a file of the pcap format with Ethernet frames
//! (draft-ietf-opsawg-pcap, sections 4 and 5).

use std::net::Ipv4Addr;
use std::path::Path;

const FILE_HEADER: usize = 24;
const RECORD_HEADER: usize = 16;
const ETHERNET_HEADER: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const UDP: u8 = 17;

/// The frames that were on the network.
pub struct Capture(Vec<Vec<u8>>);

impl Capture {
    pub fn read(path: &Path) -> Capture {
        let file = std::fs::read(path).unwrap();
        assert_eq!(
            file[..4],
            0xa1b2_c3d4u32.to_ne_bytes(),
            "{} is not a capture",
            path.display()
        );
        let mut frames = Vec::new();
        let mut rest = &file[FILE_HEADER..];
        while rest.len() > RECORD_HEADER {
            let len = u32::from_ne_bytes(rest[8..12].try_into().unwrap()) as usize;
            let Some(frame) = rest.get(RECORD_HEADER..RECORD_HEADER + len) else {
                break;
            };
            frames.push(frame.to_vec());
            rest = &rest[RECORD_HEADER + len..];
        }
        Capture(frames)
    }

    /// Returns whether a frame contains this text.
    pub fn shows(&self, text: &str) -> bool {
        self.0.iter().any(|frame| {
            frame
                .windows(text.len())
                .any(|part| part == text.as_bytes())
        })
    }

    /// Returns how many packets were sent to this UDP port.
    pub fn udp(&self, port: u16) -> usize {
        self.packets()
            .filter(|packet| {
                let header = usize::from(packet[0] & 15) * 4;
                packet[9] == UDP && packet.get(header + 2..header + 4) == Some(&port.to_be_bytes())
            })
            .count()
    }

    /// Returns how many packets were sent from this address, or to it.
    pub fn of_address(&self, address: Ipv4Addr) -> usize {
        self.packets()
            .filter(|packet| {
                let [from, to] = [&packet[12..16], &packet[16..20]];
                from == address.octets() || to == address.octets()
            })
            .count()
    }

    fn packets(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().filter_map(|frame| {
            let packet = frame.get(ETHERNET_HEADER..)?;
            (frame[12..14] == IPV4 && packet.len() >= 20).then_some(packet)
        })
    }
}
