//! A record of every decision about a ticket or a kubelet's certificate: a line in the log, a Kubernetes Event at the node, and a count.
//!
//! ```text
//! audit {"request":"join","decision":"refused","reason":"role","peer":"10.0.0.7:4711","node":"worker-1","role":"control-plane",
//!        "disk":"0f5b..","machine":"a1b2..","why":".."}
//! ```
//!
//! The line is always there. Events are for who looks with kubectl: they are left out when too many come at once, and no
//! ticket waits for one.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::refusal::Refusal;
use base::crypto::random;
use base::time;
use kubernetes::client::{self, Client, EVENTS};
use metrics::{Counter, Histogram, Labelled, Registry};

/// Events that wait to be sent.
const QUEUE: usize = 64;
/// Most events at once, and one more in each of these.
const BURST: u32 = 50;
const EACH: Duration = Duration::from_millis(200);
/// How often a stop is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// For one event.
const TIME: Duration = Duration::from_secs(3);
/// Events of what is in no namespace are in this one (k8s.io/client-go tools/events).
const NAMESPACE: &str = "default";
/// The reason of a ticket.
const GIVEN: &str = "given";

/// Who asks for what.
pub struct Subject<'a> {
    /// `join` or `rejoin`.
    pub request: &'static str,
    /// Its address.
    pub peer: &'a str,
    /// As it calls itself; empty where that is not said or makes no sense.
    pub node: &'a str,
    /// `control-plane`, `worker`, or empty.
    pub role: &'static str,
    /// Its disk; empty where that makes no sense.
    pub disk: &'a str,
    /// What attestation calls it.
    pub machine: Option<&'a str>,
    /// When it asked.
    pub since: Instant,
}

/// What was decided about a kubelet's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It may be signed.
    Approved,
    /// It may not.
    Denied,
    /// It is up to somebody else, or to be judged later.
    Left,
    /// The decision could not be made known.
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

/// Where decisions go.
pub struct Audit {
    events: Option<SyncSender<Value>>,
    tickets: Labelled<Counter, 3>,
    seconds: Labelled<Histogram, 2>,
    steps: Labelled<Histogram, 1>,
    certificates: Labelled<Counter, 3>,
}

/// The thread that sends events; it ends with its client's stop.
pub struct Sending(Option<JoinHandle<()>>);

impl Audit {
    /// Without events.
    pub fn new(registry: &Registry) -> Audit {
        let labels = ["request", "result", "reason"];
        Audit {
            events: None,
            tickets: registry.labelled(
                "firstlight_join_tickets_total",
                "Tickets that were asked for.",
                labels,
            ),
            seconds: registry.labelled(
                "firstlight_join_ticket_seconds",
                "Time until a decision.",
                ["request", "result"],
            ),
            steps: registry.labelled(
                "firstlight_join_step_seconds",
                "Time that a step of a join ticket took.",
                ["step"],
            ),
            certificates: registry.labelled(
                "firstlight_join_certificates_total",
                "Decisions about certificates of kubelets.",
                ["certificate", "result", "reason"],
            ),
        }
    }

    /// With events.
    pub fn start(client: &Client, registry: &Registry) -> io::Result<(Audit, Sending)> {
        let (events, queue) = mpsc::sync_channel(QUEUE);
        let client = client.within(TIME);
        let thread = thread::Builder::new()
            .name("events".into())
            .spawn(move || send_all(&client, &queue))?;
        Ok((
            Audit {
                events: Some(events),
                ..Audit::new(registry)
            },
            Sending(Some(thread)),
        ))
    }

    /// A ticket was given; `note` is what an operator should know of it, or empty.
    pub fn given(&self, subject: &Subject, note: &str) {
        self.record(subject, GIVEN, GIVEN, note);
    }

    /// There was none.
    pub fn refused(&self, subject: &Subject, refusal: &Refusal) {
        let decision = if refusal.is_failure() {
            "failed"
        } else {
            "refused"
        };
        let why = match refusal.inside.is_empty() {
            true => refusal.message().to_owned(),
            false => format!("{} ({})", refusal.message(), refusal.inside),
        };
        self.record(subject, decision, refusal.word, &why);
    }

    /// A certificate signing request of this name was judged, for a certificate of this kind; `node` is empty where it is of none.
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

    /// Measures a step.
    pub fn step<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        self.steps.with([name]).time(work)
    }

    fn record(&self, subject: &Subject, decision: &str, reason: &'static str, why: &str) {
        self.tickets.with([subject.request, decision, reason]).inc();
        self.seconds
            .with([subject.request, decision])
            .observe(subject.since.elapsed());
        let line = json!({
            "request": subject.request, "decision": decision, "reason": reason, "peer": subject.peer,
            "node": subject.node, "role": subject.role, "disk": subject.disk, "machine": subject.machine, "why": why,
        });
        match decision {
            GIVEN => log::info!("audit {line}"),
            _ => log::warn!("audit {line}"),
        }
        self.send(subject.node, || {
            let (kind, title) = match decision {
                GIVEN => ("Normal", "TicketGiven"),
                "refused" => ("Warning", "TicketRefused"),
                _ => ("Warning", "TicketFailed"),
            };
            let note = format!("{} as {}: {reason}: {why}", subject.request, subject.role);
            event(subject.node, subject.request, kind, title, &note)
        });
    }

    /// An event is about a node, by its name.
    fn send(&self, node: &str, event: impl FnOnce() -> Value) {
        if let Some(events) = self.events.as_ref().filter(|_| !node.is_empty()) {
            // where the queue is full there are events enough
            let _ = events.try_send(event());
        }
    }
}

/// events.k8s.io/v1.
fn event(node: &str, action: &str, kind: &str, title: &str, note: &str) -> Value {
    // at most 1024 characters
    let note: String = note.chars().take(900).collect();
    let number = random::<8>()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>();
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
    let (mut budget, mut counted, mut said) = (BURST, Instant::now(), false);
    loop {
        let event = match queue.recv_timeout(LOOK_EVERY) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) if !client.is_stopped() => continue,
            Err(_) => return,
        };
        let earned = (counted.elapsed().as_millis() / EACH.as_millis()).min(BURST.into()) as u32;
        if earned > 0 {
            (budget, counted) = ((budget + earned).min(BURST), Instant::now());
        }
        if budget == 0 {
            continue;
        }
        budget -= 1;
        match client.create(&EVENTS.in_namespace(NAMESPACE), &event) {
            Ok(_) => said = false,
            Err(client::Error::Stopped) => return,
            Err(error) => {
                if !std::mem::replace(&mut said, true) {
                    log::warn!("no events: {error}");
                }
            }
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // one that panicked has said so
            let _ = thread.join();
        }
    }
}
