//! What a variant is to a verifier: the entry of the table of variants, and what a validator can judge.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use attest::Variant as Attester;
use base::text::quoted;
use proto::attested::Collateral;

use super::policy::{OLD_SNP, OLD_TDX, PolicyError};
use super::sources::Sources;
use super::{Measurement, Policy, Stage, Validator};

/// An attestation variant: what a machine presents as evidence, and how a verifier judges it. The file of the variant defines it.
pub struct Variant {
    /// The attester's side of the variant. A variant derefs to it.
    pub attester: &'static Attester,
    /// What its validator judges beside the registers, by the names of a policy's members. A policy that demands more is refused: it
    /// would demand nothing.
    pub judges: &'static [&'static [&'static str]],
    /// Creates the validator of a policy, for [`Variant::validator_for`]. An error names what the policy lacks for this variant.
    pub(super) validator: fn(Policy, &Arc<dyn Sources>) -> MadeValidator,
    /// Returns what validators of a document of this variant need beside it, as the sources have it; `None` if nothing is needed.
    pub collateral: Option<FindCollateral>,
    /// Returns the registers of this machine, which is at this stage of its boot.
    pub measure: fn(&tpm::Location, Stage) -> Result<Measured, tpm::Error>,
}

/// Finds in the sources what validators of a document need beside it; `None` if the sources have nothing, or if it is no document of the
/// variant. Nothing of the document is verified.
pub type FindCollateral = fn(&[u8], &dyn Sources) -> Option<Collateral>;

/// The validator of a policy that has all that the variant needs.
pub type MadeValidator = Result<Arc<dyn Validator>, PolicyError>;

/// The registers of a machine, as measurements that are enforced. A register is missing if the machine cannot tell its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// The values in the booted system.
    pub booted: BTreeMap<u32, Measurement>,
    /// The values in the initramfs of the same boot.
    pub initramfs: BTreeMap<u32, Measurement>,
}

/// What every variant with a TPM judges.
pub const KEYS: &[&str] = &["attestationKeys", "endorsementRoots"];
/// What a cloud's certificate or document says of a machine.
pub const CLOUD: &[&str] = &["cloud.roots", "cloud.zones", "cloud.instances"];
/// What Google's certificate says beside that.
pub const OF_GOOGLE: &[&str] = &["cloud.projects"];
/// The registers that AWS signs, and what EC2 says of the instance.
pub const OF_AWS: &[&str] = &["cloud.sha384", "cloud.accounts"];
/// What is demanded of SEV-SNP machines.
pub const SNP: &[&str] = &["snp", OLD_SNP];
/// What is demanded of TDX machines.
pub const TDX: &[&str] = &["tdx", OLD_TDX];

impl Variant {
    /// Creates the validator of a policy. An error names what the policy lacks, or what it demands and no machine of this variant proves.
    pub fn validator_for(&self, policy: Policy, sources: &Arc<dyn Sources>) -> MadeValidator {
        if let Some(other) = policy.variant().filter(|it| *it != self.name) {
            let (other, own) = (quoted(other, 40), self.name);
            let why =
                format!("it is for the attestation variant {other}, and the machines have {own}");
            return Err(PolicyError(why));
        }
        let demanded = policy.demanded();
        match demanded.into_iter().find(|member| !self.judges(member)) {
            None => (self.validator)(policy, sources),
            Some(member) => Err(PolicyError(format!(
                "{member}: machines with the attestation variant {} prove nothing of it, so nothing would be demanded: remove it",
                self.name
            ))),
        }
    }

    /// Returns the variant with another validator, such as one with other roots.
    pub const fn judged_by(
        self,
        validator: fn(Policy, &Arc<dyn Sources>) -> MadeValidator,
    ) -> Variant {
        Variant { validator, ..self }
    }

    /// Returns whether the validator judges what this member of a policy demands.
    pub fn judges(&self, member: &str) -> bool {
        self.judges
            .iter()
            .flat_map(|group| *group)
            .any(|it| *it == member)
    }
}

impl Deref for Variant {
    type Target = Attester;

    fn deref(&self) -> &Attester {
        self.attester
    }
}

impl fmt::Debug for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
