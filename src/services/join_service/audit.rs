//! Records every decision about a ticket as a log line, a Kubernetes Event of the node ([`events`]), and
//! a count.
//!
//! [`events`]: crate::cluster::events
//!
//! ```text
//! audit {"request":"join","decision":"refused","reason":"role","peer":"10.0.0.7:4711","node":"worker-1","role":"control-plane",
//!        "disk":"0f5b..","machine":"a1b2..","form":"strong","platform":{"technology":"AMD SEV-SNP (Milan)",..},"why":".."}
//! ```

use std::time::Instant;

use serde_json::{Value, json};

use crate::cluster::events::{Event, Events};
use crate::cluster::refusal::TicketRefusal;
use crate::metrics::{Counter, Histogram, Labelled, Registry};
use crate::peer;
use rpc::grpc::{Call, Status};
use verifier::{Claims, Form, PlatformClaims};

/// The decision and the reason of an issued ticket.
const GIVEN: &str = "given";

/// The caller of a ticket and its request.
pub struct TicketCaller<'a> {
    /// `join` or `rejoin`.
    pub request: &'static str,
    /// The caller's address.
    pub peer: String,
    /// The node name in the request. Empty if it is absent or not valid.
    pub node: &'a str,
    /// `control-plane`, `worker`, or empty.
    pub role: &'static str,
    /// The UUID of the state disk. Empty if it is not valid.
    pub disk: &'a str,
    /// The machine's identity by attestation.
    pub machine: Option<&'a str>,
    /// The form of attested TLS: `old` or `strong`; empty without attested TLS.
    pub form: &'static str,
    /// The ID of the policy's image that the caller runs.
    pub image: Option<&'a str>,
    /// The caller's proven claims about its platform.
    pub platform: Option<&'a PlatformClaims>,
    /// When the request arrived.
    pub since: Instant,
}

impl<'a> TicketCaller<'a> {
    /// Creates the subject of a call that has just arrived. The request adds node, role and disk.
    pub fn new(request: &'static str, call: &'a Call) -> TicketCaller<'a> {
        let claims = call.claims::<Claims>();
        TicketCaller {
            request,
            peer: peer(call.peer()),
            node: "",
            role: "",
            disk: "",
            machine: call.identity().map(|machine| &**machine),
            form: match claims.map(|claims| claims.form) {
                Some(Form::Strong) => "strong",
                Some(Form::Old) => "old",
                None => "",
            },
            image: claims.and_then(|claims| claims.image.as_deref()),
            platform: claims.and_then(|claims| claims.platform.as_deref()),
            since: Instant::now(),
        }
    }
}

/// The decision about a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    Given,
    /// The caller may not have it, by the rules.
    Refused,
    /// This service, or a service behind it, failed.
    Failed,
}

impl Decision {
    /// Returns the name in logs and metrics, and the title of the event.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Decision::Given => (GIVEN, "TicketGiven"),
            Decision::Refused => ("refused", "TicketRefused"),
            Decision::Failed => ("failed", "TicketFailed"),
        }
    }
}

/// Writes decisions to the log, the events and the metrics.
pub struct Audit {
    events: Option<Events>,
    tickets: Labelled<Counter, 4>,
    seconds: Labelled<Histogram, 2>,
    steps: Labelled<Histogram, 1>,
}

impl Audit {
    /// Creates an audit. Without `events`, it sends none.
    pub fn new(registry: &Registry, events: Option<Events>) -> Audit {
        let labels = ["request", "result", "reason", "form"];
        Audit {
            events,
            tickets: registry.labelled(
                "firstlight_join_tickets_total",
                "Number of requested tickets.",
                labels,
            ),
            seconds: registry.labelled(
                "firstlight_join_ticket_seconds",
                "Time from a request to its decision.",
                ["request", "result"],
            ),
            steps: registry.labelled(
                "firstlight_join_step_seconds",
                "Duration of a step of a join ticket.",
                ["step"],
            ),
        }
    }

