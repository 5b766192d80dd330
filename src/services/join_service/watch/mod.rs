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
//! rules, [`leader`] the election, [`objects`] what is written. docs/watch.md is the operator's page.
//!
//! An object is written when something changes. Only the time of the last evidence, in the condition, is
//! written without a change, and seldom: [`decide::HEARTBEAT`].

mod agenda;
mod ask;
mod decide;
pub mod flags;
mod leader;
mod objects;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::audit::Audit;
use super::cluster::Cluster;
use super::joined::Joined;
use super::node_status::NodeStatus;
use super::secrets::Secrets;
use crate::key_service::members::Members;
use agenda::{Agenda, Job};
use ask::Asked;
use base::crypto::{cluster_id, random};
use base::sync::{lock, wait_timeout};
use booted_proto::init::PORT;
use decide::{Answer, Reason};
use kubernetes::client::{self, Client};
use kubernetes::machine_record::{self, MachineRecord};
use leader::Election;
use metrics::{Counter, Labelled, Registry};
use verifier::sources::Sources;
use verifier::{Validator, Variant};

pub use decide::{Action, Rules};
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
    pub secrets: Arc<Secrets>,
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
    audit: Arc<Audit>,
    options: Options,
    judging: Judging,
    /// Judges members; known when the key service has answered.
    members: OnceLock<Members>,
    /// The policy of the present round of questions. A new one begins a round, in which nothing follows
    /// from a refusal.
    validator: Mutex<Option<Arc<dyn Validator>>>,
    election: Mutex<Election>,
    agenda: Mutex<Agenda>,
    changed: Condvar,
    asked: Labelled<Counter, 2>,
}

