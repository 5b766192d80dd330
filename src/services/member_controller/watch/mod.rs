//! Attestation that does not end at the join: asks each member for fresh evidence, judges it by today's
//! policy, and shows the result at its Node.
//!
//! ```text
//! Lease ─► one replica works        Nodes, records ─► who is due ─► 16 threads ask, by attested TLS
//! policy, reboot, Ready ─► ask at once                                   │
//!                        condition, label, taint, event, metrics ◄── rules (decide.rs)
//! ```
//!
//! A node answers on the port of `firstlight status`, as each member does: [`ask`]. [`decide`] has the
//! rules, [`leader`] the election, [`objects`] what is written. If the operator wants it, an accepted node
//! also gets a signed result for relying parties: [`issuer`], with the claims of [`ear`] and the keys of
//! [`signing`]. docs/watch.md is the operator's page.
//!
//! An object is written when something changes. Only the time of the last evidence, in the condition, is
//! written without a change, and seldom: [`decide::HEARTBEAT`].

mod ask;
mod decide;
mod ear;
pub mod flags;
mod issuer;
mod leader;
mod objects;
mod schedule;
pub mod signing;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::audit::MemberAudit;
use crate::cluster::Cluster;
use crate::cluster::joined::Joined;
use crate::cluster::node_status::NodeStatus;
use crate::cluster::secrets::Secrets;
use crate::key_service::members::{InForce, Members};
use crate::metrics::{Counter, Labelled, Registry};
use crate::policy_operators::PolicyOperators;
use crate::serving::CannotListen;
use ask::{Asked, Proved};
use base::crypto::{cluster_id, random};
use base::sync::{lock, wait_timeout};
use decide::{NodeAnswer, WatchReason};
use ear::AcceptedNode;
use issuer::{ResultIssuer, Unpublished};
use kubernetes::NAMESPACE;
use kubernetes::client::{self, CONFIG_MAPS, Client};
use kubernetes::machine_record::{self, MachineRecord};
use leader::Election;
use schedule::{DueNode, Schedule};
use verifier::Variant;
use verifier::sources::Sources;

pub use decide::{Rules, WatchAction};
pub use issuer::Place;
pub use leader::ElectionTimes;

/// The number of nodes that are asked at once. A silent node occupies one for some seconds.
const THREADS: usize = 16;
/// The timeout of one call of the API. The times of the Lease leave room for it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a write that failed.
const WRITE_AGAIN: Duration = Duration::from_secs(30);
/// The longest wait of a thread before it looks again.
const LOOK: Duration = Duration::from_secs(1);

/// What the operator wants.
#[derive(Clone)]
pub struct Options {
    /// How often each node is asked.
    pub interval: Duration,
    /// What follows from a refusal.
    pub rules: Rules,
    /// Where the results of accepted nodes are published; `None`: nowhere.
    pub issuer: Option<Place>,
    /// The times of the election: the program uses the default.
    pub times: ElectionTimes,
}

/// What judges members.
pub struct Judging {
    /// The attestation variant of the cluster's nodes.
    pub variant: &'static Variant,
    /// Where collateral comes from.
    pub sources: Arc<dyn Sources>,
    /// The directory with the policy and the measurement salt.
    pub config_dir: PathBuf,
    /// The secrets of the cluster, which name it.
    pub secrets: Secrets,
    /// The directory of the wrapping key, with which the keys of results are encrypted.
    pub wrapping_key_dir: PathBuf,
}

/// The running watch.
pub struct Watching {
    shared: Arc<Shared>,
    /// Joined after the client was stopped.
    _threads: Vec<Joined>,
}

/// What all threads use.
struct Shared {
    client: Client,
    cluster: Arc<Cluster>,
    audit: Arc<MemberAudit>,
    options: Options,
    judging: Judging,
    /// Judges members; known when the key service has answered.
    members: OnceLock<Members>,
    /// The policy of the present round of questions. A new one begins a round, in which nothing follows
    /// from a refusal.
    policy: Mutex<Option<Arc<InForce>>>,
    issuer: Option<ResultIssuer>,
    /// The fault of the signing keys that was logged last; a fault is logged when it changes.
    logged: Mutex<String>,
    /// Whether the log says that evidence names no machine.
    nameless: Once,
    election: Mutex<Election>,
    schedule: Mutex<Schedule>,
    changed: Condvar,
    asked: Labelled<Counter, 2>,
}

