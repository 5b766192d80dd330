//! Why collateral is not available: a cause for programs and a sentence for people.

use std::fmt;

use crate::refusal::{Kind, Refusal};

/// Why an item of collateral, or a cloud's verdict on a machine, is not available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    /// The kind of failure.
    pub cause: Cause,
    text: String,
}

/// The kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A setting is wrong or missing: a URL, a file, a directory, credentials, a permission.
    Setting,
    /// The settings of this program forbid requests.
    Offline,
    /// There is no connection to the server, or its answer is incomplete.
    Unreachable,
    /// The server has too much to do, or a fault of its own: another request may succeed.
    Busy,
    /// The server does not know the item, or none of the permitted sources has it.
    Unknown,
    /// The server refuses the request with this status.
    Refused(u16),
    /// This program sends no more such requests for now, or too many callers wait.
    Limited,
    /// The item is being fetched.
    Pending,
    /// There are more bytes than allowed.
    TooLarge,
    /// The bytes do not have the form of the item.
    Malformed,
    /// It is another item: of another chip, platform or authority.
    Mismatch,
    /// The item's validity has ended.
    Expired,
}

impl Cause {
    /// Makes an error of this cause with a sentence for a person.
    pub fn because(self, text: impl Into<String>) -> Unavailable {
        Unavailable {
            cause: self,
            text: text.into(),
        }
    }
}

impl Unavailable {
    /// Returns an error about a text or bytes that have not the form of the item. The reason is a clause.
    pub fn malformed(why: impl fmt::Display) -> Unavailable {
        Cause::Malformed.because(why.to_string())
    }

    /// Puts the subject of the error in front.
    pub fn about(self, what: impl fmt::Display) -> Unavailable {
        self.cause.because(format!("{what}: {}", self.text))
    }

    /// Appends when the next request is sent, or what to do.
    pub fn and(self, more: impl fmt::Display) -> Unavailable {
        self.cause.because(format!("{}{more}", self.text))
    }

    /// Returns whether the same request may succeed later.
    pub fn may_pass(&self) -> bool {
        matches!(self.cause, Cause::Unreachable | Cause::Busy)
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Unavailable {}

/// Evidence that names no item, or an item that is none.
impl From<Refusal> for Unavailable {
    fn from(refusal: Refusal) -> Unavailable {
        let cause = match refusal.kind {
            Kind::Expired => Cause::Expired,
            _ => Cause::Malformed,
        };
        cause.because(refusal)
    }
}

impl From<Unavailable> for Refusal {
    fn from(error: Unavailable) -> Refusal {
        Kind::Collateral.because(error)
    }
}

impl From<Unavailable> for String {
    fn from(error: Unavailable) -> String {
        error.text
    }
}
