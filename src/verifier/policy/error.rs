//! Why a policy is invalid: a kind for programs and a clause for people.

use std::fmt;

/// Why a policy is invalid, or cannot be the one of machines with a variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyError {
    /// The kind of fault.
    pub fault: Fault,
    text: String,
}

/// The kind of fault in a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The text is not JSON, or has an unknown or missing member.
    Json,
    /// A register, or an image, which is a set of registers.
    Image,
    /// There are more images, keys, roots or requirements than allowed, or one is too long.
    TooMany,
    /// The name of an attestation key.
    Key,
    /// A root of the vendors of TPMs.
    Root,
    /// A requirement for the platform or for the form of attested TLS.
    Requirement,
    /// The policy does not fit machines with this variant.
    Variant,
    /// The policy does not say what its machines run.
    Worthless,
}

impl Fault {
    /// Makes an error of this kind with a clause for a person.
    pub fn because(self, why: impl Into<String>) -> PolicyError {
        PolicyError {
            fault: self,
            text: why.into(),
        }
    }
}

impl PolicyError {
    /// Puts the part of the policy that the error is about in front.
    pub fn within(self, part: impl fmt::Display) -> PolicyError {
        self.fault.because(format!("{part}: {}", self.text))
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "measurement policy: {}", self.text)
    }
}

impl std::error::Error for PolicyError {}
