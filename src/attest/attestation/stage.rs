//! Policies whose registers differ between the stages of a boot.

use std::sync::Arc;

pub use base::boot::Stage;

use super::policy::PolicyError;
use super::sources::Sources;
use super::{Challenge, Identified, KeyName, Oid, Policy, ValidateError, Validator, Variant};
use crate::tpm::Endorsement;

/// Returns the validator of a policy for machines at any stage. It reports the stage ([`Identified::stage`]) if the policy has
/// registers that differ between the stages.
pub fn validator_at_any_stage(
    variant: &Variant,
    policy: Policy,
    sources: &Arc<dyn Sources>,
) -> Result<Arc<dyn Validator>, PolicyError> {
    if !policy.knows_stages() {
        return (variant.validator)(policy, sources);
    }
    let at = |stage| (variant.validator)(policy.clone().at(stage), sources);
    Ok(Arc::new(AtAnyStage {
        initramfs: at(Stage::Initramfs)?,
        booted: at(Stage::Booted)?,
    }))
}

/// Accepts a machine that meets the policy at one of the stages.
struct AtAnyStage {
    initramfs: Arc<dyn Validator>,
    booted: Arc<dyn Validator>,
}

impl AtAnyStage {
    /// Returns what the validator of one of the stages identifies.
    fn either(
        &self,
        identify: impl Fn(&dyn Validator) -> Result<Identified, ValidateError>,
    ) -> Result<Identified, ValidateError> {
        let at = |validator: &Arc<dyn Validator>, stage| {
            identify(&**validator).map(|identified| Identified {
                stage: Some(stage),
                ..identified
            })
        };
        at(&self.initramfs, Stage::Initramfs).or_else(|of_initramfs| {
            at(&self.booted, Stage::Booted).map_err(|of_booted| {
                let text = match of_initramfs.0 == of_booted.0 {
                    true => of_booted.0.to_string(),
                    false => format!(
                        "as {}: {of_initramfs}\nas {}: {of_booted}",
                        Stage::Initramfs,
                        Stage::Booted
                    ),
                };
                ValidateError(text.into())
            })
        })
    }
}

impl Validator for AtAnyStage {
    fn oid(&self) -> Oid {
        self.booted.oid()
    }

    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
        self.identify(document, nonce)
            .map(|identified| identified.user_data)
    }

    fn identify(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, ValidateError> {
        self.either(|validator| validator.identify(document, nonce))
    }

    /// The stages do not differ in the keys that are accepted.
    fn challenge(
        &self,
        key: &[u8],
        endorsements: &[Endorsement],
    ) -> Result<Option<Challenge>, ValidateError> {
        self.booted.challenge(key, endorsements)
    }

    fn challenges(&self) -> bool {
        self.booted.challenges()
    }

    fn identify_certified(
        &self,
        document: &[u8],
        nonce: &[u8],
        key: &KeyName,
    ) -> Result<Identified, ValidateError> {
        self.either(|validator| validator.identify_certified(document, nonce, key))
    }

    fn believes_any_tpm(&self) -> bool {
        self.booted.believes_any_tpm()
    }
}