impl Watching {
    /// Starts the threads. They end when the client is stopped.
    pub fn start(
        options: Options,
        judging: Judging,
        (client, cluster): (&Client, &Arc<Cluster>),
        audit: &Arc<MemberAudit>,
        registry: &Registry,
    ) -> io::Result<Watching> {
        let client = client.within(TIMEOUT);
        let issuer = options.issuer.as_ref().map(|place| {
            let url = place.url.clone();
            ResultIssuer::new(
                url,
                options.interval,
                &judging.wrapping_key_dir,
                (&client, cluster),
                registry,
            )
        });
        let shared = Arc::new(Shared {
            client,
            issuer,
            cluster: cluster.clone(),
            audit: audit.clone(),
            judging,
            members: OnceLock::new(),
            policy: Mutex::default(),
            logged: Mutex::default(),
            nameless: Once::new(),
            election: Mutex::new(Election::new(identity(), options.times)),
            schedule: Mutex::new(Schedule::new(options.interval, options.rules)),
            changed: Condvar::new(),
            asked: registry.labelled(
                "firstlight_watch_answers_total",
                "Number of answers of nodes that this replica asked for evidence.",
                ["result", "reason"],
            ),
            options,
        });
        add_metrics(registry, &shared);
        let told = Arc::downgrade(&shared);
        cluster.on_node(move |name, node| {
            if let Some(shared) = told.upgrade() {
                shared.node_changed(name, node);
            }
        });
        let mut threads = vec![spawn("watch-lead", &shared, Shared::lead)?];
        for _ in 0..THREADS {
            threads.push(spawn("watch-ask", &shared, Shared::work)?);
        }
        Ok(Watching {
            shared,
            _threads: threads,
        })
    }

    /// Starts the HTTP server for relying parties, if results are published.
    pub fn serve_results(&self) -> Result<Option<http::server::HttpServer>, CannotListen> {
        let Some(place) = &self.shared.options.issuer else {
            return Ok(None);
        };
        let shared = Arc::downgrade(&self.shared);
        let page = move |target: &str| match shared.upgrade() {
            Some(shared) => shared.page(target),
            None => http::server::ServedResponse::status("503 Service Unavailable"),
        };
        let page = move |target: &str, _| page(target);
        let server = http::server::HttpServer::start("results", place.listen, issuer::LIMITS, page)
            .map_err(|error| (place.listen, error))?;
        log::info!(
            "serving attestation results on http://{}, issuer URL {}",
            server.local_addr(),
            place.url
        );
        Ok(Some(server))
    }

    /// Gives the Lease to another replica. Before the client is stopped.
    pub fn finish(&self) {
        self.shared.schedule().stop();
        lock(&self.shared.election).release(&self.shared.client.within(LOOK));
    }
}

fn spawn(name: &str, shared: &Arc<Shared>, run: fn(&Shared)) -> io::Result<Joined> {
    let shared = shared.clone();
    let thread = thread::Builder::new().name(name.into());
    Ok(Joined::from(thread.spawn(move || run(&shared))?))
}

/// Returns a name that no other process has, with that of the pod for people.
fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{}", host.trim(), base::text::hex(&random::<8>()))
}

