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
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use zeroize::Zeroizing;

use super::admission::{Admission, ClusterAccess, image_of};
use super::admission_queue::AdmissionQueue;
use super::audit::{Audit, TicketCaller};
use super::claimed_machine;
use super::cleaner::CleanerTask;
use super::file_records::FileRecords;
use super::node_files::NodeFiles;
use super::pki::{Ca, Pki};
use super::policy::PolicyFile;
use super::records::{self, Claimant};
use super::request::{self, JoinRequest};
use super::tokens;
use crate::cluster::instances::Instances;
use crate::cluster::refusal::TicketRefusal;
use crate::cluster::secrets::{Secrets, SshAuthorities};
use crate::cluster::{Cluster, Components, KubeadmSettings};
use base::crypto::Secret;
use base::sync::{Mutex, lock};
use base::uuid::Uuid;
use kubernetes::services::migration::Migration;
use proto::join::{
    ControlPlaneCertOrKey, IssueJoinTicketRequest, IssueJoinTicketResponse,
    IssueRejoinTicketRequest, IssueRejoinTicketResponse,
};
use rpc::grpc::{Call, Code, Status};
use ssh::PublicKey;
use ssh::operators::Newest;
use verifier::{Claims, Stage};

/// How long the answer that a member controller is ready counts, and when a node that was refused without one asks again.
const APPROVER_VALIDITY: Duration = Duration::from_secs(10);
const NO_APPROVER: Duration = Duration::from_secs(10);
/// How long a request after the start waits until the state of the cluster is known.
const STARTUP_WAIT: Duration = Duration::from_secs(5);

/// Issues tickets.
pub struct Tickets {
    secrets: Arc<Secrets>,
    pki: Pki,
    instances: Arc<Instances>,
    cluster: Option<ClusterAccess>,
    /// The records of a service without a cluster.
    files: Option<FileRecords>,
    /// The operator's files for new nodes.
    node_files: Option<NodeFiles>,
    audit: Arc<Audit>,
    /// When a member controller was last seen to be ready.
    approver_seen: Mutex<Option<Instant>>,
    /// The callers of IssueJoinTicket.
    queue: Arc<AdmissionQueue>,
    /// The policy under which callers connected.
    policy: Option<Arc<PolicyFile>>,
    migration: Migration,
}

/// The parts of a ticket that are collected before the cluster is changed.
struct Inputs {
    disk_key: Secret,
    measurement_secret: Secret,
    measurement_salt: Secret,
    ssh: Arc<SshAuthorities>,
    components: Arc<Components>,
    kubeadm: KubeadmSettings,
    ca: Ca,
    control_plane_files: Vec<ControlPlaneCertOrKey>,
    node_files: Vec<ControlPlaneCertOrKey>,
    /// Of a control plane; `None` in a cluster of an earlier version.
    wrapping_key: Option<Secret>,
    /// Of a control plane: the list of the operators who sign policies, and their newest policy.
    operators: Option<(String, Newest)>,
}

/// The signed parts of a ticket.
struct Signed {
    kubelet: Vec<u8>,
    /// Empty for a machine of an earlier version.
    kubelet_client: Vec<u8>,
    /// The SSH host certificate; empty for a machine that sent no host key.
    host: String,
    /// The names and addresses in the SSH host certificate.
    principals: Vec<String>,
}

impl Tickets {
    /// Returns the source of keys.
    pub fn secrets(&self) -> Arc<Secrets> {
        self.secrets.clone()
    }

    /// Creates the issuer. Without a cluster, it issues rejoin tickets only, for any disk.
    pub fn new(
        secrets: Arc<Secrets>,
        pki: Pki,
        instances: Arc<Instances>,
        cluster: Option<ClusterAccess>,
        audit: Arc<Audit>,
        migration: Migration,
    ) -> Tickets {
        Tickets {
            secrets,
            pki,
            instances,
            cluster,
            files: None,
            node_files: None,
            audit,
            approver_seen: Mutex::default(),
            queue: Arc::default(),
            policy: None,
            migration,
        }
    }

