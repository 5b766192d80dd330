//! The validator of machines of this cluster. They meet the attestation policy, and their PCR 15
//! contains the cluster's ID.
//!
//! The ID depends on a secret that every worker has. So it does not distinguish a control plane
//! from a worker; [`grants`](super::grants) limits what members get.
//!
//! Both ends use this check. The key service computes the ID from the master secret. A client
//! cannot, because the measurement secret is one of the keys that it asks for. It uses the value of
//! its own PCR 15, which must be equal to that of the key service.
//!
//! The join service asks members for fresh evidence ([`crate::join_service::watch`]). It knows the ID.
//!
//! The policy is read for each handshake. Between the services there is one after each start; the watch
//! makes some in a second, and the file is small.

use base::crypto::CLUSTER_ID_LEN;
use base::sync::lock;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::policy_file::{self, Error, Loaded};
use verifier::sources::Sources;
use verifier::{
    Challenge, ClusterRegister, Evidence, Identified, Identity, Policy, Properties, Refusal, Stage,
    Validator, Variant,
};

/// Accepts machines of the cluster.
pub struct Members(Mutex<Loaded>);

impl Members {
    /// Creates a validator for the policy in this directory and this value of PCR 15. Fails if the
    /// policy is not valid.
    pub fn new(
        variant: &'static Variant,
        config_dir: &Path,
        register: ClusterRegister,
        sources: Arc<dyn Sources>,
    ) -> Result<Members, Error> {
        let expecting = move |policy: Policy| policy.expecting(&register);
        Members::open(variant, config_dir, expecting, sources)
    }

    /// Creates a validator for the policy in this directory and the cluster with this ID.
    pub fn of_cluster(
        variant: &'static Variant,
        config_dir: &Path,
        id: [u8; CLUSTER_ID_LEN],
        sources: Arc<dyn Sources>,
    ) -> Result<Members, Error> {
        let expecting = move |policy: Policy| policy.expecting_cluster(&id);
        Members::open(variant, config_dir, expecting, sources)
    }

    fn open(
        variant: &'static Variant,
        config_dir: &Path,
        expecting: impl Fn(Policy) -> Policy + Send + 'static,
        sources: Arc<dyn Sources>,
    ) -> Result<Members, Error> {
        let parse = move |text: &str| {
            let policy = Policy::from_json(text)?;
            let policy = expecting(policy.at(Stage::Booted));
            Ok(endorsement::validator(variant, policy, &sources)?)
        };
        let file = Loaded::open(&config_dir.join(policy_file::NAME), Box::new(parse))?;
        Ok(Members(Mutex::new(file)))
    }

    fn current(&self) -> Arc<dyn Validator> {
        // The lock is held only while a small file is read.
        let mut file = lock(&self.0);
        if file.reload().is_some() {
            file.log_new();
        }
        file.validator()
    }
}

impl Validator for Members {
    fn properties(&self) -> Properties {
        self.current().properties()
    }

    fn challenge(&self, peer: &Identity) -> Result<Option<Challenge>, Refusal> {
        self.current().challenge(peer)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.current().judge(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        Some(self.current())
    }
}
