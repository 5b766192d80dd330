//! A request of HTTP and its unparsed answer, with what all clients have in common: the plain one
//! of `cloud` and that of the crate `http`.

use std::time::Duration;
use std::{fmt, io};

/// Time limit of a connection. A lost SYN is sent again after 1 and after 3 seconds (RFC 6298
/// §2.1).
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// The name by which the programs call themselves.
pub const USER_AGENT: &str = concat!("firstlight/", env!("CARGO_PKG_VERSION"));

/// The header fields of a request: names and values.
pub type Fields<'a> = &'a [(&'a str, &'a str)];

/// One request.
pub struct Request<'a> {
    /// The method.
    pub method: &'a str,
    /// The URL.
    pub url: &'a str,
    /// The header fields.
    pub fields: Fields<'a>,
    /// The body; `None` for a method without one.
    pub body: Option<&'a [u8]>,
    /// Maximum size of the answer in bytes.
    pub limit: u64,
}

/// The answer to a request, as it arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct Response {
    /// The HTTP status.
    pub status: u16,
    /// The header fields: names and values.
    pub fields: Vec<(String, String)>,
    /// The pause that the server demands (`Retry-After`).
    pub pause: Option<Duration>,
    /// The body, or why it is incomplete.
    pub body: Result<Vec<u8>, NoAnswer>,
}

/// Why a request has no answer, or not a whole one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoAnswer {
    /// The URL or a field of the request is invalid.
    Request(String),
    /// The connection cannot be made, or it broke.
    Connection(String),
    /// Nothing arrived in time.
    Late,
    /// The answer is not what HTTP demands.
    Malformed(&'static str),
    /// A part of the answer has more bytes than this.
    TooLong(&'static str, u64),
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoAnswer::Request(why) | NoAnswer::Connection(why) => f.write_str(why),
            NoAnswer::Late => f.write_str("no answer in time"),
            NoAnswer::Malformed(why) => f.write_str(why),
            NoAnswer::TooLong(part, most) => write!(f, "{part} has more than {most} bytes"),
        }
    }
}

impl From<io::Error> for NoAnswer {
    fn from(error: io::Error) -> NoAnswer {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => NoAnswer::Late,
            _ => NoAnswer::Connection(error.to_string()),
        }
    }
}

/// How requests reach a service.
pub trait RequestTransport: Send + Sync {
    /// Returns the answer to a request. Does not retry and follows no redirect.
    fn send(&self, request: &Request<'_>) -> Result<Response, NoAnswer>;
}

/// Returns the seconds of a `Retry-After`; `None` if it is no number. A number that is too large
/// becomes the maximum: callers have limits.
pub fn seconds(value: &str) -> Option<Duration> {
    let value = value.trim();
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| Duration::from_secs(value.parse().unwrap_or(u32::MAX).into()))
}
