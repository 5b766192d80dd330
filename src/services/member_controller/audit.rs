//! Records every decision about a kubelet's certificate and every change of a member's attestation, as a
//! log line, a Kubernetes Event of the node, and a count.

use serde_json::{Value, json};

use crate::cluster::events::{Event, Events};
use crate::metrics::{Counter, Labelled, Registry};

/// The decision about a kubelet's certificate signing request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApprovalDecision {
    /// The request is approved.
    Approved,
    /// The request is denied.
    Denied,
    /// The request is left to another approver, or is judged again later.
    Left,
    /// The decision could not be written to the API server.
    Failed,
}

impl ApprovalDecision {
    fn words(self) -> (&'static str, &'static str) {
        match self {
            ApprovalDecision::Approved => ("approved", "CertificateApproved"),
            ApprovalDecision::Denied => ("denied", "CertificateDenied"),
            ApprovalDecision::Left => ("left", "CertificateLeft"),
            ApprovalDecision::Failed => ("failed", "CertificateFailed"),
        }
    }
}

/// Writes decisions to the log, the events and the metrics.
pub struct MemberAudit {
    events: Events,
    certificates: Labelled<Counter, 3>,
}

impl MemberAudit {
    /// Creates an audit that sends these events.
    pub fn new(registry: &Registry, events: Events) -> MemberAudit {
        MemberAudit {
            events,
            certificates: registry.labelled(
                "firstlight_join_certificates_total",
                "Number of decisions about kubelets' certificates.",
                ["certificate", "result", "reason"],
            ),
        }
    }

    /// Records a decision about the certificate signing request named `request`. `node` is empty if
    /// the request is of no node.
    pub fn certificate(
        &self,
        kind: &'static str,
        verdict: ApprovalDecision,
        request: &str,
        node: &str,
        reason: &'static str,
        why: &str,
    ) {
        self.count(kind, verdict, reason);
        let (decision, title) = verdict.words();
        let line = json!({
            "request": "certificate", "certificate": kind, "decision": decision, "reason": reason, "certificateSigningRequest": request,
            "node": node, "why": why,
        });
        let is_normal = verdict == ApprovalDecision::Approved;
        write(&line, is_normal);
        let event = Event {
            action: "certificate",
            is_normal,
            title,
            note: &format!("{kind} certificate, {request}: {reason}: {why}"),
        };
        self.events.send(node, &event);
    }

    /// Counts a decision in the metrics only.
    pub fn count(&self, kind: &'static str, verdict: ApprovalDecision, reason: &'static str) {
        let (decision, _) = verdict.words();
        self.certificates.with([kind, decision, reason]).inc();
    }

    /// Records that the result of a node's attestation has changed.
    pub fn watched(&self, node: &str, attested: &str, reason: &str, why: &str) {
        let line = json!({
            "request": "watch", "node": node, "attested": attested, "reason": reason, "why": why,
        });
        let (is_normal, title) = match attested {
            "True" => (true, "AttestationAccepted"),
            "False" => (false, "AttestationRefused"),
            _ => (false, "AttestationUnknown"),
        };
        write(&line, is_normal);
        let event = Event {
            action: "watch",
            is_normal,
            title,
            note: &format!("{reason}: {why}"),
        };
        self.events.send(node, &event);
    }
}

fn write(line: &Value, is_normal: bool) {
    if is_normal {
        log::info!("audit {line}");
    } else {
        log::warn!("audit {line}");
    }
}
