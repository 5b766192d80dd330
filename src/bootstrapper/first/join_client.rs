//! The JoinClient: finds the cluster of this machine and asks it for a ticket, from the start of
//! the program until the node lock is taken.
//!
//! ```text
//!   metadata ─► this machine ─► key, request, host key ┐
//!      └─► join services, all at once ◄────────────────┘ prove, and ask in [`turn`](crate::lock::turn), again and again
//!                     │ the first valid ticket; no other service is asked after it
//!                     ▼
//!                 node lock ─► the set-up ([`crate::first::join`])
//! ```
//!
//! The JoinClient changes nothing on the node before the lock. Until then it prints every failure
//! on the console and retries.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::first::join::Join;
use crate::lock::{node_lock::Locking, race::Entrant, turn::Turns};
use crate::state::state_disk::NewDisk;
use crate::steps::{
    error::{Error, SetupRefused},
    job::Job,
    setup::{self, NodeParts, SetupOutcome},
};
use crate::trust::{
    service_trust::ServiceProof,
    ticket::{Expected, Ticket},
};
use attest::Issuer;
use base::boot::timeline::Timeline;
use base::machines::{Instance, Role};
use base::stop::Stop;
use base::sync::lock;
use kubernetes::certificate_request::kubelet_request::KubeletRequest;
use kubernetes::kubeadm;
use node::service_trust::TrustSettings;
use node::ticket_client::{
    self, HostSource, JoinServicePeer, Listing, TicketFailure, TicketRequester,
};
use proto::join::ISSUE_JOIN_TICKET;
use proto::join::IssueJoinTicketRequest;

/// After this time the console says which sources have not answered.
const FIRST_REMINDER: Duration = Duration::from_secs(10);
/// How often the console repeats what the node waits for, if nothing changes.
const REMIND_EVERY: Duration = Duration::from_secs(60);
/// If a join service takes longer than this to answer, the next one is asked.
const TURN: Duration = Duration::from_secs(3);
/// Maximum number of sources shown on the console; it is larger than the number of requesting
/// threads.
const MAX_NOTES: usize = 128;

/// A running JoinClient; dropping it stops its thread and waits for it.
pub struct JoinClient {
    thread: Option<JoinHandle<SetupOutcome>>,
    stop: Stop,
}

