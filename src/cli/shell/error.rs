//! Why a command fails. The kind decides the exit code, and JSON output names it.

use std::fmt;

use base::program::{self, FAILED, USAGE};
use kubernetes::{client, services};
use serde_json::{Value, json};

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
    Attestation(String),
    /// A peer could not be reached, or did not answer in time.
    Unreachable(String),
    /// `status`: the node is in another state than a member, which has this exit code.
    State(u8, String),
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

    /// Creates the error for what an API server answered. A server that cannot prove that it is the
    /// right one was reached; one that cannot answer now was not.
    pub fn of_api(cause: &client::Error, text: String) -> Error {
        if cause.is_temporary() {
            Error::Unreachable(text)
        } else {
            Error::Refused(text)
        }
    }

    /// Returns the error with another text, of the same kind.
    pub fn with_text(self, change: impl FnOnce(&str) -> String) -> Error {
        let text = change(&self.to_string());
        match self {
            Error::Arguments(_) | Error::Usage(_) => Error::Usage(text),
            Error::File(_) | Error::Content(_) => Error::Content(text),
            Error::Refused(_) => Error::Refused(text),
            Error::Attestation(_) => Error::Attestation(text),
            Error::Unreachable(_) => Error::Unreachable(text),
            Error::State(code, _) => Error::State(code, text),
            Error::Failed(_) => Error::Failed(text),
        }
    }

    /// Returns the exit code, and the name of the kind in JSON.
    fn code_and_kind(&self) -> (u8, &'static str) {
        match self {
            Error::Arguments(error) if error.exit_code() == 0 => (0, "help"),
            Error::Arguments(_) | Error::Usage(_) => (USAGE, "usage"),
            Error::File(_) => (FAILED, "file"),
            Error::Content(_) => (FAILED, "content"),
            Error::Refused(_) => (FAILED, "refused"),
            Error::Attestation(_) => (ATTESTATION_REFUSED, "attestation"),
            Error::Unreachable(_) => (UNREACHABLE, "unreachable"),
            Error::State(code, _) => (*code, "state"),
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
        json!({"error": {"kind": kind, "text": self.to_string()}})
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::File(error) => error.fmt(f),
            Error::Arguments(error) => {
                // without the usage below it
                let text = error.render().to_string();
                let text = text.split("\n\n").next().unwrap_or_default();
                f.write_str(text.trim_start_matches("error: "))
            }
            Error::Usage(text)
            | Error::Content(text)
            | Error::Refused(text)
            | Error::Attestation(text)
            | Error::Unreachable(text)
            | Error::State(_, text)
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
        Error::of_api(&error, error.to_string())
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
