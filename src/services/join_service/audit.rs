//! Records every decision about a ticket or a kubelet's certificate as a log line, a Kubernetes
//! Event of the node, and a count.
//!
//! ```text
//! audit {"request":"join","decision":"refused","reason":"role","peer":"10.0.0.7:4711","node":"worker-1","role":"control-plane",
//!        "disk":"0f5b..","machine":"a1b2..","form":"strong","platform":{"technology":"AMD SEV-SNP (Milan)",..},"why":".."}
//! ```
//!
//! The log line is always written. Events are for users of kubectl: they are dropped when too many
//! arrive at once, and no ticket waits for one.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::joined::Joined;
use super::refusal::TicketRefusal;
use crate::metrics::{Counter, Histogram, Labelled, Registry};
use crate::peer;
use base::crypto::random;
use base::text::hex;
use base::time;
use kubernetes::client::{self, Client, EVENTS};
use rpc::grpc::{Call, Status};
use verifier::{Claims, Form, PlatformClaims};

/// Maximum number of events in the queue.
const QUEUE: usize = 64;
/// Maximum number of events in one burst. One more event is permitted after each `EACH`.
const BURST: u32 = 50;
const EVENT_INTERVAL: Duration = Duration::from_millis(200);
/// How often the sender checks whether it has to stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// The timeout of sending one event.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Events of objects without a namespace are in this namespace (k8s.io/client-go tools/events).
const NAMESPACE: &str = "default";
/// The decision and the reason of an issued ticket.
const GIVEN: &str = "given";

/// The caller of a ticket and its request.
pub struct Subject<'a> {
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

impl<'a> Subject<'a> {
    /// Creates the subject of a call that has just arrived. The request adds node, role and disk.
    pub fn new(request: &'static str, call: &'a Call) -> Subject<'a> {
        let claims = call.claims::<Claims>();
        Subject {
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
    /// Returns the name in logs and metrics, and the severity and title of the event.
    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Decision::Given => (GIVEN, "Normal", "TicketGiven"),
            Decision::Refused => ("refused", "Warning", "TicketRefused"),
            Decision::Failed => ("failed", "Warning", "TicketFailed"),
        }
    }
}

/// The decision about a kubelet's certificate signing request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The request is approved.
    Approved,
    /// The request is denied.
    Denied,
    /// The request is left to another approver, or is judged again later.
    Left,
    /// The decision could not be written to the API server.
    Failed,
}

impl Verdict {
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Verdict::Approved => ("approved", "CertificateApproved"),
            Verdict::Denied => ("denied", "CertificateDenied"),
            Verdict::Left => ("left", "CertificateLeft"),
            Verdict::Failed => ("failed", "CertificateFailed"),
        }
    }
}

/// Writes decisions to the log, the events and the metrics.
pub struct Audit {
    events: Option<SyncSender<Value>>,
    tickets: Labelled<Counter, 4>,
    seconds: Labelled<Histogram, 2>,
    steps: Labelled<Histogram, 1>,
    certificates: Labelled<Counter, 3>,
}

impl Audit {
    /// Creates an audit without events.
    pub fn new(registry: &Registry) -> Audit {
        let labels = ["request", "result", "reason", "form"];
        Audit {
            events: None,
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
            certificates: registry.labelled(
                "firstlight_join_certificates_total",
                "Number of decisions about kubelets' certificates.",
                ["certificate", "result", "reason"],
            ),
        }
    }

    /// Creates an audit and starts the thread that sends events.
    pub fn start(client: &Client, registry: &Registry) -> io::Result<(Audit, Joined)> {
        let (events, queue) = mpsc::sync_channel(QUEUE);
        let client = client.within(TIMEOUT);
        let thread = thread::Builder::new()
            .name("events".into())
            .spawn(move || send_all(&client, &queue))?;
        Ok((
            Audit {
                events: Some(events),
                ..Audit::new(registry)
            },
            Joined::from(thread),
        ))
    }

    /// Records the decision about a ticket, and returns it for the caller. The text with a ticket is a remark for the operator, or
    /// empty.
    pub fn decided<T>(
        &self,
        subject: &Subject,
        issued: Result<(T, &str), TicketRefusal>,
    ) -> Result<T, Status> {
        let (decision, reason, why) = match &issued {
            Ok((_, note)) => (Decision::Given, GIVEN, (*note).to_owned()),
            Err(refusal) if refusal.is_failure() => {
                (Decision::Failed, refusal.reason, refusal.to_string())
            }
            Err(refusal) => (Decision::Refused, refusal.reason, refusal.to_string()),
        };
        let (word, severity, title) = decision.words();
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
        self.send(subject.node, || {
            let note = format!("{} as {}: {reason}: {why}", subject.request, subject.role);
            event(subject.node, subject.request, severity, title, &note)
        });
        issued
            .map(|(ticket, _)| ticket)
            .map_err(|refusal| refusal.status())
    }