impl Watching {
    /// Starts the threads. They end when the client is stopped.
    pub fn start(
        options: Options,
        judging: Judging,
        (client, cluster): (&Client, &Arc<Cluster>),
        audit: &Arc<Audit>,
        registry: &Registry,
    ) -> io::Result<Watching> {
        let shared = Arc::new(Shared {
            client: client.within(TIMEOUT),
            cluster: cluster.clone(),
            audit: audit.clone(),
            judging,
            members: OnceLock::new(),
            validator: Mutex::default(),
            election: Mutex::new(Election::new(identity(), options.times)),
            agenda: Mutex::new(Agenda::new(options.interval, options.rules)),
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

    /// Returns what to call after a change of the policy: all nodes are asked again.
    pub fn on_policy(&self) -> impl Fn() + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move || {
            if let Some(shared) = shared.upgrade() {
                shared.use_policy();
                shared.agenda().ask_all();
                shared.changed.notify_all();
            }
        }
    }

    /// Gives the Lease to another replica. Before the client is stopped.
    pub fn finish(&self) {
        self.shared.agenda().stop();
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
    let gauge = |name, help, of: &[(&'static str, &str)], read: fn(&Agenda) -> Option<f64>| {
        let shared = Arc::downgrade(shared);
        registry.gauge_of(name, help, of, move || {
            read(&lock(&shared.upgrade()?.agenda))
        });
    };
    gauge(
        "firstlight_watch_leader",
        "1 on the replica that asks the nodes for evidence, else 0.",
        &[],
        |agenda| Some(f64::from(u8::from(agenda.leads(Instant::now())))),
    );
    const NODES: &str = "firstlight_watch_nodes";
    const HELP: &str = "Number of nodes: their last evidence was accepted; refused, or missing for too long; neither is known. On the leader.";
    gauge(NODES, HELP, &[("result", "accepted")], |agenda| {
        Some(agenda.census()?.good as f64)
    });
    gauge(NODES, HELP, &[("result", "refused")], |agenda| {
        Some(agenda.census()?.bad as f64)
    });
    gauge(NODES, HELP, &[("result", "unknown")], |agenda| {
        Some(agenda.census()?.open as f64)
    });
    gauge(
        "firstlight_watch_oldest_seconds",
        "Age of the oldest last good evidence of a node; of one without, the time for which this replica leads. On the leader.",
        &[],
        |agenda| Some(agenda.oldest(Instant::now())?.as_secs_f64()),
    );
    gauge(
        "firstlight_watch_mass_refusal",
        "1 while so many nodes are refused that nothing follows from it, else 0. On the leader.",
        &[],
        |agenda| Some(f64::from(u8::from(agenda.is_mass()?))),
    );
}

impl Shared {
    fn agenda(&self) -> MutexGuard<'_, Agenda> {
        lock(&self.agenda)
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
                        log::warn!("nodes are not asked for evidence: {why}");
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
        self.prepare()?;
        let mut election = lock(&self.election);
        let stepped = election.step(&self.client);
        let now = Instant::now();
        let until = election.until().filter(|until| *until > now);
        drop(election);
        let mut agenda = self.agenda();
        match (until, agenda.leads(now)) {
            (Some(until), true) => agenda.extend(until),
            (Some(until), false) => {
                log::info!("this replica asks the nodes for evidence from now on");
                agenda.begin(until, self.cluster.nodes());
            }
            (None, true) => {
                log::info!("this replica no longer asks the nodes for evidence");
                agenda.stop();
            }
            (None, false) => agenda.stop(),
        }
        Ok(stepped?)
    }

    /// Makes the validator of members, which needs the cluster's ID.
    fn prepare(&self) -> Result<(), Trouble> {
        if self.members.get().is_some() {
            return Ok(());
        }
        let because = |error: &dyn fmt::Display| Trouble::Because(error.to_string());
        let Judging {
            variant,
            sources,
            config_dir,
            secrets,
        } = &self.judging;
        let secret = secrets.measurement_secret(Some(Instant::now() + TIMEOUT));
        let secret = secret.map_err(|refusal| because(&refusal))?;
        let salt = secrets.measurement_salt();
        let salt = salt.map_err(|refusal| because(&refusal))?;
        let id = cluster_id(&secret, salt.expose());
        let members = Members::of_cluster(variant, config_dir, id, sources.clone());
        let members = members.map_err(|error| because(&error))?;
        self.members.get_or_init(|| members);
        self.use_policy();
        Ok(())
    }

    /// Judges by the policy that is in force now.
    fn use_policy(&self) {
        let present = self.members.get().and_then(Members::of_connection);
        *lock(&self.validator) = present;
    }

    fn node_changed(&self, name: &str, node: Option<&NodeStatus>) {
        self.agenda().node_changed(name, node);
        self.changed.notify_all();
    }

    /// A thread that asks nodes.
    fn work(&self) {
        while let Some(job) = self.next() {
            let Some(node) = self.cluster.node(&job.node) else {
                self.agenda().node_changed(&job.node, None);
                continue;
            };
            let record = self
                .cluster
                .record(&machine_record::name_of_node(&job.node));
            let asked = self.ask(&node, record.as_deref());
            self.count(&asked.answer);
            self.take(job, &node, record.as_deref(), asked);
        }
    }

    /// Waits for the next node that is due; `None` when the service stops.
    fn next(&self) -> Option<Job> {
        let mut agenda = self.agenda();
        while !self.client.is_stopped() {
            let now = Instant::now();
            let wait = match agenda.next(now) {
                Ok(job) => return Some(job),
                Err(due) => due.map_or(LOOK, |due| due.duration_since(now).min(LOOK)),
            };
            agenda = wait_timeout(&self.changed, agenda, wait);
        }
        None
    }

    fn ask(&self, node: &NodeStatus, record: Option<&MachineRecord>) -> Asked {
        let validator = lock(&self.validator).clone();
        let (Some(validator), Some(address)) = (validator, node.address) else {
            let answer = Answer::None(Reason {
                word: "NoAddress",
                message: "the Node has no address of the type InternalIP".into(),
            });
            return Asked {
                answer,
                generation: None,
            };
        };
        ask::ask(SocketAddr::new(address, PORT), &validator, record)
    }

    fn count(&self, answer: &Answer) {
        let labels = match answer {
            Answer::Accepted => ["accepted", "Accepted"],
            Answer::Refused(reason) => ["refused", reason.word],
            Answer::None(reason) => ["none", reason.word],
        };
        self.asked.with(labels).inc();
    }

    /// Notes the answer, and writes what follows from it.
    fn take(&self, job: Job, node: &NodeStatus, record: Option<&MachineRecord>, asked: Asked) {
        let name = job.node.clone();
        let now = Instant::now();
        let Some(follow) = self.agenda().answered(job, node, &asked.answer, now) else {
            return;
        };
        let written = self.write(&name, node, record, &follow);
        match written.and_then(|()| self.write_generation(record, asked.generation)) {
            Ok(()) | Err(client::Error::Stopped) => {}
            // the Node or the record was deleted
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                log::warn!("node {name}: the result of its attestation is written later: {error}");
                self.agenda().ask_within(&name, WRITE_AGAIN);
            }
        }
    }

    fn write(
        &self,
        name: &str,
        node: &NodeStatus,
        record: Option<&MachineRecord>,
        follow: &agenda::Follow,
    ) -> Result<(), client::Error> {
        let present = &node.attested;
        if let Some((status, reason)) = &follow.condition {
            let shown = [*status, reason.word, reason.message.as_str()];
            if (present.condition != shown || follow.is_late) && self.may_write() {
                objects::write_condition(&self.client, name, node, (status, reason))?;
                let shown = shown.map(str::to_owned);
                let before = self.agenda().wrote(name, shown, Instant::now());
                // the watch of Nodes may not have delivered an earlier write of this replica
                let before = before.as_ref().unwrap_or(&present.condition);
                if before[..2] != [*status, reason.word] {
                    self.audit
                        .watched(name, status, reason.word, &reason.message);
                }
            }
        }
        if &follow.wanted != present && self.may_write() {
            objects::write_node(&self.client, name, &node.uid, &follow.wanted)?;
        }
        if let (Some(closes), Some(record)) = (follow.closes, record)
            && record.refused.is_some() != closes
            && self.may_write()
        {
            objects::write_record(&self.client, record, closes)?;
        }
        Ok(())
    }

    /// Records the generation of an accepted disk.
    fn write_generation(
        &self,
        record: Option<&MachineRecord>,
        generation: Option<String>,
    ) -> Result<(), client::Error> {
        match (record, generation) {
            (Some(record), Some(generation))
                if record.generation != generation && self.may_write() =>
            {
                objects::write_generation(&self.client, record, &generation)
            }
            _ => Ok(()),
        }
    }

    /// Returns whether this replica still leads, so that no two write.
    fn may_write(&self) -> bool {
        self.agenda().leads(Instant::now())
    }
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
