//! A request and its unparsed answer, and the time limit of a connection.

use std::time::Duration;

/// Time limit of a connection. A lost SYN is sent again after 1 and after 3 seconds (RFC 6298 §2.1).
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
    /// The body, or why it is incomplete.
    pub body: Result<Vec<u8>, String>,
}

/// How requests reach a service.
pub trait Transport: Send + Sync {
    /// Returns the answer to a request; the error says why there is none. Makes no second try and follows no redirect.
    fn send(&self, request: &Request<'_>) -> Result<Response, String>;
}
