//! Why a command fails. The kind decides the exit code, and JSON output names it.

use std::{fmt, iter};

use base::program::{self, FAILED, USAGE};
use kubernetes::{client, services};
use serde_json::{Value, json};
use verifier::Refusal;

use clap::error::ErrorKind;

use crate::shell::{files::FileError, progress::lines};

/// Exit code: the node does not meet the policy. A retry does not help.
pub const ATTESTATION_REFUSED: u8 = 3;
/// Exit code: the node could not be reached, or did not answer in time.
pub const UNREACHABLE: u8 = 4;

/// Exit code: the node waits in its initramfs for the key of its disk.
pub const WAITS_FOR_KEY: u8 = 5;
/// Exit code: the node belongs to no cluster.
pub const FRESH: u8 = 6;
/// Exit code: the node is a member of another cluster, or the ID of the operator's cluster is
/// unknown.
pub const OTHER_CLUSTER: u8 = 7;

/// Why a command ends without success.
#[derive(Debug)]
pub enum Error {
    /// What the parser of the arguments says, which may be the help; exit code 0 then.
    Arguments(clap::Error),
    /// The arguments are wrong together.
    Usage(String),
    /// A file of the operator cannot be used.
    File(FileError),
    /// What the operator gave has content that is not valid, or that contradicts other content: a
    /// policy, evidence, a share, an image.
    Content(String),
    /// A peer refused the request, or its answer is not valid: a node, an API server, an external
    /// KMS, a server of a vendor.
    Refused(String),
    /// The machine does not meet the policy.
    Attestation(Refusal),
    /// A peer could not be reached, or did not answer in time.
    Unreachable(String),
    /// `status`: the node is in another state than a member, which has this exit code.
    State(u8, String),
    /// The present state does not allow the command: it would overwrite or harm something, or something must happen first.
    Blocked(String),
    /// Anything else, such as a failure of this machine.
    Failed(String),
}

impl Error {
    /// Creates the error for a failure without a kind of its own.
    pub fn failed(error: impl fmt::Display) -> Error {
        Error::Failed(error.to_string())
    }

    /// Creates the error for content that is not valid.
    pub fn content(error: impl fmt::Display) -> Error {
        Error::Content(error.to_string())
    }

    /// Creates the error for an answer that is not valid.
    pub fn refused(error: impl fmt::Display) -> Error {
        Error::Refused(error.to_string())
    }

    /// Creates the error for a command that the present state does not allow.
    pub fn blocked(error: impl fmt::Display) -> Error {
        Error::Blocked(error.to_string())
    }

    /// Creates the error for what an API server answered. A server that cannot prove that it is the
    /// right one was reached; one that cannot answer now was not.
    pub fn of_api(cause: &client::Error, text: String) -> Error {
        if cause.is_temporary() {
            Error::Unreachable(text)
        } else {
            Error::Refused(text)
        }
    }

    /// Creates the error for a machine that does not meet the policy; `about` says which machine.
    pub fn attestation(mut why: Refusal, about: impl fmt::Display) -> Error {
        why.text = format!("{about}: {why}");
        Error::Attestation(why)
    }

    /// Returns the error with another text, of the same kind.
    pub fn with_text(self, change: impl FnOnce(&str) -> String) -> Error {
        let text = change(&self.to_string());
        match self {
            Error::Arguments(_) | Error::Usage(_) => Error::Usage(text),
            Error::File(_) | Error::Content(_) => Error::Content(text),
            Error::Refused(_) => Error::Refused(text),
            Error::Attestation(mut why) => {
                why.text = text;
                Error::Attestation(why)
            }
            Error::Unreachable(_) => Error::Unreachable(text),
            Error::State(code, _) => Error::State(code, text),
            Error::Blocked(_) => Error::Blocked(text),
            Error::Failed(_) => Error::Failed(text),
        }
    }

    /// Returns the exit code, and the name of the kind in JSON.
    fn code_and_kind(&self) -> (u8, &'static str) {
        match self {
            Error::Arguments(error) if error.exit_code() == 0 => (0, "help"),
            Error::Arguments(_) | Error::Usage(_) => (USAGE, "usage"),
            Error::File(FileError::Content(..)) | Error::Content(_) => (FAILED, "content"),
            Error::File(_) => (FAILED, "file"),
            Error::Refused(_) => (FAILED, "refused"),
            Error::Attestation(_) => (ATTESTATION_REFUSED, "attestation"),
            Error::Unreachable(_) => (UNREACHABLE, "unreachable"),
            Error::State(code, _) => (*code, "state"),
            Error::Blocked(_) => (FAILED, "blocked"),
            Error::Failed(_) => (FAILED, "failed"),
        }
    }

    /// Returns the exit code.
    pub fn exit_code(&self) -> u8 {
        self.code_and_kind().0
    }