    /// Restricts tickets to callers whose connection was accepted under the present policy.
    pub fn with_policy(self, policy: Arc<PolicyFile>) -> Tickets {
        Tickets {
            policy: Some(policy),
            ..self
        }
    }

    /// Shares the callers of IssueJoinTicket with the connections that are closed before their
    /// handshake.
    pub fn with_queue(self, queue: Arc<AdmissionQueue>) -> Tickets {
        Tickets { queue, ..self }
    }

    /// Gives each disk to the machine in these records only. For a service without a cluster.
    pub fn with_files(self, files: Option<FileRecords>) -> Tickets {
        Tickets { files, ..self }
    }

    /// Sends these files in each join ticket.
    pub fn with_node_files(self, files: NodeFiles) -> Tickets {
        Tickets {
            node_files: Some(files),
            ..self
        }
    }

    /// Issues a join ticket: admits a new node.
    pub fn join(
        &self,
        call: &Call,
        request: &IssueJoinTicketRequest,
    ) -> Result<IssueJoinTicketResponse, Status> {
        let mut subject = TicketCaller::new("join", call);
        subject.role = if request.is_control_plane {
            "control-plane"
        } else {
            "worker"
        };
        let mut slot = match self.queue.enter() {
            Ok(slot) => slot,
            Err(pause) => {
                self.audit.busy(&subject);
                let message = "too many nodes ask for a ticket at the moment: try again";
                let status = Status::new(Code::ResourceExhausted, message);
                return Err(status.with_retry_after(pause));
            }
        };
        let is_migrating = self.migration.is_on(SystemTime::now());
        let asked = JoinRequest::validate(request, is_migrating);
        let issued = asked
            .as_ref()
            .map_err(TicketRefusal::clone)
            .and_then(|asked| {
                (subject.node, subject.disk) = (asked.node(), asked.disk.as_str());
                let note = match asked.host_key {
                    Some(_) => "",
                    None => "without an SSH host certificate: the machine sent no host key",
                };
                Ok((self.issue_join(call, asked)?, note))
            });
        if issued.is_ok() {
            slot.ticket_issued();
        }
        self.audit.decided(&subject, issued)
    }

    /// Issues a rejoin ticket: lets a node that boots again open its disk.
    pub fn rejoin(
        &self,
        call: &Call,
        request: &IssueRejoinTicketRequest,
    ) -> Result<IssueRejoinTicketResponse, Status> {
        let mut subject = TicketCaller::new("rejoin", call);
        let disk = request::disk(&request.disk_uuid);
        let issued = disk
            .as_ref()
            .map_err(TicketRefusal::clone)
            .and_then(|disk| {
                subject.disk = disk.as_str();
                self.issue_rejoin(call, disk)
            });
        self.audit.decided(&subject, issued)
    }

    /// Runs the steps of the module's picture for a new node.
    fn issue_join(
        &self,
        call: &Call,
        asked: &JoinRequest,
    ) -> Result<IssueJoinTicketResponse, TicketRefusal> {
        self.check_caller(call, Some(Stage::Booted))?;
        let access = self.attached()?;
        let claimant = self.check_machine(call, asked, &access.cluster)?;
        // This machine may have the name. An earlier lock would let any machine block the node.
        let _busy = access.mark_busy(asked.node())?;
        let collect = || self.collect(call, asked, &access.cluster);
        let inputs = self.audit.step("read", collect)?;
        let signed = self.audit.step("sign", || sign(asked, &inputs))?;
        self.check_approver(call, access)?;
        self.check_caller(call, Some(Stage::Booted))?;
        let mut admission = Admission::new(call, asked, access, &self.audit);
        admission.reserve(&inputs.components.name)?;
        let record = admission.record(claimant, &signed.principals)?;
        let token = admission.token(&record)?;
        self.check_caller(call, Some(Stage::Booted))?;
        admission.finish(&record);
        Ok(ticket(asked, inputs, signed, token))
    }

