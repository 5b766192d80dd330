//! The errors of calls to the API server.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::super::yaml;

/// The maximum number of characters of a server's message.
const MAX_MESSAGE: usize = 4 << 10;

/// Why a client cannot be created, or a call failed.
#[derive(Debug)]
pub enum Error {
    /// A file of the configuration cannot be read.
    File(PathBuf, io::Error),
    /// The configuration is invalid or not supported: where, and why.
    Config(String, String),
    /// An object cannot be sent: which, and why.
    Object(String),
    /// The API server refused the request.
    Refused(Box<ApiStatus>),
    /// No answer: the API server cannot be reached, or the connection broke.
    Unreachable {
        /// The request, such as `get nodes node-1`.
        request: String,
        /// The server.
        server: String,
        /// The reason, as a clause.
        why: String,
        /// Whether the API server may have executed the request.
        sent: bool,
        /// Why the server failed to authenticate as the cluster's API server, if it did.
        untrusted: Option<Distrust>,
        /// How long the request was tried.
        after: Duration,
    },
    /// The server's name has no address, so nothing was sent.
    NoAddress {
        /// The server.
        server: String,
        /// The reason, as a clause.
        why: String,
    },
    /// The answer is invalid.
    Answer {
        /// The request.
        request: String,
        /// The reason, as a clause.
        problem: String,
    },
    /// The client's [`Stop`](base::stop::Stop) was set.
    Stopped,
}

/// Why a server's certificate is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distrust {
    /// It is not of the cluster's authority, or not for this server.
    Authority,
    /// It is not valid at the time of this machine's clock.
    Time,
}

/// A `Status` of the API server.
#[derive(Debug)]
pub struct ApiStatus {
    /// The request, such as `create configmaps kube-system/join-config`.
    pub request: String,
    /// The HTTP status.
    pub code: u16,
    /// The machine-readable reason, such as `AlreadyExists`. May be empty.
    pub reason: String,
    /// The human-readable message. May be empty.
    pub message: String,
    /// When the request may be repeated.
    pub retry_after: Option<Duration>,
    /// When the client's own certificate ended, if it has.
    pub ended: Option<String>,
}

/// The `Status` object of an error answer (meta/v1 Status).
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
    /// Returns the HTTP status, if the server answered.
    pub fn code(&self) -> Option<u16> {
        match self {
            Error::Refused(refused) => Some(refused.code),
            _ => None,
        }
    }

    /// Returns the reason, if the server sent one.
    pub fn reason(&self) -> &str {
        match self {
            Error::Refused(refused) => &refused.reason,
            _ => "",
        }
    }

    /// Returns whether the object does not exist.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// Returns whether an object of this name exists already.
    pub fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    /// Returns whether the object was changed meanwhile.
    pub fn is_conflict(&self) -> bool {
        self.reason() == "Conflict"
    }

    /// Returns whether the version at which a watch was to continue is no longer available.
    pub fn is_expired(&self) -> bool {
        self.code() == Some(410)
    }

    /// Returns whether the same call may succeed later without any intervention.
    pub fn is_temporary(&self) -> bool {
        match self {
            Error::Refused(refused) => matches!(refused.code, 408 | 429 | 500 | 502..=504),
            Error::Unreachable { untrusted, .. } => untrusted.is_none(),
            Error::NoAddress { .. } => true,
            _ => false,
        }
    }

    /// Returns whether the server definitely did not execute the request, so that even a create may be repeated.
    pub(super) fn nothing_happened(&self) -> bool {
        match self {
            Error::Refused(refused) => refused.code == 429,
            Error::Unreachable { sent, .. } => !sent,
            Error::NoAddress { .. } => true,
            _ => false,
        }
    }

    /// Sets how long a request without an answer was tried.
    pub(super) fn tried_for(mut self, time: Duration) -> Error {
        if let Error::Unreachable { after, .. } = &mut self {
            *after = time;
        }
        self
    }
}

impl ApiStatus {
    pub(super) fn new(
        request: String,
        code: u16,
        status: Status,
        retry_after: Option<Duration>,
    ) -> ApiStatus {
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
        ApiStatus {
            request,
            code,
            reason: status.reason,
            message,
            retry_after,
            ended: None,
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
                write!(f, "{request}: no answer from the API server {server}")?;
                // round, so that a limit of 3 s does not read as 2 s
                let seconds = (*after + Duration::from_millis(500)).as_secs();
                if seconds > 0 {
                    write!(f, " within {seconds} s")?;
                }
                write!(f, ": {why}")?;
                match (untrusted, sent) {
                    (Some(Distrust::Authority), _) => {
                        f.write_str("; the server or the kubeconfig belongs to another cluster")
                    }
                    (Some(Distrust::Time), _) => f.write_str(
                        "; see why the control plane has not renewed it, unless this machine's clock is wrong",
                    ),
                    (_, true) => f.write_str("; the API server may have executed the request"),
                    _ => Ok(()),
                }
            }
            Error::NoAddress { server, why } => {
                write!(
                    f,
                    "the name of the API server {server} has no address: {why}"
                )
            }
            Error::Answer { request, problem } => {
                write!(
                    f,
                    "{request}: the API server's answer is invalid: {problem}"
                )
            }
            Error::Stopped => f.write_str("stopped"),
        }
    }
}

impl fmt::Display for ApiStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ApiStatus {
            request,
            code,
            reason,
            message,
            retry_after,
            ended,
        } = self;
        let reason = if reason.is_empty() { "refused" } else { reason };
        write!(f, "{request}: {reason} ({code})")?;
        if !message.is_empty() {
            write!(f, ": {message}")?;
        }
        match (code, retry_after, ended) {
            (401, _, Some(ended)) => write!(
                f,
                "; the client certificate of the kubeconfig ended at {ended}: copy /etc/kubernetes/admin.conf of a control plane"
            ),
            (401, _, None) => {
                f.write_str("; the credentials are not valid, or no longer valid, for this cluster")
            }
            (_, Some(time), _) => write!(f, "; try again after {} s", time.as_secs()),
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
