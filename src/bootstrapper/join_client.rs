//! The JoinClient: finds the cluster that this machine is to be a node of, and asks it for a ticket, from the first moment on
//! and until somebody has the node lock.
//!
//! ```text
//!   metadata ─► who am I ─► key, request, host key ┐
//!      └─► join services, all at once ◄────────────┘ prove, and ask in [`turn`](super::turn), again and again
//!                     │ the first ticket that is sound; nobody else is asked any more
//!                     ▼
//!                 node lock ─► what follows it ([`super::join`])
//! ```
//!
//! Nothing is changed on the node before the lock: whatever is wrong until then is told, and tried again.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::Outcome;
use super::job::Job;
use super::join::Join;
use super::node_lock::Locking;
use super::race::Entrant;
use super::setup::{self, Node};
use super::ticket::{Expected, Ticket};
use super::turn::Turns;
use attest::attestation::Issuer;
use base::stop::Stop;
use cloud::{Instance, Role};
use disk::state_disk::NewDisk;
use kubernetes::kubeadm;
use kubernetes::kubelet_request::KubeletRequest;
use node::tickets::{Asker, Asking, Failure, JoinService, Known};
use proto::join::ISSUE_JOIN_TICKET;
use proto::join::IssueJoinTicketRequest;

/// How often the console hears again what is waited for, when nothing changes.
const REMIND_EVERY: Duration = Duration::from_secs(60);
/// A join service that has not answered by then does not keep the others waiting.
const TURN: Duration = Duration::from_secs(3);
/// Sources of which the console hears: more than there are threads that ask.
const MAX_NOTES: usize = 128;

/// A running JoinClient; stopped and joined when dropped.
pub struct JoinClient {
    thread: Option<JoinHandle<Outcome>>,
    stop: Stop,
}

impl JoinClient {
    /// Starts asking.
    pub fn start(
        issuer: Arc<dyn Issuer>,
        entrant: Entrant,
        node: Arc<Node>,
    ) -> std::io::Result<JoinClient> {
        let stop = entrant.stop().clone();
        let thread = thread::Builder::new()
            .name("join".into())
            .spawn(move || run(issuer, &entrant, &node))?;
        Ok(JoinClient {
            thread: Some(thread),
            stop,
        })
    }

    /// Waits until it has been stopped, or a join has ended.
    pub fn wait(mut self) -> Outcome {
        self.join()
    }

    fn join(&mut self) -> Outcome {
        let defect = || Outcome::Failed("a defect of this program; its log says where".into());
        self.thread.take().map_or(Outcome::None, |thread| {
            thread.join().unwrap_or_else(|_| defect())
        })
    }
}

impl Drop for JoinClient {
    fn drop(&mut self) {
        self.stop.stop();
        self.join();
    }
}

/// The whole of it: a ticket, the lock, the set-up.
fn run(issuer: Arc<dyn Issuer>, entrant: &Entrant, node: &Arc<Node>) -> Outcome {
    let Some(join) = ask(issuer, entrant.stop(), node) else {
        return Outcome::None;
    };
    match entrant.lock(join.cluster()) {
        Some(Locking::Taken) => node
            .timeline
            .event("locked", "this node belongs to a cluster from here on"),
        // an init came first, or the node is told to stop
        Some(Locking::Already(_)) | None => return Outcome::None,
        Some(Locking::Failed(why)) => return Outcome::Failed(format!("locking the node: {why}")),
    }
    let job = Job::new(node.timeline);
    job.begin();
    match catch_unwind(AssertUnwindSafe(|| join.run(node, entrant.stop(), &job))) {
        Ok(Ok(())) => Outcome::Done,
        Ok(Err(why)) => Outcome::Failed(why),
        Err(_) => Outcome::Failed("a defect of this program; its log says where".into()),
    }
}

/// Asks until there is a ticket with which nothing is wrong; `None` when stopped.
fn ask(issuer: Arc<dyn Issuer>, stop: &Stop, node: &Arc<Node>) -> Option<Join> {
    let seeker = Arc::new(Seeker {
        issuer,
        node: node.clone(),
        over: Stop::new(),
        since: Instant::now(),
        turns: Turns::default(),
        state: Mutex::default(),
    });
    let over = seeker.over.clone();
    let _stopped = stop.on_stop(move || over.stop());
    // no thread now is one a little later
    let asking = loop {
        match Asking::start(node.metadata.clone(), seeker.clone()) {
            Ok(asking) => break asking,
            Err(error) => seeker.note(
                "this machine",
                &Failure::from(format!("no thread: {error}")),
            ),
        }
        if stop.wait(REMIND_EVERY) {
            return None;
        }
    };
    while !seeker.over.wait(REMIND_EVERY) {
        seeker.remind();
    }
    drop(asking);
    seeker.state().won.take()
}

/// Seeks a ticket.
struct Seeker {
    issuer: Arc<dyn Issuer>,
    node: Arc<Node>,
    over: Stop,
    since: Instant,
    turns: Turns,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    me: Option<Arc<Identity>>,
    won: Option<Join>,
    /// What each source said last.
    notes: BTreeMap<String, Failure>,
}

