//! Policies whose registers differ between the stages of a boot.

use std::mem;
use std::sync::Arc;

use super::policy::PolicyError;
use super::sources::Sources;
use super::{
    CredentialChallenge, Evidence, Identified, MachineIdentity, Policy, Properties, Refusal, Stage,
    Validator, Variant,
};

/// Returns the validator of a policy for machines at any stage. It reports the stage
/// ([`Identified::stage`]) if the policy has registers that differ between the stages. Fails if the policy does not say what its
/// machines run ([`Variant::check_worth`]).
pub fn validator_at_any_stage(
    variant: &Variant,
    policy: Policy,
    sources: &Arc<dyn Sources>,
) -> Result<Arc<dyn Validator>, PolicyError> {
    let of = |policy| variant.validator_for(policy, sources);
    let validator = if policy.knows_stages() {
        Arc::new(AtAnyStage {
            initramfs: of(policy.clone().at(Stage::Initramfs))?,
            booted: of(policy.clone().at(Stage::Booted))?,
        })
    } else {
        of(policy.clone())?
    };
    variant.check_worth(&policy)?;
    Ok(validator)
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

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.booted.challenge(peer)
    }

    /// Returns what the validator of one of the stages returns.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let at = |validator: &Arc<dyn Validator>, stage| {
            validator.judge(evidence).map(|identified| Identified {
                stage: Some(stage),
                ..identified
            })
        };
        at(&self.initramfs, Stage::Initramfs).or_else(|of_initramfs| {
            at(&self.booted, Stage::Booted).map_err(|mut of_booted| {
                if of_initramfs.text == of_booted.text {
                    return of_booted;
                }
                let text = format!(
                    "as {}: {of_initramfs}\nas {}: {of_booted}",
                    Stage::Initramfs,
                    Stage::Booted
                );
                let mut both = of_initramfs;
                both.text = text;
                // a flat list of all reasons
                let further = mem::take(&mut of_booted.others);
                let mut others = mem::take(&mut both.others).into_vec();
                others.push(of_booted);
                others.extend(further);
                both.others = others.into();
                both
            })
        })
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}
