//! The reason why a caller gets no ticket. It has a code for the caller's program, a sentence for
//! its operator, a reason for logs and metrics, and internal details for this service's log only.

use std::fmt;
use std::time::Duration;

use kubernetes::client;
use rpc::grpc::{Code, Status};

/// A refusal. docs/join.md lists the reasons and what to do about each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketRefusal {
    code: Code,
    /// The reason in logs, events and metrics: `disk-of-other`, `keys`, ...
    pub reason: &'static str,
    /// What was refused and what to do about it, without internal details.
    message: String,
    /// Internal details for the log. May be empty.
    pub details: String,
    retry_after: Option<Duration>,
}

impl TicketRefusal {
    fn new(code: Code, reason: &'static str, message: impl Into<String>) -> TicketRefusal {
        TicketRefusal {
            code,
            reason,
            message: message.into(),
            details: String::new(),
            retry_after: None,
        }
    }

    /// The request is not valid, whichever machine sends it.
    pub fn invalid(reason: &'static str, message: impl Into<String>) -> TicketRefusal {
        TicketRefusal::new(Code::InvalidArgument, reason, message)
    }

    /// This machine is not permitted to have what it asks for.
    pub fn denied(reason: &'static str, message: impl Into<String>) -> TicketRefusal {
        TicketRefusal::new(Code::PermissionDenied, reason, message)
    }

    /// The cluster lacks something that only its operator can provide.
    pub fn missing(reason: &'static str, message: impl Into<String>) -> TicketRefusal {
        TicketRefusal::new(Code::FailedPrecondition, reason, message)
    }

    /// A temporary refusal. The caller may try again after `retry_after`.
    pub fn temporary(
        reason: &'static str,
        message: impl Into<String>,
        retry_after: Duration,
    ) -> TicketRefusal {
        TicketRefusal {
            retry_after: Some(retry_after),
            ..TicketRefusal::new(Code::Unavailable, reason, message)
        }
    }

    /// The caller no longer waits for the answer.
    pub fn gone() -> TicketRefusal {
        TicketRefusal::new(
            Code::Cancelled,
            "caller-gone",
            "the caller did not wait for the ticket",
        )
    }

    /// This service or a file of its node is faulty.
    pub fn internal(reason: &'static str, details: impl Into<String>) -> TicketRefusal {
        let message = "the join service could not issue a ticket: see its log";
        TicketRefusal::new(Code::Internal, reason, message).with_details(details)
    }

    /// Adds internal details.
    pub fn with_details(self, details: impl Into<String>) -> TicketRefusal {
        TicketRefusal {
            details: details.into(),
            ..self
        }
    }

    /// Returns the gRPC status for the caller.
    pub fn status(&self) -> Status {
        let status = Status::new(self.code, self.message.clone());
        match self.retry_after {
            Some(pause) => status.with_retry_after(pause),
            None => status,
        }
    }

    /// Returns whether this service or a service behind it failed. `false` means that it refused
    /// the caller by its rules.
    pub fn is_failure(&self) -> bool {
        matches!(
            self.code,
            Code::Internal | Code::Unavailable | Code::FailedPrecondition | Code::Cancelled
        )
    }
}

/// The sentence for the caller, and the details for the log.
impl fmt::Display for TicketRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.details.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{} ({})", self.message, self.details)
        }
    }
}

impl std::error::Error for TicketRefusal {}

/// A call of the Kubernetes API failed.
impl From<client::Error> for TicketRefusal {
    fn from(error: client::Error) -> TicketRefusal {
        if error.is_temporary() || matches!(error, client::Error::Stopped) || error.is_conflict() {
            let message = "the Kubernetes API does not answer at the moment: try again";
            TicketRefusal::temporary("api", message, Duration::from_secs(3))
                .with_details(error.to_string())
        } else {
            TicketRefusal::internal("api-refused", error.to_string())
        }
    }
}
