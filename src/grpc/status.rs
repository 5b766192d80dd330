//! How a call ended: `grpc-status`, `grpc-message` and `grpc-status-details-bin`.

use std::error::Error;
use std::fmt;

use super::metadata;
use crate::h2::HeaderList;

/// The codes of gRPC's `statuscodes.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Code {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

impl Code {
    #[rustfmt::skip]
    const ALL: [Code; 17] = [
        Code::Ok, Code::Cancelled, Code::Unknown, Code::InvalidArgument, Code::DeadlineExceeded, Code::NotFound,
        Code::AlreadyExists, Code::PermissionDenied, Code::ResourceExhausted, Code::FailedPrecondition, Code::Aborted,
        Code::OutOfRange, Code::Unimplemented, Code::Internal, Code::Unavailable, Code::DataLoss, Code::Unauthenticated,
    ];

    /// The code of a `grpc-status` value; what is no known code is [`Code::Unknown`], as the protocol demands.
    pub(super) fn from_header(value: &[u8]) -> Code {
        let number = std::str::from_utf8(value).ok().and_then(|text| text.parse::<usize>().ok());
        number.and_then(|number| Code::ALL.get(number).copied()).unwrap_or(Code::Unknown)
    }

    /// The value of `grpc-status`.
    pub(super) fn as_header(self) -> &'static [u8] {
        const DIGITS: &[u8; 10] = b"0123456789";
        const TENS: &[u8; 14] = b"10111213141516";
        match self as usize {
            code @ 0..10 => &DIGITS[code..=code],
            code => &TENS[2 * (code - 10)..2 * (code - 9)],
        }
    }

    /// The code for an HTTP answer without `grpc-status` (gRPC's `http-grpc-status-mapping.md`).
    pub(super) fn from_http(status: &[u8]) -> Code {
        match status {
            b"400" => Code::Internal,
            b"401" => Code::Unauthenticated,
            b"403" => Code::PermissionDenied,
            b"404" => Code::Unimplemented,
            b"429" | b"502" | b"503" | b"504" => Code::Unavailable,
            _ => Code::Unknown,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A call's end other than success: a code for programs, a message for people. Never carries [`Code::Ok`] to a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    code: Code,
    message: String,
    details: Vec<u8>,
}

impl Status {
    /// The message crosses the network as it is: to an unauthenticated peer it must say no more than that it was refused.
    pub fn new(code: Code, message: impl Into<String>) -> Status {
        Status { code, message: message.into(), details: Vec::new() }
    }

    /// Adds the binary details (`grpc-status-details-bin`, an encoded `google.rpc.Status`).
    pub fn with_details(mut self, details: Vec<u8>) -> Status {
        self.details = details;
        self
    }

    /// What kind of failure it was.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The sentence for people; may be empty.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The binary details; empty when there are none.
    pub fn details(&self) -> &[u8] {
        &self.details
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() { write!(f, "{}", self.code) } else { write!(f, "{}: {}", self.code, self.message) }
    }
}

impl Error for Status {}

/// `grpc-message`: UTF-8, every byte outside printable ASCII and the `%` itself written as `%XX`.
pub(super) fn percent_encode(message: &str) -> Vec<u8> {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = Vec::with_capacity(message.len());
    for &byte in message.as_bytes() {
        match byte {
            b'%' | 0..=0x1f | 0x7f..=0xff => {
                encoded.extend([b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]])
            }
            _ => encoded.push(byte),
        }
    }
    encoded
}

/// The inverse of [`percent_encode`]. A broken escape stands for itself and broken UTF-8 is replaced: the protocol forbids
/// to lose a message over its encoding.
pub(super) fn percent_decode(encoded: &[u8]) -> String {
    let hex = |at: usize| encoded.get(at).and_then(|&digit| char::from(digit).to_digit(16));
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

/// The status that trailers carry, if they do.
pub(super) fn status_of(trailers: &HeaderList) -> Option<Result<(), Status>> {
    let code = Code::from_header(trailers.get(b"grpc-status")?);
    if code == Code::Ok {
        return Some(Ok(()));
    }
    let message = percent_decode(trailers.get(b"grpc-message").unwrap_or_default());
    let details = trailers.get(b"grpc-status-details-bin").and_then(metadata::decode_bin).unwrap_or_default();
    Some(Err(Status::new(code, message).with_details(details)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_percent_encoding() {
        for message in ["", "plain", "100 % \t\n", "schlüssel 🔑 \u{7f}", "%41"] {
            let encoded = percent_encode(message);
            assert!(encoded.iter().all(|byte| (0x20..0x7f).contains(byte)), "{encoded:?}");
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
    fn codes_are_read_from_headers() {
        for (number, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(code.as_header(), number.to_string().as_bytes());
            assert_eq!(Code::from_header(code.as_header()), code);
        }
        for strange in [&b"17"[..], b"", b"-1", b"x", b"99999999999999999999999"] {
            assert_eq!(Code::from_header(strange), Code::Unknown);
        }
    }
}
