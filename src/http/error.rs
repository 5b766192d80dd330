//! Why a request has no answer.

use std::time::{Duration, UNIX_EPOCH};
use std::{fmt, io};

use transport::dial::DialError;

/// Why a request has no answer. No text contains the value of a header field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// What failed.
    pub kind: ErrorKind,
    text: String,
}

/// What failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The name of the server could not be resolved to an address.
    Name,
    /// There was no connection, so the server did not get the request.
    Connection,
    /// The server's certificate is not accepted.
    Certificate,
    /// The server's certificate is not valid at the time of this machine's clock.
    CertificateTime,
    /// TLS failed for another reason.
    Tls,
    /// The time limit passed; the server may have done what was asked.
    Timeout,
    /// The connection ended, or the answer is malformed; the server may have done what was asked.
    Cut,
    /// The answer is longer than allowed.
    TooLong,
    /// The answer has another media type than expected.
    Type,
    /// The request is malformed, or the policy forbids it or where a redirect leads.
    Invalid,
}

impl Error {
    pub(crate) fn too_long(limit: u64) -> Error {
        Error {
            kind: ErrorKind::TooLong,
            text: format!("the answer has more than {limit} bytes"),
        }
    }

    pub(crate) fn of_type(media: &[u8], expected: &[&str]) -> Error {
        let media = String::from_utf8_lossy(media);
        let media: String = media.chars().take(60).collect();
        let expected = expected.join(" or ");
        Error {
            kind: ErrorKind::Type,
            text: format!("the answer has the type {media:?}, expected {expected}"),
        }
    }

    pub(crate) fn of_field(name: &str) -> Error {
        Error {
            kind: ErrorKind::Invalid,
            text: format!("the value of the field {name} has an invalid character"),
        }
    }
}

impl From<ureq::Error> for Error {
    fn from(error: ureq::Error) -> Error {
        use ureq::Error::*;
        let kind = match &error {
            HostNotFound => ErrorKind::Name,
            ConnectionFailed
            | ConnectProxyFailed(_)
            | Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => ErrorKind::Connection,
            Timeout(_) => ErrorKind::Timeout,
            Rustls(error) => of_tls(error),
            Io(error) => of_io(error),
            Protocol(_) => ErrorKind::Cut,
            _ => ErrorKind::Invalid,
        };
        let text = match (&error, kind) {
            (Timeout(_), ErrorKind::Connection) => "no connection within the timeout".into(),
            (Timeout(_), _) => "the timeout has passed".into(),
            (Rustls(error), ErrorKind::CertificateTime) => of_validity(error).unwrap_or_default(),
            (Io(error), ErrorKind::CertificateTime) => {
                let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
                inner.and_then(of_validity).unwrap_or_default()
            }
            // the library's text begins with the name of its variant
            (Io(error), _) => error.to_string(),
            _ => error.to_string(),
        };
        Error { kind, text }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        ureq::Error::from(error).into()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn of_tls(error: &rustls::Error) -> ErrorKind {
    match error {
        _ if of_validity(error).is_some() => ErrorKind::CertificateTime,
        rustls::Error::InvalidCertificate(_) => ErrorKind::Certificate,
        _ => ErrorKind::Tls,
    }
}

/// Returns since when a certificate is not valid, or until when, if that is what is wrong.
fn of_validity(error: &rustls::Error) -> Option<String> {
    use rustls::CertificateError::{ExpiredContext, NotValidYetContext};
    let date = |time: &rustls::pki_types::UnixTime| {
        base::time::seconds(UNIX_EPOCH + Duration::from_secs(time.as_secs()))
    };
    match error {
        rustls::Error::InvalidCertificate(ExpiredContext { not_after, .. }) => {
            Some(format!("its certificate ended at {}", date(not_after)))
        }
        rustls::Error::InvalidCertificate(NotValidYetContext { not_before, .. }) => {
            Some(format!("its certificate begins at {}", date(not_before)))
        }
        _ => None,
    }
}

fn of_io(error: &io::Error) -> ErrorKind {
    use io::ErrorKind::*;
    let inner = error.get_ref();
    match inner.and_then(|inner| inner.downcast_ref()) {
        Some(DialError::Name(_)) => return ErrorKind::Name,
        Some(DialError::Addresses(_)) => return ErrorKind::Connection,
        None => {}
    }
    let inner = inner.and_then(|inner| inner.downcast_ref());
    match error.kind() {
        _ if inner.is_some() => inner.map_or(ErrorKind::Tls, of_tls),
        ConnectionRefused | HostUnreachable | NetworkUnreachable | AddrNotAvailable
        | NotConnected => ErrorKind::Connection,
        _ => ErrorKind::Cut,
    }
}
