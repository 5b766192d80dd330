//! Why a call failed, as the operator reads it.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::super::yaml;

/// Of a message of the server.
const MAX_MESSAGE: usize = 4 << 10;

/// Why there is no client, or no answer.
#[derive(Debug)]
pub enum Error {
    /// A file that says how to reach the cluster cannot be read.
    File(PathBuf, io::Error),
    /// What it says makes no sense or is not supported: where, and what is wrong.
    Config(String, String),
    /// An object that cannot be sent: which, and what is wrong.
    Object(String),
    /// The API server said no.
    Refused(Box<Refused>),
    /// No answer: the API server is not reached, or stopped in the middle.
    Unreachable {
        /// What was asked: `get nodes node-1`.
        request: String,
        /// Who was asked.
        server: String,
        /// A clause.
        why: String,
        /// Whether the request may have been carried out.
        sent: bool,
        /// Whether the server proved not to be the cluster's.
        untrusted: bool,
        /// How long was tried.
        after: Duration,
    },
    /// An answer that makes no sense.
    Answer {
        /// What was asked.
        request: String,
        /// A clause.
        problem: String,
    },
    /// The [`Stop`](base::stop::Stop) came.
    Stopped,
}

/// A `Status` of the API server.
#[derive(Debug)]
pub struct Refused {
    /// What was asked: `create configmaps kube-system/join-config`.
    pub request: String,
    /// The HTTP status.
    pub code: u16,
    /// A word for programs, such as `AlreadyExists`; may be empty.
    pub reason: String,
    /// A sentence for people; may be empty.
    pub message: String,
    /// When to ask again.
    pub retry_after: Option<Duration>,
}

/// What the server answers with instead of what was asked for (meta/v1 Status).
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    pub kind: String,
    pub code: u16,
    pub reason: String,
    pub message: String,
    pub details: Details,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Details {
    pub retry_after_seconds: u64,
}

impl Error {
    /// The HTTP status, where the server answered.
    pub fn code(&self) -> Option<u16> {
        match self {
            Error::Refused(refused) => Some(refused.code),
            _ => None,
        }
    }

    /// The reason, where the server gave one.
    pub fn reason(&self) -> &str {
        match self {
            Error::Refused(refused) => &refused.reason,
            _ => "",
        }
    }

    /// There is no such object.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// There is one of this name already.
    pub fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    /// It was changed meanwhile.
    pub fn is_conflict(&self) -> bool {
        self.reason() == "Conflict"
    }

    /// What a watch wanted to go on from is no longer kept.
    pub fn is_expired(&self) -> bool {
        self.code() == Some(410)
    }

    /// Whether the same call may succeed later without anybody doing anything about it.
    pub fn is_passing(&self) -> bool {
        match self {
            Error::Refused(refused) => matches!(refused.code, 408 | 429 | 500 | 502..=504),
            Error::Unreachable { untrusted, .. } => !untrusted,
            _ => false,
        }
    }

    /// Whether the server surely did nothing, so that even a create may be sent again.
    pub(super) fn nothing_happened(&self) -> bool {
        match self {
            Error::Refused(refused) => refused.code == 429,
            Error::Unreachable { sent, .. } => !sent,
            _ => false,
        }
    }
}

impl Refused {
    pub(super) fn new(
        request: String,
        code: u16,
        status: Status,
        retry_after: Option<Duration>,
    ) -> Refused {
        let mut message = status.message;
        if message.len() > MAX_MESSAGE {
            message.truncate(
                (0..=MAX_MESSAGE)
                    .rev()
                    .find(|at| message.is_char_boundary(*at))
                    .unwrap_or(0),
            );
            message.push_str(" ..");
        }
        Refused {
            request,
            code,
            reason: status.reason,
            message,
            retry_after,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::File(path, error) => write!(f, "cannot read {}: {error}", path.display()),
            Error::Config(of, problem) => write!(f, "{of}: {problem}"),
            Error::Object(problem) => f.write_str(problem),
            Error::Refused(refused) => refused.fmt(f),
            Error::Unreachable {
                request,
                server,
                why,
                sent,
                untrusted,
                after,
            } => {
                write!(
                    f,
                    "{request}: no answer from the API server {server} within {} s: {why}",
                    after.as_secs()
                )?;
                match (untrusted, sent) {
                    (true, _) => {
                        f.write_str("; it is not this cluster's, or the kubeconfig is not")
                    }
                    (_, true) => f.write_str("; the request may have been carried out"),
                    _ => Ok(()),
                }
            }
            Error::Answer { request, problem } => {
                write!(
                    f,
                    "{request}: the API server's answer makes no sense: {problem}"
                )
            }
            Error::Stopped => f.write_str("stopped"),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused {
            request,
            code,
            reason,
            message,
            retry_after,
        } = self;
        let reason = if reason.is_empty() { "refused" } else { reason };
        write!(f, "{request}: {reason} ({code})")?;
        if !message.is_empty() {
            write!(f, ": {message}")?;
        }
        match (code, retry_after) {
            (401, _) => {
                f.write_str("; the credentials are not, or no longer, those of this cluster")
            }
            (_, Some(time)) => write!(f, "; to be tried again after {} s", time.as_secs()),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<(String, yaml::Error)> for Error {
    fn from((of, error): (String, yaml::Error)) -> Error {
        Error::Config(of, error.to_string())
    }
}
