//! The requirements for a machine, and the source of its evidence.

use std::path::PathBuf;
use std::sync::Arc;

use crate::shell::error::Error;
use crate::workspace::{connect::Endpoint, sources::sources};
use base::crypto::CLUSTER_ID_LEN;
use verifier::{Policy, Validator, Variant};

/// Where evidence comes from.
#[derive(Debug)]
pub enum EvidenceSource {
    /// A server of a node, or a join service, over attested TLS.
    Server(Endpoint),
    /// A verification service of Constellation, without TLS.
    Plain(Endpoint),
    /// A file that this command wrote earlier.
    File(PathBuf),
}

impl std::fmt::Display for EvidenceSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EvidenceSource::Server(endpoint) | EvidenceSource::Plain(endpoint) => endpoint.fmt(f),
            EvidenceSource::File(path) => path.display().fmt(f),
        }
    }
}

/// The requirements for the machine.
pub struct MachineRequirements {
    /// How it attests itself.
    pub variant: &'static Variant,
    /// The registers and keys, with the cluster's ID in PCR 15.
    pub policy: Policy,
    /// The ID of its cluster; `None` if it must belong to none.
    pub cluster: Option<[u8; CLUSTER_ID_LEN]>,
}

impl MachineRequirements {
    /// Returns the validator that checks these requirements.
    pub fn validator(&self) -> Result<Arc<dyn Validator>, Error> {
        endorsement::validator(self.variant, self.policy.clone(), &sources())
            .map_err(Error::content)
    }
}
