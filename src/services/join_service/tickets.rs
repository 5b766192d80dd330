//! The two requests.
//!
//! ```text
//! IssueJoinTicket
//!   check the form ─► the machine: name, addresses, role, disk ─► read: keys, version, endpoint, CA ─► sign
//!     ─► reserve (control planes) ─► record ─► token ─► ticket
//!         └────────────┴───────────────┴── what fails here, or nobody waits for, is taken back by the [cleaner](super::cleaner)
//! IssueRejoinTicket
//!   check the form ─► is it this machine's disk? ─► read: keys ─► ticket
//! ```
//!
//! So whatever may be refused is refused before anything is changed, and the token, which lets somebody in, is the last.

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
use super::request::{self, Asked};
use super::{reservation, tokens};
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

/// For one call of the API within a ticket: callers wait 30 s.
const API_TIME: Duration = Duration::from_secs(8);
/// For a refusal to reach its caller in time: one that says when to come again is better than none.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// How long a request waits until the cluster is known, after a start.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

/// Makes tickets.
pub struct Tickets {
    keys: Arc<KeyClient>,
    constants: Mutex<Constants>,
    config_dir: PathBuf,
    pki: Pki,
    instances: Arc<Instances>,
    cluster: Option<Attached>,
    audit: Arc<Audit>,
    /// Whether tokens are known to be of use in this cluster.
    tokens_are_served: AtomicBool,
    /// What callers met when they connected.
    policy: Option<Arc<PolicyFile>>,
    migration: Migration,
    /// Nodes whose ticket is being made.
    busy: Mutex<HashSet<String>>,
}

/// What is known of the cluster, and who takes things back in it.
pub struct Attached {
    /// Its state.
    pub cluster: Arc<Cluster>,
    /// The thread.
    pub cleaner: Arc<Cleaner>,
}

/// Keys that are the same for every ticket.
#[derive(Default)]
struct Constants {
    measurement_secret: Option<Secret>,
    ssh: Option<Arc<Ssh>>,
}

/// What tickets need of the cluster's two SSH authorities: nobody can log in anywhere by it.
struct Ssh {
    hosts: Authority,
    users: PublicKey,
}

/// What a ticket is made of before anything is changed.
struct Read {
    disk_key: Secret,
    measurement_secret: Secret,
    measurement_salt: Secret,
    ssh: Arc<Ssh>,
    components: Arc<Components>,
    kubeadm: Kubeadm,
    ca: Ca,
    control_plane_files: Vec<ControlPlaneCertOrKey>,
}

/// What a ticket has that was signed.
struct Signed {
    kubelet: Vec<u8>,
    host: String,
    /// What the host's key was certified for.
    principals: Vec<String>,
}

