//! The two requests of the join API.
//!
//! ```text
//! IssueJoinTicket
//!   validate ─► check the machine: name, addresses, role, disk ─► collect: keys, version, endpoint, CA ─► sign
//!     ─► reserve (control planes) ─► record ─► token ─► ticket
//!         └────────────┴───────────────┴── the [cleaner](super::cleaner) removes these if a later step fails or the
//!                                           caller is gone
//! IssueRejoinTicket
//!   validate ─► check the machine's disk ─► collect: keys ─► ticket
//! ```
//!
//! Every check that may refuse the request comes before the first change of the cluster. The token
//! comes last, because it is what admits the node.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::audit::{Audit, Subject};
use super::cleaner::{Cleaner, Task};
use super::cluster::{Cluster, Components, Kubeadm};
use super::instances::Instances;
use super::keys::{self, KeyClient};
use super::pki::{self, Ca, Pki};
use super::policy::PolicyFile;
use super::records::{self, Claimant};
use super::refusal::Refusal;
use super::request::{self, JoinRequest};
use super::{approver, joining_node, reservation, tokens};
use base::crypto::{
    KEY_LEN, MEASUREMENT_SECRET_ID, SSH_HOST_CA_SEED_ID, SSH_USER_CA_PUBLIC_ID,
    SSH_USER_CA_SEED_ID, Secret,
};
use base::logger::peer;
use kms::Uuid;
use kubernetes::client::Client;
use kubernetes::machine_record::{self, Record};
use kubernetes::services::migration::Migration;
use proto::join::{
    ControlPlaneCertOrKey, IssueJoinTicketRequest, IssueJoinTicketResponse,
    IssueRejoinTicketRequest, IssueRejoinTicketResponse,
};
use rpc::grpc::{Call, Status};
use ssh::key::ED25519_BLOB_LEN;
use ssh::{Authority, PublicKey};
use verifier::{Claims, Form, Stage};

/// The timeout of an API call within a ticket. Callers wait 30 s.
const API_TIMEOUT: Duration = Duration::from_secs(8);
/// Time that is reserved to send the answer. A refusal that arrives tells the caller when to try
/// again.
const ANSWER_RESERVE: Duration = Duration::from_secs(1);
/// How long a request after the start waits until the state of the cluster is known.
const STARTUP_WAIT: Duration = Duration::from_secs(5);

/// Issues tickets.
pub struct Tickets {
    keys: Arc<KeyClient>,
    constants: Mutex<Constants>,
    config_dir: PathBuf,
    pki: Pki,
    instances: Arc<Instances>,
    cluster: Option<ClusterAccess>,
    audit: Arc<Audit>,
    /// Whether the service's permission to approve client certificates has been confirmed.
    tokens_are_served: AtomicBool,
    /// The policy under which callers connected.
    policy: Option<Arc<PolicyFile>>,
    migration: Migration,
    /// Nodes whose ticket is being issued.
    busy: Mutex<HashSet<String>>,
}

/// Access to the cluster.
pub struct ClusterAccess {
    /// The state of the cluster.
    pub cluster: Arc<Cluster>,
    /// The thread that removes the leftovers of tickets.
    pub cleaner: Arc<Cleaner>,
}

/// Keys that are the same in every ticket.
#[derive(Default)]
struct Constants {
    measurement_secret: Option<Secret>,
    ssh: Option<Arc<SshAuthorities>>,
}

/// The part of the cluster's two SSH authorities that tickets need. It does not permit a login
/// anywhere.
struct SshAuthorities {
    hosts: Authority,
    users: PublicKey,
}

/// The parts of a ticket that are collected before the cluster is changed.
struct Inputs {
    disk_key: Secret,
    measurement_secret: Secret,
    measurement_salt: Secret,
    ssh: Arc<SshAuthorities>,
    components: Arc<Components>,
    kubeadm: Kubeadm,
    ca: Ca,
    control_plane_files: Vec<ControlPlaneCertOrKey>,
}

/// The signed parts of a ticket.
struct Signed {
    kubelet: Vec<u8>,
    host: String,
    /// The names and addresses in the SSH host certificate.
    principals: Vec<String>,
}

