//! The servers that a node can have, and their answers.

use proto::init;
use proto::recoverproto::{self, StatusResponse};
use rpc::grpc::Status;
use verifier::{KeyName, Refusal};

use crate::workspace::connect::{ClusterMembership, Unreached};

/// A service that a node can have. The server of a member has only the health service, and is not
/// in this list.
#[derive(PartialEq, Eq)]
pub struct NodeService {
    /// The name for `grpc.health.v1`.
    pub name: &'static str,
    /// The usual TCP port.
    pub port: u16,
    /// The name for people.
    pub title: &'static str,
    /// The state of a node that has this service.
    pub state: &'static str,
}

/// The services of our nodes, and of a control plane.
pub const SERVICES: [NodeService; 3] = [
    NodeService {
        name: "recoverproto.API",
        port: recoverproto::PORT,
        title: "recovery server",
        state: "in its initramfs, waiting for the key of its disk from a join service or `firstlight recover`",
    },
    NodeService {
        name: "init.API",
        port: init::PORT,
        title: "InitServer",
        state: "booted, not yet a member of a cluster, waiting for `firstlight init`",
    },
    NodeService {
        name: "join.API",
        port: JOIN_PORT,
        title: "join service",
        state: "a control plane of a cluster, which admits other nodes",
    },
];
/// The NodePort of the join services.
const JOIN_PORT: u16 = 30090;

/// The answer of one server.
pub enum ServerAnswer {
    /// No server answers, or the server does not speak attested TLS; the reason.
    Nobody(Unreached),
    /// The node does not meet the policy, or could not be judged: the kind of the refusal says which.
    Refused(Refusal),
    /// The server sends no evidence, but requires evidence from the caller.
    Guarded,
    /// The node meets the policy.
    Verified {
        /// The node's standing, as PCR 15 shows it.
        standing: ClusterMembership,
        /// The policy's image that has the node's registers; `None` if the evidence has none.
        image: Option<Box<str>>,
        /// The services that the server lists.
        services: Vec<&'static NodeService>,
        /// The name of the node's attestation key, if it has one.
        key: Option<KeyName>,
        /// What the node waits for in its initramfs.
        waiting: Option<StatusResponse>,
        /// The record of the node's boot.
        record: Result<String, Status>,
        /// Whether a time service has set the node's clock, if the node says so.
        has_set_clock: Option<bool>,
    },
}
