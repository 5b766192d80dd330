//! Why somebody gets no ticket: a code for the caller's program, a sentence for its operator, a word for logs and metrics,
//! and, for this service's log alone, what happened inside.

use std::time::Duration;

use kubernetes::client;
use rpc::grpc::{Code, Status};

/// A refusal. Which words there are, and what to do about each, is in docs/join.md.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    code: Code,
    /// `disk-of-other`, `keys`, ..: for logs, events and metrics.
    pub word: &'static str,
    /// What was refused and what to do, without anything of the inside.
    message: String,
    /// What happened, for the log; may be empty.
    pub inside: String,
    retry_after: Option<Duration>,
}

impl Refusal {
    fn new(code: Code, word: &'static str, message: impl Into<String>) -> Refusal {
        Refusal {
            code,
            word,
            message: message.into(),
            inside: String::new(),
            retry_after: None,
        }
    }

    /// The request makes no sense, whoever asks.
    pub fn invalid(word: &'static str, message: impl Into<String>) -> Refusal {
        Refusal::new(Code::InvalidArgument, word, message)
    }

    /// Not to this machine.
    pub fn denied(word: &'static str, message: impl Into<String>) -> Refusal {
        Refusal::new(Code::PermissionDenied, word, message)
    }

    /// The cluster lacks something that only its operator can bring.
    pub fn lacking(word: &'static str, message: impl Into<String>) -> Refusal {
        Refusal::new(Code::FailedPrecondition, word, message)
    }

    /// Not now.
    pub fn passing(
        word: &'static str,
        message: impl Into<String>,
        retry_after: Duration,
    ) -> Refusal {
        Refusal {
            retry_after: Some(retry_after),
            ..Refusal::new(Code::Unavailable, word, message)
        }
    }

    /// Nobody waits for the answer.
    pub fn gone() -> Refusal {
        Refusal::new(
            Code::Cancelled,
            "caller-gone",
            "the caller did not wait for the ticket",
        )
    }

    /// This service is at fault, or a file of its node.
    pub fn broken(word: &'static str, inside: impl Into<String>) -> Refusal {
        let message = "the join service could not make a ticket: its log says why";
        Refusal::new(Code::Internal, word, message).because(inside)
    }

    /// Of a call of the Kubernetes API.
    pub fn of_api(error: &client::Error) -> Refusal {
        match error.is_passing() || matches!(error, client::Error::Stopped) || error.is_conflict() {
            true => {
                let message = "the cluster's API does not answer at the moment: try again";
                Refusal::passing("api", message, Duration::from_secs(3)).because(error.to_string())
            }
            false => Refusal::broken("api-refused", error.to_string()),
        }
    }

    /// With what happened inside.
    pub fn because(self, inside: impl Into<String>) -> Refusal {
        Refusal {
            inside: inside.into(),
            ..self
        }
    }

    /// What the caller gets.
    pub fn status(&self) -> Status {
        let status = Status::new(self.code, self.message.clone());
        match self.retry_after {
            Some(pause) => status.with_retry_after(pause),
            None => status,
        }
    }

    /// What the caller hears.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether this service or its surroundings failed, rather than that it refused somebody.
    pub fn is_failure(&self) -> bool {
        matches!(
            self.code,
            Code::Internal | Code::Unavailable | Code::FailedPrecondition | Code::Cancelled
        )
    }
}