fn add_metrics(registry: &Registry, shared: &Arc<Shared>) {
    let gauge = |name, help, of: &[(&'static str, &str)], read: fn(&Schedule) -> Option<f64>| {
        let shared = Arc::downgrade(shared);
        registry.gauge_of(name, help, of, move || {
            read(&lock(&shared.upgrade()?.schedule))
        });
    };
    gauge(
        "firstlight_watch_leader",
        "1 on the replica that asks the nodes for evidence, else 0.",
        &[],
        |schedule| Some(f64::from(u8::from(schedule.leads(Instant::now())))),
    );
    const NODES: &str = "firstlight_watch_nodes";
    const HELP: &str = "Number of nodes: their last evidence was accepted; refused, or missing for too long; neither is known. On the leader.";
    gauge(NODES, HELP, &[("result", "accepted")], |schedule| {
        Some(schedule.census()?.good as f64)
    });
    gauge(NODES, HELP, &[("result", "refused")], |schedule| {
        Some((schedule.census()?.refused + schedule.census()?.unproven) as f64)
    });
    gauge(NODES, HELP, &[("result", "unknown")], |schedule| {
        Some(schedule.census()?.open as f64)
    });
    gauge(
        "firstlight_watch_oldest_seconds",
        "Age of the oldest last good evidence of a node; of one without, the time for which this replica leads. On the leader.",
        &[],
        |schedule| Some(schedule.oldest(Instant::now())?.as_secs_f64()),
    );
    gauge(
        "firstlight_watch_mass_refusal",
        "1 while so many nodes are refused that nothing follows from it, else 0. On the leader.",
        &[],
        |schedule| Some(f64::from(u8::from(schedule.is_mass()?))),
    );
}

impl Shared {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        lock(&self.schedule)
    }

    /// The thread of the election.
    fn lead(&self) {
        let mut logged = String::new();
        loop {
            match self.step() {
                Ok(()) => logged.clear(),
                Err(Trouble::Stopped) => return,
                Err(Trouble::Because(why)) => {
                    if why != logged {
                        log::warn!("cannot ask the nodes for evidence: {why}");
                        logged = why;
                    }
                }
            }
            self.changed.notify_all();
            if self.client.stopped_within(self.options.times.renew) {
                return;
            }
        }
    }

    /// Takes part in the election, and begins or ends the work. A replica that could not ask nodes takes
    /// no part, so that another one does.
    fn step(&self) -> Result<(), Trouble> {
        if !self.cluster.is_known_within(Duration::ZERO) {
            return Err(Trouble::Because(
                "the Kubernetes API has not answered".into(),
            ));
        }
        if let Err(trouble) = self.prepare() {
            // relying parties need the keys all the same
            self.refresh_keys(false);
            return Err(trouble);
        }
        let mut election = lock(&self.election);
        let stepped = election.step(&self.client);
        let now = Instant::now();
        let until = election.until().filter(|until| *until > now);
        drop(election);
        self.refresh_keys(until.is_some());
        let mut schedule = self.schedule();
        match (until, schedule.leads(now)) {
            (Some(until), true) => schedule.extend(until),
            (Some(until), false) => {
                log::info!("this replica asks the nodes for evidence from now on");
                schedule.begin(until, self.cluster.nodes());
            }
            (None, true) => {
                log::info!("this replica no longer asks the nodes for evidence");
                schedule.stop();
            }
            (None, false) => schedule.stop(),
        }
        Ok(stepped?)
    }

    /// Makes the validator of members, which needs the cluster's ID, or looks for a new policy.
    fn prepare(&self) -> Result<(), Trouble> {
        if let Some(members) = self.members.get() {
            self.follow_policy(members);
            return Ok(());
        }
        let because = |error: &dyn fmt::Display| Trouble::Because(error.to_string());
        let Judging {
            variant,
            sources,
            config_dir,
            secrets,
            wrapping_key_dir,
        } = &self.judging;
        let operators = PolicyOperators::reading(wrapping_key_dir);
        let secret = secrets.measurement_secret(Some(Instant::now() + TIMEOUT));
        let secret = secret.map_err(|refusal| because(&refusal))?;
        let salt = secrets.measurement_salt();
        let salt = salt.map_err(|refusal| because(&refusal))?;
        let id = cluster_id(&secret, salt.expose());
        let members = Members::of_cluster(variant, config_dir, operators, id, sources.clone());
        let members = members.map_err(|error| because(&error))?;
        self.members.get_or_init(|| members);
        self.use_policy();
        Ok(())
    }

    /// Asks all nodes again after a change of the policy.
    fn follow_policy(&self, members: &Members) {
        let present = members.in_force().digest.clone();
        let before = lock(&self.policy).clone();
        if before.is_none_or(|before| before.digest != present) {
            self.use_policy();
            self.schedule().ask_all();
        }
    }

    /// Judges by the policy that is in force now.
    fn use_policy(&self) {
        let present = self.members.get().map(Members::in_force);
        if let (Some(_), Some(why)) = (
            &self.issuer,
            present.as_ref().and_then(|it| it.open.as_ref()),
        ) {
            log::error!(
                "this service issues no attestation results: the attestation policy pins nothing: {why}; see docs/watch.md"
            );
        }
        *lock(&self.policy) = present;
    }

    /// Reads the keys of results, and renews them if this replica leads. The members are asked also if
    /// this fails.
    fn refresh_keys(&self, leads: bool) {
        let Some(issuer) = &self.issuer else {
            return;
        };
        let why = match issuer.refresh(leads) {
            Ok(are_others) => {
                if are_others {
                    // no published key verifies the tokens that there are
                    self.schedule().ask_again();
                }
                String::new()
            }
            Err(Unpublished::Api(client::Error::Stopped)) => String::new(),
            Err(fault) => fault.to_string(),
        };
        let mut logged = lock(&self.logged);
        if why != *logged && !why.is_empty() {
            log::warn!("cannot renew the keys that sign attestation results: {why}");
        }
        *logged = why;
    }

    fn page(&self, target: &str) -> http::server::ServedResponse {
        match &self.issuer {
            Some(issuer) => issuer.page(target, || self.members.get().map(Members::in_force)),
            None => http::server::ServedResponse::status("404 Not Found"),
        }
    }

    fn node_changed(&self, name: &str, node: Option<&NodeStatus>) {
        self.schedule().node_changed(name, node);
        self.changed.notify_all();
    }

    /// A thread that asks nodes.
    fn work(&self) {
        while let Some(job) = self.next() {
            let Some(node) = self.cluster.node(&job.node) else {
                self.schedule().node_changed(&job.node, None);
                continue;
            };
            let record = self
                .cluster
                .record(&machine_record::name_of_node(&job.node));
            let (policy, at) = (lock(&self.policy).clone(), SystemTime::now());
            let asked = ask_node(&node, record.as_deref(), policy.as_deref());
            self.count(&asked.answer);
            self.report_moved(&job.node, &node, &asked);
            let question = Question {
                node: &node,
                record: record.as_deref(),
                policy: policy.as_deref(),
                at,
            };
            self.take(job, &question, asked);
        }
    }

    /// Waits for the next node that is due; `None` when the service stops.
    fn next(&self) -> Option<DueNode> {
        let mut schedule = self.schedule();
        while !self.client.is_stopped() {
            let now = Instant::now();
            let wait = match schedule.next(now) {
                Ok(job) => return Some(job),
                Err(due) => due.map_or(LOOK, |due| due.duration_since(now).min(LOOK)),
            };
            schedule = wait_timeout(&self.changed, schedule, wait);
        }
        None
    }

    fn count(&self, answer: &NodeAnswer) {
        let labels = match answer {
            NodeAnswer::Accepted => ["accepted", "Accepted"],
            NodeAnswer::Refused(reason) => ["refused", reason.word],
            NodeAnswer::Foreign(reason) => ["foreign", reason.word],
            NodeAnswer::None(reason) => ["none", reason.word],
        };
        self.asked.with(labels).inc();
    }

    /// Reports a Node whose address is not in its record, once.
    fn report_moved(&self, name: &str, node: &NodeStatus, asked: &Asked) {
        if self.schedule().note_moved(name, asked.moved)
            && let (Some(moved), Some(_)) = (asked.moved, node.address)
        {
            log::warn!(
                "node {name}: its Node has the address {moved}, but the machine joined with another one: somebody has changed the Node, \
                 or the machine has a new address; this service asks at the recorded address first"
            );
        }
    }

    /// Notes the answer, and writes what follows from it.
    fn take(&self, job: DueNode, question: &Question<'_>, asked: Asked) {
        let name = job.node.clone();
        let (node, record) = (question.node, question.record);
        let now = Instant::now();
        let Some(follow) = self
            .schedule()
            .answered(job, (node, record), &asked.answer, now)
        else {
            return;
        };
        // first, because it must not wait for another write
        let withdrawn = self.withdraw(&name, &follow);
        let proved = asked.proved.as_ref();
        let generation = proved.and_then(|proved| proved.generation.as_deref());
        let written = self
            .write(&name, node, record, &follow)
            .and_then(|()| self.write_generation(record, generation))
            .and_then(|()| match proved {
                Some(proved) => self.publish(&name, question, proved),
                None => Ok(()),
            });
        match withdrawn.and(written) {
            Ok(()) | Err(client::Error::Stopped) => {}
            // the Node or the record was deleted
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                log::warn!("node {name}: cannot write the result of its attestation yet: {error}");
                self.schedule().ask_within(&name, WRITE_AGAIN);
            }
        }
    }

    /// Ends the publication of the result of a node that is not accepted any more. A node that does not
    /// answer once, such as one that reboots, keeps it until it expires.
    fn withdraw(&self, name: &str, follow: &schedule::Follow) -> Result<(), client::Error> {
        let is_bad = follow.condition.as_ref().is_some_and(|it| it.0 != "True");
        match &self.issuer {
            Some(issuer) if is_bad && self.may_write() => issuer.withdraw(name),
            _ => Ok(()),
        }
    }

    /// Publishes the result of a node that is accepted, unless what it was judged by has changed.
    fn publish(
        &self,
        name: &str,
        question: &Question<'_>,
        proved: &Proved,
    ) -> Result<(), client::Error> {
        let (Some(issuer), Some(policy)) = (&self.issuer, question.policy) else {
            return Ok(());
        };
        // from the API server: a watch may be late
        let at = CONFIG_MAPS
            .in_namespace(NAMESPACE)
            .named(&machine_record::name_of_node(name));
        let present = self.client.find_as(&at)?;
        let present = present.as_ref().and_then(MachineRecord::read);
        let generation = proved.generation.as_deref();
        let is_same = is_same_record(question.record, present.as_ref(), generation);
        // at last: it may have changed while the node was asked
        let in_force = self.members.get().map(Members::in_force);
        let in_force = in_force.filter(|it| it.digest == policy.digest && it.open.is_none());
        if !self.may_write() {
            return Ok(());
        }
        if !is_same || in_force.is_none() {
            // a policy that pins nothing does not change by another question
            if !is_same {
                log::info!(
                    "node {name}: no attestation result yet, because its record changed during the check"
                );
                self.schedule().ask_within(name, WRITE_AGAIN);
            }
            return issuer.withhold(name);
        }
        let Some(machine) = proved.machine.as_deref() else {
            // any member of the cluster could have answered at the node's address
            self.nameless.call_once(|| {
                log::error!(
                    "this service issues no attestation results: evidence of the attestation variant {} does not identify the \
                     machine; see docs/watch.md",
                    self.judging.variant.name
                );
            });
            return issuer.withhold(name);
        };
        let accepted = AcceptedNode {
            issuer: issuer.url(),
            node: name,
            uid: &question.node.uid,
            variant: self.judging.variant.name,
            machine,
            image: proved.image.as_deref(),
            has_platform: proved.has_platform,
            policy: &policy.digest,
            at: question.at,
            life: issuer.life(),
        };
        match issuer.publish(&accepted, || self.may_write()) {
            Ok(()) => Ok(()),
            Err(Unpublished::Api(error)) => Err(error),
            // the log has the reason, and all nodes are asked when there are keys: Shared::refresh_keys
            Err(fault) => {
                log::debug!("node {name}: {fault}");
                issuer.withhold(name)
            }
        }
    }

    fn write(
        &self,
        name: &str,
        node: &NodeStatus,
        record: Option<&MachineRecord>,
        follow: &schedule::Follow,
    ) -> Result<(), client::Error> {
        let present = &node.attested;
        if let Some((status, reason)) = &follow.condition {
            let shown = [*status, reason.word, reason.message.as_str()];
            if (present.condition != shown || follow.is_late) && self.may_write() {
                objects::write_condition(&self.client, name, node, (status, reason))?;
                let shown = shown.map(str::to_owned);
                let before = self.schedule().wrote(name, shown, Instant::now());
                // the watch of Nodes may not have delivered an earlier write of this replica
                let before = before.as_ref().unwrap_or(&present.condition);
                if before[..2] != [*status, reason.word] {
                    self.audit
                        .watched(name, status, reason.word, &reason.message);
                }
            }
        }
        let marked = if &follow.wanted != present && self.may_write() {
            objects::write_node(&self.client, name, &node.uid, &follow.wanted)
        } else {
            Ok(())
        };
        // the record of a refused machine is closed also if its Node cannot be marked
        if let (Some(closes), Some(record)) = (follow.closes, record)
            && record.refused.is_some() != closes
            && self.may_write()
        {
            objects::write_record(&self.client, record, closes)?;
        }
        marked
    }

    /// Records the generation of an accepted disk.
    fn write_generation(
        &self,
        record: Option<&MachineRecord>,
        generation: Option<&str>,
    ) -> Result<(), client::Error> {
        match (record, generation) {
            (Some(record), Some(generation))
                if record.generation != generation && self.may_write() =>
            {
                objects::write_generation(&self.client, record, generation)
            }
            _ => Ok(()),
        }
    }

    /// Returns whether this replica still leads, so that no two write.
    fn may_write(&self) -> bool {
        self.schedule().leads(Instant::now())
    }
}

