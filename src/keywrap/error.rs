//! The errors of this crate, as sentences for the operator.

use std::fmt;

use base::text;
use cloud_api::aws::credentials::VariableError;
use http::CertificateError;

/// Maximum number of characters of a service's message in an error.
pub const SHOWN: usize = 300;

/// Why a master secret cannot be wrapped or unwrapped. No text contains a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The URI of a key or of a store is wrong.
    Uri(String),
    /// The credentials are missing or unusable.
    Credentials(String),
    /// The service does not answer, or asks to come later. Another attempt may succeed.
    Away(String),
    /// The service answers that it is overloaded. The same request will soon succeed.
    Busy(String),
    /// The service refuses.
    Refused(String),
    /// The service has no such key.
    Missing(String),
    /// The store already has a file with this name, and replaces no file.
    Exists,
    /// The answer of the service is not usable.
    Answer(String),
    /// The file is not a wrapped master secret.
    Format(String),
    /// The key that the service unwrapped does not decrypt the file.
    Sealed,
}

impl Error {
    /// Returns whether another attempt may succeed.
    pub fn may_pass(&self) -> bool {
        matches!(self, Error::Away(_) | Error::Busy(_))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Uri(why) => write!(f, "wrong URI: {why}"),
            Error::Credentials(why) | Error::Away(why) | Error::Busy(why) => f.write_str(why),
            Error::Refused(why) | Error::Missing(why) | Error::Answer(why) => f.write_str(why),
            Error::Exists => f.write_str("a file with this name exists, and files are never replaced: give another name"),
            Error::Format(why) => write!(f, "not a wrapped master secret: {why}"),
            Error::Sealed => f.write_str(
                "the wrapped master secret does not open: it is damaged, or it was wrapped for another key URI",
            ),
        }
    }
}

/// Checks the errors for statuses and codes: those of the first list may pass, those of the second do not and say so much.
#[cfg(test)]
pub fn check_refusals(
    of: impl Fn(u16, &str) -> Error,
    passing: &[(u16, &str)],
    lasting: &[(u16, &str, &str)],
) {
    for (status, code) in passing {
        let error = of(*status, code);
        assert_eq!((error.may_pass(), &*error.to_string()), (true, "text"));
    }
    for (status, code, expected) in lasting {
        let error = of(*status, code);
        let text = error.to_string();
        assert!(!error.may_pass() && text.contains(expected), "{text}");
    }
}

impl std::error::Error for Error {}

impl From<VariableError> for Error {
    fn from(error: VariableError) -> Error {
        Error::Credentials(error.to_string())
    }
}

impl From<CertificateError> for Error {
    fn from(error: CertificateError) -> Error {
        Error::Credentials(error.to_string())
    }
}

/// Returns a service's message as a part of one line: ` (MESSAGE)`, or an empty text without a message.
pub fn said(words: &str) -> String {
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown: String = words
        .chars()
        .filter(|c| text::is_visible(*c))
        .take(SHOWN)
        .collect();
    if shown.is_empty() {
        shown
    } else {
        format!(" ({shown})")
    }
}
