//! Policies whose registers differ between the stages of a boot.

use std::sync::Arc;

use super::policy::PolicyError;
use super::sources::Sources;
use super::{
    Challenge, Evidence, Identified, Identity, Policy, Properties, Stage, ValidateError, Validator,
    Variant,
};

/// Returns the validator of a policy for machines at any stage. It reports the stage
/// ([`Identified::stage`]) if the policy has registers that differ between the stages.
pub fn validator_at_any_stage(
    variant: &Variant,
    policy: Policy,
    sources: &Arc<dyn Sources>,
) -> Result<Arc<dyn Validator>, PolicyError> {
    if !policy.knows_stages() {
        return variant.validator_for(policy, sources);
    }
    let at = |stage| variant.validator_for(policy.clone().at(stage), sources);
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

/// Only the registers differ between the stages.
impl Validator for AtAnyStage {
    fn properties(&self) -> Properties {
        self.booted.properties()
    }

    fn challenge(&self, peer: &Identity) -> Result<Option<Challenge>, ValidateError> {
        self.booted.challenge(peer)
    }

    /// Returns what the validator of one of the stages returns.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        let at = |validator: &Arc<dyn Validator>, stage| {
            validator.judge(evidence).map(|identified| Identified {
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

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}