    /// Returns the error for programs.
    pub fn json(&self) -> Value {
        let kind = self.code_and_kind().1;
        let mut error = json!({"kind": kind, "text": self.to_string()});
        if let Error::Attestation(why) = self {
            error["refusals"] = refusals(why).into();
        }
        json!({ "error": error })
    }

    /// Returns the error of this command: a wrong use with a hint at the command's help.
    pub fn of(self, command: &mut clap::Command) -> Error {
        match self {
            Error::Usage(text) => {
                let text = lines(&text);
                Error::Arguments(command.error(ErrorKind::ValueValidation, text))
            }
            other => other,
        }
    }

    /// Prints the error, or the help.
    pub fn print(&self) {
        match self {
            // if nobody reads it, there is no other place to report that
            Error::Arguments(error) => drop(error.print()),
            other => program::complain("firstlight", &other.to_string(), ""),
        }
    }
}

/// Returns the reasons of a refusal for programs.
pub fn refusals(refusal: &Refusal) -> Vec<Value> {
    let json = |one: &Refusal| {
        json!({
            "kind": one.kind.name(),
            "field": one.field,
            "expected": one.expected,
            "got": one.got,
        })
    };
    iter::once(refusal)
        .chain(&refusal.others)
        .map(json)
        .collect()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::File(error) => error.fmt(f),
            Error::Attestation(why) => f.write_str(&why.text),
            Error::Arguments(error) => {
                // without the usage below it
                let text = error.render().to_string();
                let text = text.split("\n\n").next().unwrap_or_default();
                f.write_str(text.trim_start_matches("error: "))
            }
            Error::Usage(text)
            | Error::Content(text)
            | Error::Refused(text)
            | Error::Unreachable(text)
            | Error::State(_, text)
            | Error::Blocked(text)
            | Error::Failed(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

impl From<FileError> for Error {
    fn from(error: FileError) -> Error {
        Error::File(error)
    }
}

/// What this crate's parsers say of content that is not valid.
impl From<String> for Error {
    fn from(text: String) -> Error {
        Error::Content(text)
    }
}

impl From<clap::Error> for Error {
    fn from(error: clap::Error) -> Error {
        Error::Arguments(error)
    }
}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        match error {
            client::Error::File(path, error) => FileError::Io("read", path, error).into(),
            client::Error::Config(..) => Error::content(error),
            other => Error::of_api(&other, other.to_string()),
        }
    }
}

impl From<services::Error> for Error {
    fn from(error: services::Error) -> Error {
        let text = error.to_string();
        match error {
            services::Error::Api(cause) => Error::of_api(&cause, text),
            _ => Error::Failed(text),
        }
    }
}

impl From<services::SignedByOperators> for Error {
    fn from(error: services::SignedByOperators) -> Error {
        Error::blocked(error)
    }
}

impl From<keywrap::Error> for Error {
    fn from(error: keywrap::Error) -> Error {
        let text = error.to_string();
        if error.may_pass() {
            Error::Unreachable(text)
        } else {
            Error::Refused(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verifier::refusal::Kind;

    #[test]
    fn a_refusal_reaches_programs_with_each_of_its_reasons() {
        let boot = Kind::Measurement
            .because("PCR 4: wrong")
            .of("PCR 4")
            .values("1b", "2c");
        let debug = Kind::Protection.because("it can be debugged");
        let refusal = Refusal::join(vec![boot, debug]).unwrap_err();
        let error = Error::attestation(refusal, "10.42.1.100:9000: attestation refused");
        let error = error.with_text(|text| format!("{text}. Nothing was sent"));
        assert_eq!(error.exit_code(), ATTESTATION_REFUSED);
        let expected = json!({"error": {
            "kind": "attestation",
            "text": "10.42.1.100:9000: attestation refused: PCR 4: wrong\nit can be debugged. Nothing was sent",
            "refusals": [
                {"kind": "measurement", "field": "PCR 4", "expected": "1b", "got": "2c"},
                {"kind": "protection", "field": null, "expected": null, "got": null},
            ],
        }});
        assert_eq!(error.json(), expected);
    }

    #[test]
    fn an_error_of_an_api_server_is_told_by_whether_it_was_reached() {
        let unreachable = |untrusted| client::Error::Unreachable {
            request: "get nodes".into(),
            server: "https://a".into(),
            why: "no route".into(),
            sent: false,
            untrusted,
            after: std::time::Duration::ZERO,
        };
        let kinds = [None, Some(client::Distrust::Authority)].map(|untrusted| {
            let error = Error::from(unreachable(untrusted));
            (error.exit_code(), error.json()["error"]["kind"].clone())
        });
        let expected = [
            (UNREACHABLE, json!("unreachable")),
            (FAILED, json!("refused")),
        ];
        assert_eq!(kinds, expected);
    }
}