impl Tickets {
    /// Creates the issuer. Without a cluster, it issues rejoin tickets only, for any disk.
    pub fn new(
        keys: Arc<KeyClient>,
        config_dir: PathBuf,
        pki: Pki,
        instances: Arc<Instances>,
        cluster: Option<ClusterAccess>,
        audit: Arc<Audit>,
        migration: Migration,
    ) -> Tickets {
        Tickets {
            keys,
            constants: Mutex::default(),
            config_dir,
            pki,
            instances,
            cluster,
            audit,
            tokens_are_served: AtomicBool::new(false),
            policy: None,
            migration,
            busy: Mutex::default(),
        }
    }

    /// Restricts tickets to callers whose connection was accepted under the present policy.
    pub fn with_policy(self, policy: Arc<PolicyFile>) -> Tickets {
        Tickets {
            policy: Some(policy),
            ..self
        }
    }

    /// Issues a join ticket: admits a new node.
    pub fn join(
        &self,
        call: &Call,
        request: &IssueJoinTicketRequest,
    ) -> Result<IssueJoinTicketResponse, Status> {
        let (since, peer) = (Instant::now(), peer(call.peer()));
        let asked = JoinRequest::validate(request);
        let subject = Subject {
            request: "join",
            peer: &peer,
            node: asked.as_ref().map(JoinRequest::node).unwrap_or_default(),
            role: if request.is_control_plane {
                "control-plane"
            } else {
                "worker"
            },
            disk: asked
                .as_ref()
                .map(|asked| asked.disk.as_str())
                .unwrap_or_default(),
            machine: call.identity().map(|machine| &**machine),
            form: form(call),
            platform: call
                .claims::<Claims>()
                .and_then(|it| it.platform.as_deref()),
            since,
        };
        let made = match &asked {
            Ok(asked) => self.make_join(call, asked),
            Err(refusal) => Err(refusal.clone()),
        };
        match made {
            Ok(ticket) => {
                self.audit.given(&subject, "");
                Ok(ticket)
            }
            Err(refusal) => {
                self.audit.refused(&subject, &refusal);
                Err(refusal.status())
            }
        }
    }

    /// Issues a rejoin ticket: lets a node that boots again open its disk.
    pub fn rejoin(
        &self,
        call: &Call,
        request: &IssueRejoinTicketRequest,
    ) -> Result<IssueRejoinTicketResponse, Status> {
        let (since, peer) = (Instant::now(), peer(call.peer()));
        let disk = request::disk(&request.disk_uuid);
        let subject = Subject {
            request: "rejoin",
            peer: &peer,
            node: "",
            role: "",
            disk: disk.as_ref().map(Uuid::as_str).unwrap_or_default(),
            machine: call.identity().map(|machine| &**machine),
            form: form(call),
            platform: call
                .claims::<Claims>()
                .and_then(|it| it.platform.as_deref()),
            since,
        };
        let made = match &disk {
            Ok(disk) => self.make_rejoin(call, disk),
            Err(refusal) => Err(refusal.clone()),
        };
        match made {
            Ok((ticket, note)) => {
                self.audit.given(&subject, note);
                Ok(ticket)
            }
            Err(refusal) => {
                self.audit.refused(&subject, &refusal);
                Err(refusal.status())
            }
        }
    }

    /// Refuses a caller that is gone, or whose connection was accepted under an older policy.
    fn check_caller(&self, call: &Call) -> Result<(), Refusal> {
        if call.is_cancelled() {
            return Err(Refusal::gone());
        }
        if self
            .policy
            .as_ref()
            .is_some_and(|policy| !policy.holds_for(call.connected_at()))
        {
            let message = "the cluster's attestation policy changed since this connection was made: connect again";
            return Err(Refusal::temporary(
                "policy-changed",
                message,
                Duration::from_secs(1),
            ));
        }
        Ok(())
    }

