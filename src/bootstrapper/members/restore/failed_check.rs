//! A precondition of a restoration that is not met.

use std::fmt;
use std::ops::Deref;

/// Why etcd cannot be restored, or why it would not be safe: a sentence, or a clause of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedCheck(String);

impl Deref for FailedCheck {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FailedCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FailedCheck {}

impl From<String> for FailedCheck {
    fn from(why: String) -> FailedCheck {
        FailedCheck(why)
    }
}

impl From<&str> for FailedCheck {
    fn from(why: &str) -> FailedCheck {
        FailedCheck(why.to_owned())
    }
}

/// Makes a failed check as `format!` makes a text.
macro_rules! failed_check {
    ($($text:tt)*) => {
        $crate::members::restore::failed_check::FailedCheck::from(format!($($text)*))
    };
}
pub(crate) use failed_check;
