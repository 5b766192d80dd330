//! How values are written in the header fields of gRPC: `grpc-message`, `-bin` fields,
//! `grpc-timeout` and `content-type`.

use std::time::Duration;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// The base64 form of `-bin` values: we send them without padding and accept both forms, as the
/// protocol demands.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_encode_padding(false)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Returns whether a `content-type` is gRPC's: `application/grpc`, with any message format
/// (`+proto`) and any parameter.
pub(super) fn is_grpc_type(value: &[u8]) -> bool {
    value
        .strip_prefix(b"application/grpc")
        .is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Decodes a header that is base64 although its name may not end in `-bin`, such as
/// `grpc-status-details-bin`.
pub(super) fn decode_bin(value: &[u8]) -> Option<Vec<u8>> {
    BASE64.decode(value.trim_ascii()).ok()
}

/// Returns the wire format of a `-bin` value.
pub(super) fn encode_bin(value: &[u8]) -> String {
    BASE64.encode(value)
}

/// Encodes `grpc-message`: each byte of the UTF-8 text outside printable ASCII, and `%` itself,
/// becomes `%XX`.
pub(super) fn percent_encode(message: &str) -> Vec<u8> {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = Vec::with_capacity(message.len());
    for &byte in message.as_bytes() {
        match byte {
            b'%' | 0..=0x1f | 0x7f..=0xff => encoded.extend([
                b'%',
                HEX[usize::from(byte >> 4)],
                HEX[usize::from(byte & 15)],
            ]),
            _ => encoded.push(byte),
        }
    }
    encoded
}

/// Decodes `grpc-message`. A broken escape stands for itself and invalid UTF-8 is replaced, because
/// the protocol forbids losing a message over its encoding.
pub(super) fn percent_decode(encoded: &[u8]) -> String {
    let hex = |at: usize| {
        encoded
            .get(at)
            .and_then(|&digit| char::from(digit).to_digit(16))
    };
    let mut decoded = Vec::with_capacity(encoded.len());
    let mut at = 0;
    while at < encoded.len() {
        match (encoded[at], hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// Formats `grpc-timeout`: at most 8 digits and a unit. The value is rounded up in the finest unit
/// that can hold it.
pub(super) fn format_timeout(timeout: Duration) -> String {
    const MOST: u128 = 99_999_999;
    let nanos = timeout.as_nanos();
    let units = [
        ("n", 1),
        ("u", 1_000),
        ("m", 1_000_000),
        ("S", 1_000_000_000),
        ("M", 60_000_000_000),
    ];
    for (unit, length) in units {
        let count = nanos.div_ceil(length);
        if count <= MOST {
            return format!("{count}{unit}");
        }
    }
    format!("{}H", nanos.div_ceil(3_600_000_000_000).min(MOST))
}

/// Parses `grpc-timeout`; `None` if it is malformed.
pub(super) fn parse_timeout(value: &[u8]) -> Option<Duration> {
    let (&unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'n' => Duration::from_nanos(count),
        b'u' => Duration::from_micros(count),
        b'm' => Duration::from_millis(count),
        b'S' => Duration::from_secs(count),
        b'M' => Duration::from_secs(count * 60),
        b'H' => Duration::from_secs(count * 3600),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_grpc_is_grpc() {
        for (kind, expected) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("application/grpc;charset=utf-8", true),
            ("application/grpc-web", false),
            ("application/json", false),
            ("", false),
        ] {
            assert_eq!(is_grpc_type(kind.as_bytes()), expected, "{kind}");
        }
    }

    #[test]
    fn padded_base64_is_accepted() {
        assert_eq!(decode_bin(b"AQ=="), Some(vec![1]));
        assert_eq!(decode_bin(b"AQ"), Some(vec![1]));
    }

    #[test]
    fn messages_survive_percent_encoding() {
        for message in ["", "plain", "100 % \t\n", "schlüssel 🔑 \u{7f}", "%41"] {
            let encoded = percent_encode(message);
            assert!(
                encoded.iter().all(|byte| (0x20..0x7f).contains(byte)),
                "{encoded:?}"
            );
            assert_eq!(percent_decode(&encoded), message);
        }
    }

    #[test]
    fn broken_escapes_stand_for_themselves() {
        assert_eq!(percent_decode(b"100%"), "100%");
        assert_eq!(percent_decode(b"%zz%4"), "%zz%4");
        assert_eq!(percent_decode(b"%ff"), "\u{fffd}");
    }

    #[test]
    fn timeouts_have_at_most_eight_digits() {
        for (timeout, text) in [
            (Duration::ZERO, "0n"),
            (Duration::from_millis(50), "50000000n"),
            (Duration::from_secs(30), "30000000u"),
            (Duration::from_secs(3600), "3600000m"),
            (Duration::from_secs(10_000_000_000), "2777778H"),
            (Duration::from_nanos(100_000_001), "100001u"),
        ] {
            assert_eq!(format_timeout(timeout), text);
            assert!(parse_timeout(text.as_bytes()).unwrap() >= timeout);
        }
        assert!(parse_timeout(format_timeout(Duration::MAX).as_bytes()).is_some());
        for broken in ["", "S", "1", "1x", "+1S", "123456789S", "1 S"] {
            assert_eq!(parse_timeout(broken.as_bytes()), None, "{broken}");
        }
    }
}
