//! A finding of `firstlight doctor`: what is wrong with which object, and what to do about it.

use serde_json::{Value, json};

use crate::shell::progress::printable;

/// How urgent a finding is; the most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Something does not work, or stops within days.
    Error,
    /// Something will stop, or one more failure stops the cluster, or a protection is off.
    Warning,
    /// Something is as the operator may want it, or could not be checked.
    Note,
}

impl Severity {
    /// Returns the word in the output.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

/// A finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnosis {
    /// How urgent it is.
    pub severity: Severity,
    /// The node, the object or the file.
    pub object: String,
    /// What is wrong: expected against got.
    pub text: String,
    /// What to do, as one sentence.
    pub advice: String,
}

impl Diagnosis {
    /// Creates a finding about something that does not work.
    pub fn error(
        object: impl Into<String>,
        text: impl Into<String>,
        advice: impl Into<String>,
    ) -> Diagnosis {
        Diagnosis {
            severity: Severity::Error,
            object: object.into(),
            text: text.into(),
            advice: advice.into(),
        }
    }

    /// Creates a finding about something that will not work, or is not safe.
    pub fn warning(
        object: impl Into<String>,
        text: impl Into<String>,
        advice: impl Into<String>,
    ) -> Diagnosis {
        Diagnosis {
            severity: Severity::Warning,
            ..Diagnosis::error(object, text, advice)
        }
    }

    /// Creates a finding about something that the operator may want, or that was not checked.
    pub fn note(
        object: impl Into<String>,
        text: impl Into<String>,
        advice: impl Into<String>,
    ) -> Diagnosis {
        Diagnosis {
            severity: Severity::Note,
            ..Diagnosis::error(object, text, advice)
        }
    }

    /// Returns whether another finding is the same of another object.
    pub fn is_like(&self, other: &Diagnosis) -> bool {
        let of = |it: &Diagnosis| (it.severity, it.text.clone(), it.advice.clone());
        of(self) == of(other)
    }

    /// Returns the lines for people, with these names of objects.
    pub fn text(&self, check: &str, objects: &str) -> String {
        format!(
            "{} ({check}): {}: {}\n    {}\n",
            self.severity.word(),
            printable(objects),
            printable(&self.text),
            printable(&self.advice)
        )
    }

    /// Returns the JSON for programs.
    pub fn json(&self, check: &str) -> Value {
        json!({
            "check": check,
            "severity": self.severity.word(),
            "object": self.object,
            "finding": self.text,
            "advice": self.advice,
        })
    }
}
