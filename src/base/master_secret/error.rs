//! Why a key is not available, and the limits that the texts name.

use std::fmt;

use crate::crypto::MAX_DERIVED_LEN;

/// The storage URI of a back end that stores nothing.
pub const NO_STORE: &str = "storage://no-store";
/// Maximum length of a URI in bytes. A master secret and a salt of 1 KiB each need 2.8 KiB.
pub(super) const MAX_LEN: usize = 4096;

/// Why a key is not available. No text contains a part of a URI that may be secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The URI is too long: its length in bytes.
    TooLong(usize),
    /// The URI does not have the expected scheme (`kms`, `storage`).
    Scheme(&'static str),
    /// A back end of the wire protocol that this version does not support: scheme and name.
    Unsupported(&'static str, &'static str),
    /// An unknown back end: scheme, and the name unless it may be a misplaced secret.
    Unknown(&'static str, Option<String>),
    /// The named parameter is missing.
    Missing(&'static str),
    /// The named parameter appears twice.
    Twice(&'static str),
    /// The named parameter has no value.
    Empty(&'static str),
    /// The named parameter is not base64url, or its percent-encoding is invalid.
    Encoding(&'static str),
    /// A key of this length in bytes cannot be derived.
    Length(usize),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::TooLong(len) => write!(
                f,
                "key URI: it has {len} bytes, expected at most {}",
                MAX_LEN
            ),
            Error::Scheme(scheme) => {
                write!(f, "key URI: expected one that starts with {scheme}://")
            }
            Error::Unsupported(scheme, name) => write!(
                f,
                "key URI: the back end {scheme}://{name} is not supported by this version; \
                 use kms://cluster-kms with {NO_STORE}"
            ),
            Error::Unknown(scheme, Some(name)) => {
                write!(f, "key URI: unknown back end {scheme}://{name}")
            }
            Error::Unknown(scheme, None) => write!(f, "key URI: unknown back end of {scheme}://"),
            Error::Missing(name) => write!(f, "key URI: the parameter {name} is missing"),
            Error::Twice(name) => write!(f, "key URI: the parameter {name} is given twice"),
            Error::Empty(name) => write!(f, "key URI: the {name} is empty"),
            Error::Encoding(name) => write!(
                f,
                "key URI: the parameter {name} is not base64url (RFC 4648 §5)"
            ),
            Error::Length(len) => write!(
                f,
                "a key of {len} bytes cannot be derived: expected 1 to {MAX_DERIVED_LEN}"
            ),
        }
    }
}

impl std::error::Error for Error {}