    fn make_join(
        &self,
        call: &Call,
        asked: &JoinRequest,
    ) -> Result<IssueJoinTicketResponse, Refusal> {
        check_stage(call, Stage::Booted)?;
        self.check_caller(call)?;
        let attached = self.cluster.as_ref().ok_or_else(|| {
            let message =
                "this join service has no access to the Kubernetes API: it issues rejoin tickets only, and no new node can join";
            Refusal::missing("no-cluster", message)
        })?;
        if !attached.cluster.is_known_within(STARTUP_WAIT) {
            let message =
                "the Kubernetes API has not answered since the join service started: try again";
            return Err(Refusal::temporary("api", message, Duration::from_secs(3)));
        }
        let machine = call.identity().map(|machine| &**machine);
        let peer = call.peer().map(|peer| peer.ip());
        let direct = self
            .audit
            .step("machine", || self.instances.check(asked, peer))?;
        let claimant = Claimant { machine, direct };
        records::check_disk(&attached.cluster, &asked.disk, machine)?;
        records::check_name(&attached.cluster, asked.node(), claimant, SystemTime::now())?;
        // This machine may have the name. An earlier lock would let any machine block the node.
        let _busy = self.mark_busy(asked.node())?;
        let read = self
            .audit
            .step("read", || self.collect(call, asked, &attached.cluster))?;
        let signed = self.audit.step("sign", || sign(asked, &read))?;
        self.check_rights(call, attached)?;
        self.check_caller(call)?;
        let token = self.admit(Admission {
            call,
            asked,
            claimant,
            access: attached,
            components: &read.components.name,
            principals: &signed.principals,
            audit: &self.audit,
            undo: Undo {
                cleaner: &attached.cleaner,
                tasks: Vec::new(),
            },
        })?;
        Ok(ticket(asked, read, signed, token))
    }

