//! The errors of attested TLS. The variant says who is at fault: the network, the peer, or this
//! machine.

use std::time::Duration;
use std::{fmt, io};

use rustls::AlertDescription;

use attest::{IssueError, Refused};

/// The first of the alerts that ask for a pause.
pub const FIRST_PAUSE_ALERT: u8 = 224;

/// Why an attested connection failed.
pub enum Error {
    /// Network or peer: the handshake did not complete before its deadline.
    TimedOut,
    /// Network or peer: the connection was closed or reset.
    Closed,
    /// Network: the socket failed for another reason.
    Socket(io::Error),
    /// Peer: its bytes are not TLS.
    NotTls(String),
    /// Peer: its messages violate TLS or attested TLS.
    Misbehaved(String),
    /// Peer: it supports no TLS version, cipher suite or signature scheme that this side supports.
    Incompatible(String),
    /// Peer: its certificate has no acceptable attestation document. The full reason is not sent to
    /// the peer.
    Refused(Refused),
    /// This machine: its own attestation document could not be issued.
    Issuer(IssueError),
    /// The peer closed the connection with this alert (RFC 8446 §6.2); see
    /// [`Error::is_attestation_refused_by_peer`].
    PeerRefused(AlertDescription),
    /// This machine: a failure in which the peer has no part.
    Internal(String),
}

impl Error {
    /// Returns why this side refused the peer's attestation; `None` for every other error.
    pub fn refused(&self) -> Option<&(dyn std::error::Error + Send + Sync + 'static)> {
        match self {
            Error::Refused(reason) => Some(&**reason),
            _ => None,
        }
    }

    /// Returns whether the peer refused this machine's attestation document.
    pub fn is_attestation_refused_by_peer(&self) -> bool {
        matches!(self, Error::PeerRefused(alert) if refuses_attestation(*alert))
    }

    /// Returns the pause that the server asks for before the next connection ([`pause_of`]).
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Error::PeerRefused(alert) => pause_of(*alert),
            _ => None,
        }
    }

    /// Returns whether the peer accepts no form of attested TLS that this side accepts.
    pub fn is_other_form(&self) -> bool {
        matches!(
            self,
            Error::Incompatible(_) | Error::PeerRefused(AlertDescription::NoApplicationProtocol)
        )
    }

    fn kind(&self) -> io::ErrorKind {
        match self {
            Error::TimedOut => io::ErrorKind::TimedOut,
            Error::Closed => io::ErrorKind::UnexpectedEof,
            Error::Socket(error) => error.kind(),
            Error::NotTls(_) | Error::Misbehaved(_) => io::ErrorKind::InvalidData,
            Error::Incompatible(_) => io::ErrorKind::Unsupported,
            Error::Refused(_) => io::ErrorKind::PermissionDenied,
            Error::PeerRefused(_) => io::ErrorKind::ConnectionAborted,
            Error::Issuer(_) | Error::Internal(_) => io::ErrorKind::Other,
        }
    }
}

/// The same sentence: an [`io::Error`] that contains this error links its `Debug`, and so would that of each cause.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::TimedOut => f.write_str("the TLS handshake did not complete in time"),
            Error::Closed => {
                f.write_str("the peer closed the connection before the TLS handshake was complete")
            }
            Error::Socket(error) => {
                write!(f, "the connection failed during the TLS handshake: {error}")
            }
            Error::NotTls(what) => write!(f, "the peer does not speak TLS: {what}"),
            Error::Misbehaved(what) => {
                write!(f, "the peer violated the attested TLS protocol: {what}")
            }
            Error::Incompatible(what) => {
                write!(
                    f,
                    "the peer supports no TLS parameters that this side supports: {what}"
                )
            }
            Error::Refused(reason) => write!(f, "the peer's attestation was refused: {reason}"),
            Error::Issuer(reason) => write!(
                f,
                "this machine could not issue its own attestation document: {reason}"
            ),
            Error::PeerRefused(alert) => {
                write!(
                    f,
                    "the peer ended the TLS connection with alert {alert:?}{}",
                    meaning(*alert)
                )
            }
            Error::Internal(what) => write!(f, "TLS failed on this side: {what}"),
        }
    }
}

/// Returns whether an alert (RFC 8446 §6.2) means that the attestation document in the certificate
/// was refused.
fn refuses_attestation(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::AccessDenied
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate
    )
}

/// Returns what an alert (RFC 8446 §6.2) means for attestation, as the end of a sentence.
fn meaning(alert: AlertDescription) -> &'static str {
    match alert {
        alert if refuses_attestation(alert) => {
            ": it refused this machine's attestation (its log says why)"
        }
        AlertDescription::CertificateRequired => {
            ": it requires an attestation document, and this side has none"
        }
        AlertDescription::InternalError => {
            ": it failed, perhaps when making its attestation document (its log says why)"
        }
        AlertDescription::ProtocolVersion => ": it requires another TLS version",
        AlertDescription::NoApplicationProtocol => {
            ": it knows no form of attested TLS that this side accepts"
        }
        alert if pause_of(alert).is_some() => ": it is busy with other peers",
        _ => "",
    }
}

/// Returns the pause that one of the alerts 224 to 255 asks for, which TLS does not define: 4 s, and
/// an eighth more with each number. A join service that has too many connections sends it in place
/// of a handshake.
pub fn pause_of(alert: AlertDescription) -> Option<Duration> {
    let steps = u8::from(alert).checked_sub(FIRST_PAUSE_ALERT)?;
    Some(Duration::from_secs(4).mul_f64(1.125_f64.powi(steps.into())))
}

// its text has the text of its cause
impl std::error::Error for Error {}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        io::Error::new(error.kind(), error)
    }
}

impl From<io::Error> for Error {
    /// A blocking socket reports its time-out as `TimedOut` or as `WouldBlock`.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Error::TimedOut,
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => Error::Closed,
            _ => Error::Socket(error),
        }
    }
}

impl From<rustls::Error> for Error {
    fn from(error: rustls::Error) -> Self {
        use rustls::{Error as Tls, InvalidMessage};
        match error {
            Tls::AlertReceived(alert) => Error::PeerRefused(alert),
            Tls::InvalidMessage(
                what @ (InvalidMessage::InvalidContentType
                | InvalidMessage::UnknownProtocolVersion
                | InvalidMessage::InvalidEmptyPayload
                | InvalidMessage::MessageTooLarge),
            ) => Error::NotTls(format!("{what:?}")),
            Tls::PeerIncompatible(what) => Error::Incompatible(format!("{what:?}")),
            Tls::NoApplicationProtocol => Error::Incompatible(
                "it offers no form of attested TLS that this side accepts (ALPN)".into(),
            ),
            Tls::EncryptError
            | Tls::FailedToGetCurrentTime
            | Tls::FailedToGetRandomBytes
            | Tls::General(_) => Error::Internal(error.to_string()),
            other => Error::Misbehaved(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alerts_about_the_certificate_mean_that_the_attestation_was_refused_and_others_do_not() {
        for (alert, is_refused) in [
            (AlertDescription::AccessDenied, true),
            (AlertDescription::BadCertificate, true),
            (AlertDescription::CertificateUnknown, true),
            (AlertDescription::UnsupportedCertificate, true),
            (AlertDescription::CertificateExpired, false),
            (AlertDescription::CertificateRequired, false),
            (AlertDescription::InternalError, false),
        ] {
            let error = Error::PeerRefused(alert);
            assert_eq!(
                error.is_attestation_refused_by_peer(),
                is_refused,
                "{error}"
            );
        }
        assert!(!Error::Closed.is_attestation_refused_by_peer());
    }
}
