//! Approves the certificate signing requests of kubelets (certificates.k8s.io/v1), if the request
//! matches the name and addresses with which the attested machine joined.
//!
//! ```text
//! CertificateSigningRequest ─► kube-apiserver-client-kubelet ─► [client]   a join ticket's token: for the ticket's node
//!        │ other signers                                                   a node with an open record: for itself
//!        │                     kubelet-serving ───────────────► [serving]  the same, with its recorded addresses
//!        ▼                                                         │ no: denied or left
//!     ignored                                                      ▼
//!                                                              approved: the cluster's controller manager signs
//! ```
//!
//! The API server authenticates the requester: the bearer of a token, or of a node's client
//! certificate. So an attacker who controls a node gets what that node may have, and nothing of
//! another node. A renewal proves no more than that: no evidence is asked for. So it needs the record that
//! the node's ticket left ([membership]), which ends with `firstlight node remove`, and is closed when the watch of
//! attestation refuses the machine.
//!
//! If a request cannot be judged here, or not yet, it is left. An administrator or another approver
//! may decide on it. It is judged again, at growing intervals, until it is decided or deleted. All
//! replicas judge; the API server accepts the first decision.

mod client;
mod membership;
mod request;
mod serving;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;

use super::audit::{ApprovalDecision, MemberAudit};
use crate::cluster::Cluster;
use crate::cluster::instances::Instances;
use crate::cluster::refusal::TicketRefusal;
use base::backoff::Backoff;
use base::sync::{lock, wait_timeout};
use kubernetes::client::{CERTIFICATE_SIGNING_REQUESTS, Client, CollectionEvent, Error, Selector};
use kubernetes::objects::{CertificateSigningRequest, Condition, ObjectMeta};
use kubernetes::services::TICKET_GROUP;
use kubernetes::services::migration::Migration;
use membership::Membership;
use request::Judgement::{Approve, Deny, Leave};
use request::{
    GROUP, Judgement, MAX_ENCODED, MAX_USAGES, REQUESTER, TOO_LONG, USER_PREFIX, is_decided,
};
use serving::RequestedName;

/// The timeout of an API call.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The first and the longest pause before a request is judged again.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(5 * 60);
/// The pause of judging after the start, until the state of the cluster is known.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(1);
/// The maximum number of waiting requests of one kubelet. It uses only its newest. Kubernetes
/// deletes an undecided request after a day.
const MAX_OF_USER: usize = 4;

/// Judges requests. [`ApproverThreads`] holds its threads.
pub struct Approver {
    cluster: Arc<Cluster>,
    client: Client,
    instances: Arc<Instances>,
    audit: Arc<MemberAudit>,
    migration: Migration,
    state: Mutex<Queue>,
    changed: Condvar,
}

/// Ends the threads when dropped. The cluster's client must have been stopped before.
pub struct ApproverThreads(Arc<Approver>, Vec<JoinHandle<()>>);

/// The requests that wait for a decision.
#[derive(Default)]
struct Queue {
    /// Undecided requests by their names.
    open: HashMap<String, Open>,
    /// Whether the API server has given the list of requests.
    is_listed: bool,
    is_stopped: bool,
}

struct Open {
    /// The object with the fields that [`reduce`] retains.
    request: Arc<CertificateSigningRequest>,
    since: Instant,
    due: Instant,
    backoff: Backoff,
    /// The last logged reason why it is left, so that each is logged once.
    logged_reason: &'static str,
}

/// The purpose of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Client,
    Serving,
}

impl Kind {
    /// Returns the purpose by the signer's name (Kubernetes, "Certificate Signing Requests"), or
    /// `None` for a signer that is ignored.
    fn of(request: &CertificateSigningRequest) -> Option<Kind> {
        match &*request.spec.signer_name {
            client::SIGNER => Some(Kind::Client),
            serving::SIGNER => Some(Kind::Serving),
            _ => None,
        }
    }