/// By what a node is judged.
struct Question<'a> {
    node: &'a NodeStatus,
    record: Option<&'a MachineRecord>,
    policy: Option<&'a InForce>,
    /// When it was asked.
    at: SystemTime,
}

fn ask_node(node: &NodeStatus, record: Option<&MachineRecord>, policy: Option<&InForce>) -> Asked {
    match policy {
        Some(policy) => ask::ask(node.address, &policy.validator, record),
        None => {
            let message = "the attestation policy is not known yet".into();
            let word = "NoEvidence";
            NodeAnswer::None(WatchReason { word, message }).into()
        }
    }
}

/// Returns whether the record is the one by which a node was judged. `written` is the generation of its
/// disk that this replica has recorded since.
fn is_same_record(
    judged: Option<&MachineRecord>,
    present: Option<&MachineRecord>,
    written: Option<&str>,
) -> bool {
    let (Some(judged), Some(present)) = (judged, present) else {
        return judged.is_none() && present.is_none();
    };
    let generation = present.generation.as_str();
    (&judged.machine, &judged.disk) == (&present.machine, &present.disk)
        && (generation == judged.generation || Some(generation) == written)
        && present.refused.is_none()
}

/// Why no node is asked.
enum Trouble {
    /// The service stops.
    Stopped,
    /// For the log.
    Because(String),
}

impl From<client::Error> for Trouble {
    fn from(error: client::Error) -> Trouble {
        match error {
            client::Error::Stopped => Trouble::Stopped,
            error => Trouble::Because(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_issued_only_by_the_record_that_there_is_now() {
        let record = |machine: &str, generation: &str| MachineRecord {
            machine: machine.into(),
            disk: "d".into(),
            generation: generation.into(),
            ..MachineRecord::default()
        };
        let judged = record("m", "1-a");
        let is_same =
            |present: Option<&MachineRecord>| is_same_record(Some(&judged), present, Some("2-b"));
        assert!(is_same(Some(&judged)) && is_same(Some(&record("m", "2-b"))));
        assert!(!is_same(Some(&record("other", "1-a"))));
        assert!(!is_same(Some(&record("m", "3-c"))));
        // an operator has deleted it, or accepts the disk as it is
        assert!(!is_same(None) && !is_same(Some(&record("m", ""))));
        let refused = MachineRecord {
            refused: Some(SystemTime::UNIX_EPOCH),
            ..judged.clone()
        };
        assert!(!is_same(Some(&refused)));
        assert!(is_same_record(None, None, None));
        assert!(!is_same_record(None, Some(&judged), None));
    }
}