    /// Runs the steps of the module's picture for a node that boots again. Also returns a remark for
    /// the operator, or an empty one.
    fn issue_rejoin(
        &self,
        call: &Call,
        disk: &Uuid,
    ) -> Result<(IssueRejoinTicketResponse, &'static str), TicketRefusal> {
        // the booted system opens a data volume, so its key is for every stage of the boot
        let stage = (self.files.is_none()).then_some(Stage::Initramfs);
        self.check_caller(call, stage)?;
        let machine = call.identity().map(|machine| &**machine);
        let is_migrating = self.migration.is_on(SystemTime::now());
        let (record, mut note) = match &self.cluster {
            None if let Some(files) = &self.files => {
                files.check(disk, machine)?;
                (None, "")
            }
            None => (None, "the owner of this disk was not checked: no cluster"),
            // The ticket is issued all the same: a whole cluster may be waiting for it to boot.
            Some(attached) if !attached.cluster.is_known_within(STARTUP_WAIT) => (
                None,
                "the owner of this disk was not checked: the Kubernetes API has not answered since the start",
            ),
            Some(attached) => {
                records::check_not_removed(&attached.cluster, None, machine)?;
                match records::check_rejoin(&*attached.cluster, disk, machine, is_migrating)? {
                    None => (None, ""),
                    record => (
                        record,
                        "the machine is now recorded as the owner of this disk",
                    ),
                }
            }
        };
        let mut ticket = IssueRejoinTicketResponse::default();
        let secret = self.secrets.measurement_secret(call.deadline())?;
        ticket.measurement_secret = secret.expose().to_vec();
        let key = self.secrets.disk_key(disk, call.deadline())?;
        ticket.state_disk_key = key.expose().to_vec();
        // a volume's machine knows the ID of its key broker, and needs the salt to compare it
        if is_migrating || self.files.is_some() {
            ticket.measurement_salt = self.secrets.measurement_salt()?.expose().to_vec();
        }
        self.check_caller(call, stage)?;
        if let Some(files) = &self.files {
            note = files.claim(disk, machine)?;
        }
        if let Some(attached) = &self.cluster {
            if let Some(record) = &record {
                attached.cluster.store_record_of_disk(record);
            }
            let image = image_of(call);
            let record = records::with_image(&attached.cluster, disk, image, record);
            if let Some(record) = record {
                attached.cleaner.add(CleanerTask::Write(Box::new(record)));
            }
        }
        ticket.host_certificate = self.renewed_host_certificate(call, disk);
        Ok((ticket, note))
    }

