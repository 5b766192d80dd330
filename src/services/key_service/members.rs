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
//! The member controller asks members for fresh evidence ([`crate::member_controller::watch`]). It knows the ID.
//!
//! The policy is read for each handshake. Between the services there is one after each start; the watch
//! makes some in a second, and the file is small.

use base::crypto::CLUSTER_ID_LEN;
use base::sync::lock;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::policy_file::{self, Error, Loaded};
use crate::policy_operators::PolicyOperators;
use verifier::sources::Sources;
use verifier::{Changing, ClusterRegister, Policy, Stage, Validator, Variant};

/// Accepts machines of the cluster.
pub struct Members {
    variant: &'static Variant,
    state: Mutex<State>,
}

struct State {
    file: Loaded,
    in_force: Arc<InForce>,
}

/// The policy by which a machine is judged.
pub struct InForce {
    /// Judges by it, and does not change.
    pub validator: Arc<dyn Validator>,
    /// The SHA-256 digest of its file, in hexadecimal digits.
    pub digest: Arc<str>,
    /// Why the policy accepts unknown software or an unknown TPM, as a clause; `None` if it pins
    /// both.
    pub open: Option<String>,
}

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
        Members::open(variant, config_dir, None, expecting, sources)
    }

    /// Creates a validator for the policy in this directory, which the operators must have signed, and the cluster with this ID.
    pub fn of_cluster(
        variant: &'static Variant,
        config_dir: &Path,
        operators: PolicyOperators,
        id: [u8; CLUSTER_ID_LEN],
        sources: Arc<dyn Sources>,
    ) -> Result<Members, Error> {
        let expecting = move |policy: Policy| policy.expecting_cluster(&id);
        Members::open(variant, config_dir, Some(operators), expecting, sources)
    }

    fn open(
        variant: &'static Variant,
        config_dir: &Path,
        operators: Option<PolicyOperators>,
        expecting: impl Fn(Policy) -> Policy + Send + 'static,
        sources: Arc<dyn Sources>,
    ) -> Result<Members, Error> {
        let parse = move |text: &str| {
            let policy = Policy::from_json(text)?;
            let policy = expecting(policy.at(Stage::Booted));
            Ok(endorsement::validator(variant, policy, &sources)?)
        };
        let path = config_dir.join(policy_file::NAME);
        let file = Loaded::open(&path, operators, Box::new(parse))?;
        let in_force = in_force(variant, &file);
        let state = Mutex::new(State { file, in_force });
        Ok(Members { variant, state })
    }

    /// Returns the policy in force. Reads its file.
    pub fn in_force(&self) -> Arc<InForce> {
        // The lock is held only while a small file is read.
        let mut state = lock(&self.state);
        if state.file.reload().is_some() {
            state.file.log_new();
            state.in_force = in_force(self.variant, &state.file);
        }
        state.in_force.clone()
    }
}

fn in_force(variant: &Variant, file: &Loaded) -> Arc<InForce> {
    let validator = file.validator();
    // the text was parsed before, so there is a policy
    let image = match Policy::from_json(file.text()) {
        Ok(policy) => variant.flaws(&policy).into_iter().map(|it| it.why).next(),
        Err(error) => Some(error.to_string()),
    };
    let open = if validator.properties().believes_any_tpm {
        Some(
        "any TPM is accepted, and so is a program that only simulates one (no attestationKeys or endorsementRoots, and no \
         platform endorses the keys)"
            .into(),
    )
    } else {
        image
    };
    Arc::new(InForce {
        validator,
        digest: file.digest().clone(),
        open,
    })
}

impl Changing for Members {
    fn current(&self) -> Arc<dyn Validator> {
        self.in_force().validator.clone()
    }
}
