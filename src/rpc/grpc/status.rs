//! The status of a call: `grpc-status`, `grpc-message` and `grpc-status-details-bin`.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use prost::Message;

use super::header_values::{decode_bin, percent_decode};
use crate::h2::HeaderList;

/// The status codes of gRPC's `statuscodes.md`.
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

    /// Reads a `grpc-status` value. An unknown value becomes [`Code::Unknown`], as the protocol
    /// demands.
    pub(super) fn from_header(value: &[u8]) -> Code {
        let number = std::str::from_utf8(value)
            .ok()
            .and_then(|text| text.parse::<usize>().ok());
        number
            .and_then(|number| Code::ALL.get(number).copied())
            .unwrap_or(Code::Unknown)
    }

    /// Returns the value of `grpc-status`.
    pub(super) fn as_header(self) -> &'static [u8] {
        const DIGITS: &[u8; 10] = b"0123456789";
        const TENS: &[u8; 14] = b"10111213141516";
        match self as usize {
            code @ 0..10 => &DIGITS[code..=code],
            code => &TENS[2 * (code - 10)..2 * (code - 9)],
        }
    }

    /// Returns the code for an HTTP response without `grpc-status` (gRPC's
    /// `http-grpc-status-mapping.md`).
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

/// The end of a call without success: a code for programs and a message for people. A caller never
/// gets [`Code::Ok`] here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    code: Code,
    message: String,
    details: Vec<u8>,
    is_unprocessed: bool,
    cause: Option<Cause>,
}

/// The error that ended a connection. Two are equal only if they are the same error.
#[derive(Clone, Debug)]
struct Cause(Arc<io::Error>);

impl PartialEq for Cause {
    fn eq(&self, other: &Cause) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cause {}

impl Status {
    /// Creates a status. The message is sent over the network unchanged: an unauthenticated peer
    /// must learn no more from it than the refusal.
    pub fn new(code: Code, message: impl Into<String>) -> Status {
        Status {
            code,
            message: message.into(),
            details: Vec::new(),
            is_unprocessed: false,
            cause: None,
        }
    }

    /// Adds binary details (`grpc-status-details-bin`, an encoded `google.rpc.Status`).
    pub fn with_details(mut self, details: Vec<u8>) -> Status {
        self.details = details;
        self
    }

    /// Replaces the details with a `google.rpc.RetryInfo` that says when the caller may retry.
    pub fn with_retry_after(mut self, pause: Duration) -> Status {
        let retry = RetryInfo {
            retry_delay: Some(WireDuration {
                seconds: pause.as_secs() as i64,
                nanos: pause.subsec_nanos() as i32,
            }),
        };
        let any = Any {
            type_url: RETRY_INFO.into(),
            value: retry.encode_to_vec(),
        };
        let status = RpcStatus {
            code: self.code as i32,
            message: self.message.clone(),
            details: vec![any],
        };
        self.details = status.encode_to_vec();
        self
    }

    /// Creates the status for a caller that got no turn. The code is UNAVAILABLE, because
    /// Constellation's tools retry only after this code.
    pub fn busy(retry_after: Duration) -> Status {
        let seconds = retry_after.as_secs() + 1;
        let why = format!(
            "too many callers wait, or your last secret was wrong; try again in {seconds} s"
        );
        Status::new(Code::Unavailable, why).with_retry_after(retry_after)
    }

    /// Returns how long the server wants the caller to wait before a retry, if it said so; at most
    /// one day.
    pub fn retry_after(&self) -> Option<Duration> {
        let status = transport::message::decode::<RpcStatus>(&self.details).ok()?;
        let info = status
            .details
            .iter()
            .find(|any| any.type_url == RETRY_INFO)?;
        let delay = RetryInfo::decode(&info.value[..]).ok()?.retry_delay?;
        let (seconds, nanos) = (
            u64::try_from(delay.seconds).ok()?,
            u32::try_from(delay.nanos).ok()?,
        );
        Some(
            Duration::from_secs(seconds.min(86_400))
                + Duration::from_nanos(nanos.min(999_999_999).into()),
        )
    }

    /// Makes the status of calls whose connection failed with `error`. The error itself never
    /// crosses the network.
    pub(super) fn broken(error: io::Error) -> Status {
        let text = format!("the connection broke: {error}");
        Status {
            cause: Some(Cause(Arc::new(error))),
            ..Status::new(Code::Unavailable, text)
        }
    }

    /// Returns the error of the connection that ended the call; `None` if the call ended for
    /// another reason.
    pub fn cause(&self) -> Option<&io::Error> {
        self.cause.as_ref().map(|cause| &*cause.0)
    }

    /// Marks the status: the server did not process the call.
    pub(super) fn unprocessed(self) -> Status {
        Status {
            is_unprocessed: true,
            ..self
        }
    }

    /// Returns whether the server said that it did not process the call (GOAWAY, REFUSED_STREAM).
    /// The caller may then retry it on another connection, whatever the call does.
    pub fn is_unprocessed(&self) -> bool {
        self.is_unprocessed
    }

    /// Returns the status code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the message for people; may be empty.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the binary details; empty if there are none.
    pub fn details(&self) -> &[u8] {
        &self.details
    }
}

/// The type URL of a [`RetryInfo`] in an [`Any`].
const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";

/// `google.rpc.Status` (googleapis, google/rpc/status.proto), the content of
/// `grpc-status-details-bin`.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo` (google/rpc/error_details.proto).
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<WireDuration>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, PartialEq, Message)]
struct WireDuration {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() {
            write!(f, "{}", self.code)
        } else {
            write!(f, "{}: {}", self.code, self.message)
        }
    }
}

impl Error for Status {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause().map(|cause| cause as _)
    }
}

/// Reads the status from trailers; `None` if they have none.
pub(super) fn status_of(trailers: &HeaderList) -> Option<Result<(), Status>> {
    let code = Code::from_header(trailers.get(b"grpc-status")?);
    if code == Code::Ok {
        return Some(Ok(()));
    }
    let message = percent_decode(trailers.get(b"grpc-message").unwrap_or_default());
    let details = trailers
        .get(b"grpc-status-details-bin")
        .and_then(decode_bin)
        .unwrap_or_default();
    Some(Err(Status::new(code, message).with_details(details)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_hint_reads_back_and_malformed_ones_are_none() {
        let busy = Status::new(Code::ResourceExhausted, "busy");
        assert_eq!(busy.retry_after(), None);
        let pause = Duration::from_millis(2500);
        let hinted = busy.clone().with_retry_after(pause);
        assert_eq!(
            (hinted.retry_after(), hinted.message()),
            (Some(pause), "busy")
        );
        for details in support::mutation::mutations(hinted.details(), 5000) {
            let _ = busy.clone().with_details(details).retry_after();
        }
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