    /// Checks that this service may approve the kubelet's certificate. Otherwise the node would
    /// fail only after it is locked, and could not join again.
    fn check_rights(&self, call: &Call, attached: &ClusterAccess) -> Result<(), Refusal> {
        if !self.tokens_are_served.load(Ordering::Relaxed) {
            let client = within_call(attached.cluster.client(), call)?;
            if !approver::may_approve_clients(&client).map_err(|error| Refusal::from_api(&error))? {
                let details = "this account may not approve client certificates of kubelets: run `firstlight apply` of this version";
                return Err(Refusal::internal("api-refused", details));
            }
            self.tokens_are_served.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn make_rejoin(
        &self,
        call: &Call,
        disk: &Uuid,
    ) -> Result<(IssueRejoinTicketResponse, &'static str), Refusal> {
        check_stage(call, Stage::Initramfs)?;
        let machine = call.identity().map(|machine| &**machine);
        let is_migrating = self.migration.is_on(SystemTime::now());
        let (record, note) = match &self.cluster {
            None => (None, "the owner of this disk was not checked: no cluster"),
            // The ticket is issued all the same: a whole cluster may be waiting for it to boot.
            Some(attached) if !attached.cluster.is_known_within(STARTUP_WAIT) => (
                None,
                "the owner of this disk was not checked: the Kubernetes API has not answered since the start",
            ),
            Some(attached) => {
                let record = records::check_rejoin(&attached.cluster, disk, machine, is_migrating)?;
                let note = if record.is_some() {
                    "the machine is now recorded as the owner of this disk"
                } else {
                    ""
                };
                (record, note)
            }
        };
        let measurement_secret = self.measurement_secret(call)?;
        let disk_key = self.key(call, disk.as_str())?;
        self.check_caller(call)?;
        if let (Some(attached), Some(record)) = (&self.cluster, record) {
            attached.cluster.store_record_of_disk(&record);
            attached.cleaner.add(Task::Write(Box::new(record)));
        }
        let mut ticket = IssueRejoinTicketResponse::default();
        ticket.state_disk_key = disk_key.expose().to_vec();
        ticket.measurement_secret = measurement_secret.expose().to_vec();
        ticket.host_certificate = self.renewed_host_certificate(call, disk);
        if is_migrating {
            ticket.measurement_salt = pki::measurement_salt(&self.config_dir)?.expose().to_vec();
        }
        Ok((ticket, note))
    }

    /// Returns a new SSH host certificate, but only if this machine received one when it joined
    /// with this disk. An error is only logged: the node can open its disk without it.
    fn renewed_host_certificate(&self, call: &Call, disk: &Uuid) -> Vec<u8> {
        let records = self
            .cluster
            .as_ref()
            .map(|attached| attached.cluster.records_of_disk(disk.as_str()));
        let records = records.unwrap_or_default();
        let Some(record) = records.iter().find(|record| !record.host_key.is_empty()) else {
            return Vec::new();
        };
        let certify = || -> Result<String, String> {
            let key = PublicKey::from_line(&record.host_key).map_err(|error| error.to_string())?;
            let ssh = self
                .ssh(call)
                .map_err(|refusal| refusal.status().to_string())?;
            let certificate =
                ssh.hosts
                    .host_certificate(&key, &record.principals, SystemTime::now());
            certificate
                .map(|line| line + "\n")
                .map_err(|error| error.to_string())
        };
        certify().map(String::into_bytes).unwrap_or_else(|error| {
            log::warn!(
                "the SSH host certificate of {} is not renewed: {error}",
                record.node
            );
            Vec::new()
        })
    }

    /// Collects the parts of a ticket. Changes nothing.
    fn collect(
        &self,
        call: &Call,
        asked: &JoinRequest,
        cluster: &Cluster,
    ) -> Result<Inputs, Refusal> {
        Ok(Inputs {
            components: cluster.components()?,
            kubeadm: kubeadm(asked, cluster)?,
            ca: self.pki.ca()?,
            control_plane_files: match asked.control_plane {
                true => self.pki.control_plane_files()?,
                false => Vec::new(),
            },
            measurement_salt: pki::measurement_salt(&self.config_dir)?,
            measurement_secret: self.measurement_secret(call)?,
            ssh: self.ssh(call)?,
            disk_key: self.key(call, asked.disk.as_str())?,
        })
    }

    /// Makes all changes of the cluster: the reservation, the record and the token. Returns the
    /// token.
    fn admit(&self, mut admission: Admission) -> Result<zeroize::Zeroizing<String>, Refusal> {
        admission.reserve()?;
        let record = admission.record()?;
        let token = admission.token(&record)?;
        self.check_caller(admission.call)?;
        admission.finish(&record);
        Ok(token)
    }

    fn mark_busy(&self, node: &str) -> Result<BusyNode<'_>, Refusal> {
        match self
            .busy
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(node.to_owned())
        {
            true => Ok(BusyNode {
                busy: &self.busy,
                node: node.to_owned(),
            }),
            false => {
                let message = "another ticket for this node is being issued";
                Err(Refusal::temporary(
                    records::JUST_ISSUED,
                    message,
                    Duration::from_secs(2),
                ))
            }
        }
    }

    fn key(&self, call: &Call, id: &str) -> Result<Secret, Refusal> {
        self.keys
            .data_key(id, KEY_LEN, call.deadline())
            .map_err(keys_refusal)
    }

    fn measurement_secret(&self, call: &Call) -> Result<Secret, Refusal> {
        let known = self
            .constants
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .measurement_secret
            .clone();
        if let Some(secret) = known {
            return Ok(secret);
        }
        let secret = self.key(call, MEASUREMENT_SECRET_ID)?;
        self.constants
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .measurement_secret = Some(secret.clone());
        Ok(secret)
    }

    fn ssh(&self, call: &Call) -> Result<Arc<SshAuthorities>, Refusal> {
        let known = self
            .constants
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .ssh
            .clone();
        if let Some(ssh) = known {
            return Ok(ssh);
        }
        let authority = |id| {
            let seed = self.key(call, id)?;
            Authority::from_seed(&seed)
                .map_err(|error| Refusal::internal("keys-refused", error.to_string()))
        };
        let users = self
            .keys
            .data_key(SSH_USER_CA_PUBLIC_ID, ED25519_BLOB_LEN, call.deadline());
        let users = match PublicKey::from_blob(users.map_err(keys_refusal)?.expose()) {
            Ok(key) => key,
            // Constellation's key service does not know this identifier, and derives a symmetric
            // key from it.
            Err(_) => authority(SSH_USER_CA_SEED_ID)?.public().clone(),
        };
        let ssh = Arc::new(SshAuthorities {
            hosts: authority(SSH_HOST_CA_SEED_ID)?,
            users,
        });
        self.constants
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .ssh = Some(ssh.clone());
        Ok(ssh)
    }
}

fn keys_refusal(error: keys::Error) -> Refusal {
    match error {
        keys::Error::Temporary(details) => {
            let message = "the key service does not answer at the moment: try again";
            Refusal::temporary("keys", message, Duration::from_secs(2)).with_details(details)
        }
        // the reason names no secret, and the node's operator has no other information
        keys::Error::Waiting(reason) => {
            let message = format!("the key service cannot give keys yet: {reason}");
            Refusal::temporary("keys-waiting", message, Duration::from_secs(5))
        }
        keys::Error::Permanent(details) => Refusal::internal("keys-refused", details),
    }
}

/// Returns the form of attested TLS in which the caller proved itself, for the audit.
fn form(call: &Call) -> &'static str {
    match call.claims::<Claims>().map(|claims| claims.form) {
        Some(Form::Strong) => "strong",
        Some(Form::Old) => "old",
        None => "",
    }
}