impl Tickets {
    /// Without a cluster there are only rejoin tickets, for any disk.
    pub fn new(
        keys: Arc<KeyClient>,
        config_dir: PathBuf,
        pki: Pki,
        instances: Arc<Instances>,
        cluster: Option<Attached>,
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

    /// Tickets only for callers whose connection was judged by the policy in force.
    pub fn judged_by(self, policy: Arc<PolicyFile>) -> Tickets {
        Tickets {
            policy: Some(policy),
            ..self
        }
    }

    /// Lets a new node in.
    pub fn join(
        &self,
        call: &Call,
        request: &IssueJoinTicketRequest,
    ) -> Result<IssueJoinTicketResponse, Status> {
        let (since, peer) = (Instant::now(), peer(call.peer()));
        let asked = Asked::check(request);
        let subject = Subject {
            request: "join",
            peer: &peer,
            node: asked.as_ref().map(Asked::node).unwrap_or_default(),
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

    /// Lets a node that boots again open its disk.
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

    /// Nothing is done for a caller that is gone, or was let in by another policy.
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
            return Err(Refusal::passing(
                "policy-changed",
                message,
                Duration::from_secs(1),
            ));
        }
        Ok(())
    }

    fn make_join(&self, call: &Call, asked: &Asked) -> Result<IssueJoinTicketResponse, Refusal> {
        self.check_caller(call)?;
        let attached = self.cluster.as_ref().ok_or_else(|| {
            let message =
                "this join service has no access to the cluster's API: it gives keys of disks, but lets no new node in";
            Refusal::lacking("no-cluster", message)
        })?;
        if !attached.cluster.is_known_within(KNOWN_WITHIN) {
            let message =
                "the cluster's API has not answered since the join service started: try again";
            return Err(Refusal::passing("api", message, Duration::from_secs(3)));
        }
        let machine = call.identity().map(|machine| &**machine);
        let peer = call.peer().map(|peer| peer.ip());
        let direct = self
            .audit
            .step("machine", || self.instances.check(asked, peer))?;
        let claimant = Claimant { machine, direct };
        records::check_disk(&attached.cluster, &asked.disk, machine)?;
        records::check_name(&attached.cluster, asked.node(), claimant, SystemTime::now())?;
        // not before it is known that the name may be this machine's: nobody else keeps it busy
        let _busy = self.begin(asked.node())?;
        let read = self
            .audit
            .step("read", || self.read(call, asked, &attached.cluster))?;
        let signed = self.audit.step("sign", || sign(asked, &read))?;
        self.check_rights(call, attached)?;
        self.check_caller(call)?;
        let token = self.enter(
            call,
            asked,
            claimant,
            attached,
            &read.components.name,
            &signed.principals,
        )?;
        Ok(ticket(asked, read, signed, token))
    }

    /// A token that is of no use would show after the node lock, when it is too late for the node.
    fn check_rights(&self, call: &Call, attached: &Attached) -> Result<(), Refusal> {
        if !self.tokens_are_served.load(Ordering::Relaxed) {
            let client = within_call(attached.cluster.client(), call)?;
            if !tokens::are_served(&client).map_err(|error| Refusal::of_api(&error))? {
                let inside = "this account may not approve client certificates of kubelets: apply the services of this version";
                return Err(Refusal::broken("api-refused", inside));
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
        let machine = call.identity().map(|machine| &**machine);
        let is_migrating = self.migration.is_on(SystemTime::now());
        let (record, note) = match &self.cluster {
            None => (
                None,
                "which machine has this disk was not looked at: no cluster",
            ),
            // a whole cluster may wait for this
            Some(attached) if !attached.cluster.is_known_within(KNOWN_WITHIN) => (
                None,
                "which machine has this disk was not looked at: the cluster's API has not answered since the start",
            ),
            Some(attached) => {
                let record = records::of_rejoin(&attached.cluster, disk, machine, is_migrating)?;
                let note = if record.is_some() {
                    "the machine is recorded with this disk from now on"
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
            attached.cluster.learn_of_disk(&record);
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

    /// For the machine that had its sshd's key certified when it joined with this disk; empty for any other. A node opens its
    /// disk without it, too.
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

    /// All that changes nothing.
    fn read(&self, call: &Call, asked: &Asked, cluster: &Cluster) -> Result<Read, Refusal> {
        Ok(Read {
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

    /// All that changes something; the token.
    fn enter(
        &self,
        call: &Call,
        asked: &Asked,
        Claimant { machine, direct }: Claimant,
        Attached { cluster, cleaner }: &Attached,
        components: &str,
        principals: &[String],
    ) -> Result<zeroize::Zeroizing<String>, Refusal> {
        let node = asked.node();
        let client = || within_call(cluster.client(), call);
        let mut undo = Undo {
            cleaner,
            tasks: Vec::new(),
        };
        // what it had before may belong to a ticket that counts
        let is_new = match asked.control_plane {
            true => {
                let reserve =
                    || reservation::reserve(cluster, cleaner, &client()?, node, components);
                let reserved = self.audit.step("reserve", reserve)?;
                undo.tasks.extend(reserved.undo());
                !reserved.renewed
            }
            false => cluster
                .record(&machine_record::name_of_node(node))
                .is_none(),
        };
        if cluster.has_joining_nodes() {
            if is_new {
                let name = reservation::joining_node_name(node, asked.control_plane);
                undo.add(Task::JoiningNode(name.into(), node.into()));
            }
            if !asked.control_plane {
                reservation::announce_worker(&client()?, node, components)?;
            }
        }
        let present = cluster.node(node);
        let record = Record {
            direct,
            control_plane: asked.control_plane,
            addresses: asked.addresses().to_vec(),
            host_key: asked.host_key.line(),
            principals: principals.to_vec(),
            ..Record::of_node(
                node,
                &asked.disk,
                machine,
                &tokens::id(),
                present.as_ref().map_or("", |node| &node.uid),
            )
        };
        let write = || records::write(cluster, cleaner, &client()?, record);
        let written = self.audit.step("record", write).inspect_err(|refusal| {
            // by another replica: what was reserved is for its ticket
            if refusal.word == records::JUST_MADE {
                undo.tasks.clear();
            }
        })?;
        match &written.before {
            None => undo.add(Task::Record(
                written.record.name.clone(),
                written.record.token.clone(),
            )),
            // one token for each node
            Some(before) if !before.token.is_empty() => {
                cleaner.add(Task::Token(before.token.clone()))
            }
            Some(_) => {}
        }
        // a create whose answer was lost may have been carried out
        undo.add(Task::Token(written.record.token.clone()));
        let client = client()?;
        let create = || {
            tokens::create(
                &client,
                &written.record.token,
                node,
                !asked.accepts_cluster_ca,
            )
        };
        let token = self
            .audit
            .step("token", create)
            .map_err(|error| Refusal::of_api(&error))?;
        self.check_caller(call)?;
        undo.tasks.clear();
        cleaner.token_is_ours(&written.record, cluster.node(node).as_ref());
        Ok(token)
    }

    fn begin(&self, node: &str) -> Result<Busy<'_>, Refusal> {
        match self
            .busy
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(node.to_owned())
        {
            true => Ok(Busy {
                busy: &self.busy,
                node: node.to_owned(),
            }),
            false => {
                let message = "another ticket for this node is being made";
                Err(Refusal::passing(
                    records::JUST_MADE,
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

    fn ssh(&self, call: &Call) -> Result<Arc<Ssh>, Refusal> {
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
                .map_err(|error| Refusal::broken("keys-refused", error.to_string()))
        };
        let users = self
            .keys
            .data_key(SSH_USER_CA_PUBLIC_ID, ED25519_BLOB_LEN, call.deadline());
        let users = match PublicKey::from_blob(users.map_err(keys_refusal)?.expose()) {
            Ok(key) => key,
            // the old system's key service knows no such id, and derives a key of it as of any other
            Err(_) => authority(SSH_USER_CA_SEED_ID)?.public().clone(),
        };
        let ssh = Arc::new(Ssh {
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
        keys::Error::Passing(inside) => {
            let message = "keys are not to be had at the moment: try again";
            Refusal::passing("keys", message, Duration::from_secs(2)).because(inside)
        }
        keys::Error::Lasting(inside) => Refusal::broken("keys-refused", inside),
    }
}

/// What is left of a caller's time, for each call of the API.
fn within_call(client: &Client, call: &Call) -> Result<Client, Refusal> {
    let soon = Instant::now() + ANSWER_TIME;
    let left = call.deadline().map_or(API_TIME, |deadline| {
        deadline.saturating_duration_since(soon)
    });
    match left.is_zero() {
        false => Ok(client.within(left.min(API_TIME))),
        true => Err(Refusal::passing(
            "api",
            "the time that the caller gave is up: try again",
            Duration::from_secs(3),
        )),
    }
}

/// A node's name and addresses become its certificate's, which clients of the API server trust.
fn kubeadm(asked: &Asked, cluster: &Cluster) -> Result<Kubeadm, Refusal> {
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

fn sign(asked: &Asked, read: &Read) -> Result<Signed, Refusal> {
    let mut principals = asked.principals.clone();
    // the API server's names are the control planes'; those with a wildcard are for TLS only
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
    asked: &Asked,
    read: Read,
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

/// Done in reverse unless cleared.
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

struct Busy<'a> {
    busy: &'a Mutex<HashSet<String>>,
    node: String,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.busy
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.node);
    }
}
