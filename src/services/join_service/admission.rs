//! The changes of the cluster that admit a node: its reservation, its record and its token.

use base::sync::lock;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::audit::Audit;
use super::cleaner::{Cleaner, CleanerTask};
use super::records::{self, Claimant};
use super::request::JoinRequest;
use super::{reservation, tokens};
use crate::cluster::refusal::TicketRefusal;
use crate::cluster::{Cluster, constellation as joining_node};
use kubernetes::client::Client;
use kubernetes::machine_record::{self, MachineRecord};
use rpc::grpc::Call;
use verifier::Claims;

/// The timeout of an API call within a ticket. Callers wait 30 s.
const API_TIMEOUT: Duration = Duration::from_secs(8);
/// Time that is reserved to send the answer. A refusal that arrives tells the caller when to try
/// again.
const ANSWER_RESERVE: Duration = Duration::from_secs(1);

/// Access to the cluster.
pub struct ClusterAccess {
    /// The state of the cluster.
    pub cluster: Arc<Cluster>,
    /// The thread that removes the leftovers of tickets.
    pub cleaner: Arc<Cleaner>,
    /// The nodes whose ticket is being issued.
    busy: Mutex<HashSet<String>>,
}

impl ClusterAccess {
    /// Uses this state, and this cleaner.
    pub fn new(cluster: Arc<Cluster>, cleaner: Arc<Cleaner>) -> ClusterAccess {
        ClusterAccess {
            cluster,
            cleaner,
            busy: Mutex::default(),
        }
    }

    /// Returns a client whose timeout is the caller's remaining time.
    pub fn client(&self, call: &Call) -> Result<Client, TicketRefusal> {
        let soon = Instant::now() + ANSWER_RESERVE;
        let left = call.deadline().map_or(API_TIMEOUT, |deadline| {
            deadline.saturating_duration_since(soon)
        });
        if !left.is_zero() {
            Ok(self.cluster.client().within(left.min(API_TIMEOUT)))
        } else {
            Err(TicketRefusal::temporary(
                "api",
                "the deadline of the call has passed: try again",
                Duration::from_secs(3),
            ))
        }
    }

    /// Refuses a second ticket for a node while the first one is being issued.
    pub fn mark_busy<'a>(&'a self, node: &'a str) -> Result<BusyNode<'a>, TicketRefusal> {
        if self.busy().insert(node.to_owned()) {
            Ok(BusyNode(self, node))
        } else {
            Err(TicketRefusal::temporary(
                records::JUST_ISSUED,
                "another ticket for this node is being issued",
                Duration::from_secs(2),
            ))
        }
    }

    fn busy(&self) -> MutexGuard<'_, HashSet<String>> {
        lock(&self.busy)
    }
}

/// Returns the ID of the image that the caller runs, or an empty text.
pub fn image_of(call: &Call) -> String {
    let image = call.claims::<Claims>().and_then(|it| it.image.as_deref());
    image.unwrap_or_default().into()
}

/// A node whose ticket is being issued, until this is dropped.
pub struct BusyNode<'a>(&'a ClusterAccess, &'a str);

impl Drop for BusyNode<'_> {
    fn drop(&mut self) {
        self.0.busy().remove(self.1);
    }
}

/// The changes for one ticket. They are undone when this is dropped before
/// [`Admission::finish`].
pub struct Admission<'a> {
    call: &'a Call,
    asked: &'a JoinRequest,
    access: &'a ClusterAccess,
    audit: &'a Audit,
    undo: Vec<CleanerTask>,
}

impl<'a> Admission<'a> {
    /// Begins without a change.
    pub fn new(
        call: &'a Call,
        asked: &'a JoinRequest,
        access: &'a ClusterAccess,
        audit: &'a Audit,
    ) -> Admission<'a> {
        Admission {
            call,
            asked,
            access,
            audit,
            undo: Vec::new(),
        }
    }

    /// Reserves the turn of a control plane, and announces the node, which installs the components
    /// of this name.
    pub fn reserve(&mut self, components: &str) -> Result<(), TicketRefusal> {
        let ClusterAccess {
            cluster, cleaner, ..
        } = self.access;
        let node = self.asked.node();
        // An older JoiningNode may belong to a ticket that is still valid.
        let is_new = if self.asked.control_plane {
            let reserve = || {
                reservation::reserve(
                    cluster,
                    cleaner,
                    &self.access.client(self.call)?,
                    node,
                    components,
                )
            };
            let reserved = self.audit.step("reserve", reserve)?;
            self.undo.extend(reserved.undo());
            !reserved.renewed
        } else {
            cluster
                .record(&machine_record::name_of_node(node))
                .is_none()
        };
        if cluster.has_joining_nodes() {
            if is_new {
                let name = joining_node::name(node, self.asked.control_plane);
                self.undo
                    .push(CleanerTask::JoiningNode(name.into(), node.into()));
            }
            if !self.asked.control_plane {
                joining_node::announce_worker(&self.access.client(self.call)?, node, components)?;
            }
        }
        Ok(())
    }

    /// Records that the claimant has this name and disk, and the names in its SSH host certificate.
    /// Returns the record.
    pub fn record(
        &mut self,
        claimant: Claimant,
        principals: &[String],
    ) -> Result<MachineRecord, TicketRefusal> {
        let ClusterAccess {
            cluster, cleaner, ..
        } = self.access;
        let asked = self.asked;
        let present = cluster.node(asked.node());
        let record = MachineRecord {
            direct: claimant.direct,
            control_plane: asked.control_plane,
            addresses: asked.addresses().to_vec(),
            host_key: asked
                .host_key
                .as_ref()
                .map_or_else(String::new, |key| key.line()),
            client_key: asked.client_key(),
            principals: principals.to_vec(),
            image: image_of(self.call),
            ..MachineRecord::of_node(
                asked.node(),
                &asked.disk,
                claimant.machine,
                &tokens::id(),
                present.as_ref().map_or("", |node| &node.uid),
            )
        };
        let write = || records::write(cluster, cleaner, &self.access.client(self.call)?, record);
        let written = self.audit.step("record", write).inspect_err(|refusal| {
            // Another replica issues a ticket for the same node: the reservation now belongs to
            // that ticket.
            if refusal.reason == records::JUST_ISSUED {
                self.undo.clear();
            }
        })?;
        match &written.before {
            None => self.undo.push(CleanerTask::MachineRecord(
                written.record.name.clone(),
                written.record.token.clone(),
            )),
            // Each node has at most one valid token.
            Some(before) if !before.token.is_empty() => {
                cleaner.add(CleanerTask::Token(before.token.clone()))
            }
            Some(_) => {}
        }
        Ok(written.record)
    }

    /// Creates the bootstrap token whose ID is in the record.
    pub fn token(&mut self, record: &MachineRecord) -> Result<Zeroizing<String>, TicketRefusal> {
        // The API server may have executed a create request whose answer was lost.
        self.undo.push(CleanerTask::Token(record.token.clone()));
        let (client, asked) = (self.access.client(self.call)?, self.asked);
        let may_sign = !asked.accepts_cluster_ca;
        let create = || tokens::create(&client, &record.token, asked.node(), may_sign);
        Ok(self.audit.step("token", create)?)
    }

    /// Keeps the changes.
    pub fn finish(mut self, record: &MachineRecord) {
        self.undo.clear();
        let present = self.access.cluster.node(self.asked.node());
        self.access
            .cleaner
            .own_token_issued(record, present.as_ref());
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        while let Some(task) = self.undo.pop() {
            self.access.cleaner.undo(task);
        }
    }
}
