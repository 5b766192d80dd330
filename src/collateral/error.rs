//! Why an item cannot be had.

use std::fmt;

/// Why an item cannot be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// What failed.
    pub kind: Kind,
    text: String,
}

/// What failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A setting is wrong or missing: a URL, a file, a directory, credentials, a permission.
    Setting,
    /// The settings say that nobody is asked.
    Offline,
    /// There is no connection to the server, or its answer is incomplete.
    Unreachable,
    /// The server has too much to do, or a fault of its own: another request may succeed.
    Busy,
    /// The server does not know the item, or none that may be asked has it.
    Unknown,
    /// The server refuses the request with this status.
    Refused(u16),
    /// This program sends no more such requests for now, or too many callers wait.
    Limited,
    /// The item is being fetched.
    Pending,
    /// There are more bytes than allowed.
    TooLarge,
    /// The bytes have not the form of the item.
    Malformed,
    /// It is another item: of another chip, platform or authority.
    Mismatch,
    /// The item's validity has ended.
    Expired,
}

impl Error {
    pub(crate) fn new(kind: Kind, text: impl Into<String>) -> Error {
        Error {
            kind,
            text: text.into(),
        }
    }

    /// Returns an error about a text or bytes that have not the form of the item. The reason is a clause.
    pub(crate) fn malformed(why: impl fmt::Display) -> Error {
        Error::new(Kind::Malformed, why.to_string())
    }

    /// Says in front what the error is about.
    pub(crate) fn about(self, what: impl fmt::Display) -> Error {
        Error::new(self.kind, format!("{what}: {}", self.text))
    }

    /// Says at the end when the next request is sent, or what to do.
    pub(crate) fn and(self, more: impl fmt::Display) -> Error {
        Error::new(self.kind, format!("{}{more}", self.text))
    }

    /// Returns whether the same request may succeed later.
    pub fn may_pass(&self) -> bool {
        matches!(self.kind, Kind::Unreachable | Kind::Busy)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

impl From<Error> for String {
    fn from(error: Error) -> String {
        error.text
    }
}