    /// Returns the name in logs and metrics.
    fn name(self) -> &'static str {
        match self {
            Kind::Client => "client",
            Kind::Serving => "serving",
        }
    }
}

impl Approver {
    /// Starts the threads. Fails if one cannot be started.
    pub fn start(
        cluster: &Arc<Cluster>,
        instances: &Arc<Instances>,
        audit: &Arc<MemberAudit>,
        migration: Migration,
    ) -> io::Result<ApproverThreads> {
        let approver = Arc::new(Approver {
            cluster: cluster.clone(),
            client: cluster.client().within(TIMEOUT),
            instances: instances.clone(),
            audit: audit.clone(),
            migration,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut running = ApproverThreads(approver.clone(), Vec::new());
        let judging = approver.clone();
        running.1.push(
            thread::Builder::new()
                .name("approver".into())
                .spawn(move || judging.work())?,
        );
        let watch = move || {
            let all = CERTIFICATE_SIGNING_REQUESTS.all();
            approver
                .cluster
                .watch(&all, &Selector::default(), reduce, |event| {
                    approver.on(event)
                });
        };
        running.1.push(
            thread::Builder::new()
                .name("watch-requests".into())
                .spawn(watch)?,
        );
        Ok(running)
    }

    fn on(&self, event: Option<CollectionEvent<CertificateSigningRequest>>) {
        let mut state = self.lock();
        match event {
            None => {}
            Some(CollectionEvent::Listed(requests)) => {
                state.is_listed = true;
                let mut before = std::mem::take(&mut state.open);
                for request in requests {
                    let known = before.remove(&request.metadata.name);
                    state.take(request, known);
                }
            }
            Some(CollectionEvent::Added(request) | CollectionEvent::Modified(request)) => {
                let known = state.open.remove(&request.metadata.name);
                state.take(request, known);
            }
            Some(CollectionEvent::Deleted(request)) => {
                state.open.remove(&request.metadata.name);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn work(&self) {
        let mut state = self.lock();
        while !state.is_stopped {
            let pause = match state.next() {
                Some((name, due)) if due <= Instant::now() => {
                    drop(state);
                    // Before the state of the cluster is known, a missing record proves nothing.
                    let pause = if self.cluster.is_known_within(UNKNOWN_PAUSE) {
                        self.handle(&name)
                    } else {
                        UNKNOWN_PAUSE
                    };
                    state = self.lock();
                    pause
                }
                Some((_, due)) => due.saturating_duration_since(Instant::now()),
                None => LONGEST_PAUSE,
            };
            if !state.is_stopped && !pause.is_zero() {
                state = wait_timeout(&self.changed, state, pause);
            }
        }
    }

    /// Judges a request and writes the decision. Returns how long to wait before the next request.
    fn handle(&self, name: &str) -> Duration {
        let Some(request) = self.lock().open.get(name).map(|open| open.request.clone()) else {
            return Duration::ZERO;
        };
        let (node, judgement) = self.judge(&request);
        let (verdict, reason, why) = match judgement {
            Approve(reason, why) => (ApprovalDecision::Approved, reason, why),
            Deny(reason, why) => (ApprovalDecision::Denied, reason, why),
            Leave(reason, why) => (ApprovalDecision::Left, reason, why),
        };
        if verdict == ApprovalDecision::Left {
            self.postpone(&request, &node, Some((verdict, reason, &why)));
            if reason == REQUESTER {
                // This judgement never changes.
                self.lock().forget(&request);
            }
            return Duration::ZERO;
        }
        match self.decide(&request, verdict, reason, &why) {
            Ok(()) => {
                self.log(&request, &node, verdict, reason, &why);
                self.lock().forget(&request);
            }
            Err(error) if error.is_not_found() => self.lock().forget(&request),
            Err(Error::Stopped) => return UNKNOWN_PAUSE,
            // Another replica or an administrator was faster. The watch delivers the decision.
            Err(error) if error.is_conflict() => self.postpone(&request, &node, None),
            Err(error) => {
                let refusal = TicketRefusal::from(error);
                self.postpone(
                    &request,
                    &node,
                    Some((ApprovalDecision::Failed, refusal.reason, &refusal.details)),
                );
                // The API server would probably refuse the next request as well.
                return UNKNOWN_PAUSE;
            }
        }
        Duration::ZERO
    }

    /// Delays a request. Logs the reason if it differs from the last one.
    fn postpone(
        &self,
        request: &Arc<CertificateSigningRequest>,
        node: &str,
        why: Option<(ApprovalDecision, &'static str, &str)>,
    ) {
        let mut state = self.lock();
        let Some(open) = state
            .open
            .get_mut(&request.metadata.name)
            .filter(|open| Arc::ptr_eq(&open.request, request))
        else {
            return;
        };
        open.due = Instant::now() + open.backoff.pause();
        let Some((verdict, reason, why)) = why else {
            return;
        };
        if std::mem::replace(&mut open.logged_reason, reason) != reason {
            self.log(request, node, verdict, reason, why);
        } else if verdict == ApprovalDecision::Failed {
            // the alert looks for failures that last
            let kind = Kind::of(request).map_or("", Kind::name);
            self.audit.count(kind, verdict, reason);
        }
    }

    fn log(
        &self,
        request: &CertificateSigningRequest,
        node: &str,
        verdict: ApprovalDecision,
        reason: &'static str,
        why: &str,
    ) {
        let kind = Kind::of(request).map_or("", Kind::name);
        let name = &request.metadata.name;
        self.audit
            .certificate(kind, verdict, name, node, reason, why);
    }

    /// Judges a request. Returns its node, as far as it is known, and the judgement.
    fn judge(&self, request: &CertificateSigningRequest) -> (String, Judgement) {
        let user = request.spec.username.strip_prefix(USER_PREFIX);
        let user = user.unwrap_or_default().to_owned();
        let membership = |node: &str| Membership::of(&self.cluster, node);
        if Kind::of(request) == Some(Kind::Client) {
            return match client::examine(request) {
                Err(judgement) => (user, judgement),
                Ok(asked) => {
                    let node_of_token = |id: &str| self.cluster.node_of_token(id);
                    let migration = self.migration.is_on(SystemTime::now());
                    let judgement = client::compare(
                        &asked,
                        &membership(&asked.node),
                        node_of_token,
                        migration.then_some(self.migration),
                    );
                    (asked.node, judgement)
                }
            };
        }
        let judgement = serving::examine(request).map_or_else(
            |judgement| judgement,
            |asked| {
                let owner = |wanted: &RequestedName| match wanted {
                    RequestedName::Name(name) => {
                        let known = membership(name);
                        (known.has_node || known.record.is_some()).then(|| name.clone())
                    }
                    RequestedName::Address(address) => self.cluster.node_of_address(*address),
                };
                let control_plane = |address| self.cluster.control_plane_of_address(address);
                let kubeadm = self.cluster.kubeadm();
                let aliases = || self.instances.aliases();
                serving::compare(
                    &asked,
                    &membership(&asked.node),
                    kubeadm,
                    owner,
                    control_plane,
                    aliases,
                )
            },
        );
        (user, judgement)
    }

    /// Writes the decision into the request, in the version that was judged.
    fn decide(
        &self,
        request: &CertificateSigningRequest,
        verdict: ApprovalDecision,
        reason: &str,
        why: &str,
    ) -> Result<(), Error> {
        let kind = if verdict == ApprovalDecision::Approved {
            "Approved"
        } else {
            "Denied"
        };
        let (metadata, spec) = (&request.metadata, &request.spec);
        let decided = json!({
            "metadata": {"name": metadata.name, "uid": metadata.uid, "resourceVersion": metadata.resource_version},
            "spec": {
                "signerName": spec.signer_name, "username": spec.username, "groups": spec.groups, "usages": spec.usages,
                "request": spec.request,
            },
            "status": {"conditions": [{
                "type": kind, "status": "True", "reason": reason, "message": format!("member controller: {why}"),
            }]},
        });
        let at = CERTIFICATE_SIGNING_REQUESTS.named(&metadata.name);
        let at = at.subresource("approval");
        self.client.update(&at, &decided).map(drop)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.state)
    }
}

impl Queue {
    /// Stores the present version of a request, unless it is decided. `known` is its earlier entry.
    fn take(&mut self, request: CertificateSigningRequest, known: Option<Open>) {
        if is_decided(&request) {
            return;
        }
        let backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let (now, name, request) = (
            Instant::now(),
            request.metadata.name.clone(),
            Arc::new(request),
        );
        let open = match known {
            Some(open) if open.request == request => open,
            Some(open) => Open {
                request,
                due: now,
                ..open
            },
            None => Open {
                request,
                since: now,
                due: now,
                backoff,
                logged_reason: "",
            },
        };
        let user = &open.request.spec.username;
        let same = || {
            self.open
                .iter()
                .filter(|(_, other)| other.request.spec.username == *user)
        };
        if same().count() >= MAX_OF_USER
            && let Some(oldest) = same()
                .min_by_key(|(_, open)| open.since)
                .map(|(name, _)| name.clone())
        {
            self.open.remove(&oldest);
        }
        self.open.insert(name, open);
    }

    /// Returns the request that is due first, and when.
    fn next(&self) -> Option<(String, Instant)> {
        self.open
            .iter()
            .min_by_key(|(_, open)| open.due)
            .map(|(name, open)| (name.clone(), open.due))
    }

    /// Removes a decided request, unless it has changed since it was judged.
    fn forget(&mut self, request: &Arc<CertificateSigningRequest>) {
        if self
            .open
            .get(&request.metadata.name)
            .is_some_and(|open| Arc::ptr_eq(&open.request, request))
        {
            self.open.remove(&request.metadata.name);
        }
    }
}

impl ApproverThreads {
    /// Returns what says whether requests can be decided: the API server has given their list, and the state of the cluster.
    pub fn ready(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let approver = self.0.clone();
        move || {
            let is_listed = approver.lock().is_listed;
            is_listed && approver.cluster.is_known_within(Duration::ZERO)
        }
    }
}

impl Drop for ApproverThreads {
    fn drop(&mut self) {
        self.0.lock().is_stopped = true;
        self.0.changed.notify_all();
        for thread in self.1.drain(..) {
            // A panic of the thread is already in the log.
            let _ = thread.join();
        }
    }
}

/// Reduces a request to the fields that are judged, because a requester could make it large. A
/// `spec.request` that is too long is replaced by a marker.
fn reduce(request: CertificateSigningRequest) -> CertificateSigningRequest {
    let is_open = !is_decided(&request) && Kind::of(&request).is_some();
    let (metadata, mut spec) = (request.metadata, request.spec);
    let mut kept = CertificateSigningRequest {
        metadata: ObjectMeta {
            name: metadata.name,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
            ..ObjectMeta::default()
        },
        ..CertificateSigningRequest::default()
    };
    if !is_open {
        kept.status.conditions.push(Condition::default());
        return kept;
    }
    if spec.request.len() > MAX_ENCODED {
        spec.request = TOO_LONG.into();
    }
    let is_known = |group: &String| [GROUP, TICKET_GROUP].contains(&group.as_str());
    spec.groups.retain(is_known);
    // One usage too many is kept, so that the request is denied.
    spec.usages.truncate(MAX_USAGES + 1);
    spec.groups.shrink_to_fit();
    spec.usages.shrink_to_fit();
    kept.spec = spec;
    kept
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;

    use super::request::decode;
    use super::request::tests::{good, good_json, reason, request};
    use super::serving::examine;
    use super::*;
    use kubernetes::kubelet_certificate::pem;
    use support::mutation::mutations;

    #[test]
    fn no_mutation_of_a_request_gets_another_name_or_address_or_makes_it_panic() {
        let good = good();
        let expected = examine(&good).unwrap();
        let encoded = &good.spec.request;
        let der = decode(encoded).unwrap();
        for mutant in mutations(&der, 20_000) {
            let encoded = BASE64_STANDARD.encode(pem("CERTIFICATE REQUEST", &mutant).as_bytes());
            match examine(&request(&encoded)) {
                // A mutated signature may still be valid in a second encoding. The rest is signed.
                Ok(asked) => assert_eq!(asked, expected),
                Err(judgement) => assert_eq!(reason(judgement), "certificate-request"),
            }
        }
        for mutant in mutations(encoded.as_bytes(), 5000) {
            if let Ok(asked) = examine(&request(&String::from_utf8_lossy(&mutant))) {
                assert_eq!(asked, expected);
            }
        }
        for mutant in mutations(good_json().to_string().as_bytes(), 5000) {
            if let Ok(object) = serde_json::from_slice(&mutant) {
                let _ = examine(&object);
                Queue::default().take(object, None);
            }
        }
    }

    #[test]
    fn unused_fields_of_a_request_are_dropped() {
        let mut request = good();
        let long = "A".repeat(1 << 20);
        let map = &mut request.metadata.annotations;
        map.insert("a".into(), long.clone());
        request.spec.usages.extend(vec![long.clone(); 3]);
        request.spec.groups.extend(vec![long.clone(); 3]);
        let kept = reduce(request.clone());
        assert!(kept.metadata.annotations.is_empty() && kept.spec.groups == [GROUP]);
        assert!(matches!(examine(&kept), Err(Deny("usages", _))));
        assert_eq!(kept.spec.usages.len(), MAX_USAGES + 1);
        request.spec.usages = good().spec.usages;
        assert_eq!(examine(&reduce(request.clone())), examine(&good()));
        request.spec.request = long;
        assert!(
            matches!(examine(&reduce(request.clone())), Err(Deny("certificate-request", why)) if why.contains("4096"))
        );
        request.status.conditions.push(Condition::default());
        let kept = reduce(request);
        assert!(is_decided(&kept) && kept.spec == Default::default());
    }

    #[test]
    fn of_a_kubelets_requests_the_newest_wait() {
        let mut state = Queue::default();
        for number in 0..2 * MAX_OF_USER {
            for user in ["system:node:n", "system:node:m"] {
                let mut request = good();
                request.metadata.name = format!("{user}-{number}");
                request.spec.username = user.into();
                state.take(request, None);
            }
        }
        let mut names: Vec<_> = state.open.into_keys().collect();
        names.sort();
        let newest = |user: &str| {
            (MAX_OF_USER..2 * MAX_OF_USER)
                .map(|n| format!("{user}-{n}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names,
            [newest("system:node:m"), newest("system:node:n")].concat()
        );
    }

    #[test]
    fn a_decided_request_is_removed_and_an_unchanged_one_keeps_its_due_time() {
        let (mut state, request) = (Queue::default(), good());
        state.take(request.clone(), None);
        let later = Instant::now() + LONGEST_PAUSE;
        state.open.get_mut("csr-1").unwrap().due = later;
        let known = state.open.remove("csr-1");
        state.take(request.clone(), known);
        assert_eq!(state.next(), Some(("csr-1".into(), later)));
        let mut changed = request;
        changed.metadata.resource_version = "2".into();
        let known = state.open.remove("csr-1");
        state.take(changed.clone(), known);
        assert!(state.next().unwrap().1 < later);
        // A judgement of the earlier version does not apply to the present one.
        state.forget(&Arc::new(changed.clone()));
        assert_eq!(state.open.len(), 1);
        for condition in ["Approved", "Denied", "Failed"] {
            changed.status.conditions = vec![Condition {
                kind: condition.into(),
                ..Condition::default()
            }];
            let known = state.open.remove("csr-1");
            state.take(changed.clone(), known);
            assert!(state.next().is_none(), "{condition}");
        }
    }
}