/// Refuses a machine that attests itself at another stage of its boot: the key of a disk is for its
/// initramfs only, where no program of an attacker runs.
fn check_stage(call: &Call, expected: Stage) -> Result<(), Refusal> {
    match call.claims::<Claims>().and_then(|claims| claims.stage) {
        Some(stage) if stage != expected => {
            let message =
                format!("this machine attests itself as {stage}: only {expected} gets this ticket");
            Err(Refusal::denied("wrong-stage", message))
        }
        _ => Ok(()),
    }
}

/// Returns a client whose timeout is the caller's remaining time.
fn within_call(client: &Client, call: &Call) -> Result<Client, Refusal> {
    let soon = Instant::now() + ANSWER_RESERVE;
    let left = call.deadline().map_or(API_TIMEOUT, |deadline| {
        deadline.saturating_duration_since(soon)
    });
    match left.is_zero() {
        false => Ok(client.within(left.min(API_TIMEOUT))),
        true => Err(Refusal::temporary(
            "api",
            "the deadline of the call has passed: try again",
            Duration::from_secs(3),
        )),
    }
}

/// Returns the kubeadm configuration. Refuses a worker whose name or address is one of the API
/// server, because clients of the API server trust the node's certificate.
fn kubeadm(asked: &JoinRequest, cluster: &Cluster) -> Result<Kubeadm, Refusal> {
    let kubeadm = cluster.kubeadm()?;
    if asked.control_plane {
        return Ok(kubeadm);
    }
    if kubeadm.is_served_under(asked.node()) {
        let message = format!(
            "{} is a name of the cluster's API server: rename the machine",
            asked.node()
        );
        return Err(Refusal::denied("name-of-api-server", message));
    }
    match asked
        .addresses()
        .iter()
        .find(|address| kubeadm.is_served_under(&address.to_string()))
    {
        None => Ok(kubeadm),
        Some(address) => {
            let message = format!(
                "certificate_request: {address} is the address of the cluster's API server"
            );
            Err(Refusal::denied("address", message))
        }
    }
}

fn sign(asked: &JoinRequest, read: &Inputs) -> Result<Signed, Refusal> {
    let mut principals = asked.principals.clone();
    // Control planes also have the names of the API server. A wildcard is valid in TLS certificates
    // only.
    if asked.control_plane {
        let further = read
            .kubeadm
            .names
            .iter()
            .filter(|name| ssh::is_principal(name));
        principals.extend(further.cloned());
    } else {
        principals.retain(|name| !read.kubeadm.is_served_under(name));
    }
    if principals.is_empty() {
        principals.push(asked.node().to_owned());
    }
    let mut seen = HashSet::new();
    principals.retain(|name| seen.insert(name.clone()));
    let host = read
        .ssh
        .hosts
        .host_certificate(&asked.host_key, &principals, SystemTime::now());
    let host = host.map_err(|error| Refusal::invalid("principals", error.to_string()))? + "\n";
    Ok(Signed {
        kubelet: read.ca.certify(&asked.certificate)?,
        host,
        principals,
    })
}

fn ticket(
    asked: &JoinRequest,
    read: Inputs,
    signed: Signed,
    token: zeroize::Zeroizing<String>,
) -> IssueJoinTicketResponse {
    let mut ticket = IssueJoinTicketResponse::default();
    ticket.state_disk_key = read.disk_key.expose().to_vec();
    ticket.measurement_salt = read.measurement_salt.expose().to_vec();
    ticket.measurement_secret = read.measurement_secret.expose().to_vec();
    ticket.kubelet_cert = signed.kubelet;
    ticket.api_server_endpoint = read.kubeadm.endpoint;
    ticket.token = token.to_string();
    ticket.discovery_token_ca_cert_hash = read.ca.pin;
    ticket.control_plane_files = read.control_plane_files;
    ticket.kubernetes_version = read.components.version.clone();
    ticket.kubernetes_components = read.components.list.clone().unwrap_or_default();
    ticket.authorized_ca_public_key = (read.ssh.users.line() + "\n").into_bytes();
    ticket.host_certificate = signed.host.into_bytes();
    if asked.accepts_cluster_ca {
        ticket.cluster_ca = read.ca.certificates;
    }
    ticket
}

/// Tasks that undo a ticket. They run in reverse order when this is dropped, unless they were
/// cleared.
struct Undo<'a> {
    cleaner: &'a Cleaner,
    tasks: Vec<Task>,
}