    /// Counts a caller that comes again at its turn. A line and an event for each would cost as much as a
    /// ticket.
    pub fn busy(&self, subject: &Subject) {
        let (word, ..) = Decision::Refused.words();
        let labels = [subject.request, word, "busy", subject.form];
        self.tickets.with(labels).inc();
    }

    /// Records a decision about the certificate signing request named `request`. `node` is empty if
    /// the request is of no node.
    pub fn certificate(
        &self,
        kind: &'static str,
        verdict: Verdict,
        request: &str,
        node: &str,
        reason: &'static str,
        why: &str,
    ) {
        let (decision, title) = verdict.words();
        self.certificates.with([kind, decision, reason]).inc();
        let line = json!({
            "request": "certificate", "certificate": kind, "decision": decision, "reason": reason, "certificateSigningRequest": request,
            "node": node, "why": why,
        });
        let severity = match verdict {
            Verdict::Approved => {
                log::info!("audit {line}");
                "Normal"
            }
            _ => {
                log::warn!("audit {line}");
                "Warning"
            }
        };
        let note = || format!("{kind} certificate, {request}: {reason}: {why}");
        self.send(node, || {
            event(node, "certificate", severity, title, &note())
        });
    }

    /// Records that the result of a node's attestation has changed.
    pub fn watched(&self, node: &str, attested: &str, reason: &str, why: &str) {
        let line = json!({
            "request": "watch", "node": node, "attested": attested, "reason": reason, "why": why,
        });
        let (severity, title) = match attested {
            "True" => ("Normal", "AttestationAccepted"),
            "False" => ("Warning", "AttestationRefused"),
            _ => ("Warning", "AttestationUnknown"),
        };
        match severity {
            "Normal" => log::info!("audit {line}"),
            _ => log::warn!("audit {line}"),
        }
        self.send(node, || {
            event(node, "watch", severity, title, &format!("{reason}: {why}"))
        });
    }

    /// Runs `work` and records its duration as that of the step `name`.
    pub fn step<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        self.steps.with([name]).time(work)
    }

    /// Queues an event of the node `node`. A request without a node name has no event.
    fn send(&self, node: &str, event: impl FnOnce() -> Value) {
        if let Some(events) = self.events.as_ref().filter(|_| !node.is_empty()) {
            // An event is dropped when the queue is full.
            let _ = events.try_send(event());
        }
    }
}

/// Builds the record of a decision.
fn line(subject: &Subject, decision: &str, reason: &str, why: &str) -> Value {
    json!({
        "request": subject.request, "decision": decision, "reason": reason, "peer": subject.peer,
        "node": subject.node, "role": subject.role, "disk": subject.disk, "machine": subject.machine, "form": subject.form,
        "image": subject.image,
        "platform": subject.platform, "why": why,
    })
}

/// Builds an Event of events.k8s.io/v1.
fn event(node: &str, action: &str, kind: &str, title: &str, note: &str) -> Value {
    // The API server accepts at most 1024 characters.
    let note: String = note.chars().take(900).collect();
    let number = hex(&random::<8>());
    json!({
        "metadata": {"name": format!("{node}.{number}"), "namespace": NAMESPACE},
        "eventTime": time::micros(SystemTime::now()),
        "reportingController": "firstlight/join-service",
        "reportingInstance": "join-service",
        "action": action,
        "reason": title,
        "type": kind,
        "note": note,
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": node},
    })
}

fn send_all(client: &Client, queue: &Receiver<Value>) {
    let (mut budget, mut counted, mut logged) = (BURST, Instant::now(), false);
    loop {
        let event = match queue.recv_timeout(STOP_CHECK_INTERVAL) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) if !client.is_stopped() => continue,
            Err(_) => return,
        };
        let earned =
            (counted.elapsed().as_millis() / EVENT_INTERVAL.as_millis()).min(BURST.into()) as u32;
        if earned > 0 {
            (budget, counted) = ((budget + earned).min(BURST), Instant::now());
        }
        if budget == 0 {
            continue;
        }
        budget -= 1;
        match client.create(&EVENTS.in_namespace(NAMESPACE), &event) {
            Ok(_) => logged = false,
            Err(client::Error::Stopped) => return,
            Err(error) => {
                if !std::mem::replace(&mut logged, true) {
                    log::warn!("events cannot be sent: {error}");
                }
            }
        }
    }
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
        let subject = |platform| Subject {
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