/// Who asks, and with what.
struct Identity {
    me: Instance,
    load_balancer: Option<String>,
    node: kubeadm::Node,
    kubelet: KubeletRequest,
    host_key: ssh::PublicKey,
    request: IssueJoinTicketRequest,
}

impl Asker for Seeker {
    const LONGEST_PAUSE: Duration = Duration::from_secs(30);

    fn over(&self) -> &Stop {
        &self.over
    }

    fn issuer(&self) -> &Arc<dyn Issuer> {
        &self.issuer
    }

    /// Who this machine is may be mended while it asks.
    fn know(&self, known: Known) {
        // what it does not say this time, it has said before
        let Some(own) = known.own else { return };
        let before = self.state().me.clone();
        let is_same = |identity: &Arc<Identity>| {
            identity.me == own
                && (known.load_balancer.is_none() || identity.load_balancer == known.load_balancer)
        };
        if before.as_ref().is_some_and(is_same) {
            return;
        }
        match Identity::new(own, known.load_balancer, &self.node) {
            Ok(identity) => self.state().me = Some(Arc::new(identity)),
            Err(why) => self.note("this machine", &Failure::lasting(why)),
        }
    }

    fn ask(&self, service: &JoinService) -> Result<(), Failure> {
        let identity = self
            .state()
            .me
            .clone()
            .ok_or_else(|| "not asked: this machine does not know who it is".to_owned())?;
        let connection = service.connect(self)?;
        let Some(turn) = self.turns.take(TURN, &self.over) else {
            return Ok(());
        };
        let answer = connection.call(ISSUE_JOIN_TICKET, &identity.request)?;
        let expected = Expected {
            control_plane: identity.request.is_control_plane,
            kubelet: &identity.kubelet,
            host_key: &identity.host_key,
            policy: &self.node.policy,
        };
        let ticket = Ticket::check(answer, &expected).map_err(|refused| {
            Failure::lasting(format!("sent a ticket that is refused, {refused}"))
        })?;
        let mut state = self.state();
        if state.won.is_none() && !self.over.is_stopped() {
            self.node
                .timeline
                .event("ticket", format_args!("from {service}"));
            state.won = Some(Join::new(
                ticket,
                identity.node.clone(),
                identity.me.role,
                identity.load_balancer.as_deref(),
            ));
            drop(state);
            self.over.stop();
        }
        drop(turn);
        Ok(())
    }

    /// The console hears of what is new.
    fn note(&self, source: &str, failure: &Failure) {
        let mut state = self.state();
        let is_new = state.notes.get(source) != Some(failure);
        if state.notes.len() < MAX_NOTES || state.notes.contains_key(source) {
            state.notes.insert(source.to_owned(), failure.clone());
        }
        drop(state);
        if is_new {
            self.tell(source, failure);
        }
    }
}

impl Seeker {
    fn tell(&self, source: &str, failure: &Failure) {
        let text = &failure.text;
        match failure.is_lasting {
            true => self.node.timeline.event(
                "refused",
                format_args!("{source}: {text}; mend it, this node keeps asking"),
            ),
            false => self
                .node
                .timeline
                .event("waiting", format_args!("for a cluster: {source}: {text}")),
        }
    }

    fn remind(&self) {
        let seconds = self.since.elapsed().as_secs();
        self.node.timeline.event(
            "waiting",
            format_args!("for a cluster or an init since {seconds} s"),
        );
        let notes = self.state().notes.clone();
        notes
            .iter()
            .for_each(|(source, failure)| self.tell(source, failure));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Identity {
    fn new(me: Instance, load_balancer: Option<String>, node: &Node) -> Result<Identity, String> {
        if me.role == Role::Unknown {
            return Err(format!(
                "the metadata service does not say whether {} is a control plane or a worker",
                me.name
            ));
        }
        let kubernetes = setup::kubernetes_node(&me).map_err(|error| error.to_string())?;
        let kubelet = KubeletRequest::new(&kubernetes.name, kubernetes.ip)
            .map_err(|error| error.to_string())?;
        let host_key = ssh::host::host_key(&node.root).map_err(|error| error.to_string())?;
        let principals = ssh::host::principals(&[])
            .map_err(|error| format!("this node's addresses: {error}"))?;
        let disk = NewDisk::open(&node.disk).map_err(|error| format!("the state disk: {error}"))?;
        let request = IssueJoinTicketRequest {
            disk_uuid: disk.uuid(),
            certificate_request: kubelet.der().to_vec(),
            is_control_plane: me.role == Role::ControlPlane,
            host_public_key: host_key.blob().to_vec(),
            host_certificate_principals: principals,
            accepts_cluster_ca: true,
        };
        Ok(Identity {
            me,
            load_balancer,
            node: kubernetes,
            kubelet,
            host_key,
            request,
        })
    }
}
