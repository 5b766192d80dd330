//! What went wrong in attested TLS, and whose fault it is.

use std::{fmt, io};

use rustls::AlertDescription;

use crate::attestation::{IssueError, ValidateError};

/// Why there is no attested connection (or no longer one).
#[derive(Debug)]
pub enum Error {
    /// The handshake did not end before its deadline.
    TimedOut,
    /// The peer closed or reset the connection.
    Closed,
    /// The socket failed for another reason.
    Socket(io::Error),
    /// What the peer sent cannot be read as TLS.
    NotTls(String),
    /// The peer speaks TLS, but against the rules of TLS or of this protocol.
    Misbehaved(String),
    /// The peer speaks TLS, but has no version, cipher or signature in common with us.
    Incompatible(String),
    /// We refused the peer: its certificate carries no acceptable attestation document. Full text; not for the peer.
    Refused(ValidateError),
    /// Our own attestation document could not be made.
    Issuer(IssueError),
    /// The peer ended the connection with this alert.
    PeerRefused(AlertDescription),
    /// Something failed on our side that the peer has no part in.
    Internal(String),
}

impl Error {
    /// Why the peer's attestation was refused, if that is what happened.
    pub fn refused(&self) -> Option<&ValidateError> {
        match self {
            Error::Refused(reason) => Some(reason),
            _ => None,
        }
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::TimedOut => f.write_str("the TLS handshake did not end in time"),
            Error::Closed => {
                f.write_str("the peer closed the connection before the TLS handshake was done")
            }
            Error::Socket(error) => {
                write!(f, "the connection failed during the TLS handshake: {error}")
            }
            Error::NotTls(what) => write!(f, "the peer does not speak TLS: {what}"),
            Error::Misbehaved(what) => {
                write!(f, "the peer broke the rules of attested TLS: {what}")
            }
            Error::Incompatible(what) => {
                write!(f, "the peer's TLS has nothing in common with ours: {what}")
            }
            Error::Refused(reason) => write!(f, "the peer's attestation was refused: {reason}"),
            Error::Issuer(reason) => write!(
                f,
                "this machine's own attestation could not be made: {reason}"
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

/// How the text ends of a peer's alert that our attestation does not meet its policy.
pub const ATTESTATION_REFUSED: &str = ": it refused this machine's attestation (its log says why)";

/// What an alert of RFC 8446 §6.2 says about attestation.
fn meaning(alert: AlertDescription) -> &'static str {
    match alert {
        AlertDescription::AccessDenied
        | AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate => ATTESTATION_REFUSED,
        AlertDescription::CertificateRequired => {
            ": it wants an attestation, and this side has none"
        }
        AlertDescription::CertificateExpired => {
            ": to it, our certificate is not valid now; compare the clocks"
        }
        AlertDescription::InternalError => {
            ": it failed, perhaps in making its own attestation (its log says why)"
        }
        AlertDescription::ProtocolVersion => ": it wants another TLS version",
        _ => "",
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Socket(error) => Some(error),
            Error::Refused(reason) => Some(reason),
            Error::Issuer(reason) => Some(reason),
            _ => None,
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        io::Error::new(error.kind(), error)
    }
}

impl From<io::Error> for Error {
    /// Blocking sockets report a time-out of theirs as either of two kinds.
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
            Tls::NoApplicationProtocol => Error::Incompatible("it does not offer HTTP/2".into()),
            Tls::EncryptError
            | Tls::FailedToGetCurrentTime
            | Tls::FailedToGetRandomBytes
            | Tls::General(_) => Error::Internal(error.to_string()),
            other => Error::Misbehaved(other.to_string()),
        }
    }
}