    /// Records the decision about a ticket, and returns it for the caller. The text with a ticket is a remark for the operator, or
    /// empty.
    pub fn decided<T>(
        &self,
        subject: &TicketCaller,
        issued: Result<(T, &str), TicketRefusal>,
    ) -> Result<T, Status> {
        let (decision, reason, why) = match &issued {
            Ok((_, note)) => (Decision::Given, GIVEN, (*note).to_owned()),
            Err(refusal) if refusal.is_failure() => {
                (Decision::Failed, refusal.reason, refusal.to_string())
            }
            Err(refusal) => (Decision::Refused, refusal.reason, refusal.to_string()),
        };
        let (word, title) = decision.words();
        let labels = [subject.request, word, reason, subject.form];
        self.tickets.with(labels).inc();
        self.seconds
            .with([subject.request, word])
            .observe(subject.since.elapsed());
        let line = line(subject, word, reason, &why);
        match decision {
            Decision::Given => log::info!("audit {line}"),
            Decision::Refused | Decision::Failed => log::warn!("audit {line}"),
        }
        if let Some(events) = &self.events {
            let event = Event {
                action: subject.request,
                is_normal: decision == Decision::Given,
                title,
                note: &format!("{} as {}: {reason}: {why}", subject.request, subject.role),
            };
            events.send(subject.node, &event);
        }
        issued
            .map(|(ticket, _)| ticket)
            .map_err(|refusal| refusal.status())
    }

    /// Counts a caller that comes again at its turn. A line and an event for each would cost as much as a
    /// ticket.
    pub fn busy(&self, subject: &TicketCaller) {
        let (word, _) = Decision::Refused.words();
        let labels = [subject.request, word, "busy", subject.form];
        self.tickets.with(labels).inc();
    }

    /// Runs `work` and records its duration as that of the step `name`.
    pub fn step<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        self.steps.with([name]).time(work)
    }
}

/// Builds the record of a decision.
fn line(subject: &TicketCaller, decision: &str, reason: &str, why: &str) -> Value {
    json!({
        "request": subject.request, "decision": decision, "reason": reason, "peer": subject.peer,
        "node": subject.node, "role": subject.role, "disk": subject.disk, "machine": subject.machine, "form": subject.form,
        "image": subject.image,
        "platform": subject.platform, "why": why,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use verifier::{Property, TcbPart};

    #[test]
    fn the_record_of_a_decision_has_what_was_proved_of_the_platform() {
        let claims = PlatformClaims {
            technology: "AMD SEV-SNP (Milan)".into(),
            signed_by: "ARK-Milan, SEV-Milan, SEV-VCEK".into(),
            chip: Some("c5".repeat(64)),
            tcb: vec![TcbPart {
                name: "snp",
                got: 27,
                minimum: 24,
            }],
            properties: vec![Property {
                name: "VMPL",
                value: "0".into(),
            }],
            bound: vec!["attestation key: SHA-512 in REPORT_DATA".into()],
        };
        let subject = |platform| TicketCaller {
            request: "join",
            peer: "10.0.0.7:4711".into(),
            node: "worker-1",
            role: "worker",
            disk: "",
            machine: Some("a1b2"),
            form: "strong",
            image: Some("ab"),
            platform,
            since: Instant::now(),
        };
        let expected = json!({
            "technology": "AMD SEV-SNP (Milan)", "signedBy": "ARK-Milan, SEV-Milan, SEV-VCEK", "chip": "c5".repeat(64),
            "tcb": [{"name": "snp", "got": 27, "minimum": 24}], "properties": [{"name": "VMPL", "value": "0"}],
            "bound": ["attestation key: SHA-512 in REPORT_DATA"],
        });
        for decision in [GIVEN, "refused"] {
            let record = line(&subject(Some(&claims)), decision, "reason", "why");
            assert_eq!(record["platform"], expected);
            assert_eq!(record["machine"], "a1b2");
            assert_eq!(record["image"], "ab");
        }
        let record = line(&subject(None), GIVEN, GIVEN, "");
        assert!(record["platform"].is_null());
        assert!(!record.to_string().contains('\n'));
    }
}
