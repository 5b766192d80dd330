//! A precondition of a restoration that is not met.

use std::fmt;
use std::ops::Deref;

/// Why etcd cannot be restored, or why it would not be safe: a sentence, or a clause of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Objection(String);

impl Deref for Objection {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Objection {}

impl From<String> for Objection {
    fn from(why: String) -> Objection {
        Objection(why)
    }
}

impl From<&str> for Objection {
    fn from(why: &str) -> Objection {
        Objection(why.to_owned())
    }
}

/// Makes an objection as `format!` makes a text.
macro_rules! objection {
    ($($text:tt)*) => {
        $crate::members::restore::objection::Objection::from(format!($($text)*))
    };
}
pub(crate) use objection;