impl JoinClient {
    /// Starts the thread that asks for a ticket.
    pub fn start(
        issuer: Arc<dyn Issuer>,
        entrant: Entrant,
        node: Arc<NodeParts>,
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

    /// Waits until the JoinClient has been stopped, or a join has ended.
    pub fn wait(mut self) -> SetupOutcome {
        self.join()
    }

    fn join(&mut self) -> SetupOutcome {
        let defect = || SetupOutcome::Failed(Arc::new(Error::Defect));
        self.thread.take().map_or(SetupOutcome::None, |thread| {
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

/// Runs all steps: the ticket, the lock, the set-up.
fn run(issuer: Arc<dyn Issuer>, entrant: &Entrant, node: &Arc<NodeParts>) -> SetupOutcome {
    let Some(join) = ask(issuer, entrant.stop(), node) else {
        return SetupOutcome::None;
    };
    match node.lock(entrant, join.cluster()) {
        Some(Locking::Taken) => {}
        // an init came first, or the node is stopping
        Some(Locking::Already(_)) | None => return SetupOutcome::None,
        Some(Locking::Failed(error)) => return SetupOutcome::Failed(Arc::new(Error::Lock(error))),
    }
    let job = Job::new(node.timeline);
    job.begin();
    match catch_unwind(AssertUnwindSafe(|| join.run(node, entrant.stop(), &job))) {
        Ok(Ok(())) => SetupOutcome::Done,
        Ok(Err(error)) => SetupOutcome::Failed(Arc::new(error)),
        Err(_) => SetupOutcome::Failed(Arc::new(Error::Defect)),
    }
}

/// Asks until there is a valid ticket; `None` when stopped.
fn ask(issuer: Arc<dyn Issuer>, stop: &Stop, node: &Arc<NodeParts>) -> Option<Join> {
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
    let source = HostSource {
        name: "list of machines",
        goes_on: false,
        list: Arc::new({
            let seeker = seeker.clone();
            move || Ok(seeker.list())
        }),
    };
    // thread creation may succeed later
    let client = loop {
        match ticket_client::start(vec![source.clone()], seeker.clone()) {
            Ok(client) => break client,
            Err(error) => seeker.note(
                "this machine",
                &TicketFailure::from(format!("cannot start a thread: {error}")),
            ),
        }
        if stop.wait(REMIND_EVERY) {
            return None;
        }
    };
    let mut pause = FIRST_REMINDER;
    while !seeker.over.wait(pause) {
        seeker.remind();
        pause = REMIND_EVERY;
    }
    drop(client);
    seeker.state().won.take()
}

/// Asks for a join ticket. The threads of all join services share this value.
struct Seeker {
    issuer: Arc<dyn Issuer>,
    node: Arc<NodeParts>,
    over: Stop,
    since: Instant,
    turns: Turns,
    state: Mutex<Findings>,
}

#[derive(Default)]
struct Findings {
    me: Option<Arc<Identity>>,
    won: Option<Join>,
    /// The last failure of each source.
    notes: BTreeMap<String, TicketFailure>,
}

/// This machine's identity, and the request that it sends.
struct Identity {
    me: Instance,
    load_balancer: Option<String>,
    node: kubeadm::NodeSettings,
    kubelet: KubeletRequest,
    host_key: ssh::PublicKey,
    request: IssueJoinTicketRequest,
}

impl Seeker {
    /// Lists the load balancer and all control planes except this machine. An error of one request
    /// does not hide the answers of the others.
    fn list(&self) -> Listing {
        let metadata = &*self.node.metadata;
        let mut load_balancer = None;
        let addresses = ticket_client::ask(self, "load balancer", || {
            let host = metadata.load_balancer_endpoint()?;
            let addresses = ticket_client::resolve(&host);
            load_balancer = Some(host);
            addresses
        });
        let peers = ticket_client::ask(self, "control planes", || Ok(metadata.peers()?));
        let own = ticket_client::ask(self, "this machine", || Ok(metadata.own_instance()?));
        let is_complete = addresses.is_some() && peers.is_some() && own.is_some();
        let planes = peers.into_iter().flatten();
        let planes = planes.filter(|peer| peer.role == Role::ControlPlane);
        let mut hosts: Vec<IpAddr> = planes.filter_map(|peer| peer.vpc_ip).collect();
        hosts.extend(addresses.into_iter().flatten());
        hosts.sort();
        hosts.dedup();
        // an incomplete answer does not replace an earlier complete one
        if let Some(own) = own {
            // this machine runs no join service before it has its ticket
            hosts.retain(|host| Some(*host) != own.vpc_ip);
            self.update(own, load_balancer);
        }
        Listing {
            hosts: hosts.iter().map(IpAddr::to_string).collect(),
            is_complete,
        }
    }

    /// Makes a new request when this machine's metadata changes: an operator may correct the
    /// metadata while the node asks.
    fn update(&self, own: Instance, load_balancer: Option<String>) {
        let before = self.state().me.clone();
        let is_same = |identity: &Arc<Identity>| {
            identity.me == own
                && (load_balancer.is_none() || identity.load_balancer == load_balancer)
        };
        if before.as_ref().is_some_and(is_same) {
            return;
        }
        let what = format!("the disk {} to be read", self.node.disk.device.display());
        let identity = self
            .node
            .timeline
            .waiting_for(what, || Identity::new(own, load_balancer, &self.node));
        match identity {
            Ok(identity) => {
                let mut state = self.state();
                state.me = Some(Arc::new(identity));
                state.notes.remove("this machine");
            }
            Err(refused) => self.note("this machine", &TicketFailure::lasting(refused.to_string())),
        }
    }
}

impl TicketRequester for Seeker {
    const MAX_PAUSE: Duration = Duration::from_secs(30);
    const MAX_SERVER_PAUSE: Duration = Duration::from_secs(10 * 60);

    fn finished(&self) -> &Stop {
        &self.over
    }

    fn issuer(&self) -> &Arc<dyn Issuer> {
        &self.issuer
    }

    fn demands(&self) -> &TrustSettings {
        &self.node.trust.settings
    }

    fn request(&self, service: &JoinServicePeer) -> Result<(), TicketFailure> {
        let identity = self.state().me.clone().ok_or_else(|| {
            "not asked: this machine does not know its own name, role and address yet".to_owned()
        })?;
        // the error may be temporary: the TPM did not answer
        let judge = self.node.trust.judge().map_err(|error| error.to_string())?;
        let connection = service.connect(self, Some(verifier::judge(judge.clone())))?;
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
            TicketFailure::lasting(format!("sent a ticket with the invalid field {refused}"))
        })?;
        judge.check_cluster(&ticket.cluster())?;
        let mut state = self.state();
        if state.won.is_none() && !self.over.is_stopped() {
            report_ticket(&self.node.timeline, service, judge.proof());
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

    fn asked(&self, source: &str) {
        let unanswered = || TicketFailure::from("asked, no answer yet".to_owned());
        let mut state = self.state();
        if state.notes.len() < MAX_NOTES {
            state
                .notes
                .entry(source.to_owned())
                .or_insert_with(unanswered);
        }
    }

    fn answered(&self, source: &str) {
        // only the operator can correct the cause of a permanent failure; the node repeats the
        // request until then
        let mut state = self.state();
        if state.notes.get(source).is_some_and(|it| !it.is_lasting) {
            state.notes.remove(source);
        }
    }

    fn forget(&self, source: &str) {
        self.state().notes.remove(source);
    }

    /// Stores a source's failure, and prints it on the console if it is new.
    fn note(&self, source: &str, failure: &TicketFailure) {
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
    fn tell(&self, source: &str, failure: &TicketFailure) {
        let text = &failure.text;
        if failure.is_lasting {
            self.node.timeline.event(
                "refused",
                format_args!("{source}: {text}; correct the cause, this node asks again"),
            )
        } else {
            self.node
                .timeline
                .event("waiting", format_args!("for a cluster: {source}: {text}"))
        }
    }

    fn remind(&self) {
        let seconds = self.since.elapsed().as_secs();
        self.node.timeline.event(
            "waiting",
            format_args!("for a ticket or the operator's init, {seconds} s so far"),
        );
        let notes = self.state().notes.clone();
        notes
            .iter()
            .for_each(|(source, failure)| self.tell(source, failure));
    }

    fn state(&self) -> MutexGuard<'_, Findings> {
        lock(&self.state)
    }
}

impl Identity {
    fn new(
        me: Instance,
        load_balancer: Option<String>,
        node: &NodeParts,
    ) -> Result<Identity, SetupRefused> {
        if me.role == Role::Unknown {
            return Err(SetupRefused::NoRole(me.name));
        }
        let kubernetes =
            setup::kubernetes_node(node.has_cloud_controller, &me, node.kubeadm_timeout)?;
        let kubelet =
            KubeletRequest::new(&kubernetes.name, kubernetes.ip).map_err(SetupRefused::Kubelet)?;
        let host_key = ssh::host::host_key(&node.root).map_err(SetupRefused::HostKey)?;
        let principals = ssh::host::principals(&[]).map_err(SetupRefused::Addresses)?;
        let disk = NewDisk::open(&node.disk).map_err(SetupRefused::Disk)?;
        let request = IssueJoinTicketRequest {
            disk_uuid: disk.uuid(),
            certificate_request: kubelet.der().to_vec(),
            is_control_plane: me.role == Role::ControlPlane,
            host_public_key: host_key.blob().to_vec(),
            host_certificate_principals: principals,
            accepts_cluster_ca: true,
            has_client_key: true,
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
/// Reports a ticket on the console, with what the join service's evidence proved.
fn report_ticket(timeline: &Timeline, service: &JoinServicePeer, proof: Option<&ServiceProof>) {
    let Some(proof) = proof else {
        timeline.event("ticket", format_args!("from {service}"));
        timeline.event(
            "unproved",
            format_args!(
                "accepted the ticket of {service}, which sent no evidence (the setting require=strong would refuse it)"
            ),
        );
        return;
    };
    timeline.event("ticket", format_args!("from {service}, which {proof}"));
}