    /// Refuses a caller that is gone, a machine that attests itself at another stage of its boot,
    /// and a connection that was accepted under an older policy. The key of a node's disk is for the
    /// initramfs only, where no program of an attacker runs.
    fn check_caller(&self, call: &Call, expected: Option<Stage>) -> Result<(), TicketRefusal> {
        if call.is_cancelled() {
            return Err(TicketRefusal::gone());
        }
        let Some(claims) = call.claims::<Claims>() else {
            let message =
                "the caller sent no evidence: this service gives tickets only over attested TLS";
            return Err(TicketRefusal::denied("unproven", message));
        };
        if let (Some(stage), Some(expected)) = (claims.stage, expected)
            && stage != expected
        {
            let message =
                format!("this machine attests itself as {stage}: only {expected} gets this ticket");
            return Err(TicketRefusal::denied("wrong-stage", message));
        }
        match &self.policy {
            Some(policy) if !policy.holds_for(call.connected_at()) => {
                Err(TicketRefusal::temporary(
                    "policy-changed",
                    "the cluster's attestation policy changed since this connection was made: connect again",
                    Duration::from_secs(1),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the cluster, whose state must be known.
    fn attached(&self) -> Result<&ClusterAccess, TicketRefusal> {
        let access = self.cluster.as_ref().ok_or_else(|| {
            let message =
                "this join service has no access to the Kubernetes API: it issues rejoin tickets only, and no new node can join";
            TicketRefusal::missing("no-cluster", message)
        })?;
        if access.cluster.is_known_within(STARTUP_WAIT) {
            Ok(access)
        } else {
            Err(TicketRefusal::temporary(
                "api",
                "the Kubernetes API has not answered since the join service started: try again",
                Duration::from_secs(3),
            ))
        }
    }

    /// Checks that this machine may have the name, addresses, role and disk that it asks for.
    fn check_machine<'a>(
        &self,
        call: &'a Call,
        asked: &JoinRequest,
        cluster: &Cluster,
    ) -> Result<Claimant<'a>, TicketRefusal> {
        let peer = call.peer().map(|peer| peer.ip());
        let check = || claimed_machine::check(&self.instances, asked, peer);
        let claimant = Claimant {
            direct: self.audit.step("machine", check)?,
            machine: call.identity().map(|machine| &**machine),
        };
        records::check_not_removed(cluster, Some(asked.node()), claimant.machine)?;
        records::check_disk(cluster, &asked.disk, claimant.machine)?;
        records::check_name(cluster, asked.node(), claimant, SystemTime::now())?;
        Ok(claimant)
    }

    /// Collects the parts of a ticket. Changes nothing.
    fn collect(
        &self,
        call: &Call,
        asked: &JoinRequest,
        cluster: &Cluster,
    ) -> Result<Inputs, TicketRefusal> {
        let deadline = call.deadline();
        Ok(Inputs {
            components: cluster.components()?,
            kubeadm: kubeadm(asked, cluster)?,
            ca: self.pki.ca()?,
            control_plane_files: if asked.control_plane {
                self.pki.control_plane_files()?
            } else {
                Vec::new()
            },
            wrapping_key: if asked.control_plane {
                self.pki.wrapping_key()?
            } else {
                None
            },
            operators: if asked.control_plane {
                self.pki.operators()?
            } else {
                None
            },
            node_files: match &self.node_files {
                Some(files) => files.read()?,
                None => Vec::new(),
            },
            measurement_salt: self.secrets.measurement_salt()?,
            measurement_secret: self.secrets.measurement_secret(deadline)?,
            ssh: self.secrets.ssh(deadline)?,
            disk_key: self.secrets.disk_key(&asked.disk, deadline)?,
        })
    }

    /// Checks that somebody approves the kubelet's certificates. Otherwise the node would fail only
    /// after it is locked, and could not join again. One answer counts for all tickets of some time.
    fn check_approver(&self, call: &Call, access: &ClusterAccess) -> Result<(), TicketRefusal> {
        let seen = *lock(&self.approver_seen);
        if seen.is_some_and(|at| at.elapsed() < APPROVER_VALIDITY) {
            return Ok(());
        }
        if !tokens::are_served(&access.client(call)?)? {
            let message =
                "no member controller is ready, so nobody approves certificates of new kubelets";
            let details = "kubectl -n kube-system describe daemonset member-controller says why";
            let refusal = TicketRefusal::temporary("no-approver", message, NO_APPROVER);
            return Err(refusal.with_details(details));
        }
        *lock(&self.approver_seen) = Some(Instant::now());
        Ok(())
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
        let certify = || -> Result<String, Box<dyn Error>> {
            let key = PublicKey::from_line(&record.host_key)?;
            let hosts = &self.secrets.ssh(call.deadline())?.hosts;
            let line = hosts.host_certificate(&key, &record.principals, SystemTime::now())?;
            Ok(line + "\n")
        };
        certify().map(String::into_bytes).unwrap_or_else(|error| {
            log::warn!(
                "cannot renew the SSH host certificate of {}: {error}",
                record.node
            );
            Vec::new()
        })
    }
}

/// Returns the kubeadm configuration. Refuses a worker whose name or address is one of the API
/// server, because clients of the API server trust the node's certificate.
fn kubeadm(asked: &JoinRequest, cluster: &Cluster) -> Result<KubeadmSettings, TicketRefusal> {
    let kubeadm = cluster.kubeadm()?;
    if asked.control_plane {
        return Ok(kubeadm);
    }
    if kubeadm.is_served_under(asked.node()) {
        let message = format!(
            "{} is a name of the cluster's API server: rename the machine",
            asked.node()
        );
        return Err(TicketRefusal::denied("name-of-api-server", message));
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
            Err(TicketRefusal::denied("address", message))
        }
    }
}

fn sign(asked: &JoinRequest, inputs: &Inputs) -> Result<Signed, TicketRefusal> {
    let (host, principals) = match &asked.host_key {
        Some(key) => certify_host(key, asked, inputs)?,
        None => (String::new(), vec![]),
    };
    Ok(Signed {
        kubelet: inputs.ca.certify(&asked.certificate)?,
        kubelet_client: if asked.has_client_key {
            inputs.ca.certify_client(&asked.certificate)?
        } else {
            vec![]
        },
        host,
        principals,
    })
}

/// Returns the SSH host certificate of a machine, and the names in it.
fn certify_host(
    key: &PublicKey,
    asked: &JoinRequest,
    inputs: &Inputs,
) -> Result<(String, Vec<String>), TicketRefusal> {
    let mut principals = asked.principals.clone();
    // Control planes also have the names of the API server. A wildcard is valid in TLS certificates
    // only.
    if asked.control_plane {
        let further = inputs
            .kubeadm
            .names
            .iter()
            .filter(|name| ssh::is_principal(name));
        principals.extend(further.cloned());
    } else {
        principals.retain(|name| !inputs.kubeadm.is_served_under(name));
    }
    if principals.is_empty() {
        principals.push(asked.node().to_owned());
    }
    let mut seen = HashSet::new();
    principals.retain(|name| seen.insert(name.clone()));
    let hosts = &inputs.ssh.hosts;
    match hosts.host_certificate(key, &principals, SystemTime::now()) {
        Ok(line) => Ok((line + "\n", principals)),
        Err(error) => Err(TicketRefusal::invalid("principals", error.to_string())),
    }
}

fn ticket(
    asked: &JoinRequest,
    inputs: Inputs,
    signed: Signed,
    token: Zeroizing<String>,
) -> IssueJoinTicketResponse {
    let mut ticket = IssueJoinTicketResponse::default();
    ticket.state_disk_key = inputs.disk_key.expose().to_vec();
    ticket.measurement_salt = inputs.measurement_salt.expose().to_vec();
    ticket.measurement_secret = inputs.measurement_secret.expose().to_vec();
    ticket.kubelet_cert = signed.kubelet;
    ticket.kubelet_client_cert = signed.kubelet_client;
    ticket.api_server_endpoint = inputs.kubeadm.endpoint;
    ticket.token = token.to_string();
    ticket.discovery_token_ca_cert_hash = inputs.ca.pin;
    ticket.control_plane_files = inputs.control_plane_files;
    ticket.node_files = inputs.node_files;
    if let Some(key) = &inputs.wrapping_key {
        ticket.wrapping_key = key.expose().to_vec();
    }
    if let Some((list, newest)) = inputs.operators {
        ticket.policy_operators = list;
        ticket.policy_number = newest.number;
        ticket.policy_statement = newest.statement;
    }
    ticket.kubernetes_version = inputs.components.version.clone();
    ticket.kubernetes_components = inputs.components.list.clone().unwrap_or_default();
    ticket.authorized_ca_public_key = (inputs.ssh.users.line() + "\n").into_bytes();
    ticket.host_certificate = signed.host.into_bytes();
    if asked.accepts_cluster_ca {
        ticket.cluster_ca = inputs.ca.certificates;
    }
    ticket
}
