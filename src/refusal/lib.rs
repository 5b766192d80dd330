//! Why evidence is refused: a kind for programs and a sentence for people.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Why a verifier refuses evidence. It is one pointer: a result that may be a refusal is moved often, and is a refusal seldom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal(Box<Reason>);

/// The content of a [`Refusal`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    /// The reason for programs.
    pub kind: Kind,
    /// The register or field with the wrong value, as the policy names it: `PCR 4`, `tdAttributes`.
    /// If no policy can set it, the vendor's name: `CURRENT_TCB`. `None` if no single value is
    /// wrong.
    pub field: Option<String>,
    /// The value that is required, or its minimum or maximum.
    pub expected: Option<String>,
    /// The value in the evidence.
    pub got: Option<String>,
    /// What was refused and what to do about it, for a person.
    pub text: String,
    /// The name of the machine whose evidence is refused, if the machine itself is the peer of this connection: its
    /// key has signed the evidence for it. `None` says nothing about any machine.
    pub machine: Option<Arc<str>>,
    /// The further reasons if there are several; `text` has those, too.
    pub others: Box<[Refusal]>,
}

impl Deref for Refusal {
    type Target = Reason;

    fn deref(&self) -> &Reason {
        &self.0
    }
}

impl DerefMut for Refusal {
    fn deref_mut(&mut self) -> &mut Reason {
        &mut self.0
    }
}

/// The kinds of refusals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The evidence, a certificate or collateral cannot be read.
    Malformed,
    /// Another key signed it, or it was altered.
    Signature,
    /// The certificates do not lead to an accepted root. Other certificates may.
    Chain,
    /// A certificate is not one for this use, or breaks a rule of its kind.
    Certificate,
    /// The vendor revoked the certificate, its authority, or the platform.
    Revoked,
    /// A certificate or collateral is not valid at this time, or older than the policy allows.
    Expired,
    /// The evidence was made for another connection.
    Nonce,
    /// The evidence came in the old form of attested TLS, which the policy refuses.
    Form,
    /// The parts of the evidence and its collateral do not belong together, or bind another key.
    Binding,
    /// A register, or another measured value, is not the one in the policy.
    Measurement,
    /// The policy does not list the machine: its key, chip, owner or cloud.
    Machine,
    /// The firmware, or another part of the trusted computing base, is too old.
    Outdated,
    /// The machine runs with less protection than required: debugging or migration is possible.
    Protection,
    /// Collateral that the judgement needs is missing: its source, not the machine, is at fault.
    Collateral,
    /// The evidence does not say what the policy asks for.
    Unproven,
}

impl Kind {
    /// Returns the name of the kind in JSON output and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Malformed => "malformed",
            Kind::Signature => "signature",
            Kind::Chain => "chain",
            Kind::Certificate => "certificate",
            Kind::Revoked => "revoked",
            Kind::Expired => "expired",
            Kind::Nonce => "nonce",
            Kind::Form => "form",
            Kind::Binding => "binding",
            Kind::Measurement => "measurement",
            Kind::Machine => "machine",
            Kind::Outdated => "outdated",
            Kind::Protection => "protection",
            Kind::Collateral => "collateral",
            Kind::Unproven => "unproven",
        }
    }

    /// Makes a refusal of this kind with a sentence for a person.
    pub fn because(self, text: impl Into<String>) -> Refusal {
        Refusal(Box::new(Reason {
            kind: self,
            field: None,
            expected: None,
            got: None,
            text: text.into(),
            machine: None,
            others: [].into(),
        }))
    }
}

impl Refusal {
    /// Joins several refusals, a line for each; succeeds if there are none. The kind of the first
    /// one is the kind of the whole.
    pub fn join(all: Vec<Refusal>) -> Result<(), Refusal> {
        let lines: Vec<_> = all.iter().map(|one| &*one.text).collect();
        let text = lines.join("\n");
        let mut all = all.into_iter();
        let Some(mut first) = all.next() else {
            return Ok(());
        };
        first.text = text;
        first.others = all.collect();
        Err(first)
    }

    /// Adds the name of the wrong register or field.
    pub fn of(mut self, field: impl Into<String>) -> Refusal {
        self.field = Some(field.into());
        self
    }

    /// Adds the value that is required and the value in the evidence.
    pub fn values(mut self, expected: impl ToString, got: impl ToString) -> Refusal {
        self.expected = Some(expected.to_string());
        self.got = Some(got.to_string());
        self
    }

    /// Adds the value in the evidence, if several others are accepted.
    pub fn got(mut self, got: impl ToString) -> Refusal {
        self.got = Some(got.to_string());
        self
    }

    /// Adds the machine that is the peer.
    pub fn by(mut self, machine: Arc<str>) -> Refusal {
        self.machine = Some(machine);
        self
    }

    /// Changes the sentence: callers say where the error is.
    pub fn reworded(mut self, words: impl FnOnce(&str) -> String) -> Refusal {
        self.text = words(&self.text);
        self
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Refusal {}

impl From<Refusal> for String {
    fn from(refusal: Refusal) -> String {
        refusal.0.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_reasons_are_one_refusal_with_a_line_for_each() {
        let old = Kind::Outdated.because("SNP is 1").of("snp").values(2, 1);
        let debug = Kind::Protection.because("DEBUG is on");
        assert_eq!(Refusal::join(vec![]), Ok(()));
        let alone = Refusal::join(vec![old.clone()]);
        assert_eq!(alone.unwrap_err(), old);
        let both = Refusal::join(vec![old, debug.clone()]).unwrap_err();
        assert_eq!(both.to_string(), "SNP is 1\nDEBUG is on");
        assert_eq!(
            (both.kind, both.field.as_deref()),
            (Kind::Outdated, Some("snp"))
        );
        assert_eq!(*both.others, [debug]);
    }
}