impl Undo<'_> {
    fn add(&mut self, task: Task) {
        self.tasks.push(task);
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        while let Some(task) = self.tasks.pop() {
            self.cleaner.undo(task);
        }
    }
}

/// The changes of the cluster that admit a node. They are undone when this is dropped before
/// [`Admission::finish`].
struct Admission<'a> {
    call: &'a Call,
    asked: &'a JoinRequest,
    claimant: Claimant<'a>,
    access: &'a ClusterAccess,
    /// The name of the list of components that the node installs.
    components: &'a str,
    /// The names and addresses in the SSH host certificate.
    principals: &'a [String],
    audit: &'a Audit,
    undo: Undo<'a>,
}

impl Admission<'_> {
    fn client(&self) -> Result<Client, Refusal> {
        within_call(self.access.cluster.client(), self.call)
    }

    /// Reserves the turn of a control plane, and announces the node.
    fn reserve(&mut self) -> Result<(), Refusal> {
        let ClusterAccess { cluster, cleaner } = self.access;
        let (node, components) = (self.asked.node(), self.components);
        // An older JoiningNode may belong to a ticket that is still valid.
        let is_new = match self.asked.control_plane {
            true => {
                let reserve =
                    || reservation::reserve(cluster, cleaner, &self.client()?, node, components);
                let reserved = self.audit.step("reserve", reserve)?;
                self.undo.tasks.extend(reserved.undo());
                !reserved.renewed
            }
            false => cluster
                .record(&machine_record::name_of_node(node))
                .is_none(),
        };
        if cluster.has_joining_nodes() {
            if is_new {
                let name = joining_node::name(node, self.asked.control_plane);
                self.undo.add(Task::JoiningNode(name.into(), node.into()));
            }
            if !self.asked.control_plane {
                joining_node::announce_worker(&self.client()?, node, components)?;
            }
        }
        Ok(())
    }

    /// Records which machine has this name and disk. Returns the record.
    fn record(&mut self) -> Result<Record, Refusal> {
        let ClusterAccess { cluster, cleaner } = self.access;
        let Claimant { machine, direct } = self.claimant;
        let asked = self.asked;
        let present = cluster.node(asked.node());
        let record = Record {
            direct,
            control_plane: asked.control_plane,
            addresses: asked.addresses().to_vec(),
            host_key: asked.host_key.line(),
            principals: self.principals.to_vec(),
            ..Record::of_node(
                asked.node(),
                &asked.disk,
                machine,
                &tokens::id(),
                present.as_ref().map_or("", |node| &node.uid),
            )
        };
        let write = || records::write(cluster, cleaner, &self.client()?, record);
        let written = self.audit.step("record", write).inspect_err(|refusal| {
            // Another replica issues a ticket for the same node: the reservation now belongs to
            // that ticket.
            if refusal.reason == records::JUST_ISSUED {
                self.undo.tasks.clear();
            }
        })?;
        match &written.before {
            None => self.undo.add(Task::Record(
                written.record.name.clone(),
                written.record.token.clone(),
            )),
            // Each node has at most one valid token.
            Some(before) if !before.token.is_empty() => {
                cleaner.add(Task::Token(before.token.clone()))
            }
            Some(_) => {}
        }
        Ok(written.record)
    }

    /// Creates the bootstrap token whose ID is in the record.
    fn token(&mut self, record: &Record) -> Result<zeroize::Zeroizing<String>, Refusal> {
        // The API server may have executed a create request whose answer was lost.
        self.undo.add(Task::Token(record.token.clone()));
        let (client, asked) = (self.client()?, self.asked);
        let create = || {
            tokens::create(
                &client,
                &record.token,
                asked.node(),
                !asked.accepts_cluster_ca,
            )
        };
        self.audit
            .step("token", create)
            .map_err(|error| Refusal::from_api(&error))
    }

    /// Keeps the changes.
    fn finish(mut self, record: &Record) {
        self.undo.tasks.clear();
        let ClusterAccess { cluster, cleaner } = self.access;
        cleaner.own_token_issued(record, cluster.node(self.asked.node()).as_ref());
    }
}

struct BusyNode<'a> {
    busy: &'a Mutex<HashSet<String>>,
    node: String,
}

impl Drop for BusyNode<'_> {
    fn drop(&mut self) {
        self.busy
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.node);
    }
}
