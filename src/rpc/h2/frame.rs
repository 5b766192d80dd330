//! Frames (RFC 9113 §4, §6): the frame head, the numbers in it, and functions that write the small
//! frames.

use std::fmt;

/// Length of the frame head in bytes (§4.1).
pub(super) const HEAD: usize = 9;
/// Largest payload that we accept, in bytes: the initial and smallest value of
/// SETTINGS_MAX_FRAME_SIZE (§6.5.2).
pub(super) const MAX_FRAME: usize = 1 << 14;
/// The client's connection preface (§3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The largest flow-control window (§6.9.1) and the largest stream identifier.
pub(super) const MAX_31_BITS: u32 = (1 << 31) - 1;

/// Frame types (§6).
pub(super) mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// Flags (§6). ACK and END_STREAM have the same bit; they belong to different frame types.
pub(super) mod flag {
    pub const ACK: u8 = 1;
    pub const END_STREAM: u8 = 1;
    pub const END_HEADERS: u8 = 4;
    pub const PADDED: u8 = 8;
    pub const PRIORITY: u8 = 0x20;
}

/// Settings (§6.5.2).
pub(super) mod setting {
    pub const HEADER_TABLE_SIZE: u16 = 1;
    pub const ENABLE_PUSH: u16 = 2;
    pub const MAX_CONCURRENT_STREAMS: u16 = 3;
    pub const INITIAL_WINDOW_SIZE: u16 = 4;
    pub const MAX_FRAME_SIZE: u16 = 5;
    pub const MAX_HEADER_LIST_SIZE: u16 = 6;
}

/// An error code (§7). The peer may send any number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode(pub u32);

#[allow(missing_docs)]
impl ErrorCode {
    pub const NO_ERROR: ErrorCode = ErrorCode(0);
    pub const PROTOCOL_ERROR: ErrorCode = ErrorCode(1);
    pub const INTERNAL_ERROR: ErrorCode = ErrorCode(2);
    pub const FLOW_CONTROL_ERROR: ErrorCode = ErrorCode(3);
    pub const SETTINGS_TIMEOUT: ErrorCode = ErrorCode(4);
    pub const STREAM_CLOSED: ErrorCode = ErrorCode(5);
    pub const FRAME_SIZE_ERROR: ErrorCode = ErrorCode(6);
    pub const REFUSED_STREAM: ErrorCode = ErrorCode(7);
    pub const CANCEL: ErrorCode = ErrorCode(8);
    pub const COMPRESSION_ERROR: ErrorCode = ErrorCode(9);
    pub const CONNECT_ERROR: ErrorCode = ErrorCode(10);
    pub const ENHANCE_YOUR_CALM: ErrorCode = ErrorCode(11);
    pub const INADEQUATE_SECURITY: ErrorCode = ErrorCode(12);
    pub const HTTP_1_1_REQUIRED: ErrorCode = ErrorCode(13);
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[rustfmt::skip]
        const NAMES: [&str; 14] = [
            "NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED",
            "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM",
            "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED",
        ];
        match NAMES.get(self.0 as usize) {
            Some(name) => f.write_str(name),
            None => write!(f, "error code {:#x}", self.0),
        }
    }
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A frame head (§4.1).
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub length: usize,
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
}

impl Head {
    /// Reads a frame head; returns `None` if `input` is too short.
    pub(super) fn parse(input: &[u8]) -> Option<Head> {
        let &[l0, l1, l2, kind, flags, s0, s1, s2, s3] = input.first_chunk::<HEAD>()?;
        Some(Head {
            length: u32::from_be_bytes([0, l0, l1, l2]) as usize,
            kind,
            flags,
            // The reserved bit is ignored (§4.1).
            stream: u32::from_be_bytes([s0, s1, s2, s3]) & MAX_31_BITS,
        })
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Encodes a frame head.
pub(super) fn head_bytes(length: usize, kind: u8, flags: u8, stream: u32) -> [u8; HEAD] {
    let [_, l0, l1, l2] = (length as u32).to_be_bytes();
    let [s0, s1, s2, s3] = stream.to_be_bytes();
    [l0, l1, l2, kind, flags, s0, s1, s2, s3]
}

/// Appends a frame head to `out`.
pub(super) fn head(out: &mut Vec<u8>, length: usize, kind: u8, flags: u8, stream: u32) {
    out.extend_from_slice(&head_bytes(length, kind, flags, stream));
}

pub(super) fn rst_stream(out: &mut Vec<u8>, stream: u32, code: ErrorCode) {
    head(out, 4, kind::RST_STREAM, 0, stream);
    out.extend_from_slice(&code.0.to_be_bytes());
}

pub(super) fn settings(out: &mut Vec<u8>, settings: &[(u16, u32)]) {
    head(out, settings.len() * 6, kind::SETTINGS, 0, 0);
    for (id, value) in settings {
        out.extend_from_slice(&id.to_be_bytes());
        out.extend_from_slice(&value.to_be_bytes());
    }
}

pub(super) fn ping(out: &mut Vec<u8>, flags: u8, data: &[u8; 8]) {
    head(out, 8, kind::PING, flags, 0);
    out.extend_from_slice(data);
}

pub(super) fn goaway(out: &mut Vec<u8>, last_stream: u32, code: ErrorCode, debug: &str) {
    head(out, 8 + debug.len(), kind::GOAWAY, 0, 0);
    out.extend_from_slice(&last_stream.to_be_bytes());
    out.extend_from_slice(&code.0.to_be_bytes());
    out.extend_from_slice(debug.as_bytes());
}

pub(super) fn window_update(out: &mut Vec<u8>, stream: u32, increment: u32) {
    head(out, 4, kind::WINDOW_UPDATE, 0, stream);
    out.extend_from_slice(&increment.to_be_bytes());
}
