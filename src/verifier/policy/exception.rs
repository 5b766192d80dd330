//! The names of flaws that a policy permits itself.

use std::fmt;

use base::text::quoted;

use super::error::{Fault, PolicyError};

/// The name of a flaw in a policy's member `exceptions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exception {
    /// Nothing pins the boot loader, so any image is accepted.
    AnyImage,
    /// A register is zero that every firmware extends in each boot, so nothing extends this bank of the TPM, and software can set its
    /// registers to any value.
    ZeroRegisters,
}

impl Exception {
    /// Returns the exception with this name.
    pub fn named(name: &str) -> Result<Exception, PolicyError> {
        match name {
            "any-image" => Ok(Exception::AnyImage),
            "zero-registers" => Ok(Exception::ZeroRegisters),
            other => Err(Fault::Requirement.because(format!(
                "exceptions: {}: expected any-image or zero-registers",
                quoted(other, 80)
            ))),
        }
    }
}

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Exception::AnyImage => "any-image",
            Exception::ZeroRegisters => "zero-registers",
        })
    }
}
