//! The variants as a verifier uses them: the entries of the table, and what each validator can
//! check.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use attest::AttesterVariant as Attester;
use base::text::quoted;
use proto::attested::Collateral;

use super::policy::{Fault, OLD_SNP, OLD_TDX, PolicyError};
use super::sources::Sources;
use super::{KeyName, Measurement, Policy, Stage, Validator};
use tpm::{KeySource, Tpm};

/// An attestation variant: what a machine presents as evidence, and how a verifier judges it. The
/// file of the variant defines it.
pub struct Variant {
    /// The attester's side of the variant. A variant derefs to it.
    pub attester: &'static Attester,
    /// The requirements besides registers that its validator can check, by the names of a policy's
    /// members. A policy with other requirements is refused, because they would have no effect.
    pub judges: &'static [&'static [&'static str]],
    /// The attestation key of its machines; `None` if they have none, because the chip signs their
    /// registers.
    pub key: Option<KeySource>,
    /// Returns the launch digest of this machine, if its machines have no other register that shows
    /// what runs. Then a policy must require it.
    pub launch: Option<fn() -> Result<LaunchDigest, tpm::Error>>,
    /// Creates the validator of a policy, for [`Variant::validator_for`]. An error names what the
    /// policy lacks for this variant.
    pub(super) validator: fn(Policy, &Arc<dyn Sources>) -> MadeValidator,
    /// Returns the collateral for a document of this variant, or `None` if the sources do not have
    /// it; also `None` if the variant needs none.
    pub collateral: Option<FindCollateral>,
    /// Returns the registers of this machine, which is at this stage of its boot.
    pub measure: fn(&tpm::Location, Stage) -> Result<Measured, tpm::Error>,
}

/// Returns the collateral for a document from the sources; `None` if the sources do not have it, or
/// if this is not a document of the variant. Nothing in the document is verified.
pub type FindCollateral = fn(&[u8], &dyn Sources) -> Option<Collateral>;

/// MEASUREMENT in a report of SEV-SNP.
pub type LaunchDigest = [u8; 48];

/// The validator of a policy that contains everything that the variant needs.
pub type MadeValidator = Result<Arc<dyn Validator>, PolicyError>;

/// The registers of a machine, as measurements that are enforced. A register is missing if the
/// machine cannot tell its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// The values in the booted system.
    pub booted: BTreeMap<u32, Measurement>,
    /// The values in the initramfs of the same boot.
    pub initramfs: BTreeMap<u32, Measurement>,
}

/// The requirements that every variant with a TPM checks.
pub const KEYS: &[&str] = &[
    "attestationKeys",
    "endorsementRoots",
    "tpm.vendors",
    "secureBoot",
];
/// The requirement for machines whose cloud has made the attestation key: from a key in the owner hierarchy, as that of other
/// machines, a TPM hides the version of its firmware.
pub const FLOORS: &[&str] = &["tpm.floors"];
/// The requirements for a cloud's certificate or document about a machine.
pub const CLOUD: &[&str] = &["cloud.roots", "cloud.zones", "cloud.instances"];
/// The requirements that only Google's certificate can meet.
pub const OF_GOOGLE: &[&str] = &["cloud.projects"];
/// The registers that AWS signs, and the properties that EC2 returns for the instance.
pub const OF_AWS: &[&str] = &["cloud.sha384", "cloud.accounts"];
/// The requirements for SEV-SNP machines.
pub const SNP: &[&str] = &["snp", OLD_SNP];
/// The requirements for TDX machines.
pub const TDX: &[&str] = &["tdx", OLD_TDX];

impl Variant {
    /// Creates the validator of a policy. An error names what the policy lacks, or a requirement
    /// that this variant cannot check.
    pub fn validator_for(&self, policy: Policy, sources: &Arc<dyn Sources>) -> MadeValidator {
        if let Some(other) = policy.variant().filter(|it| *it != self.name) {
            let (other, own) = (quoted(other, 40), self.name);
            let why =
                format!("it is for the attestation variant {other}, but the machines have {own}");
            return Err(Fault::Variant.because(why));
        }
        let demanded = policy.demanded();
        match demanded.into_iter().find(|member| !self.judges(member)) {
            None => (self.validator)(policy, sources),
            Some(member) => Err(Fault::Variant.because(format!(
                "{member}: the attestation variant {} cannot check this requirement, so it would have no effect: remove it",
                self.name
            ))),
        }
    }

    /// Returns the Name of the attestation key of this machine, and creates the key if it does not
    /// exist; `None` if its machines have none.
    pub fn key_name(&self, location: &tpm::Location) -> Result<Option<KeyName>, tpm::Error> {
        let Some(source) = self.key else {
            return Ok(None);
        };
        let public = Tpm::open(location)?.attestation_key(source)?;
        Ok(Some(KeyName::of(&public)))
    }

    /// Returns the variant with another validator, such as one with other roots.
    pub const fn judged_by(
        self,
        validator: fn(Policy, &Arc<dyn Sources>) -> MadeValidator,
    ) -> Variant {
        Variant { validator, ..self }
    }

    /// Returns the variant of a machine with another launch digest.
    pub const fn launched_as(self, launch: fn() -> Result<LaunchDigest, tpm::Error>) -> Variant {
        let launch = Some(launch);
        Variant { launch, ..self }
    }

    /// Returns whether the validator checks the requirement in this member of a policy.
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
